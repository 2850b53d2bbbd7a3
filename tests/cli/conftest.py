"""What the stories of the command share: a store, hosts over it, and a person who types."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.cli import main
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.handles import DurableSession, DurableTurn
from agentscope_durable.runtime.runtime import DurableRuntime
from tests.runtime.conftest import Hosts

ROOT = Path(__file__).resolve().parents[2]
KEY = SessionKey("app", "c1")
SESSION = "app/c1"


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        [line] = self.out.splitlines()
        return json.loads(line)

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


Durable = Callable[..., Done]


@pytest.fixture
def durable(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Durable]:
    """Types a command, in this process. What it prints is no terminal's."""
    monkeypatch.setenv("DURABLE_STORE", str(tmp_path))

    def type_in(*arguments: str, stdin: bytes = b"", code: int | None = 0) -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        done = Done(main(arguments), *capsys.readouterr())
        assert code is None or done.code == code, done
        return done

    yield type_in


@pytest.fixture
async def typed(durable: Durable) -> Callable[..., Any]:
    """The same from within an event loop, as another process would."""

    async def type_in(*arguments: str, **options: Any) -> Done:
        return await asyncio.to_thread(durable, *arguments, **options)

    return type_in


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncGenerator[LocalBackend]:
    async with LocalBackend.open(tmp_path, synchronous="NORMAL") as backend:
        yield backend


@pytest.fixture
async def hosts(backend: LocalBackend) -> AsyncGenerator[Hosts]:
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as stack:
        yield Hosts(backend, stack)


async def begun(hosts: Hosts, script: Any, text: str = "go", **options: Any) -> tuple[DurableRuntime, DurableTurn]:
    """A host with one Turn of this script."""
    runtime = await hosts.open(script, **options)
    session: DurableSession = await runtime.create_session(KEY, "agent")
    return runtime, await session.submit("r1", text)


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs the command as it is installed."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **more}
