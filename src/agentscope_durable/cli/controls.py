"""Commands that control Turns: each is one request with an identity, admitted once however often it is repeated."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import (
    DEFAULT_STORE,
    Document,
    Input,
    InputFile,
    Json,
    RequestId,
    Session,
    Store,
    Thread,
    Turn,
)
from agentscope_durable.cli.output import facts, instant, note, tell
from agentscope_durable.cli.store import Opened, changed, draw_request_id
from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.durable_json import JsonValue
from agentscope_durable.contracts.errors import DurableError, InvalidRequest, TooLarge
from agentscope_durable.contracts.identity import MAIN_THREAD_ID
from agentscope_durable.contracts.ids import check_id
from agentscope_durable.contracts.messages import INPUT_BYTES_MAX
from agentscope_durable.contracts.views import CommandReceipt
from agentscope_durable.runtime.handles import DurableTurn, TurnInput
from agentscope_durable.spi.executor import Cancelled, Failed, Succeeded

__all__ = ["add", "asked", "json_value"]

T = TypeVar("T")


# ------------------------------------------------------------ the identity of a request


def asked(store: str, request_id: str | None, as_json: bool, work: Callable[[Opened, str], Awaitable[T]]) -> T:
    """Carry out one request. A drawn id is printed before it is sent: with it an unknown outcome can be asked again."""
    name = check_id("request_id", request_id) if request_id is not None else draw_request_id()

    async def send(there: Opened) -> T:
        if request_id is None and not as_json:
            note(f"request id: {name}")
        return await work(there, name)

    try:
        return changed(store, send)
    except DurableError as error:
        # For whoever reads the error as JSON.
        error.request = name
        raise


def _control(
    turn: str,
    store: str,
    request_id: str | None,
    as_json: bool,
    work: Callable[[DurableTurn, str], Awaitable[CommandReceipt]],
) -> None:
    async def send(there: Opened, name: str) -> CommandReceipt:
        return await work(await there.turn(turn), name)

    tell(asked(store, request_id, as_json, send), as_json, show_receipt)


def show_receipt(screen: Console, receipt: CommandReceipt) -> None:
    facts(
        screen,
        (
            ("admitted", receipt.operation),
            ("request", receipt.request_id),
            ("turn", receipt.turn_id),
            ("thread", receipt.thread_id),
            ("revision", receipt.revision),
            ("at", instant(receipt.accepted_at_ms)),
        ),
    )


# ------------------------------------------------------------ what is said


class Given(NamedTuple):
    """Where an input comes from: exactly one of an argument, standard input, a file."""

    text: str | None
    file: str | None
    document: bool

    def read(self) -> TurnInput:
        """The input.

        Raises:
            InvalidRequest: none or several were given, it is blank or no UTF-8, or no JSON object with `--document`.
            TooLarge: more than an input may have.
        """
        if (self.text is None) == (self.file is None):
            raise InvalidRequest("give the text as an argument, as - for standard input, or with --file", path="TEXT")
        if self.file is not None:
            text = _decoded(_file(self.file), self.file)
        elif self.text == "-":
            text = _decoded(sys.stdin.buffer.read(_BYTES_MAX + 1), "standard input")
        else:
            text = self.text or ""
        if not text.strip():
            # A pipe that broke, a variable that was not set: nobody means a task of no words.
            raise InvalidRequest("there is nothing to say", path="TEXT")
        if not self.document:
            return text
        value = durable_json.loads(text)
        if not isinstance(value, dict):
            raise InvalidRequest('an input document is an object: {"version": "1", "content": [...]}', path="$")
        return value


_BYTES_MAX: Final = INPUT_BYTES_MAX


def _file(name: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"{name!r} cannot be read: {reason}", path="--file") from error


def _decoded(content: bytes, where: str) -> str:
    """Text that came from outside: UTF-8, without the newline that ends a file."""
    if len(content) > _BYTES_MAX:
        raise TooLarge("input", size_bytes=len(content), limit_bytes=_BYTES_MAX)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8 (byte {error.start})", path="TEXT") from None
    return text.removesuffix("\n").removesuffix("\r")


def json_value(text: str, option: str) -> JsonValue:
    """The JSON of an option, strictly.

    Raises:
        InvalidRequest: it is none; names the option.
    """
    try:
        return durable_json.loads(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{option} takes JSON: {error.reason}", path=error.path) from None


def submit(
    session: Session,
    text: Input = None,
    file: InputFile = None,
    document: Document = False,
    thread: Thread = MAIN_THREAD_ID,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Submit a task. It is stored when this returns, and runs when a host takes it."""
    given = Given(text, file, document).read()

    async def send(there: Opened, name: str) -> dict[str, str | dict[str, str]]:
        handle = await there.session(session).get_thread(thread).submit(name, given)
        key = handle.thread_key
        return {
            "requestId": name,
            "session": {"namespace": key.session.namespace, "sessionId": key.session.session_id},
            "threadId": key.thread_id,
            "turnId": handle.turn_id,
        }

    def show(screen: Console, admitted: dict[str, Any]) -> None:
        pairs = (("turn", admitted["turnId"]), ("request", admitted["requestId"]), ("thread", admitted["threadId"]))
        facts(screen, pairs)

    tell(asked(store, request_id, as_json, send), as_json, show)


