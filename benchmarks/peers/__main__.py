"""`make bench-peers`: the same workload on this library, DBOS, LangGraph's savers and Absurd, and how they compare.

    python -m benchmarks.peers [--rounds 3] [--turns 30] [--seconds 5] [--only NAME ...] [--folder DIR] [--no-write]

Each system is at its fastest durable setting, in processes of its own, with a database of its own; what it has set is
read back and printed. Rounds are interleaved, so that all meet the same weather; the table has medians, and ratios of
ours to each of the others. Then all of it again with 1 ms added to every flush (`slow_flush.c`): in the processes that
use SQLite, and in the PostgreSQL server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.measure import machine
from benchmarks.peers import work
from tests.servers import place
from tests.servers.server import PostgresServer

ROOT = Path(__file__).resolve().parents[2]
PEERS_PYTHON = ROOT / "build" / "venv-peers" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results-peers.md"
FLUSH_MICROSECONDS = 1_000
LEASE = 10
"""Seconds, for ours and for Absurd, where a lease is what tells that a host is gone."""
SECONDS_MAX = 600
POSTGRES = {"shared_buffers": "256MB", "max_wal_size": "4GB", "max_connections": "200"}


@dataclass(frozen=True)
class System:
    name: str
    store: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    flight: tuple[dict[str, Any], ...] = ({},)
    """Variants with 64 Turns in flight; the best one counts."""
    growth: tuple[dict[str, Any], ...] = ({},)

    @property
    def ours(self) -> bool:
        return self.module == "ours"


BOTH = ({"mode": "sync"}, {"mode": "async"})
SYSTEMS = (
    System("ours, SQLite", "sqlite", "ours"),
    System("LangGraph, SQLite", "sqlite", "langgraph_saver", growth=({}, {"state": "delta"})),
    System("DBOS, SQLite", "sqlite", "dbos_steps", {"mode": "async"}, flight=BOTH),
    System("ours, PostgreSQL", "postgres", "ours"),
    System("LangGraph, PostgreSQL", "postgres", "langgraph_saver", flight=BOTH, growth=({}, {"state": "delta"})),
    System("DBOS, PostgreSQL", "postgres", "dbos_steps", {"mode": "async"}, flight=BOTH),
    System(
        "Absurd, PostgreSQL",
        "postgres",
        "absurd_tasks",
        flight=({"workers": 4}, {"workers": 8}, {"workers": 2, "concurrency": 8}),
    ),
)


class Bench:
    """Starts jobs: a folder or a database for each, the slow disk where it is wanted, and what they answer."""

    def __init__(self, folder: Path, postgres: PostgresServer | None, *, slow: bool, shim: Path) -> None:
        self._folder = folder
        self._postgres = postgres
        self._slow = slow
        self._shim = shim
        self._databases = 0

    @contextmanager
    def place(self, system: System) -> Iterator[dict[str, Any]]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            if system.store == "sqlite":
                yield {"store": "sqlite", "folder": folder}
                return
            assert self._postgres is not None
            self._databases += 1
            name = f"bench{self._databases}"
            asyncio.run(self.sql("postgres", f"create database {name}"))
            try:
                yield {"store": "postgres", "dsn": self._postgres.dsn(name), "database": name, "folder": folder}
            finally:
                asyncio.run(self.sql("postgres", f"drop database {name} with (force)"))

    async def sql(self, database: str, statement: str) -> Any:
        assert self._postgres is not None
        connection = await asyncpg.connect(self._postgres.dsn(database))
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    def stored(self, job: dict[str, Any]) -> int:
        """Bytes at rest: what is in the log of transactions has been written to its place."""
        if job["store"] == "sqlite":
            for path in Path(job["folder"]).glob("*.db"):
                connection = sqlite3.connect(path)
                connection.execute("pragma wal_checkpoint(truncate)")
                connection.close()
            return work.files(job["folder"])
        asyncio.run(self.sql(job["database"], "checkpoint"))
        return asyncio.run(self.sql(job["database"], f"select pg_database_size('{job['database']}')"))

    def start(self, system: System, job: dict[str, Any]) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        if self._slow and system.store == "sqlite":
            environment |= slow_flush(self._shim)
        return subprocess.Popen(
            [
                str(sys.executable if system.ours else PEERS_PYTHON),
                "-m",
                f"benchmarks.peers.{system.module}",
                json.dumps(job),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def run(self, system: System, job: dict[str, Any]) -> dict[str, Any]:
        process = self.start(system, job)
        try:
            out, errors = process.communicate(timeout=SECONDS_MAX)
        finally:
            end(process)
        if process.returncode:
            raise RuntimeError(f"{system.name} {job}: {errors[-3000:]}")
        return json.loads(out.splitlines()[-1])


def end(process: subprocess.Popen[str]) -> None:
    """`kill -9` of the process and of what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def slow_flush(shim: Path) -> dict[str, str]:
    return {"LD_PRELOAD": str(shim), "FLUSH_MICROSECONDS": str(FLUSH_MICROSECONDS)}


