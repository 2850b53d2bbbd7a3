"""For those who test with this library or build for it: contract suites, fakes that pass them, and census checks.

Nothing is loaded before it is used. The contract suites need pytest; the scripted model, which needs AgentScope, is
`testing.scripted_model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentscope_durable.testing.executor import ExecutorContract
    from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
    from agentscope_durable.testing.harness_adapter import HarnessAdapterContract
    from agentscope_durable.testing.ledger import EffectLedger
    from agentscope_durable.testing.live_events import LiveEventsContract
    from agentscope_durable.testing.manual_clock import ManualClock
    from agentscope_durable.testing.object_store import ObjectStoreContract
    from agentscope_durable.testing.openai_server import OpenAIServer
    from agentscope_durable.testing.record_store import RecordStoreContract
    from agentscope_durable.testing.scripted_harness import ScriptedHarness
    from agentscope_durable.testing.session_backend import SessionBackendContract
    from agentscope_durable.testing.simulated_loop import (
        SimulatedClock,
        SimulatedEnvironment,
        SimulatedHeartbeat,
        SimulatedLoop,
    )
    from agentscope_durable.testing.wakeups import WakeupsContract

__all__ = [
    "EffectLedger",
    "ExecutorContract",
    "FaultyRecordStore",
    "HarnessAdapterContract",
    "LiveEventsContract",
    "ManualClock",
    "ObjectStoreContract",
    "OpenAIServer",
    "RecordStoreContract",
    "ScriptedHarness",
    "SessionBackendContract",
    "SimulatedClock",
    "SimulatedEnvironment",
    "SimulatedHeartbeat",
    "SimulatedLoop",
    "WakeupsContract",
]

_HOMES = {
    "EffectLedger": "ledger",
    "ExecutorContract": "executor",
    "FaultyRecordStore": "faulty_record_store",
    "HarnessAdapterContract": "harness_adapter",
    "LiveEventsContract": "live_events",
    "ManualClock": "manual_clock",
    "ObjectStoreContract": "object_store",
    "OpenAIServer": "openai_server",
    "RecordStoreContract": "record_store",
    "ScriptedHarness": "scripted_harness",
    "SessionBackendContract": "session_backend",
    "SimulatedClock": "simulated_loop",
    "SimulatedEnvironment": "simulated_loop",
    "SimulatedHeartbeat": "simulated_loop",
    "SimulatedLoop": "simulated_loop",
    "WakeupsContract": "wakeups",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
