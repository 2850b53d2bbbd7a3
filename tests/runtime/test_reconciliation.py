"""A call whose outcome nobody knows stays so, whatever is asked for, until an operator says what was verified."""

from __future__ import annotations

from typing import Any

import pytest

from agentscope_durable.contracts.commands import ReconcileTool
from agentscope_durable.contracts.errors import Forbidden, InvalidRequest, Retry, Unconfirmed
from agentscope_durable.contracts.status import ExecutionState, TurnStatus, WaitKind
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.executor import Succeeded
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, final, local
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, kill, turn_is

LEASE_MS = 30_000
SCRIPT = [local("pay", gate="paying"), final("{results}")]


async def unknown(hosts: Hosts, clock: ManualClock, ledger: EffectLedger) -> tuple[DurableRuntime, DurableTurn, str]:
    """A payment was started, and its host died of it: a host that lives, the Turn, and the call."""
    gates = Gates()
    first = await hosts.open(ScriptedHarness(SCRIPT, ledger=ledger, gates=gates), lease=LEASE_MS / 1000)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("paying")
    kill(first)
    clock.advance(LEASE_MS + 1)
    second = await hosts.open(ScriptedHarness(SCRIPT, ledger=ledger, gates=Gates()), lease=LEASE_MS / 1000)
    turn = second.get_session(KEY).get_turn(turn.turn_id)
    await turn_is(turn, TurnStatus.WAITING, where=waits_for_evidence)
    (call,) = await turn.list_tools()
    return second, turn, call.call_id


def waits_for_evidence(view: Any) -> bool:
    return [one.kind for one in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]


async def state(turn: DurableTurn) -> ExecutionState:
    (call,) = await turn.list_tools()
    return call.state


@pytest.mark.spec("UN-07", "UN-09")
async def test_neither_a_repeat_nor_a_cancel_nor_bad_evidence_says_what_happened(
    hosts: Hosts, clock: ManualClock
) -> None:
    ledger = EffectLedger()
    runtime, turn, call_id = await unknown(hosts, clock, ledger)
    operations = HostOperations(hosts.backend)

    # The same task again, from the client that lost its answer.
    again = await runtime.get_session(KEY).submit("r1", "go")
    assert again.turn_id == turn.turn_id
    # Evidence that is none.
    with pytest.raises(InvalidRequest):
        await operations.reconcile_tool(turn, call_id, request_id="e0", result=Succeeded(value="ok"), evidence_ref="")
    # A cancel: the wish is noted, and what was started may still happen.
    await turn.cancel("c1")
    view = await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.cancel_requested)
    assert waits_for_evidence(view)
    # Another host looks at it as well.
    third = await hosts.open(ScriptedHarness(SCRIPT, ledger=ledger, gates=Gates()), lease=LEASE_MS / 1000)
    for host in (runtime, third):
        await host._scheduler._scan()
    assert await state(turn) is ExecutionState.UNKNOWN
    assert not (await turn.status()).status.terminal
    assert ledger.count("tool") == 1, "nobody has paid again"

    await operations.reconcile_tool(
        turn, call_id, request_id="e1", result=Succeeded(value="paid, says the bank"), evidence_ref="statement 7"
    )
    await turn_is(turn, TurnStatus.CANCELLED)
    assert await state(turn) is ExecutionState.COMPLETED
    assert ledger.count("tool") == 1


@pytest.mark.spec("UN-08")
async def test_whoever_is_no_operator_settles_nothing(hosts: Hosts, clock: ManualClock) -> None:
    _, turn, call_id = await unknown(hosts, clock, EffectLedger())
    content = await hosts.backend.put_body(KEY, b'{"value":"paid"}')
    command = ReconcileTool(
        session=KEY,
        thread_id=turn.thread_key.thread_id,
        turn_id=turn.turn_id,
        call_id=call_id,
        request_id="e1",
        state=ExecutionState.COMPLETED,
        result=content,
        digest="d",
        evidence_ref="I say so",
    )
    before = await all_events(turn)
    # What an application, a remote client or a Run sends comes without the operator's word.
    with pytest.raises(Forbidden):
        await hosts.backend.execute(command)
    assert await state(turn) is ExecutionState.UNKNOWN
    assert await all_events(turn) == before
    assert not [name for name in dir(turn) if "reconcile" in name], "no handle has a word for it"


@pytest.mark.spec("UN-04", "UN-01")
@pytest.mark.parametrize("fault", ["nothing is written", "the answer is lost"])
async def test_the_receipt_the_outcome_and_its_event_are_there_together_or_not_at_all(
    hosts: Hosts, clock: ManualClock, fault: str
) -> None:
    runtime, turn, call_id = await unknown(hosts, clock, EffectLedger())
    # Nobody goes on with it meanwhile.
    await runtime.close()
    turn = (await hosts.open()).get_session(KEY).get_turn(turn.turn_id)
    backend: Any = hosts.backend
    faulty = FaultyRecordStore(backend.records)
    backend._records = faulty
    operations = HostOperations(backend)

    async def reconcile() -> Any:
        return await operations.reconcile_tool(
            turn, call_id, request_id="e1", result=Succeeded(value="paid"), evidence_ref="statement 7"
        )

    async def told() -> list[Any]:
        return [event for event in await all_events(turn) if event.type == "tool.completed"]

    lost = fault == "the answer is lost"
    (faulty.lose_answer if lost else faulty.fail)()
    with pytest.raises((Retry, Unconfirmed)):
        await reconcile()
    faulty.heal()
    events = await all_events(turn)
    assert await state(turn) is (ExecutionState.COMPLETED if lost else ExecutionState.UNKNOWN)
    assert len(await told()) == lost

    receipt = await reconcile()
    assert await state(turn) is ExecutionState.COMPLETED
    after = await all_events(turn)
    assert len(after) == len(events) if lost else len(after) > len(events)
    assert len(await told()) == 1
    assert await reconcile() == receipt, "the first receipt, found by the request"
    assert await all_events(turn) == after
    third = await hosts.open(ScriptedHarness(SCRIPT, gates=Gates()), lease=LEASE_MS / 1000)
    assert str(await third.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) == "paid"
