"""A commit policy: an application's own rule in the transaction, that may refuse, and that cannot do harm."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.backend.policy import REPORTS, governed
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import (
    Forbidden,
    InvalidRequest,
    Misuse,
    PolicyFailed,
    PolicyRefused,
    RequestConflict,
    StoreBusy,
    TooLarge,
)
from agentscope_durable.contracts.status import Audience, ExecutionKind, ExecutionState
from agentscope_durable.domain.rules import RULES
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.policy import POLICY_BYTES_MAX, POLICY_READS_MAX, CommitPolicy, PolicyRequest, PolicyView
from agentscope_durable.spi.record_store import Reads
from agentscope_durable.testing.manual_clock import ManualClock
from tests.backend.world import BINDING, HOST, SESSION, World, everything
from tests.every_store import STORES, shelf

Check = Callable[[PolicyRequest, PolicyView], Any]


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def under(backend: str, place: Path, policy: Any) -> AsyncGenerator[World]:
    """A Session over which this policy decides."""
    clock = ManualClock()
    async with shelf(backend, place, clock) as there:
        made = await there.backend(policy=policy)
        yield await World(backend=made, clock=clock).open()


class Rule:
    """Reads these records, and checks as it is told."""

    def __init__(self, check: Check = lambda request, view: None, *reads: str) -> None:
        self.asked: list[PolicyRequest] = []
        self.seen: list[PolicyView] = []
        self._check = check
        self._reads = reads

    def reads(self, request: PolicyRequest) -> tuple[str, ...]:
        return self._reads

    def check(self, request: PolicyRequest, view: PolicyView) -> None:
        self.asked.append(request)
        self.seen.append(view)
        return self._check(request, view)


def operations(world: World) -> HostOperations:
    return HostOperations(world.backend)


# ---- it refuses by what is on record ----


def closed_threads(request: PolicyRequest, view: PolicyView) -> None:
    if request.command == "submit" and request.thread_id in (view.records["closed"] or ()):
        raise PolicyRefused(f"nothing is taken for thread {request.thread_id!r} today")


@pytest.mark.spec("BE-18")
async def test_a_record_of_the_same_transaction_refuses_a_commit_and_nothing_is_stored(
    backend: str, tmp_path: Path
) -> None:
    async with under(backend, tmp_path, Rule(closed_threads, "closed")) as world:
        await world.do(c.CreateThread(session=SESSION, thread_id="research", binding=BINDING))
        await world.submit("before", "research")
        await operations(world).put_policy(SESSION, "closed", ["research"], request_id="p1")
        before = await everything(world)
        revision = (await world.backend.records.read(keys.partition(SESSION), Reads())).rev

        with pytest.raises(PolicyRefused) as refused:
            await world.submit("after", "research")

        assert str(refused.value).startswith("nothing is taken for thread 'research' today. ")
        assert await everything(world) == before
        assert (await world.backend.records.read(keys.partition(SESSION), Reads())).rev == revision
        await world.submit("elsewhere")
        await operations(world).put_policy(SESSION, "closed", None, request_id="p2")
        await world.submit("again", "research")


@pytest.mark.spec("BE-18")
async def test_of_a_record_and_a_commit_at_once_one_comes_first_and_both_agree_on_which(
    backend: str, tmp_path: Path
) -> None:
    """No submission is admitted after the record that forbids it."""
    async with under(backend, tmp_path, Rule(closed_threads, "closed")) as world:
        previous = 0
        for round_ in range(5):
            results = await asyncio.gather(
                *(world.submit(f"{round_}-{n}") for n in range(4)),
                operations(world).put_policy(SESSION, "closed", ["main"], request_id=f"close-{round_}"),
                *(world.submit(f"{round_}-{n}") for n in range(4, 8)),
                return_exceptions=True,
            )
            admitted = [result for result in results if isinstance(result, str)]
            assert all(isinstance(r, str | PolicyRefused | c.PolicyReceipt) for r in results), results
            turns = await world.pages(q.ListTurns(session=SESSION, thread_id="main"))
            assert len(turns) == len(admitted) + previous
            previous = len(turns)
            with pytest.raises(PolicyRefused):
                await world.submit("too late")
            await operations(world).put_policy(SESSION, "closed", None, request_id=f"open-{round_}")


async def test_a_quota_of_running_turns_holds_the_next_one_back_until_there_is_room(
    backend: str, tmp_path: Path
) -> None:
    def quota(request: PolicyRequest, view: PolicyView) -> None:
        most = (view.records["quota"] or {}).get("running")
        new = request.command == "claim" and request.thread_id not in view.running
        if new and most is not None and len(view.running) >= most:
            raise PolicyRefused(f"{most} turns of this session are running")

    async with under(backend, tmp_path, Rule(quota, "quota")) as world:
        await operations(world).put_policy(SESSION, "quota", {"running": 2}, request_id="p1")
        for name in ("a", "b", "c"):
            await world.do(c.CreateThread(session=SESSION, thread_id=name, binding=BINDING))
            await world.submit(name, name)
        await world.claim("a")
        await world.claim("b")
        with pytest.raises(PolicyRefused):
            await world.claim("c")
        assert (await world.claim("a", "host-2", (HOST,))).run_id, "the one that runs may be taken over"
        await world.finish("a")
        assert (await world.claim("c")).run_id


# ---- what it sees ----


@pytest.mark.spec("BE-19")
def test_it_is_synchronous_and_sees_ids_and_records_only() -> None:
    for method, parameters in (("reads", ["self", "request"]), ("check", ["self", "request", "view"])):
        assert not inspect.iscoroutinefunction(getattr(CommitPolicy, method))
        assert list(inspect.signature(getattr(CommitPolicy, method)).parameters) == parameters
    assert PolicyView.__struct_fields__ == ("records", "running", "threads", "now_ms")


@pytest.mark.spec("BE-19")
async def test_it_is_told_who_asks_for_what_and_nothing_of_what_was_said(backend: str, tmp_path: Path) -> None:
    rule = Rule()
    async with under(backend, tmp_path, rule) as world:
        secret = "the secret word"
        await world.backend.execute(
            c.SubmitTurn(
                session=SESSION, thread_id="main", request_id="r1", content=await world.text(secret), digest=secret
            )
        )
        claimed = await world.claim()
        call = c.ToolCommit(
            call_id="c1", name="pay", kind=ExecutionKind.LOCAL, arguments=body_of(secret), state=ExecutionState.RUNNING
        )
        await world.commit(tools=(call,))
        world.clock.advance(5)
        await world.do(
            c.AddInput(
                session=SESSION,
                thread_id="main",
                turn_id=claimed.turn_id,
                request_id="r2",
                kind="steer",
                content=await world.text(secret),
                digest=secret,
            )
        )

        create, submit, claim, step, steer = rule.asked
        assert create == PolicyRequest("create_session", Audience.OPERATOR, SESSION)
        assert submit == PolicyRequest("submit", Audience.PUBLIC, SESSION, "main", request_id="r1")
        assert (claim.command, claim.thread_id, claim.names) == ("claim", "main", {"owner": HOST})
        assert (step.command, step.turn_id, step.tools) == ("commit_step", claimed.turn_id, ("pay",))
        assert (steer.names, steer.request_id) == ({"kind": "steer"}, "r2")
        assert secret not in repr(rule.asked) + repr(rule.seen)
        assert [view.running for view in rule.seen] == [frozenset()] * 3 + [frozenset({"main"})] * 2
        assert [view.threads for view in rule.seen] == [0, 1, 1, 1, 1]
        assert rule.seen[4].now_ms >= rule.seen[3].now_ms + 5


async def test_a_repeat_is_answered_as_it_was_whatever_the_rule_is_now(backend: str, tmp_path: Path) -> None:
    async with under(backend, tmp_path, Rule(closed_threads, "closed")) as world:
        command = c.SubmitTurn(
            session=SESSION, thread_id="main", request_id="mine", content=await world.text("a"), digest="a"
        )
        admitted = await world.do(command)
        await operations(world).put_policy(SESSION, "closed", ["main"], request_id="p1")
        assert await world.do(command) == admitted


def test_it_is_asked_about_what_begins_and_never_about_what_has_happened() -> None:
    exempt = {kind for kind, rule in RULES.items() if rule.audience is Audience.OPERATOR} | REPORTS
    assert {kind.__name__ for kind in REPORTS} == {
        "SettleTurn",
        "PostponeSettlement",
        "FileFact",
        "RecordOutcome",
        "RecordObject",
    }
    step = {"session": SESSION, "thread_id": "t", "turn_id": "t", "run_id": "r", "fence": 1, "expected_position": 0}
    assert governed(c.CommitStep(**step))
    assert not governed(c.CommitStep(**step, end=c.RunEnd(kind=c.RunEndKind.COMPLETED)))
    assert c.PutPolicy in exempt and c.Cancel not in exempt


async def test_what_has_happened_is_stored_whatever_the_policy_says(backend: str, tmp_path: Path) -> None:
    def no(request: PolicyRequest, view: PolicyView) -> None:
        if view.records["stop"]:
            raise PolicyRefused("nothing any more")

    async with under(backend, tmp_path, Rule(no, "stop")) as world:
        turn = await world.submit("go")
        await world.claim()
        await operations(world).put_policy(SESSION, "stop", True, request_id="p1")
        with pytest.raises(PolicyRefused):
            await world.say("more")
        with pytest.raises(PolicyRefused):
            await world.submit("another")
        await world.finish()
        assert (await world.turn(turn)).status == "COMPLETED"
        await operations(world).put_policy(SESSION, "stop", None, request_id="p2")
        await world.submit("another")


# ---- when it is wrong ----


async def later() -> None:
    raise AssertionError("nobody awaits it")


def failing(request: PolicyRequest, view: PolicyView) -> None:
    raise ValueError("a secret of the application")


def busy(request: PolicyRequest, view: PolicyView) -> None:
    raise StoreBusy("its own store")


def undeclared(request: PolicyRequest, view: PolicyView) -> None:
    _ = view.records["never declared"]


DEFECTS: dict[str, tuple[Check, str]] = {
    "raises": (failing, "ValueError in check()"),
    "says retry": (busy, "StoreBusy in check()"),
    "reads what it did not declare": (undeclared, "'never declared' was not read: name it in reads()"),
    "answers False": (lambda request, view: False, "check() returned bool: it refuses by raising"),
    "is a coroutine after all": (lambda request, view: later(), "is to be awaited"),
}


@pytest.mark.spec("BE-18", "BE-19")
@pytest.mark.parametrize("defect", DEFECTS)
async def test_whatever_is_wrong_with_it_refuses_once_and_says_so(backend: str, tmp_path: Path, defect: str) -> None:
    check, reason = DEFECTS[defect]
    rule = Rule()
    async with under(backend, tmp_path, rule) as world:
        before = await everything(world)
        rule._check = check
        asked = len(rule.asked)

        with pytest.raises(PolicyFailed) as failed:
            await world.submit("go")

        assert reason in failed.value.reason
        assert failed.value.command == "submit"
        assert "a secret of the application" not in str(failed.value)
        assert len(rule.asked) - asked == 1, "it is no reason to ask again"
        assert await everything(world) == before


@pytest.mark.parametrize(
    "reads",
    [
        lambda request: ["a list"],
        lambda request: (5,),
        lambda request: ("",),
        lambda request: tuple(f"k{n}" for n in range(POLICY_READS_MAX + 1)),
        lambda request: later(),
        lambda request: 1 / 0,
    ],
)
async def test_what_it_reads_is_a_few_names(tmp_path: Path, reads: Any) -> None:
    rule = Rule()
    async with under("memory", tmp_path, rule) as world:
        rule.reads = reads  # type: ignore[method-assign]
        with pytest.raises(PolicyFailed):
            await world.submit("go")


@pytest.mark.spec("BE-19")
async def test_one_that_would_have_to_be_awaited_is_refused_where_it_is_given() -> None:
    class Asynchronous:
        def reads(self, request: PolicyRequest) -> tuple[str, ...]:
            return ()

        async def check(self, request: PolicyRequest, view: PolicyView) -> None:
            pass

    from agentscope_durable.stores.records.memory import MemoryRecordStore

    for wrong in (Asynchronous(), object(), lambda command: None):
        with pytest.raises(Misuse):
            TransactionalSessionBackend(MemoryRecordStore(), policy=wrong)  # type: ignore[arg-type]


# ---- its records ----


async def test_a_record_is_a_request_on_record_and_is_listed_with_it(backend: str, tmp_path: Path) -> None:
    async with under(backend, tmp_path, None) as world:
        operate = operations(world)
        receipt = await operate.put_policy(SESSION, "a/b", {"n": 1}, request_id="p1")
        assert (receipt.key, receipt.removed, receipt.request_id) == ("a/b", False, "p1")
        assert await operate.put_policy(SESSION, "a/b", {"n": 1}, request_id="p1") == receipt
        with pytest.raises(RequestConflict) as conflict:
            await operate.put_policy(SESSION, "a/b", {"n": 2}, request_id="p1")
        assert conflict.value.field == "value"
        await operate.put_policy(SESSION, "c", 5, request_id="p2")

        page = await operate.list_policies(SESSION, limit=1)
        rest = await operate.list_policies(SESSION, page.cursor)
        told = [(one.key, one.value, one.request_id) for one in (*page, *rest)]
        assert told == [("a/b", {"n": 1}, "p1"), ("c", 5, "p2")]
        await operate.put_policy(SESSION, "c", None, request_id="p3")
        assert [one.key for one in await operate.list_policies(SESSION)] == ["a/b"]

        for wrong, error in (
            ({"key": "", "value": 1}, InvalidRequest),
            ({"key": "k", "value": float("nan")}, InvalidRequest),
            ({"key": "k", "value": "x" * POLICY_BYTES_MAX}, TooLarge),
        ):
            with pytest.raises(error):
                await operate.put_policy(SESSION, wrong["key"], wrong["value"], request_id="p9")
        for audience in (Audience.PUBLIC, Audience.HOST):
            with pytest.raises(Forbidden):
                await world.backend.execute(c.PutPolicy(session=SESSION, key="k", request_id="p9"), audience=audience)
            with pytest.raises(Forbidden):
                await world.backend.query(q.ListPolicies(session=SESSION), audience=audience)
