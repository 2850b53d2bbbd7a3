"""The folder where the processes of one store find each other: one socket for each.

A socket that nobody listens on is what a killed process left: whoever finds it removes it. One that is there listens
already, because it gets its name only then.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

__all__ = ["ADDRESS_BYTES_MAX", "Place"]

ADDRESS_BYTES_MAX: Final = 103
"""Bytes of a socket's path that every system takes: 103 on macOS, 107 on Linux."""
BACKLOG: Final = 64
NEW_SECONDS: Final = 60.0
"""A socket that is older than this and does not listen yet never will."""
_SOCKET = ".socket"
_NEW = ".new"


class Place:
    """One folder.

    Args:
        folder: made by `listen` if it is not there.
        read_only: leave everything as it is; then one can connect and not be connected to.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder = folder
        self._read_only = read_only
        self._descriptor: int | None = None

    def listen(self, name: str) -> socket.socket:
        """A socket under this name that listens, for this user alone.

        Raises:
            OSError: the folder cannot be used for that.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(self._address(name + _NEW))
            os.chmod(self._folder / (name + _NEW), 0o600)
            listening.listen(BACKLOG)
            listening.setblocking(False)
            os.rename(self._folder / (name + _NEW), self._folder / (name + _SOCKET))
            self._clear_new(name)
        except BaseException:
            listening.close()
            raise
        return listening

    def names(self) -> set[str]:
        """Who is there, or was when it was killed."""
        try:
            return {name.removesuffix(_SOCKET) for name in os.listdir(self._folder) if name.endswith(_SOCKET)}
        except OSError:
            return set()

    def connect(self, name: str) -> socket.socket | None:
        """A connection to this one; None if it is gone, or has no time now."""
        try:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            # No descriptors are left.
            return None
        connected.setblocking(False)
        try:
            connected.connect(self._address(name + _SOCKET))
        except ConnectionRefusedError:
            connected.close()
            self.remove(name)
            return None
        except OSError:
            connected.close()
            return None
        return connected

    def remove(self, name: str) -> None:
        if not self._read_only:
            with contextlib.suppress(OSError):
                os.unlink(self._folder / (name + _SOCKET))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _clear_new(self, name: str) -> None:
        """Sockets of those who were killed before they listened. A living one is at that for no time at all."""
        now = os.stat(self._folder / (name + _SOCKET)).st_mtime
        for other in os.listdir(self._folder):
            path = self._folder / other
            with contextlib.suppress(OSError):
                if other.endswith(_NEW) and now - path.stat().st_mtime > NEW_SECONDS:
                    path.unlink()

    def _address(self, name: str) -> str:
        """A path that is short enough for a socket, however long that of the folder is."""
        path = os.fspath(self._folder / name)
        if len(os.fsencode(path)) <= ADDRESS_BYTES_MAX:
            return path
        if self._descriptor is None:
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._descriptor}/{name}"
