"""How a Run, its Steps and its model calls look, from the private facts that its commits carried.

Rule 1: a fact is appended when something becomes true and never changed. A Step or a call is the fold of its facts in
stream order, with the commits' own times.
Rule 2: what never ended is not invented an end. When its Run is over, an open Step is INTERRUPTED and an open request
is LOST, with the usage that was known (MC-08); a count nobody reported stays None (MC-04).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.records import RunRecord
from agentscope_durable.contracts.status import ModelStatus, RunStatus, StepStatus
from agentscope_durable.contracts.views import ModelCallView, ModelRequestView, RunView, StepView, UsageView
from agentscope_durable.domain.turn_view import error_view

__all__ = ["Facts", "model_call_view", "model_facts", "run_view", "step_facts", "step_view"]

F = TypeVar("F", StepFact, ModelFact)


class Told(NamedTuple, Generic[F]):
    """A fact and the store time of the commit that told it."""

    fact: F
    at_ms: int


class _Story(Generic[F]):
    """Everything that was told of one Step or call."""

    __slots__ = ("begun_at", "ended_at", "told")

    def __init__(self, begun_at: int) -> None:
        self.told: list[Told[F]] = []
        self.begun_at = begun_at
        # Stream position of the fact that ended it; 0 while it is open.
        self.ended_at = 0


class Facts(Generic[F]):
    """Facts of one Run, gathered by Step or call in the order in which these began.

    Args:
        skip: ids that an earlier page has shown; facts about them are passed over.
    """

    def __init__(self, skip: Iterable[str] = ()) -> None:
        # Where each of them ended, 0 while that was not seen.
        self._skipped = dict.fromkeys(skip, 0)
        self._stories: dict[str, _Story[F]] = {}

    def take(self, identity: str, fact: F, *, at: int, at_ms: int, ended: bool) -> None:
        """One fact, in stream order.

        Args:
            identity: of the Step or call.
            at: stream position of its commit.
            at_ms: store time of its commit.
            ended: nothing more is expected after it.
        """
        if identity in self._skipped:
            self._skipped[identity] = at if ended else 0
            return
        story = self._stories.get(identity)
        if story is None:
            story = self._stories[identity] = _Story(at)
        story.told.append(Told(fact, at_ms))
        story.ended_at = at if ended else 0

    def shows(self, count: int) -> bool:
        """Whether the first `count` are known to their end, and that there is one more."""
        if len(self._stories) <= count:
            return False
        return all(story.ended_at for story in list(self._stories.values())[:count])

    def first(self, count: int) -> list[list[Told[F]]]:
        return [story.told for story in list(self._stories.values())[:count]]

    def after(self, count: int) -> tuple[int, tuple[str, ...]] | None:
        """Where a page of `count` goes on: a stream position, and the ids to pass over from there; None at the end.

        Passed over are those shown that have facts at or after that position. There are as many as were open at once.
        """
        stories = list(self._stories.items())
        if len(stories) <= count:
            return None
        begin = stories[count][1].begun_at
        ends = [*self._skipped.items(), *((identity, story.ended_at) for identity, story in stories[:count])]
        return begin, tuple(identity for identity, ended_at in ends if ended_at == 0 or ended_at >= begin)


def step_facts(facts: Facts[StepFact], fact: StepFact, *, at: int, at_ms: int) -> None:
    facts.take(fact.step_id, fact, at=at, at_ms=at_ms, ended=fact.status is not StepStatus.RUNNING)


def model_facts(facts: Facts[ModelFact], fact: ModelFact, *, at: int, at_ms: int) -> None:
    # A request that failed may be followed by another one of the same call.
    ended = fact.status not in (ModelStatus.STARTED, ModelStatus.FAILED) or (
        fact.request == 0 and fact.status is ModelStatus.FAILED
    )
    facts.take(fact.model_call_id, fact, at=at, at_ms=at_ms, ended=ended)


def run_view(turn_id: str, record: RunRecord) -> RunView:
    return RunView(
        run_id=record.run_id,
        turn_id=turn_id,
        number=record.number,
        status=record.status,
        owner=record.owner,
        fence=record.fence,
        started_at_ms=record.started_ms,
        ended_at_ms=record.ended_ms or None,
        resumed_from_step_id=record.resumed_from or None,
        error=None if record.failure is None else error_view(record.failure),
    )


def step_view(run: RunRecord, told: Sequence[Told[StepFact]]) -> StepView:
    """A Step from its facts, of which there is at least one."""
    last = told[-1].fact
    status, ended_at_ms = last.status, None
    if status is not StepStatus.RUNNING:
        ended_at_ms = told[-1].at_ms
    elif run.status is not RunStatus.RUNNING:
        status, ended_at_ms = StepStatus.INTERRUPTED, run.ended_ms or None
    return StepView(
        step_id=last.step_id,
        run_id=last.run_id,
        number=last.number,
        phase=last.phase,
        status=status,
        started_at_ms=told[0].at_ms,
        ended_at_ms=ended_at_ms,
        # The fact that ends a Step need not repeat how it began.
        resumed_from_step_id=next((t.fact.resumed_from for t in told if t.fact.resumed_from), None),
        reasoning=next((t.fact.reasoning for t in reversed(told) if t.fact.reasoning), None),
    )


def model_call_view(run: RunRecord, told: Sequence[Told[ModelFact]], late: Iterable[ModelFact] = ()) -> ModelCallView:
    """A model call from its facts, of which there is at least one.

    Args:
        run: the Run it was made in.
        late: what its lost owner reported afterwards (D13). It completes the usage; a LOST request stays LOST.
    """
    first = told[0].fact
    over = run.status is not RunStatus.RUNNING
    by_request: dict[int, list[Told[ModelFact]]] = {}
    for one in told:
        by_request.setdefault(one.fact.request, []).append(one)
    reported = {fact.request: fact for fact in late}
    outer = by_request.pop(0, [])
    requests = tuple(
        _request_view(number, facts, reported.get(number), over=over) for number, facts in sorted(by_request.items())
    )
    usage, complete = _usage(outer, reported.get(0))
    if usage is None:
        usage = _total([request.usage for request in requests])
        complete = bool(requests) and all(request.usage_complete for request in requests)
    elapsed_ms = next((t.fact.elapsed_ms for t in reversed(outer) if t.fact.elapsed_ms is not None), None)
    if elapsed_ms is None and not outer:
        known = [request.elapsed_ms for request in requests if request.elapsed_ms is not None]
        elapsed_ms = sum(known) if known and len(known) == len(requests) else None
    status = outer[-1].fact.status if outer else requests[-1].status
    return ModelCallView(
        model_call_id=first.model_call_id,
        run_id=first.run_id,
        step_id=first.step_id,
        status=ModelStatus.LOST if over and status is ModelStatus.STARTED else status,
        # Said when it began; whoever ends a lost call does not know it.
        purpose=first.purpose,
        observation=first.observation,
        requests=requests,
        started_at_ms=told[0].at_ms,
        message_id=next((t.fact.message_id for t in told if t.fact.message_id), None),
        elapsed_ms=elapsed_ms,
        usage=usage,
        usage_complete=complete,
    )


def _request_view(
    number: int, told: Sequence[Told[ModelFact]], late: ModelFact | None, *, over: bool
) -> ModelRequestView:
    last = told[-1].fact
    usage, complete = _usage(told, late)
    return ModelRequestView(
        number=number,
        status=ModelStatus.LOST if over and last.status is ModelStatus.STARTED else last.status,
        model=next((t.fact.model for t in told if t.fact.model), ""),
        started_at_ms=told[0].at_ms,
        elapsed_ms=next((t.fact.elapsed_ms for t in reversed(told) if t.fact.elapsed_ms is not None), None),
        usage=usage,
        usage_complete=complete,
        error=last.error or None,
    )


def _usage(told: Sequence[Told[ModelFact]], late: ModelFact | None) -> tuple[UsageView | None, bool]:
    """The newest usage that was reported, and whether it is all there is to know."""
    facts = [t.fact for t in told] if late is None else [*(t.fact for t in told), late]
    newest = next((fact for fact in reversed(facts) if fact.usage is not None), None)
    if newest is None or newest.usage is None:
        return None, False
    return _usage_view(newest.usage), newest.complete


def _usage_view(usage: Usage) -> UsageView:
    return UsageView(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )


def _total(usages: Sequence[UsageView | None]) -> UsageView | None:
    """The sum of what is known. A count that no request reported stays unknown."""
    known = [usage for usage in usages if usage is not None]
    if not known:
        return None
    return UsageView(
        input_tokens=_sum([u.input_tokens for u in known]),
        output_tokens=_sum([u.output_tokens for u in known]),
        cache_read_tokens=_sum([u.cache_read_tokens for u in known]),
        cache_write_tokens=_sum([u.cache_write_tokens for u in known]),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
