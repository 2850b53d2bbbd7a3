"""Time that passes only when a test says so."""

from __future__ import annotations


class ManualClock:
    """The clocks of a machine, in milliseconds, moved by hand.

    Pass it to a store as its `clock`. Called, it is the wall clock.

    Args:
        start_ms: what the wall clock shows first.
        boot_id: which boot of the machine this is.
    """

    def __init__(self, start_ms: int = 1_700_000_000_000, *, boot_id: str = "boot-1") -> None:
        self.boot_id = boot_id
        self._wall_ms = start_ms
        self._boot_ms = 60_000

    def __call__(self) -> int:
        return self._wall_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def boot_ms(self) -> int:
        return self._boot_ms

    def advance(self, milliseconds: int) -> None:
        """Let time pass on every clock."""
        if milliseconds < 0:
            raise ValueError("time passes forwards only; use jump() to set the wall clock back")
        self._wall_ms += milliseconds
        self._boot_ms += milliseconds

    def jump(self, milliseconds: int) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does; no time passes."""
        self._wall_ms += milliseconds

    def reboot(self, boot_id: str) -> None:
        """Start the machine again: the boot-time clock begins at zero, under another id."""
        self.boot_id = boot_id
        self._boot_ms = 0
