"""Takes a Thread, does what there is to do with its Turn, and gives it back.

Rule 1: what a Run raises is a fact to record, not a reason to stop anything else.
Rule 2: cancel, pause, shutdown and a lost lease are four different things (C30). Why a Run stops is data; a
`CancelledError` says nothing about it.
Rule 3: a Thread this host owns is given back, or known to be another's. Giving back is tried until one of the two.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import (
    Claim,
    Claimed,
    ClaimPurpose,
    PostponeSettlement,
    RunEnd,
    RunEndKind,
    SettleTurn,
)
from agentscope_durable.contracts.errors import (
    CorruptRecord,
    Fenced,
    HostClosed,
    Incompatible,
    InvalidTransition,
    Misuse,
    Rejected,
    RevisionConflict,
)
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.messages import Input
from agentscope_durable.contracts.questions import GetThread, GetTurn
from agentscope_durable.contracts.records import Binding, ExecutionRecord, Failure
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, ReplayRule
from agentscope_durable.contracts.views import RecoveryPolicy, ThreadView, TurnView
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import turn_hint
from agentscope_durable.runtime.admitted import Admitted
from agentscope_durable.runtime.classify import (
    RetryableFailure,
    corrupt,
    ends_the_program,
    failure_of,
    incompatible,
    retryable,
)
from agentscope_durable.runtime.definitions import Harnesses
from agentscope_durable.runtime.hints import ringing
from agentscope_durable.runtime.host import Delivery, Host, log
from agentscope_durable.runtime.live_states import LiveStates
from agentscope_durable.runtime.run import LiveRun, load_body, load_input, load_journal, load_open_work
from agentscope_durable.runtime.watch import Watch
from agentscope_durable.spi.boundary import unless_stopped
from agentscope_durable.spi.contained import contained
from agentscope_durable.spi.harness import Abandoned, HarnessAdapter, JournalRow, RunStart, Settlement, SettleStart

GIVE_BACK_WAIT = 0.2
GIVE_BACK_WAIT_MAX = 10.0
"""Seconds between two tries to give a Thread back: doubling from the first to the second."""

REFUSED_MAX = 64
"""Writers a host remembers that it cannot continue."""


class Took(StrEnum):
    """What came of an attempt to take a Thread."""

    WORK = "work"
    LAST = "last"
    """As work, and the Thread has nothing more to do now."""
    NOTHING = "nothing"
    """There was nothing to take; another host was faster, or it is not due."""
    NO_PROGRESS = "no progress"
    """It was taken and nothing came of it: not to be tried again at once."""


class _Dropped(NamedTuple):
    """The Run was thrown away at a boundary; the Thread is still this host's, under this fence."""

    fence: int


