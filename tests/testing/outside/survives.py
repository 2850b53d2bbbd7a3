"""Copied into a project of its own, as test_survives.py, by tests/testing/test_kit.py. Some of it must fail."""

from __future__ import annotations

import os

import pytest
from my_app import make_agent

from agentscope_durable.testing.kit import Call, Story

good = Story(make_agent, "Restart it", [Call("look"), Call("restart", {"service": "exporter"})], "It is up.")
charged = Story(make_agent, "Charge", Call("charge", {"amount": 5}), "Charged.")
by_key = Story(make_agent, "Charge", Call("charge_by_key", {"amount": 5}), "Charged.")
noted = Story(make_agent, "Note it", Call("remember", {"what": "milk"}), Call("recall"), "Milk.")
insisting = Story(make_agent, "Note it", Call("remember", {"what": "milk"}), Call("recall_or_fail"), "Milk.")
slow = Story(make_agent, "Wait", Call("wait_and_charge", {"hours": 5}), "Charged.")
SAMPLE = None if os.environ.get("DURABLE_MATRIX") == "all" else 3


def test_good(durable):
    done = durable.survives(good, sample=SAMPLE)
    # How often the store commits may differ by one or two from telling to telling, so the last places may be missed.
    assert 1 <= done.killed <= len(done.points)


def test_killed_in_the_middle_of_an_effect(durable):
    """Nobody knows what came of the restart: the Turn waits for a person, and nothing is restarted twice."""
    assert durable.kill_at("effect.after", good).waited == 1


def test_killed_and_killed_again(durable):
    assert durable.kill_at("model.request.before", good, "tool.local.before").killed == 2


def test_an_effect_with_a_key(durable):
    assert durable.kill_at("tool.local.after", by_key).waited == 0


def test_hours_pass_in_a_moment(durable):
    done = durable.simulate(slow, tellings=10)
    assert done.killed == len(done.points) == 10
    assert done.waited >= 1, "somebody was killed within the five hours"
    assert durable.simulate(slow, tellings=10) == done, "the same numbers are the same tellings"


def test_killed_anywhere_and_killed_again(durable):
    assert durable.simulate(good, tellings=20, kills=2).killed >= 30


def test_declared_safe_and_is_not_under_simulated_time(durable):
    durable.simulate(charged, tellings=100)


def test_declared_safe_and_is_not(durable):
    durable.kill_at("tool.local.after", charged)


def test_kept_in_memory(durable):
    durable.kill_at("model.request.after:2", noted)


def test_kept_in_memory_and_insisting(durable):
    durable.kill_at("model.request.after:2", insisting)


def test_a_place_that_is_not_passed(durable):
    durable.kill_at("object.put.before", noted)


def test_a_story_that_nobody_can_find(durable):
    with pytest.raises(ValueError, match="must stand at the top of"):
        durable.points(Story(make_agent, "Look", "Looked."))


def test_a_name_that_is_no_failpoint(durable):
    with pytest.raises(ValueError, match=r"no failpoint 'tool.local', it is a name.*tool\.local\.after"):
        durable.kill_at("tool.local", good)
