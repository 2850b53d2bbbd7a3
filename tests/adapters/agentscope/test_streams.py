"""What a stream shows of an AgentScope agent: text and arguments on their way, and then their facts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("agentscope")

from agentscope.middleware import MiddlewareBase
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.events import Committed, EventDelta, PreviewStarted, SessionStreamEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_model import Call, Text, by_round, rounds_so_far, scripted_model
from tests.runtime.conftest import SECONDS

KEY = SessionKey("app", "streams")
ARGUMENTS = '{"service": "exporter", "reason": "timeouts"}'
BOTH = frozenset(EventDeltaType)


class Loud(MiddlewareBase):
    """The application's own rewriting of what the model says."""

    async def on_model_call(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
        answer = await next_handler(**input_kwargs)

        async def chunks() -> AsyncIterator[Any]:
            async for chunk in answer:
                for block in chunk.content:
                    if block.type == "text":
                        block.text = block.text.upper()
                yield chunk

        return chunks()


def make_agent(_binding: Any) -> AgentBuilder:
    async def restart(service: str, reason: str) -> str:
        """Restart a service.

        Args:
            service: which.
            reason: why.
        """
        return f"{service} restarted"

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    script = by_round([Text("on it now"), Call("restart", ARGUMENTS, id="c1")], [Text("it is back")])
    return AgentBuilder(
        name="operator",
        system_prompt="You operate services.",
        model=scripted_model(script, chunk_chars=4),
        toolkit=Toolkit(tools=[FunctionTool(restart, permission=allowed)]),
        middlewares=[Loud()],
    )


@pytest.mark.spec("EV-09", "EV-02", "ST-03", "ST-21", "ST-23", "ST-28", "ST-25")
@pytest.mark.parametrize("wanted", [BOTH, {EventDeltaType.MESSAGE}, {EventDeltaType.TOOL_ARGUMENTS}, frozenset()])
async def test_text_and_arguments_are_shown_as_they_come_and_are_facts_when_they_are_there(
    tmp_path: Path, wanted: Any
) -> None:
    """The observer's backend is another one over the same folder, as in another process."""
    harness = Harness("operator", "v1", AgentScopeAdapter.for_react(make_agent))
    async with (
        LocalBackend.open(tmp_path, synchronous="NORMAL") as backend,
        LocalBackend.open(tmp_path, synchronous="NORMAL") as elsewhere,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=SECONDS) as runtime,
        DurableRuntime(backend=elsewhere, poll_interval=SECONDS) as api,
    ):
        await runtime.create_session(KEY, "operator")
        await runtime.start()
        session = api.get_session(KEY)
        items: list[SessionStreamEvent] = []
        async with session.stream_events(deltas=wanted) as events:
            turn = await session.submit("r1", "Restart the exporter")
            async for item in events:
                items.append(item)
                if isinstance(item, Committed) and _ends(item):
                    break

        previews = [item for item in items if isinstance(item, PreviewStarted | EventDelta)]
        assert {preview.kind for preview in previews} == {kind.value for kind in wanted}
        shown: dict[tuple[str, str], str] = {}
        for item in items:
            match item:
                case PreviewStarted(message_id=message, call_id=call):
                    assert (message, call or "") not in shown
                    shown[message, call or ""] = ""
                case EventDelta(message_id=message, call_id=call, offset=offset, text=text):
                    assert offset == len(shown[message, call or ""])
                    shown[message, call or ""] += text
                case Committed(event) if event.type == "message.completed" and event.data["role"] == "assistant":
                    text = "".join(block["text"] for block in event.data["content"])
                    if EventDeltaType.MESSAGE in wanted:
                        assert shown.pop((event.data["messageId"], "")) == text
                case Committed(event) if event.type == "tool.requested":
                    if EventDeltaType.TOOL_ARGUMENTS in wanted:
                        ((_, call),) = [key for key in shown if key[1]]
                        assert event.data["callId"] == call
                        assert shown.pop(next(key for key in shown if key[1])) == ARGUMENTS
                case _:
                    pass
        # Each was ended by its fact, and nothing came after that.
        assert shown == {}
        facts = [item.event for item in items if isinstance(item, Committed)]
        texts = ["Restart the exporter", "ON IT NOW", "IT IS BACK"]
        assert [message.text for message in await session.history()] == texts

        # None of it is anywhere but in that one stream.
        page = await session.list_events(None, 1000)
        assert list(page.events) == facts
        assert not {event.type for event in page.events} & {"message.delta", "tool.arguments.delta"}
        projection = EventProjection(KEY)
        for event in facts:
            projection.accept(event)
        assert projection.projection == (await session.snapshot()).projection
        assert b"ON I" not in msgspec.json.encode(page).replace(b"ON IT NOW", b"")
        async with session.stream_events(deltas=wanted) as again:
            assert [await anext(again) for _ in facts] == [Committed(event) for event in facts]
        assert (await turn.result()).text == "IT IS BACK"


def make_forgetful_agent(_binding: Any) -> AgentBuilder:
    """Its model begins anew with each answer: every call is its "c1"."""

    async def look(what: str) -> str:
        """Look.

        Args:
            what: at this.
        """
        return "seen"

    def script(messages: list[Any], _tools: Any, _choice: Any, _n: int) -> Any:
        said = max(i for i, message in enumerate(messages) if message.role == "user")
        number = rounds_so_far(messages[said:])
        return "seen enough" if number == 2 else [Call("look", f'{{"what": "room {number}"}}', id="c1")]

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    return AgentBuilder(
        name="guard",
        system_prompt="You look.",
        model=scripted_model(script, chunk_chars=4),
        toolkit=Toolkit(tools=[FunctionTool(look, permission=allowed)]),
    )


@pytest.mark.spec("ST-21", "ST-28", "PR-05")
async def test_arguments_on_their_way_have_the_id_of_their_call_although_the_model_repeats_its_ids(
    tmp_path: Path,
) -> None:
    harness = Harness("guard", "v1", AgentScopeAdapter.for_react(make_forgetful_agent))
    async with (
        LocalBackend.open(tmp_path, synchronous="NORMAL") as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=SECONDS) as runtime,
    ):
        session = await runtime.create_session(KEY, "guard")
        await runtime.start()
        shown: dict[tuple[str, str], str] = {}
        asked: dict[tuple[str, str], str] = {}
        async with session.stream_events(deltas={EventDeltaType.TOOL_ARGUMENTS}) as events:
            turns = [(await session.submit(f"r{number}", "Look")).turn_id for number in range(2)]
            ended = 0
            async for item in events:
                match item:
                    case EventDelta(turn_id=turn, call_id=call, offset=offset, text=text):
                        before = shown.setdefault((turn, call or ""), "")
                        assert ((turn, call) not in asked, offset) == (True, len(before))
                        shown[turn, call or ""] += text
                    case Committed(event) if event.type == "tool.requested":
                        asked[event.turn_id or "", event.data["callId"]] = event.data["arguments"]
                    case Committed() if _ends(item):
                        ended += 1
                        if ended == len(turns):
                            break
                    case _:
                        pass

    rooms = [(turn, f'{{"what": "room {number}"}}') for turn in turns for number in range(2)]
    assert [(turn, arguments) for (turn, _), arguments in asked.items()] == rooms
    assert shown == asked


def _ends(item: Committed) -> bool:
    return item.event.type == "turn.status" and item.event.data["turn"]["status"] == "COMPLETED"
