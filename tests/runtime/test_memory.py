"""What a host keeps in memory only: bounded, and never trusted."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.runtime.backoff import REMEMBERED_MAX, Backoff
from agentscope_durable.runtime.live_states import LiveStates

THREAD = ThreadKey(SessionKey("app", "c1"), "main")


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_an_item_waits_longer_after_each_miss_and_not_for_ever() -> None:
    clock = Clock()
    backoff = Backoff(clock, 1.0, most=5.0)  # type: ignore[arg-type]
    waits = []
    for _ in range(5):
        backoff.missed("item")
        start = clock.now
        while backoff.holds("item"):
            clock.now += 0.5
        waits.append(clock.now - start)

    assert waits == [1, 2, 4, 5, 5]
    backoff.missed("item")
    backoff.done("item")
    assert not backoff.holds("item")


def test_what_is_put_aside_is_bounded() -> None:
    backoff = Backoff(Clock(), 1.0)  # type: ignore[arg-type]
    for number in range(2 * REMEMBERED_MAX):
        backoff.missed(number)

    assert len(backoff._misses) == REMEMBERED_MAX
    assert not backoff.holds(0)


@pytest.mark.spec("BE-21")
def test_live_state_serves_the_next_owner_at_the_same_checkpoint_once() -> None:
    states = LiveStates()
    for checkpoint_at, fence in ((5, 4), (6, 3), (5, 3), (5, 5)):
        states.put(THREAD, "state", 10, checkpoint_at=5, fence=3)
        found = states.take(THREAD, checkpoint_at=checkpoint_at, fence=fence)
        assert found == ("state" if (checkpoint_at, fence) == (5, 4) else None)
        assert states.take(THREAD, checkpoint_at=5, fence=4) is None


def test_live_state_is_bounded_by_bytes() -> None:
    states = LiveStates(bytes_max=100)
    threads = [ThreadKey(SessionKey("app", f"{number}"), "main") for number in range(5)]
    for thread in threads:
        states.put(thread, thread, 40, checkpoint_at=1, fence=1)
    states.put(THREAD, "too large", 101, checkpoint_at=1, fence=1)

    kept = [thread for thread in (*threads, THREAD) if states.take(thread, checkpoint_at=1, fence=2)]
    assert kept == threads[3:]
    assert states._bytes == 0
