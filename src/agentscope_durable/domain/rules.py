"""The table of contents of the system: everything that can change is on this page.

A rule says who may send a command, what the decision reads, and what decides. A new control is a
command, a decision and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.status import Audience
from agentscope_durable.domain import (
    admission,
    checkpoint,
    control,
    dropping,
    execution,
    interaction,
    lease,
    objects,
    operator,
    positions,
    pruning,
    resources,
    settlement,
    step,
)

Decision = Callable[[Any, bytes, View, int], Change | Unchanged]


class Rule(NamedTuple):
    """`decide(command, seed, view, now_ms)` is pure; it may raise a `Rejected` and then nothing changes."""

    audience: Audience
    reads: Callable[[Any], Reads]
    decide: Decision


PUBLIC, HOST, OPERATOR = Audience.PUBLIC, Audience.HOST, Audience.OPERATOR

RULES: dict[type[c.Command], Rule] = {
    c.CreateSession: Rule(PUBLIC, resources.reads_create_session, resources.create_session),
    c.CreateThread: Rule(PUBLIC, resources.reads_create_thread, resources.create_thread),
    c.CloseSession: Rule(PUBLIC, resources.reads_close_session, resources.close_session),
    c.CloseThread: Rule(PUBLIC, resources.reads_close_thread, resources.close_thread),
    c.SubmitTurn: Rule(PUBLIC, admission.reads_submit, admission.submit),
    c.AddInput: Rule(PUBLIC, control.reads_control, control.add_input),
    c.Withdraw: Rule(PUBLIC, control.reads_withdraw, control.withdraw),
    c.Cancel: Rule(PUBLIC, control.reads_cancel, control.cancel),
    c.Pause: Rule(PUBLIC, control.reads_control, control.pause),
    c.Resume: Rule(PUBLIC, control.reads_control, control.resume),
    c.Respond: Rule(PUBLIC, interaction.reads_respond, interaction.respond),
    c.Signal: Rule(PUBLIC, control.reads_control, control.signal),
    c.RestoreThread: Rule(HOST, checkpoint.reads_restore, checkpoint.restore_thread),
    c.ForkThread: Rule(HOST, checkpoint.reads_fork, checkpoint.fork_thread),
    c.Claim: Rule(HOST, lease.reads_claim, lease.claim),
    c.CommitStep: Rule(HOST, step.reads_commit_step, step.commit_step),
    c.SettleTurn: Rule(HOST, settlement.reads_settle, settlement.settle_turn),
    c.PostponeSettlement: Rule(HOST, settlement.reads_postpone, settlement.postpone_settlement),
    c.FileFact: Rule(HOST, operator.reads_file_fact, operator.file_fact),
    c.ClaimExecution: Rule(HOST, execution.reads_execution, execution.claim_execution),
    c.RecordOutcome: Rule(HOST, execution.reads_execution, execution.record_outcome),
    c.RecordObject: Rule(HOST, objects.reads_record_object, objects.record_object),
    c.SweepObjects: Rule(OPERATOR, objects.reads_sweep, objects.sweep_objects),
    c.ForgetObjects: Rule(OPERATOR, objects.reads_forget, objects.forget_objects),
    c.ReconcileTool: Rule(OPERATOR, operator.reads_reconcile, operator.reconcile_tool),
    c.ReleaseTurn: Rule(OPERATOR, operator.reads_release, operator.release_turn),
    c.RepairThread: Rule(OPERATOR, checkpoint.reads_repair, checkpoint.repair_thread),
    c.PutPolicy: Rule(OPERATOR, operator.reads_put_policy, operator.put_policy),
    c.PruneEvents: Rule(OPERATOR, pruning.reads_prune, pruning.prune_events),
    c.PruneCheckpoints: Rule(OPERATOR, positions.reads_prune_checkpoints, positions.prune_checkpoints),
    c.DropSession: Rule(OPERATOR, dropping.reads_drop, dropping.drop_session),
}
"""Every command there is."""
