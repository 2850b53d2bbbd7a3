"""Tool executions on their way to an executor and back."""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.contracts.errors import Uncertain
from agentscope_durable.contracts.status import ExecutionState, TurnStatus, WaitKind
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.dispatch import QUERY_WAIT_MAX_MS, _stored
from agentscope_durable.spi.executor import (
    Cancelled,
    ExecutorCapabilities,
    Failed,
    Running,
    Succeeded,
    ToolError,
    Unknown,
)
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import ScriptedHarness, external, final, together
from tests.runtime.conftest import KEY, SECONDS, Hosts, kill, turn_is, until
from tests.runtime.test_recovery import LEASE_MS
from tests.runtime.test_settlement import Remote


async def run(hosts: Hosts, functions, call=None, answer: str = "{results}"):
    script = [call or external("hands", "work", n=1), final(answer)]
    runtime = await hosts.open(script, executors={"hands": FunctionExecutor(functions)})
    session = await runtime.create_session(KEY, "agent")
    return await session.submit("r1", "a")


@pytest.mark.spec("RT-55")
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_function_gets_its_arguments_and_its_result_is_applied(hosts: Hosts, kind: str) -> None:
    async def later(n: int, unit: str = "x") -> dict:
        return {"n": n, "unit": unit}

    def at_once(n: int, unit: str = "x") -> dict:
        return {"n": n, "unit": unit}

    turn = await run(hosts, {"work": later if kind == "async" else at_once})
    assert str(await turn.wait(SECONDS)) == '{"n":1,"unit":"x"}'
    (tool,) = await turn.list_tools()

    assert tool.state is ExecutionState.COMPLETED
    assert tool.execution_id is not None
    assert tool.origin.run_id == (await turn.list_runs()).items[0].run_id
    assert tool.applied_at.run_id == (await turn.list_runs()).items[1].run_id


async def test_a_tool_error_is_the_result_the_agent_sees(hosts: Hosts) -> None:
    async def work(n: int) -> str:
        raise ToolError("there is no such unit")

    turn = await run(hosts, {"work": work})
    assert str(await turn.wait(SECONDS)) == "there is no such unit"
    (tool,) = await turn.list_tools()

    assert (tool.state, tool.result["state"]) == (ExecutionState.COMPLETED, "error")


@pytest.mark.parametrize(
    "call", [external("hands", "other"), external("hands", "work", wrong=1)], ids=["name", "arguments"]
)
async def test_a_call_that_cannot_begin_is_a_definite_error(hosts: Hosts, call) -> None:
    effects = []

    async def work(n: int) -> str:
        effects.append(n)
        return "ok"

    turn = await run(hosts, {"work": work}, call)
    message = str(await turn.wait(SECONDS))

    assert "work" in message or "other" in message
    assert effects == []


async def test_any_other_exception_is_unknown(hosts: Hosts) -> None:
    async def work(n: int) -> str:
        raise OSError("after the effect?")

    turn = await run(hosts, {"work": work})
    view = await turn_is(
        turn, TurnStatus.WAITING, where=lambda view: any(r.kind is WaitKind.TOOL_UNKNOWN for r in view.waiting_on)
    )

    assert len(view.waiting_on) == 1


@pytest.mark.spec("PT-13")
@pytest.mark.parametrize(
    "value", [{1, 2}, {"n": float("nan")}, {"n": [2**60]}, object()], ids=["set", "nan", "big", "object"]
)
async def test_a_value_json_cannot_carry_is_a_definite_error(hosts: Hosts, value) -> None:
    effects = []

    async def work(n: int):
        effects.append(n)
        return value

    turn = await run(hosts, {"work": work})
    assert "JSON cannot carry" in str(await turn.wait(SECONDS))
    (tool,) = await turn.list_tools()

    assert (tool.state, tool.result["state"]) == (ExecutionState.COMPLETED, "error")
    assert effects == [1]


async def test_a_running_execution_is_asked_for_until_it_ends(hosts: Hosts) -> None:
    remote = Remote()
    runtime = await hosts.open([external("hands", "work"), final("{results}")], executors={"hands": remote})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await until(lambda: len(remote.queried) >= 2)
    remote.outcome = Succeeded(value="at last")

    assert str(await turn.wait(SECONDS)) == "at last"
    assert len(remote.started) == 1
    assert set(remote.queried) == set(remote.started)


async def test_unknown_is_asked_again_where_a_query_can_tell(hosts: Hosts, clock: ManualClock) -> None:
    remote = Remote()
    remote.outcome = Unknown("no answer")
    runtime = await hosts.open([external("hands", "work"), final("{results}")], executors={"hands": remote})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn_is(turn, TurnStatus.WAITING, where=lambda v: any(r.kind is WaitKind.TOOL_UNKNOWN for r in v.waiting_on))
    remote.outcome = Succeeded(value="found")
    clock.advance(1000)

    assert str(await turn.wait(SECONDS)) == "found"
    assert len(remote.started) == 1


