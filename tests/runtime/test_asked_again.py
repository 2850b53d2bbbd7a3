"""A host says how often it sent something again that the store had not answered: its log is not the only place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import Unavailable
from agentscope_durable.contracts.questions import GetSession
from agentscope_durable.testing.scripted_harness import final
from tests.runtime.conftest import KEY, Hosts, until

LEASE = 0.9
"""Seconds: the figure is published with the renewals, every third of them."""


@pytest.mark.case("C15")
async def test_what_a_host_sent_again_is_counted_and_everybody_can_read_it(
    hosts: Hosts, backend: TransactionalSessionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Any = await hosts.open([final("done")], start=False, lease=LEASE)
    session = await host.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")

    async def everybody_reads(figure: int) -> None:
        async def so() -> bool:
            return [one.asked_again for one in (await turn.explain()).hosts] == [figure]

        await until(so)

    monkeypatch.setattr(backend.records, "transact", Away(backend.records.transact, 3))
    await host.start()
    assert str(await turn.wait(90)) == "done"
    await everybody_reads(3)

    question = GetSession(session=KEY)
    monkeypatch.setattr(backend, "query", Away(backend.query, 2, lambda asked: asked is question))
    assert (await host._host.query(question)).session == KEY
    await everybody_reads(5)


class Away:
    """What is asked of the store while it is away so often."""

    def __init__(self, asks: Callable[..., Any], times: int, which: Callable[[Any], bool] = lambda _: True) -> None:
        self._asks, self._left, self._which = asks, times, which

    async def __call__(self, *asked: Any, **options: Any) -> Any:
        if self._left and self._which(asked[0]):
            self._left -= 1
            raise Unavailable("the store is away")
        return await self._asks(*asked, **options)
