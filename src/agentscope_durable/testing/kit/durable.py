"""The fixture `durable`: kills an agent at each point, lets another process go on, and says what is wrong."""

from __future__ import annotations

import json
import random
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from agentscope_durable.contracts.status import ExecutionKind, WaitKind
from agentscope_durable.testing.census import FAILPOINTS, Point, points
from agentscope_durable.testing.kit import effects
from agentscope_durable.testing.kit.forks import Processes
from agentscope_durable.testing.kit.story import Story

__all__ = ["Durable", "Stage", "Survival", "places"]

BY_THE_CLOCK = frozenset({"store.renew.before", "store.renew.after"})
"""How often they are passed depends on time and not on the story. One may be named; none is drawn."""
CALLBACK = "callback"
"""The name of the places of a simulated telling: the n-th moment between two callbacks."""
SAID = 5
"""Places that a failure tells in full."""

MEANING = {
    "store.commit": "a commit of the store",
    "store.renew": "the renewal of a lease",
    "store.release": "the release of a lease",
    "object.put": "storing a large body",
    "object.delete": "removing a large body",
    "executor.start": "the start of an executor's work",
    "executor.query": "a question to an executor",
    "executor.cancel": "a cancel sent to an executor",
    "model.request": "a request to the model",
    "tool.local": "a tool of the agent",
    "effect": "an effect that a tool told of",
}


class Survival(NamedTuple):
    """What was done, for those who want to count.

    Attributes:
        points: where the agent was killed, one tuple of places for each telling.
        killed: how many processes really died.
        waited: in how many tellings a Turn ended up waiting for a person, for the outcome of a tool was lost.
    """

    points: tuple[tuple[Point, ...], ...]
    killed: int
    waited: int


