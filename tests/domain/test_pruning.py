"""Which events a fold can do without, and what a batch of pruning makes of them."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.errors import InvalidCursor
from agentscope_durable.contracts.events import PublicEvent
from agentscope_durable.contracts.log import StepFact, StoredEvent
from agentscope_durable.contracts.status import StepPhase, TurnStatus
from agentscope_durable.domain import ids, pruning
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.domain.pruning import superseded
from tests.domain.stage import SESSION, Stage
from tests.domain.test_projection import FILTERS, Timeline, fold, random_timeline
from tests.domain.test_projection import SESSION as TIMELINE


def stored(event: PublicEvent) -> StoredEvent:
    where = (event.thread_id or "", event.turn_id or "", event.run_id or "", event.step_id or "")
    return StoredEvent(event.type, *where, msgspec.Raw(msgspec.json.encode(event.data)))


def unneeded(events: list[PublicEvent]) -> set[int]:
    return superseded([(event.sequence, stored(event)) for event in events])


@pytest.mark.spec("EV-19", "PR-04")
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 70), max_size=4))
def test_what_is_left_folds_to_what_everything_does_however_it_was_cut_into_batches(seed: int, cuts: list[int]) -> None:
    for narrow in FILTERS:
        # By Run nothing is shown of what has not begun.
        events = random_timeline(random.Random(seed), whole=narrow.run_id is not None).events
        bounds = [0, *sorted(cuts), len(events)]
        gone = set[int]().union(*(unneeded(events[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)))
        left = EventProjection(TIMELINE, narrow)
        for event in events:
            if event.sequence not in gone:
                left.pass_over(event.sequence - 1)
                assert left.accept(event)
        assert left.projection == fold(events, narrow).projection


def test_of_a_turns_states_the_last_one_is_needed() -> None:
    line = Timeline()
    line.turn("main", "t1", 1, TurnStatus.QUEUED)
    line.turn("main", "t2", 2, TurnStatus.QUEUED)
    line.add("turn.recovery", "main", "t1", recovery={})
    line.turn("main", "t1", 1, TurnStatus.RUNNING, 2)

    assert unneeded(line.events) == {1, 3}
    assert unneeded(line.events[:3]) == set(), "a recovery is not all a status says"


def test_an_event_with_a_body_is_never_dropped() -> None:
    line = Timeline()
    line.requested("main", "t1", "c1")
    line.tool("tool.started", "main", "t1", "c1", "run1", state="RUNNING")
    line.tool("tool.unknown", "main", "t1", "c1", "run1", state="UNKNOWN", result={"value": 1})
    line.tool("tool.cancel_requested", "main", "t1", "c1", state="UNKNOWN", cancelRequested=True)
    line.requested("main", "t1", "c1")
    line.tool("tool.completed", "main", "t1", "c1", "run2", state="COMPLETED", result={"value": 2})
    line.tool("tool.completed", "main", "t1", "c2", "run2", state="COMPLETED", result={"value": 2})

    assert unneeded(line.events) == {2}, "only the start says nothing that is not said again"


def test_the_run_that_something_is_with_is_a_part_of_what_an_event_says() -> None:
    line = Timeline()
    line.requested("main", "t1", "c1", "run1")
    line.tool("tool.started", "main", "t1", "c1", "run2", state="RUNNING")
    line.tool("tool.completed", "main", "t1", "c1", state="COMPLETED", result={})

    assert unneeded(line.events) == set(), "the end belongs to no Run, so the start says where the call is"


def test_what_marks_a_message_is_not_lost_with_the_signal_it_belongs_to() -> None:
    line = Timeline()
    for kind in ("accepted", "withdrawn", "applied"):
        line.add(f"signal.{kind}", "main", "t1", requestId="q", operation="steer", messageId="m")

    assert unneeded(line.events) == {1}


def test_the_first_event_of_a_call_stays_because_what_follows_is_about_something_that_is_there() -> None:
    line = Timeline()
    line.tool("tool.started", "main", "t1", "c1", "run1", state="RUNNING")
    line.tool("tool.applied", "main", "t1", "c1", "run1", appliedAtMs=1)
    line.tool("tool.unknown", "main", "t1", "c1", "run1", state="UNKNOWN")

    assert unneeded(line.events) == set()


def test_an_event_that_cannot_be_read_is_left_to_whoever_folds_it() -> None:
    events = [
        (number, StoredEvent("tool.started", "main", "t1", "", "", msgspec.Raw(payload)))
        for number, payload in enumerate([b"[]", b"{}", b"[]"], 1)
    ]

    assert superseded(events) == set()


# ---- the command ----


def prune(stage: Stage, through: int | None = None, older_than_ms: int = 0) -> c.Pruned:
    return stage.do(c.PruneEvents(session=SESSION, through=through, older_than_ms=older_than_ms))


def told(stage: Stage) -> Stage:
    """Ten commits, each with a Step that no projection shows; the last commit tells of none."""
    owner = stage.running()
    for number in range(1, 8):
        step = ids.step_id(owner.run, number)
        owner.step(steps=(StepFact(step, owner.run, number, StepPhase.REASONING),), reasoning=number)
    return stage


def test_a_batch_is_bounded_and_the_next_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PRUNE_ROWS", 4)
    stage = told(Stage())
    last = stage.world.dump.next_seq - 1

    batches = [prune(stage)]
    while batches[-1].more:
        batches.append(prune(stage))

    assert [batch.more for batch in batches] == [True, True, False]
    assert batches[-1].through == last
    assert sum(batch.dropped for batch in batches) == 7 + 1 + 1, "seven Steps, the start of the Run and QUEUED"
    assert prune(stage) == c.Pruned(through=last, dropped=0, more=False)
    assert stage.change is None


def test_commits_are_pruned_whole() -> None:
    stage = told(Stage())
    # The first commit holds two events: of the Session and of its main Thread.
    assert prune(stage, 1).through == 0
    assert prune(stage, 2).through == 2
    assert prune(stage, 3).through == 2


def test_only_what_was_committed_long_enough_ago_is_pruned() -> None:
    stage = Stage()
    stage.pass_time(1000)
    stage.submit()

    assert prune(stage, older_than_ms=1001).through == 0
    assert prune(stage, older_than_ms=1000).through == 2
    assert prune(stage, 2, older_than_ms=0).more is False
    stage.pass_time(1000)
    assert prune(stage, older_than_ms=1000).through == stage.world.dump.next_seq - 1


def test_what_has_not_happened_is_not_pruned() -> None:
    stage = Stage()
    with stage.refuses(InvalidCursor):
        prune(stage, stage.world.dump.next_seq)


def test_pruning_wakes_nobody_and_leaves_the_records_alone() -> None:
    stage = told(Stage())
    before = stage.world.dump

    prune(stage)

    assert stage.change is not None
    assert (stage.change.hints, stage.change.puts, stage.change.entry) == ((), (), None)
    assert stage.world.dump.records == before.records


def test_rows_that_lose_nothing_are_not_written_again() -> None:
    stage = Stage()
    stage.submit()

    prune(stage)

    assert stage.change is not None
    assert stage.change.prune is not None
    assert stage.change.prune.rows == ()


def test_what_a_newer_release_has_written_stays() -> None:
    events = [
        StoredEvent(kind, "main", "t", "", "", msgspec.Raw(b"{}"))
        for kind in ("x.app.note", "step.ended", "turn.moved", "turn.status")
    ]

    assert [pruning.is_shown_by_nobody(event) for event in events] == [True, True, False, False]
