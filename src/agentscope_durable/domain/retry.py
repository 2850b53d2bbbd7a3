"""When a failed invocation may be tried again (RC-11)."""

from __future__ import annotations

from agentscope_durable.contracts.records import Recovery

SETTLE_BACKOFF_MS = 1000
SETTLE_BACKOFF_MAX_MS = 30_000


def backoff_ms(initial_ms: int, cap_ms: int, failures: int) -> int:
    """Wait after the given number of failures: doubles from `initial_ms` up to `cap_ms`."""
    return min(initial_ms << min(max(failures - 1, 0), 40), cap_ms)


def retry_at_ms(recovery: Recovery, now_ms: int) -> int:
    """Store time at which the next invocation may start."""
    return now_ms + backoff_ms(recovery.initial_backoff_ms, recovery.max_backoff_ms, recovery.failures)
