"""It may have happened, or not: query."""

from __future__ import annotations

from agentscope_durable.contracts.errors.base import Unconfirmed


class Uncertain(Unconfirmed):
    """The answer of a write was lost or unreadable (PT-08, HT-11)."""

    def __init__(self, operation: str, *, request_id: str | None = None, reason: str | None = None) -> None:
        self.operation: str = operation
        # None: the operation had no request id of the caller.
        self.request_id: str | None = request_id
        self.reason: str | None = reason
        super().__init__(
            f"{operation} may have happened or not"
            + ("" if request_id is None else f", request {request_id!r}")
            + ("" if reason is None else f": {reason}")
        )