def steer(
    turn: Turn,
    text: Input = None,
    file: InputFile = None,
    document: Document = False,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Change the work under way. Read by the agent at its next boundary, even after a final answer."""
    given = Given(text, file, document).read()
    _control(turn, store, request_id, as_json, lambda handle, name: handle.steer(name, given))


def inject(
    turn: Turn,
    text: Input = None,
    file: InputFile = None,
    document: Document = False,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Add material to the work under way. It does not reopen a final answer."""
    given = Given(text, file, document).read()
    _control(turn, store, request_id, as_json, lambda handle, name: handle.inject(name, given))


def withdraw(
    turn: Turn,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request id of the steer or inject.")],
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Take back a steer or inject that was not read yet."""
    _control(turn, store, request_id, as_json, lambda handle, name: handle.withdraw(name, request))


# ------------------------------------------------------------ answers


def respond(
    turn: Turn,
    interaction: Annotated[str, typer.Argument(metavar="INTERACTION", help="As `durable interactions` shows it.")],
    approve: Annotated[bool, typer.Option("--approve", help="Answer an approval with yes.")] = False,
    deny: Annotated[bool, typer.Option("--deny", help="Answer an approval with no.")] = False,
    arguments: Annotated[
        str | None,
        typer.Option("--arguments", metavar="JSON", help="With --approve: these arguments instead of the model's."),
    ] = None,
    result: Annotated[
        str | None, typer.Option("--result", metavar="JSON", help="The result of a tool that somebody else performs.")
    ] = None,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Answer a question of a Turn."""
    if approve + deny + (result is not None) != 1:
        raise InvalidRequest("give one of --approve, --deny and --result", path="response")
    response: JsonValue = approve if result is None else json_value(result, "--result")
    changes: dict[str, JsonValue] | None = None
    if arguments is not None:
        given = json_value(arguments, "--arguments")
        if not isinstance(given, dict):
            raise InvalidRequest("--arguments takes a JSON object", path="arguments")
        changes = given
    _control(
        turn,
        store,
        request_id,
        as_json,
        lambda handle, name: handle.respond(name, interaction, response, arguments=changes),
    )


def signal(
    turn: Turn,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The signal's key; it begins with x.")],
    payload: Annotated[str, typer.Option("--payload", metavar="JSON", help="What it carries.")] = "null",
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Send a signal that a Turn waits for, or will wait for."""
    value = json_value(payload, "--payload")
    _control(turn, store, request_id, as_json, lambda handle, name: handle.signal(name, key, value))


# ------------------------------------------------------------ pause, resume, cancel


def pause(turn: Turn, request_id: RequestId = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Stop a Turn at its next boundary. Only the status PAUSED says that it has stopped."""
    _control(turn, store, request_id, as_json, lambda handle, name: handle.pause(name))


def resume(
    turn: Turn,
    revision: Annotated[
        int, typer.Option("--revision", metavar="N", help="The revision that was read while it was PAUSED.")
    ],
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Lift the pause that was seen. It goes on from where it is; see `restore` to go back, `fork` to branch off."""
    _control(turn, store, request_id, as_json, lambda handle, name: handle.resume(name, revision))


def cancel(turn: Turn, request_id: RequestId = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """End a Turn. At once if it never ran, else when its effects are settled."""
    _control(turn, store, request_id, as_json, lambda handle, name: handle.cancel(name))


# ------------------------------------------------------------ the operator's


def release(turn: Turn, request_id: RequestId = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Let a parked Turn run again. It was parked for a person to look at."""

    async def send(there: Opened, name: str) -> dict[str, str]:
        handle = await there.turn(turn)
        await there.operations.release(handle, request_id=name)
        return {"requestId": name, "operation": "release", "turnId": handle.turn_id}

    _say(asked(store, request_id, as_json, send), as_json)


def reconcile(
    turn: Turn,
    call: Annotated[str, typer.Argument(metavar="CALL", help="The call whose outcome is UNKNOWN.")],
    evidence: Annotated[
        str, typer.Option("--evidence", metavar="REFERENCE", help="Where it is on record what really happened.")
    ],
    succeeded: Annotated[str | None, typer.Option("--succeeded", metavar="JSON", help="It did; its result.")] = None,
    failed: Annotated[str | None, typer.Option("--failed", metavar="REASON", help="It did not, and why.")] = None,
    cancelled: Annotated[str | None, typer.Option("--cancelled", metavar="REASON", help="It was stopped.")] = None,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Settle a tool call whose outcome is UNKNOWN. Say what was found out about it."""
    if sum(given is not None for given in (succeeded, failed, cancelled)) != 1:
        raise InvalidRequest("give one of --succeeded, --failed and --cancelled", path="result")
    outcome: Succeeded | Failed | Cancelled
    if succeeded is not None:
        outcome = Succeeded(json_value(succeeded, "--succeeded"))
    elif failed is not None:
        outcome = Failed(failed)
    else:
        outcome = Cancelled(cancelled or "")

    async def send(there: Opened, name: str) -> Any:
        handle = await there.turn(turn)
        return await there.operations.reconcile_tool(
            handle, call, request_id=name, result=outcome, evidence_ref=evidence
        )

    def show(screen: Console, receipt: Any) -> None:
        pairs = (
            ("settled", f"call {receipt.call_id}, {receipt.state}"),
            ("request", receipt.request_id),
            ("turn", receipt.turn_id),
            ("evidence", receipt.evidence_ref),
        )
        facts(screen, pairs)

    tell(asked(store, request_id, as_json, send), as_json, show)


def _say(done: dict[str, str], as_json: bool) -> None:
    def show(screen: Console, done: dict[str, str]) -> None:
        facts(screen, (("done", done["operation"]), ("request", done["requestId"]), ("turn", done["turnId"])))

    tell(done, as_json, show)


def add(app: Any) -> None:
    for command in (
        submit, steer, inject, withdraw, respond, signal, pause, resume, cancel, release, reconcile,
    ):  # fmt: skip
        app.command()(command)
