"""Hands tool executions to their executors and stores what becomes of them.

Rule 1: a start is granted once, by the store. Whoever finds it granted already asks the executor and never starts it
again, however little it knows.
Rule 2: an outcome that cannot be told is Unknown; an exception says nothing about the effect.
Rule 3: a dispatcher that stops leaves the execution to its identity: another host asks for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, NamedTuple, assert_never

import msgspec

from agentscope_durable import _failpoints
from agentscope_durable.contracts import durable_json, keys
from agentscope_durable.contracts.commands import (
    ClaimExecution,
    ExecutionAction,
    ExecutionGrant,
    RecordOutcome,
)
from agentscope_durable.contracts.errors import DurableError, said
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.records import RunStepRef
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.domain.change import ready_hint
from agentscope_durable.runtime.backoff import Backoff
from agentscope_durable.runtime.classify import ends_the_program
from agentscope_durable.runtime.hints import ringing
from agentscope_durable.runtime.host import Delivery, Host, log
from agentscope_durable.runtime.run import load_body
from agentscope_durable.runtime.scheduler import (
    AUDIT_SECONDS,
    BATCH,
    EMPTY_OWNER_SECONDS,
    FORGET_MAX,
    PAGES_MAX,
    dead_owners,
    forget,
    holders,
)
from agentscope_durable.runtime.tasks import Bell, Tasks
from agentscope_durable.spi.contained import contained, give_up
from agentscope_durable.spi.executor import (
    REASON_CHARS_MAX,
    Cancelled,
    ExecutionRequest,
    Executor,
    Failed,
    Outcome,
    Running,
    Succeeded,
    Unknown,
)
from agentscope_durable.spi.record_store import ReadyItem, ReadyScan

QUERY_WAIT_MS = 1000
QUERY_WAIT_MAX_MS = 30_000
"""Between two questions about one execution: doubling from the first to the second."""
PAGES_FULL = 4
"""Pages of a route looked at while there is no room: only cancels of what runs here are of interest."""


class Dispatcher:
    """Starts, queries and cancels executions of the routes it was given.

    Args:
        executors: by route.
        parallelism: executions in hand at once.
    """

    def __init__(self, host: Host, executors: Mapping[str, Executor], *, parallelism: int) -> None:
        self._host = host
        self._executors = executors
        self._parallelism = parallelism
        self._routes = list(executors)
        self._bell = Bell()
        self._work = Tasks()
        self._claiming: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._starting: set[tuple[str, str]] = set()
        self._asking: dict[tuple[str, str], asyncio.Event] = {}
        """Questions under way; the event breaks one off."""
        self._backoff = Backoff(host.environment, host.poll_interval)
        self._audited_at = host.environment.monotonic()
        self._ownerless_due = True
        self._empty = Backoff(host.environment, EMPTY_OWNER_SECONDS, most=EMPTY_OWNER_SECONDS)

    @property
    def work(self) -> Tasks:
        return self._work

    def wake(self) -> None:
        self._bell.ring()

    async def run(self) -> None:
        """Scan until the host closes: a host that drains still needs the results of its Turns."""
        host = self._host
        wanted = frozenset(ready_hint(keys.READY_DISPATCH, route) for route in self._routes)
        async with ringing(host.backend.wakeups(), wanted, self._bell):
            while not host.closing:
                wait = host.poll_interval
                try:
                    wait = min(wait, await self._scan())
                except Exception as error:  # noqa: BLE001 - the next scan is the repair
                    host.report(error, "looking for tool calls failed")
                await self._bell.wait(host.environment, wait)

    async def audit(self, *, ending: bool = False) -> bool:
        """Look after executions that this host answers for and does not have in hand; False if some may be left.

        Their outcome could not be stored, or the answer of their grant was lost for good. In a host that goes on the
        executor is asked again; one that ends leaves them to whoever serves the route next.
        """
        clean = True
        async for item in self._rows(keys.READY_RUNNING, self._host.owner, []):
            place = (item.partition, item.item)
            if place in self._claiming or self._in_hand(place):
                clean = False
            elif ending:
                clean = await self._leave(item) and clean
            else:
                self._start(item, ())
        return clean

    async def _leave(self, item: ReadyItem) -> bool:
        route, thread_id = keys.dispatch_target(item.value)
        turn_id, _, call_id = item.item.partition("/")
        place = (item.partition, item.item)
        call = _Call(ThreadKey(keys.session_of(item.partition), thread_id), turn_id, call_id, place)
        try:
            grant = await self._claim(call, ())
            if grant.action is not ExecutionAction.NOTHING:
                may_query = self._executors[route].capabilities.query
                left: Outcome = Running(0.001) if may_query else Unknown("the host ended")
                await self._record(call, grant, left, may_query=may_query)
        except Exception as error:  # noqa: BLE001 - then the lease is not released, and its end tells others
            self._host.report(error, f"tool call {call_id!r} cannot be left to others", **call.ids)
            return False
        return True

    async def _scan(self) -> float:
        due = [self._host.poll_interval]
        now = self._host.environment.monotonic()
        if now - self._audited_at > AUDIT_SECONDS:
            self._audited_at = now
            self._ownerless_due = True
            await self.audit()
        async for item, dead in self._lost():
            self._start(item, dead)
        self._routes.append(self._routes.pop(0))
        for route in self._routes:
            async for item in self._rows(keys.READY_DISPATCH, route, due):
                self._start(item, ())
        return min(due)

    async def _rows(self, kind: str, klass: str, due: list[float]) -> AsyncIterator[ReadyItem]:
        after: tuple[int, str, str] | None = None
        for _ in range(PAGES_FULL if self._full else PAGES_MAX):
            page = await self._host.backend.ready(ReadyScan(kind, klass, after, BATCH))
            for item in page.items:
                yield item
            if page.next_due_ms is not None:
                due.append(max(0.0, (page.next_due_ms - page.now_ms) / 1000))
            if len(page.items) < BATCH:
                return
            last = page.items[-1]
            after = (last.due_ms, last.partition, last.item)

    @property
    def _full(self) -> bool:
        return len(self._work) >= self._parallelism

    async def _lost(self) -> AsyncIterator[tuple[ReadyItem, tuple[str, ...]]]:
        """Executions that a host had in hand when it was lost."""
        left = FORGET_MAX
        holding = await holders(self._host, keys.READY_RUNNING) if self._ownerless_due else []
        self._ownerless_due = False
        async for owner, dead in dead_owners(self._host, self._empty, holding):
            empty = True
            async for item in self._rows(keys.READY_RUNNING, owner, []):
                empty = False
                if keys.dispatch_target(item.value)[0] in self._executors:
                    yield item, dead
            if empty:
                left = await forget(self._host, self._empty, owner, left)

    def _start(self, item: ReadyItem, dead: tuple[str, ...]) -> None:
        place = (item.partition, item.item)
        if self._host.closing or place in self._claiming or self._backoff.holds(place):
            return
        # A cancel must reach an execution that is in hand here, even when there is no room for another one.
        if self._full and not self._in_hand(place):
            return
        self._claiming[place] = self._work.start(self._take(item, dead), name=f"execution {item.item}")

    def _in_hand(self, place: tuple[str, str]) -> bool:
        """It is being performed or asked for here; only a cancel of it is looked for."""
        return place in self._starting or place in self._asking

    def _let_go(self, place: tuple[str, str]) -> None:
        """Let a cancel be claimed, unless the place is another's by now."""
        if self._claiming.get(place) is asyncio.current_task():
            del self._claiming[place]

    async def _take(self, item: ReadyItem, dead: tuple[str, ...]) -> None:
        place = (item.partition, item.item)
        route, thread_id = keys.dispatch_target(item.value)
        turn_id, _, call_id = item.item.partition("/")
        call = _Call(ThreadKey(keys.session_of(item.partition), thread_id), turn_id, call_id, place)
        did = False
        try:
            did = await self._perform(call, dead)
        except Exception as error:  # noqa: BLE001 - one call's failure must not stop the others
            self._host.report(error, f"tool call {call_id!r} cannot be handled", route=route, **call.ids)
        finally:
            self._let_go(place)
            if did:
                self._backoff.done(place)
            else:
                self._backoff.missed(place)
            self._bell.ring()

    async def _claim(self, call: _Call, dead: tuple[str, ...]) -> ExecutionGrant:
        return await Delivery(self._host).send(
            ClaimExecution(
                session=call.thread.session,
                thread_id=call.thread.thread_id,
                turn_id=call.turn_id,
                call_id=call.call_id,
                owner=self._host.owner,
                dead=dead,
            ),
            **call.ids,
        )

    async def _perform(self, call: _Call, dead: tuple[str, ...]) -> bool:
        """Do what the store grants; False when it grants nothing."""
        grant = await self._claim(call, dead)
        if grant.action is ExecutionAction.NOTHING:
            return False
        if grant.action is ExecutionAction.QUERY and self._in_hand(call.place):
            # Found on a page that was read before it was taken in hand: it is answered for already.
            return True
        executor = self._executors[grant.route]
        may_query = executor.capabilities.query
        starts = grant.action is ExecutionAction.START
        if starts:
            self._starting.add(call.place)
            self._let_go(call.place)
        try:
            outcome = await self._carry_out(call, grant, executor)
            if outcome is not None:
                # Known now: it is stored even if this host is told to end meanwhile.
                recording = self._record(call, grant, outcome, may_query=may_query)
                await asyncio.shield(self._host.tasks.start(recording, name="store an outcome"))
        finally:
            if starts:
                self._starting.discard(call.place)
        return True

    async def _carry_out(self, call: _Call, grant: ExecutionGrant, executor: Executor) -> Outcome | None:
        """What the executor answers; None when the start or the cancel in hand here will say more."""
        starts = grant.action is ExecutionAction.START
        request: ExecutionRequest | None = None
        if grant.action is not ExecutionAction.QUERY:
            if asking := self._asking.get(call.place):
                asking.set()
            try:
                request = await self._request(call, grant)
            except DurableError as error:
                if not starts:
                    raise
                self._host.report(error, f"tool call {call.call_id!r} cannot be sent", **call.ids)
                return Failed(f"the call was not sent: {type(error).__name__}")
        try:
            if request is None:
                return await self._question(call, grant, executor)
            if starts:
                return await self._ask("executor.start", executor.execute(request))
            outcome = await self._ask("executor.cancel", executor.cancel(request))
            return None if isinstance(outcome, Running) and call.place in self._starting else outcome
        except asyncio.CancelledError:
            # This host ends. Whoever serves the route next asks, or nobody can tell.
            may_query = executor.capabilities.query
            left: Outcome = Unknown("the host ended") if starts and not may_query else Running(0.001)
            self._host.tasks.start(self._record(call, grant, left, may_query=may_query), name="leave a tool call")
            raise

    async def _question(self, call: _Call, grant: ExecutionGrant, executor: Executor) -> Outcome | None:
        """What a query answers; None when a cancel came first, which a query that hangs does not hold up (C23)."""

        async def ask() -> Outcome:
            request = await self._request(call, grant)
            return await self._ask("executor.query", executor.query(request))

        broken_off = self._asking[call.place] = asyncio.Event()
        self._let_go(call.place)
        cancel = asyncio.create_task(broken_off.wait(), name=f"cancel of {call.call_id}")
        answer = asyncio.create_task(ask(), name=f"query of {call.call_id}")
        try:
            await asyncio.wait({answer, cancel}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            del self._asking[call.place]
            for one in (cancel, answer):
                if not one.done():
                    await give_up(one)

    async def _request(self, call: _Call, grant: ExecutionGrant) -> ExecutionRequest:
        arguments: Any = ""
        if grant.arguments is not None:
            arguments = await load_body(self._host, call.thread, grant.arguments)
        return ExecutionRequest(
            session=call.thread.session,
            thread_id=call.thread.thread_id,
            turn_id=call.turn_id,
            call_id=call.call_id,
            execution_id=grant.execution_id,
            name=grant.name,
            route=grant.route,
            # The exact text the model gave; an adapter that keeps parsed arguments gives their JSON.
            arguments=arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode(),
            origin=grant.origin or RunStepRef("", ""),
        )

    async def _ask(self, failpoint: str, answer: Awaitable[Outcome]) -> Outcome:
        task = asyncio.current_task()
        try:
            _failpoints.hit(f"{failpoint}.before")
            outcome = await contained(answer, name=failpoint)
            _failpoints.hit(f"{failpoint}.after")
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            return Unknown("the executor gave up waiting")
        except BaseException as error:
            if ends_the_program(error, task):
                raise
            # The effect may have happened: that is an outcome.
            return Unknown(f"the executor raised {type(error).__name__}: {said(error)}"[:REASON_CHARS_MAX])
        if not isinstance(outcome, Outcome):
            return Unknown(f"the executor answered a {type(outcome).__name__}, which is no outcome")
        return outcome

    async def _record(self, call: _Call, grant: ExecutionGrant, outcome: Outcome, *, may_query: bool) -> None:
        state, result, wait_ms = _stored(outcome, grant.tries, may_query=may_query)
        body = None
        if result is not None:
            content = msgspec.json.encode(result)
            body = await self._host.put_body(call.thread.session, content)
        await Delivery(self._host).send(
            RecordOutcome(
                session=call.thread.session,
                thread_id=call.thread.thread_id,
                turn_id=call.turn_id,
                call_id=call.call_id,
                execution_id=grant.execution_id,
                state=state,
                result=body,
                retry_after_ms=wait_ms,
            ),
            **call.ids,
        )
        log.debug("tool call %s: %s", call.call_id, state, extra=call.ids)


class _Call(NamedTuple):
    thread: ThreadKey
    turn_id: str
    call_id: str
    place: tuple[str, str]

    @property
    def ids(self) -> dict[str, str]:
        return {
            "session_id": self.thread.session.session_id,
            "thread_id": self.thread.thread_id,
            "turn_id": self.turn_id,
            "call_id": self.call_id,
        }


def _stored(outcome: Outcome, tries: int, *, may_query: bool) -> tuple[ExecutionState, ToolResult | None, int]:
    """What is stored of an answer: state, result, and when to ask again (0: never by itself)."""
    wait_ms = min(QUERY_WAIT_MS << min(tries, 30), QUERY_WAIT_MAX_MS)
    match outcome:
        case Succeeded():
            return ExecutionState.COMPLETED, _succeeded(outcome), 0
        case Failed(reason=reason):
            return ExecutionState.FAILED, ToolResult(state="error", reason=_text(reason)), 0
        case Cancelled(reason=reason):
            return ExecutionState.CANCELLED, ToolResult(state="interrupted", reason=_text(reason)), 0
        case Running(retry_after=seconds):
            if isinstance(seconds, int | float) and not math.isnan(seconds):
                wait_ms = int(max(1, min(seconds * 1000, QUERY_WAIT_MAX_MS)))
            return ExecutionState.RUNNING, None, wait_ms
        case Unknown():
            # Nobody else can say either: evidence settles it, not another question.
            return ExecutionState.UNKNOWN, None, wait_ms if may_query else 0
        case _:
            assert_never(outcome)


def _succeeded(outcome: Succeeded) -> ToolResult:
    """It has happened: what JSON cannot carry becomes a definite ERROR that says so, never a lost effect (D5)."""
    carried: list[Any] = []
    for part in (outcome.value, outcome.content, outcome.metadata):
        value, refusal = durable_json.tool_value(part)
        if refusal is not None:
            return ToolResult(state="error", reason=refusal)
        carried.append(value)
    value, content, metadata = carried
    result = ToolResult(
        state=outcome.state or ("error" if outcome.error else "success"),
        value=value,
        content=content,
        metadata=metadata,
        reason=value if outcome.error and isinstance(value, str) else None,
    )
    try:
        # What is stored must be readable by the agent that asked for it.
        return msgspec.convert(msgspec.to_builtins(result), ToolResult)
    except msgspec.ValidationError as error:
        return ToolResult(state="error", reason=_text(f"the tool ran, but its result has not the form of one: {error}"))


def _text(reason: object) -> str:
    return durable_json.sanitize_text(str(reason or ""))[:REASON_CHARS_MAX]
