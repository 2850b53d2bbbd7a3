"""One connection to another process: what it wants to be told, and what waits to be sent to it.

Rule: sending never waits. What the connection does not take is kept, within a bound; what is beyond it is left out.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

from agentscope_durable.runtime.hints import ANYTHING
from agentscope_durable.transports.machine.frames import Frames, Interest

__all__ = ["INTEREST_MAX", "WAITING_BYTES_MAX", "Peer"]

WAITING_BYTES_MAX: Final = 1024 * 1024
"""Bytes that wait for one peer. What comes then is left out; it is told that anything may have changed."""
INTEREST_MAX: Final = 16_384
"""Keys that one peer may name. Beyond that it is told every hint."""


class Peer:
    """One connection. All but `frames` is guarded by the bus's lock."""

    def __init__(self, connection: socket.socket, now: float, name: str | None = None) -> None:
        self.connection = connection
        self.since = now
        # None until it has said it.
        self.name = name
        self.frames = Frames()
        self.interest: set[str] = set()
        self.everything = True
        self.overflowed = False
        self.waiting = bytearray()
        # Something was left out: hints, or what this process wants to be told.
        self.missed = False
        self.failed = False
        self.registered = 0

    def send(self, data: bytes) -> bool:
        """Without waiting. False if the thread has to see to it."""
        if self.failed:
            return True
        if len(self.waiting) + len(data) > WAITING_BYTES_MAX:
            self.missed = True
            return True
        if not self.waiting:
            try:
                data = data[self.connection.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self.failed = True
                return False
        self.waiting += data
        return not data

    def flush(self) -> None:
        try:
            while self.waiting:
                del self.waiting[: self.connection.send(self.waiting)]
        except BlockingIOError:
            return
        except OSError:
            self.failed = True

    def wants(self, keys: Iterable[str]) -> tuple[str, ...]:
        if self.everything:
            return tuple(keys)
        return tuple(key for key in keys if key in self.interest or key == ANYTHING)

    def note(self, frame: Interest) -> None:
        """What it wants to be told, from now on."""
        if frame.anew:
            self.interest.clear()
            self.overflowed = False
        if not frame.wanted:
            self.interest.difference_update(frame.keys)
        elif len(self.interest) + len(frame.keys) <= INTEREST_MAX:
            self.interest.update(frame.keys)
        else:
            self.overflowed = True
        self.everything = frame.everything or self.overflowed
