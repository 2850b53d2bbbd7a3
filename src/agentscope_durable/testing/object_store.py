"""The contract of an `ObjectStore`: every promise of the port, as tests.

A provider's whole test file is a subclass::

    class TestMyObjectStore(ObjectStoreContract):
        async def open(self, place: Path) -> ObjectStore:
            return MyObjectStore(place)

`damage` lets the suite check that wrong bytes are noticed; override it where a test can reach the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentscope_durable.contracts.bodies import object_digest
from agentscope_durable.contracts.errors import DigestMismatch, DurableError, HostClosed, NotFound
from agentscope_durable.spi.inspection import InspectedObjects
from agentscope_durable.spi.object_store import ObjectStore

SMALL = b'"small"'
LARGE = b"x" * 3_000_000


class ObjectStoreContract:
    """Subclass it, give it `open`, and every promise is checked under the name it has in the port."""

    pytestmark = pytest.mark.asyncio

    async def open(self, place: Path) -> ObjectStore:
        """Open a store at `place`. Called again for the same place, it opens the same objects again."""
        raise NotImplementedError

    async def damage(self, store: ObjectStore, partition: str, digest: str, content: bytes) -> None:
        """Replace the stored bytes behind the store's back."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncGenerator[ObjectStore]:
        store = await self.open(place)
        try:
            yield store
        finally:
            await store.close()

    async def test_what_was_put_is_got(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for content in (b"", SMALL, bytes(range(256)), LARGE):
                digest = object_digest(content)
                assert not await store.exists("p", digest)
                await store.put("p", digest, content)
                assert await store.exists("p", digest)
                assert await store.get("p", digest) == content

    async def test_immutable_putting_again_is_no_change(self, tmp_path: Path) -> None:
        digest = object_digest(SMALL)
        async with self.opened(tmp_path) as store:
            for _ in range(3):
                await store.put("p", digest, SMALL)

            assert await store.get("p", digest) == SMALL
            assert await store.list("p") == [digest]

    async def test_immutable_content_under_another_digest_is_refused(self, tmp_path: Path) -> None:
        digest = object_digest(SMALL)
        async with self.opened(tmp_path) as store:
            with pytest.raises(DigestMismatch):
                await store.put("p", digest, b"other")
            assert not await store.exists("p", digest)

            await store.put("p", digest, SMALL)
            with pytest.raises(DigestMismatch):
                await store.put("p", digest, b"other")
            assert await store.get("p", digest) == SMALL

    async def test_immutable_a_content_under_another_tag_is_another_object(self, tmp_path: Path) -> None:
        """A removal that comes late meets what it was meant for, and nothing that was put since."""
        digest = object_digest(SMALL)
        names = [digest, f"{digest}-0123456789abcdef", f"{digest}-fedcba9876543210"]
        async with self.opened(tmp_path) as store:
            for name in names:
                with pytest.raises(DigestMismatch):
                    await store.put("p", name, b"other")
                await store.put("p", name, SMALL)
            assert await store.list("p") == names
            assert await store.list("p", after=names[0], limit=1) == names[1:2]
            await store.delete("p", names[1])
            assert [await store.exists("p", name) for name in names] == [True, False, True]
            assert await store.get("p", names[2]) == SMALL
            with pytest.raises(NotFound):
                await store.get("p", names[1])

    async def test_verified_wrong_bytes_are_never_returned(self, tmp_path: Path) -> None:
        digest = object_digest(LARGE)
        for wrong in (b"", LARGE[:-1], LARGE + b"x", b"y" + LARGE[1:]):
            async with self.opened(tmp_path) as store:
                await store.put("p", digest, LARGE)
                await self.damage(store, "p", digest, wrong)
                with pytest.raises(DigestMismatch) as raised:
                    await store.get("p", digest)
                assert raised.value.expected == digest
                assert raised.value.actual == object_digest(wrong)
                await store.delete("p", digest)

    async def test_scoped_another_sessions_body_is_not_found(self, tmp_path: Path) -> None:
        digest = object_digest(SMALL)
        names = [
            "a",
            "A",
            "a/b",
            "a%2Fb",
            "../a",
            "..",
            "CON",
            "a.",
            "a ",
            "ä",
            "a\u0308",
            "a\x00b",
            "\U0001f600",
            "",
            "x" * 600,
        ]
        async with self.opened(tmp_path) as store:
            for name in names:
                await store.put(name, digest, SMALL)
                await store.put(name, object_digest(name.encode()), name.encode())
            for name in names:
                assert await store.list(name) == sorted({digest, object_digest(name.encode())})
                for other in names:
                    theirs = object_digest(other.encode())
                    assert await store.exists(name, theirs) == (name == other)
            with pytest.raises(NotFound):
                await store.get("a", object_digest(b"A"))

            await store.delete("a", digest)
            assert [name for name in names if not await store.exists(name, digest)] == ["a"]

    async def test_durable_what_was_put_is_there_after_opening_again(self, tmp_path: Path) -> None:
        digest = object_digest(LARGE)
        async with self.opened(tmp_path) as store:
            await store.put("p", digest, LARGE)
        async with self.opened(tmp_path) as store:
            assert await store.exists("p", digest) == store.persistent
            if store.persistent:
                assert await store.get("p", digest) == LARGE

    async def test_whole_a_reader_sees_all_of_it_or_nothing(self, tmp_path: Path) -> None:
        digest = object_digest(LARGE)
        async with self.opened(tmp_path) as store:
            putting = True
            seen: list[bytes] = []

            async def look() -> None:
                while putting:
                    await asyncio.sleep(0)
                    try:
                        seen.append(await store.get("p", digest))
                    except NotFound:
                        continue

            looking = asyncio.ensure_future(look())
            await asyncio.gather(*(store.put("p", digest, LARGE) for _ in range(8)))
            putting = False
            await looking
            assert all(content == LARGE for content in seen)
            assert await store.list("p") == [digest]

    async def test_deleting_is_repeatable(self, tmp_path: Path) -> None:
        digest = object_digest(SMALL)
        async with self.opened(tmp_path) as store:
            await store.delete("p", digest)
            await store.put("p", digest, SMALL)
            await store.delete("p", digest)
            await store.delete("p", digest)
            with pytest.raises(NotFound):
                await store.get("p", digest)
            await store.put("p", digest, SMALL)
            assert await store.get("p", digest) == SMALL

    async def test_digests_are_paged_in_order(self, tmp_path: Path) -> None:
        contents = [str(n).encode() for n in range(23)]
        digests = sorted(object_digest(content) for content in contents)
        async with self.opened(tmp_path) as store:
            for content in contents:
                await store.put("p", object_digest(content), content)
            await store.put("q", object_digest(b"elsewhere"), b"elsewhere")
            found: list[str] = []
            while page := await store.list("p", after=found[-1] if found else "", limit=5):
                assert len(page) <= 5
                found += page
            assert found == digests
            assert await store.list("nobody") == []

    async def test_what_is_no_digest_is_refused(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for digest in (
                "",
                "..",
                "../" + "0" * 61,
                "0" * 63,
                "0" * 65,
                "A" * 64,
                "g" * 64,
                "0" * 64 + "\n",
                "0" * 64 + "-",
                f"{'0' * 64}-{'g' * 16}",
            ):
                for ask in (
                    lambda d=digest: store.put("p", d, b""),
                    lambda d=digest: store.get("p", d),
                    lambda d=digest: store.exists("p", d),
                    lambda d=digest: store.delete("p", d),
                ):
                    with pytest.raises(DurableError):
                        await ask()

    async def test_closing_twice_is_fine_and_later_use_raises(self, tmp_path: Path) -> None:
        digest = object_digest(SMALL)
        store = await self.open(tmp_path)
        await store.put("p", digest, SMALL)
        await store.close()
        await store.close()
        for ask in (
            lambda: store.put("p", digest, SMALL),
            lambda: store.get("p", digest),
            lambda: store.exists("p", digest),
            lambda: store.delete("p", digest),
            lambda: store.list("p"),
        ):
            with pytest.raises(HostClosed):
                await ask()


class InspectedObjectStoreContract(ObjectStoreContract):
    """The same, and what is promised by an `InspectedObjects`, which a sweep can look through."""

    async def test_sessions_are_listed_by_their_folders(self, tmp_path: Path) -> None:
        digest = object_digest(SMALL)
        async with self.opened(tmp_path) as store:
            assert isinstance(store, InspectedObjects)
            names = [f"session {n}" for n in range(25)]
            for name in names:
                await store.put(name, digest, SMALL)
            folders = sorted(map(store.folder_of, names))
            found: list[str] = []
            while page := await store.folders(found[-1] if found else "", 7):
                assert len(page) <= 7
                found += page
            assert found == folders

    async def test_what_stands_in_a_folder_is_listed_and_removed_by_that(self, tmp_path: Path) -> None:
        tags = [f"{n:016x}" for n in range(7)]
        names = [f"{object_digest(SMALL)}-{tag}" for tag in tags]
        async with self.opened(tmp_path) as store:
            assert isinstance(store, InspectedObjects)
            for name in names:
                await store.put("p", name, SMALL)
            await store.put("q", names[0], SMALL)
            folder = store.folder_of("p")
            found: list[str] = []
            while page := await store.names_in(folder, found[-1] if found else "", 3):
                assert len(page) <= 3
                found += page
            assert found == names
            for _ in range(2):
                await store.remove_from(folder, names[0])
            assert await store.list("p") == names[1:]
            assert await store.list("q") == names[:1]
            for name in names[1:]:
                await store.remove_from(folder, name)
            assert await store.names_in(folder) == []
            assert await store.folders() == [store.folder_of("q")], "what is empty is not listed"
            assert await store.names_in(store.folder_of("nobody")) == []
