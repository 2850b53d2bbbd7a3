"""Text and numbers in every awkward shape, through each store and back, exactly (C63, C64, C65)."""

from __future__ import annotations

from typing import Any

import pytest

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import ID_CHARS_MAX
from agentscope_durable.testing.scripted_harness import final, local
from tests.runtime.conftest import Hosts, all_events

NESTED: Any = "the innermost"
for _ in range(100):
    NESTED = [NESTED]

TEXTS = {
    "nul": "a\x00b",
    "last of the plane": "\uffff\ufffe",
    "four bytes": "\U0001f469\u200d\U0001f680 \U0010ffff",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd\u202c",
    "quotes": "\"'\\\n\r\t\u2028",
    "empty": "",
}
VALUES: dict[str, Any] = {
    **TEXTS,
    **{text: name for name, text in TEXTS.items()},
    "largest": 2**53 - 1,
    "smallest": -(2**53 - 1),
    "minus zero": -0.0,
    "tiny": 5e-324,
    "huge": 1.7976931348623157e308,
    "nested": NESTED,
    "digits": "9" * 60,
    "empties": [{}, [], "", None, False],
}


def same(left: object, right: object) -> bool:
    """Equal to the last bit: 1 is not 1.0, and -0.0 is not 0.0."""
    return repr(left) == repr(right)


@pytest.mark.case("C63", "C64", "C65")
async def test_what_went_in_comes_out_exactly(hosts: Hosts) -> None:
    key = SessionKey("\U0001f4a5/..%2F", "e\u0301" + "\U0010ffff" * (ID_CHARS_MAX - 2))
    runtime = await hosts.open([local("look", value=VALUES, given=VALUES), final("{results}")])
    session = await runtime.create_session(key, "agent")
    said = "".join(TEXTS.values())
    turn = await session.submit("\u00e9", said)
    other = await session.submit("e\u0301", said)
    await other.wait()

    assert turn.turn_id != other.turn_id, "two ways to write a letter are two request ids"
    assert [str(message) for message in (await turn.history()).items if message.role == "user"] == [said]
    (tool,) = await turn.list_tools()
    assert same(tool.result["value"], VALUES)
    told = [event for event in await all_events(session) if event.type == "tool.completed"]
    assert len(told) == 2
    assert all(same(event.data["result"]["value"], VALUES) for event in told)
    shown = (await session.snapshot()).projection.tools.values()
    assert len(shown) == 2 and all(same(one.result["value"], VALUES) for one in shown)


@pytest.mark.case("C63", "C87")
@pytest.mark.parametrize(
    "spoilt", ["", "x" * (ID_CHARS_MAX + 1), "a\x00b", "\ud800", "\x7f"], ids=["empty", "long", "nul", "half", "delete"]
)
async def test_an_id_that_is_none_changes_nothing(hosts: Hosts, spoilt: str) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(SessionKey("app", "one"), "agent")
    before = await session.snapshot()

    with pytest.raises(InvalidRequest):
        await session.submit(spoilt, "go")
    with pytest.raises(InvalidRequest):
        await runtime.create_session(SessionKey("app", spoilt), "agent")
    with pytest.raises(InvalidRequest):
        await session.submit("r1", "half of a pair: \ud83d")
    assert await session.snapshot() == before
