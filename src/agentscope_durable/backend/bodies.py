"""Large bodies leave the records before the transaction and come back on read (D11).

Order matters: mark the object pending, put it, then commit the reference. A crash in between
leaves an orphan with a mark, never a reference to nothing (OB-08).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import (
    COLUMN_REFERENCE,
    INLINE_MAX_BYTES,
    Body,
    decode_reference,
    inline_body,
    object_digest,
)
from agentscope_durable.contracts.commands import ObjectMarked
from agentscope_durable.contracts.errors import BodyMissing, DigestMismatch, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import decode_json
from agentscope_durable.spi.object_store import ObjectStore

Mark = Callable[[SessionKey, str, int], Awaitable[ObjectMarked]]


class Bodies:
    """Puts and opens bodies of Sessions."""

    def __init__(self, objects: ObjectStore | None, mark: Mark) -> None:
        """`objects` None keeps every body inline, within the bounds of admission."""
        self._objects = objects
        self._mark = mark

    @property
    def objects(self) -> ObjectStore | None:
        """Where large bodies are; None where every body is inline."""
        return self._objects

    async def put(self, session: SessionKey, content: bytes) -> Body:
        """Inline when small, else stored and referenced."""
        if self._objects is None or len(content) <= INLINE_MAX_BYTES:
            return inline_body(content)
        return await self._store(self._objects, session, content)

    async def put_column(self, session: SessionKey, content: bytes) -> bytes:
        """A whole log column: itself when small, else `@` and the reference."""
        if self._objects is None or len(content) <= INLINE_MAX_BYTES:
            return content
        return COLUMN_REFERENCE + msgspec.json.encode(await self._store(self._objects, session, content))

    async def open(self, session: SessionKey, body: Body) -> bytes:
        """The JSON bytes, whole and verified.

        Raises:
            BodyMissing, DigestMismatch: it is not there, or not what was put. What needs it waits (C62).
            Unavailable: it cannot be read now.
        """
        if not body.is_reference:
            return bytes(body.inline)
        spoken = keys.spell(session)
        if self._objects is None:
            raise BodyMissing(spoken, body.name).advising(
                "This backend was opened without an object store: open it with the one the records were written with"
            )
        try:
            return await self._objects.get(keys.partition(session), body.name)
        except NotFound as error:
            raise BodyMissing(spoken, body.name).advising(error.advice) from None
        except DigestMismatch as error:
            raise DigestMismatch(
                f"{body.name} of session {spoken}", "body", expected=error.expected, actual=error.actual
            ).advising("Bring the object back from a backup: what needs it waits, and nothing of it is lost") from None

    async def open_value(self, session: SessionKey, body: Body) -> Any:
        """
        Raises:
            CorruptRecord: its content is no JSON. As for `open` else.
        """
        content = await self.open(session, body)
        return decode_json(content, key=body.name or "a value in a record")

    async def open_column(self, session: SessionKey, column: bytes) -> bytes:
        if not column.startswith(COLUMN_REFERENCE):
            return column
        return await self.open(session, decode_reference(column))

    async def _store(self, objects: ObjectStore, session: SessionKey, content: bytes) -> Body:
        digest, partition = object_digest(content), keys.partition(session)
        marked = await self._mark(session, digest, len(content))
        # What is referred to was put before; it is not sent again only to be told that it is there.
        if not marked.referenced or not await objects.exists(partition, marked.name):
            await objects.put(partition, marked.name, content)
        return Body(name=marked.name, size=len(content))
