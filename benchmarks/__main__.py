"""`make bench`: every benchmark in one run, the answers printed and kept in results.md.

    python -m benchmarks [NAME ...] [--no-write]

Names: steps (a, b), growth (c), takeover (d), imports (e), reading (f), streams (g, h, i), explain (j),
dropping (k); all by default.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

from benchmarks.measure import machine

NAMES = ("steps", "growth", "takeover", "imports", "reading", "streams", "explain", "dropping")
RESULTS = Path(__file__).with_name("results.md")


def render(results: dict[str, dict[str, float]]) -> str:
    lines = [
        "# Results of the last run",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}.",
        "Written by `make bench`. Read ratios, not times: the machine is shared.",
        "",
    ]
    for name, values in results.items():
        lines += [f"## {name}", "", "| | |", "| - | - |"]
        lines += [f"| {key} | {value:.4g} |" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--no-write", action="store_true", help="do not touch results.md")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; known: {', '.join(NAMES)}")
    results: dict[str, dict[str, float]] = {}
    for name in options.names or NAMES:
        answers = importlib.import_module(f"benchmarks.{name}").run()
        for title, values in answers.items():
            print(title)
            for key, value in values.items():
                print(f"  {key:34} {value:.4g}")
        results |= answers
    if not options.names and not options.no_write:
        RESULTS.write_text(render(results))


if __name__ == "__main__":
    main()
