"""A machine that talks to a Session through the public API while its hosts come and go; Hypothesis chooses.

Every step is judged as it is taken, and at the end everything is healed and must come to an end that the verdict of the
simulator accepts. What fails is shortened by Hypothesis to the fewest steps.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.testing.scripted_harness import Action, Call, Fail, Round, Wait
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import (
    BESIDE,
    CLIENTS,
    HOSTS,
    OWNER,
    POINTS,
    ROUTE,
    Ask,
    Observer,
    Point,
    Resource,
    Schedule,
    Store,
    Submit,
)
from tests.simulation.story import Client, Story, Watcher

TURNS_MAX = 12
THREADS = ("main", "side", BESIDE)
CONTROLS = ("steer", "inject", "cancel", "pause", "resume", "signal", "respond", "refuse", "edit", "reconcile")
OPERATIONS = (
    *("release", "repair", "restore", "fork", "prune", "forget", "sweep", "doctor", "retain"),
    *("close_thread", "session", "close_session", "drop"),
)
KINDS = ("plain", "tool", "ask", "hands", "both", "wait", "fail", "long", "slow")


def call(kind: str, effect: str, seconds: float = 1.0) -> Call:
    return Call(
        kind=kind,
        name="work",
        arguments={"effect": effect, "seconds": seconds, "how": "ok"},
        route=ROUTE if kind == "external" else "",
        rule=ReplayRule.NEVER,
    )


def script(kind: str, name: str) -> tuple[Action, ...]:
    doing: dict[str, tuple[Action, ...]] = {
        "plain": (),
        "tool": (Round(calls=(call("local", f"{name}.0"),), gate="wait 1.0"),),
        "ask": (Round(calls=(call("approval", f"{name}.0"),)),),
        "hands": (Round(calls=(call("external", f"{name}.0"),)),),
        "both": (Round(calls=(call("external", f"{name}.0"), call("approval", f"{name}.1"))),),
        "slow": (Round(calls=(call("local", f"{name}.0", 8.0),)),),
        "wait": (Wait(key="x.go"),),
        "fail": (Fail(kind="OSError", runs=2),),
        "long": tuple(Round(text=f"{name} says {one}", gate="wait 3.0") for one in range(4)),
    }
    end = Round(text=f"{name} ends|{{inputs}}|{{results}}|{{context}}", gate="wait 0.5", last=True)
    return (*doing[kind], end)


OTHER = "something else"
SCRIPTS = {f"{kind}{number}": script(kind, f"{kind}{number}") for kind in KINDS for number in range(TURNS_MAX)}
SCRIPTS[OTHER] = script("plain", OTHER)

PLAN = Schedule(
    seed=0,
    store="memory",
    hosts=2,
    lease=5.0,
    poll=0.5,
    stay=0.0,
    latency=0.02,
    hints_lost=0.2,
    may_query=False,
    may_cancel=True,
    takeovers_max=5,
    wishes=(),
    faults=(),
    observers=(),
    scripts=SCRIPTS,
)


class Conversation(RuleBasedStateMachine):
    """The steps that somebody can take, and those that nobody wants."""

    def __init__(self) -> None:
        super().__init__()
        self.story = Story(PLAN)
        self.world = self.story.world
        self.clients = {name: Client(self.story, name) for name in CLIENTS}
        self.requests: list[str] = []
        self.submits: list[Submit] = []
        self.inputs: list[str] = []
        self.asks: list[Ask] = []
        self.waiting: list[asyncio.Task[Any]] = []

    def run(self, work: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            return self.world.loop.run(work)

    @initialize(first=st.lists(st.tuples(st.sampled_from(THREADS[:2]), st.sampled_from(KINDS)), min_size=1, max_size=3))
    def begin(self, first: list[tuple[str, str]]) -> None:
        self.run(self._begin())
        for thread, kind in first:
            self.submit("x", thread, kind)

    async def _begin(self) -> None:
        await self.story._found(self.clients["x"])
        await self._do(Resource(0.0, "x", "thread", "side", "side"))
        self.world.arm()
        for slot in self.world.hosts:
            self.world.boot(slot)

    async def _do(self, wish: Any) -> None:
        """Ask, and go on without the answer if it takes long."""
        task = self.world.loop.start(self.clients[wish.client].do(wish), actor=wish.client)
        self.waiting.append(task)
        await asyncio.wait({task}, timeout=3.0)

    def _request(self) -> str:
        self.requests.append(f"r{len(self.requests)}")
        return self.requests[-1]

    # ---- what users do ----

    @precondition(lambda self: len(self.submits) < TURNS_MAX)
    @rule(client=st.sampled_from(CLIENTS), thread=st.sampled_from(THREADS), kind=st.sampled_from(KINDS))
    def submit(self, client: str, thread: str, kind: str) -> None:
        number = len(self.submits)
        wish = Submit(0.0, client, thread, number, self._request(), f"{kind}{number}")
        self.submits.append(wish)
        self.run(self._do(wish))

    @precondition(lambda self: self.submits)
    @rule(client=st.sampled_from(CLIENTS), pick=st.integers(0, TURNS_MAX), other=st.booleans())
    def submit_again(self, client: str, pick: int, other: bool) -> None:
        """The same request id with the same text, or with another one."""
        first = self.submits[pick % len(self.submits)]
        text = OTHER if other else first.text
        self.run(self._do(Submit(0.0, client, first.thread, first.turn, first.request, text)))

    @precondition(lambda self: self.submits)
    @rule(
        client=st.sampled_from(CLIENTS),
        pick=st.integers(0, TURNS_MAX),
        what=st.sampled_from(CONTROLS),
    )
    def control(self, client: str, pick: int, what: str) -> None:
        request = self._request()
        if what in ("steer", "inject"):
            self.inputs.append(request)
        target = "x.go" if what == "signal" else ""
        self.asks.append(Ask(0.0, client, pick % len(self.submits), request, what, target))
        self.run(self._do(self.asks[-1]))

    @precondition(lambda self: self.asks)
    @rule(client=st.sampled_from(CLIENTS), which=st.integers(0, 50), what=st.sampled_from(("", *CONTROLS)))
    def control_again(self, client: str, which: int, what: str) -> None:
        """The same request id, for the same or for something else."""
        first = self.asks[which % len(self.asks)]
        self.run(self._do(replace(first, client=client, what=what or first.what)))

    @precondition(lambda self: self.inputs)
    @rule(client=st.sampled_from(CLIENTS), pick=st.integers(0, TURNS_MAX), which=st.integers(0, 50))
    def withdraw(self, client: str, pick: int, which: int) -> None:
        target = self.inputs[which % len(self.inputs)]
        self.run(self._do(Ask(0.0, client, pick % len(self.submits), self._request(), "withdraw", target)))

    # ---- what operators and observers do ----

    @precondition(lambda self: self.submits)
    @rule(
        client=st.sampled_from(CLIENTS),
        what=st.sampled_from(OPERATIONS),
        pick=st.integers(0, TURNS_MAX),
        part=st.sampled_from((0.0, 0.5, 0.9)),
    )
    def operate(self, client: str, what: str, pick: int, part: float) -> None:
        """What is parked is released or repaired. A Thread goes back to a settled position or away from there, or is
        closed. Things are pruned, swept and looked through while all goes on. Another Session is made, closed and let
        go."""
        request, turn = self._request(), pick % len(self.submits)
        if what in ("release", "repair"):
            self.run(self._do(Ask(0.0, client, turn, request, what)))
            return
        thread = BESIDE if what in ("session", "close_session", "drop") else self.submits[turn].thread
        self.run(self._do(Resource(0.0, client, what, request, thread, f"copy-{request}", part)))

    @precondition(lambda self: len(self.story.watchers) < 3)
    @rule(
        how=st.sampled_from(("stream", "subscription")),
        of=st.sampled_from(("", "main", "beside/")),
        slow=st.sampled_from((0.0, 2.0)),
    )
    def somebody_looks(self, how: str, of: str, slow: float) -> None:
        looks = Observer(at=0.0, how=how, slow=slow, fails=0, deltas=True, of=of)
        watcher = Watcher(self.story, len(self.story.watchers), looks)
        self.story.watchers.append(watcher)
        self.world.loop.start(watcher.run(), actor=watcher.name)

    # ---- what happens to hosts ----

    @rule(seconds=st.sampled_from((0.1, 1.0, 6.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(
        host=st.sampled_from((*HOSTS[:2], OWNER)),
        what=st.sampled_from(("kill", "freeze", "close", "drain")),
        seconds=st.sampled_from((1.0, 5.2, 12.0)),
    )
    def trouble(self, host: str, what: str, seconds: float) -> None:
        match what:
            case "kill":
                self.world.kill(host, seconds)
            case "freeze":
                self.world.freeze(host, seconds)
            case _:
                self.world.stop(host, what, 1.0)

    @precondition(lambda self: self.story.audit.owners())
    @rule(beyond=st.sampled_from((0.2, 1.0, 4.0)))
    def the_owner_sleeps_until_another_has_gone_on(self, beyond: float) -> None:
        """Takeover from somebody who is there, and wakes up in the middle of what is no longer his."""
        seconds = PLAN.lease + PLAN.poll + beyond
        self.world.freeze(OWNER, seconds)
        self.run(asyncio.sleep(seconds + 1.0))

    @precondition(lambda self: self.story.audit.owners())
    @rule(back=st.sampled_from((0.5, 20.0)))
    def the_owner_dies_and_its_lease_runs_out(self, back: float) -> None:
        self.world.kill(OWNER, back)
        self.run(asyncio.sleep(PLAN.lease + PLAN.poll + 1.0))

    @rule(host=st.sampled_from(HOSTS[:2]), point=st.sampled_from(POINTS), back=st.sampled_from((0.5, 10.0)))
    def dies_at(self, host: str, point: str, back: float) -> None:
        """When it comes by there the next time."""
        nth = self.world._passages[host, point] + 1
        self.world._points[host, point, nth] = Point(host, point, nth, back)

    @rule(
        who=st.sampled_from((*HOSTS[:2], *CLIENTS)),
        how=st.sampled_from(("fail", "lost", "ghost", "slow")),
        nth=st.sampled_from((1, 2, 3)),
    )
    def spoil(self, who: str, how: str, nth: int) -> None:
        self.world._arm(Store(0.0, who, "transact", nth, how, 2.0))

    @rule(seconds=st.sampled_from((3600, -3600)))
    def jump(self, seconds: int) -> None:
        self.world._jump(seconds)

    # ---- what must hold ----

    @invariant()
    def no_promise_is_broken(self) -> None:
        assert not self.story.audit.problems, str(self.story.audit.problems[0])

    def teardown(self) -> None:
        audit = self.story.audit
        try:
            if not audit.problems:
                self.world.heal()
                self.run(self.story._ended(self.clients["x"], self.waiting))
                self.run(self.story._quiet())
                self.run(self.story._judge())
        finally:
            self.world.shut()
            self.world.close()
        assert not audit.problems, str(audit.problems[0])


# Chosen by the code and not by chance: who changes nothing sees what he saw before. EXAMPLES=500 goes on looking.
EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 60,
    stateful_step_count=30,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)

TestConversation = Conversation.TestCase
TestConversation.settings = SETTINGS
TestConversation.pytestmark = [pytest.mark.timeout(1500)]


@pytest.mark.timeout(600)
def test_the_machine_finds_that_a_fence_is_missing() -> None:
    """As it comes, without being led there; shortening what it found is left out."""
    looking = settings(SETTINGS, max_examples=400, phases=[Phase.generate], derandomize=True)
    with MUTANTS["fence"](), pytest.raises(AssertionError, match="P2"):
        run_state_machine_as_test(Conversation, settings=looking)


def test_the_steps_that_lose_a_host_in_the_middle_of_a_tool_find_a_planted_bug() -> None:
    """By chance the machine may take long to come by; that it would see is shown by going there."""

    def go() -> None:
        machine = Conversation()
        machine.begin([("main", "slow")])
        for _ in range(20):
            if machine.world.effects.begun:
                break
            machine.time_passes(0.1)
        machine.the_owner_dies_and_its_lease_runs_out(20.0)
        machine.teardown()

    go()
    with MUTANTS["early_never_rerun"](), pytest.raises(AssertionError, match="P5"):
        go()
