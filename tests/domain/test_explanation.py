"""The table of `explain`, without a store: every state there can be has a row, and every row a state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.explanation import HOSTS_SHOWN_MAX
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import (
    Binding,
    Condition,
    ExecutionRecord,
    Failure,
    InteractionRecord,
    OpenModel,
    Recovery,
    RunState,
    RunStepRef,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnState,
)
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import (
    Actor,
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    ReasonKind,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.domain.explanation import Facts, HostFacts, explain
from agentscope_durable.domain.explanation.words import NAMED_MAX
from agentscope_durable.domain.turn_view import turn_view

NOW = 1_000_000
SESSION = SessionKey("app", "s")
BINDING = Binding("agent", "v1", "state-1")
THREAD = ThreadRecord("main", BINDING, 1, current="t1", writer="2.0")
SERVING = HostNotice(classes=(BINDING.ready_class,), parallelism=2)
ERROR = Failure("OSError", "no disk", retryable=True)
ORIGIN = RunStepRef("t1.1", "t1.1.s1")


def condition(kind: WaitKind, **fields) -> Condition:
    name = fields.pop("id", f"{kind}-1")
    return Condition(kind, name, "" if kind in (WaitKind.SIGNAL, WaitKind.CHILD) else "call-1", NOW - 5, **fields)


def host(name: str, *, alive: bool = True, dead: bool = False, notice: HostNotice = SERVING, holds: int | None = 0):
    return HostFacts(name, alive, dead, 2000, notice, holds)


def call(kind: ExecutionKind, state: ExecutionState = ExecutionState.RUNNING) -> ExecutionRecord:
    return ExecutionRecord("x1", "call-1", "work", kind, body_of("{}"), ORIGIN, 1, route="hands", state=state)


def facts(state: TurnState, **fields) -> Facts:
    record = TurnRecord("t1", "main", 1, "r1", 1, 1, state)
    known = {"now_ms": NOW, "thread": THREAD, "state": state, "active": None, "hosts": (), "view": None} | fields
    known["view"] = turn_view(SESSION, record, state)
    return Facts(**known)


def owned(state: TurnState, owner: str = "h1", run: RunState | None = None) -> ThreadHead:
    run = run or RunState("t1.1", 1, NOW - 9000, 1, 1, "t1.1.s1")
    return ThreadHead(3, owner, 5, 1, 5, "t1", state, run, writer="2.0")


CONDITIONS = [
    (),
    *((condition(kind),) for kind in WaitKind if kind not in (WaitKind.RETRY, WaitKind.HOST, WaitKind.OPERATOR)),
    (condition(WaitKind.APPROVAL, ready=True),),
    (condition(WaitKind.SIGNAL, deadline_ms=NOW + 5),),
    (condition(WaitKind.SIGNAL, deadline_ms=NOW - 5),),
    (condition(WaitKind.TOOL_RUNNING, ready=True), condition(WaitKind.APPROVAL)),
]
ENDINGS = [{}, {"cancel": "c1"}, {"failure": ERROR}, {"cancel": "c1", "settle_ms": NOW + 9, "settle_tries": 2}]
RECOVERIES = [None, Recovery(3, 1, 2, 1, NOW + 50, ERROR), Recovery(3, 1, 2, 1, NOW - 50, ERROR)]
HOSTS = {
    "nobody": (),
    "room": (host("h1"),),
    "full": (host("h1", holds=2),),
    "draining": (host("h1", notice=replace(SERVING, draining=True)),),
    "another definition": (host("h1", notice=HostNotice(classes=("other\x1fv1\x1fs",), names=("made",))),),
    "another writer": (host("h1", notice=replace(SERVING, refused=("2.0",))),),
    "silent": (host("h1", alive=False),),
    "dead": (host("h1", dead=True),),
}
CALLS = [{}, {"call-1": call(ExecutionKind.LOCAL)}, {"call-1": call(ExecutionKind.EXTERNAL, ExecutionState.INTENT)}]


def states() -> Iterator[TurnState]:
    for status, conditions, ending, recovery, operator in itertools.product(
        TurnStatus, CONDITIONS, ENDINGS, RECOVERIES, ("", "look at it")
    ):
        if status.terminal:
            conditions, ending, operator = (), {}, ""
        elif ending and status in (TurnStatus.PAUSED, TurnStatus.QUEUED):
            continue  # It is WAITING then (`at_rest`).
        yield TurnState(
            status=status,
            revision=4,
            conditions=tuple(c for c in conditions if c.kind is not WaitKind.DEFINITION_MISSING),
            recovery=recovery,
            operator=operator,
            runs=0 if status is TurnStatus.QUEUED else 1,
            inputs=1 if recovery and not status.terminal else 0,
            updated_ms=NOW - 1000,
            **ending,
        )


def situations() -> Iterator[Facts]:
    for state, hosts, calls in itertools.product(states(), HOSTS.values(), CALLS):
        yield facts(state, hosts=hosts, executions=calls)
        if state.status in (TurnStatus.RUNNING, TurnStatus.PAUSING):
            yield facts(state, hosts=hosts, executions=calls, active=owned(state), committed_ms=NOW - 3000)
    behind = facts(TurnState(), hosts=HOSTS["room"])
    yield behind._replace(head=behind.view, ahead=2, thread=replace(THREAD, current="t0"))
    yield facts(TurnState(), hosts=HOSTS["room"], session_full=True)


@pytest.mark.spec("DX-01")
def test_every_state_has_a_row_and_every_row_has_a_state() -> None:
    met: set[ReasonKind] = set()
    for known in situations():
        explanation = explain(known)
        assert explanation.reasons, known
        assert explanation.summary == explanation.reasons[0].text
        for reason in explanation.reasons:
            assert reason.text and reason.next_action
            assert "submit" not in reason.next_action or "submits nothing" in reason.next_action, reason
        met |= {reason.kind for reason in explanation.reasons}

    assert met | {ReasonKind.QUEUED_BEHIND} == set(ReasonKind)
    assert ReasonKind.QUEUED_BEHIND in met


def test_an_ended_turn_has_one_row_and_is_nobodys_move() -> None:
    for state in states():
        if state.status.terminal:
            [reason] = explain(facts(state, hosts=HOSTS["room"])).reasons
            assert (reason.kind, reason.actor) == (ReasonKind.ENDED, Actor.NOBODY)


def test_a_local_tool_is_part_of_the_run_that_runs_it() -> None:
    state = TurnState(status=TurnStatus.RUNNING, conditions=(condition(WaitKind.TOOL_RUNNING),), runs=1)
    known = facts(state, hosts=HOSTS["room"], active=owned(state), executions={"call-1": call(ExecutionKind.LOCAL)})

    assert [reason.kind for reason in explain(known).reasons] == [ReasonKind.RUNNING]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (call(ExecutionKind.EXTERNAL, ExecutionState.INTENT), "to start 'work' (call call-1), route 'hands'"),
        (replace(call(ExecutionKind.EXTERNAL), owner="h7"), "execution x1, on host h7"),
        (call(ExecutionKind.EXTERNAL), "is asked again from time to time"),
        (replace(call(ExecutionKind.EXTERNAL), cancel_requested=True), "was asked to stop and has not confirmed"),
    ],
)
def test_where_an_external_call_is(record: ExecutionRecord, said: str) -> None:
    state = TurnState(status=TurnStatus.WAITING, conditions=(condition(WaitKind.TOOL_RUNNING),), runs=1)
    hands = host("h7", notice=HostNotice(routes=("hands",)))

    [served] = explain(facts(state, hosts=(hands,), executions={"call-1": record})).reasons
    [unserved] = explain(facts(state, executions={"call-1": record})).reasons

    assert said in served.text
    assert (served.actor, unserved.actor) == (Actor.NOBODY, Actor.OPERATOR)
    assert "route 'hands'" in unserved.next_action


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RunState("t1.1", 1, 1, 1, 1, "t1.1.s1"), "Run 1 is under way"),
        (RunState("t1.1", 1, 1, 1, 2, "t1.1.s2"), "It is in step 2, REASONING."),
        (
            RunState("t1.1", 1, 1, 1, models=(OpenModel("m", "s", "x", 2, 1, NOW - 65_000),)),
            "A model has been asked for 1 min (attempt 2).",
        ),
        (RunState(), "It is being settled"),
    ],
)
def test_what_a_run_is_doing(run: RunState, said: str) -> None:
    state = TurnState(status=TurnStatus.RUNNING, runs=1)

    [reason] = explain(facts(state, hosts=HOSTS["room"], active=owned(state, run=run))).reasons

    assert said in reason.text


def test_a_question_is_named_after_its_tool() -> None:
    state = TurnState(status=TurnStatus.WAITING, conditions=(condition(WaitKind.APPROVAL, id="i1"),), runs=1)
    asked = InteractionRecord("i1", "call-1", InteractionKind.APPROVAL, "deploy", body_of("{}"), ORIGIN, 1)

    [named] = explain(facts(state, interactions={"i1": asked})).reasons
    [unnamed] = explain(facts(state)).reasons

    assert "'deploy' (call call-1)" in named.text
    assert "call call-1" in unnamed.text


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (HOSTS["dead"], "is dead; it renewed its lease 2 s ago"),
        (HOSTS["silent"], "has not renewed its lease for 2 s"),
        ((), "has no lease any more"),
    ],
)
def test_what_became_of_the_owner(owner: tuple[HostFacts, ...], said: str) -> None:
    state = TurnState(status=TurnStatus.RUNNING, runs=1)

    reasons = explain(facts(state, hosts=(*owner, host("h2")), active=owned(state))).reasons

    assert [reason.kind for reason in reasons] == [ReasonKind.OWNER_GONE, ReasonKind.HOST_SOON]
    assert said in reasons[0].text


def test_many_hosts_are_counted_and_the_serving_ones_are_shown_first() -> None:
    others = tuple(host(f"a{n:02}", notice=HostNotice(classes=("other\x1fv1\x1fs",))) for n in range(30))

    missing = explain(facts(TurnState(), hosts=others))
    shown = explain(facts(TurnState(), hosts=(*others, host("z"))))

    assert f"and {30 - NAMED_MAX} more" in missing.reasons[0].text
    assert len(shown.hosts) == HOSTS_SHOWN_MAX
    assert shown.hosts[0].owner == "z" and shown.hosts[0].serves


def test_a_host_that_makes_versions_as_it_meets_them_may_serve_any() -> None:
    maker = host("h1", notice=HostNotice(names=("agent",), parallelism=1))

    explanation = explain(facts(TurnState(), hosts=(maker,)))

    assert explanation.reasons[0].kind is ReasonKind.HOST_SOON
    assert explanation.hosts[0].definitions == ("agent@*",)
