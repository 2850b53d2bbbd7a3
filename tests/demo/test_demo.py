"""The demonstration is a test: what it shows must hold, for the story, for random kills, and for a real endpoint."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import DurableRuntime, LocalBackend
from agentscope_durable.testing.openai_server import OpenAIServer
from agentscope_durable.testing.scripted_model import MODEL_REQUEST

pytest.importorskip("agentscope")
pytest.importorskip("rich")

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
SEEDS = 20
SHARES = 4
ENDPOINT = ("DURABLE_MODEL_BASE_URL", "DURABLE_MODEL_API_KEY", "DURABLE_MODEL")


async def demo(folder: Path, *options: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one call."""
    kept = {name: value for name, value in os.environ.items() if name not in ENDPOINT}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(DEMO / "run.py"),
        "--directory",
        str(folder),
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**kept, "COLUMNS": "250", **environment},
    )
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


def row(output: str, promise: str) -> str:
    return next(line for line in output.splitlines() if promise in line)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demonstration's own modules, by name."""
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module
    for name in ("incident", "proof", "crew"):
        sys.modules.pop(name, None)


async def test_the_story_ends_with_a_proof_that_holds_and_can_be_told_again(tmp_path: Path, modules: Any) -> None:
    folder = tmp_path / "demo"
    for _ in range(2):
        code, output, errors = await demo(folder)
        assert (code, errors) == (0, ""), output + errors
        assert "BROKEN" not in output
        assert "2 with SIGKILL: in the middle of the model's answer; between a tool's result" in output
        assert "1 LOST  2 SUSPENDED  3 LOST" in row(output, "Its Runs")
        assert "5 reached the model; on record: 4 COMPLETED, 1 LOST" in row(output, "Model requests")
        assert "1 effect in the ledger, 1 call" in row(output, "Tool collect_trace")
        assert "1 effect in the ledger, 1 call" in row(output, "Tool roll_back")
        assert "The database was not touched, as asked." in row(output, "The answer")
        assert "words withdrawn" in output

    # The proof looks: an effect that nobody asked for breaks it.
    incident, proof = modules("incident"), modules("proof")
    ledger = incident.ledger_in(folder)
    ledger.append(incident.EFFECT, tool="roll_back", deploy="4182")
    async with LocalBackend.open(folder / "store") as backend, DurableRuntime(backend=backend) as runtime:
        session = runtime.get_session(incident.KEY)
        (view,) = await session.list_turns()
        found = await proof.prove(
            backend, session, session.get_turn(view.turn_id), ledger, kills=["one", "two"], scripted=True
        )
    assert [broken.partition(":")[0] for broken in found.broken] == ["Tool roll_back"]


@pytest.mark.case("C12")
@pytest.mark.parametrize("share", range(SHARES))
async def test_kills_at_any_failpoint_leave_the_proof_as_it_is(tmp_path: Path, share: int) -> None:
    runs = SEEDS // SHARES
    first = 1 + share * runs
    code, output, errors = await demo(
        tmp_path / "demo", "--kills", "random", "--seed", str(first), "--runs", str(runs), "--quiet"
    )
    assert (code, errors) == (0, ""), output + errors
    assert output.count("Proof:") == runs
    assert "with SIGKILL" in output


async def test_a_real_endpoint_is_used_when_the_environment_names_one(tmp_path: Path, modules: Any) -> None:
    incident = modules("incident")
    async with OpenAIServer(incident.script, ledger=tmp_path / "provider") as server:
        code, output, errors = await demo(
            tmp_path / "demo",
            DURABLE_MODEL_BASE_URL=server.base_url,
            DURABLE_MODEL_API_KEY="none",
            DURABLE_MODEL="gpt-of-this-machine",
        )
    assert (code, errors) == (0, ""), output + errors
    assert {request["model"] for request in server.requests} == {"gpt-of-this-machine"}
    made = incident.EffectLedger(tmp_path / "provider").count(MODEL_REQUEST)
    assert f"{made} reached the model" in row(output, "Model requests")
    assert "with SIGKILL" in output


async def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    code, _, errors = await demo(tmp_path)
    assert code == 1
    assert "not empty" in errors
    assert (tmp_path / "thesis.txt").read_text() == "ten years of work"
