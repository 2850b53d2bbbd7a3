"""`python -m tests.simulation`: play stories, say what was reached, and print the shortest form of what failed.

--seed 7              one story, with its schedule
--seeds 200           stories 0..199
--mutant fence        with a known bug planted: it must be found
--kept                every story that failed once: it fails with its bug planted, and not without
--report build/simulation-report   write what was done
--counts counts.json  write what was reached, for a run in pieces (`--add counts.json ...` adds them up)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.simulation.mutants import FORMER, MUTANTS
from tests.simulation.schedule import LARGE, REAL, SCRIPTED, Schedule, draw
from tests.simulation.shrink import shrink
from tests.simulation.sometimes import MUST, unreached
from tests.simulation.story import Outcome, play

KEPT = Path(__file__).with_name("kept.jsonl")
"""Stories that failed once, one a line."""
TELLINGS = 300
"""Orders in which a kept story is told until it fails."""
GOOD_TELLINGS = 5
"""And so many in which it must not fail."""


def store_of(seed: int) -> str:
    """Every fourth story is on SQLite."""
    return "sqlite" if seed % 4 == 3 else "memory"


def kept() -> list[tuple[str, Schedule]]:
    """The bug that each showed, by its name in `mutants.FORMER`, and the story.

    No name: in what order everything runs is another one by now, and the bug would not be met there any more.
    """
    lines = [json.loads(line) for line in KEPT.read_text().splitlines() if line]
    return [(line["bug"], Schedule.decode(json.dumps(line["schedule"]))) for line in lines]


def retold(given: Any) -> int:
    """In what order everything runs changes with the product, so a kept story is told in several orders."""
    wrong = 0
    for bug, plan in kept():
        if plan.agent != given.agent:
            continue
        tellings = [replace(plan, seed=seed) for seed in (plan.seed, *range(TELLINGS))]
        found = None
        if bug:
            with FORMER[bug]():
                found = next((telling for telling in tellings if play(telling).failed), None)
            if found is None:
                wrong += 1
                print(f"{bug}: NOT found in {len(tellings)} tellings of its story")
                continue
        good = (found or plan, *tellings[1 : GOOD_TELLINGS + 1])
        failed = [outcome for one in good if (outcome := play(one)).failed]
        wrong += bool(failed)
        shown = "" if found is None else f"found in telling {tellings.index(found) + 1}, and without it "
        print(f"{bug or f'seed {plan.seed}'}: {shown}{len(failed)} of {len(good)} fail")
        for outcome in failed[:1]:
            say(outcome, shorter=False)
    return int(wrong > 0)


def say(outcome: Outcome, *, mutant: str = "", shorter: bool = True) -> None:
    plan = outcome.plan
    planted = f" mutant={mutant}" if mutant else ""
    print(f"REPLAY seed={plan.seed} store={plan.store} agent={plan.agent}{planted}")
    print(f"  {outcome.violation}")
    if shorter:
        small = shrink(outcome)
        print(f"  cut down to {len(small.plan.wishes)} wishes, {len(small.plan.faults)} faults: {small.violation}")
        for one in (*small.plan.wishes, *small.plan.faults):
            print(f"    {one}".replace(LARGE, "<large>"))
        print(f"  {small.plan.encode()}")
    cause = outcome.violation.__cause__ if outcome.violation is not None else None
    if cause is not None:
        import traceback

        traceback.print_exception(cause)


def _one(job: tuple[int, str, str]) -> tuple[int, str, int, int, dict[str, int], int, float]:
    (seed, store, agent), began = job, time.process_time()
    outcome = play(draw(seed, store, agent))
    return (
        seed,
        "" if outcome.violation is None else str(outcome.violation),
        outcome.steps,
        len(outcome.plan.faults),
        dict(outcome.audit.sometimes),
        len(outcome.plan.wishes),
        time.process_time() - began,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--store", choices=("memory", "sqlite"))
    parser.add_argument("--agent", choices=(SCRIPTED, REAL), default=SCRIPTED, help="who plays the scripts")
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--mutants", action="store_true", help="then find every planted bug, too")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--add", type=Path, nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--raw", action="store_true", help="do not cut a failing story down")
    given = parser.parse_args()
    # Names in sets have an order of their own in each process; a story must not depend on it.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    logging.disable(logging.CRITICAL)
    if given.add is not None:
        pieces = [msgspec.json.decode(path.read_bytes(), type=Piece) for path in given.add]
        return told(reduce(Piece.plus, pieces), given)
    if given.seed is not None:
        return one(given)
    if given.kept:
        return retold(given)
    if given.mutant is not None:
        return int(not found(given.mutant, given))
    return many(given)


def one(given: Any) -> int:
    with MUTANTS[given.mutant]() if given.mutant else nullcontext():
        outcome = play(draw(given.seed, given.store or store_of(given.seed), given.agent))
        print(f"seed {given.seed}: {outcome.steps} callbacks, {outcome.seconds:.0f} simulated seconds")
        if outcome.failed:
            say(outcome, mutant=given.mutant or "", shorter=not given.raw)
    for what, count in sorted(outcome.audit.sometimes.items()):
        print(f"  {count:5} {what}")
    return int(outcome.failed)


def found(name: str, given: Any) -> bool:
    with MUTANTS[name]():
        for number, seed in enumerate(range(given.first, given.first + given.seeds), 1):
            # A planted bug may be one store's.
            outcome = play(draw(seed, given.store or "memory"))
            if outcome.failed:
                print(f"mutant {name}: found within {number} seeds: {str(outcome.violation)[:200]}")
                return True
    print(f"mutant {name}: NOT found within {given.seeds} seeds")
    return False


class Piece(msgspec.Struct):
    """What came of some stories. Pieces of one run add up."""

    source: str
    seeds: int = 0
    kept: int = 0
    steps: int = 0
    wishes: int = 0
    faults: int = 0
    cpu: float = 0.0
    stores: dict[str, int] = {}
    sometimes: dict[str, int] = {}
    """How often something was reached."""
    stories: dict[str, int] = {}
    """In how many stories something was reached."""
    violations: list[tuple[int, str]] = []

    def plus(self, other: Piece) -> Piece:
        if self.source != other.source:
            raise SystemExit(f"pieces of different sources do not add up: {self.source} and {other.source}")
        numbers = ("seeds", "kept", "steps", "wishes", "faults", "cpu")
        counts = ("stores", "sometimes", "stories")
        return Piece(
            self.source,
            **{name: getattr(self, name) + getattr(other, name) for name in numbers},
            **{name: dict(Counter(getattr(self, name)) + Counter(getattr(other, name))) for name in counts},
            violations=[*self.violations, *other.violations],
        )

    def lines(self) -> list[str]:
        reached, stories = self.sometimes, self.stories
        return [
            f"source {self.source}",
            f"{self.seeds} seeds ({'; '.join(f'{count} {name}' for name, count in sorted(self.stores.items()))}),"
            f" {self.kept} kept stories",
            f"{len(self.violations)} violations, {self.steps} callbacks, {self.wishes} wishes, {self.faults} faults",
            f"{self.cpu:.0f} s of CPU, {1000 * self.cpu / max(self.seeds, 1):.0f} ms a seed",
            "",
            "times reached, stories in which, what",
            *(
                f"{'' if reached.get(what) else 'NOT REACHED '}{reached.get(what, 0):8} {stories.get(what, 0):7} {what}"
                for what in sorted({*reached, *MUST})
            ),
            *(f"VIOLATION seed {seed}: {problem}" for seed, problem in self.violations),
        ]


def many(given: Any) -> int:
    piece = Piece(digest())
    reached: Counter[str] = Counter()
    stories: Counter[str] = Counter()
    for bug, plan in kept() if given.first == 0 else ():
        if plan.agent != given.agent:
            continue
        piece.kept += 1
        outcome = play(plan)
        if outcome.failed:
            print(f"a kept story fails again ({bug})")
            say(outcome, shorter=False)
            piece.violations.append((plan.seed, str(outcome.violation)))
    jobs = [
        (seed, given.store or store_of(seed), given.agent) for seed in range(given.first, given.first + given.seeds)
    ]
    piece.stores = dict(Counter(f"{store}, {agent} agent" for _, store, agent in jobs))
    with multiprocessing.get_context("spawn").Pool(given.jobs, _quiet) if given.jobs > 1 else nullcontext() as pool:
        for seed, problem, did, went_wrong, met, asked, cpu in (
            map(_one, jobs) if pool is None else pool.imap(_one, jobs, 8)
        ):
            piece.seeds += 1
            piece.cpu += cpu
            if piece.seeds % 500 == 0:
                print(f"{piece.seeds} seeds, {len(piece.violations)} violations", flush=True)
            piece.steps, piece.faults, piece.wishes = piece.steps + did, piece.faults + went_wrong, piece.wishes + asked
            reached.update(met)
            stories.update(what for what, count in met.items() if count)
            if problem:
                piece.violations.append((seed, problem))
                store = given.store or store_of(seed)
                say(play(draw(seed, store, given.agent)), shorter=not given.raw and len(piece.violations) <= 3)
    piece.sometimes, piece.stories = dict(reached), dict(stories)
    hidden = [name for name in MUTANTS if not found(name, given)] if given.mutants else []
    if given.counts is not None:
        given.counts.write_bytes(msgspec.json.encode(piece))
    return told(piece, given) | bool(hidden)


def told(piece: Piece, given: Any) -> int:
    scripted = any(SCRIPTED in name for name in piece.stores)
    missing = unreached(piece.sometimes, piece.seeds, scripted=scripted)
    lines = piece.lines()
    print("\n".join(lines))
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text("\n".join(lines) + "\n")
    if missing:
        print("not reached: " + ", ".join(missing))
    return int(bool(piece.violations or missing))


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def digest() -> str:
    """Of the product and the simulator: what the figures are about."""
    root = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for folder in ("src", "tests/simulation"):
        for path in sorted((root / folder).rglob("*.py")):
            whole.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
