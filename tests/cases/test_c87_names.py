"""C87: ids that mean something to a disk, a URL or a case-insensitive table."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import MemoryBackend
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.every_store import on_every_store, shelf
from tests.runtime.conftest import refused

E_ACUTE = "é"
ACCEPTED = [
    "a/b",
    "..",
    ".",
    "../../etc/passwd",
    "%2F",
    "%",
    " ",
    "a b",
    "?",
    "#",
    "\N{PILE OF POO}",
    unicodedata.normalize("NFC", E_ACUTE),
    unicodedata.normalize("NFD", E_ACUTE),
    "CON",
    "con",
    "nul.txt",
    "trailing.",
    "trailing ",
    "Upper",
    "upper",
    "it's",
    '"quoted"',
    "a\\b",
    "x" * 256,
    "\N{ARABIC LETTER ALEF}",
    "a/",
    "a",
]
REFUSED = ["", "x" * 257, "nul\x00", "line\nbreak", "\x1f", "\x7f", "\ud800", 5, None, b"bytes"]
LARGE = "large " * 20_000
"""More than stays in the records: the id names a folder, or an object's key."""


@pytest.mark.case("C87")
@on_every_store
async def test_every_accepted_id_works_everywhere_and_twins_stay_two(backend: str, tmp_path: Path) -> None:
    async with shelf(backend, tmp_path) as place:
        await _use_every_name(await place.backend())
    outside = [path for path in tmp_path.parent.rglob("*") if "passwd" in path.name]
    assert outside == []


async def _use_every_name(store: Any) -> None:
    harness = ScriptedHarness([final("{context}")])
    runtime = DurableRuntime(backend=store, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05)
    async with runtime:
        await runtime.start()
        turns = []
        for name in ACCEPTED:
            session = await runtime.create_session(SessionKey(name, name), "agent")
            thread = await session.create_thread(name, "agent")
            turns.append((name, thread, await thread.submit(name, f"{name} {LARGE}")))
        for name, thread, turn in turns:
            assert str(await turn.wait(90)) == f"{name} {LARGE}"
            assert [message.text for message in await thread.history()] == [f"{name} {LARGE}"] * 2
            assert (await thread.submit(name, f"{name} {LARGE}")).turn_id == turn.turn_id
            assert [one.session.session_id for one in await runtime.list_sessions(name)] == [name]
        assert len({turn.turn_id for _, _, turn in turns}) == len(ACCEPTED)


@pytest.mark.case("C87")
@pytest.mark.parametrize("name", REFUSED, ids=lambda name: repr(name)[:12])
async def test_any_other_is_refused_at_admission_with_its_place(name: Any) -> None:
    backend = MemoryBackend()
    runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness([final()]))])
    async with runtime:
        good = await runtime.create_session(SessionKey("app", "c1"), "agent")
        for what, attempt in (
            ("namespace", lambda: runtime.create_session(SessionKey(name, "c"), "agent")),
            ("session_id", lambda: runtime.create_session(SessionKey("app", name), "agent")),
            ("thread_id", lambda: good.create_thread(name, "agent")),
            ("request_id", lambda: good.submit(name, "go")),
        ):
            error = await refused(attempt(), InvalidRequest)
            assert what in str(error)
        assert len(await good.list_threads()) == 1
        assert len(await good.list_turns()) == 0
        assert len(await runtime.list_sessions("app")) == 1