# ------------------------------------------------------------ what is measured


def speed(bench: Bench, system: System, options: argparse.Namespace, told: dict[str, list[float]]) -> dict[str, Any]:
    """One round of one at a time, and of 64 in flight with the bytes that stay."""
    with bench.place(system) as job:
        answer = bench.run(system, job | system.options | {"test": "sequential", "turns": options.turns})
        told["ms/step"].append(answer["ms/step"])
    best, size = 0.0, 0.0
    for variant in system.flight:
        with bench.place(system) as job:
            before = bench.stored(job)
            answer_of = bench.run(
                system, job | system.options | variant | {"test": "flight", "seconds": options.seconds}
            )
            if answer_of["steps/s"] > best:
                best = answer_of["steps/s"]
                size = (bench.stored(job) - before) / answer_of["turns"] / work.STEPS
    told["steps/s"].append(best)
    told["bytes/step"].append(size)
    return answer.get("settings", {})


def growth(bench: Bench, system: System, told: dict[str, list[float]]) -> None:
    for variant in system.growth:
        with bench.place(system) as job:
            answer = bench.run(system, job | system.options | variant | {"test": "growth", "turns": 5, "mode": "sync"})
        suffix = "".join(f" {value}" for value in variant.values())
        for history, value in answer.items():
            if history.isdigit():
                told[f"ms/step after {history}{suffix}"].append(value)


def recovery(bench: Bench, system: System, told: dict[str, list[float]]) -> None:
    """`kill -9` in the middle of 20 Turns, and another worker at once."""
    with bench.place(system) as job, tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        job |= system.options | {"log": str(log), "lease": LEASE, "concurrency": work.RECOVERED_TURNS, "mode": "sync"}
        first = bench.start(system, job | {"test": "begin"})
        wait_for(
            lambda: all(n >= 10 for n in runs_of(log).values()) and len(runs_of(log)) == work.RECOVERED_TURNS, first
        )
        end(first)
        killed = time.monotonic()
        before = len(log.read_text().splitlines())
        second = bench.start(system, job | {"test": "resume"})
        want = work.RECOVERED_TURNS * work.RECOVERED_STEPS
        wait_for(lambda: len({tuple(line.split()[:2]) for line in log.read_text().splitlines()}) == want, second)
        end(second)
        lines = [line.split() for line in log.read_text().splitlines()]
        first_of: dict[str, float] = {}
        for turn, _, at in lines[before:]:
            first_of.setdefault(turn, float(at))
        told["first new step s"].append(min(first_of.values()) - killed)
        told["all Turns go on s"].append(max(first_of.values()) - killed)
        told["steps run twice"].append(
            sum(1 for times in Counter((turn, step) for turn, step, _ in lines).values() if times > 1)
        )


def runs_of(log: Path) -> Counter[str]:
    return Counter(line.split()[0] for line in log.read_text().splitlines()) if log.exists() else Counter()


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("it takes too long")
        if process.poll() not in (None, 0):
            raise RuntimeError(process.communicate()[1][-3000:])
        time.sleep(0.05)


def raw(bench: Bench, folder: Path, shim: Path | None) -> dict[str, float]:
    """What one flush costs here, and a bare commit of our record store: no runtime, no harness."""
    program = (
        "import os, statistics, time, tempfile, sys\n"
        "with tempfile.TemporaryFile(dir=sys.argv[1]) as f:\n"
        "    taken = []\n"
        "    for n in range(300):\n"
        "        os.pwrite(f.fileno(), os.urandom(4096), n * 4096)\n"
        "        a = time.perf_counter(); os.fdatasync(f.fileno()); taken.append(time.perf_counter() - a)\n"
        "print(statistics.median(taken) * 1e3)\n"
    )
    environment = {**os.environ, **(slow_flush(shim) if shim else {})}
    flush = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    return {"one flush ms": float(flush)}


