"""Copied beside the other: its import starts a thread, so every process is a new interpreter."""

from __future__ import annotations

import threading

from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.testing.kit import Story
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, local

threading.Thread(target=threading.Event().wait, daemon=True).start()
story = Story(
    None,
    "Look",
    adapter=lambda _: ScriptedHarness([local("look", value="1", rule=ReplayRule.SAFE), final("{results}")]),
)


def test_with_a_thread(durable):
    assert durable.survives(story, sample=3).killed >= 1
