"""Takes a Thread, does what there is to do with its Turn, and gives it back.

Rule 1: what a Run raises is a fact to record, not a reason to stop anything else.
Rule 2: cancel, pause, shutdown and a lost lease are four different things (C30). Why a Run stops is data; a
`CancelledError` says nothing about it.
Rule 3: a Thread this host owns is given back or known to be another's. Giving back is tried until one of the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from agentscope_durable.contracts.commands import (
    Claim,
    Claimed,
    ClaimPurpose,
    CommitStep,
    PostponeSettlement,
    RunEnd,
    RunEndKind,
    SettleTurn,
)
from agentscope_durable.contracts.errors import (
    CorruptRecord,
    DurableError,
    Fenced,
    InvalidTransition,
    Rejected,
    Retry,
    RevisionConflict,
    Unconfirmed,
)
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.messages import Input, Message
from agentscope_durable.contracts.questions import GetMessage, GetThread, GetTurn, OpenWork
from agentscope_durable.contracts.records import Binding, ExecutionRecord
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, ReplayRule
from agentscope_durable.contracts.views import RecoveryPolicy, ThreadView, TurnView
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import session_hint
from agentscope_durable.contracts import keys
from agentscope_durable.runtime.classify import failure_of, incompatible, retryable
from agentscope_durable.runtime.host import Host, log
from agentscope_durable.runtime.live_states import LiveStates
from agentscope_durable.runtime.run import LiveRun, load_journal
from agentscope_durable.runtime.tasks import Bell, Tasks, stop
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.spi.harness import (
    Abandoned,
    HarnessAdapter,
    JournalRow,
    OpenWorkView,
    RunStart,
    Settlement,
    SettleStart,
)
import msgspec
from typing import Any

WATCH_SPACING = 0.05
"""Seconds after a hint before a Run's Turn is looked at: a commit of its own may tell sooner."""
FENCED_SECONDS = 5.0
"""How long an adapter may take to end a Run that another host has taken over."""
GIVE_BACK_WAIT = 0.2
GIVE_BACK_WAIT_MAX = 10.0

RetryableFailure = Callable[[BaseException], bool | None]


class Runner:
    """Runs and settles Turns of the definitions it was given, by ready class."""

    def __init__(
        self,
        host: Host,
        harnesses: Mapping[str, HarnessAdapter],
        *,
        policy: RecoveryPolicy,
        retryable_failure: RetryableFailure | None,
        takeovers_max: int,
    ) -> None:
        self._host = host
        self._harnesses = harnesses
        self._policy = policy
        self._retryable_failure = retryable_failure
        self._takeovers_max = takeovers_max
        self._states = LiveStates()
        self._runs: set[LiveRun] = set()

    @property
    def served(self) -> tuple[str, ...]:
        return tuple(self._harnesses)

    def tell(self) -> None:
        """The host is closing: every Run looks at its `stop`."""
        for run in self._runs:
            run.tell()

    async def take(self, session: SessionKey, thread_id: str, *, dead: tuple[str, ...] = ()) -> bool:
        """Claim the Thread and see it through; False when there was nothing to take or nothing came of it.

        Raises:
            DurableError: the claim itself failed; nothing is owned.
        """
        claimed: Claimed = await self._host.execute(
            Claim(
                session=session,
                thread_id=thread_id,
                owner=self._host.owner,
                served=self.served,
                dead=dead,
                takeovers_max=self._takeovers_max,
            )
        )
        if claimed.purpose is ClaimPurpose.NOTHING:
            return bool(claimed.turn_id)
        thread = ThreadKey(session, thread_id)
        extra = {
            "session_id": session.session_id,
            "thread_id": thread_id,
            "turn_id": claimed.turn_id,
            "run_id": claimed.run_id,
        }
        if claimed.lost_run:
            log.info("turn %s taken over under fence %d", claimed.turn_id, claimed.fence, extra=extra)
        else:
            log.info("turn %s claimed under fence %d", claimed.turn_id, claimed.fence, extra=extra)
        if claimed.purpose is ClaimPurpose.SETTLE:
            return await self._settle(thread, claimed)
        return await self._run(thread, claimed)

    # ---- run ----

    async def _run(self, thread: ThreadKey, claimed: Claimed) -> bool:
        run = LiveRun(self._host, self._states, thread.session, thread.thread_id, claimed)
        self._runs.add(run)
        watchers = Tasks()
        served = True
        try:
            me = asyncio.current_task()
            assert me is not None
            watchers.start(self._watch(run, me), name=f"watch {claimed.run_id}")
            try:
                served = await self._invoke(run)
            except Abandoned:
                self._states.drop(thread)
            if not run.over and not run.fenced:
                await self._give_back(run)
        finally:
            run.over = True
            self._runs.discard(run)
            watchers.cancel()
            await watchers.wait()
        if run.settling and not run.fenced:
            after = replace(
                claimed, position=run.position, base_at=run.base_at, checkpoint_at=run.checkpoint_at, run_id=""
            )
            return await self._settle(thread, after)
        return served
