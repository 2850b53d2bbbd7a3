"""What happens in a simulated story, as data: who asks for what and when, and what goes wrong.

A schedule is drawn from a seed, or read from a file. Taking things out of it leaves the others as they are, which is
how a failing one is cut down to what is needed.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.testing.scripted_harness import Action, Call, Emit, Fail, Round, Wait

KEY = SessionKey("app", "story")
OTHER = SessionKey("app", "other")
HOSTS = ("a", "b", "c")
SCRIPTED, REAL = "scripted", "agentscope"
"""Who plays the scripts: the scripted harness, or a real AgentScope agent (`real_agent`)."""
OWNER = "owner"
"""In the place of a host: whichever owns a Thread at that time, if one does."""
CLIENTS = ("x", "y")
ROUTE = "hands"
SIGNALS = ("x.go", "x.stop")
BESIDE = "beside/main"
"""A Thread of another Session. Its name stands before the slash; there is none for the story's own."""
DAY_SECONDS = 26 * 3600
"""Longer than a body may wait for a commit that refers to it."""
LARGE = "." * 66_000
"""Makes a text too large to be kept among the records."""
STORY_SECONDS = 60.0
"""Simulated seconds in which things are asked for and go wrong; then the faults stop."""


def place(thread: str) -> tuple[SessionKey, str]:
    """The Session and the Thread that a wish names."""
    session, _, name = thread.rpartition("/")
    return (OTHER if session else KEY), name


# ---- what clients ask for; `turn` is the number of a submitted task within the story ----


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Attributes:
    text: names the script; the same request with another text is another request.
    """

    at: float
    client: str
    thread: str
    turn: int
    request: str
    text: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A control of a Turn.

    Attributes:
        what: steer, inject, withdraw, cancel, pause, resume, signal, respond, edit, refuse, reconcile, release, repair.
        target: request id of a withdraw, key of a signal.
    """

    at: float
    client: str
    turn: int
    request: str
    what: str
    target: str = ""


class Resource(msgspec.Struct, frozen=True, tag="resource"):
    """Attributes:
    what: thread, close_thread, close_session, restore, fork, prune, forget (checkpoints), sweep, doctor, session, drop,
        retain.
    """

    at: float
    client: str
    what: str
    request: str
    thread: str = "main"
    target: str = ""
    pick: float = 0.0


Wish = Submit | Ask | Resource


# ---- what goes wrong ----


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    at: float
    host: str
    back: float


class Point(msgspec.Struct, frozen=True, tag="point"):
    """Kill the host at the nth passage of a failpoint."""

    host: str
    name: str
    nth: int
    back: float


class Freeze(msgspec.Struct, frozen=True, tag="freeze"):
    at: float
    host: str
    seconds: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """An orderly end: `close`, or `drain` and then close."""

    at: float
    host: str
    how: str
    back: float


class Jump(msgspec.Struct, frozen=True, tag="jump"):
    at: float
    seconds: int


class Store(msgspec.Struct, frozen=True, tag="store"):
    """What becomes of the nth call of a method of the store that one process begins from `at` on.

    Attributes:
        how: fail (nothing done), lost (done, reported as unknown), ghost (reported as unknown, and done later), slow,
            killed (the caller dies with the call under way), dead (done, and the caller dies before it hears of it).
    """

    at: float
    who: str
    method: str
    nth: int
    how: str
    seconds: float = 0.0
    back: float = 5.0


class Storm(msgspec.Struct, frozen=True, tag="storm"):
    """For a while every transaction may fare like this, at the given rate."""

    at: float
    seconds: float
    how: str
    rate: float


class Deaf(msgspec.Struct, frozen=True, tag="deaf"):
    """No hint arrives anywhere."""

    at: float
    seconds: float


Fault = Kill | Point | Freeze | Stop | Jump | Store | Storm | Deaf


class Observer(msgspec.Struct, frozen=True):
    """Attributes:
    how: stream or subscription.
    of: the Thread it looks at, as in a wish; "" and "beside/" are whole Sessions.
    slow: seconds each fact takes it.
    fails: every so manieth call of its callback raises; 0: none.
    """

    at: float
    how: str
    slow: float
    fails: int
    deltas: bool
    of: str = ""


