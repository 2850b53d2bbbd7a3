"""Commands that care for a store: whether it is sound, which events go, and giving back the room they took."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import DEFAULT_STORE, Json, Session, Store
from agentscope_durable.cli.output import cell, facts, indented, table, tell
from agentscope_durable.cli.store import Opened, changed, looked, parse_session
from agentscope_durable.cli.turns import typed
from agentscope_durable.contracts.errors import CorruptRecord, InvalidRequest
from agentscope_durable.contracts.events import sequence_of
from agentscope_durable.contracts.examination import Examination
from agentscope_durable.contracts.status import Severity
from agentscope_durable.contracts.views import PruneReceipt, VacuumReceipt

__all__ = ["OlderThan", "add", "seconds"]

OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="TIME", help="Only what is so old: 90s, 30min, 12h, 7d.")
]

TROUBLE: Final = 1
"""Exit code of `doctor` when nothing is damaged and somebody has to do something."""
DAMAGE: Final = CorruptRecord.exit_code

_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|min|h|d)?")
_SECONDS: Final = {None: 1, "s": 1, "min": 60, "h": 3600, "d": 86_400}


def doctor(
    session: Annotated[str | None, typer.Option("--session", metavar="SESSION", help="Look at this one only.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every commit, record and body, too.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Whether the store is sound. Exit code 0 sound, 1 somebody has to do something, 10 something is damaged."""
    key = None if session is None else parse_session(session)

    async def read(there: Opened) -> Examination:
        return await there.operations.doctor(deep=deep, session=key)

    found = looked(store, read)
    tell(found, as_json, lambda screen, found: _show_examination(screen, found, store))
    if not found.sound:
        raise typer.Exit(DAMAGE if _damaged(found) else TROUBLE)


def _damaged(found: Examination) -> bool:
    return any(finding.severity is Severity.DAMAGE for finding in found.findings)


def _show_examination(screen: Console, found: Examination, store: str) -> None:
    if found.store:
        facts(screen, found.store.items())
        screen.print()
    rows = ((check.name, _result(check), check.looked_at or None, check.about) for check in found.checks)
    table(screen, ("CHECK", "RESULT", "LOOKED AT", "WHAT"), rows)
    for finding in found.findings:
        screen.print()
        screen.print(cell(f"{finding.severity.upper()}: {finding.subject}: {finding.problem}"), style="bold")
        screen.print(indented(cell(finding.next_action), 3))
        for command in finding.commands:
            screen.print(indented(cell(typed(command, store)), 5), style="cyan")
    if found.more:
        screen.print(f"and {found.more} findings more")
    screen.print()
    if found.sound:
        verdict = "The store is sound."
    elif _damaged(found):
        verdict = "The store is DAMAGED."
    else:
        verdict = "No damage was found, and somebody has to do something."
    screen.print(verdict, style="bold")


def _result(check: Any) -> str:
    if check.skipped is not None:
        return f"not made: {check.skipped}"
    return "ok" if not check.findings else f"{check.findings} found"


def prune(
    session: Session,
    through: Annotated[
        str | None, typer.Option("--through", metavar="CURSOR", help="The last event that goes, by its cursor.")
    ] = None,
    older_than: OlderThan = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Drop events that nobody is to replay any more. History, results and checkpoints stay."""
    age = None if older_than is None else seconds(older_than)

    async def send(there: Opened) -> PruneReceipt:
        return await there.operations.prune_events(parse_session(session), through=through, older_than=age)

    def show(screen: Console, receipt: PruneReceipt) -> None:
        through = sequence_of(parse_session(session), receipt.cursor)
        replay = f"begins after #{through}; the others up to there stay for snapshots"
        pairs = (
            ("dropped", f"{receipt.dropped} events"),
            ("replay", replay if through else "begins at the first event"),
            ("oldest cursor", receipt.cursor),
        )
        facts(screen, pairs)

    tell(changed(store, send), as_json, show)


def seconds(time: str, option: str = "--older-than") -> float:
    """The time that an option names."""
    found = _TIME.fullmatch(time.strip())
    if found is None:
        raise InvalidRequest("a time is a number with s, min, h or d, as in 7d", path=option)
    return float(found[1]) * _SECONDS[found[2]]


def vacuum(store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Rewrite the file without its unused room. Refused while a host is alive."""

    def show(screen: Console, receipt: VacuumReceipt) -> None:
        pairs = (("before", f"{receipt.before_bytes} bytes"), ("after", f"{receipt.after_bytes} bytes"))
        facts(screen, pairs)

    async def send(there: Opened) -> VacuumReceipt:
        if not isinstance(there.backend, LocalBackend):
            raise InvalidRequest("PostgreSQL gives the room back by itself; only a folder is rewritten", path="--store")
        return await there.backend.vacuum()

    tell(changed(store, send), as_json, show)


def add(app: Any) -> None:
    for command in (doctor, prune, vacuum):
        app.command()(command)
