"""The scripted harness keeps the promises of its socket, so a test that uses it tests something."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.harness_adapter import HarnessAdapterContract
from agentscope_durable.testing.ledger import Ledger
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, local, say, think


class TestScriptedHarness(HarnessAdapterContract):
    @pytest.fixture
    async def backend(self) -> AsyncGenerator[TransactionalSessionBackend]:
        self.ledger = Ledger()
        self.storage = TransactionalSessionBackend(MemoryRecordStore(), wakeups=LocalWakeups())
        yield self.storage

    def make_adapter(self) -> HarnessAdapter:
        script = [think("hm"), say("one"), local("t"), local("u"), final("{results}")]
        return ScriptedHarness(script, ledger=self.ledger)

    def open_host(self, adapter: HarnessAdapter) -> DurableRuntime:
        return DurableRuntime(
            backend=self.storage, harnesses=[Harness(self.definition, "1", adapter)], poll_interval=0.02
        )

    def effects(self, kind: str) -> int:
        return self.ledger.count(kind)


def test_a_ledger_in_a_file_is_shared(tmp_path: Path) -> None:
    one, two = Ledger(tmp_path / "ledger"), Ledger(tmp_path / "ledger")
    one.write("tool a")
    two.write("model b")

    assert one.lines == two.lines == ["tool a", "model b"]
    assert one.count("tool") == 1
