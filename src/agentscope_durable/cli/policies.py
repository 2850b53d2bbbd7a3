"""Commands about policy records: what a commit policy of the application reads in its transactions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from agentscope_durable.cli.controls import asked, json_value
from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import DEFAULT_STORE, LIMIT, Cursor, Json, Limit, RequestId, Session, Store
from agentscope_durable.cli.output import facts, instant, table, tell
from agentscope_durable.cli.store import Opened, looked, parse_session
from agentscope_durable.contracts.commands import PolicyReceipt
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.views import Page

__all__ = ["add"]

Key = Annotated[str, typer.Argument(metavar="KEY", help="Name of the policy record.", show_default=False)]


def policies(
    session: Session, store: Store = DEFAULT_STORE, cursor: Cursor = None, limit: Limit = LIMIT, as_json: Json = False
) -> None:
    """Policy records of a Session, and the request of each."""

    async def read(there: Opened) -> Page:
        return await there.operations.list_policies(parse_session(session), cursor, limit)

    def show(screen: Console, page: Page) -> None:
        rows = (
            (one.key, msgspec.json.encode(one.value).decode(), one.request_id, instant(one.put_at_ms)) for one in page
        )
        table(screen, ("KEY", "VALUE", "REQUEST", "WRITTEN"), rows, more=page.cursor)

    tell(looked(store, read), as_json, show)


def put_policy(
    session: Session,
    key: Key,
    value: Annotated[str | None, typer.Option("--value", metavar="JSON", help="What it says from now on.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the record.")] = False,
    request_id: RequestId = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Write or remove a policy record, true from then on."""
    if remove is (value is not None):
        raise InvalidRequest("say the value as JSON, or that the record goes", path="--value or --remove")
    document = None if value is None else json_value(value, "--value")

    async def send(there: Opened, name: str) -> PolicyReceipt:
        return await there.operations.put_policy(parse_session(session), key, document, request_id=name)

    def show(screen: Console, receipt: PolicyReceipt) -> None:
        pairs = (
            ("request", receipt.request_id),
            ("policy record", receipt.key),
            ("is", "removed" if receipt.removed else "written"),
            ("accepted", instant(receipt.accepted_at_ms)),
        )
        facts(screen, pairs)

    tell(asked(store, request_id, as_json, send), as_json, show)


def add(app: Any) -> None:
    app.command()(policies)
    app.command("put-policy")(put_policy)
