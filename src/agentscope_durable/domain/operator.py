"""What only the operator of a host may do: settle the unknown by evidence, release a parked Turn.

None of this is reachable through a public transport or a model's tool (UN-08).
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import (
    Done,
    FileFact,
    PolicyReceipt,
    PutPolicy,
    ReconcileReceipt,
    ReconcileTool,
    ReleaseTurn,
    ToolCommit,
)
from agentscope_durable.contracts.errors import InvalidRequest, InvalidTransition, NotFound
from agentscope_durable.contracts.log import ModelFact
from agentscope_durable.contracts.records import ExecutionRecord, LateFact, PolicyRecord, RunRecord, TurnRecord
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, ModelStatus, RunStatus
from agentscope_durable.domain import ids
from agentscope_durable.domain.admission import remember, repeated
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.control import live_turn
from agentscope_durable.domain.execution import OUTCOMES, settle_execution


def reads_reconcile(c: ReconcileTool) -> Reads:
    return Reads(
        keys=(
            keys.request(c.request_id),
            keys.thread(c.thread_id),
            keys.turn(c.turn_id),
            keys.execution(c.turn_id, c.call_id),
        )
    )


def reconcile_tool(c: ReconcileTool, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Settle an UNKNOWN call with a verified outcome; the Turn goes on by the ordinary path (UN-06).

    Raises:
        InvalidTransition: the call is not UNKNOWN (UN-03).
        InvalidRequest: the outcome is not terminal, or there is no evidence (UN-10).
    """
    draft = begin(view, c.session, seed, now_ms)
    arguments = {
        "thread": c.thread_id,
        "turn": c.turn_id,
        "call": c.call_id,
        "state": c.state.value,
        "result": c.digest,
        "evidence": c.evidence_ref,
    }
    earlier = repeated(draft, c.request_id, "reconcile", arguments, ReconcileReceipt)
    if earlier is not None:
        return Unchanged(earlier)
    if c.state not in OUTCOMES:
        raise InvalidRequest(f"{c.state} is not the outcome of an execution", path="state")
    if not c.evidence_ref:
        raise InvalidRequest("a reconciliation needs a reference to its evidence", path="evidence_ref")
    record = draft.turn(c.thread_id, c.turn_id)
    execution = draft.get(keys.execution(c.turn_id, c.call_id), ExecutionRecord)
    if execution is None:
        raise NotFound("tool call", c.call_id)
    if execution.state is not ExecutionState.UNKNOWN:
        raise InvalidTransition(c.turn_id, f"in tool call {c.call_id!r} {execution.state}", "reconciled")
    state = settle_execution(draft, record, record.state, execution, c.state, c.result, evidence=c.evidence_ref)
    draft.store_turn(record, state)
    receipt = ReconcileReceipt(
        request_id=c.request_id,
        turn_id=c.turn_id,
        call_id=c.call_id,
        state=c.state,
        evidence_ref=c.evidence_ref,
        accepted_at_ms=now_ms,
    )
    remember(draft, c.request_id, "reconcile", arguments, receipt)
    return draft.change(receipt)


def reads_release(c: ReleaseTurn) -> Reads:
    return Reads(keys=(keys.request(c.request_id), keys.thread(c.thread_id), keys.turn(c.turn_id)))


def release_turn(c: ReleaseTurn, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """A Turn that was parked for a person may run again, with a fresh count of takeovers (D13)."""
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"thread": c.thread_id, "turn": c.turn_id}
    earlier = repeated(draft, c.request_id, "release", arguments, Done)
    if earlier is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    if not record.state.operator:
        raise InvalidTransition(c.turn_id, record.state.status, "released")
    draft.store_turn(record, replace(record.state, operator="", takeovers=0))
    receipt = Done(changed=True)
    remember(draft, c.request_id, "release", arguments, receipt)
    return draft.change(receipt)


def reads_put_policy(c: PutPolicy) -> Reads:
    return Reads(keys=(keys.request(c.request_id),))


def put_policy(c: PutPolicy, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Write or remove what a commit policy reads: true for every commit after this one (BE-18).

    Raises:
        InvalidRequest: the value does not stand in the record itself: inside a transaction no object is opened.
    """
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"key": c.key, "value": c.digest}
    earlier = repeated(draft, c.request_id, "policy", arguments, PolicyReceipt)
    if earlier is not None:
        return Unchanged(earlier)
    if c.value is None:
        draft.delete(keys.policy(c.key))
    elif c.value.is_reference:
        raise InvalidRequest("a policy record is small: it is read inside transactions", path="value")
    else:
        draft.put(keys.policy(c.key), PolicyRecord(value=c.value, request_id=c.request_id, put_ms=now_ms))
    receipt = PolicyReceipt(request_id=c.request_id, key=c.key, removed=c.value is None, accepted_at_ms=now_ms)
    remember(draft, c.request_id, "policy", arguments, receipt)
    return draft.change(receipt)


def reads_file_fact(c: FileFact) -> Reads:
    wanted = [keys.turn(c.turn_id), keys.thread(c.thread_id)]
    if c.tool is not None:
        wanted.append(keys.execution(c.turn_id, c.tool.call_id))
    if c.model is not None:
        wanted += [keys.run(c.turn_id, ids.run_number(c.run_id)), keys.late(c.run_id, _late_id(c.model))]
    return Reads(keys=tuple(wanted))


def _late_id(model: ModelFact) -> str:
    return f"{model.model_call_id}/{model.request}"


def file_fact(c: FileFact, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """A fenced owner reports what it knows of its own lost Run, touching neither context nor status (D13).

    The outcome of a local tool that is UNKNOWN and that this Run started settles it, as a late result of an executor
    would; usage of a LOST request is filed beside it, once.
    """
    draft = begin(view, c.session, seed, now_ms)
    record = draft.turn(c.thread_id, c.turn_id)
    changed = c.tool is not None and _file_tool(draft, record, c.run_id, c.tool)
    changed = (c.model is not None and _file_model(draft, c, c.model)) or changed
    return draft.change(Done(changed=True)) if changed else Unchanged(Done(changed=False))


def _file_tool(draft: Draft, record: TurnRecord, run_id: str, tool: ToolCommit) -> bool:
    execution = draft.get(keys.execution(record.turn_id, tool.call_id), ExecutionRecord)
    if execution is None or execution.state is not ExecutionState.UNKNOWN or tool.state not in OUTCOMES:
        return False
    if execution.kind is not ExecutionKind.LOCAL or execution.run_id != run_id:
        return False
    draft.store_turn(record, settle_execution(draft, record, record.state, execution, tool.state, tool.result))
    return True


def _file_model(draft: Draft, c: FileFact, model: ModelFact) -> bool:
    run = draft.get(keys.run(c.turn_id, ids.run_number(c.run_id)), RunRecord)
    if run is None or run.run_id != c.run_id or run.status is not RunStatus.LOST:
        return False
    key = keys.late(c.run_id, _late_id(model))
    if model.run_id != c.run_id or model.status is ModelStatus.STARTED or draft.get(key, LateFact) is not None:
        return False
    draft.put(
        key, LateFact(run_id=c.run_id, id=_late_id(model), what="model", body=body_of(model), filed_ms=draft.now_ms)
    )
    return True
