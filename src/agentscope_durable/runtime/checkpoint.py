"""Restore, fork and repair as a host does them: ask whether it may be done, copy, then commit.

Rule 1: the backend decides, in one transaction of the Session that is written (BE-25). What is read and prepared before
is immutable: rows of a settled position, proven by their digest.
Rule 2: nothing is copied for a request that is refused or was done before, so a repeat is answered even when its source
is gone.
Rule 3: no agent is built and none is started. What an agent library must do about its state, its codec does, off the
event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.checkpoint import position_of
from agentscope_durable.contracts.commands import (
    EntryCommit,
    ForkThread,
    NativeState,
    RepairReceipt,
    RepairThread,
    RestoreThread,
)
from agentscope_durable.contracts.errors import Misuse, NoCheckpointCodec, NotFound
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.ids import check_id
from agentscope_durable.contracts.journal import Base, JournalBatch, JournalEntry, JournalEventType
from agentscope_durable.contracts.questions import (
    EntriesAt,
    GetContent,
    GetWorkspace,
    LoadCheckpoint,
    LoadThread,
    Question,
)
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import Audience
from agentscope_durable.contracts.views import CheckpointView, EntryView, WorkspaceView
from agentscope_durable.domain.workspace import entries_to_restore
from agentscope_durable.runtime.definitions import Harness
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.checkpoint import CheckpointCodec, JournalRow, NativeBaseline, StoredCheckpoint
from agentscope_durable.spi.environment import Environment
from agentscope_durable.spi.harness import HarnessAdapter

__all__ = ["Baselines", "Codecs", "check_codecs"]

C = TypeVar("C", RestoreThread, ForkThread, RepairThread)


def check_codecs(checkpoints: Mapping[str, CheckpointCodec]) -> None:
    for name, codec in checkpoints.items():
        check_id("checkpoints", name)
        if not callable(codec):
            raise Misuse(f"the checkpoint codec of {name!r} is called with a baseline; it cannot be a {codec!r}")


class Codecs:
    """Which codec reads the native state of a definition.

    Args:
        named: codecs by the name of their definition.
        harnesses: those that are registered here; each can do it itself.
        resolve: makes the adapter of a version, or None.
    """

    def __init__(
        self,
        named: Mapping[str, CheckpointCodec],
        harnesses: Sequence[Harness] = (),
        resolve: Callable[[Binding], Awaitable[HarnessAdapter | None]] | None = None,
    ) -> None:
        self._named = dict(named)
        self._harnesses = {harness.binding: harness.adapter.restore for harness in harnesses}
        self._resolve = resolve

    async def find(self, binding: Binding) -> CheckpointCodec:
        """
        Raises:
            NoCheckpointCodec: none is registered for the definition.
        """
        found = self._named.get(binding.harness) or self._harnesses.get(binding)
        if found is not None:
            return found
        made = None if self._resolve is None else await self._resolve(binding)
        if made is not None:
            return made.restore
        # Another version of the definition: it is the state's version that counts, and codecs check that.
        for known, codec in self._harnesses.items():
            if known.harness == binding.harness:
                return codec
        raise NoCheckpointCodec(binding.harness)


class Baselines:
    """Copies settled baselines to where they are wanted."""

    def __init__(self, backend: SessionBackend, environment: Environment, codecs: Codecs) -> None:
        self._backend = backend
        self._environment = environment
        self._codecs = codecs

    async def restore(self, thread: ThreadKey, at: int, *, expected_at: int, request_id: str) -> CheckpointView:
        command = RestoreThread(
            session=thread.session, thread_id=thread.thread_id, request_id=request_id, at=at, expected_at=expected_at
        )
        earlier: CheckpointView | None = await self._backend.execute(command, audience=Audience.HOST)
        return earlier or await self._install(command, thread, at, Audience.HOST)

    async def fork(self, source: ThreadKey, at: int, target: ThreadKey, *, request_id: str) -> CheckpointView:
        command = ForkThread(
            session=target.session, thread_id=target.thread_id, request_id=request_id, source=source, at=at
        )
        earlier: CheckpointView | None = await self._backend.execute(command, audience=Audience.HOST)
        return earlier or await self._install(command, source, at, Audience.HOST)

    async def repair(
        self, thread: ThreadKey, turn_id: str, at: int, *, expected_at: int, request_id: str
    ) -> RepairReceipt:
        command = RepairThread(
            session=thread.session,
            thread_id=thread.thread_id,
            request_id=request_id,
            turn_id=turn_id,
            at=at,
            expected_at=expected_at,
        )
        earlier: RepairReceipt | None = await self._backend.execute(command, audience=Audience.OPERATOR)
        return earlier or await self._install(command, thread, at, Audience.OPERATOR)

    async def export(self, thread: ThreadKey, at: int) -> bytes:
        """The native state of a settled position as one JSON document, for whoever operates the host.

        Raises:
            CorruptRecord: it cannot be read any more; another position may be good.
        """
        stored = await self._stored(thread, at)
        native = await self._native(stored, thread, at, thread)
        return msgspec.json.encode(
            {
                "format": "agentscope-durable/checkpoint/1",
                "thread": thread,
                "position": position_of(thread, at),
                "harness": stored.binding.harness,
                "definitionVersion": stored.binding.definition_version,
                "stateVersion": stored.binding.state_version,
                "writer": stored.writer,
                "journal": msgspec.Raw(native.journal),
            }
        )

    async def _install(self, command: C, source: ThreadKey, at: int, audience: Audience) -> Any:
        target = ThreadKey(command.session, command.thread_id)
        try:
            native = await self._copy(source, at, target)
        except NotFound:
            # Something that was there a moment ago: if the position is dropped by now, that is what is to be said.
            _ = await self._stored(source, at)
            raise
        if target != source:
            # What was read in several readings may have been dropped between two of them; then it is not copied. For
            # one's own Thread the transaction looks.
            _ = await self._stored(source, at)
        return await self._backend.execute(replace(command, native=native), audience=audience)

    async def _copy(self, source: ThreadKey, at: int, target: ThreadKey) -> NativeState:
        stored = await self._stored(source, at)
        native = await self._native(stored, source, at, target)
        counted: WorkspaceView = await self._ask(GetWorkspace(session=source.session, thread_id=source.thread_id))
        native = replace(native, workspace=await self._workspace(stored, source, target, counted))
        if target != source:
            native = replace(native, floor=counted.floor, numbers=counted.numbers)
        return native

    async def _workspace(
        self, stored: StoredCheckpoint, source: ThreadKey, target: ThreadKey, counted: WorkspaceView
    ) -> tuple[EntryCommit, ...]:
        """The changes after which the target's workspace has the entries of the settled position (CK-07, CK-17)."""
        wanted = await self._entries(source, stored.through)
        if target == source:
            return entries_to_restore(await self._entries(source, stored.head), wanted, counted.floor)
        return tuple([await self._copied(source, target, entry) for entry in wanted])

    async def _entries(self, thread: ThreadKey, at: int) -> tuple[EntryView, ...]:
        return await self._ask(EntriesAt(session=thread.session, thread_id=thread.thread_id, at=at))

    async def _copied(self, source: ThreadKey, target: ThreadKey, entry: EntryView) -> EntryCommit:
        """An entry with its content in the scope of another Session; version and number stay what an agent has seen."""
        question = GetContent(session=source.session, thread_id=source.thread_id, number=entry.number)
        content = await self._backend.open_body(source.session, await self._ask(question))
        return EntryCommit(
            path=entry.path,
            expected=0,
            version=entry.version,
            number=entry.number,
            size=entry.size_bytes,
            content=await self._backend.put_body(target.session, content),
            modified_ms=entry.modified_at_ms,
        )

    async def _ask(self, question: Question) -> Any:
        return await self._backend.query(question, audience=Audience.HOST)

    async def _stored(self, thread: ThreadKey, at: int) -> StoredCheckpoint:
        question = LoadCheckpoint(session=thread.session, thread_id=thread.thread_id, at=at)
        return await self._backend.query(question, audience=Audience.HOST)

    async def _native(self, stored: StoredCheckpoint, source: ThreadKey, at: int, target: ThreadKey) -> NativeState:
        # A Thread that is forked into has had no commit; no other would be taken.
        head = stored.head if target == source else 0
        if not at:
            return NativeState(binding=stored.binding, head=head, journal=b"", writer="")
        codec = await self._codecs.find(stored.binding)
        rows: list[JournalRow] = await self._backend.query(
            LoadThread(
                session=source.session,
                thread_id=source.thread_id,
                first=stored.base_at,
                last=at,
                digest=stored.digest,
            ),
            audience=Audience.HOST,
        )
        baseline = NativeBaseline(
            source=source, target=target, binding=stored.binding, writer=stored.writer, rows=tuple(rows)
        )
        told = JournalEntry(
            JournalEventType.STATE_INITIALIZED,
            msgspec.Raw(msgspec.json.encode({"source": source, "position": position_of(source, at)})),
        )

        def made() -> bytes:
            checkpoint = tuple(codec(baseline))
            if not checkpoint or not isinstance(checkpoint[0], Base):
                raise Misuse("a checkpoint codec returns a whole state: its first row is Base()")
            return JournalBatch(head, (told,), checkpoint, base=True).encode()

        journal = await self._environment.call_in_thread(made)
        return NativeState(binding=stored.binding, head=head, journal=journal, writer=stored.writer)
