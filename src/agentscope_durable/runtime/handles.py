"""Session, Thread and Turn as an application holds them.

Rule 1: a handle is an identity and nothing else. It can be made anywhere, at any time, from its ids; what is true is
always asked from the backend (RT-15, RT-23).
Rule 2: what the caller gives is checked before anything is sent, so that a refused call has changed nothing (AD-24).
Rule 3: waiting is only looking. A timeout, a cancelled coroutine or a closed runtime leaves the Turn as it is (AD-20).
"""

from __future__ import annotations

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.commands import CloseSession, CloseThread, CreateThread, SubmitTurn, TurnAdmitted
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.events import EventFilter
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, SessionKey, ThreadKey
from agentscope_durable.contracts.ids import check_id, check_key
from agentscope_durable.contracts.messages import Message, as_input, input_digest_value
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.contracts.questions import GetSession, GetThread, ListCheckpoints, ListThreads, ListTurns
from agentscope_durable.contracts.views import CheckpointPage, CheckpointView, Page, SessionView, ThreadView
from agentscope_durable.runtime.door import Door
from agentscope_durable.runtime.timeline import PAGE_LIMIT, Timeline
from agentscope_durable.runtime.turn import DurableTurn, Timeout, TurnInput, content_blocks

__all__ = ["PAGE_LIMIT", "DurableSession", "DurableThread", "DurableTurn", "TurnInput"]


