"""Commands that read Sessions and Threads: what there is, what was said, what happened."""

from __future__ import annotations

from typing import Annotated, Any

from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import DEFAULT_STORE, LIMIT, Cursor, Json, Limit, OneThread, Session, Store, Target
from agentscope_durable.cli.output import block, cell, facts, instant, note, table, tell
from agentscope_durable.cli.store import Opened, looked, spell
from agentscope_durable.contracts.messages import Message, Text
from agentscope_durable.contracts.questions import GetHistory
from agentscope_durable.contracts.views import BindingView, Page, SessionView, ThreadView
from agentscope_durable.runtime.handles import DurableTurn

__all__ = ["add", "definition"]

NAMESPACE = typer.Option("--namespace", metavar="NAME", help="Only this namespace.")


def sessions(
    store: Store = DEFAULT_STORE,
    namespace: Annotated[str | None, NAMESPACE] = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
    as_json: Json = False,
) -> None:
    """Sessions, in the order of their names."""

    async def read(there: Opened) -> Page:
        if namespace is None:
            return await there.operations.list_sessions(cursor, limit)
        return await there.runtime.list_sessions(namespace, cursor, limit)

    def show(screen: Console, page: Page) -> None:
        rows = ((spell(one.session), one.status, instant(one.created_at_ms)) for one in page)
        table(screen, ("SESSION", "STATUS", "CREATED"), rows, more=page.cursor)

    tell(looked(store, read), as_json, show)


def session(session: Session, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """One Session."""

    def show(screen: Console, view: SessionView) -> None:
        pairs = (("session", spell(view.session)), ("status", view.status), ("created", instant(view.created_at_ms)))
        facts(screen, pairs)

    tell(looked(store, lambda there: there.session(session).view()), as_json, show)


def threads(
    session: Session, store: Store = DEFAULT_STORE, cursor: Cursor = None, limit: Limit = LIMIT, as_json: Json = False
) -> None:
    """Threads of a Session, each with the definition it has."""

    def show(screen: Console, page: Page) -> None:
        def row(view: ThreadView) -> tuple[object, ...]:
            return (
                view.thread_id,
                view.status,
                definition(view.binding),
                view.binding.state_version,
                view.current_turn_id,
            )

        table(screen, ("THREAD", "STATUS", "DEFINITION", "STATE", "CURRENT TURN"), map(row, page), more=page.cursor)

    tell(looked(store, lambda there: there.session(session).list_threads(cursor, limit)), as_json, show)


def history(
    target: Target,
    store: Store = DEFAULT_STORE,
    thread: OneThread = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
    as_json: Json = False,
) -> None:
    """What was said in a Session, a Thread or a Turn."""

    async def read(there: Opened) -> Page:
        where = await there.target(target)
        if isinstance(where, DurableTurn):
            return await where.history(cursor, limit)
        if thread is not None:
            return await where.get_thread(thread).history(cursor, limit)
        # Of all Threads; `where.history()` is the main one's.
        return await there.backend.query(GetHistory(session=where.key, cursor=cursor, limit=limit))

    tell(looked(store, read), as_json, show_history)


def show_history(screen: Console, page: Page) -> None:
    for message in page:
        screen.print(cell(_said_by(message)), style="bold")
        screen.print(block(_words(message)))
        screen.print()
    if page.cursor is not None:
        note(f"more: --cursor {page.cursor}")


def _said_by(message: Message) -> str:
    marks = [name for name in ("incomplete", "withdrawn", "expired") if getattr(message, name)]
    origin = "" if message.request_id is None else f", request {message.request_id}"
    kind = "" if message.input_kind in (None, "submit") else f" ({message.input_kind})"
    flags = f" [{', '.join(marks)}]" if marks else ""
    return f"{message.role}{kind}, {instant(message.created_at_ms)}{origin}{flags}"


def _words(message: Message) -> str:
    return "\n".join(
        part.text if isinstance(part, Text) else f"[{type(part).__name__.lower()}]" for part in message.content
    )


def definition(binding: BindingView) -> str:
    return f"{binding.harness}@{binding.definition_version}"


def add(app: Any) -> None:
    for command in (sessions, session, threads, history):
        app.command()(command)
