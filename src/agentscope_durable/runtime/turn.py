"""A Turn as an application holds it. The rules of a handle stand in `handles`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import TypeVar

import msgspec

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.commands import AddInput, Cancel, Pause, Respond, Resume, Signal, Withdraw
from agentscope_durable.contracts.durable_json import JsonValue
from agentscope_durable.contracts.errors import (
    HostClosed,
    InvalidRequest,
    NotFinished,
    NotFound,
    Retry,
    StoreMoved,
    TurnCancelled,
    TurnFailed,
    WaitTimeout,
)
from agentscope_durable.contracts.events import EventFilter
from agentscope_durable.contracts.explanation import Explanation
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.ids import check_id
from agentscope_durable.contracts.messages import Input, InputKind, Message, Text, as_input, input_digest_value
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.contracts.questions import (
    ExplainTurn,
    GetOutcome,
    GetRun,
    GetTurn,
    ListInteractions,
    ListModelCalls,
    ListRuns,
    ListSteps,
    ListTools,
)
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.contracts.views import (
    CommandReceipt,
    InteractionView,
    ModelCallView,
    OutcomeView,
    Page,
    RunView,
    StepView,
    ToolView,
    TurnView,
)
from agentscope_durable.runtime.door import Door
from agentscope_durable.runtime.tasks import Bell
from agentscope_durable.runtime.timeline import PAGE_LIMIT, Timeline

__all__ = ["DurableTurn", "Timeout", "TurnInput", "content_blocks"]

T = TypeVar("T")

REVISION_MAX = 2**53 - 1
FOR_EVER_SECONDS = 1e9
"""A wait that is longer than thirty years has no end."""
ANSWERED = frozenset((WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT))
"""What a Turn waits for that `respond` gives."""

TurnInput = str | Input | Mapping[str, JsonValue]
"""What can be submitted: text, an `Input`, or an input in its wire form."""
Timeout = float | timedelta | None
"""Seconds, or a timedelta; None waits without a bound."""


class DurableTurn(Timeline):
    """One submitted task: the object an application stores, observes and controls (RT-07)."""

    def __init__(self, door: Door, key: ThreadKey, turn_id: str) -> None:
        super().__init__(door, key.session, EventFilter(thread_id=key.thread_id, turn_id=turn_id))
        self._key = key
        self._turn_id = turn_id

    def __repr__(self) -> str:
        return f"DurableTurn({self._key.session.namespace!r}, {self._key.session.session_id!r}, {self._turn_id!r})"

    @property
    def turn_id(self) -> str:
        return self._turn_id

    @property
    def thread_key(self) -> ThreadKey:
        return self._key

    # ---- how it is, and how it ended ----

    async def status(self) -> TurnView:
        return await self._door.query(
            GetTurn(session=self._session, thread_id=self._key.thread_id, turn_id=self._turn_id)
        )

    async def explain(self) -> Explanation:
        """Why this Turn is where it is, whose move it is, and what to do next (DX-01).

        It costs a handful of reads, however much there is, and changes nothing. What it says of hosts and leases is
        true of the moment it was asked.
        """
        return await self._door.query(
            ExplainTurn(session=self._session, thread_id=self._key.thread_id, turn_id=self._turn_id)
        )

    async def result(self) -> Message | None:
        """The final message of a COMPLETED Turn; None if the agent gave none (RT-58).

        Raises:
            NotFinished: it has not ended.
            TurnFailed: it FAILED; carries the stored error.
            TurnCancelled: it was CANCELLED.
        """
        outcome = await self._outcome()
        if not outcome.status.terminal:
            raise NotFinished(self._key, self._turn_id, outcome.status)
        return self._answer(outcome)

    async def wait(self, timeout: Timeout = None) -> Message | None:
        """Wait for the end and return what `result` does.

        Raises:
            WaitTimeout: it did not end in time and goes on; says what it waits for (AD-19).
            TurnFailed, TurnCancelled: as `result`.
            Retry: it has ended, and until the time was up the store did not give its answer.
            HostClosed, StoreMoved: its end cannot be seen from here any more.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        known = seconds is None or (isinstance(seconds, int | float) and not isinstance(seconds, bool))
        if not known or (seconds is not None and not seconds > -math.inf):
            raise InvalidRequest("a timeout is a number of seconds, a timedelta or None", path="timeout")
        if seconds is not None:
            seconds = max(0.0, seconds)
        # Before anything of this runtime is touched: another event loop would wait for what is never told there.
        self._door.check()
        environment = self._door.environment
        deadline = math.inf if seconds is None or seconds > FOR_EVER_SECONDS else environment.monotonic() + seconds
        bell = Bell()
        async with self._door.feeds.of(self._session) as feed:
            with feed.ending(self._turn_id, bell):
                # From here on its end rings; whether it has ended before is seen by looking.
                if environment.monotonic() < deadline:
                    await feed.look()
                while True:
                    outcome = await _unless_away(self._outcome())
                    if outcome is not None and outcome.status.terminal:
                        return self._answer(outcome)
                    left = deadline - environment.monotonic()
                    if left <= 0:
                        break
                    if outcome is None:
                        await environment.sleep(min(left, self._door.poll_interval))
                        continue
                    rest = min(left, self._door.poll_interval if feed.failing else math.inf)
                    await bell.wait(environment, None if rest == math.inf else rest)
        view = await _unless_away(self.status())
        if view is not None and view.status.terminal:
            # Since a moment ago, or its answer is not where it was stored.
            return await self.result()
        timeout_ms = None if seconds is None else int(seconds * 1000)
        raise WaitTimeout(self._key, self._turn_id, timeout_ms=timeout_ms, waits_for=_reasons(view))

    async def _outcome(self) -> OutcomeView:
        return await self._door.query(
            GetOutcome(session=self._session, thread_id=self._key.thread_id, turn_id=self._turn_id)
        )

    def _answer(self, outcome: OutcomeView) -> Message | None:
        """What `result` gives for a Turn that has ended."""
        if outcome.status is TurnStatus.CANCELLED:
            raise TurnCancelled(self._key, self._turn_id)
        if outcome.status is TurnStatus.FAILED:
            error = outcome.error
            reason = "without a stored reason" if error is None else f"{error.kind}: {error.message}"
            raise TurnFailed(self._key, self._turn_id, reason)
        return outcome.message

    # ---- controls: a receipt means admitted, never done (AD-10) ----

    async def steer(self, request_id: str, input: TurnInput) -> CommandReceipt:
        """Input for the work under way, from its next boundary on; a final answer is reopened by it (CT-01, D20)."""
        return await self._add(InputKind.STEER, request_id, input)

    async def inject(self, request_id: str, input: TurnInput) -> CommandReceipt:
        """Input for the work under way that does not reopen a final answer."""
        return await self._add(InputKind.INJECT, request_id, input)

    async def _add(self, kind: InputKind, request_id: str, input: TurnInput) -> CommandReceipt:
        request_id = check_id("request_id", request_id)
        document = input_digest_value(as_input(input))
        return await self._door.execute(
            AddInput(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=request_id,
                turn_id=self._turn_id,
                kind=kind.value,
                content=await self._door.body(self._session, content_blocks(document)),
                digest=durable_json.digest(document),
            )
        )

    async def withdraw(self, request_id: str, target_request_id: str) -> CommandReceipt:
        """Take back a steer or inject that no checkpoint contains yet (CT-03)."""
        return await self._door.execute(
            Withdraw(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=check_id("request_id", request_id),
                turn_id=self._turn_id,
                target_request_id=check_id("target_request_id", target_request_id),
            )
        )

    async def cancel(self, request_id: str) -> CommandReceipt:
        """End the Turn: at once if it never ran, else after its effects are settled (CT-07, CT-08)."""
        return await self._door.execute(
            Cancel(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=check_id("request_id", request_id),
                turn_id=self._turn_id,
            )
        )

    async def pause(self, request_id: str) -> CommandReceipt:
        """Stop at the next boundary. Only an observed PAUSED says that the agent has stopped (CT-10)."""
        return await self._door.execute(
            Pause(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=check_id("request_id", request_id),
                turn_id=self._turn_id,
            )
        )

    async def resume(self, request_id: str, expected_revision: int) -> CommandReceipt:
        """Lift the pause that was seen.

        Args:
            expected_revision: `status().revision`, read while the Turn was PAUSED.

        Raises:
            RevisionConflict: it is not paused, or in another pause than the one that was seen.
        """
        if isinstance(expected_revision, bool) or not isinstance(expected_revision, int):
            raise InvalidRequest("a revision is an int", path="expected_revision")
        if not 0 <= expected_revision <= REVISION_MAX:
            raise InvalidRequest("there is no such revision", path="expected_revision")
        return await self._door.execute(
            Resume(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=check_id("request_id", request_id),
                turn_id=self._turn_id,
                expected_revision=expected_revision,
            )
        )

    async def signal(self, request_id: str, key: str, payload: JsonValue = None) -> CommandReceipt:
        """Send an extension signal; `key` begins with `x.` (CT-18, CT-25)."""
        value = durable_json.value(payload)
        return await self._door.execute(
            Signal(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=check_id("request_id", request_id),
                turn_id=self._turn_id,
                key=check_id("key", key),
                payload=await self._door.body(self._session, value),
                digest=durable_json.digest(value),
            )
        )

    # ---- interactions ----

    async def pending_interactions(self) -> list[InteractionView]:
        """The questions this Turn waits for (IN-01)."""
        return await self._door.query(
            ListInteractions(session=self._session, thread_id=self._key.thread_id, turn_id=self._turn_id)
        )

    async def respond(
        self,
        request_id: str,
        interaction_id: str,
        response: JsonValue,
        *,
        arguments: Mapping[str, JsonValue] | None = None,
    ) -> CommandReceipt:
        """Answer a question: True or False to an approval, any JSON as the result of a manual tool (IN-02).

        Args:
            arguments: with True: the call gets these in the place of the model's arguments, all of them. The agent's
                own permission rules still see the changed call, and can deny it; they do not ask again (IN-11).

        Raises:
            AlreadyDecided: it has an answer, or was closed with its Turn.
            InvalidRequest: not a boolean for an approval, or arguments with anything but an approval that is True.
        """
        value = durable_json.value(response)
        document = durable_json.value(msgspec.to_builtins(ToolResult(value=value)))
        changed = None if arguments is None else _object("arguments", arguments)
        # As a call has them: the text of a JSON object.
        edited = None if changed is None else msgspec.json.encode(changed).decode()
        return await self._door.execute(
            Respond(
                session=self._session,
                thread_id=self._key.thread_id,
                request_id=check_id("request_id", request_id),
                turn_id=self._turn_id,
                interaction_id=check_id("interaction_id", interaction_id),
                response=await self._door.body(self._session, value),
                digest=durable_json.digest(value),
                content=await self._door.body(self._session, msgspec.to_builtins([Text(_spoken(value, edited))])),
                result=await self._door.body(self._session, document),
                is_bool=isinstance(value, bool),
                approved=value is True,
                arguments=None if edited is None else await self._door.body(self._session, edited),
                arguments_digest="" if changed is None else durable_json.digest(changed),
            )
        )

    # ---- reading ----

    async def history(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """This Turn's messages, in the order of their first sequence (PR-11)."""
        return await self._history(self._narrow, cursor, limit)

    async def snapshot(self) -> SnapshotView:
        return await self._snapshot(None)

    async def list_tools(self) -> list[ToolView]:
        """The tool calls of this Turn: whether each has ended, was received, was applied (PR-08)."""
        return await self._door.query(
            ListTools(session=self._session, thread_id=self._key.thread_id, turn_id=self._turn_id)
        )

    async def list_runs(self, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """Invocations of the agent for this Turn (RT-08)."""
        return await self._door.query(
            ListRuns(
                session=self._session,
                thread_id=self._key.thread_id,
                turn_id=self._turn_id,
                cursor=cursor,
                limit=limit,
            )
        )

    async def get_run(self, run_id: str) -> RunView:
        return await self._door.query(
            GetRun(
                session=self._session,
                thread_id=self._key.thread_id,
                turn_id=self._turn_id,
                run_id=check_id("run_id", run_id),
            )
        )

    async def list_steps(self, run_id: str, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """Reasoning rounds and continuations of one Run."""
        return await self._door.query(
            ListSteps(
                session=self._session,
                thread_id=self._key.thread_id,
                turn_id=self._turn_id,
                run_id=check_id("run_id", run_id),
                cursor=cursor,
                limit=limit,
            )
        )

    async def get_step(self, run_id: str, step_id: str) -> StepView:
        step_id = check_id("step_id", step_id)
        cursor: str | None = None
        while True:
            page = await self.list_steps(run_id, cursor, 1000)
            for step in page.items:
                if step.step_id == step_id:
                    return step
            cursor = page.cursor
            if cursor is None:
                raise NotFound("step", step_id)

    async def list_model_calls(
        self, run_id: str, step_id: str | None = None, cursor: str | None = None, limit: int = PAGE_LIMIT
    ) -> Page:
        """Model calls of one Run, or of one of its Steps (MC-01)."""
        return await self._door.query(
            ListModelCalls(
                session=self._session,
                thread_id=self._key.thread_id,
                turn_id=self._turn_id,
                run_id=check_id("run_id", run_id),
                step_id=None if step_id is None else check_id("step_id", step_id),
                cursor=cursor,
                limit=limit,
            )
        )

    async def get_model_call(self, run_id: str, model_call_id: str) -> ModelCallView:
        model_call_id = check_id("model_call_id", model_call_id)
        cursor: str | None = None
        while True:
            page = await self.list_model_calls(run_id, None, cursor, 1000)
            for call in page.items:
                if call.model_call_id == model_call_id:
                    return call
            cursor = page.cursor
            if cursor is None:
                raise NotFound("model call", model_call_id)


def content_blocks(document: JsonValue) -> JsonValue:
    """The list of content blocks of an input in its wire form."""
    assert isinstance(document, dict)
    return document["content"]


async def _unless_away(answer: Awaitable[T]) -> T | None:
    """None while the store cannot be asked, which is no answer about the Turn."""
    try:
        return await answer
    except (HostClosed, StoreMoved):
        raise
    except Retry:
        return None


def _reasons(view: TurnView | None) -> str | None:
    """What holds the Turn, for an error: kinds, and the ids that its next action takes; never a body."""
    if view is None or not view.waiting_on:
        return None
    return ", ".join(
        f"a retry after {view.recovery.last_error.kind}"
        if reason.kind is WaitKind.RETRY and view.recovery is not None
        # A question is answered by its own id, everything else that a call waits for is known by the call's.
        else f"{reason.kind} {(reason.id if reason.kind in ANSWERED else reason.call_id or reason.id)!r}"
        for reason in view.waiting_on
    )


def _object(name: str, given: Mapping[str, JsonValue]) -> JsonValue:
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{name} are a JSON object, not {type(given).__name__}", path=name)
    return durable_json.value(dict(given))


def _spoken(value: JsonValue, edited: str | None) -> str:
    """An answer as people read it in the history."""
    if isinstance(value, bool):
        if edited is not None:
            return f"approved with {edited}"
        return "approved" if value else "denied"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