class Schedule(msgspec.Struct, frozen=True):
    """A whole story."""

    seed: int
    store: str
    hosts: int
    lease: float
    poll: float
    stay: float
    latency: float
    hints_lost: float
    may_query: bool
    may_cancel: bool
    takeovers_max: int
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...]
    observers: tuple[Observer, ...]
    scripts: dict[str, tuple[Action, ...]]
    agent: str = SCRIPTED

    def encode(self) -> str:
        return msgspec.json.encode(self).decode().replace(LARGE, "<large>")

    @staticmethod
    def decode(text: str) -> Schedule:
        return msgspec.json.decode(text.replace("<large>", LARGE), type=Schedule)


# ---- drawing one ----


POINTS = (
    *("model.request.before", "model.request.after", "tool.local.before", "tool.local.after"),
    *("executor.start.before", "executor.start.after", "executor.query.before", "executor.query.after"),
    *("executor.cancel.before", "executor.cancel.after", "object.put.before", "object.put.after"),
)


THEMES = (
    *("question", "point", "finalization", "late", "point", "withdraw", "parked", "closing"),
    *("zombie", "point", "overtaken", "late", "point", "outcome", "orphan", "copy", "zombie"),
)
"""Meetings that chance seldom brings about, by the number of the story within its round: each round has all of them."""
ROUND = 2 * len(THEMES) + 1
"""Stories of a round; an odd number, so that every theme comes to every store."""


