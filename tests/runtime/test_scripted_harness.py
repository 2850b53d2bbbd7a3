"""The scripted harness keeps the promises of its socket, so a test that uses it tests something."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.journal import CheckpointRow, Field
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.harness_adapter import HarnessAdapterContract
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import PROGRAM, ScriptedHarness, final, local, owner_of, say, think


class TestScriptedHarness(HarnessAdapterContract):
    @pytest.fixture
    async def backend(self) -> AsyncGenerator[TransactionalSessionBackend]:
        self.ledger = EffectLedger()
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

    def owner_in(self, rows: Sequence[CheckpointRow]) -> str:
        [program] = [row.json for row in rows if isinstance(row, Field) and row.name == PROGRAM]
        return msgspec.json.decode(program)["owner"]

    def owner_named(self, thread: ThreadKey) -> str:
        return owner_of(thread)


def test_a_ledger_in_a_file_is_shared(tmp_path: Path) -> None:
    one, two = EffectLedger(tmp_path / "ledger"), EffectLedger(tmp_path / "ledger")
    one.append("tool", call="a")
    two.append("model")

    assert one.lines() == two.lines()
    assert [line["name"] for line in one.lines()] == ["tool", "model"]
    assert (one.count("tool"), one.count("tool", call="a"), one.count("tool", call="b")) == (1, 1, 0)
