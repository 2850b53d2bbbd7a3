"""What can be asked: every question of `contracts/questions` is answered here, and nothing is changed.

Rule 1: records answer what they hold; events, history, snapshots, Steps and model calls are derived from the log when
somebody asks (D9). Nothing is written twice so that it can be read.
Rule 2: an answer costs what it shows. A page reads its page of records or rows, not the history before it. The one
answer that must read a whole timeline, the snapshot, has a named bound.
Rule 3: what depends on the moment of asking (the lease, `host`, `definition_missing`) is laid on top at the end and is
no part of any projection.

A new question is a line in `ANSWERS` and a function in the module of its subject. `reading` reads, `records` and `rows`
say what was read, `pages` cuts it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.backend.queries import (
    calls,
    checkpoints,
    events,
    examination,
    explanation,
    messages,
    runs,
    sessions,
    sizes,
    snapshots,
    turns,
    watch,
    work,
    workspace,
)
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.status import Audience
from agentscope_durable.spi.record_store import RecordStore

__all__ = ["ANSWERS", "Answer", "Queries"]


class Answer(NamedTuple):
    """Who may ask a question (D15), and `find(reader, question)`, which answers it."""

    audience: Audience
    find: Callable[[Reader, Any], Awaitable[Any]]


PUBLIC, HOST, OPERATOR = Audience.PUBLIC, Audience.HOST, Audience.OPERATOR

ANSWERS: Final[dict[type[Any], Answer]] = {
    q.ListSessions: Answer(PUBLIC, sessions.list_sessions),
    q.GetSession: Answer(PUBLIC, sessions.get_session),
    q.GetThread: Answer(PUBLIC, sessions.get_thread),
    q.ListThreads: Answer(PUBLIC, sessions.list_threads),
    q.GetTurn: Answer(PUBLIC, turns.get_turn),
    q.GetOutcome: Answer(PUBLIC, messages.get_outcome),
    q.ListTurns: Answer(PUBLIC, turns.list_turns),
    q.ListCheckpoints: Answer(PUBLIC, checkpoints.list_checkpoints),
    q.ExplainTurn: Answer(PUBLIC, explanation.explain_turn),
    q.GetHistory: Answer(PUBLIC, messages.get_history),
    q.GetMessage: Answer(PUBLIC, messages.get_message),
    q.ListEvents: Answer(PUBLIC, events.list_events),
    q.Watermarks: Answer(PUBLIC, events.watermarks),
    q.GetSnapshot: Answer(PUBLIC, snapshots.get_snapshot),
    q.ListInteractions: Answer(PUBLIC, calls.list_interactions),
    q.ListTools: Answer(PUBLIC, calls.list_tools),
    q.ListRuns: Answer(PUBLIC, runs.list_runs),
    q.GetRun: Answer(PUBLIC, runs.get_run),
    q.ListSteps: Answer(PUBLIC, runs.list_steps),
    q.ListModelCalls: Answer(PUBLIC, runs.list_model_calls),
    # Across all Sessions, whoever's they are.
    q.ListStalled: Answer(OPERATOR, watch.list_stalled),
    q.MeasureSession: Answer(OPERATOR, sizes.measure_session),
    q.MeasureStore: Answer(OPERATOR, sizes.measure_store),
    # Native state and what waits for it: for the host that runs the Thread alone (EV-22).
    q.LoadThread: Answer(HOST, work.load_thread),
    q.LoadCheckpoint: Answer(HOST, checkpoints.load_checkpoint),
    q.OpenWork: Answer(HOST, work.open_work),
    # What looks over the fence between namespaces.
    q.ListAllSessions: Answer(OPERATOR, sessions.list_all_sessions),
    q.ListClosed: Answer(OPERATOR, sessions.list_closed),
    q.GetDropped: Answer(OPERATOR, sessions.get_dropped),
    q.ListPolicies: Answer(OPERATOR, sessions.list_policies),
    q.FindTurn: Answer(OPERATOR, turns.find_turn),
    # The agent's files, for the same host: its owner reads them (WS-02), and they are part of its private checkpoints.
    q.GetWorkspace: Answer(HOST, workspace.get_workspace),
    q.GetEntry: Answer(HOST, workspace.get_entry),
    q.ListEntries: Answer(HOST, workspace.list_entries),
    q.GetContent: Answer(HOST, workspace.get_content),
    q.EntriesAt: Answer(HOST, workspace.entries_at),
    q.Examine: Answer(OPERATOR, examination.examine),
}
"""Every question there is."""


class Queries:
    """Answers questions about Sessions of one store.

    Args:
        records: where the records are.
        bodies: opens what is too large for a record.
    """

    def __init__(self, records: RecordStore, bodies: Bodies) -> None:
        self._reader = Reader(records, bodies)

    @staticmethod
    def audience(question: Any) -> Audience:
        """Who may ask this (D15).

        Raises:
            InvalidRequest: it is no question.
        """
        return _answer(question).audience

    async def answer(self, question: Any) -> Any:
        """The view a question asks for; nothing is changed, claimed or started (RT-21).

        Raises:
            NotFound: there is no such Session, Thread, Turn, Run or message, or it is not where the question says
                (RT-56, FI-03).
            InvalidRequest: a limit outside 1..1000, or no question at all.
            InvalidCursor: the cursor is of another listing, or of the future.
            CursorExpired: the events after the cursor were pruned.
            LimitExceeded, SnapshotTooLarge: a named bound of the module that answers.
        """
        return await _answer(question).find(self._reader, question)


def _answer(question: Any) -> Answer:
    answer = ANSWERS.get(type(question))
    if answer is None:
        raise InvalidRequest(f"{type(question).__name__} is not a question")
    return answer
