"""Which hosts of this machine are gone, known at once (D14).

A host holds a lock on a file of its own for as long as its process lives. Whoever obtains that lock
knows that the host is dead and need not wait for its lease. `flock`, not POSIX record locks: these
belong to the process, are granted to it twice, and vanish when any descriptor of the file closes.

Where there is no flock nothing is known here, and the lease alone rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SWEPT_MAX = 256
"""Files of ended hosts that one sweep looks at; the next host that starts goes on."""
_SAFE = re.compile(r"[0-9a-z][0-9a-z_-]{0,99}")


class HostLocks:
    """The lock files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        _folders.add(self)

    def hold(self, owner: str) -> None:
        """Lock the owner's file until `drop` or the end of the process. Twice is fine."""
        if fcntl is None:
            return
        with self._lock:
            if owner in self._held:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path(owner)
            while True:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # A scan may have removed the file between the two calls: then the lock is on nothing.
                if _same_file(descriptor, path):
                    break
                os.close(descriptor)
            self._held[owner] = descriptor

    def drop(self, owner: str) -> None:
        """Remove the owner's file, ours or a dead host's. A living host's stays."""
        if fcntl is None:
            return
        path = self._path(owner)
        with self._lock:
            descriptor = self._held.pop(owner, None)
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            return
        descriptor = _obtain(path)
        if descriptor is not None:
            if _same_file(descriptor, path):
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def holds(self, owner: str) -> bool:
        """Whether the owner is a host of this process."""
        return owner in self._held

    def dead(self, owners: Iterable[str]) -> list[str]:
        """Those whose lock can be obtained. One without a file is not known to be dead."""
        found: list[str] = []
        for owner in owners:
            if owner in self._held:
                continue
            descriptor = _obtain(self._path(owner))
            if descriptor is not None:
                os.close(descriptor)
                found.append(owner)
        return found

    def sweep(self, named: Callable[[], Iterable[str]]) -> None:
        """Remove files that nobody holds and no lease names: of hosts that ended before they first renewed one.

        Args:
            named: the owners that have a lease. Asked when the locks are obtained: what those hosts have written stands
                by then.
        """
        obtained: dict[Path, int] = {}
        try:
            for path in self.folder.glob("*.lock"):
                descriptor = _obtain(path)
                if descriptor is not None:
                    obtained[path] = descriptor
                if len(obtained) == SWEPT_MAX:
                    break
            kept = {self._path(owner) for owner in (*named(), *self._held)} if obtained else set[Path]()
            for path in obtained.keys() - kept:
                if _same_file(obtained[path], path):
                    # Where it may not be removed, it stays: it says nothing.
                    with contextlib.suppress(OSError):
                        path.unlink()
        finally:
            for descriptor in obtained.values():
                os.close(descriptor)

    def strays(self, owners: Iterable[str]) -> list[str]:
        """Files that nobody holds and no lease names, at most SWEPT_MAX. Nothing is removed."""
        kept = {self._path(owner) for owner in (*owners, *self._held)}
        found: list[str] = []
        for path in sorted(self.folder.glob("*.lock")):
            if path in kept or len(found) == SWEPT_MAX:
                continue
            descriptor = _obtain(path)
            if descriptor is not None:
                os.close(descriptor)
                found.append(path.name)
        return found

    def living(self, owner: str) -> bool:
        """Whether a process holds the owner's lock. False where that is not known."""
        return owner in self._held or (self._path(owner).exists() and not self.dead((owner,)))

    def close(self) -> None:
        """Let go of everything; the files stay, and say that these hosts are gone."""
        with self._lock:
            for descriptor in self._held.values():
                os.close(descriptor)
            self._held.clear()

    def forget(self) -> None:
        """In a forked child: the lock is the parent's. Held here too, it would outlive the parent."""
        self._lock = threading.Lock()
        self.close()

    def _path(self, owner: str) -> Path:
        # Upper and lower case are one file on some disks, so only lower case passes as it is.
        name = owner if _SAFE.fullmatch(owner) else hashlib.sha256(owner.encode()).hexdigest()
        return self.folder / f"{name}.lock"


_folders: weakref.WeakSet[HostLocks] = weakref.WeakSet()


def _forget_all() -> None:
    for folder in list(_folders):
        folder.forget()


if fcntl is not None:
    os.register_at_fork(after_in_child=_forget_all)


def _obtain(path: Path) -> int | None:
    """A descriptor that shares the lock, None if a living host holds it or there is no file."""
    if fcntl is None:
        return None
    try:
        # For reading: a shared lock needs no more, and the disk may be one that cannot be written.
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared, so that two scans do not take each other for the living host.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
