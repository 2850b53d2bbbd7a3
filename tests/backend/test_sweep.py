"""Sweeping large bodies: what goes, what stays, and that neither a host, another sweep nor a kill makes it worse."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentscope_durable import _failpoints
from agentscope_durable.assembly import LocalBackend, MemoryBackend
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body, object_digest
from agentscope_durable.contracts.errors import BodySwept, InvalidCursor, InvalidRequest, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import Audience, Severity
from agentscope_durable.contracts.views import SweepReport
from agentscope_durable.domain.objects import ORPHAN_AGE_MS
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.stores.objects.cloud import S3ObjectStore
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.testing.manual_clock import ManualClock
from tests.every_store import on_every_store, shelf
from tests.servers.fixtures import shared_postgres
from tests.servers.s3 import Server, running
from tests.servers.stores import open_bodies, schema_of

pytestmark = pytest.mark.spec("OB-08")

SESSION = SessionKey("app", "s/1")
BINDING = Binding("assistant", "v1", "state-1")
START = 4_000_000_000_000
DAY = ORPHAN_AGE_MS + 1


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("localbucket", tmp_path_factory.mktemp("bucket")) as started:
        yield started


@pytest.fixture(params=["files", "bucket", "postgres"])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[ObjectStore]:
    """An object store of the test's own."""
    match request.param:
        case "files":
            yield FileObjectStore(tmp_path / "bodies")
        case "bucket":
            yield S3ObjectStore(prefix=tmp_path.name, **request.getfixturevalue("bucket").options)
        case _:
            store = await open_bodies(shared_postgres().dsn(), schema_of(tmp_path))
            yield store
            await store.close()


def content(n: int) -> bytes:
    return msgspec.json.encode(f"{n} " + "x" * 100_000)


class Sweeping:
    """A Session whose bodies come and go."""

    def __init__(self, backend: TransactionalSessionBackend, clock: ManualClock) -> None:
        self.backend = backend
        self.clock = clock
        self.operations = HostOperations(backend)

    async def created(self, session: SessionKey = SESSION) -> None:
        await self.backend.execute(c.CreateSession(session=session, binding=BINDING))

    async def lost(self, n: int, session: SessionKey = SESSION) -> Body:
        """A body whose commit never came."""
        return await self.backend.put_body(session, content(n))

    async def used(self, n: int, session: SessionKey = SESSION) -> Body:
        body = await self.lost(n, session)
        await self.refer(body, n, session)
        return body

    async def refer(self, body: Body, n: int, session: SessionKey = SESSION) -> None:
        await self.backend.execute(
            c.SubmitTurn(session=session, thread_id="main", request_id=f"r{n}", content=body, digest="d")
        )

    async def names(self, session: SessionKey = SESSION) -> list[str]:
        return await self.backend.objects.list(keys.partition(session))  # type: ignore[union-attr]

    async def sweep(self, **options: Any) -> SweepReport:
        return await self.operations.sweep_objects(**options)

    async def whole(self, *bodies: Body) -> bool:
        """Whether all can be read, and `doctor` sees nothing wrong."""
        for body in bodies:
            _ = await self.backend.open_body(SESSION, body)
        found = await self.operations.doctor(deep=True)
        return not [finding for finding in found.findings if finding.severity is not Severity.NOTE]


@asynccontextmanager
async def sweeping(
    folder: Path, objects: ObjectStore | None, clock: ManualClock | None = None
) -> AsyncGenerator[Sweeping]:
    clock = clock or ManualClock(START)
    async with LocalBackend.open(folder, object_store=objects, clock=clock, synchronous="NORMAL") as backend:
        yield Sweeping(backend, clock)


async def test_what_nobody_has_referred_to_for_a_day_goes_and_nothing_else(
    objects: ObjectStore, tmp_path: Path
) -> None:
    async with sweeping(tmp_path / "store", objects) as at:
        await at.created()
        used, old = await at.used(1), await at.lost(2)
        at.clock.advance(ORPHAN_AGE_MS)
        assert (await at.sweep()).swept == 0
        young = await at.lost(3)
        at.clock.advance(1)
        assert [finding.subject for finding in (await at.operations.doctor()).findings] == [f"object {old.name}"]

        would = await at.sweep(dry_run=True)
        assert await at.names() == sorted([used.name, old.name, young.name])
        report = await at.sweep()
        assert report == SweepReport(
            looked_at=3,
            swept=1,
            swept_bytes=old.size,
            pending=1,
            strangers=None,
            more=0,
            cursor=None,
            dry_run=False,
        )
        assert msgspec.structs.replace(would, dry_run=False) == report
        assert await at.names() == sorted([used.name, young.name])
        assert (await at.sweep()).looked_at == 2
        assert (await at.operations.doctor()).findings == ()
        assert await at.whole(used, young)


