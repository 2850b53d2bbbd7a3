"""Commands that let things go: Sessions are closed, then dropped; positions pruned, by age too; bodies swept."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec.structs import replace

from agentscope_durable.backend.sweep import STRANGERS_MAX
from agentscope_durable.cli.care import DAMAGE, OlderThan, seconds
from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import DEFAULT_STORE, Json, OneThread, Session, Store, Thread
from agentscope_durable.cli.output import cell, console, document, facts, indented, instant, note, tell
from agentscope_durable.cli.store import Opened, changed, looked, parse_session, spell
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, ThreadKey
from agentscope_durable.contracts.views import (
    CheckpointPruneReceipt,
    DropReceipt,
    RetainReport,
    SessionView,
    SweepReport,
    ThreadView,
)
from agentscope_durable.runtime.handles import PAGE_LIMIT

__all__ = ["add"]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")]


def close(session: Session, thread: OneThread = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Close a Session with all its Threads, or one Thread. What is stored can still be read."""

    async def send(there: Opened) -> SessionView | ThreadView:
        one = there.session(session)
        if thread is None:
            await one.close()
            return await one.view()
        await one.get_thread(thread).close()
        return await one.get_thread(thread).view()

    def show(screen: Console, view: SessionView | ThreadView) -> None:
        facts(screen, (("session", spell(view.session)), ("thread", thread), ("status", view.status)))

    tell(changed(store, send), as_json, show)


