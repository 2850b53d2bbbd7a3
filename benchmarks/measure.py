"""What every benchmark shares: a machine's raw floor, percentiles, and a place for the answer."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import apsw

PAYLOAD_BYTES = 1024


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values: list[float]) -> float:
    return statistics.median(values)


class RawSqlite:
    """One random 1 KB row a commit, or a group of rows a commit: what the disk and SQLite cost alone."""

    def __init__(self, directory: Path) -> None:
        self._connection = apsw.Connection(str(directory / "raw.db"))
        self._connection.execute("pragma page_size=8192")
        self._connection.execute("pragma journal_mode=wal").fetchall()
        self._connection.execute("pragma synchronous=full")
        self._connection.execute("create table t(id integer primary key, v blob)")
        self.settings = {
            name: self._connection.execute(f"pragma {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "page_size")
        }

    def commit(self, rows: int = 1) -> float:
        """Seconds of one commit of `rows` rows."""
        bodies = [(os.urandom(PAYLOAD_BYTES),) for _ in range(rows)]
        started = time.perf_counter()
        self._connection.execute("begin immediate")
        self._connection.executemany("insert into t(v) values(?)", bodies)
        self._connection.execute("commit")
        return time.perf_counter() - started

    def close(self) -> None:
        self._connection.close()


def interleaved(count: int, *calls: Callable[[], float]) -> list[list[float]]:
    """Call each in turn, `count` times, so that all meet the same weather."""
    results: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for result, call in zip(results, calls, strict=True):
            result.append(call())
    return results


def machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}"
