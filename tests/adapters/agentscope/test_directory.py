"""A workspace that was deleted between two Runs is said to be gone, and is not silently there again (RC-22)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.workspace import LocalWorkspace

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.status import RunStatus, TurnStatus, WaitKind
from agentscope_durable.spi.harness import Abandoned
from agentscope_durable.testing.scripted_model import Call
from tests.adapters.agentscope.agents import Agents, tool
from tests.adapters.agentscope.stage import Stage, opened
from tests.adapters.agentscope.test_local_tools import outputs


class Workers(Agents):
    """An agent that writes into its workspace and reads from it. Its factory makes the folder whenever it is called."""

    def __init__(self, folder: Path, *, eager: bool = True) -> None:
        self.folder = folder / "workspace"
        self.eager = eager

        def note(text: str) -> str:
            self.ledger.append("note", text=text)
            (self.folder / "notes").open("a").write(f"{text}\n")
            return "noted"

        def read() -> str:
            return (self.folder / "notes").read_text()

        super().__init__(
            folder,
            [[Call("note", {"text": "one"}, id="c1")], [Call("read", id="c2")], "done", "done again", "and again"],
            tools=lambda: [tool(note), tool(read, is_read_only=True)],
        )

    async def describe(self, binding: Any) -> AgentBuilder:  # type: ignore[override]
        described = super().describe(binding)
        described.workspace = LocalWorkspace(workdir=str(self.folder))
        if self.eager:
            await described.workspace.initialize()
        return described

    def adapter(self) -> AgentScopeAdapter:
        return AgentScopeAdapter.for_harness(self.describe)


async def parked(stage: Stage, turn: str) -> str:
    """Why the Turn waits for a person."""
    view = await stage.play(turn)
    assert (view.status, view.recovery, view.error) == (TurnStatus.WAITING, None, None)
    [reason] = view.waiting_on
    assert reason.kind is WaitKind.OPERATOR
    return reason.next_action


async def release(stage: Stage, turn: str) -> None:
    await stage.execute(
        c.ReleaseTurn(session=stage.session, thread_id=stage.thread_id, turn_id=turn, request_id="release")
    )


@pytest.mark.spec("RC-22")
@pytest.mark.parametrize("eager", [True, False], ids=["the factory makes it again", "the factory leaves it"])
async def test_a_turn_whose_workspace_was_deleted_waits_for_a_person(tmp_path: Path, eager: bool) -> None:
    agents = Workers(tmp_path, eager=eager)
    if not eager:
        agents.folder.mkdir()
    commits = 0

    def on_commit(_number: int, side: str, step: c.CommitStep) -> None:
        nonlocal commits
        commits += side == "after" and any(told.call_id == "c1" and told.state.terminal for told in step.tools)
        if commits == 1:
            commits += 1
            raise Abandoned  # The host is lost once the note is written.

    stage = await opened(agents.adapter, on_commit=on_commit)
    turn = await stage.submit("r1", "go")
    await stage.step()
    assert (agents.folder / "notes").read_text() == "one\n"
    kept = tmp_path / "backup"
    shutil.copytree(agents.folder, kept)
    shutil.rmtree(agents.folder)

    why = await parked(stage, turn)
    assert repr(str(agents.folder)) in why
    assert "restore it" in why
    assert not (agents.folder / "notes").exists()
    assert agents.requests == 1, "nothing was asked of the model about files that are not there"

    # A person restores it, and the Turn goes on where it was.
    shutil.copytree(kept, agents.folder, dirs_exist_ok=True)
    await release(stage, turn)
    assert (await stage.play(turn)).status is TurnStatus.COMPLETED
    assert agents.did("note") == 1
    assert outputs(await stage.state())["c2"] == "one\n"
    assert [run.status for run in await stage.runs(turn)] == [
        RunStatus.LOST,
        RunStatus.SUSPENDED,
        RunStatus.COMPLETED,
    ]


@pytest.mark.spec("RC-22")
async def test_the_next_turn_of_a_thread_meets_it_as_well_and_can_be_cancelled(tmp_path: Path) -> None:
    agents = Workers(tmp_path)
    stage = await opened(agents.adapter)
    first = await stage.submit("r1", "go")
    assert (await stage.play(first)).status is TurnStatus.COMPLETED
    shutil.rmtree(agents.folder)

    second = await stage.submit("r2", "go on")
    await parked(stage, second)
    await stage.cancel(second)
    assert (await stage.play(second)).status is TurnStatus.CANCELLED


@pytest.mark.spec("RC-22")
async def test_a_folder_that_was_made_by_hand_is_taken_as_it_is(tmp_path: Path) -> None:
    """The decision to go on without what was in it is a person's, and this is how it is told."""
    agents = Workers(tmp_path, eager=False)
    agents.folder.mkdir()
    stage = await opened(agents.adapter)
    assert (await stage.play(await stage.submit("r1", "go"))).status is TurnStatus.COMPLETED
    shutil.rmtree(agents.folder)
    second = await stage.submit("r2", "go on")
    await parked(stage, second)
    agents.folder.mkdir()
    await release(stage, second)
    assert (await stage.play(second)).status is TurnStatus.COMPLETED


async def test_a_new_threads_workspace_is_made_on_demand_and_may_move(tmp_path: Path) -> None:
    agents = Workers(tmp_path)
    stage = await opened(agents.adapter)
    assert not agents.folder.exists()
    assert (await stage.play(await stage.submit("r1", "go"))).status is TurnStatus.COMPLETED

    # The application keeps its workspaces somewhere else now: what was moved there is there.
    moved = tmp_path / "elsewhere"
    agents.folder.rename(moved)
    agents.folder = moved
    assert (await stage.play(await stage.submit("r2", "again"))).status is TurnStatus.COMPLETED

    # To nowhere.
    agents.folder, agents.eager = tmp_path / "nowhere", False
    third = await stage.submit("r3", "and again")
    assert str(agents.folder) in await parked(stage, third)
    assert not agents.folder.exists()