@on_every_store
async def test_a_sweep_is_the_same_on_every_record_store(backend: str, tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with shelf(backend, tmp_path, clock) as place:
        at = Sweeping(await place.backend(), clock)
        await at.created()
        used, _ = await at.used(1), await at.lost(2)
        clock.advance(DAY)
        assert (await at.sweep()).swept == 1
        assert await at.names() == [used.name]
        assert await at.backend.open_body(SESSION, used) == content(1)


async def test_a_call_is_bounded_and_the_next_goes_on(objects: ObjectStore, tmp_path: Path) -> None:
    async with sweeping(tmp_path / "store", objects) as at:
        sessions = [SessionKey("a%/b", f"s {n}:x") for n in range(4)]
        for session in sessions:
            await at.created(session)
        for n in range(7):
            await at.lost(n, sessions[n % 2])
        at.clock.advance(DAY)
        cursor, swept, calls = None, 0, 0
        while calls == 0 or cursor is not None:
            report = await at.sweep(cursor=cursor, limit=3)
            assert report.looked_at <= 3
            cursor, swept, calls = report.cursor, swept + report.swept, calls + 1
        assert swept == 7
        assert calls >= 3
        assert [await at.names(session) for session in sessions] == [[]] * 4


async def test_one_session_alone(tmp_path: Path) -> None:
    other = SessionKey("app", "other")
    async with sweeping(tmp_path, None) as at:
        for session in (SESSION, other):
            await at.created(session)
            await at.lost(1, session)
        at.clock.advance(DAY)
        assert (await at.sweep(session=other)).swept == 1
        assert await at.names(other) == [] and len(await at.names()) == 1
        for bad in ("s::app/s%2F1", "f::abc"):
            with pytest.raises(InvalidCursor):
                await at.sweep(session=other, cursor=bad)
        for bad in ("", "x", "s:", "s:a", "f:"):
            with pytest.raises(InvalidCursor):
                await at.sweep(cursor=bad)
        for limit in (0, 10_001):
            with pytest.raises(InvalidRequest):
                await at.sweep(limit=limit)
        with pytest.raises(NotFound):
            await at.sweep(session=SessionKey("app", "nobody's"))


async def test_a_backend_without_object_store_has_nothing_to_sweep() -> None:
    with pytest.raises(InvalidRequest, match="nothing to sweep"):
        await HostOperations(MemoryBackend()).sweep_objects()


# ---- beside others ----


class Slow:
    """An object store whose next removal, or put, waits until it is let go on."""

    def __init__(self, behind: ObjectStore, method: str) -> None:
        self._behind = behind
        self._method = method
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._behind, name)
        if name != self._method or self.go_on.is_set():
            return method

        async def later(*arguments: Any) -> Any:
            self.reached.set()
            await self.go_on.wait()
            return await method(*arguments)

        return later


async def test_a_content_put_while_its_former_object_is_removed_stays(objects: ObjectStore, tmp_path: Path) -> None:
    """However late the removal arrives: it was meant for another object."""
    slow = Slow(objects, "delete")
    async with sweeping(tmp_path / "store", slow) as at:
        await at.created()
        old = await at.lost(1)
        at.clock.advance(DAY)
        first = asyncio.ensure_future(at.sweep())
        await slow.reached.wait()

        with pytest.raises(BodySwept):
            await at.refer(old, 1)
        # Another sweep ends what the first one began, and the content comes back.
        async with sweeping(tmp_path / "store", objects, at.clock) as beside:
            assert (await beside.sweep()).swept == 1
            assert await beside.names() == []
            new = await beside.used(1)
        assert new.name != old.name and new.name[:64] == object_digest(content(1))

        slow.go_on.set()
        assert (await first).swept == 1
        assert await at.names() == [new.name]
        assert await at.whole(new)


