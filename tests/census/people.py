"""What the stories of the census and of the faults have in common: what people do, and what must hold of a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from agentscope_durable.contracts.errors import AlreadyDecided, InvalidTransition, NotFound, Terminal
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.executor import Cancelled, Succeeded
from agentscope_durable.testing.census import (
    answers_once,
    calls_answered,
    effects_once,
    nothing_stuck,
    replay_agrees,
    submits_once,
)

ROUTE: Final = "ops"
STEER: Final = "mind the cache"
RERUNNABLE: Final = frozenset({"look"})
TOO_LATE: Final = (AlreadyDecided, InvalidTransition, NotFound, Terminal)
"""A Turn may have moved on between the look and the act; that is no fault of either."""


async def reconcile(backend: SessionBackend, turn: DurableTurn, call_id: str, done: Iterable[tuple[str, str]]) -> None:
    """Evidence settles it: what was done says whether the effect happened."""
    happened = (turn.turn_id, call_id) in done
    result = Succeeded(value="seen to have happened") if happened else Cancelled("it did not happen")
    await HostOperations(backend).reconcile_tool(
        turn, call_id, request_id=f"reconcile-{turn.turn_id}-{call_id}", result=result, evidence_ref="ledger"
    )


async def standing(
    backend: SessionBackend,
    session: SessionKey,
    acknowledged: Mapping[str, str],
    done: Iterable[tuple[str, str]],
    asked: Mapping[str, int] | None,
) -> list[str]:
    """What does not hold of S1 to S5 and P4, with all hosts closed.

    Args:
        acknowledged: request id to the Turn that its caller was told.
        done: (Turn id, call id) of every effect that happened.
        asked: message id to requests that reached the model; None where that is not known.
    """
    return [
        *await submits_once(backend, session, acknowledged),
        *await effects_once(backend, session, done, rerunnable=RERUNNABLE),
        *await calls_answered(backend, session),
        *await replay_agrees(backend, session),
        *await nothing_stuck(backend, session, routes=[ROUTE]),
        *await answers_once(backend, session, asked),
    ]
