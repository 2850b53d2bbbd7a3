"""A commit that fails at any of its writes leaves nothing: neither the state nor the event that reports it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.commands import (
    Cancel,
    Claim,
    Claimed,
    ClaimExecution,
    CommitStep,
    CreateSession,
    RecordOutcome,
    RunEnd,
    RunEndKind,
    SettleTurn,
    ToolCommit,
)
from agentscope_durable.contracts.errors import DurableError, InvalidRequest
from agentscope_durable.contracts.journal import JournalBatch, JournalEntry
from agentscope_durable.contracts.questions import GetTurn, ListEvents, ListTools, LoadThread
from agentscope_durable.contracts.status import Audience, ExecutionKind, ExecutionState, TurnStatus
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.session_backend import BINDING, SESSION, submission

TABLES = ("log", "head", "rec", "ready")


@pytest.fixture
async def place(tmp_path: Path) -> Path:
    return tmp_path / "durable.db"


@pytest.fixture
async def backend(place: Path) -> AsyncGenerator[TransactionalSessionBackend]:
    store = await SqliteRecordStore.open(place, synchronous="NORMAL")
    made = TransactionalSessionBackend(store, owns_store=True)
    await made.execute(CreateSession(session=SESSION, binding=BINDING))
    yield made
    await made.close()


def break_writes(place: Path, table: str) -> None:
    """From now on every row written to `table` fails."""
    connection = apsw.Connection(str(place))
    for event in ("insert", "update"):
        connection.execute(
            f"create trigger broken_{event} before {event} on {table} begin select raise(abort, 'broken'); end"
        )
    connection.close()


def mend_writes(place: Path) -> None:
    connection = apsw.Connection(str(place))
    connection.execute("drop trigger broken_insert; drop trigger broken_update")
    connection.close()


async def everything(backend: TransactionalSessionBackend, claimed: Claimed) -> Any:
    events = await backend.query(ListEvents(session=SESSION, limit=1000))
    turn = await backend.query(GetTurn(session=SESSION, thread_id="main", turn_id=claimed.turn_id))
    rows = await backend.query(
        LoadThread(session=SESSION, thread_id="main", first=1, last=1000), audience=Audience.HOST
    )
    return msgspec.json.encode((events, msgspec.structs.replace(turn, lease=None), rows))


async def claim(backend: TransactionalSessionBackend) -> Claimed:
    await backend.execute(submission("r1"))
    return await backend.execute(
        Claim(session=SESSION, thread_id="main", owner="host", served=(BINDING.ready_class,)),
        audience=Audience.HOST,
    )


def step(claimed: Claimed, position: int, **fields: Any) -> CommitStep:
    return CommitStep(
        session=SESSION,
        thread_id="main",
        turn_id=claimed.turn_id,
        run_id=claimed.run_id,
        fence=claimed.fence,
        expected_position=position,
        **fields,
    )


def checkpoint(position: int) -> bytes:
    entry = JournalEntry(type="tool/intent", payload=msgspec.Raw(b"{}"))
    return JournalBatch(expected_head=position, entries=(entry,), base=True).encode()


def intent(claimed: Claimed) -> CommitStep:
    """A native checkpoint and the intent of an external call: log, head, record and ready row in one commit."""
    tool = ToolCommit(
        call_id="c1",
        state=ExecutionState.INTENT,
        name="deploy",
        kind=ExecutionKind.EXTERNAL,
        route="hands",
        arguments=body_of({"to": "production"}),
    )
    return step(
        claimed, claimed.position, journal=checkpoint(claimed.position), checkpoint=True, base=True, tools=(tool,)
    )


@pytest.mark.spec("BE-08", "BE-17", "EV-07")
@pytest.mark.parametrize("table", TABLES)
async def test_checkpoint_and_intent_are_stored_together_or_not_at_all(
    backend: TransactionalSessionBackend, place: Path, table: str
) -> None:
    claimed = await claim(backend)
    before = await everything(backend, claimed)

    break_writes(place, table)
    with pytest.raises((DurableError, apsw.Error)):
        await backend.execute(intent(claimed), audience=Audience.HOST)

    assert await everything(backend, claimed) == before
    mend_writes(place)
    receipt = await backend.execute(intent(claimed), audience=Audience.HOST)
    assert receipt.position == claimed.position + 1


@pytest.mark.spec("BE-08", "EV-07")
@pytest.mark.parametrize("table", TABLES)
async def test_a_result_and_the_waking_of_its_turn_are_stored_together_or_not_at_all(
    backend: TransactionalSessionBackend, place: Path, table: str
) -> None:
    claimed = await claim(backend)
    receipt = await backend.execute(intent(claimed), audience=Audience.HOST)
    await backend.execute(
        step(claimed, receipt.position, end=RunEnd(kind=RunEndKind.SUSPENDED)), audience=Audience.HOST
    )
    grant = await backend.execute(
        ClaimExecution(session=SESSION, thread_id="main", turn_id=claimed.turn_id, call_id="c1", owner="host"),
        audience=Audience.HOST,
    )
    outcome = RecordOutcome(
        session=SESSION,
        thread_id="main",
        turn_id=claimed.turn_id,
        call_id="c1",
        execution_id=grant.execution_id,
        state=ExecutionState.COMPLETED,
        result=body_of({"state": "success"}),
    )
    before = await everything(backend, claimed)

    break_writes(place, table)
    with pytest.raises((DurableError, apsw.Error)):
        await backend.execute(outcome, audience=Audience.HOST)

    assert await everything(backend, claimed) == before
    mend_writes(place)
    assert (await backend.execute(outcome, audience=Audience.HOST)).settled


@pytest.mark.spec("SE-04", "BE-17", "EV-07")
@pytest.mark.parametrize("table", TABLES)
async def test_cleaned_state_applied_results_and_the_end_of_a_turn_are_stored_together_or_not_at_all(
    backend: TransactionalSessionBackend, place: Path, table: str
) -> None:
    claimed = await claim(backend)
    receipt = await backend.execute(intent(claimed), audience=Audience.HOST)
    # The result of a call is there and not applied when the cancelled Turn is settled, and another Turn stands behind.
    await backend.execute(submission("r2"))
    await backend.execute(Cancel(session=SESSION, thread_id="main", turn_id=claimed.turn_id, request_id="c1"))
    receipt = await backend.execute(
        step(claimed, receipt.position, end=RunEnd(kind=RunEndKind.CANCELLED)), audience=Audience.HOST
    )
    settle = SettleTurn(
        session=SESSION,
        thread_id="main",
        turn_id=claimed.turn_id,
        run_id="",
        fence=claimed.fence,
        expected_position=receipt.position,
        journal=checkpoint(receipt.position),
        checkpoint=True,
        base=True,
        applied=("c1",),
    )
    before = await everything(backend, claimed)

    break_writes(place, table)
    with pytest.raises((DurableError, apsw.Error)):
        await backend.execute(settle, audience=Audience.HOST)

    assert await everything(backend, claimed) == before
    mend_writes(place)
    await backend.execute(settle, audience=Audience.HOST)
    turn = await backend.query(GetTurn(session=SESSION, thread_id="main", turn_id=claimed.turn_id))
    assert turn.status is TurnStatus.CANCELLED
    [call] = await backend.query(ListTools(session=SESSION, thread_id="main", turn_id=claimed.turn_id))
    assert (call.applied_at, call.applied_at_ms is not None) == (None, True)


@pytest.mark.spec("BE-22")
async def test_a_committed_checkpoint_is_not_discarded_by_an_empty_one(backend: TransactionalSessionBackend) -> None:
    claimed = await claim(backend)
    receipt = await backend.execute(intent(claimed), audience=Audience.HOST)
    before = await everything(backend, claimed)

    with pytest.raises(InvalidRequest, match="checkpoint"):
        await backend.execute(step(claimed, receipt.position, checkpoint=True), audience=Audience.HOST)
    assert await everything(backend, claimed) == before

    # A commit that carries no native state keeps the former checkpoint for the next owner.
    await backend.execute(step(claimed, receipt.position), audience=Audience.HOST)
    again = await backend.execute(
        Claim(session=SESSION, thread_id="main", owner="other", served=(BINDING.ready_class,), dead=("host",)),
        audience=Audience.HOST,
    )
    assert (again.base_at, again.checkpoint_at) == (receipt.position, receipt.position)
