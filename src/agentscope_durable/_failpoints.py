"""Named places where a test may stop the world.

A failpoint stands before and after each durable write and each external call (C12). In
production `hit` is one comparison. A test arms one name with an action: kill the process,
raise, or call back. The registry is closed: hitting a name that is not in `NAMES` fails, so a new
write cannot appear without being listed here and covered by the census.

`DURABLE_FAILPOINT=name[:nth]` arms a SIGKILL at the nth hit of a name (default the first), which
is how a test kills a process that it did not write.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

NAMES: frozenset[str] = frozenset(
    f"{name}.{side}"
    for name in (
        "store.commit",
        "store.renew",
        "store.release",
        "object.put",
        "object.delete",
        "executor.start",
        "executor.query",
        "executor.cancel",
        "model.request",
        "tool.local",
    )
    for side in ("before", "after")
)

Action = Callable[[str], None]

_armed: dict[str, list[object]] = {}
_observer: Action | None = None


def hit(name: str) -> None:
    """Pass the failpoint `name`. A no-op unless a test armed something."""
    if _observer is None and not _armed:
        return
    _hit(name)


def _hit(name: str) -> None:
    if name not in NAMES:
        raise AssertionError(f"failpoint {name!r} is not registered in _failpoints.NAMES")
    if _observer is not None:
        _observer(name)
    entry = _armed.get(name)
    if entry is None:
        return
    remaining, action = entry
    assert isinstance(remaining, int)
    if remaining > 1:
        entry[0] = remaining - 1
        return
    del _armed[name]
    action(name)  # type: ignore[operator]


def kill(name: str) -> None:
    """The action that ends this process as `kill -9` would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(name: str, action: Action = kill, *, nth: int = 1) -> None:
    """Run `action` at the `nth` hit of `name`, once."""
    if name not in NAMES:
        raise ValueError(f"no failpoint {name!r}; known: {', '.join(sorted(NAMES))}")
    _armed[name] = [nth, action]


def disarm() -> None:
    _armed.clear()


def observe(observer: Action | None) -> None:
    """Call `observer` with the name of every failpoint passed; None stops it."""
    global _observer
    _observer = observer


def _arm_from_environment() -> None:
    text = os.environ.get("DURABLE_FAILPOINT", "")
    if text:
        name, _, nth = text.partition(":")
        arm(name, nth=int(nth or "1"))


_arm_from_environment()