async def test_a_put_that_took_longer_than_a_day_is_put_anew(objects: ObjectStore, tmp_path: Path) -> None:
    slow = Slow(objects, "put")
    async with sweeping(tmp_path / "store", slow) as at:
        await at.created()
        putting = asyncio.ensure_future(at.lost(1))
        await slow.reached.wait()
        at.clock.advance(DAY)
        assert (await at.sweep()).swept == 1
        slow.go_on.set()
        late = await putting
        with pytest.raises(BodySwept) as refused:
            await at.refer(late, 1)
        assert late.name in str(refused.value) and "app/s%2F1" in str(refused.value)

        new = await at.used(1)
        assert await at.names() == sorted([late.name, new.name])
        # What was put so late has no mark. It is told, and goes when that is wanted.
        assert (await at.sweep()).swept == 0
        told = await at.sweep(strangers=True, dry_run=True)
        assert told.strangers == (f"app/s%2F1: {late.name}",)
        assert await at.names() == sorted([late.name, new.name])
        assert (await at.sweep(strangers=True)).strangers == told.strangers
        assert await at.names() == [new.name]
        assert await at.whole(new)


async def test_two_sweeps_at_once_and_a_host_that_puts_and_refers(objects: ObjectStore, tmp_path: Path) -> None:
    async with (
        sweeping(tmp_path / "store", objects) as at,
        sweeping(tmp_path / "store", objects, at.clock) as beside,
    ):
        await at.created()
        for n in range(12):
            await at.lost(n)
        at.clock.advance(DAY)

        async def work() -> list[Body]:
            """The same contents, which are swept meanwhile. What is refused is put anew, as its error says."""
            bodies: list[Body] = []
            for n in range(12):
                while True:
                    body = await at.lost(n)
                    try:
                        await at.refer(body, n)
                    except BodySwept:
                        continue
                    break
                bodies.append(body)
            return bodies

        bodies, *_ = await asyncio.gather(work(), at.sweep(), beside.sweep(limit=5))
        await at.sweep()
        assert await at.names() == sorted(body.name for body in bodies)
        assert await at.whole(*bodies)


# ---- killed ----

SWEEPER = """
    import asyncio, json, sys
    from agentscope_durable import _failpoints
    from agentscope_durable.assembly import LocalBackend
    from agentscope_durable.runtime.operations import HostOperations
    from agentscope_durable.testing.manual_clock import ManualClock
    async def main():
        clock, options, objects = ManualClock(int(sys.argv[2])), json.loads(sys.argv[5]), None
        if "where" in options:
            from agentscope_durable.stores.objects.postgres import PostgresObjectStore
            objects = await PostgresObjectStore.open(**options)
        elif options:
            from agentscope_durable.stores.objects.cloud import S3ObjectStore
            objects = S3ObjectStore(**options)
        async with LocalBackend.open(sys.argv[1], clock=clock, object_store=objects) as backend:
            # From here on: opening the store is not what is told of.
            _failpoints.arm(sys.argv[3], nth=int(sys.argv[4]))
            await HostOperations(backend).sweep_objects()
    asyncio.run(main())
"""
PLACES = [
    (f"{name}.{side}", nth)
    for name, times in (("store.commit", 2), ("object.delete", 3))
    for nth in range(1, times + 1)
    for side in ("before", "after")
]


@pytest.mark.parametrize(
    ("point", "nth", "where"),
    # A commit knows nothing of where bodies are.
    [(*place, where) for place in PLACES for where in ("files", "bucket")]
    + [("object.delete.before", 2, "postgres"), ("object.delete.after", 2, "postgres")],
)
async def test_killed_anywhere_the_next_sweep_ends_it(
    tmp_path: Path, bucket: Server, point: str, nth: int, where: str
) -> None:
    options: dict[str, Any] = {}
    objects: Any = None
    if where == "bucket":
        options = {"prefix": tmp_path.name, **bucket.options}
        objects = S3ObjectStore(**options)
    if where == "postgres":
        options = {"where": shared_postgres().dsn(), "schema": schema_of(tmp_path)}
        objects = await open_bodies(options["where"], options["schema"])
    async with sweeping(tmp_path, objects) as at:
        await at.created()
        used = await at.used(0)
        lost = [await at.lost(n) for n in range(1, 4)]
    later = START + DAY
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(SWEEPER),
            str(tmp_path),
            str(later),
            point,
            str(nth),
            json.dumps(options),
        ],
        env={**os.environ},
        check=False,
    )
    assert killed.returncode == -9
    async with sweeping(tmp_path, objects, ManualClock(later)) as at:
        assert await at.whole(used)
        # Whether it was marked or not: what comes back is another object, or the same one before the sweep.
        body = await at.used(1)
        report = await at.sweep()
        assert report.swept in (0, 2, 3)
        assert await at.names() == sorted([used.name, body.name])
        assert (await at.sweep()).swept == 0
        assert await at.whole(used, body)
        if point == "store.commit.before" and nth == 1:
            assert body.name == lost[0].name
    if where == "postgres":
        await objects.close()


