"""Rejected for what was asked."""

from __future__ import annotations

from agentscope_durable.contracts.errors.base import ErrorCode, Rejected


class InvalidRequest(Rejected):
    """The request is not well formed, or a value in it is not allowed (AD-24, PT-04..PT-10)."""

    code = ErrorCode.INVALID_REQUEST
    http_status = 400
    exit_code = 2
    advice = "Correct the value named here; nothing was stored"

    def __init__(self, reason: str, *, path: str | None = None) -> None:
        self.reason: str = reason
        # Where in the request, like "$.content[0].source"; None: the request as a whole.
        self.path: str | None = path
        super().__init__(reason if path is None else f"{reason}, at {path}")


class InvalidCursor(InvalidRequest):
    """The cursor was not made by this Session, or was altered."""

    advice = "Use a cursor that this Session gave, unchanged, or None to start at the beginning"


class TooLarge(Rejected):
    """A body is larger than its named bound."""

    code = ErrorCode.TOO_LARGE
    http_status = 413
    exit_code = 2
    advice = "Send less, or send large content as a URL"

    def __init__(self, subject: str, *, size_bytes: int, limit_bytes: int) -> None:
        self.subject: str = subject
        self.size_bytes: int = size_bytes
        self.limit_bytes: int = limit_bytes
        super().__init__(f"the {subject} has {size_bytes} bytes, more than {limit_bytes}")


class SnapshotTooLarge(Rejected):
    """A snapshot would need more than one of its named bounds."""

    code = ErrorCode.TOO_LARGE
    http_status = 413
    exit_code = 2
    advice = "Narrow it to a Thread or a Turn, or read the history in pages; pruned events count for less"

    def __init__(self, bound: str, limit: int) -> None:
        self.bound: str = bound
        self.limit: int = limit
        super().__init__(f"the snapshot is beyond {bound}, which is {limit}")


class NotFound(Rejected):
    """There is no such Session, Thread, Turn, Run, Step, interaction or call (RT-56)."""

    code = ErrorCode.NOT_FOUND
    http_status = 404
    exit_code = 3
    advice = "Check the id, and that this backend is the one it was created on"

    def __init__(self, kind: str, identity: str) -> None:
        self.kind: str = kind
        self.identity: str = identity
        super().__init__(f"there is no {kind} {identity!r}")


class Forbidden(Rejected):
    """The caller may not do this."""

    code = ErrorCode.FORBIDDEN
    http_status = 403
    exit_code = 8
    advice = "Ask whoever runs this host for the right"

    def __init__(self, operation: str, *, identity: str | None = None) -> None:
        self.operation: str = operation
        # On what: a Session, a Turn; None: the operation as a whole.
        self.identity: str | None = identity
        super().__init__(f"{operation} is not allowed" + ("" if identity is None else f" on {identity!r}"))


class PolicyRefused(Rejected):
    """The application's commit policy refuses this, for a reason of its own. Nothing was stored (BE-18)."""

    code = ErrorCode.FORBIDDEN
    http_status = 403
    exit_code = 8
    advice = "Ask whoever made the rule, or again when what it names has changed"

    def __init__(self, reason: str) -> None:
        self.reason: str = reason
        super().__init__(reason)


class CursorExpired(Rejected):
    """The events after this cursor have been pruned."""

    code = ErrorCode.CURSOR_EXPIRED
    http_status = 410
    exit_code = 9
    advice = "Take a snapshot and continue from its cursor"

    def __init__(self, cursor: int, *, oldest: int) -> None:
        self.cursor: int = cursor
        # The oldest cursor that can still be continued from.
        self.oldest: int = oldest
        super().__init__(f"cursor {cursor} is older than {oldest}, the oldest one kept")


class SessionDropped(Rejected):
    """The Session was dropped by an operator: what it held is gone, and its id is not used again."""

    code = ErrorCode.DROPPED
    http_status = 410
    exit_code = 9
    advice = "Use another session id: a dropped one is never used again, so that no request id of it runs twice"

    def __init__(self, session: str) -> None:
        self.session: str = session
        super().__init__(f"session {session!r} was dropped")


class CheckpointPruned(Rejected):
    """The settled position was dropped by an operator, and what is needed to come back to it."""

    code = ErrorCode.DROPPED
    http_status = 410
    exit_code = 9
    advice = "List the checkpoints of the thread and choose one that is kept"

    def __init__(self, thread_id: str, position: str) -> None:
        self.thread_id: str = thread_id
        self.position: str = position
        super().__init__(f"checkpoint {position!r} of thread {thread_id!r} was dropped")


class EventGap(CursorExpired):
    """Events are missing between the last one that was folded and the next one given (PR-16), or before them."""

    def __init__(self, cursor: int, *, oldest: int, continues: bool = False) -> None:
        """`continues`: it is the beginning of what the event after `oldest` goes on with."""
        missing = f"the beginning of what event {oldest + 1} goes on with is" if continues else None
        Rejected.__init__(self, f"{missing or f'the events {cursor + 1} to {oldest} are'} missing")
        self.cursor: int = cursor
        self.oldest: int = oldest
        self.continues: bool = continues
