"""Rejected for how the program uses the library; and how a Turn ended badly, for whoever waits for its answer."""

from __future__ import annotations

from agentscope_durable.contracts.errors.base import ErrorCode, Rejected
from agentscope_durable.contracts.identity import ThreadKey


class Misuse(Rejected):
    """The program uses this library in a way that cannot work."""

    code = ErrorCode.MISUSE
    http_status = 500
    exit_code = 11
    advice = "Correct the program"


class PolicyFailed(Misuse):
    """The application's commit policy has a defect, and refuses with it what it was asked about. Nothing was stored."""

    advice = "Correct the policy: the same command fails in the same way until then"

    def __init__(self, command: str, reason: str) -> None:
        self.command: str = command
        self.reason: str = reason
        super().__init__(f"the commit policy failed over {command}: {reason}")


class WrongLoop(Misuse):
    """The object belongs to another event loop."""

    advice = "Call it on its own loop: asyncio.run_coroutine_threadsafe(coroutine, loop)"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} was opened on another event loop than the one it is used from")


class UsedAfterFork(Misuse):
    """The object was opened before a fork and is used in the child."""

    advice = "Open it in the child process, or start children with 'spawn'"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} was opened in the parent process and is used after a fork")


class NoExecutionConfiguration(Misuse):
    """`start()` on a runtime that can only read and admit (RT-30)."""

    advice = "Give DurableRuntime at least one Harness, or do not start it: an API host only reads and admits"

    def __init__(self) -> None:
        super().__init__("this runtime has no harness, so there is nothing it could run")


class NoCheckpointCodec(Misuse):
    """A restore or fork on a runtime that cannot read the definition's native state (CK-03)."""

    advice = "Give DurableRuntime checkpoints={name: codec}, or the Harness itself"

    def __init__(self, definition: str) -> None:
        self.definition: str = definition
        super().__init__(f"no checkpoint codec is registered for definition {definition!r}")


class MissingExtra(Rejected, ImportError):
    """A feature needs an optional dependency; also an ImportError."""

    code = ErrorCode.MISSING_EXTRA
    http_status = 500
    exit_code = 11
    advice = "Install the extra named here"

    def __init__(self, feature: str, extra: str) -> None:
        self.feature: str = feature
        self.extra: str = extra
        super().__init__(f"{feature} needs: pip install 'agentscope-durable[{extra}]'")


class AgentFactoryError(Rejected):
    """The application's agent factory raised, or returned something else than it promised."""

    code = ErrorCode.AGENT_FACTORY
    http_status = 500
    exit_code = 11
    advice = "Correct the factory; the cause is chained to this error"

    def __init__(self, definition: str, reason: str) -> None:
        self.definition: str = definition
        self.reason: str = reason
        super().__init__(f"the agent factory of {definition!r} failed: {reason}")


class TurnFailed(Rejected):
    """`result`, `wait` or `call` of a Turn that FAILED (RT-58)."""

    code = ErrorCode.TURN_FAILED
    http_status = 409
    exit_code = 20
    advice = "Read the reason and submit a new Turn; this one stays FAILED"

    def __init__(self, thread_key: ThreadKey, turn_id: str, reason: str) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        # The stored error of the Turn.
        self.reason: str = reason
        super().__init__(f"turn {turn_id!r} failed: {reason}")


class TurnCancelled(Rejected):
    """`result`, `wait` or `call` of a Turn that was CANCELLED (RT-58). Not an asyncio.CancelledError."""

    code = ErrorCode.TURN_CANCELLED
    http_status = 409
    exit_code = 21
    advice = "Submit a new Turn; this one stays CANCELLED"

    def __init__(self, thread_key: ThreadKey, turn_id: str) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        super().__init__(f"turn {turn_id!r} was cancelled")