async def test_a_removal_that_fails_is_done_by_the_next_sweep(tmp_path: Path) -> None:
    async with sweeping(tmp_path, None) as at:
        await at.created()
        old = await at.lost(1)
        at.clock.advance(DAY)

        def fail(name: str) -> None:
            raise OSError("the disk is on fire")

        _failpoints.arm("object.delete.before", fail)
        with pytest.raises(Exception, match="on fire"):
            await at.sweep()
        assert await at.names() == [old.name]
        with pytest.raises(BodySwept):
            await at.refer(old, 1)
        [finding] = (await at.operations.doctor()).findings
        assert finding.severity is Severity.NOTE and finding.commands == (("sweep",),)
        assert (await at.sweep()).swept == 1
        assert (await at.operations.doctor()).findings == ()


# ---- dropped Sessions ----


@pytest.mark.parametrize("slices", [1, 2, 20])
async def test_bodies_of_a_dropped_session_go_with_the_next_sweep(
    objects: ObjectStore, tmp_path: Path, slices: int
) -> None:
    """Also while it is being dropped, and nothing of a drop minds a sweep in between."""
    other = SessionKey("app", "other")
    async with sweeping(tmp_path / "store", objects) as at:
        for session in (SESSION, other):
            await at.created(session)
        for n in (1, 2):
            await at.used(n)
        await at.lost(3)
        async with DurableRuntime(backend=at.backend) as api:
            session = api.get_session(SESSION)
            for turn in (await session.list_turns()).items:
                _ = await session.get_turn(turn.turn_id).cancel(f"cancel {turn.turn_id}")
            await session.close()
        kept = await at.used(1, other)
        for _ in range(slices):
            await at.backend.execute(c.DropSession(session=SESSION), audience=Audience.OPERATOR)
            await at.sweep()
        assert len(await at.names()) == (3 if slices == 1 else 0)
        receipt = await at.operations.drop_session(SESSION)
        assert receipt.objects + receipt.records > 0
        _ = await at.sweep()
        assert await at.names() == []
        assert (await at.operations.doctor(deep=True)).findings == ()
        assert await at.operations.drop_session(SESSION) == receipt
        assert await at.names(other) == [kept.name]


async def test_doctor_says_that_a_dropped_session_has_left_bodies(tmp_path: Path) -> None:
    async with sweeping(tmp_path, None) as at:
        await at.created()
        await at.lost(1)
        await at.backend.execute(c.CloseSession(session=SESSION))
        await at.operations.drop_session(SESSION)
        [finding] = (await at.operations.doctor()).findings
        assert finding.severity is Severity.NOTE and finding.commands == (("sweep",),)
        assert (await at.sweep()).swept == 1
        assert (await at.operations.doctor()).findings == ()


# ---- strangers ----


async def test_what_no_record_knows_goes_only_when_that_is_wanted(objects: ObjectStore, tmp_path: Path) -> None:
    async with sweeping(tmp_path / "store", objects) as at:
        await at.created()
        used = await at.used(1)
        there = f"{object_digest(b'?')}-{'0' * 16}"
        foreign = [f"{object_digest(str(n).encode())}-{'1' * 16}" for n in range(5)]
        await objects.put(keys.partition(SESSION), there, b"?")
        for n, name in enumerate(foreign):
            await objects.put("app\x00elsewhere", name, str(n).encode())
        at.clock.advance(DAY)
        assert (await at.sweep()).strangers is None
        subjects = {finding.subject for finding in (await at.operations.doctor()).findings}
        folder = objects.folder_of("app\x00elsewhere")
        assert subjects == {f"object {there}", f"folder {folder}"}

        expected = [f"app/s%2F1: {there}", *(f"{folder}: {name}" for name in sorted(foreign))]
        for dry_run in (True, False):
            found: list[str] = []
            cursor, calls = None, 0
            while calls == 0 or cursor is not None:
                report = await at.sweep(strangers=True, dry_run=dry_run, limit=2, cursor=cursor)
                found += report.strangers or ()
                cursor, calls = report.cursor, calls + 1
                assert calls < 20
            assert found == expected
            assert await objects.list("app\x00elsewhere") == (sorted(foreign) if dry_run else [])
        assert await at.names() == [used.name]
        assert await at.whole(used)
        assert (await at.operations.doctor()).findings == ()
