"""The contract of a `SessionBackend`: every promise of the port, as tests.

A provider's whole test file is a subclass::

    class TestMyBackend(SessionBackendContract):
        async def open(self, place: Path) -> SessionBackend:
            return TransactionalSessionBackend(await MyRecordStore.open(place / "store"))

The tests are coroutines: run them with pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES, body_of
from agentscope_durable.contracts.commands import (
    AddInput,
    Claim,
    Claimed,
    ClaimPurpose,
    CommitStep,
    CreateSession,
    MessageOut,
    RunEnd,
    RunEndKind,
    StepReceipt,
    SubmitTurn,
    TurnAdmitted,
)
from agentscope_durable.contracts.errors import DurableError, Fenced, Forbidden, NotFound, RequestConflict
from agentscope_durable.contracts.events import EventPage
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, SessionKey
from agentscope_durable.contracts.questions import GetSession, GetTurn, ListEvents, ListTurns, Watermarks
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import Audience, TurnStatus
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.testing._statements import states

SESSION = SessionKey("contract", "session")
BINDING = Binding("agent", "v1", "state-v1")
LEASE_MS = 60_000


def submission(request_id: str, text: str = "hello", session: SessionKey = SESSION) -> SubmitTurn:
    return SubmitTurn(
        session=session,
        thread_id=MAIN_THREAD_ID,
        request_id=request_id,
        content=body_of([{"type": "text", "text": text}]),
        digest=text,
    )


class SessionBackendContract:
    """Subclass and implement `open`."""

    async def open(self, place: Path) -> SessionBackend:
        raise NotImplementedError

    @pytest.fixture
    async def door(self, tmp_path: Path) -> AsyncGenerator[SessionBackend]:
        """The backend under test, with one Session."""
        backend = await self.open(tmp_path)
        await backend.execute(CreateSession(session=SESSION, binding=BINDING))
        yield backend
        await backend.close()

    # ---- helpers ----

    async def events(self, backend: SessionBackend) -> list[tuple[int, str]]:
        page: EventPage = await backend.query(ListEvents(session=SESSION, limit=1000))
        return [(event.sequence, event.type) for event in page.events]

    async def claim(self, backend: SessionBackend, owner: str, **fields: Any) -> Claimed:
        return await backend.execute(
            Claim(session=SESSION, thread_id=MAIN_THREAD_ID, owner=owner, served=(BINDING.ready_class,), **fields),
            audience=Audience.HOST,
        )

    def step(self, claimed: Claimed, **fields: Any) -> CommitStep:
        return CommitStep(
            session=SESSION,
            thread_id=MAIN_THREAD_ID,
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            expected_position=claimed.position,
            **fields,
        )

    # ---- atomic ----

    @states("BE-01", "EV-07", "AD-12")
    async def test_atomic_a_command_changes_everything_it_says(self, door: SessionBackend) -> None:
        before = await self.events(door)
        admitted: TurnAdmitted = await door.execute(submission("r1"))

        turns = await door.query(ListTurns(session=SESSION, thread_id=MAIN_THREAD_ID))
        assert [turn.turn_id for turn in turns.items] == [admitted.turn_id]
        assert [kind for _, kind in (await self.events(door))[len(before) :]] == ["message.completed", "turn.status"]

    @states("BE-01", "EV-07")
    async def test_atomic_a_refused_command_changes_nothing(self, door: SessionBackend) -> None:
        await door.execute(submission("r1"))
        before = await self.events(door)

        with pytest.raises(RequestConflict):
            await door.execute(submission("r1", "something else"))
        with pytest.raises(NotFound):
            await door.execute(submission("r2", session=SessionKey("contract", "absent")))

        assert await self.events(door) == before

    # ---- once ----

    @states("AD-02", "AD-09", "BE-29")
    async def test_once_a_request_admitted_many_times_at_once_is_one_request(self, door: SessionBackend) -> None:
        receipts = await asyncio.gather(*(door.execute(submission("r1")) for _ in range(20)))

        assert len({receipt.turn_id for receipt in receipts}) == 1
        turns = await door.query(ListTurns(session=SESSION, thread_id=MAIN_THREAD_ID))
        assert len(turns.items) == 1

    @states("AD-04")
    async def test_once_an_id_used_for_one_operation_is_refused_for_another(self, door: SessionBackend) -> None:
        admitted: TurnAdmitted = await door.execute(submission("r1"))
        steer = AddInput(
            session=SESSION,
            thread_id=MAIN_THREAD_ID,
            request_id="r1",
            turn_id=admitted.turn_id,
            kind="steer",
            content=body_of([{"type": "text", "text": "hello"}]),
            digest="hello",
        )

        with pytest.raises(RequestConflict) as refused:
            await door.execute(steer)

        assert refused.value.field == "operation"

    # ---- fenced ----

    @states("RC-02")
    async def test_fenced_a_former_owner_commits_nothing(self, door: SessionBackend) -> None:
        await door.execute(submission("r1"))
        first = await self.claim(door, "host-a")
        second = await self.claim(door, "host-b", dead=("host-a",))
        before = await self.events(door)

        with pytest.raises(Fenced):
            await door.execute(
                self.step(first, messages=(MessageOut(message_id="m", content=body_of([])),)),
                audience=Audience.HOST,
            )

        assert second.fence > first.fence
        assert second.lost_run == first.run_id
        assert await self.events(door) == before

    @states("BE-23", "Q-09")
    async def test_fenced_a_living_owner_keeps_its_thread(self, door: SessionBackend) -> None:
        heart = door.heartbeat("host-a", LEASE_MS, msgspec.json.encode(HostNotice()))
        await SYSTEM.call_in_thread(heart.start)
        await door.execute(submission("r1"))
        first = await self.claim(door, "host-a")

        other = await self.claim(door, "host-b")
        receipt: StepReceipt = await door.execute(
            self.step(first, end=RunEnd(kind=RunEndKind.COMPLETED)), audience=Audience.HOST
        )
        await heart.stop()

        assert other.purpose is ClaimPurpose.NOTHING
        assert receipt.ended

    # ---- audience ----

    async def test_a_host_command_is_refused_to_the_public(self, door: SessionBackend) -> None:
        await door.execute(submission("r1"))
        claim = Claim(session=SESSION, thread_id=MAIN_THREAD_ID, owner="intruder", served=(BINDING.ready_class,))

        with pytest.raises(Forbidden):
            await door.execute(claim)

    # ---- hinted ----

    @states("BE-03", "BE-12")
    async def test_hinted_a_listener_hears_of_a_commit_or_finds_it_by_asking(self, door: SessionBackend) -> None:
        admitted: TurnAdmitted = await door.execute(submission("r1"))

        turn = await door.query(GetTurn(session=SESSION, thread_id=MAIN_THREAD_ID, turn_id=admitted.turn_id))

        assert turn.status is TurnStatus.QUEUED

    async def test_hinted_who_watches_sees_which_sessions_moved(self, door: SessionBackend) -> None:
        """By the numbers of their newest events, and by an end of the Turn that is read alone."""
        nobody = SessionKey("contract", "nobody's")
        before = len(await self.events(door))
        assert tuple(await door.query(Watermarks(sessions=(nobody, SESSION)))) == (0, before)
        await door.execute(submission("r1"))
        assert tuple(await door.query(Watermarks(sessions=(nobody, SESSION)))) == (0, before + 2)
        page: EventPage = await door.query(ListEvents(session=SESSION, types=("turn.status",)))
        assert [event.type for event in page.events] == ["turn.status"]
        assert page.cursor == page.high_watermark

    # ---- read-only ----

    @states("RT-21")
    async def test_read_only_asking_changes_nothing(self, door: SessionBackend) -> None:
        await door.execute(submission("r1"))
        before = await self.events(door)

        for _ in range(3):
            await door.query(GetSession(session=SESSION))
            await door.query(ListTurns(session=SESSION, thread_id=MAIN_THREAD_ID))

        assert await self.events(door) == before

    # ---- bodies ----

    @states("OB-04", "OB-08")
    async def test_a_body_of_any_size_comes_back_as_it_was(self, door: SessionBackend) -> None:
        for size in (10, INLINE_MAX_BYTES, INLINE_MAX_BYTES + 1, 1_000_000):
            content = b'"' + b"x" * size + b'"'

            body = await door.put_body(SESSION, content)

            assert await door.open_body(SESSION, body) == content

    async def test_an_error_says_what_to_do(self, door: SessionBackend) -> None:
        with pytest.raises(DurableError) as refused:
            await door.query(GetTurn(session=SESSION, thread_id=MAIN_THREAD_ID, turn_id="absent"))

        assert "absent" in str(refused.value)
        assert type(refused.value).advice
