"""The owner's commit: native state, intents, results, messages and position change together (BE-17).

A plain step commit writes one log row, one head row and at most one record. Everything here that
reads or writes more belongs to something rarer: an input, an answer, the end of a Run.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Range, Reads, Unchanged, View
from agentscope_durable.contracts.commands import CommitStep, RunEndKind
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.events import Custom, check_event_type
from agentscope_durable.contracts.records import ThreadHead, TurnState
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.finish import queue_after
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.lease import check_native, owned
from agentscope_durable.domain.step import progress, tools, waits
from agentscope_durable.domain.step.commit import Commit, receipt
from agentscope_durable.domain.step.end import end_of_run
from agentscope_durable.domain.step.progress import only_begins, steps_around
from agentscope_durable.domain.step.waits import signals_of
from agentscope_durable.domain.workspace import commit_entries, reads_entries


def reads_commit_step(c: CommitStep) -> Reads:
    """A plain step needs nothing but the head; each rarer part names what it touches."""
    if c.end is None and not (
        c.inputs or c.signals or c.waits or c.tools or c.answers or c.interactions or c.workspace
    ):
        return _NO_READS
    wanted: list[str] = []
    ranges: tuple[Range, ...] = ()
    if c.end is not None or c.inputs:
        wanted.append(keys.turn(c.turn_id))
    for key in (*c.signals, *(wait.key for wait in c.waits)):
        ranges += (signals_of(c.turn_id, key),)
    if c.end is not None:
        wanted.append(keys.thread(c.thread_id))
        wanted.append(keys.run(c.turn_id, ids.run_number(c.run_id)))
    wanted.extend(keys.execution(c.turn_id, tool.call_id) for tool in c.tools)
    wanted.extend(keys.input_(c.turn_id, ordinal) for ordinal in c.inputs)
    wanted.extend(keys.interaction(c.turn_id, interaction) for interaction in c.answers)
    wanted.extend(keys.interaction(c.turn_id, asked.interaction_id) for asked in c.interactions)
    reads = Reads(keys=tuple(wanted), ranges=ranges)
    return reads.merged(reads_entries(c.thread_id, c.workspace)) if c.workspace else reads


_NO_READS = Reads()


def commit_step(c: CommitStep, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Make one owner commit true.

    Raises:
        Fenced: the sender does not own the Thread any more; nothing was stored.
        RevisionConflict: another commit of this owner stands at that position already.
    """
    draft = begin(view, c.session, seed, now_ms)
    active = owned(draft, c, c.expected_position)
    draft.of_its_owner(c.turn_id)
    if not c.run_id:
        raise InvalidRequest("a settlement commits no steps; it ends with settle_turn", path="run_id")
    if c.end is not None or c.answers:
        _require_end(draft, c, active.turn)
    check_native(c, active)
    position = active.position + 1
    draft.native(c.thread_id, position, c.journal)
    state = active.turn
    run = active.run
    commit = Commit(draft, c)
    begun, ended = steps_around(c.steps)

    if begun:
        run = progress.advance_steps(commit, run, begun)
    if c.models:
        run = progress.note_models(commit, run)
    commit.step_id = run.step_id
    if c.messages or c.abandons:
        state = progress.write_messages(commit, state)
    if c.tools:
        state = tools.commit_tools(commit, state)
    if c.interactions:
        state = waits.ask(commit, state)
    if c.answers:
        state = waits.apply_answers(commit, state)
    if c.inputs:
        state = waits.apply_inputs(commit, state)
    if c.waits or c.signals:
        state = waits.wait(commit, state)
    if c.workspace:
        commit_entries(draft, c.thread_id, position, c.workspace, turn_id=c.turn_id)
    for event in c.events:
        check_event_type(event.type)
        commit.emit(event.type, Custom(value=event.value))
        commit.refer(event.value)

    if c.reasoning is not None or c.attempt is not None:
        state = replace(
            state,
            reasoning=state.reasoning if c.reasoning is None else c.reasoning,
            attempt=state.attempt if c.attempt is None else c.attempt,
        )
    if run.step_id and run.step_id != state.last_step:
        state = replace(state, last_step=run.step_id)
    if ended:
        run = progress.advance_steps(commit, run, ended)
    checkpoint_at, base_at, writer = active.checkpoint_at, active.base_at, active.writer
    chain, digest = active.chain, active.digest
    if c.journal:
        chain = chained("" if c.base else chain, c.journal)
    if c.checkpoint:
        digest = chain
        checkpoint_at = position
        writer = c.writer
        if c.base:
            base_at = position
        if state.takeovers and not only_begins(c):
            state = replace(state, takeovers=0)
    active = ThreadHead(
        fence=active.fence,
        owner=active.owner,
        position=position,
        base_at=base_at,
        checkpoint_at=checkpoint_at,
        turn_id=active.turn_id,
        turn=active.turn,
        run=run,
        writer=writer,
        chain=chain,
        digest=digest,
    )
    if c.end is not None:
        return end_of_run(draft, c, c.end, active, state)
    if state.status is not active.turn.status or _shown(active.turn, state):
        state = draft.show(draft.turn(c.thread_id, c.turn_id), active.turn, state)
    draft.set_active(c.thread_id, replace(active, turn=state))
    return draft.change(receipt(active, state, now_ms))


def _require_end(draft: Draft, c: CommitStep, state: TurnState) -> None:
    """What the end of the Run, or an answer, may touch, in one round: calls that the head names, and the queue."""
    wanted = (one for one in state.conditions if one.call_id and (c.end is not None or one.id in c.answers))
    completed = c.end is not None and c.end.kind is RunEndKind.COMPLETED
    draft.require(
        tuple(keys.execution(c.turn_id, one.call_id) for one in wanted),
        queue_after(draft.thread(c.thread_id), draft.turn(c.thread_id, c.turn_id).ordinal) if completed else (),
    )


def _shown(before: TurnState, after: TurnState) -> bool:
    """Cheap test for the few visible fields a commit without an end can change."""
    return before.inputs != after.inputs