class _Draw:
    def __init__(self, seed: int, store: str) -> None:
        self.r = random.Random(f"schedule {seed}")
        self.seed = seed
        self.round, number = divmod(seed, ROUND)
        self.theme = THEMES[number] if number < len(THEMES) else ""
        self.quiet = self.theme == "point" or (self.theme != "" and self.round % 2 == 0)
        """Nothing happens but what the theme says, so that it comes about."""
        self.store = store
        self.requests = 0
        self.moments: list[float] = []
        self.late: tuple[Observer, ...] = ()
        self.lease = self.r.choice((2.0, 5.0, 10.0))
        self.poll = self.r.choice((0.7, 2.0, 4.0))
        self.hosts = self.r.choices((1, 2, 3), (1, 4, 3))[0]
        self.takeovers_max = self.r.choice((5, 5, 2))
        self.hints_lost = 0.0 if self.quiet else self.r.choice((0.0, 0.1, 0.5, 1.0))
        self.may_query, self.may_cancel = self.chance(0.6), self.chance(0.6)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def request(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    # ---- scripts ----

    def call(self, name: str, number: int) -> Call:
        r = self.r
        kind = r.choices(("local", "external", "approval", "manual"), (5, 4, 3, 1))[0]
        how = r.choices(("ok", "raise", "error"), (8, 1, 1))[0]
        seconds = r.choices((0.0, 0.2, 1.0, 4.0, 10.0, 45.0), (4, 4, 4, 4, 4, 1))[0]
        arguments: dict[str, Any] = {"effect": f"{name}.{number}", "seconds": seconds, "how": how}
        return Call(
            kind=kind,
            name="ask" if kind == "manual" else "work",
            arguments=arguments,
            route=ROUTE if kind == "external" else "",
            rule=ReplayRule.SAFE if kind == "local" and self.chance(0.5) else ReplayRule.NEVER,
        )

    def gate(self) -> str:
        """How long the model takes, and whether its stream is cut on the way."""
        if self.chance(0.12):
            return f"cut {self.r.randrange(10**6)} {self.r.choice((1, 1, 2, 6))} {self.r.choice((0.1, 1.0))}"
        return f"wait {self.r.choice((0.1, 1.0, 4.0, 9.0))}" if self.chance(0.75) else ""

    def script(self, name: str) -> tuple[Action, ...]:
        r = self.r
        script: list[Action] = []
        for number in range(r.choices((0, 1, 2, 3, 4), (2, 4, 4, 2, 1))[0]):
            kind = r.choices(("say", "call", "calls", "wait", "emit", "fail"), (3, 7, 3, 1, 1, 1))[0]
            if kind == "say":
                script.append(Round(text=f"{name} says {number}", gate=self.gate()))
            elif kind == "call":
                script.append(Round(calls=(self.call(f"{name}.{number}", 0),), gate=self.gate()))
            elif kind == "calls":
                count = r.choice((2, 2, 3))
                script.append(
                    Round(calls=tuple(self.call(f"{name}.{number}", n) for n in range(count)), text=f"{name} does")
                )
            elif kind == "wait":
                script.append(Wait(key=r.choice(SIGNALS)))
            elif kind == "emit":
                script.append(Emit(type="x.story.told", value={"turn": name, "number": number}))
            else:
                script.append(Fail(kind=r.choice(("OSError", "ValueError", "TimeoutError")), runs=r.choice((1, 2, 5))))
        script.append(Round(text=f"{name} ends|{{inputs}}|{{results}}|{{context}}", gate=self.gate(), last=True))
        return tuple(script)

    # ---- wishes ----

    def at(self) -> float:
        """Any time, or close to one at which something is asked for."""
        if self.moments and self.chance(0.7):
            return self.near(self.r.choice(self.moments))
        return round(self.r.uniform(0.0, STORY_SECONDS), 3)

    def near(self, at: float) -> float:
        """Soon after, most often: races are made of that."""
        return round(at + self.r.choice((0.0, 0.05, 0.3, 1.0, 3.0, 10.0)) * self.r.uniform(0.3, 1.5), 3)

    def draw(self) -> Schedule:
        r = self.r
        wishes: list[Wish] = []
        scripts: dict[str, tuple[Action, ...]] = {}
        threads = ["main"]
        if self.chance(0.5):
            threads.append("side")
            wishes.append(Resource(round(r.uniform(0, 8), 3), r.choice(CLIENTS), "thread", self.request(), "side"))
        if self.chance(0.3):
            threads.append(BESIDE)
            wishes.append(Resource(round(r.uniform(0, 8), 3), r.choice(CLIENTS), "session", self.request(), BESIDE))
        turns = 0 if self.quiet else r.randint(1, 7)
        for number in range(turns):
            at, thread, name = round(r.uniform(0.0, STORY_SECONDS * 0.6), 3), r.choice(threads), f"T{number}"
            if self.chance(0.1):
                name += LARGE
            scripts[name] = self.script(name)
            request = self.request()
            wishes.append(Submit(at, r.choice(CLIENTS), thread, number, request, name))
            if self.chance(0.3):
                wishes.append(Submit(self.near(at), r.choice(CLIENTS), thread, number, request, name))
            if self.chance(0.1):
                other = f"{name} other"
                scripts[other] = (Round(text=f"{other} ends|{{inputs}}|{{results}}|{{context}}", last=True),)
                wishes.append(Submit(self.near(at), r.choice(CLIENTS), thread, number, request, other))
            self.controls(wishes, number, at)
        themed = self.themed(wishes, scripts, turns) if self.theme else ()
        for _ in range(0 if self.quiet else r.choice((0, 1, 2, 3))):
            what = r.choices(
                (
                    *("restore", "fork", "prune", "forget", "sweep", "doctor"),
                    *("close_thread", "close_session", "session", "retain"),
                ),
                (3, 3, 3, 2, 3, 1, 1, 0.5, 1, 1),
            )[0]
            at = self.at()
            thread = r.choice(threads)
            wishes.append(
                Resource(
                    at, r.choice(CLIENTS), what, self.request(), thread, f"copy{len(wishes)}", round(r.random(), 3)
                )
            )
        if BESIDE in threads and self.chance(0.6):
            # It is closed and let go while the rest goes on, as soon as nothing of it is left to do.
            for what, at in (("close_session", 35.0), ("drop", 36.0), ("close_session", 50.0), ("drop", 51.0)):
                when = round(at + r.uniform(0.0, 5.0), 3)
                wishes.append(Resource(when, r.choice(CLIENTS), what, self.request(), BESIDE))
        wishes.sort(key=lambda wish: wish.at)
        self.moments = [wish.at for wish in wishes]
        return Schedule(
            seed=self.seed,
            store=self.store,
            hosts=self.hosts,
            lease=self.lease,
            poll=self.poll,
            stay=r.choice((0.0, 0.5, 0.9)),
            latency=r.choice((0.001, 0.02, 0.02 if self.quiet else 0.2)),
            hints_lost=self.hints_lost,
            may_query=self.may_query,
            may_cancel=self.may_cancel,
            takeovers_max=self.takeovers_max,
            wishes=tuple(wishes),
            faults=(*themed, *(() if self.quiet else self.faults())),
            observers=(*self.observers(), *self.late),
            scripts=scripts,
        )

    def themed(self, wishes: list[Wish], scripts: dict[str, tuple[Action, ...]], turn: int) -> tuple[Fault, ...]:
        """A meeting that is rarely met by chance: alone, or somewhere within everything else."""
        r = self.r
        name, at, client = f"T{turn}", round(r.uniform(2.0, STORY_SECONDS * 0.5), 3), r.choice(CLIENTS)
        wait = round(self.poll + r.uniform(1.0, 6.0), 3)
        during = round(at + wait, 3)
        request = self.request()
        later: list[Wish] = []
        faults: tuple[Fault, ...] = ()
        self.hosts = max(self.hosts, 2)
        large = self.theme == "point" and self._point.startswith("object")
        last = Round(text=f"{name}{LARGE * large} ends|{{inputs}}|{{results}}|{{context}}", gate="wait 0.1", last=True)
        match self.theme:
            case "question":
                # A host is lost while a person is asked and a tool runs; then people answer at once.
                rule = r.choice((ReplayRule.SAFE, ReplayRule.NEVER))
                calls = self.work("approval", name, 0, 1.0), self.work("local", name, 1, wait + 10, rule)
                script = (Round(calls=calls), last)
                faults = (Kill(during, OWNER, 3.0),)
                after = round(during + self.lease + 2 * self.poll + 5, 3)
                what = "respond" if self.round % 4 == 2 else "edit"
                later = [Ask(after, one, turn, self.request(), what) for one in CLIENTS * 2]
            case "closing":
                # A Turn is cancelled while it waits for a person. Then all is closed, and somebody asks for more.
                script = (Round(calls=(self.work("approval", name, 0, 1.0),)), last)
                later = [Ask(during, client, turn, self.request(), "cancel")]
                if self.quiet:
                    other, place = f"{name} again", "main" if self.round % 4 == 2 else "last"
                    scripts[other] = (replace(last, text=last.text.replace(name, other)),)
                    if place != "main":
                        later.append(Resource(during, client, "thread", self.request(), place))
                    what = "close_session" if place == "main" else "close_thread"
                    later.append(Resource(round(during + 8, 3), client, what, self.request(), place))
                    later.append(Submit(round(during + 12, 3), client, place, turn + 1, self.request(), other))
            case "outcome":
                script = (Round(calls=(self.work("external", name, 0, wait + 4),)), last)
                later = [Ask(during, client, turn, self.request(), "cancel")]
            case "finalization" | "overtaken":
                # The host does not hear of the pause, or of the cancel, before it has the answer.
                self.poll, self.hints_lost = 4.0, 0.0
                script = (replace(last, gate="wait 9"),)
                what = "pause" if self.theme == "finalization" else "cancel"
                later = [Ask(round(at + 9 + r.uniform(-0.8, 0.1), 3), client, turn, self.request(), what)]
                faults = (Deaf(round(at + 3, 3), 15.0),)
            case "withdraw":
                # Said, and taken back at once; said, and taken back when it has been heard.
                script = (*(Round(text=f"{name} says {one}", gate="wait 1") for one in range(int(wait) + 8)), last)
                for soon in (r.choice((0.0, 0.05, 0.3)), 4.0):
                    said = self.request()
                    later.append(Ask(during, client, turn, said, r.choice(("steer", "inject"))))
                    later.append(Ask(round(during + soon, 3), client, turn, self.request(), "withdraw", said))
            case "zombie":
                # Its host stands still until another one has gone on, and then goes on as well, at the same place.
                gate = f"wait {r.choice((1, 4, 9))}"
                script = (*(Round(text=f"{name} says {one}", gate=gate) for one in range(3)), last)
                faults = tuple(self.sleep(during + 3 * one) for one in range(2))
            case "late":
                # The same, and what it wakes up with is the outcome of a tool that is given up meanwhile.
                ends = round(wait + self.lease * r.uniform(0.2, 0.8), 3)
                script = (Round(calls=(self.work("local", name, 0, ends, ReplayRule.NEVER),)), last)
                faults = (self.sleep(during),)
            case "parked":
                # Hosts are lost with it again and again before it comes any further.
                self.takeovers_max = 1
                script = (replace(last, gate="wait 30"),)
                apart = self.lease + self.poll + 1
                faults = tuple(Kill(round(during + one * apart, 3), OWNER, 1.0) for one in range(4))
                what = "release" if self.round % 4 == 3 else "repair"
                later = [Ask(round(during + 3 * apart, 3), client, turn, self.request(), what)]
            case "orphan":
                # A large body that no commit refers to: its request was one for something else. A day later it may go.
                script = (last,)
                scripts[name + LARGE] = (replace(last, text=last.text.replace(name, name + LARGE)),)
                later = [
                    Submit(during, client, "main", turn, request, name + LARGE),
                    Resource(round(during + 20, 3), client, "sweep", self.request(), pick=0.9),
                ]
                faults = (Jump(round(during + 15, 3), DAY_SECONDS),)
            case "copy":
                # Settled, and then another Turn is settled: somebody goes back, and away from there while a third one
                # is at work. Somebody begins to look when the beginning is pruned.
                script = (
                    Round(text=f"{name} begins", calls=(self.work("local", name, 0, 0.2),), gate="wait 0.1"),
                    last,
                )
                for number, (more, when, gate) in enumerate((("again", 0.0, "wait 0.1"), ("more", 12.0, "wait 9")), 1):
                    other = f"{name} {more}"
                    scripts[other] = (replace(last, text=last.text.replace(name, other), gate=gate),)
                    when = round(during + when, 3)
                    later.append(Submit(when, client, "main", turn + number, self.request(), other))
                picks = ("restore", r.choice((0.0, 0.6))), ("fork", 0.99), ("forget", 0.0), ("prune", 0.7)
                for one, (what, pick) in enumerate(picks):
                    when = round(during + 10 + 3 * one, 3)
                    later.append(Resource(when, client, what, self.request(), "main", f"copy of {name}", pick))
                self.late = (Observer(at=round(during + 22, 3), how="stream", slow=0.0, fails=0, deltas=False),)
            case _:
                # Every place where a host does something outside is one where it may die.
                point = self._point
                seconds = wait + 2 * self.lease + 2 * self.poll if point.startswith("executor.query") else wait + 8
                calls = self.work("external", name, 0, seconds), self.work("local", name, 1, 1.0)
                script = (Round(calls=calls, gate="wait 0.5"), last)
                faults = tuple(Point(host, point, 1, 3.0) for host in HOSTS)
                if point.startswith("executor.query"):
                    # Whoever goes on asks what has become of it.
                    self.may_query = True
                    faults = (*(Kill(during, host, 3.0) for host in HOSTS), *faults)
                if point.startswith("executor.cancel"):
                    self.may_cancel = True
                    later = [Ask(during + 2, client, turn, self.request(), "cancel")]
        name += LARGE * large
        scripts[name] = script
        wishes += (Submit(at, client, "main", turn, request, name), *later)
        return faults

    @property
    def _point(self) -> str:
        """Another one each time."""
        before = THEMES[: self.seed % ROUND].count("point")
        return POINTS[(self.round * THEMES.count("point") + before) % len(POINTS)]

    def sleep(self, at: float) -> Freeze:
        """The owner's, until somebody else has taken over."""
        return Freeze(round(at, 3), OWNER, round(self.lease + self.poll * self.r.uniform(0.8, 2.5), 3))

    @staticmethod
    def work(kind: str, name: str, number: int, seconds: float, rule: ReplayRule | None = None) -> Call:
        arguments: dict[str, Any] = {"effect": f"{name}.{number}", "seconds": seconds, "how": "ok"}
        rule = rule or (ReplayRule.SAFE if kind == "local" and int(name[1:]) % 2 else ReplayRule.NEVER)
        return Call(kind=kind, name="work", arguments=arguments, route=ROUTE if kind == "external" else "", rule=rule)

    def controls(self, wishes: list[Wish], turn: int, at: float) -> None:
        r = self.r
        kinds = ("steer", "inject", "withdraw", "cancel", "pause", "resume", "signal", "respond", "edit", "refuse")
        weights = (4, 2, 3, 2, 3, 3, 2, 6, 1, 2)
        inputs: list[str] = []
        for _ in range(r.choice((0, 1, 2, 4, 8))):
            what = r.choices(kinds, weights)[0]
            if what == "withdraw" and not inputs:
                what = "steer"
            request = self.request()
            if what in ("steer", "inject"):
                inputs.append(request)
            target = r.choice(inputs) if what == "withdraw" else r.choice(SIGNALS) if what == "signal" else ""
            when = self.near(at) if self.chance(0.7) else self.at()
            if self.chance(0.5):
                at = when
            wishes.append(Ask(when, r.choice(CLIENTS), turn, request, what, target))
            if self.chance(0.15):
                # The same request again, from elsewhere.
                wishes.append(Ask(self.near(when), r.choice(CLIENTS), turn, request, what, target))
            if self.chance(0.04):
                wishes.append(
                    Ask(self.near(when), r.choice(CLIENTS), turn, request, r.choice(kinds[:5]), target or "r0")
                )
        for _ in range(r.choice((0, 0, 1, 2))):
            wishes.append(
                Ask(
                    self.near(at), r.choice(CLIENTS), turn, self.request(), r.choice(("reconcile", "release", "repair"))
                )
            )

    # ---- faults ----

    def faults(self) -> tuple[Fault, ...]:
        """A few kinds in each story, many of each: a bit of everything everywhere reaches less."""
        r = self.r
        kinds = [
            kind for kind in ("kill", "point", "freeze", "stop", "jump", "store", "storm", "deaf") if self.chance(0.45)
        ]
        faults: list[Fault] = []
        for kind in kinds:
            for _ in range(r.choice((1, 2, 3, 5))):
                faults.append(self.fault(kind))
        return tuple(faults)

    def fault(self, kind: str) -> Fault:
        r, host = self.r, self.r.choice((*HOSTS, OWNER, OWNER, OWNER, OWNER))
        if kind == "point":
            host = r.choice(HOSTS)
        back = r.choice((0.5, 3.0, 10.0, 30.0))
        match kind:
            case "kill":
                return Kill(self.at(), host, back)
            case "point":
                return Point(host, r.choice(POINTS), r.choice((1, 1, 2, 3, 5)), back)
            case "freeze":
                # Most often about as long as its lease: it wakes as somebody takes over.
                about = self.lease * r.choice((1.0, 1.0, 1.0, 2.0, 4.0)) + r.uniform(-0.2, 1.0) * self.poll
                return Freeze(self.at(), host, round(r.choice((0.5, about, about, about)), 3))
            case "stop":
                return Stop(self.at(), host, r.choice(("close", "drain")), back)
            case "jump":
                return Jump(self.at(), r.choice((3600, -3600, 40, -40, DAY_SECONDS)))
            case "deaf":
                return Deaf(self.at(), r.choice((5.0, 30.0)))
            case "storm":
                seconds = r.choice((3.0, 10.0, 40.0))
                return Storm(
                    self.at(), seconds, r.choice(("fail", "lost", "lost", "ghost", "slow")), r.choice((0.1, 0.3))
                )
            case _:
                who = r.choice((*HOSTS, OWNER, OWNER, OWNER, *CLIENTS))
                how = r.choice(("fail", "lost", "lost", "ghost", "slow", "killed", "dead"))
                if who in CLIENTS and how in ("killed", "dead"):
                    how = "lost"
                method = r.choices(("transact", "read", "ready", "renew", "release", "object"), (8, 1, 1, 1, 1, 2))[0]
                if method != "transact" and how in ("lost", "ghost"):
                    how = "fail"
                seconds = r.choice((0.5, 3.0, 8.0, 20.0))
                return Store(self.at(), who, method, r.choice((1, 1, 2, 3, 5)), how, seconds, back)

    def observers(self) -> tuple[Observer, ...]:
        r = self.r
        return tuple(
            Observer(
                at=r.choice((0.0, 0.0, self.at())),
                how=r.choice(("stream", "subscription")),
                slow=r.choice((0.0, 0.0, 0.2, 2.0)),
                fails=r.choice((0, 0, 3, 7)),
                deltas=self.chance(0.5),
                of=r.choice(("", "", "", "main", "side", "beside/")),
            )
            for _ in range(r.choice((0, 1, 2)))
        )


def draw(seed: int, store: str = "memory", agent: str = SCRIPTED) -> Schedule:
    return replace(_Draw(seed, store).draw(), agent=agent)
