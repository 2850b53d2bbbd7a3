"""C76: a notification carries 8000 bytes at most, and one that was too long failed the commit it told of.

Here a hint is a key of fixed size, whatever is large: ids, inputs, results, what stands in an object store. Who never
hears one only waits longer.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.backend.transaction import NoWakeups
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import ID_CHARS_MAX
from agentscope_durable.contracts.messages import INPUT_BYTES_MAX
from agentscope_durable.testing.scripted_harness import final, local
from tests.every_store import on_every_store, shelf
from tests.runtime.conftest import SECONDS, Hosts

pytestmark = pytest.mark.case("C76")

KEY_BYTES_MAX = 26
"""A letter, a colon, and a digest of 12 bytes in hex."""
LONG = "\U0001f600" * ID_CHARS_MAX
LARGE = "x" * (INPUT_BYTES_MAX - 200)


class Heard(NoWakeups):
    """Hints that are written down and reach nobody."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def publish(self, keys: tuple[str, ...]) -> None:
        self.keys.update(keys)


@on_every_store
async def test_hints_are_small_however_large_everything_is_and_nothing_needs_them(backend: str, tmp_path: Path) -> None:
    heard = Heard()
    async with shelf(backend, tmp_path) as place, AsyncExitStack() as stack:
        hosts = Hosts(await place.backend(wakeups=heard), stack)
        script: list[Any] = [local("fetch", value=LARGE), final(LARGE)]
        runtime = await hosts.open(script, poll_interval=0.02)
        session = await runtime.create_session(SessionKey(LONG, LONG), "agent")
        thread = await session.create_thread(LONG, "agent")
        turn = await thread.submit(LONG, LARGE)
        assert (await turn.wait(SECONDS)).text == LARGE
        assert [message.text for message in (await thread.history(limit=1)).items] == [LARGE]
    assert {key[:2] for key in heard.keys} >= {"s:", "t:", "r:"}
    assert max(len(key.encode()) for key in heard.keys) <= KEY_BYTES_MAX