async def test_an_execution_lost_with_its_host_is_queried_and_never_started_again(
    hosts: Hosts, clock: ManualClock
) -> None:
    class Hangs(Remote):
        async def execute(self, request):
            self.started.append(request.execution_id)
            await asyncio.Event().wait()

    hanging = Hangs()
    script = [external("hands", "work"), final("{results}")]
    first = await hosts.open(script, executors={"hands": hanging}, close_timeout=0.1)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await until(lambda: bool(hanging.started))
    await turn_is(turn, TurnStatus.WAITING)
    kill(first)
    clock.advance(LEASE_MS + 1)
    remote = Remote()
    remote.outcome = Succeeded(value="asked for")
    second = await hosts.open(script, executors={"hands": remote})
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "asked for"
    assert remote.started == []
    assert remote.queried == hanging.started


@pytest.mark.spec("LF-02")
@pytest.mark.parametrize("may_query", [True, False])
async def test_an_execution_in_hand_when_its_host_closes(hosts: Hosts, may_query: bool) -> None:
    class Hangs(Remote):
        capabilities = ExecutorCapabilities(query=may_query)

        async def execute(self, request):
            self.started.append(request.execution_id)
            await asyncio.Event().wait()

    class After(Remote):
        capabilities = ExecutorCapabilities(query=may_query)

    hanging = Hangs()
    script = [external("hands", "work"), final("{results}")]
    first = await hosts.open(script, executors={"hands": hanging}, close_timeout=0.1)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await until(lambda: bool(hanging.started))
    await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    remote = After()
    remote.outcome = Succeeded(value="asked for")
    second = await hosts.open(script, executors={"hands": remote})
    again = second.get_session(KEY).get_turn(turn.turn_id)
    if may_query:
        assert str(await again.wait(SECONDS)) == "asked for"
    else:
        view = await again.status()
        assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]
    assert remote.started == []


async def test_several_calls_run_at_once_and_are_applied_as_they_end(hosts: Hosts) -> None:
    inside = 0
    high = 0
    release = asyncio.Event()

    async def work(n: int) -> int:
        nonlocal inside, high
        inside += 1
        high = max(high, inside)
        if inside == 3:
            release.set()
        await release.wait()
        inside -= 1
        return n

    call = together(*(external("hands", "work", n=number) for number in range(3)))
    turn = await run(hosts, {"work": work}, call)
    assert sorted(str(await turn.wait(SECONDS)).split(", ")) == ["0", "1", "2"]
    assert high == 3


async def test_executions_are_bounded_and_a_cancel_still_arrives(hosts: Hosts) -> None:
    started = asyncio.Event()

    async def work(n: int) -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    harness = ScriptedHarness([together(*(external("hands", "work", n=number) for number in range(3))), final()])
    runtime = await hosts.open(harness, executors={"hands": FunctionExecutor({"work": work})}, executor_parallelism=1)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await started.wait()
    await turn_is(turn, TurnStatus.WAITING)
    await turn.cancel("c1")
    await turn_is(turn, TurnStatus.CANCELLED)

    assert {tool.state for tool in await turn.list_tools()} == {ExecutionState.CANCELLED}


@pytest.mark.case("C23")
@pytest.mark.parametrize("ends", [True, False], ids=["ends when cancelled", "never ends"])
async def test_a_query_that_hangs_holds_up_no_cancel(hosts: Hosts, ends: bool) -> None:
    """There is no room for another call either, and what the query says afterwards is nobody's any more."""
    asked, let_go, broken_off = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Hangs(Remote):
        async def query(self, request):
            self.queried.append(request.execution_id)
            asked.set()
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    broken_off.set()
                    if ends:
                        raise
            return Succeeded(value="too late")

        async def cancel(self, request):
            self.cancelled.append(request.execution_id)
            return Cancelled("stopped")

    remote = Hangs()
    runtime = await hosts.open(
        [external("hands", "work"), final()], executors={"hands": remote}, executor_parallelism=1
    )
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await asked.wait()
    await turn.cancel("c1")
    await turn_is(turn, TurnStatus.CANCELLED)
    await broken_off.wait()
    let_go.set()
    await runtime.close()

    assert remote.queried == remote.cancelled == remote.started
    assert len(remote.started) == 1
    observer = (await hosts.open()).get_session(KEY).get_turn(turn.turn_id)
    (tool,) = await observer.list_tools()
    assert tool.state is ExecutionState.CANCELLED
    assert hosts.errors == []


