"""What an application asks for: Sessions, Threads, Turns, and what is said to them."""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands.base import Command, Request
from agentscope_durable.contracts.records import Binding


class CreateSession(Command, frozen=True, tag="create_session"):
    """Make a Session and its main Thread, pinned to `binding`. Repeats are no change (AD-16)."""

    binding: Binding


class CreateThread(Command, frozen=True, tag="create_thread"):
    thread_id: str
    binding: Binding


class CloseSession(Command, frozen=True, tag="close_session"):
    pass


class CloseThread(Command, frozen=True, tag="close_thread"):
    thread_id: str


class SubmitTurn(Request, frozen=True, tag="submit"):
    """`content` is the JSON list of input blocks; `digest` that of the canonical input."""

    content: Body
    digest: str


class AddInput(Request, frozen=True, tag="input"):
    """Steer or inject: input for a Turn that is under way (`kind` is `steer` or `inject`)."""

    turn_id: str
    kind: str
    content: Body
    digest: str


class Withdraw(Request, frozen=True, tag="withdraw"):
    turn_id: str
    target_request_id: str


class Cancel(Request, frozen=True, tag="cancel"):
    turn_id: str


class Pause(Request, frozen=True, tag="pause"):
    turn_id: str


class Resume(Request, frozen=True, tag="resume"):
    turn_id: str
    expected_revision: int


class Respond(Request, frozen=True, tag="respond"):
    """Answer an interaction: JSON true or false to an approval, any JSON to a manual tool.

    `is_bool` and `approved` say what the response is, so that the decision need not read a body.
    `content` is the public form of the answer, a JSON list of content blocks; `result` is the
    answer as a ToolResult, used when a manual tool asked.

    Attributes:
        arguments: with an approval: what the call gets in the place of the model's arguments, as
            JSON text in a JSON string, like the model's; None approves them as they are.
        arguments_digest: of that JSON object; "" without.
    """

    turn_id: str
    interaction_id: str
    response: Body
    digest: str
    content: Body
    result: Body
    is_bool: bool
    approved: bool = False
    arguments: Body | None = None
    arguments_digest: str = ""


class Signal(Request, frozen=True, tag="signal"):
    turn_id: str
    key: str
    payload: Body
    digest: str


class TurnAdmitted(msgspec.Struct, frozen=True, rename="camel"):
    thread_id: str
    turn_id: str
    ordinal: int
