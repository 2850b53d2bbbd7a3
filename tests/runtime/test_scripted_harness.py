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
from agentscope_durable.spi.harness import HarnessAdapter, JournalRow
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.harness_adapter import HarnessAdapterContract
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import PROGRAM, ScriptedHarness, final, local, owner_of, say, think
from agentscope_durable.testing.scripted_harness._state import State


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


def test_what_a_refused_commit_would_have_stored_is_in_the_next_one() -> None:
    """The first request of a Turn is refused because an input of it was withdrawn; nothing of that commit is stored."""
    state = State()
    state.say("user", "the task")
    mark = state.mark()
    state.say("user", "withdrawn meanwhile")
    state.batch(0)

    state.back_to(mark)
    state.say("assistant", "done")

    stored = State.fold([JournalRow(at=1, journal=state.batch(0).encode())])
    assert [message.text for message in stored.messages] == ["the task", "done"]
