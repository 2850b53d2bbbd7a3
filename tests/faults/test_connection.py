"""The connection to PostgreSQL is cut at the n-th statement: before the server has it, or when it has done it.

The same story as in `test_store_calls`, on real time and through a real proxy; all connections of the host are counted
together, its heartbeat's too. What is asked of it is the same.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import Retry
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from tests.faults.story import Account, Client, judge, runtime_of
from tests.servers.proxy import Chosen, Message, Proxy
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")

ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
SAMPLE = 4
LIKELY = 200
"""An ordinary telling has more statements than this."""
STATEMENTS_MAX = 5000
"""More, and the story does not end."""
SECONDS = 600.0


def statement_number(number: int) -> Chosen:
    """The n-th message that executes a statement, over all connections."""
    passed = 0

    def chosen(message: Message) -> bool:
        nonlocal passed
        passed += message.statement != ""
        return message.statement != "" and passed == number

    return chosen


async def told(server: PostgresServer, place: Path, how: str, nth: int) -> tuple[bool, list[str]]:
    """Whether the n-th statement was there to be cut, and what does not hold after all."""
    account = Account()
    schema = schema_of(place)
    await PostgresRecordStore.initialize_schema(server.dsn(), schema=schema)
    async with Proxy(server.port) as proxy:
        cut = getattr(proxy, how)(statement_number(nth))
        try:
            store = await PostgresRecordStore.open(server.dsn(port=proxy.port), schema=schema)
        except Retry:
            store = await PostgresRecordStore.open(server.dsn(port=proxy.port), schema=schema)
        backend = TransactionalSessionBackend(store, wakeups=LocalWakeups())
        try:
            runtime = runtime_of(account, backend, SYSTEM, poll_interval=0.05)
            client = Client(account, runtime, backend, SYSTEM, look_seconds=0.05)
            async with asyncio.timeout(SECONDS), runtime:
                await client.tell()
        finally:
            await store.close()
    direct = await PostgresRecordStore.open(server.dsn(), schema=schema)
    try:
        wrong = await judge(account, TransactionalSessionBackend(direct))
    finally:
        await direct.close()
    if client.reconciled:
        wrong.append(f"{client.reconciled} outcomes were not known, and no host was lost")
    return cut.is_set(), wrong


@pytest.mark.spec("BE-29")
@pytest.mark.matrix
@pytest.mark.timeout(0 if ALL else 900)
@pytest.mark.parametrize("how", ["lose_request", "lose_answer"])
async def test_the_connection_may_end_at_any_statement(postgres: PostgresServer, how: str, tmp_path: Path) -> None:
    chosen = (
        range(1, STATEMENTS_MAX) if ALL else sorted(random.Random(f"{SEED} {how}").sample(range(1, LIKELY), SAMPLE))
    )
    broken: dict[int, list[str]] = {}
    cuts = 0
    for nth in chosen:
        cut, wrong = await told(postgres, tmp_path / str(nth), how, nth)
        cuts += cut
        if wrong:
            broken[nth] = wrong
        if not cut and ALL:
            break
    assert not broken, f"{how} of statement n: {broken}"
    assert cuts >= SAMPLE // 2
