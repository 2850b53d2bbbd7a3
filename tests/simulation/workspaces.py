"""What is judged of workspaces: an entry changes in its Thread's commits alone, with what came of that, and once.

The scripted agent notes what it says (`notes`), AgentScope's tools what they do (`real_agent`). From what was said and
done follows what must be there, at every settled position and now.
"""

from __future__ import annotations

from typing import Any

import msgspec

from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState
from tests.simulation.notes import DRAFT, SAID
from tests.simulation.schedule import LARGE, REAL

Entries = dict[tuple[str, ...], Any]
EFFECTS = "effects"
"""Namespace in which a tool of AgentScope's agent counts each of its calls."""


def name_of(effect: str) -> str:
    """What a call counts itself under: short, also in a Turn whose task is a large text."""
    return effect.replace(LARGE, "<large>")


class Workspaces:
    """Those of one Session, read as a host reads them."""

    def __init__(self, verdict: Any) -> None:
        self._verdict = verdict
        self._session = verdict.session
        self._audit = verdict.audit
        self._real = verdict.story.plan.agent == REAL
        self._kept: dict[tuple[str, str], Entries] = {}

    def check(self) -> None:
        for thread in self._verdict.threads:
            here = {"session": self._session, "thread_id": thread}
            # What was pruned says nothing any more.
            before: Entries | None = None if (self._session, thread) in self._audit.forgotten else {}
            for one in self._verdict.all(q.ListCheckpoints, "after", thread_id=thread):
                at = stream_position(ThreadKey(self._session, thread), one.position)
                through = self._verdict.ask(q.LoadCheckpoint(at=at, **here)).through
                now = self._read(thread, self._verdict.ask(q.EntriesAt(at=through, **here)))
                if one.source is not None:
                    self._copied(thread, one, now)
                elif before is not None:
                    self._changed(thread, one.turn_id, before, now)
                self._kept[thread, one.position] = before = now
            now = self._read(thread, self._verdict.ask(q.ListEntries(namespace=(), **here)))
            if before is not None and now != before and not (self._real and before.items() <= now.items()):
                self._broken(f"now {now} is in {thread}, and where it was settled {before}")

    def _broken(self, what: str) -> None:
        self._audit.broken("WS", what)

    def _read(self, thread: str, entries: Any) -> Entries:
        found: Entries = {}
        for entry in entries:
            body = self._verdict.ask(q.GetContent(session=self._session, thread_id=thread, number=entry.number))
            content = self._verdict.open_body(body)
            if len(content) != entry.size_bytes:
                self._broken(f"{entry.path} of {thread} has {len(content)} bytes, {entry.size_bytes} are counted")
            found[entry.path] = msgspec.json.decode(content)
        return found

    def _copied(self, thread: str, one: Any, now: Entries) -> None:
        """Back, or elsewhere, with what was there."""
        there = self._kept.get((one.source.thread_id, one.source.position))
        if there is None:
            return
        if now != there:
            self._broken(f"{thread} was to begin again with {there}, and has {now}")
        if now:
            again = "in a fork" if one.source.thread_id != thread else "after a restore"
            self._audit.sometimes[f"entries of a workspace were there {again}"] += 1

    def _changed(self, thread: str, turn_id: str, before: Entries, now: Entries) -> None:
        """By one Turn."""
        if self._real:
            self._counted(thread, turn_id, before, now)
            return
        wanted = [*before.get(SAID, ()), *self._said_by(turn_id)]
        if now.get(SAID, []) != wanted:
            self._broken(f"turn {turn_id} left {now.get(SAID)} in {thread}, said was {wanted}")
        if odd := now.keys() - {SAID, DRAFT}:
            self._broken(f"in {thread} is {odd}, which nobody wrote")
        if DRAFT in now and (now[DRAFT]["said"] not in wanted or self._verdict.turns[turn_id].status == "COMPLETED"):
            self._broken(f"turn {turn_id} left a draft in {thread}: {now[DRAFT]}")

    def _said_by(self, turn_id: str) -> list[str]:
        events = self._audit.events[self._verdict.partition]
        mine = (event for event in events if event.type == "message.completed" and event.turn == turn_id)
        return [event.data["messageId"] for event in mine if event.data["role"] == "assistant"]

    def _counted(self, thread: str, turn_id: str, before: Entries, now: Entries) -> None:
        """Each call of a tool counts itself: once, however often it was begun, and always if it has come to its end."""
        calls, done = set(), set()
        for tool in self._verdict.tools(turn_id):
            path = (EFFECTS, name_of(msgspec.json.decode(tool.arguments)["effect"]))
            calls.add(path)
            good = tool.result is not None and tool.result.get("state", "success") == "success"
            if tool.kind is ExecutionKind.LOCAL and tool.state is ExecutionState.COMPLETED and good:
                done.add(path)
        if odd := {path: count for path, count in now.items() if count != 1}:
            self._broken(f"in {thread} calls are counted more than once: {odd}")
        if lost := {*before, *done} - now.keys():
            self._broken(f"after turn {turn_id} {thread} has lost {lost}")
        if odd := now.keys() - before.keys() - calls:
            self._broken(f"turn {turn_id} left {odd} in {thread}, which it never did")
        if done:
            self._audit.sometimes["a tool wrote to its workspace"] += 1
