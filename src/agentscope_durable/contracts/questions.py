"""Everything that can be asked without changing anything (RT-21)."""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.events import EventFilter
from agentscope_durable.contracts.identity import SessionKey


class Question(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    session: SessionKey


class ListSessions(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="list_sessions"):
    namespace: str
    cursor: str | None = None
    limit: int = 100


class ListAllSessions(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="list_all_sessions"):
    """Sessions of every namespace."""

    cursor: str | None = None
    limit: int = 100


class ListClosed(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="list_closed"):
    """Sessions of all namespaces, and which of them have been closed for so long.

    Attributes:
        older_than_ms: by the store's clock.
        limit: Sessions looked at.
    """

    older_than_ms: int
    cursor: str | None = None
    limit: int = 100


class ListPolicies(Question, frozen=True, tag="list_policies"):
    """Policy records of a Session, in the order of their keys."""

    cursor: str | None = None
    limit: int = 100


class GetDropped(Question, frozen=True, tag="get_dropped"):
    """What is told of a Session that is dropped, or would be if it were dropped now."""


class FindTurn(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="find_turn"):
    """In which Session and Thread a Turn is, by its id alone."""

    turn_id: str


class GetSession(Question, frozen=True, tag="get_session"):
    pass


class GetThread(Question, frozen=True, tag="get_thread"):
    thread_id: str


class Examine(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="examine"):
    """Whether the store is sound (C82).

    Attributes:
        deep: make the expensive checks, too: every commit, every record, every object.
        session: look at this Session only; None looks at all.
    """

    deep: bool = False
    session: SessionKey | None = None


class ListThreads(Question, frozen=True, tag="list_threads"):
    cursor: str | None = None
    limit: int = 100


class GetTurn(Question, frozen=True, tag="get_turn"):
    thread_id: str
    turn_id: str


class GetOutcome(Question, frozen=True, tag="get_outcome"):
    """Whether a Turn has ended, and with what: all that somebody needs who waits for it."""

    thread_id: str
    turn_id: str


class ExplainTurn(Question, frozen=True, tag="explain_turn"):
    """Why a Turn is where it is, and what would make it go on (DX-01)."""

    thread_id: str
    turn_id: str


class ListTurns(Question, frozen=True, tag="list_turns"):
    """Turns of a Thread in admission order (Q-10)."""

    thread_id: str
    cursor: str | None = None
    limit: int = 100


class ListCheckpoints(Question, frozen=True, tag="list_checkpoints"):
    """Settled positions of a Thread after one of them, oldest first (CK-15)."""

    thread_id: str
    after: str | None = None
    limit: int = 100


class GetHistory(Question, frozen=True, tag="get_history"):
    """Messages in the order of their first sequence (PR-11), of everything or of a Thread or Turn."""

    filter: EventFilter = EventFilter()
    cursor: str | None = None
    limit: int = 100


class GetMessage(Question, frozen=True, tag="get_message"):
    """
    Attributes:
        sequence: of the event that first told it, if known: then it is found at once.
    """

    message_id: str
    sequence: int = 0


class ListEvents(Question, frozen=True, tag="list_events"):
    """`limit` counts the Session events looked at, not those that match (FI-10).

    Attributes:
        types: events of these types only; all when empty. What is left out is not decoded.
        seek: under a filter by Turn, a page from the very beginning starts with the commit that admitted the Turn: what
            the Session did before is not read through, nor missed if it was pruned.
    """

    filter: EventFilter = EventFilter()
    cursor: str | None = None
    limit: int = 100
    types: tuple[str, ...] = ()
    seek: bool = False


class Watermarks(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="watermarks"):
    """The number of the newest event of each of these Sessions, 0 where there is none: who watches many Sessions asks
    once which of them have moved. At most 1000 Sessions."""

    sessions: tuple[SessionKey, ...]


class GetSnapshot(Question, frozen=True, tag="get_snapshot"):
    filter: EventFilter = EventFilter()


class ListInteractions(Question, frozen=True, tag="list_interactions"):
    """Pending interactions of a Turn, or all of its interactions."""

    thread_id: str
    turn_id: str
    pending_only: bool = True


class ListRuns(Question, frozen=True, tag="list_runs"):
    thread_id: str
    turn_id: str
    cursor: str | None = None
    limit: int = 100


class GetRun(Question, frozen=True, tag="get_run"):
    thread_id: str
    turn_id: str
    run_id: str


class ListSteps(Question, frozen=True, tag="list_steps"):
    thread_id: str
    turn_id: str
    run_id: str
    cursor: str | None = None
    limit: int = 100


class ListModelCalls(Question, frozen=True, tag="list_model_calls"):
    """Calls of a Run, or of one of its Steps (MC-01)."""

    thread_id: str
    turn_id: str
    run_id: str
    step_id: str | None = None
    cursor: str | None = None
    limit: int = 100


class ListTools(Question, frozen=True, tag="list_tools"):
    """Tool calls of a Turn with their three facts: ended, received, applied (PR-08)."""

    thread_id: str
    turn_id: str


# ---- what an operator watches ----


class ListStalled(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag="list_stalled"):
    """Threads of all Sessions whose Turn could go on and has not done so for `after_ms` (C18).

    `limit` counts the Threads looked at, not those that are stalled, as in ListEvents.
    """

    after_ms: int
    cursor: str | None = None
    limit: int = 100


class MeasureSession(Question, frozen=True, tag="measure_session"):
    """What a Session takes in its stores (BE-28)."""


class MeasureStore(msgspec.Struct, frozen=True, tag="measure_store"):
    """How busy the record store is, and what it takes (BE-28)."""


# ---- what a host reads ----


class LoadThread(Question, frozen=True, tag="load_thread"):
    """The native state of a Thread: log rows from its base to its checkpoint.

    Attributes:
        digest: what the blocks must add up to; "" for no check.
    """

    thread_id: str
    first: int
    last: int
    digest: str = ""


class LoadCheckpoint(Question, frozen=True, tag="load_checkpoint"):
    """What restores a settled position, and where its Thread stands now; `at` 0 is before the first one."""

    thread_id: str
    at: int


class OpenWork(Question, frozen=True, tag="open_work"):
    """What an owner can apply now: inputs, answers, outcomes, signals of a Turn."""

    thread_id: str
    turn_id: str


class GetWorkspace(Question, frozen=True, tag="get_workspace"):
    """What a Thread's workspace holds, counted."""

    thread_id: str


class GetEntry(Question, frozen=True, tag="get_entry"):
    """An entry of a Thread's workspace with its content, None when there is none."""

    thread_id: str
    path: tuple[str, ...]


class ListEntries(Question, frozen=True, tag="list_entries"):
    """Entries under a namespace, at any depth, in order of their paths, without their contents.

    Attributes:
        after: path of the last entry seen; () for the beginning. There are no more when fewer than `limit` come.
    """

    thread_id: str
    namespace: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    limit: int = 100


class GetContent(Question, frozen=True, tag="get_content"):
    """A content by its number: what an entry has, or had at a settled position."""

    thread_id: str
    number: int


class EntriesAt(Question, frozen=True, tag="entries_at"):
    """All entries of a workspace as of a settled position of its Thread, without their contents (CK-07).

    Attributes:
        at: stream position of the checkpoint; 0 is before the first.
    """

    thread_id: str
    at: int
