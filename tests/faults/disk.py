"""A disk below SQLite that fails when a test says so, and that knows what a power cut would leave of it.

Real files and real locks: what is not made to fail goes through to the disk. What was written and not synced is
remembered, so that an image can be made in which any part of it is missing, torn or garbled.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

NAME = "a disk that fails"
SECTOR = 512

IO_ERROR = {
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
}
FULL = apsw.SQLITE_FULL


@dataclass
class _Kept:
    """What is on the disk for sure, and what was written since: (offset, bytes), or the length it was cut to."""

    synced: bytearray
    since: list[tuple[int, bytes] | int] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.since:
            _apply(self.synced, change)
        self.since.clear()

    def after_power_cut(self, chance: random.Random) -> bytes:
        """Sectors reach a disk in any order, and the last of them may be anything."""
        data = bytearray(self.synced)
        fate = chance.choice(("all lost", "a beginning", "any"))
        there = chance.randint(0, len(self.since))
        for number, change in enumerate(self.since):
            if fate == "all lost" or (fate == "a beginning" and number > there):
                continue
            if isinstance(change, int):
                if fate == "a beginning" or chance.random() < 0.5:
                    _apply(data, change)
                continue
            offset, written = change
            whole = number < there if fate == "a beginning" else chance.random() < 0.5
            if whole:
                _apply(data, change)
                continue
            sectors = chance.randint(0, len(written) // SECTOR)
            _apply(data, (offset, written[: sectors * SECTOR]))
            if chance.random() < 0.5:
                at = min(sectors * SECTOR, len(written) - 1)
                _apply(data, (offset + at, chance.randbytes(min(SECTOR, len(written) - at))))
        return bytes(data)


def _apply(data: bytearray, change: tuple[int, bytes] | int) -> None:
    if isinstance(change, int):
        del data[change:]
        return
    offset, written = change
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


class Disk(apsw.VFS):
    """What a database and its log are on.

    Args:
        path: the database; no connection may be open yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(NAME, "unix")
        self._path = str(path)
        self.done: Counter[str] = Counter()
        """Reads, writes and syncs so far, and as `log` the writes to the log alone."""
        self._orders: dict[str, tuple[int, int, int]] = {}
        self.failed = 0
        self.kept: dict[str, _Kept] = {}
        for name in (self._path, f"{self._path}-wal"):
            there = Path(name)
            # Read while nobody has it open: to close a descriptor of it would drop its locks.
            self.kept[name] = _Kept(bytearray(there.read_bytes() if there.exists() else b""))
        self.on_change: Callable[[], None] = lambda: None
        """Called after each write and before and after each sync."""

    def fail(self, what: str, nth: int, *, times: int = 1, code: int | None = None) -> None:
        """The n-th read, write or sync from the beginning fails, and `times` - 1 after it."""
        self._orders[what] = (nth, nth + times - 1, IO_ERROR[what] if code is None else code)

    def heal(self) -> None:
        self._orders.clear()

    def count(self, what: str) -> None:
        self.done[what] += 1
        first, last, code = self._orders.get(what, (0, -1, 0))
        if first <= self.done[what] <= last:
            self.failed += 1
            raise apsw.exception_for(code)

    def after_power_cut(self, seed: str) -> dict[str, bytes]:
        """The files by the ends of their names, as they might be found if the power failed now."""
        chance = random.Random(seed)
        return {name[len(self._path) :]: kept.after_power_cut(chance) for name, kept in self.kept.items()}

    # ---- what SQLite calls ----

    def xOpen(self, name: Any, flags: list[int]) -> _File:
        path = name.filename() if isinstance(name, apsw.URIFilename) else (name or "")
        return _File(self, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        if filename in self.kept:
            self.kept[filename] = _Kept(bytearray())

    def excepthook(self, *_: object) -> None:
        """What fails is told to SQLite, and to nobody else."""


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, path: str, name: Any, flags: list[int]) -> None:
        self._disk = disk
        self._kept = disk.kept.get(path)
        self._log = path.endswith("-wal")
        super().__init__("unix", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        if self._kept is not None:
            self._disk.count("read")
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._kept is not None:
            self._disk.count("write")
            if self._log:
                self._disk.count("log")
        super().xWrite(data, offset)
        if self._kept is not None:
            self._kept.since.append((offset, bytes(data)))
            self._disk.on_change()

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        if self._kept is not None:
            self._kept.since.append(newsize)

    def xSync(self, flags: int) -> None:
        if self._kept is not None:
            self._disk.on_change()
            self._disk.count("sync")
        super().xSync(flags)
        if self._kept is not None:
            self._kept.sync()
            self._disk.on_change()

    def excepthook(self, *_: object) -> None:
        """As above."""


@contextmanager
def disk_below(path: Path) -> Iterator[Disk]:
    """Every database that is opened meanwhile is on this disk."""
    former = apsw.vfs_names()[0]
    disk = Disk(path)
    apsw.set_default_vfs(NAME)
    try:
        yield disk
    finally:
        apsw.set_default_vfs(former)
        disk.unregister()