class Runner:
    """Runs and settles Turns of the definitions it was given.

    Args:
        harnesses: what this host can run.
        policy: recovery policy for Turns that have not failed before.
        takeovers_max: takeovers of one Turn without a new checkpoint after which a person must look.
        admitted: inputs that were admitted by this runtime.
    """

    def __init__(
        self,
        host: Host,
        harnesses: Harnesses,
        *,
        policy: RecoveryPolicy,
        retryable_failure: RetryableFailure | None,
        takeovers_max: int,
        admitted: Admitted,
    ) -> None:
        self._host = host
        self._admitted = admitted
        self._harnesses = harnesses
        self._policy = policy
        self._retryable_failure = retryable_failure
        self._takeovers_max = takeovers_max
        self._refused: dict[str, None] = {}
        self.on_refused: Callable[[], None] = lambda: None
        self._states = LiveStates()
        self._runs: set[LiveRun] = set()

    @property
    def harnesses(self) -> Harnesses:
        return self._harnesses

    @property
    def refused(self) -> tuple[str, ...]:
        """Writers whose state no harness of this host continues, as far as it has met them."""
        return tuple(self._refused)

    def _refuse(self, writer: str) -> None:
        while len(self._refused) >= REFUSED_MAX:
            self._refused.pop(next(iter(self._refused)))
        self._refused[writer] = None
        self.on_refused()

    def tell(self) -> None:
        """The host is closing: every Run looks at its `stop`."""
        for run in self._runs:
            run.tell()

    async def take(self, session: SessionKey, thread_id: str, *, dead: tuple[str, ...] = ()) -> Took:
        """Claim the Thread and see its Turn through.

        Raises:
            DurableError: the claim failed; nothing is owned, or a Run that was dropped still is: see `disown`.
        """
        took = await self._take(session, thread_id, dead=dead)
        while isinstance(took, _Dropped):
            took = await self._take(session, thread_id, dropped=took.fence)
        return took

    async def _take(
        self, session: SessionKey, thread_id: str, *, dead: tuple[str, ...] = (), dropped: int = 0
    ) -> Took | _Dropped:
        served = self._harnesses.served
        if self._harnesses.names:
            # Before the claim: what cannot be made here is never held here.
            binding = await self._binding(ThreadKey(session, thread_id))
            if await self._harnesses.find(binding) is None:
                return Took.NO_PROGRESS
            served = (binding.ready_class,)
        claimed: Claimed = await Delivery(self._host).send(
            Claim(
                session=session,
                thread_id=thread_id,
                owner=self._host.owner,
                served=served,
                dead=dead,
                takeovers_max=self._takeovers_max,
                refused=tuple(self._refused),
                dropped=dropped,
            )
        )
        if claimed.purpose is ClaimPurpose.NOTHING:
            return Took.WORK if claimed.turn_id else Took.NOTHING
        thread = ThreadKey(session, thread_id)
        log.info(
            "turn %s taken over under fence %d" if claimed.lost_run else "turn %s claimed under fence %d",
            claimed.turn_id,
            claimed.fence,
            extra={**_ids(thread, claimed), "lost_run_id": claimed.lost_run},
        )
        if claimed.purpose is ClaimPurpose.SETTLE:
            return await self._settle(thread, claimed)
        return await self._run(thread, claimed)

    async def disown(self, session: SessionKey, thread_id: str, turn_id: str) -> bool:
        """Give back a Thread that the store says is this host's and that it does not have in hand.

        False when it is still owned: the store could not be asked, or refused. Nothing needs this in good weather.
        """
        thread = ThreadKey(session, thread_id)
        view = await self._turn(thread, turn_id)
        if view.lease is None or view.lease.owner != self._host.owner:
            return True
        claimed = Claimed(
            purpose=ClaimPurpose.RUN,
            turn_id=turn_id,
            fence=view.lease.fence,
            run_id=ids.run_id(turn_id, view.runs),
            run_number=view.runs,
        )
        log.warning("turn %s is given back: it was owned and not in hand", turn_id, extra=_ids(thread, claimed))
        run = LiveRun(self._host, self._states, thread, claimed)
        try:
            await self._end(run, RunEnd(kind=RunEndKind.RELEASED))
        except Abandoned:
            # It may be owned for its settlement only.
            await self._postpone(thread, replace(claimed, run_id=""), None)
        return True

    # ---- run ----

    async def _run(self, thread: ThreadKey, claimed: Claimed) -> Took | _Dropped:
        run = LiveRun(self._host, self._states, thread, claimed)
        task = asyncio.current_task()
        assert task is not None
        watch = Watch(self._host, run, claimed.turn_id, give_up=task.cancel)
        hint = turn_hint(keys.partition(thread.session), claimed.turn_id)
        self._runs.add(run)
        served = True
        try:
            async with ringing(self._host.backend.wakeups(), frozenset({hint}), watch):
                # What was said between the claim and this is looked for.
                watch.ring()
                served = await self._invoke(run, thread, claimed)
        except Abandoned:
            self._states.drop(thread)
        finally:
            self._runs.discard(run)
            await watch.end()
            await run.landed()
            if not run.over and not run.fenced:
                self._give_back(run)
        if run.dropped:
            return _Dropped(claimed.fence)
        if run.ended is None:
            return Took.NO_PROGRESS
        log.info("turn %s: run %d %s", claimed.turn_id, claimed.run_number, run.ended, extra=run.ids)
        if run.ended is RunEndKind.CANCELLED:
            after = replace(
                claimed,
                position=run.position,
                base_at=run.base_at,
                checkpoint_at=run.checkpoint_at,
                run_id="",
                digest=run.digest,
            )
            return await self._settle(thread, after)
        # A Run that parks without having done anything must not be repeated at full speed.
        idle = run.commits == 0 and run.ended is RunEndKind.SUSPENDED
        if idle or not served:
            return Took.NO_PROGRESS
        return Took.LAST if run.last else Took.WORK

    async def _invoke(self, run: LiveRun, thread: ThreadKey, claimed: Claimed) -> bool:
        """Drive the adapter until the Run has ended. False: this host cannot serve the Turn.

        Raises:
            Abandoned: nothing more may be committed, or nothing could be.
        """
        adapter: HarnessAdapter | None = None
        task = asyncio.current_task()
        try:
            # What it begins with may be large and its store slow, and a resolver may take its time: none of it is
            # worth finishing for a Run that has to end (C23).
            begun = await unless_stopped(
                run, partial(self._begin, run, thread, claimed), name=f"begin {claimed.run_id}"
            )
            if isinstance(begun, RunEnd):
                await self._end(run, begun)
                return True
            adapter = begun
            while run.ended is None:
                end = await contained(adapter.run(run), name=f"run {claimed.run_id}")
                if end is not None and run.ended is None:
                    await self._end(run, end)
                elif run.ended is None:
                    raise Misuse("the adapter says that its last commit ended the run, and it did not")
            return True
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                # The host ends, or another host owns the Thread: said by the flags, not by this error.
                await run.landed()
                if not run.over and not run.fenced:
                    await self._end(run, RunEnd(kind=RunEndKind.RELEASED))
                raise
            return await self._failed(run, adapter, error)
        except Abandoned:
            raise
        except BaseException as error:
            if ends_the_program(error, task):
                raise
            # The one place where a failure becomes a record. A tool or library that calls sys.exit() would else end
            # every host that takes its Turn.
            return await self._failed(run, adapter, error)

    async def _begin(self, run: LiveRun, thread: ThreadKey, claimed: Claimed) -> HarnessAdapter:
        binding = claimed.binding
        adapter = await self._adapter(binding)
        if claimed.run_number > 1 and claimed.writer and not adapter.accepts_writer(claimed.writer):
            # A Turn in flight is continued by a version that reads its state (D21); this host is not the one.
            self._refuse(claimed.writer)
            raise Incompatible(
                f"turn {claimed.turn_id!r} in flight", required=claimed.writer, present=adapter.state_version
            )
        message_id = ids.input_message_id(claimed.turn_id)
        submitted = self._admitted.take(claimed.turn_id)
        if submitted is None:
            submitted = await load_input(self._host, thread, message_id, claimed.input_seq)
        run.begin(
            RunStart(
                session=thread.session,
                thread_id=thread.thread_id,
                turn_id=claimed.turn_id,
                run_id=claimed.run_id,
                fence=claimed.fence,
                binding=binding,
                request_id=claimed.request_id,
                input=submitted,
                input_message_id=message_id,
                number=claimed.run_number,
                resumed_from=claimed.resumed_from,
                reasoning=claimed.reasoning,
                attempt=claimed.attempt,
                position=claimed.position,
                base_at=claimed.base_at,
                checkpoint_at=claimed.checkpoint_at,
                takeover=claimed.lost_run != "",
            )
        )
        return adapter

    async def _failed(self, run: LiveRun, adapter: HarnessAdapter | None, error: BaseException) -> bool:
        """Record what an invocation raised (RC-06); False when it only says that another host must serve the Turn."""
        if run.over or run.fenced:
            # The Run had ended already: what is raised afterwards changes nothing.
            self._host.report(error, "an adapter raised after its run was over", **run.ids)
            return True
        self._states.drop(run.thread)
        cause = run.stop
        if cause is not None and cause.kind == "cancel":
            await self._end(run, RunEnd(kind=RunEndKind.CANCELLED))
            return True
        if cause is not None or incompatible(error):
            # A shutdown or a missing definition is no failure of the Turn (RC-18).
            self._host.report(error, "a run is given back", **run.ids)
            await self._end(run, RunEnd(kind=RunEndKind.RELEASED))
            return False
        failure = failure_of(error, retry=self._may_retry(adapter, error))
        if corrupt(error):
            # Stored bytes that do not decode are nobody's failure to retry and nothing to throw away (C61).
            log.error("turn %s waits for an operator: %s", run.ids["turn_id"], failure.message, extra=run.ids)
            operator = f"{failure.kind}: {failure.message}"
            await self._end(run, RunEnd(kind=RunEndKind.SUSPENDED, operator=operator))
            return True
        log.warning("turn %s: %s", run.ids["turn_id"], failure.kind, extra=run.ids)
        await self._end(run, RunEnd(kind=RunEndKind.FAILED, failure=failure, policy=self._policy))
        return True

    def _may_retry(self, adapter: HarnessAdapter | None, error: BaseException) -> bool:
        for ask in (self._retryable_failure, None if adapter is None else adapter.classify):
            if ask is None:
                continue
            try:
                answer = ask(error)
            except KeyboardInterrupt:
                raise
            except BaseException as defect:  # noqa: BLE001 - a broken classification leaves the default
                self._host.report(defect, "classifying a failure failed")
                continue
            if isinstance(answer, bool):
                return answer
            if answer is not None:
                # Not taken for a yes, and never stored.
                if inspect.iscoroutine(answer):
                    answer.close()
                wrong = Misuse(f"a classification of failures answers True, False or None, not {type(answer).__name__}")
                self._host.report(wrong, "classifying a failure failed")
        return retryable(error)

    async def _end(self, run: LiveRun, end: RunEnd) -> None:
        """Commit the end of a Run; where an earlier commit stands, after that one."""
        try:
            await run.end(end)
        except RevisionConflict:
            await run.end(end)

    def _give_back(self, run: LiveRun) -> None:
        """Release a Thread whose Run could not say its end. It does not hold a place of the host meanwhile."""
        self._host.tasks.start(self._release(run), name=f"give back {run.ids['run_id']}")

    async def _release(self, run: LiveRun) -> None:
        wait = GIVE_BACK_WAIT
        while True:
            try:
                await self._end(run, RunEnd(kind=RunEndKind.RELEASED))
                return
            except (Abandoned, HostClosed):
                if run.over or run.fenced or self._host.closing:
                    return
            except Exception as error:  # noqa: BLE001 - tried again until it is given back or the host ends
                self._host.report(error, "a thread cannot be given back yet", **run.ids)
                if self._host.closing:
                    return
            await self._host.environment.sleep(wait)
            wait = min(2 * wait, GIVE_BACK_WAIT_MAX)

    # ---- settle ----

    async def _settle(self, thread: ThreadKey, claimed: Claimed) -> Took:
        """End a cancelled or failed Turn if its effects are known, else leave it until they are."""
        extra = _ids(thread, claimed)
        try:
            failure = await self._try_settle(thread, claimed)
        except asyncio.CancelledError:
            await self._postpone(thread, claimed, None)
            raise
        except Abandoned:
            return Took.NOTHING
        if failure is None:
            log.info("turn %s settled", claimed.turn_id, extra=extra)
            return Took.WORK
        await self._postpone(thread, claimed, failure if failure.kind else None)
        log.info("turn %s is not settled yet", claimed.turn_id, extra=extra)
        return Took.WORK

    async def _try_settle(self, thread: ThreadKey, claimed: Claimed) -> Failure | None:
        """None when it is settled; a failure without a kind when an effect is not known yet."""
        task = asyncio.current_task()
        try:
            work = await load_open_work(self._host, thread, claimed.turn_id)
            if any(_unsettled(record) for record in work.executions):
                return _UNSETTLED
            binding = await self._binding(thread)
            adapter = await self._adapter(binding)
            view = await self._turn(thread, claimed.turn_id)
            start = SettleStart(
                session=thread.session,
                thread_id=thread.thread_id,
                turn_id=claimed.turn_id,
                binding=binding,
                cancelled=view.cancel_requested,
                position=claimed.position,
                base_at=claimed.base_at,
                checkpoint_at=claimed.checkpoint_at,
                executions=work.executions,
                input_message_id=ids.input_message_id(claimed.turn_id),
            )
            self._states.drop(thread)
            settling = adapter.settle(_Settling(self._host, thread, start, claimed.digest))
            settlement = await contained(settling, name=f"settle {claimed.turn_id}")
            command = SettleTurn(
                session=thread.session,
                thread_id=thread.thread_id,
                turn_id=claimed.turn_id,
                run_id="",
                fence=claimed.fence,
                expected_position=claimed.position,
                journal=settlement.journal,
                checkpoint=settlement.checkpoint,
                base=settlement.base,
                writer=settlement.writer,
                applied=settlement.applied,
            )
            delivery = Delivery(self._host)
            try:
                await delivery.send(command, **_ids(thread, claimed))
            except Fenced as error:
                if not delivery.unsure:
                    self._host.report(error, "a settlement continues on another host", **_ids(thread, claimed))
                    raise Abandoned from error
            except InvalidTransition:
                return _UNSETTLED
            await self._after(settlement, thread, claimed)
            return None
        except (Abandoned, asyncio.CancelledError):
            raise
        except BaseException as error:
            if ends_the_program(error, task):
                raise
            # A settlement that fails is tried again later (SE-11).
            self._host.report(error, "a settlement failed", **_ids(thread, claimed))
            return failure_of(error, retry=True)

    async def _after(self, settlement: Settlement, thread: ThreadKey, claimed: Claimed) -> None:
        """What an adapter does once its settlement stands; nothing of it can undo that."""
        if settlement.after is None:
            return
        try:
            await contained(settlement.after(), name=f"after {claimed.turn_id}")
        except Exception as error:  # noqa: BLE001 - the Turn has ended whatever this says
            self._host.report(error, "what follows a settlement failed", **_ids(thread, claimed))

    async def _postpone(self, thread: ThreadKey, claimed: Claimed, failure: Failure | None) -> None:
        command = PostponeSettlement(
            session=thread.session,
            thread_id=thread.thread_id,
            turn_id=claimed.turn_id,
            run_id="",
            fence=claimed.fence,
            failure=failure,
        )
        try:
            await Delivery(self._host).send(command, **_ids(thread, claimed))
        except Fenced:
            # Given back by a try whose answer was lost, or another host's by now.
            return
        except Rejected as error:
            self._host.report(error, "a settlement cannot be given back", **_ids(thread, claimed))

    # ---- what both read ----

    async def _adapter(self, binding: Binding) -> HarnessAdapter:
        """Raises Incompatible when what ran this definition when it was claimed cannot be made again."""
        adapter = await self._harnesses.made(binding)
        if adapter is None:
            name = f"definition {binding.harness!r}"
            raise Incompatible(name, required=binding.definition_version, present="no harness")
        return adapter

    async def _binding(self, thread: ThreadKey) -> Binding:
        view: ThreadView = await self._host.query(GetThread(session=thread.session, thread_id=thread.thread_id))
        found = view.binding
        return Binding(found.harness, found.definition_version, found.state_version)

    async def _turn(self, thread: ThreadKey, turn_id: str) -> TurnView:
        return await self._host.query(GetTurn(session=thread.session, thread_id=thread.thread_id, turn_id=turn_id))


