"""C31: the user had seen text that vanished after a cancel, because it had never been stored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.contracts.errors import TurnCancelled
from agentscope_durable.contracts.events import Committed, EventDelta, PreviewStarted
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, final
from tests.runtime.conftest import KEY, SECONDS, Hosts, kill, refused, turn_is

LEASE_MS = 30_000
SENTENCE = "one two three four"


class Watcher:
    """What a person sees: committed messages, and the words of each attempt that is not committed or withdrawn yet."""

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.typing: dict[tuple[str, int], str] = {}
        self.withdrawn: list[tuple[str, int]] = []
        self._ended = asyncio.Event()
        self.seen = asyncio.Event()

    async def watch(self, session: Any) -> None:
        async with session.stream_events(deltas={EventDeltaType.MESSAGE}) as events:
            async for event in events:
                match event:
                    case EventDelta():
                        key = (event.message_id, event.attempt)
                        self.typing[key] = self.typing.get(key, "") + event.text
                        self.seen.set()
                    case Committed():
                        self._fact(event.event)
                    case PreviewStarted():
                        self.typing[event.message_id, event.attempt] = ""
                    case _:
                        raise AssertionError(event)

    def _fact(self, event: Any) -> None:
        data = event.data
        if event.type == "message.completed":
            self.facts.append("".join(part["text"] for part in data["content"]))
            self.typing = {key: text for key, text in self.typing.items() if key[0] != data["messageId"]}
        elif event.type == "message.abandoned":
            key = (data["messageId"], data["attempt"])
            self.withdrawn.append(key)
            self.typing.pop(key, None)
        elif event.type == "turn.status" and data["turn"]["status"] in ("COMPLETED", "CANCELLED", "FAILED"):
            self._ended.set()

    async def ended(self) -> None:
        async with asyncio.timeout(SECONDS):
            await self._ended.wait()


@pytest.mark.case("C31")
@pytest.mark.parametrize("end", ["cancel", "host dies"])
async def test_words_that_were_shown_are_stored_or_withdrawn(hosts: Hosts, clock: ManualClock, end: str) -> None:
    gates, live = Gates(), LocalLiveEvents()
    harness = ScriptedHarness([final(SENTENCE, gate="half")], gates=gates)
    runtime = await hosts.open(harness, live_events=live)
    session = await runtime.create_session(KEY, "agent")
    others = [await hosts.open(live_events=live), await hosts.open(live_events=live)]
    watchers = [Watcher() for _ in others]
    watching = [
        asyncio.create_task(watcher.watch(other.get_session(KEY)))
        for watcher, other in zip(watchers, others, strict=True)
    ]
    turn = await session.submit("r1", "go")
    await gates.reached("half")
    async with asyncio.timeout(SECONDS):
        for watcher in watchers:
            await watcher.seen.wait()
            assert list(watcher.typing.values()) == ["one two "]
            assert watcher.facts == ["go"]

    last = others[0].get_session(KEY).get_turn(turn.turn_id)
    if end == "cancel":
        await turn.cancel("stop")
        await refused(last.wait(SECONDS), TurnCancelled)
    else:
        kill(runtime)
        clock.advance(LEASE_MS + 1)
        gates.open("half")
        await hosts.open(harness, live_events=live)
        await turn_is(last, "COMPLETED")

    stored = [message.text for message in await last.history()]
    for watcher in watchers:
        await watcher.ended()
        assert watcher.typing == {}
        assert watcher.facts == stored
        assert [attempt for _, attempt in watcher.withdrawn] == [1]
    assert stored == (["go"] if end == "cancel" else ["go", SENTENCE])
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
