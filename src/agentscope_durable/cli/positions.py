"""Commands about settled positions: where a Thread's context can be taken up again, and taking it up there.

`resume` lifts a pause, `restore` goes back, `fork` branches off, `repair` gives up a damaged Turn: four commands, so
that none can become another by an argument that was left out (C83).
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from agentscope_durable.cli.controls import asked
from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import DEFAULT_STORE, LIMIT, Json, Limit, RequestId, Session, Store, Thread, Turn
from agentscope_durable.cli.output import facts, instant, note, table, tell
from agentscope_durable.cli.store import Opened, looked, parse_session, spell
from agentscope_durable.contracts.commands import RepairReceipt
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, ThreadKey
from agentscope_durable.contracts.ids import check_id
from agentscope_durable.contracts.journal import STATE_VERSION
from agentscope_durable.contracts.views import BindingView, CheckpointPage, CheckpointView
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.checkpoint import CheckpointCodec

__all__ = ["add"]

T = TypeVar("T")

Position = Annotated[str, typer.Argument(metavar="POSITION", help="As `durable checkpoints` shows it.")]
Codec = Annotated[
    str | None,
    typer.Option("--codec", metavar="MODULE:NAME", help="Reads the native state of your own adapter, if you have one."),
]
EXPECTED = "Where the Thread stands, as `durable checkpoints` says; refused if it has moved on."


def checkpoints(
    session: Session,
    thread: Thread = MAIN_THREAD_ID,
    after: Annotated[str | None, typer.Option("--after", metavar="POSITION", help="Go on after this position.")] = None,
    limit: Limit = LIMIT,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Settled positions of a Thread. Its agent's context can be taken up again at each."""

    def show(screen: Console, page: CheckpointPage) -> None:
        def row(view: CheckpointView) -> tuple[object, ...]:
            here = "now" if view.position == page.current else None
            source = None if view.source is None else view.source.position
            return view.position, here, view.settled, view.turn_id, instant(view.created_at_ms), source

        table(screen, ("POSITION", "", "SETTLED", "TURN", "AT", "COPY OF"), map(row, page))
        if page.cursor is not None:
            note(f"more: --after {page.cursor}")

    tell(
        looked(store, lambda there: there.session(session).get_thread(thread).checkpoints(after, limit)), as_json, show
    )


def restore(
    session: Session,
    position: Position,
    expected: Annotated[str, typer.Option("--expected", metavar="POSITION", help=EXPECTED)],
    thread: Thread = MAIN_THREAD_ID,
    codec: Codec = None,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Give a Thread's agent the context of a former position. Effects of tools are not undone."""

    async def send(there: Opened, name: str) -> dict[str, Any]:
        key = there.session(session).get_thread(thread).key

        async def work(runtime: DurableRuntime, _: HostOperations) -> CheckpointView:
            return await runtime.get_session(key.session).get_thread(thread).restore(position, expected, name)

        made = await _with_codec(there, key, codec, work)
        return {"requestId": name, "operation": "restore", "checkpoint": made}

    tell(asked(store, request_id, as_json, send), as_json, _show_copy)


def fork(
    session: Session,
    position: Position,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The Session of the new Thread: namespace/id.")],
    target_thread: Annotated[str, typer.Argument(metavar="TARGET_THREAD", help="The new Thread.")],
    thread: Thread = MAIN_THREAD_ID,
    codec: Codec = None,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Begin another Thread with the context of a position. The source is only read."""
    wanted = ThreadKey(parse_session(target), check_id("thread_id", target_thread))

    async def send(there: Opened, name: str) -> dict[str, Any]:
        key = there.session(session).get_thread(thread).key

        async def work(runtime: DurableRuntime, _: HostOperations) -> CheckpointView:
            made = await runtime.get_session(key.session).get_thread(thread).fork(position, wanted, name)
            return (await made.checkpoints(limit=1)).items[0]

        made = await _with_codec(there, key, codec, work)
        return {"requestId": name, "operation": "fork", "checkpoint": made}

    tell(asked(store, request_id, as_json, send), as_json, _show_copy)


def repair(
    turn: Turn,
    position: Annotated[
        str | None,
        typer.Option(
            "--position", metavar="POSITION", help="Where its Thread goes on; without, the agent begins anew."
        ),
    ] = None,
    expected: Annotated[str | None, typer.Option("--expected", metavar="POSITION", help=EXPECTED)] = None,
    codec: Codec = None,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """End a Turn whose state is damaged. Its Thread goes on from a former position."""

    async def send(there: Opened, name: str) -> RepairReceipt:
        handle = await there.turn(turn)

        async def work(_: DurableRuntime, operations: HostOperations) -> RepairReceipt:
            return await operations.repair(handle, position, expected_position=expected, request_id=name)

        return await _with_codec(there, handle.thread_key, codec, work)

    def show(screen: Console, receipt: RepairReceipt) -> None:
        pairs = (
            ("ended", f"Turn {receipt.turn_id}, {receipt.status}"),
            ("request", receipt.request_id),
            ("thread at", receipt.position or "its beginning"),
        )
        facts(screen, pairs)

    tell(asked(store, request_id, as_json, send), as_json, show)


def _show_copy(screen: Console, done: dict[str, Any]) -> None:
    view: CheckpointView = done["checkpoint"]
    pairs = (
        (done["operation"], f"{spell(view.session)}, thread {view.thread_id}"),
        ("request", done["requestId"]),
        ("stands at", view.position),
        ("copy of", None if view.source is None else view.source.position),
    )
    facts(screen, pairs)


# ------------------------------------------------------------ who reads the native state


async def _with_codec(
    there: Opened,
    thread: ThreadKey,
    codec: str | None,
    work: Callable[[DurableRuntime, HostOperations], Awaitable[T]],
) -> T:
    """Do something for which the native state of a Thread must be read."""
    binding = (await there.runtime.get_session(thread.session).get_thread(thread.thread_id).view()).binding
    codecs = _codecs(binding, codec)
    async with DurableRuntime(backend=there.backend, checkpoints=codecs) as runtime:
        return await work(runtime, HostOperations(there.backend, checkpoints=codecs))


def _codecs(binding: BindingView, name: str | None) -> dict[str, CheckpointCodec]:
    if name is not None:
        return {binding.harness: _imported(name)}
    if binding.state_version == STATE_VERSION:
        from agentscope_durable.adapters.agentscope import AgentScopeCheckpoints

        return {binding.harness: AgentScopeCheckpoints.restore}
    reason = f"the native state {binding.state_version!r} of {binding.harness!r} is not one that this command can read"
    raise InvalidRequest(f"{reason}; name the codec of its adapter with --codec module:name", path="--codec")


def _imported(name: str) -> CheckpointCodec:
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
            return found
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"the codec {name!r} cannot be imported: {error}", path="--codec") from error
    raise InvalidRequest("a codec is named module:name", path="--codec")


def add(app: Any) -> None:
    for command in (checkpoints, restore, fork, repair):
        app.command()(command)