_UNSETTLED = Failure(kind="", message="")


def _unsettled(record: ExecutionRecord) -> bool:
    """An effect that was started and whose outcome nobody knows (SE-02)."""
    if record.kind is ExecutionKind.MANUAL or (record.kind is ExecutionKind.LOCAL and record.rule is ReplayRule.SAFE):
        return False
    return record.state in (ExecutionState.INTENT, ExecutionState.RUNNING, ExecutionState.UNKNOWN)


def _ids(thread: ThreadKey, claimed: Claimed) -> dict[str, str]:
    return {
        "session_id": thread.session.session_id,
        "thread_id": thread.thread_id,
        "turn_id": claimed.turn_id,
        "run_id": claimed.run_id,
    }


class _Settling:
    """`SettleContext`."""

    def __init__(self, host: Host, thread: ThreadKey, start: SettleStart, digest: str) -> None:
        self._digest = digest
        self._host = host
        self._thread = thread
        self.start = start

    async def input(self) -> Input:
        # One that is damaged must not keep its Turn from ending: then there is nothing to say of it.
        try:
            return await load_input(self._host, self._thread, self.start.input_message_id)
        except CorruptRecord as error:
            self._host.report(error, "an input cannot be read", turn_id=self.start.turn_id)
            return Input()

    async def journal(self) -> list[JournalRow]:
        return await load_journal(self._host, self._thread, self.start.base_at, self.start.checkpoint_at, self._digest)

    async def open_body(self, body: Body) -> Any:
        return await load_body(self._host, self._thread, body)
