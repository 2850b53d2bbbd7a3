"""What the fakes of a user's tools say they did to the world, kept outside the store."""

from __future__ import annotations

import json
from collections.abc import Callable

from agentscope_durable import _failpoints
from agentscope_durable.testing.ledger import EffectLedger

__all__ = ["BEFORE", "AFTER", "arm", "effect", "observe", "record_in"]

BEFORE, AFTER = "effect.before", "effect.after"
"""Where a story can be killed besides the failpoints of the library: around each effect, in the middle of a tool."""

_ledger: EffectLedger | None = None
_observer: Callable[[str], None] | None = None
_armed: dict[str, int] = {}


def effect(name: str, *, key: str | None = None, **facts: object) -> None:
    """Say, in the fake of a tool, that the world was changed here: a payment, a message, a restart.

    Outside a story it does nothing, so the fake may be used in other tests as well.

    Args:
        key: an idempotency key: effects of one name with one key are one, for the world has seen to it.
        facts: what may help to understand a failure (values JSON can hold).
    """
    if _ledger is None:
        return
    from agentscope_durable.adapters.agentscope import current_origin

    origin = current_origin()
    call = {} if origin is None else {"turn": origin.turn_id, "call": origin.call_id}
    told = json.loads(json.dumps(facts, default=repr))
    _hit(BEFORE)
    _ledger.append("effect", effect=name, key=key, facts=told, **call)
    _hit(AFTER)


def record_in(ledger: EffectLedger | None) -> None:
    """Where `effect` writes from now on."""
    global _ledger
    _ledger = ledger


def arm(name: str, nth: int) -> None:
    """Kill this process at the `nth` pass of `BEFORE` or `AFTER`."""
    _armed[name] = nth


def observe(observer: Callable[[str], None] | None) -> None:
    global _observer
    _observer = observer


def _hit(name: str) -> None:
    if _observer is not None:
        _observer(name)
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            _failpoints.kill(name)
