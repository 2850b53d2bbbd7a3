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
from agentscope_durable.contracts.errors import NotStarted
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.object_store import ObjectStore

Mark = Callable[[SessionKey, str, int], Awaitable[None]]


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
        digest = await self._store(session, content)
        return Body(digest=digest, size=len(content))

    async def put_column(self, session: SessionKey, content: bytes) -> bytes:
        """A whole log column: itself when small, else `@` and the reference."""
        if self._objects is None or len(content) <= INLINE_MAX_BYTES:
            return content
        digest = await self._store(session, content)
        return COLUMN_REFERENCE + msgspec.json.encode(Body(digest=digest, size=len(content)))

    async def open(self, session: SessionKey, body: Body) -> bytes:
        if not body.is_reference:
            return bytes(body.inline)
        if self._objects is None:
            raise NotStarted("object store of this backend")
        return await self._objects.get(keys.partition(session), body.digest)

    async def open_value(self, session: SessionKey, body: Body) -> Any:
        return msgspec.json.decode(await self.open(session, body))

    async def open_column(self, session: SessionKey, column: bytes) -> bytes:
        if not column.startswith(COLUMN_REFERENCE):
            return column
        return await self.open(session, decode_reference(column))

    async def _store(self, session: SessionKey, content: bytes) -> str:
        digest = object_digest(content)
        await self._mark(session, digest, len(content))
        assert self._objects is not None
        await self._objects.put(keys.partition(session), digest, content)
        return digest