def stores_alone() -> str:
    """Our record stores without a runtime and a harness, beside a raw commit: what `make bench` says of a step."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.steps"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return "\n".join(["## Our stores alone", "", *(f"- {line}" for line in told.splitlines()[1:]), ""])


# ------------------------------------------------------------ the whole


def build_shim(folder: Path) -> Path:
    shim = folder / "slow_flush.so"
    source = Path(__file__).with_name("slow_flush.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(shim), str(source), "-ldl"], check=True)
    shim.chmod(0o755)
    return shim


def available(system: System) -> bool:
    if system.ours and system.store == "postgres":
        from agentscope_durable import assembly

        return hasattr(assembly, "PostgresBackend")
    return True


def measure(options: argparse.Namespace, *, slow: bool) -> str:
    systems = [
        one for one in SYSTEMS if available(one) and (not options.only or any(o in one.name for o in options.only))
    ]
    told: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    settings: dict[str, dict[str, Any]] = {}
    shim = build_shim(place.base())
    with tempfile.TemporaryDirectory(dir=options.folder or place.base()) as name:
        folder = Path(name)
        postgres = None
        if any(one.store == "postgres" for one in systems):
            where = None if options.folder is None else Path(options.folder)
            delay = slow_flush(shim) if slow else {}
            postgres = PostgresServer(place.postgres_18(), base=where, environment=delay, **POSTGRES)
        try:
            bench = Bench(folder, postgres, slow=slow, shim=shim)
            if postgres is not None:
                settings["PostgreSQL"] = {
                    name: asyncio.run(bench.sql("postgres", f"show {name}"))
                    for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
                }
            raws: dict[str, list[float]] = defaultdict(list)
            for _ in range(options.rounds):
                for key, value in raw(bench, folder, shim if slow else None).items():
                    raws[key].append(value)
                for system in systems:
                    settings[system.name] = speed(bench, system, options, told[system.name])
                    say(f"{system.name}: {last(told[system.name])}")
            for system in systems:
                if "growth" in options.tests:
                    growth(bench, system, told[system.name])
                if "recovery" in options.tests:
                    recovery(bench, system, told[system.name])
                say(f"{system.name}: {last(told[system.name])}")
        finally:
            if postgres is not None:
                postgres.close()
    return render(told, settings, {key: statistics.median(values) for key, values in raws.items()}, slow=slow)


def last(told: dict[str, list[float]]) -> str:
    return ", ".join(f"{key} {values[-1]:.4g}" for key, values in told.items())


def say(line: str) -> None:
    print(line, flush=True)


def render(
    told: dict[str, dict[str, list[float]]],
    settings: dict[str, dict[str, Any]],
    raws: dict[str, float],
    *,
    slow: bool,
) -> str:
    medians = {
        name: {key: statistics.median(values) for key, values in answers.items()} for name, answers in told.items()
    }
    title = f"Each flush {FLUSH_MICROSECONDS / 1000:g} ms longer" if slow else "This machine's disk"
    lines = [f"## {title}", "", ", ".join(f"{key} {value:.3g}" for key, value in raws.items()), ""]
    columns = ("ms/step", "steps/s", "bytes/step", "first new step s", "all Turns go on s", "steps run twice")
    lines += ["| | " + " | ".join(columns) + " |", "| - |" + " - |" * len(columns)]
    for name, values in medians.items():
        lines.append(f"| {name} | " + " | ".join(figure(values.get(column)) for column in columns) + " |")
    grown = [f"ms/step after {history}" for history in work.HISTORIES]
    if any(grown[0] in values for values in medians.values()):
        lines += ["", "| | " + " | ".join([*grown, "growth"]) + " |", "| - |" + " - |" * (len(grown) + 1)]
        for name, values in medians.items():
            for suffix in ("", " delta"):
                row = [values.get(f"{column}{suffix}") for column in grown]
                if None not in row:
                    lines.append(f"| {name}{suffix} | {' | '.join(map(figure, row))} | {row[-1] / row[0]:.2f} |")  # type: ignore[operator]
    lines += ["", "| ours to | ms/step | steps/s |", "| - | - | - |"]
    for name, values in medians.items():
        ours = medians.get(f"ours, {name.split(', ')[1]}")
        if ours is not None and ours is not values:
            lines.append(
                f"| {name} | {ours['ms/step'] / values['ms/step']:.2f} | {ours['steps/s'] / values['steps/s']:.1f} |"
            )
    lines += ["", "Settings, read back:", ""]
    lines += [
        f"- {name}: " + ", ".join(f"{key} {value}" for key, value in found.items())
        for name, found in settings.items()
        if found
    ]
    return "\n".join([*lines, ""])


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=30, help="Turns one at a time, in a round")
    parser.add_argument("--seconds", type=float, default=5.0, help="with 64 in flight, in a round")
    parser.add_argument("--only", nargs="*", help="parts of the names of the systems")
    parser.add_argument("--tests", nargs="*", default=["growth", "recovery"], help="besides speed: growth, recovery")
    parser.add_argument("--disks", nargs="*", default=["plain", "slow"])
    parser.add_argument("--folder", help="where all files are made, say on another disk; default: build/servers")
    parser.add_argument("--no-write", action="store_true", help="do not touch results-peers.md")
    options = parser.parse_args()
    parts = [measure(options, slow=disk == "slow") for disk in options.disks]
    if not options.only:
        parts.append(stores_alone())
    head = [
        "# This library beside DBOS, LangGraph and Absurd",
        "",
        f"{time.strftime('%Y-%m-%d')}, {machine()}. Written by `make bench-peers`. Read ratios, not times.",
        f"{options.rounds} interleaved rounds, medians. Peers: `benchmarks/peers/constraints.txt`.",
        f"{os.getloadavg()[2]:.0f} processes wanted a core at the same time, in the mean of the last 15 minutes.",
        "",
    ]
    text = "\n".join(head + parts)
    print(text)
    if not options.no_write and not options.only:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