@pytest.mark.parametrize(
    ("outcome", "may_query", "expected"),
    [
        (Succeeded(value=1), True, (ExecutionState.COMPLETED, "success", 0)),
        (Succeeded(value="no", error=True), True, (ExecutionState.COMPLETED, "error", 0)),
        (Failed("not done"), True, (ExecutionState.FAILED, "error", 0)),
        (Cancelled("stopped"), True, (ExecutionState.CANCELLED, "interrupted", 0)),
        (Running(0.25), True, (ExecutionState.RUNNING, None, 250)),
        (Running(3600), True, (ExecutionState.RUNNING, None, QUERY_WAIT_MAX_MS)),
        (Unknown("?"), True, (ExecutionState.UNKNOWN, None, 4000)),
        (Unknown("?"), False, (ExecutionState.UNKNOWN, None, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_outcome_has_one_stored_form(outcome, may_query, expected) -> None:
    state, result, wait_ms = _stored(outcome, 2, may_query=may_query)

    assert (state, None if result is None else result.state, wait_ms) == expected


class Loses:
    """A backend that carries commands of one kind out and loses the first answers."""

    def __init__(self, backend, kind: str, times: int = 1) -> None:
        self._backend = backend
        self._kind = kind
        self._left = times

    def __getattr__(self, name):
        return getattr(self._backend, name)

    async def execute(self, command, **options):
        receipt = await self._backend.execute(command, **options)
        if type(command).__name__ == self._kind and self._left:
            self._left -= 1
            raise Uncertain(self._kind)
        return receipt


@pytest.mark.spec("BE-29")
@pytest.mark.parametrize("kind", ["Claim", "ClaimExecution", "RecordOutcome", "CommitStep"])
async def test_a_host_that_loses_an_answer_still_does_everything_once(hosts: Hosts, kind: str) -> None:
    effects = []

    async def work(n: int) -> str:
        effects.append(n)
        return "worked"

    harness = ScriptedHarness([external("hands", "work", n=1), final("{results}")])
    runtime = await hosts.open(
        harness, executors={"hands": FunctionExecutor({"work": work})}, backend=Loses(hosts.backend, kind, times=2)
    )
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")

    assert str(await turn.wait(SECONDS)) == "worked"
    assert effects == [1]
    # The first Run takes the result in itself if it is there before that Run is at its end.
    assert [run.number for run in await turn.list_runs()] in ([1], [1, 2])
    happened = [str(line) for line in harness.ledger.lines()]
    assert len(happened) == len(set(happened))


async def test_an_execution_cancelled_before_its_start_was_heard_of_never_starts(hosts: Hosts) -> None:
    effects = []
    turns = []

    async def work(n: int) -> str:
        effects.append(n)
        return "worked"

    class CancelsMeanwhile(Loses):
        async def execute(self, command, **options):
            try:
                return await super().execute(command, **options)
            except Uncertain:
                await turns[0].cancel("c1")
                raise

    runtime = await hosts.open(
        [external("hands", "work", n=1), final()],
        executors={"hands": FunctionExecutor({"work": work})},
        backend=CancelsMeanwhile(hosts.backend, "ClaimExecution"),
    )
    api = await hosts.open()
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    turns.append(api.get_session(KEY).get_turn(turn.turn_id))
    await turn_is(turn, TurnStatus.CANCELLED)

    assert effects == []
    (tool,) = await turn.list_tools()
    assert tool.state is ExecutionState.CANCELLED


async def test_arguments_that_cannot_be_read_are_never_sent(hosts: Hosts) -> None:
    from agentscope_durable.contracts.errors import CorruptRecord

    class Damaged:
        def __getattr__(self, name):
            return getattr(hosts.backend, name)

        async def open_body(self, session, body):
            if b'"n' in bytes(body.inline) or b'\\"n' in bytes(body.inline):
                raise CorruptRecord("body", "JSON", "damaged")
            return await hosts.backend.open_body(session, body)

    remote = Remote()
    runtime = await hosts.open(
        [external("hands", "work", n=1), final("{results}")], executors={"hands": remote}, backend=Damaged()
    )
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    assert str(await turn.wait(SECONDS)) == "the call was not sent: CorruptRecord"
    (tool,) = await turn.list_tools()

    assert tool.state is ExecutionState.FAILED
    assert remote.started == []


@pytest.mark.parametrize(
    ("outcome", "state", "said"),
    [
        (None, ExecutionState.UNKNOWN, None),
        ({"value": 1}, ExecutionState.UNKNOWN, None),
        (Succeeded(value=1, state=5), ExecutionState.COMPLETED, "form"),
        (Succeeded(value=1, content=5), ExecutionState.COMPLETED, "form"),
        (Succeeded(value=1, metadata=[1]), ExecutionState.COMPLETED, "form"),
        (Failed(None), ExecutionState.FAILED, ""),
        (Failed(5), ExecutionState.FAILED, "5"),
    ],
    ids=repr,
)
async def test_an_answer_of_another_form_is_recorded_and_can_be_read(hosts: Hosts, outcome, state, said) -> None:
    class Odd:
        capabilities = ExecutorCapabilities(query=False, cancel=False, output=False)

        async def execute(self, request):
            return outcome

        query = cancel = execute

    runtime = await hosts.open([external("hands", "work"), final("ok")], executors={"hands": Odd()})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    if state is ExecutionState.UNKNOWN:
        await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.waiting_on[0].kind is WaitKind.TOOL_UNKNOWN)
    else:
        await turn.wait(SECONDS)
    (tool,) = await turn.list_tools()

    assert tool.state is state
    assert said is None or said in (tool.result.get("reason") or "")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, None, "soon"])
def test_a_wait_that_is_no_number_of_seconds_is_bounded(seconds) -> None:
    _, _, wait_ms = _stored(Running(seconds), 0, may_query=True)

    assert 1 <= wait_ms <= QUERY_WAIT_MAX_MS