class Stage:
    """Where the stories of a whole pytest session are told: a clean process for each test module, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, Processes] = {}
        self._tellings = 0
        self.whole: dict[tuple[str, str], dict[str, Any]] = {}
        """Stories told without a kill, by file and name."""

    def processes(self, module: ModuleType) -> Processes:
        assert module.__file__ is not None
        found = self._processes.get(module.__file__)
        if found is None:
            folder = self.folder / f"module-{len(self._processes) + 1}"
            folder.mkdir()
            found = self._processes[module.__file__] = Processes(module.__name__, module.__file__, folder)
            found.begin()
        return found

    def next(self) -> Path:
        self._tellings += 1
        return self.folder / f"{self._tellings:04}"

    def close(self) -> None:
        for one in self._processes.values():
            one.end()


class Durable:
    """What the fixture `durable` is.

    Args:
        module: the test module, in which stories stand.
        nodeid: of the test, to say how a failure is repeated.
        stage: of the whole session.
        seed: decides what is drawn.
        only: places to kill at instead of all (`--durable-kill`).
        telling: the one simulated telling to be told (`--durable-telling`).
    """

    def __init__(
        self,
        module: ModuleType,
        nodeid: str,
        stage: Stage,
        *,
        seed: int,
        only: Sequence[Point] | None = None,
        telling: int | None = None,
    ) -> None:
        self._module = module
        self._nodeid = nodeid
        self._stage = stage
        self._only = only
        self._telling = telling
        self.seed = seed

    def points(self, story: Story) -> list[Point]:
        """Every place at which this story can be killed, found by telling it once without a kill."""
        return sorted(one for one in points(self._whole(story)["passed"]) if one.name not in BY_THE_CLOCK)

    def kill_at(self, place: str | Point, story: Story, *more: str | Point) -> Survival:
        """Kill the agent at this place (`"tool.local.after"`, or its second pass: `"tool.local.after:2"`).

        Args:
            more: where whoever goes on is killed in turn.
        """
        return self._kill(story, [tuple(_point(one) for one in (place, *more))], must_die=True)

    def survives(self, story: Story, *, sample: int | None = None, kills: int = 1) -> Survival:
        """Kill the agent at each place it passes, every time in a world of its own.

        Args:
            sample: at so many places drawn by the seed, instead of all.
            kills: how often in each world: whoever goes on is killed as well. More than one needs `sample`.
        """
        if kills > 1 and sample is None:
            raise ValueError("several kills have too many combinations to try all: give a sample")
        if self._only is not None:
            return self._kill(story, [tuple(self._only)])
        found = self.points(story)
        chosen: list[tuple[Point, ...]] = [(one,) for one in found]
        if sample is not None:
            chance = random.Random(f"kit {self.seed}")  # noqa: S311 - a seed is what it is for
            if kills > 1:
                chosen = [tuple(chance.choices(found, k=kills)) for _ in range(sample)]
            else:
                chosen = sorted(chance.sample(chosen, min(sample, len(chosen))))
        return self._kill(story, chosen)

    def simulate(self, story: Story, *, tellings: int = 100, kills: int = 1) -> Survival:
        """Tell it under simulated time, in one process: a number decides who goes next, and when the host is killed.

        A kill falls between any two callbacks of the event loop, and the lease that must run out then costs no time.
        What the module keeps in memory lives on here, so this says less than `survives`, of more moments.

        Args:
            tellings: numbers from the seed on; a failure names the one that repeats it.
            kills: how often in each: whoever goes on is killed as well.
        """
        from agentscope_durable.testing.kit import simulated

        whole = simulated.tell(story, self.seed)
        if isinstance(whole.found, str):
            _fail(f"the story cannot be told under simulated time:\n{_indented(whole.found)}")
        if wrong := [*whole.found["wrong"], *_wrong_without_a_kill(whole.found)]:
            _fail("the story is wrong even without a kill:\n" + "\n".join(f"  - {one}" for one in wrong))
        numbers = range(self.seed, self.seed + tellings) if self._telling is None else (self._telling,)
        failed: list[str] = []
        at: list[tuple[Point, ...]] = []
        killed = waited = 0
        for number in numbers:
            told = simulated.tell(story, number, steps=whole.steps, kills=kills)
            at.append(tuple(Point(CALLBACK, moment) for moment in told.killed))
            killed += len(told.killed)
            if isinstance(told.found, str):
                problems = [told.found]
            else:
                problems = [*told.found["wrong"], *compared(story, whole.found, told.found)]
                waited += any(turn["waiting"] for turn in told.found["turns"])
            if problems:
                where = " and then ".join(f"callback {moment}" for moment in told.killed) or "nowhere"
                lines = [f"killed at {where}, at the end {told.seconds:.0f} simulated seconds had passed:"]
                lines += [_indented(f"- {problem}", "  ") for problem in problems]
                failed.append("\n".join([*lines, f"  replay: pytest {self._nodeid} --durable-telling {number}"]))
        if failed:
            more = [] if len(failed) <= SAID else [f"... and {len(failed) - SAID} tellings more"]
            head = f"the agent does not survive {len(failed)} of {len(numbers)} simulated tellings"
            _fail("\n\n".join([head, *failed[:SAID], *more]))
        return Survival(tuple(at), killed, waited)

    # ------------------------------------------------------------ telling

    def _whole(self, story: Story) -> dict[str, Any]:
        """The story without a kill: where it can be killed, and what must come of it."""
        place = (str(self._module.__file__), self._name(story))
        told = self._stage.whole.get(place)
        if told is None:
            found, _ = self._tell(story, ())
            if isinstance(found, str):
                _fail(f"the story cannot be told even without a kill:\n{_indented(found)}")
            wrong = [*found["wrong"], *_wrong_without_a_kill(found)]
            if wrong:
                _fail("the story is wrong even without a kill:\n" + "\n".join(f"  - {one}" for one in wrong))
            told = self._stage.whole[place] = found
        return told

    def _tell(self, story: Story, kills: Sequence[Point]) -> tuple[dict[str, Any] | str, int]:
        """The verdict, or the output of a process that failed; and how many died."""
        name = self._name(story)
        processes = self._stage.processes(self._module)
        folder = self._stage.next()
        died = 0
        for place in (*kills, None):
            job = {"story": name, "folder": str(folder), "kill": str(place or "")}
            ended = processes.run(job, seconds=story.seconds * 1.5)
            if ended.killed and place is not None:
                died += 1
                continue
            if ended.code or ended.signal:
                how = f"signal {ended.signal}" if ended.signal else f"code {ended.code}"
                return f"a process ended with {how}\n{ended.output}", died
            break
        return {**json.loads((folder / "verdict").read_text(encoding="utf-8")), "folder": str(folder)}, died

    def _name(self, story: Story) -> str:
        for name, value in vars(self._module).items():
            if value is story:
                return name
        raise ValueError(
            f"the story must stand at the top of {self._module.__file__}, under a name: another process has to find it"
        )

    # ------------------------------------------------------------ judging

    def _kill(self, story: Story, chosen: list[tuple[Point, ...]], *, must_die: bool = False) -> Survival:
        whole = self._whole(story)
        failed: list[str] = []
        killed = waited = reached = 0
        for kills in chosen:
            told, died = self._tell(story, kills)
            killed += died
            reached += bool(died)
            if isinstance(told, str):
                problems = [f"whoever went on failed: {told}"]
            elif must_die and died < len(kills):
                known = ", ".join(map(str, self.points(story)))
                _fail(f"the story does not pass {kills[died]}; it passes: {known}")
            else:
                problems = [*told["wrong"], *compared(story, whole, told)]
                waited += any(turn["waiting"] for turn in told["turns"])
            if problems:
                failed.append(self._failure(kills, problems, told))
        if failed:
            more = [] if len(failed) <= SAID else [f"... and {len(failed) - SAID} places more"]
            head = f"the agent does not survive a kill at {len(failed)} of {len(chosen)} places (seed {self.seed})"
            _fail("\n\n".join([head, *failed[:SAID], *more]))
        if not reached and self._only is None:
            _fail(f"none of {len(chosen)} places was reached: the story takes another way each time")
        return Survival(tuple(chosen), killed, waited)

    def _failure(self, kills: Sequence[Point], problems: Sequence[str], told: Mapping[str, Any] | str) -> str:
        lines = [f"killed at {' and then at '.join(f'{one} ({_meaning(one)})' for one in kills)}:"]
        lines += [_indented(f"- {problem}", "  ") for problem in problems]
        kill = "+".join(map(str, kills))
        lines.append(f"  replay: pytest {shlex.quote(self._nodeid)} --durable-kill {kill} --durable-seed {self.seed}")
        if not isinstance(told, str):
            lines.append(f"  stored: {told['folder']}/store")
        return "\n".join(lines)


def _wrong_without_a_kill(told: Mapping[str, Any]) -> list[str]:
    return [
        f"the outcome of tool {tool['name']!r} (call {tool['call']}) is unknown: did it raise?"
        for turn in told["turns"]
        for tool in turn["tools"]
        if tool["unknown"]
    ]


# ------------------------------------------------------------ with and without a kill


def compared(story: Story, whole: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """What is wrong with what a killed story came to, beside the same story without a kill."""
    wrong = list(_effects(whole, told))
    for before, after in zip(whole["turns"], told["turns"], strict=True):
        wrong += _ends(before, after, told)
        wrong += _results(story, before, after)
    return wrong


def _effects(whole: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """No effect twice: not for one call, and not more of a kind than without a kill."""
    wrong: list[str] = []
    most, all_of = _counted(whole)
    calls, total = _counted(told)
    starts = Counter((line["turn"], line["call"]) for line in told["effects"] if line["name"] == "started")
    usual = {(name, tool): max(n for (_, t, e), n in most.items() if (e, t) == (name, tool)) for _, tool, name in most}
    for (place, tool, name), count in calls.items():
        if place is None or count <= usual.get((name, tool), 1):
            continue
        text = f"tool {tool!r} (call {place[1]}) had its effect {name!r} {count} times"
        if starts[place] > 1:
            text += (
                ": it is declared safe to run again, ran again after the kill, and is not safe. Take away"
                " is_read_only or its replay rule, or give the effect an idempotency key (docs/tools.md)"
            )
        wrong.append(text)
    if not wrong:
        wrong += [
            f"the effect {name!r} happened {count} times, and {all_of.get((tool, name), 0)} times without a kill"
            for (tool, name), count in total.items()
            if count > all_of.get((tool, name), 0)
        ]
    return wrong


def _counted(told: Mapping[str, Any]) -> tuple[Counter[tuple[Any, str, str]], Counter[tuple[str, str]]]:
    """Effects by (call, tool, name) and by (tool, name); those with one idempotency key are one."""
    tools = {(turn["turn"], tool["call"]): tool["name"] for turn in told["turns"] for tool in turn["tools"]}
    calls: Counter[tuple[Any, str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    keys: set[tuple[str, str]] = set()
    for line in told["effects"]:
        if line["name"] != "effect":
            continue
        if line["key"] is not None:
            if (line["effect"], line["key"]) in keys:
                continue
            keys.add((line["effect"], line["key"]))
        place = (line["turn"], line["call"]) if "call" in line else None
        tool = "" if place is None else tools.get(place, "")
        calls[place, tool, line["effect"]] += 1
        total[tool, line["effect"]] += 1
    return calls, total


def _ends(before: Mapping[str, Any], after: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    """The Turn ended as it does without a kill, or waits for a person, because a kill took the outcome of a tool."""
    if after["status"] == before["status"] and after["waiting"] == before["waiting"] == []:
        return []
    started = {(line["turn"], line["call"]): line["pid"] for line in told["effects"] if line["name"] == "started"}
    unknown = {tool["call"]: tool for tool in after["tools"] if tool["unknown"]}
    wrong: list[str] = []
    usual = {one["kind"] for one in before["waiting"]}
    for waiting in after["waiting"]:
        tool = unknown.get(waiting["call"] or "")
        if waiting["kind"] == WaitKind.TOOL_UNKNOWN and tool is not None:
            place = (after["turn"], tool["call"])
            if tool["kind"] == ExecutionKind.LOCAL and started.get(place) == told["pid"]:
                wrong.append(
                    f"tool {tool['name']!r} (call {tool['call']}) failed in the process that nobody killed, and its"
                    " outcome is unknown: does it keep in memory what died with the first process?"
                )
        elif waiting["kind"] not in usual:
            wrong.append(f"{after['turn']} waits for {waiting['kind']}: {waiting['next']}")
    if not after["waiting"]:
        error = f": {after['error']}" if after["error"] else ""
        queued = after["status"] == "QUEUED" and any(turn["waiting"] for turn in told["turns"])
        if not queued and after["status"] != before["status"]:
            wrong.append(f"{after['turn']} is {after['status']}{error}; without a kill it is {before['status']}")
    return wrong


def _results(story: Story, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Every tool answered what it answers without a kill."""
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    usual: dict[tuple[str, int], Any] = {}
    for tool in before["tools"]:
        seen[tool["name"]] += 1
        usual[tool["name"], seen[tool["name"]]] = tool
    seen.clear()
    for tool in after["tools"]:
        seen[tool["name"]] += 1
        former = usual.get((tool["name"], seen[tool["name"]]))
        if tool["name"] in story.varies or tool["result"] is None:
            continue
        if former is None:
            wrong.append(f"tool {tool['name']!r} is called once more than without a kill")
        elif former["result"] != tool["result"]:
            wrong.append(
                f"tool {tool['name']!r} (call {tool['call']}) gave {_short(tool['result'])} and gives"
                f" {_short(former['result'])} without a kill: what it kept in memory died with the process"
                " (if it says something else each time, name it in `varies`)"
            )
    if not wrong and not story.varies and after["answer"] != before["answer"] and after["answer"] is not None:
        wrong.append(f"the answer is {_short(after['answer'])} and is {_short(before['answer'])} without a kill")
    return wrong


# ------------------------------------------------------------ words


def _point(text: str | Point) -> Point:
    if isinstance(text, Point):
        return text
    name, _, nth = text.partition(":")
    known = FAILPOINTS | {effects.BEFORE, effects.AFTER}
    if name not in known or (nth and not (nth.isascii() and nth.isdecimal() and int(nth) > 0)):
        raise ValueError(
            f"no failpoint {text!r}, it is a name and the pass from 1, as in tool.local.after:1; names: "
            f"{', '.join(sorted(known))}"
        )
    return Point(name, int(nth or "1"))


def places(text: str) -> list[Point]:
    """What `--durable-kill` says."""
    return [_point(one) for one in text.split("+")]


def _meaning(place: Point) -> str:
    name, _, side = place.name.rpartition(".")
    return f"{side} {MEANING[name]}, pass {place.nth}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _indented(text: str, by: str = "    ") -> str:
    return "\n".join(f"{by}{line}" for line in text.splitlines())


def _fail(text: str) -> NoReturn:
    import pytest

    pytest.fail(text, pytrace=False)
