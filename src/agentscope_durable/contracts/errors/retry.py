"""Nothing was changed: ask again."""

from __future__ import annotations

from agentscope_durable.contracts.errors.base import ErrorCode, Retry
from agentscope_durable.contracts.identity import ThreadKey


class NotFinished(Retry):
    """`result` of a Turn that has not ended (RT-58)."""

    code = ErrorCode.NOT_FINISHED
    http_status = 409
    exit_code = 22
    advice = "Await turn.wait(), or ask again later"

    def __init__(self, thread_key: ThreadKey, turn_id: str, status: str) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        self.status: str = status
        super().__init__(f"turn {turn_id!r} is {status}")


class WaitTimeout(Retry, TimeoutError):
    """The Turn did not end in the time given; it goes on (AD-19). Also a TimeoutError."""

    code = ErrorCode.TIMEOUT
    http_status = 504
    exit_code = 124
    advice = "The Turn goes on: wait again, or repeat the call with the same request id"

    def __init__(
        self, thread_key: ThreadKey, turn_id: str, *, timeout_ms: int | None = None, waits_for: str | None = None
    ) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        # None: the deadline was the caller's own.
        self.timeout_ms: int | None = timeout_ms
        # Kinds and ids of what holds it, as `waiting_on` has them; None: nothing does, or it is not known.
        self.waits_for: str | None = waits_for
        super().__init__(
            f"turn {turn_id!r} of thread {thread_key.thread_id!r} did not end"
            + (" in time" if timeout_ms is None else f" within {timeout_ms} ms")
            + ("" if waits_for is None else f": it waits for {waits_for}")
        )


class LimitExceeded(Retry):
    """A named bound is reached now."""

    code = ErrorCode.LIMIT_EXCEEDED
    http_status = 429
    exit_code = 75
    advice = "Let some of it finish, then ask again, or raise the bound"

    def __init__(self, limit_name: str, limit: int) -> None:
        self.limit_name: str = limit_name
        self.limit: int = limit
        super().__init__(f"{limit_name} is at its bound of {limit}")


class Unavailable(Retry):
    """Something this needs cannot be reached now; nothing was changed (RC-07)."""

    code = ErrorCode.UNAVAILABLE
    http_status = 503
    exit_code = 75
    advice = "Ask again later, with the same request id"

    def __init__(self, reason: str, *, retry_after_ms: int | None = None) -> None:
        self.reason: str = reason
        # A wait worth trying; None: the caller's own backoff.
        self.retry_after_ms: int | None = retry_after_ms
        super().__init__(reason)


class EntryBusy(Unavailable):
    """Another tool call that is under way has written the workspace entry; it becomes true with that call's result."""

    http_status = 409
    advice = "Write it when that call has ended, or let one call do both"

    def __init__(self, key: str, call_id: str) -> None:
        self.key: str = key
        self.call_id: str = call_id
        super().__init__(f"workspace entry {key!r} is being written by tool call {call_id!r}")


class HostClosed(Unavailable):
    """The runtime, worker or backend is closed or closing; durable work is untouched."""

    advice = "Open a new one and ask again, with the same request id"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} is closed")


class BodySwept(Unavailable):
    """A large body was put so long ago that a sweep removed it before a commit referred to it; nothing was changed."""

    advice = "Send the request again, with the same request id: its body is put anew"

    def __init__(self, session: str, name: str) -> None:
        self.session: str = session
        self.name: str = name
        super().__init__(f"the body {name!r} of session {session!r} was swept before anything referred to it")


class StoreBusy(Unavailable):
    """The store is locked by someone else for longer than the wait allowed."""

    def __init__(self, location: str, *, retry_after_ms: int | None = None) -> None:
        self.location: str = location
        super().__init__(f"the store {location!r} is busy", retry_after_ms=retry_after_ms)


class StoreFull(Unavailable):
    """The disk, tablespace or quota is full."""

    http_status = 507
    advice = "Free some space, then ask again, with the same request id; running Turns go on by themselves"

    def __init__(self, location: str) -> None:
        self.location: str = location
        super().__init__(f"there is no space left for the store {location!r}")


class StoreMoved(Unavailable):
    """The store is not at the place it was opened at, or another one is."""

    advice = "Put the file back, or close every host and open the store anew"

    def __init__(self, location: str) -> None:
        self.location: str = location
        super().__init__(f"the store {location!r} was deleted, moved or replaced while it was open")


class StoreReadOnly(Unavailable):
    """The store may be read but not written."""

    advice = "Make it writable (permission, mount, or the primary instead of a replica), then ask again"

    def __init__(self, location: str) -> None:
        self.location: str = location
        super().__init__(f"the store {location!r} cannot be written")