def drop(
    session: Session,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept with what was dropped.")] = "",
    dry_run: DryRun = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Drop a closed Session, all of it. There is no way back, and its name is not used again."""

    async def send(there: Opened) -> DropReceipt:
        return await there.operations.drop_session(parse_session(session), reason=reason, dry_run=dry_run)

    def show(screen: Console, receipt: DropReceipt) -> None:
        objects = f"{receipt.objects} ({receipt.object_bytes} bytes), left to the sweep"
        pairs = (
            ("session", spell(receipt.session)),
            ("dropped", instant(receipt.dropped_at_ms) or "not yet: this is what would go"),
            ("reason", receipt.reason),
            ("events", receipt.events),
            ("commits", receipt.commits),
            ("records", f"{receipt.records} ({receipt.record_bytes} bytes)"),
            ("large bodies", objects if receipt.objects else None),
        )
        facts(screen, pairs)

    tell((looked if dry_run else changed)(store, send), as_json, show)


def prune_checkpoints(
    session: Session,
    thread: Thread = MAIN_THREAD_ID,
    through: Annotated[
        str | None, typer.Option("--through", metavar="POSITION", help="The last position that goes.")
    ] = None,
    older_than: OlderThan = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Drop settled positions nobody is to come back to. The one the Thread stands on stays."""
    age = None if older_than is None else seconds(older_than)

    async def send(there: Opened) -> CheckpointPruneReceipt:
        key = ThreadKey(parse_session(session), thread)
        return await there.operations.prune_checkpoints(key, through=through, older_than=age)

    def show(screen: Console, receipt: CheckpointPruneReceipt) -> None:
        files = f"{receipt.versions} former versions of entries" if receipt.versions else None
        facts(screen, (("dropped", f"{receipt.positions} positions"), ("of the workspace", files)))

    tell(changed(store, send), as_json, show)


def retain(
    closed_older_than: Annotated[
        str | None,
        typer.Option("--closed-older-than", metavar="TIME", help="Drop Sessions closed so long ago: 30d."),
    ] = None,
    events_older_than: Annotated[
        str | None, typer.Option("--events-older-than", metavar="TIME", help="Prune events that are so old.")
    ] = None,
    checkpoints_older_than: Annotated[
        str | None, typer.Option("--checkpoints-older-than", metavar="TIME", help="Prune positions that are so old.")
    ] = None,
    dry_run: DryRun = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Let go of what is too old, in all Sessions. For cron: what is interrupted is gone on with the next time."""
    given = (
        ("closed_older_than", "--closed-older-than", closed_older_than),
        ("events_older_than", "--events-older-than", events_older_than),
        ("checkpoints_older_than", "--checkpoints-older-than", checkpoints_older_than),
    )
    ages: dict[str, Any] = {name: seconds(age, option) for name, option, age in given if age is not None}

    async def send(there: Opened) -> tuple[int, int, int, int, int]:
        cursor, looked_at, dropped, events, positions, damaged = None, 0, 0, 0, 0, 0
        while True:
            report = await there.operations.retain(**ages, cursor=cursor, limit=PAGE_LIMIT, dry_run=dry_run)
            _show_round(report, as_json, dry_run)
            looked_at, dropped = looked_at + report.looked, dropped + len(report.dropped)
            events, positions = events + report.events, positions + report.positions
            damaged += len(report.damaged)
            cursor = report.cursor
            if cursor is None:
                return looked_at, dropped, events, positions, damaged

    looked_at, dropped, events, positions, damaged = (looked if dry_run else changed)(store, send)
    if not as_json:
        pairs = (
            ("sessions looked at", looked_at),
            ("to be dropped" if dry_run else "dropped", f"{dropped} sessions"),
            ("events", f"{events} dropped" if events_older_than and not dry_run else None),
            ("positions", f"{positions} dropped" if checkpoints_older_than and not dry_run else None),
        )
        facts(console(), pairs)
    if damaged:
        raise typer.Exit(DAMAGE)


def _show_round(report: RetainReport, as_json: bool, dry_run: bool) -> None:
    if as_json:
        document(report)
        return
    for session in report.dropped:
        console().print(f"{'would drop' if dry_run else 'dropped'} {spell(session)}", markup=False)
    for session in report.damaged:
        note(f"passed over, because it is damaged: {spell(session)}. Run durable doctor")


def sweep(
    session: Annotated[str | None, typer.Option("--session", metavar="SESSION", help="Sweep this one only.")] = None,
    strangers: Annotated[
        bool, typer.Option("--strangers", help="Remove bodies that no record of this store knows, too.")
    ] = False,
    dry_run: DryRun = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Remove large bodies nobody refers to. Hosts may be running."""
    key = None if session is None else parse_session(session)

    async def all_of(there: Opened) -> SweepReport:
        report: SweepReport | None = None
        while report is None or report.cursor is not None:
            cursor = None if report is None else report.cursor
            page = await there.operations.sweep_objects(key, cursor=cursor, strangers=strangers, dry_run=dry_run)
            report = page if report is None else _together(report, page)
        return report

    def show(screen: Console, report: SweepReport) -> None:
        pairs = [
            ("looked at", f"{report.looked_at} bodies"),
            ("would go" if report.dry_run else "removed", f"{report.swept} bodies, {report.swept_bytes} bytes"),
            ("too young", f"{report.pending} that nobody refers to yet"),
        ]
        if report.strangers is not None:
            pairs.append(("strangers", f"{len(report.strangers) + report.more} that no record knows"))
        facts(screen, pairs)
        for stranger in report.strangers or ():
            screen.print(indented(cell(stranger), 3))

    tell(looked(store, all_of) if dry_run else changed(store, all_of), as_json, show)


def _together(report: SweepReport, page: SweepReport) -> SweepReport:
    listed = None if report.strangers is None else (*report.strangers, *(page.strangers or ()))
    room = None if listed is None else listed[:STRANGERS_MAX]
    return replace(
        page,
        looked_at=report.looked_at + page.looked_at,
        swept=report.swept + page.swept,
        swept_bytes=report.swept_bytes + page.swept_bytes,
        pending=report.pending + page.pending,
        strangers=room,
        more=report.more + page.more + (0 if listed is None or room is None else len(listed) - len(room)),
    )


def add(app: Any) -> None:
    for command in (close, drop, retain, sweep):
        app.command()(command)
    app.command("prune-checkpoints")(prune_checkpoints)
