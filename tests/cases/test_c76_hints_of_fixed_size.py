"""C76: a notification carries so many bytes and no more, whatever ids and inputs are; and without any, all goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.backend.transaction import NoWakeups
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import ID_CHARS_MAX
from agentscope_durable.contracts.messages import INPUT_BYTES_MAX
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final
from tests.every_store import on_every_store, shelf
from tests.runtime.conftest import turn_is

HINT_BYTES = 26
"""A letter, a colon and twelve bytes in hex."""
LONGEST = SessionKey("n" * ID_CHARS_MAX, "\N{PILE OF POO}" * ID_CHARS_MAX)


class Noted(LocalWakeups):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def publish(self, keys: tuple[str, ...]) -> None:
        self.keys += keys
        super().publish(keys)


async def live(backend: Any, text: str) -> None:
    """A Turn with a question, under the longest names there are."""
    harness = Harness("h" * ID_CHARS_MAX, "v" * ID_CHARS_MAX, ScriptedHarness([approval("deploy"), final("done")]))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.02) as runtime:
        session = await runtime.create_session(LONGEST, harness.name)
        thread = await session.create_thread("t" * ID_CHARS_MAX, harness.name)
        await runtime.start()
        turn = await thread.submit("r" * ID_CHARS_MAX, text)
        await turn_is(turn, "WAITING")
        (question,) = await turn.pending_interactions()
        await turn.respond("a" * ID_CHARS_MAX, question.interaction_id, True)
        assert str(await turn.wait(90)) == "done"


@pytest.mark.case("C76")
@on_every_store
async def test_a_hint_is_of_one_size_whatever_it_is_about(backend: str, tmp_path: Path) -> None:
    wakeups = Noted()
    async with shelf(backend, tmp_path) as place:
        await live(await place.backend(wakeups=wakeups), "x" * (INPUT_BYTES_MAX - 1000))

    assert len(wakeups.keys) > 10
    assert {len(key.encode()) for key in wakeups.keys} == {HINT_BYTES}
    assert {key[:2] for key in wakeups.keys} >= {"s:", "t:", "r:"}


@pytest.mark.case("C76")
@pytest.mark.spec("BE-03", "BE-13")
@on_every_store
async def test_without_any_hint_everything_goes_on(backend: str, tmp_path: Path) -> None:
    async with shelf(backend, tmp_path) as place:
        await live(await place.backend(wakeups=NoWakeups()), "go")
