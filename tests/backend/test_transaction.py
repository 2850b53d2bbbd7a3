"""The transaction: what the backend adds to the rules and to the store below it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentscope_durable.backend.heartbeat import LeaseHeartbeat
from agentscope_durable.backend.queries import ANSWERS
from agentscope_durable.backend.transaction import NoWakeups, TransactionalSessionBackend
from agentscope_durable.contracts import commands
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.contracts.commands import AnyCommand, Command, CommitStep, CreateSession, PutPolicy
from agentscope_durable.contracts.errors import Forbidden, InvalidRequest, NotFound, Unavailable
from agentscope_durable.contracts.journal import JournalBatch, JournalEntry
from agentscope_durable.contracts.questions import GetSession, ListEvents, LoadThread
from agentscope_durable.contracts.status import Audience
from agentscope_durable.domain.rules import RULES
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.record_store import Capabilities
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.session_backend import BINDING, SESSION, SessionBackendContract, submission
from tests.every_store import STORES


class TestOverEveryStore(SessionBackendContract):
    @pytest.fixture(autouse=True, params=STORES)
    def backend(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    async def open(self, place: Path) -> SessionBackend:
        records = await STORES[self.name](place, None)
        return TransactionalSessionBackend(records, MemoryObjectStore(), owns_store=True)


async def memory_backend(**options: Any) -> TransactionalSessionBackend:
    backend = TransactionalSessionBackend(MemoryRecordStore(), MemoryObjectStore(), **options)
    await backend.execute(CreateSession(session=SESSION, binding=BINDING))
    return backend


# ---- the table of rules ----


def test_every_command_has_a_rule_and_every_rule_a_command() -> None:
    concrete = {
        kind
        for _, kind in inspect.getmembers(commands, inspect.isclass)
        if issubclass(kind, Command) and kind.__struct_config__.tag is not None
    }

    assert set(RULES) == concrete


def test_what_the_public_may_send_and_ask_is_this_list_and_no_more() -> None:
    public = {kind.__name__ for kind, rule in RULES.items() if rule.audience is Audience.PUBLIC}
    operators = {kind.__name__ for kind, rule in RULES.items() if rule.audience is Audience.OPERATOR}

    assert public == {
        "CreateSession", "CreateThread", "CloseSession", "CloseThread", "SubmitTurn", "AddInput", "Withdraw",
        "Cancel", "Pause", "Resume", "Respond", "Signal",
    }  # fmt: skip
    assert operators == {
        "ReconcileTool",
        "ReleaseTurn",
        "RepairThread",
        "PutPolicy",
        "PruneEvents",
        "PruneCheckpoints",
        "DropSession",
        "SweepObjects",
        "ForgetObjects",
    }
    questions = {audience: set[str]() for audience in Audience}
    for kind, answer in ANSWERS.items():
        questions[answer.audience].add(kind.__name__)
    assert questions[Audience.HOST] == {
        "LoadThread",
        "LoadCheckpoint",
        "OpenWork",
        "GetWorkspace",
        "GetEntry",
        "ListEntries",
        "GetContent",
        "EntriesAt",
    }
    assert questions[Audience.OPERATOR] == {
        "Examine",
        "FindTurn",
        "GetDropped",
        "ListAllSessions",
        "ListClosed",
        "ListPolicies",
        "ListStalled",
        "MeasureSession",
        "MeasureStore",
    }


@pytest.mark.parametrize("audience", [Audience.PUBLIC, Audience.HOST])
async def test_an_operators_command_is_refused_to_everyone_else(audience: Audience) -> None:
    backend = await memory_backend()

    with pytest.raises(Forbidden):
        await backend.execute(PutPolicy(session=SESSION, key="limit", request_id="p"), audience=audience)


async def test_native_state_is_not_shown_to_the_public() -> None:
    backend = await memory_backend()

    with pytest.raises(Forbidden):
        await backend.query(LoadThread(session=SESSION, thread_id="main", first=1, last=1))


# ---- construction ----


@pytest.mark.spec("BE-05")
def test_a_store_that_does_not_say_what_it_promises_is_refused() -> None:
    class Silent:
        pass

    class Guessing:
        capabilities: Any = None
        persistent: Any = None

    wrong: list[Any] = [Silent(), Guessing()]
    for declared in (True, {"persistent": True, "shared": False}, Capabilities(True, None), Capabilities(1, False)):  # type: ignore[arg-type]
        wrong.append(Guessing())
        wrong[-1].capabilities = declared
    for records in wrong:
        with pytest.raises(InvalidRequest, match="persistence and sharing") as refused:
            TransactionalSessionBackend(records)
        assert refused.value.path == "records"
    for objects in (Silent(), Guessing()):
        with pytest.raises(InvalidRequest, match="persistent") as refused:
            TransactionalSessionBackend(MemoryRecordStore(), objects)  # type: ignore[arg-type]
        assert refused.value.path == "objects"
    with pytest.raises(TypeError):
        Capabilities(persistent=True)  # type: ignore[call-arg]


@pytest.mark.spec("BE-05")
async def test_the_backend_shows_what_its_store_declares() -> None:
    backend = await memory_backend()

    assert (backend.capabilities.persistent, backend.capabilities.shared) == (False, False)


@pytest.mark.spec("LF-04", "LO-07")
async def test_closing_a_backend_leaves_a_borrowed_store_open() -> None:
    records = MemoryRecordStore()
    backend = TransactionalSessionBackend(records)
    await backend.execute(CreateSession(session=SESSION, binding=BINDING))

    await backend.close()

    again = TransactionalSessionBackend(records)
    assert (await again.query(GetSession(session=SESSION))).session == SESSION


# ---- hints ----


class Hints:
    """A transport that remembers, and may fail."""

    def __init__(self, *, fail: bool = False) -> None:
        self.published: list[tuple[str, ...]] = []
        self._fail = fail

    def publish(self, keys: tuple[str, ...]) -> None:
        if self._fail:
            raise OSError("the hint transport is down")
        self.published.append(keys)

    @asynccontextmanager
    async def listen(self, keys: Any = None) -> Any:
        yield iter(())


@pytest.mark.spec("BE-06")
async def test_a_backend_with_another_transport_shares_the_store_and_publishes_there() -> None:
    backend = await memory_backend()
    hints = Hints()

    other = backend.with_wakeups(hints)
    await other.execute(submission("r1"))

    assert len(hints.published) == 1
    assert all(len(key) < 40 for key in hints.published[0])
    assert (await backend.query(ListEvents(session=SESSION))).events[-1].type == "turn.status"


@pytest.mark.spec("BE-12")
async def test_a_hint_that_cannot_be_published_does_not_fail_the_commit() -> None:
    backend = (await memory_backend()).with_wakeups(Hints(fail=True))

    admitted = await backend.execute(submission("r1"))

    assert admitted.turn_id


@pytest.mark.spec("BE-12")
async def test_no_hint_goes_out_for_a_command_that_changed_nothing() -> None:
    backend = await memory_backend()
    hints = Hints()
    watched = backend.with_wakeups(hints)
    await watched.execute(submission("r1"))
    hints.published.clear()

    await watched.execute(submission("r1"))
    with pytest.raises(NotFound):
        await watched.execute(CreateThreadElsewhere)

    assert hints.published == []


CreateThreadElsewhere = commands.CreateThread(
    session=msgspec.structs.replace(SESSION, session_id="absent"), thread_id="t", binding=BINDING
)


@pytest.mark.spec("BE-14")
async def test_what_a_hint_wakes_only_wakes() -> None:
    """Publishing rings bells; no command is carried out and no record read on the way."""
    from agentscope_durable.runtime.hints import LocalWakeups

    transport = LocalWakeups()
    backend = (await memory_backend()).with_wakeups(transport)
    asked: list[str] = []
    execute = backend.execute

    async def counted(command: AnyCommand, **options: Any) -> Any:
        asked.append(type(command).__name__)
        return await execute(command, **options)

    backend.execute = counted  # type: ignore[method-assign]
    async with transport.listen() as rung:
        await backend.execute(submission("r1"))
        heard = await anext(rung)

    assert heard
    assert asked == ["SubmitTurn"]


# ---- large native blocks ----


@pytest.mark.spec("OB-04", "EV-22")
async def test_a_large_native_block_leaves_the_records_and_comes_back_equal() -> None:
    objects = MemoryObjectStore()
    records = MemoryRecordStore()
    backend = TransactionalSessionBackend(records, objects)
    await backend.execute(CreateSession(session=SESSION, binding=BINDING))
    await backend.execute(submission("r1"))
    claimed = await backend.execute(
        commands.Claim(session=SESSION, thread_id="main", owner="h", served=(BINDING.ready_class,)),
        audience=Audience.HOST,
    )
    secret = "s3cret" * 40_000
    batch = JournalBatch(
        expected_head=claimed.position,
        entries=(JournalEntry(type="model/result", payload=msgspec.Raw(msgspec.json.encode({"text": secret}))),),
        base=True,
    ).encode()
    assert len(batch) > INLINE_MAX_BYTES

    receipt = await backend.execute(
        CommitStep(
            session=SESSION,
            thread_id="main",
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            expected_position=claimed.position,
            journal=batch,
            checkpoint=True,
            base=True,
        ),
        audience=Audience.HOST,
    )
    rows = await backend.query(
        LoadThread(session=SESSION, thread_id="main", first=receipt.position, last=receipt.position),
        audience=Audience.HOST,
    )

    assert [row.journal for row in rows] == [batch]
    page = await backend.query(ListEvents(session=SESSION))
    assert "s3cret" not in msgspec.json.encode(page).decode()


async def test_an_object_store_that_fails_leaves_no_reference_to_nothing() -> None:
    class Broken(MemoryObjectStore):
        async def put(self, partition: str, digest: str, content: bytes) -> None:
            raise Unavailable("the object store is down")

    backend = TransactionalSessionBackend(MemoryRecordStore(), Broken())
    await backend.execute(CreateSession(session=SESSION, binding=BINDING))

    with pytest.raises(Unavailable):
        await backend.put_body(SESSION, b'"' + b"x" * 100_000 + b'"')


@pytest.mark.spec("BE-12")
async def test_what_a_transport_or_store_raises_is_logged_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    class Leaky(NoWakeups):
        def publish(self, keys: tuple[str, ...]) -> None:
            raise RuntimeError("the password is s3cret")

    records = FaultyRecordStore(MemoryRecordStore())
    backend = TransactionalSessionBackend(records, wakeups=Leaky())
    with caplog.at_level(logging.DEBUG):
        await backend.execute(CreateSession(session=SESSION, binding=BINDING))
        records.fail("renew", error=lambda: RuntimeError("the password is s3cret"))
        with pytest.raises(RuntimeError):
            backend.heartbeat("host", 1000, b"").start()

    assert "RuntimeError" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.spec("RC-01", "RC-05")
def test_the_lease_of_a_host_whose_event_loop_was_closed_is_not_renewed_any_more() -> None:
    backend = TransactionalSessionBackend(MemoryRecordStore())

    async def start() -> LeaseHeartbeat:
        heartbeat = backend.heartbeat("host", 60, b"")
        heartbeat.start()
        assert isinstance(heartbeat, LeaseHeartbeat)
        return heartbeat

    loop = asyncio.new_event_loop()
    heartbeat = loop.run_until_complete(start())
    assert heartbeat._thread is not None
    heartbeat._thread.join(0.2)
    assert heartbeat._thread.is_alive()
    loop.close()
    heartbeat._thread.join(10)
    assert not heartbeat._thread.is_alive()
