"""What the operator of a host may do and nobody else: settle the unknown by evidence, release or repair a parked Turn,
look at what does not get on in all Sessions, and drop events that nobody is to replay any more.

Nothing here is reachable through a public transport, a model's tool or a handle (UN-08). Whoever
calls it has looked at the outside world; the evidence reference says where that look is on record.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.bodies import inline_body
from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.commands import (
    PolicyReceipt,
    PutPolicy,
    ReconcileReceipt,
    ReconcileTool,
    ReleaseTurn,
    RepairReceipt,
)
from agentscope_durable.contracts.errors import InvalidRequest, TooLarge
from agentscope_durable.contracts.examination import Examination
from agentscope_durable.contracts.identity import SessionKey, ThreadKey, TurnKey
from agentscope_durable.contracts.ids import check_id, check_key
from agentscope_durable.contracts.questions import (
    Examine,
    FindTurn,
    ListAllSessions,
    ListPolicies,
    ListStalled,
    MeasureSession,
    MeasureStore,
)
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import Audience, ExecutionState
from agentscope_durable.contracts.views import (
    Page,
    SessionSizeView,
    StallPage,
    StoreView,
    WatchView,
)
from agentscope_durable.runtime.checkpoint import Baselines, Codecs, check_codecs
from agentscope_durable.runtime.handles import PAGE_LIMIT
from agentscope_durable.runtime.retention import Retention, Timeout, milliseconds
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.checkpoint import CheckpointCodec
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.executor import Cancelled, Failed, Succeeded
from agentscope_durable.spi.policy import POLICY_BYTES_MAX

log = logging.getLogger("agentscope_durable.runtime")

STALL_AFTER: Final = 30.0
"""Seconds without a commit that make a Turn which could go on a stalled one: a lease, unless the caller says else."""
WATCHED_MAX: Final = 1000
"""Threads one look of the watchdog looks at."""
WATCH_PAGE: Final = 200


class TurnIdentity(Protocol):
    """A Turn handle, or anything else that says which Turn is meant."""

    @property
    def thread_key(self) -> ThreadKey: ...

    @property
    def turn_id(self) -> str: ...


class HostOperations(Retention):
    """Privileged, audited operations on the Sessions and Turns of one backend.

    Args:
        backend: where they are stored.
        checkpoints: codecs by name of a definition, for `repair` and `export_checkpoint`.
    """

    def __init__(
        self,
        backend: SessionBackend,
        *,
        checkpoints: Mapping[str, CheckpointCodec] | None = None,
        environment: Environment = SYSTEM,
    ) -> None:
        check_codecs(checkpoints or {})
        super().__init__(backend)
        self._baselines = Baselines(backend, environment, Codecs(checkpoints or {}))

    async def list_sessions(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """Sessions of every namespace, in the order of their keys."""
        return await self._backend.query(ListAllSessions(cursor=cursor, limit=limit), audience=Audience.OPERATOR)

    async def find_turn(self, turn_id: str) -> TurnKey:
        """Where a Turn is, from its id alone; the cost does not grow with what is stored.

        Raises:
            NotFound: no Session has it.
        """
        return await self._backend.query(FindTurn(turn_id=check_id("turn_id", turn_id)), audience=Audience.OPERATOR)

    async def reconcile_tool(
        self,
        turn: TurnIdentity,
        call_id: str,
        *,
        request_id: str,
        result: Succeeded | Failed | Cancelled,
        evidence_ref: str,
    ) -> ReconcileReceipt:
        """Settle a call whose outcome is UNKNOWN with what was verified to have happened (D19, UN-13).

        The Turn goes on by the ordinary result path and applies the outcome once. Repeating the same
        request returns the first receipt (UN-11).

        Args:
            turn: the Turn the call belongs to.
            call_id: the call, as `waiting_on` shows it.
            request_id: identity of this reconciliation, unique in the Session.
            result: the verified outcome; `Succeeded(value)`, `Failed(reason)` or `Cancelled(reason)`.
            evidence_ref: where the evidence is on record; kept with the call.

        Raises:
            InvalidTransition: the call is not UNKNOWN (UN-03).
            RequestConflict: the request id was used for something else.
        """
        check_id("call_id", call_id)
        check_id("request_id", request_id)
        check_id("evidence_ref", evidence_ref)
        state, tool_result = _outcome(result)
        content = msgspec.json.encode(tool_result)
        return await self._backend.execute(
            ReconcileTool(
                session=turn.thread_key.session,
                thread_id=turn.thread_key.thread_id,
                turn_id=turn.turn_id,
                call_id=call_id,
                request_id=request_id,
                state=state,
                result=await self._backend.put_body(turn.thread_key.session, content),
                digest=durable_json.digest(msgspec.to_builtins(tool_result)),
                evidence_ref=evidence_ref,
            ),
            audience=Audience.OPERATOR,
        )

    async def release(self, turn: TurnIdentity, *, request_id: str) -> None:
        """Let a Turn that was parked for an operator run again (D13).

        Raises:
            InvalidTransition: it does not wait for an operator.
        """
        check_id("request_id", request_id)
        await self._backend.execute(
            ReleaseTurn(
                session=turn.thread_key.session,
                thread_id=turn.thread_key.thread_id,
                turn_id=turn.turn_id,
                request_id=request_id,
            ),
            audience=Audience.OPERATOR,
        )

    async def repair(
        self, turn: TurnIdentity, position: str | None, *, expected_position: str | None, request_id: str
    ) -> RepairReceipt:
        """End a Turn that cannot go on because its state is damaged, and give its Thread a former context (C82).

        The Turn becomes FAILED with the reason it was parked for (CANCELLED if that was asked for), and the next one
        of the queue goes on from `position`. What its tools did is on record and is not in that context.

        Args:
            turn: it waits for an operator, or was cancelled and cannot be settled.
            position: of a checkpoint of its Thread. None, where none is good: the agent begins anew.
            expected_position: where the Thread stands, as `checkpoints().current` says.
            request_id: identity of this repair, unique in the Session.

        Raises:
            InvalidTransition: the Turn goes on by itself, or the outcome of a tool is not known: reconcile it first.
            PositionConflict, NotFound, CorruptRecord, Incompatible, NoCheckpointCodec: as in `DurableThread.restore`.
        """
        key = turn.thread_key
        check_id("request_id", request_id)
        return await self._baselines.repair(
            key,
            turn.turn_id,
            0 if position is None else stream_position(key, position),
            expected_at=(
                0 if expected_position is None else stream_position(key, expected_position, path="expected_position")
            ),
            request_id=request_id,
        )

    async def export_checkpoint(self, thread: ThreadKey, position: str) -> bytes:
        """The agent's native state at a settled position, as one JSON document: to keep before a repair, or to look at.

        It is private: everything the agent knows is in it. That it can be written says that the position is good.

        Raises:
            CorruptRecord: it is not; try the one before it.
        """
        check_key(thread)
        return await self._baselines.export(thread, stream_position(thread, position))

    async def doctor(self, *, deep: bool = False, session: SessionKey | None = None) -> Examination:
        """Whether the store is sound, and what exactly is not (C82). Read-only, in bounded memory.

        It takes as long as reading the store's file once. On a store that hosts write meanwhile, SQLite's log grows
        until it is done.

        Args:
            deep: read every commit, record and object, too, and compare them with their sums and digests.
            session: look at this Session only.
        """
        if session is not None:
            check_key(session)
        return await self._backend.query(Examine(deep=deep, session=session), audience=Audience.OPERATOR)

    async def stalled(self, after: Timeout = STALL_AFTER, *, cursor: str | None = None, limit: int = 100) -> StallPage:
        """Threads of all Sessions whose Turn could go on and has not for this long (C18). Read-only.

        A Turn that waits for something it can name (an answer, a tool that runs, a retry that is not due, a person) is
        not among them: `status().waiting_on` says why. A host that is slow, stuck or gone is what remains.

        Args:
            after: seconds, or a timedelta.
            limit: Threads looked at, 1 to 1000; the page may hold fewer and still have a cursor.
        """
        return await self._backend.query(
            ListStalled(after_ms=milliseconds(after), cursor=cursor, limit=limit), audience=Audience.OPERATOR
        )

    async def watchdog(self, after: Timeout = STALL_AFTER) -> WatchView:
        """How many are stalled, and the longest age, as figures for an exporter of metrics (C18).

        Looks at no more than WATCHED_MAX Threads, those first that a host owns.
        """
        owned = unclaimed = age_max_ms = looked = 0
        cursor: str | None = None
        while looked < WATCHED_MAX:
            page = await self.stalled(after, cursor=cursor, limit=WATCH_PAGE)
            alive = sum(view.alive for view in page.items)
            owned, unclaimed = owned + alive, unclaimed + len(page.items) - alive
            age_max_ms = max(age_max_ms, page.age_max_ms)
            looked += page.looked
            cursor = page.cursor
            if cursor is None:
                break
        return WatchView(owned=owned, unclaimed=unclaimed, age_max_ms=age_max_ms, complete=cursor is None)

    async def measure(self, session: SessionKey) -> SessionSizeView:
        """What a Session takes: counts and bytes (BE-28). It looks at each of its rows: ask now and then.

        Raises:
            NotFound: there is no such Session.
        """
        return await self._backend.query(MeasureSession(session=session), audience=Audience.OPERATOR)

    async def measure_store(self) -> StoreView:
        """How busy this process's record store is, counted since it was opened, and what it takes (BE-28). Cheap."""
        return await self._backend.query(MeasureStore(), audience=Audience.OPERATOR)

    async def put_policy(self, session: SessionKey, key: str, value: Any, *, request_id: str) -> PolicyReceipt:
        """Write one policy record, or with None remove it: what a `CommitPolicy` reads in its transactions (BE-18).

        It is true for every commit after this one, and for none before. Repeating the same request returns the first
        receipt, which is kept with the request id for as long as the Session.

        Args:
            session: whose; a transaction sees the records of its own Session and no other's.
            key: name of the record.
            value: anything that is JSON, up to POLICY_BYTES_MAX.
            request_id: identity of this change, unique in the Session.

        Raises:
            TooLarge: more than that.
            RequestConflict: the request id was used for something else.
        """
        check_key(session)
        check_id("key", key)
        check_id("request_id", request_id)
        body, digest = None, ""
        if value is not None:
            value = durable_json.value(value)
            content = msgspec.json.encode(value)
            if len(content) > POLICY_BYTES_MAX:
                raise TooLarge("policy record", size_bytes=len(content), limit_bytes=POLICY_BYTES_MAX)
            body, digest = inline_body(content), durable_json.digest(value)
        receipt: PolicyReceipt = await self._backend.execute(
            PutPolicy(session=session, key=key, request_id=request_id, value=body, digest=digest),
            audience=Audience.OPERATOR,
        )
        log.info(
            "policy record %s of session %s is %s by request %s",
            key,
            session.session_id,
            "removed" if receipt.removed else "written",
            request_id,
            extra={"namespace": session.namespace, "session_id": session.session_id, "request_id": request_id},
        )
        return receipt

    async def list_policies(self, session: SessionKey, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """Policy records of a Session, in the order of their keys, each with the request that put it there.

        Items are `PolicyRecordView`s.
        """
        check_key(session)
        question = ListPolicies(session=session, cursor=cursor, limit=limit)
        return await self._backend.query(question, audience=Audience.OPERATOR)


def _outcome(result: Succeeded | Failed | Cancelled) -> tuple[ExecutionState, ToolResult]:
    match result:
        case Succeeded(value=value, error=error):
            state = "error" if error else "success"
            return ExecutionState.COMPLETED, ToolResult(state=state, value=durable_json.value(value))
        case Failed(reason=reason):
            return ExecutionState.FAILED, ToolResult(state="error", reason=reason)
        case Cancelled(reason=reason):
            return ExecutionState.CANCELLED, ToolResult(state="interrupted", reason=reason or "cancelled")
        case _:  # pyright: ignore[reportUnnecessaryComparison] - callers without a type checker
            raise InvalidRequest(
                f"a result is Succeeded(value), Failed(reason) or Cancelled(reason), not {type(result).__name__}",
                path="result",
            )
