"""What may be observed of, and decided about, requests to a model.

Rule 1: every transport request is reported by itself, also inside a retry (MC-09). Retries are never folded into one.
Rule 2: without a hook nothing happens: no task, no empty call (TM-08).
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from agentscope_durable.contracts.log import Usage
from agentscope_durable.contracts.status import ModelPurpose, ModelStatus

__all__ = ["ModelAdmission", "ModelCallPolicy", "ModelRequestEnded", "ModelRequestObserver", "ModelRequestStarted"]


class ModelAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """A model call that is about to be made."""

    turn_id: str
    run_id: str
    reasoning: int
    purpose: ModelPurpose
    messages: int
    tools: int


class ModelCallPolicy(Protocol):
    """Decides about a model call before it is made."""

    async def admit(self, call: ModelAdmission) -> None:
        """Return to let it be made.

        Raises:
            Exception: it is denied; the model is not called and the invocation fails with this error.
        """
        ...


class ModelRequestStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A request is about to leave. `request` counts within the call, from 1."""

    model_call_id: str
    request: int
    model: str
    purpose: ModelPurpose


class ModelRequestEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A request came to an end, whatever kind of."""

    model_call_id: str
    request: int
    status: ModelStatus
    usage: Usage | None
    complete: bool
    elapsed_ms: int


class ModelRequestObserver(Protocol):
    """Told of every request. Must not block; what it raises is not caught."""

    def started(self, request: ModelRequestStarted) -> Any: ...

    def ended(self, request: ModelRequestEnded) -> Any: ...
