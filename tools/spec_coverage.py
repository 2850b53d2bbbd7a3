"""Print how much of the specification the tests cover: `make spec`.

Reads the report of `pytest --spec-report=FILE` and `docs/specification-ids.txt`. An id is

    covered     at least one test of it passed and none failed, on every backend it was tested on
    partial     passed on one backend, but only skipped on another
    failing     a test of it failed
    untested    no test, or skipped tests only
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATES = ("covered", "partial", "failing", "untested")


def groups(path: Path) -> list[tuple[str, str, list[str]]]:
    """(group, title, ids), in the file's order."""
    found: list[tuple[str, str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            _, group, title = line.split(" ", 2)
            found.append((group, title, []))
        elif line and not line.startswith("#"):
            found[-1][2].extend(line.split())
    return found


def state(outcomes: dict[str, str]) -> str:
    """The state of one id, from its outcome on each backend."""
    seen = set(outcomes.values())
    if "failed" in seen:
        return "failing"
    if "passed" not in seen:
        return "untested"
    return "partial" if "skipped" in seen else "covered"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--ids", type=Path, default=ROOT / "docs" / "specification-ids.txt")
    arguments = parser.parse_args()
    if not arguments.report.exists():
        print(f"{arguments.report} does not exist: the tests did not get as far as writing it", file=sys.stderr)
        return 2
    report = json.loads(arguments.report.read_text(encoding="utf-8"))
    outcomes: dict[str, dict[str, str]] = report["ids"]
    lines: dict[str, list[str]] = {name: [] for name in STATES}

    def row(group: str, title: str, counts: list[int]) -> str:
        return f"{group:<6}{title:<52}" + "".join(f"{count:>10}" for count in (sum(counts), *counts))

    print(f"{'group':<6}{'':<52}" + "".join(f"{name:>10}" for name in ("ids", *STATES)))
    totals = [0] * len(STATES)
    for group, title, ids in groups(arguments.ids):
        states = [state(outcomes.get(name, {})) for name in ids]
        counts = [states.count(name) for name in STATES]
        if group != "C":  # Cases are listed, but they are no statements of the specification.
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
        print(row(group, title, counts))
        for name in STATES:
            chosen = [item for item, found in zip(ids, states, strict=True) if found == name]
            if chosen:
                lines[name].append("  " + " ".join(chosen))
    print(row("", "specification in total", totals))

    backends = sorted({backend for found in outcomes.values() for backend in found})
    for backend in backends:
        here = [found[backend] for found in outcomes.values() if backend in found]
        counts_here = ", ".join(f"{here.count(name)} {name}" for name in ("passed", "failed", "skipped"))
        print(f"on {backend}: {counts_here}")

    for name in ("partial", "failing", "untested"):
        if lines[name]:
            print(f"\n{name}:", *lines[name], sep="\n")
    failed = {test for tests in report["tests"].values() for test, outcome in tests.items() if outcome == "failed"}
    if failed:
        print("\nfailing tests:", *sorted(failed), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
