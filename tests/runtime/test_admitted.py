"""A host that admits a Turn and runs it does not read its input back, and nobody can tell the difference."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentscope_durable.contracts.bodies import Body, body_of
from agentscope_durable.contracts.messages import Audio, Base64, Image, Input, Text, Url, as_input, input_digest_value
from agentscope_durable.contracts.questions import GetMessage
from agentscope_durable.runtime import admitted as module
from agentscope_durable.runtime.admitted import Admitted
from agentscope_durable.runtime.runtime import Harness
from agentscope_durable.runtime.turn import content_blocks
from agentscope_durable.spi.harness import RunContext
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.runtime.conftest import KEY, SECONDS, Hosts
from tests.runtime.test_feeds import Counted

INPUTS = [
    Input(content=[Text("one word")]),
    Input(content=[Text(" \u2028 \U0001f600 'quoted' \\ \x7f"), Text("")]),
    Input(
        content=[
            Image(Url("https://example.com/a?b=c#d", "image/png")),
            Audio(Base64("AAAA", "audio/wav")),
            Text("look"),
        ]
    ),
]


class Heard(ScriptedHarness):
    """Notes what each Run begins with."""

    def __init__(self) -> None:
        super().__init__([final("ok")])
        self.inputs: list[Input] = []

    async def run(self, context: RunContext) -> Any:
        self.inputs.append(context.start.input)
        return await super().run(context)


@pytest.mark.parametrize("given", INPUTS, ids=["text", "awkward text", "media"])
async def test_a_run_begins_with_the_same_input_whoever_admitted_it(hosts: Hosts, given: Input) -> None:
    counted = Counted(hosts.backend)
    harness = Heard()
    brain = await hosts.open(backend=counted, harnesses=[Harness("agent", "v1", harness)])
    session = await brain.create_session(KEY, "agent")
    await (await session.submit("r1", given)).wait(SECONDS)
    assert counted.asked["GetMessage"] == 0

    api = await hosts.open()
    await (await api.get_session(KEY).submit("r2", given)).wait(SECONDS)
    assert counted.asked["GetMessage"] == harness.inputs.count(harness.inputs[0]) - 1 > 0
    assert harness.inputs[0] == harness.inputs[-1]
    assert type(harness.inputs[0].content) is type(harness.inputs[-1].content)


async def test_what_is_kept_was_stored_and_is_given_once(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    runtime = await hosts.open([final()], backend=counted, start=False)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    kept = runtime._door.admitted
    stored = await hosts.backend.query(GetMessage(session=KEY, message_id=f"{turn.turn_id}.input"))

    assert kept.take(turn.turn_id) == Input(content=stored.content)
    assert kept.take(turn.turn_id) is None


def body(given: Input) -> Body:
    return body_of(content_blocks(input_digest_value(as_input(given))))


def test_the_newest_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_MAX", 10 * (module.ENTRY_BYTES + 100))
    kept = Admitted()
    for number in range(100):
        kept.keep(f"t{number}", body(Input(content=[Text(f"{number}" + "x" * 60)])))

    found = [number for number in range(100) if kept.take(f"t{number}") is not None]
    assert found == list(range(90, 100))
    kept.keep("t", body(Input(content=[Text("x" * 100_000)])))
    assert kept.take("t") is None


def test_a_body_that_is_an_object_is_left_where_it_is() -> None:
    kept = Admitted()
    kept.keep("t", Body(name="0" * 64 + "-" + "0" * 16, size=100_000))
    kept.keep("u", Body(inline=msgspec.Raw(b'[{"type":"text","text":"a"}]')))

    assert kept.take("t") is None
    assert kept.take("u") == Input(content=[Text("a")])