class DurableThread(Timeline):
    """One agent's continuing context with its ordered queue of Turns (RT-06)."""

    def __init__(self, door: Door, key: ThreadKey) -> None:
        super().__init__(door, key.session, EventFilter(thread_id=key.thread_id))
        self._key = key

    def __repr__(self) -> str:
        key = self._key
        return f"DurableThread({key.session.namespace!r}, {key.session.session_id!r}, {key.thread_id!r})"

    @property
    def key(self) -> ThreadKey:
        return self._key

    @property
    def thread_id(self) -> str:
        return self._key.thread_id

    async def submit(self, request_id: str, input: TurnInput) -> DurableTurn:
        """Admit a task at the end of this Thread's queue; it is stored when this returns (AD-01).

        A repeat with the same id and input returns the Turn it already made (AD-02). If the await is cancelled or the
        answer lost, repeat it with the same id.

        Raises:
            RequestConflict: the id was used for something else.
            InvalidRequest: the id or the input is not valid; nothing was sent.
            Closed: the Session or Thread takes no new Turns.
        """
        request_id = check_id("request_id", request_id)
        document = input_digest_value(as_input(input))
        content = await self._door.body(self._session, content_blocks(document))
        admitted: TurnAdmitted = await self._door.execute(
            SubmitTurn(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=request_id,
                content=content,
                digest=durable_json.digest(document),
            )
        )
        self._door.admitted.keep(admitted.turn_id, content)
        return DurableTurn(self._door, self._key, admitted.turn_id)

    async def call(self, request_id: str, input: TurnInput, timeout: Timeout = None) -> Message | None:
        """`submit` and `wait` in one; safe to repeat with the same id (AD-18)."""
        turn = await self.submit(request_id, input)
        return await turn.wait(timeout)

    def get_turn(self, turn_id: str) -> DurableTurn:
        """A handle; whether there is such a Turn is seen at its first operation (RT-56)."""
        return DurableTurn(self._door, self._key, check_id("turn_id", turn_id))

    async def list_turns(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """Turns of this Thread in the order of their admission (Q-10)."""
        return await self._door.query(
            ListTurns(session=self._session, thread_id=self._key.thread_id, cursor=cursor, limit=limit)
        )

    async def history(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """This Thread's messages, in the order of their first sequence (PR-11)."""
        return await self._history(self._narrow, cursor, limit)

    async def snapshot(self, filter: EventFilter | None = None) -> SnapshotView:
        return await self._snapshot(filter)

    # ---- checkpoints ----

    async def checkpoints(self, after: str | None = None, limit: int = PAGE_LIMIT) -> CheckpointPage:
        """Settled positions of this Thread, oldest first: one for each Turn that ended, and each copy (CK-15).

        Args:
            after: a position; the page begins with the one after it.

        Raises:
            InvalidCursor: it is ahead of the Thread, as in a store that was put back from an older copy.
        """
        return await self._door.query(
            ListCheckpoints(session=self._session, thread_id=self._key.thread_id, after=after, limit=limit)
        )

    async def restore(self, position: str, expected_position: str, request_id: str) -> CheckpointView:
        """Give the agent the context it had at a former position of this Thread.

        What has happened since stays in history and events, and every position stays one to come back to. Effects of
        tools are not undone. A repeat with the same id returns the first answer (AD-17).

        Args:
            position: of a checkpoint of this Thread.
            expected_position: where the Thread stands, as `checkpoints().current` says.

        Returns:
            The new position, where the Thread stands from now on.

        Raises:
            Unfinished: a Turn is not done; wait for it, or cancel it (CK-05).
            PositionConflict: it stands elsewhere by now.
            NotFound: nothing settled is at that position (CK-06).
            CorruptRecord, Incompatible: what is stored there cannot be read, or not here; nothing was changed (CK-13).
            NoCheckpointCodec: this runtime knows no codec for the definition (CK-03).
        """
        request_id = check_id("request_id", request_id)
        at = stream_position(self._key, position)
        expected_at = stream_position(self._key, expected_position, path="expected_position")
        self._door.check()
        return await self._door.baselines.restore(self._key, at, expected_at=expected_at, request_id=request_id)

    async def fork(self, position: str, target_thread_key: ThreadKey, request_id: str) -> DurableThread:
        """Begin another Thread of this namespace with the context that this one had at a position.

        This Thread is only read. The other one is made if it is not there yet, with this one's definition and version,
        and has no history: what was said here is known to its agent and to nobody else (CK-11).

        Args:
            target_thread_key: its Session must exist. A Thread that exists must have had no Turn, and be pinned to the
                same definition and version (CK-16).
            request_id: unique in the Session of the target, which is the one that is written.

        Returns:
            A handle of the target.

        Raises:
            InvalidRequest: another namespace, or this Thread itself.
            NotFound: nothing settled is at that position, or the target's Session does not exist (CK-09).
            HasHistory, Unfinished: the target has had Turns.
            DefinitionConflict: it is pinned to another definition or version (CK-10).
            CorruptRecord, Incompatible, NoCheckpointCodec: as in `restore`.
        """
        request_id = check_id("request_id", request_id)
        at = stream_position(self._key, position)
        if not isinstance(target_thread_key, ThreadKey):
            raise InvalidRequest("a ThreadKey(session, thread_id) says where to", path="target_thread_key")
        check_key(target_thread_key)
        self._door.check()
        _ = await self._door.baselines.fork(self._key, at, target_thread_key, request_id=request_id)
        return DurableThread(self._door, target_thread_key)

    async def view(self) -> ThreadView:
        return await self._door.query(GetThread(session=self._session, thread_id=self._key.thread_id))

    async def close(self) -> None:
        """Take no more Turns. Refused over unfinished ones, which go on (RT-42). Safe to repeat."""
        await self._door.execute(CloseThread(session=self._session, thread_id=self._key.thread_id))


class DurableSession(Timeline):
    """One conversation: its Threads and their one timeline (RT-05). Made by `create_session` or `get_session`."""

    def __init__(self, door: Door, key: SessionKey) -> None:
        check_key(key)
        super().__init__(door, key, EventFilter())

    def __repr__(self) -> str:
        return f"DurableSession({self._session.namespace!r}, {self._session.session_id!r})"

    @property
    def key(self) -> SessionKey:
        return self._session

    # ---- its Threads ----

    def main_thread(self) -> DurableThread:
        return DurableThread(self._door, ThreadKey(self._session, MAIN_THREAD_ID))

    def get_thread(self, thread_id: str) -> DurableThread:
        """A handle; whether there is such a Thread is seen at its first operation (RT-56)."""
        return DurableThread(self._door, ThreadKey(self._session, check_id("thread_id", thread_id)))

    async def create_thread(self, thread_id: str, definition: str) -> DurableThread:
        """An independent context, pinned to the present version of `definition`. A repeat changes nothing (AD-16).

        Raises:
            DefinitionConflict: it exists with another definition.
            NotFound: no definition of this name is known to this runtime.
        """
        thread = self.get_thread(thread_id)
        binding = await self._door.definitions.resolve(definition)
        await self._door.execute(CreateThread(session=self._session, thread_id=thread.thread_id, binding=binding))
        return thread

    async def list_threads(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        return await self._door.query(ListThreads(session=self._session, cursor=cursor, limit=limit))

    # ---- the main Thread ----

    async def submit(self, request_id: str, input: TurnInput) -> DurableTurn:
        """As `DurableThread.submit`, on the main Thread."""
        return await self.main_thread().submit(request_id, input)

    async def call(self, request_id: str, input: TurnInput, timeout: Timeout = None) -> Message | None:
        """As `DurableThread.call`, on the main Thread."""
        return await self.main_thread().call(request_id, input, timeout)

    def get_turn(self, turn_id: str) -> DurableTurn:
        """As `DurableThread.get_turn`, on the main Thread."""
        return self.main_thread().get_turn(turn_id)

    async def list_turns(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """As `DurableThread.list_turns`, on the main Thread."""
        return await self.main_thread().list_turns(cursor, limit)

    async def history(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """As `DurableThread.history`, on the main Thread."""
        return await self.main_thread().history(cursor, limit)

    # ---- all of it ----

    async def snapshot(self, filter: EventFilter | None = None) -> SnapshotView:
        """Everything public as of now, and the cursor to go on from (ST-33)."""
        return await self._snapshot(filter)

    async def view(self) -> SessionView:
        return await self._door.query(GetSession(session=self._session))

    async def close(self) -> None:
        """Take no more work. Refused over unfinished Turns, which go on (RT-42). Safe to repeat."""
        await self._door.execute(CloseSession(session=self._session))
