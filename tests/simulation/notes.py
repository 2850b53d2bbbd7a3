"""A scripted agent that keeps a workspace: what it says it also notes there, in the same commit.

So the notes of a Thread must always be what it has said: neither more nor less after a crash, nothing of another
Thread's, and after a restore or in a fork what had been said at that position.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.commands import CommitStep, EntryCommit, RunEnd, StepReceipt
from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.views import WorkspaceView
from agentscope_durable.spi.harness import Abandoned, RunContext
from agentscope_durable.testing.scripted_harness import ScriptedHarness, text_of_content

SAID = ("notes", "said")
"""Ids of all messages of the agent, in order."""
DRAFT = ("notes", "draft")
"""What is worked on: there from the first message of a Turn to its last. As large as the task is."""


class Noting(ScriptedHarness):
    async def run(self, context: RunContext) -> RunEnd | None:
        return await super().run(cast("RunContext", _Noted(context)))


class _Noted:
    """The Run, with a workspace beside."""

    def __init__(self, inner: RunContext) -> None:
        self._inner = inner
        self._counted: WorkspaceView | None = None
        self._said: list[str] = []
        self._versions: dict[tuple[str, ...], int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def commit(self, step: CommitStep) -> StepReceipt:
        if not step.messages:
            return await self._inner.commit(step)
        said = [*await self._read(), *(message.message_id for message in step.messages)]
        entries = [await self._entry(SAID, said, 1)]
        if step.end is None:
            task = text_of_content(self._inner.start.input.content)
            entries.append(await self._entry(DRAFT, {"said": said[-1], "task": task}, 2))
        elif self._versions[DRAFT]:
            entries.append(EntryCommit(path=DRAFT, expected=self._versions[DRAFT]))
        try:
            return await self._inner.commit(replace(step, workspace=tuple(entries)))
        except (DurableError, Abandoned):
            self._counted = None
            raise
        finally:
            self._note(said, entries)

    async def _read(self) -> list[str]:
        """What is committed; only the owner changes it, so that he reads it once."""
        if self._counted is None:
            self._counted = await self._inner.workspace()
            found = {path: await self._inner.workspace_entry(path) for path in (SAID, DRAFT)}
            self._versions = {path: 0 if one is None else one.version for path, one in found.items()}
            said = found[SAID]
            self._said = [] if said is None or said.content is None else await self._inner.open_body(said.content)
        return self._said

    async def _entry(self, path: tuple[str, ...], value: Any, number: int) -> EntryCommit:
        assert self._counted is not None
        return EntryCommit(
            path=path,
            expected=self._versions[path],
            version=(self._versions[path] or self._counted.floor) + 1,
            number=self._counted.numbers + number,
            size=len(msgspec.json.encode(value)),
            content=await self._inner.body(value),
        )

    def _note(self, said: list[str], entries: list[EntryCommit]) -> None:
        if self._counted is None:
            return
        self._said = said
        for entry in entries:
            floor = self._counted.floor if entry.version else max(self._counted.floor, entry.expected)
            numbers = max(self._counted.numbers, entry.number)
            self._counted = replace(self._counted, floor=floor, numbers=numbers)
            self._versions[entry.path] = entry.version
