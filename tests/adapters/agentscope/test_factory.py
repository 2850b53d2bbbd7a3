"""What a new user gets wrong about a factory is said where it is given, and is not tried again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.tool import Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter, Binding, RuntimeContext, ToolBinding
from agentscope_durable.adapters.agentscope.binding import Factory
from agentscope_durable.adapters.agentscope.classify import classify_error
from agentscope_durable.contracts import records
from agentscope_durable.contracts.errors import AgentFactoryError, InvalidRequest, Misuse, NotFound, Unavailable
from agentscope_durable.testing.scripted_model import scripted_model

PLACE = RuntimeContext(user_id="u", session_id="s", thread_id="main", turn_id="t", run_id="r")
BINDING = Binding(records.Binding("assistant", "v1", "state"), PLACE)


def model() -> Any:
    return scripted_model(["hello"])


async def describe(factory: Any) -> AgentBuilder:
    return await Factory(factory, harness=False).describe(BINDING, agent_name="")


def raises(_binding: Binding) -> AgentBuilder:
    raise KeyError("MODEL_KEY")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda _binding: None, "NoneType instead of an AgentBuilder"),
        (lambda: AgentBuilder(name="a", system_prompt="", model=model()), "positional argument"),
        (raises, "KeyError: 'MODEL_KEY'"),
        (lambda _binding: AgentBuilder(name="a", system_promt="", model=model()), "no argument 'system_promt'"),
        (lambda _binding: AgentBuilder(name="a", system_prompt=""), "needs model="),
        (lambda _binding: AgentBuilder(name="a", system_prompt="", model="gpt-5"), "takes a ChatModelBase, not a str"),
        (lambda _binding: AgentBuilder(name="a", system_prompt="", model=model(), toolkit=[]), "takes a Toolkit"),
    ],
)
async def test_a_wrong_factory_is_told_what_is_wrong(factory: Any, said: str) -> None:
    with pytest.raises(AgentFactoryError, match="assistant") as caught:
        await describe(factory)

    assert said in str(caught.value)
    assert classify_error(caught.value) is False


async def test_a_right_one_is_taken_as_it_is() -> None:
    built = AgentBuilder(name="a", system_prompt="", model=model(), toolkit=Toolkit())

    assert await describe(lambda _binding: built) is built


async def test_a_factory_that_could_not_reach_something_may_be_asked_again() -> None:
    def unreachable(_binding: Binding) -> AgentBuilder:
        raise ConnectionRefusedError("no registry")

    with pytest.raises(AgentFactoryError) as caught:
        await describe(unreachable)

    assert classify_error(caught.value) is True


@pytest.mark.parametrize(
    "error", [Unavailable("x"), Misuse("x"), NotFound("turn", "t")], ids=lambda e: type(e).__name__
)
def test_the_http_status_of_our_own_errors_says_nothing_about_a_provider(error: Exception) -> None:
    assert classify_error(error) is None


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"factory": AgentBuilder(name="a")}, "factory"),
        ({"bindings": "hands"}, "bindings"),
        ({"bindings": ["restart"]}, "bindings"),
        ({"bindings": {"restart": 1}}, "bindings.restart"),
        ({"bindings": {"restart": ToolBinding("stop", "hands")}}, "bindings.restart"),
        ({"replay_rules": {"restart": "always"}}, "replay_rules.restart"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AgentScopeAdapter.for_react(**{"factory": describe, **arguments})

    assert caught.value.path == path


@pytest.mark.parametrize("make", [AgentScopeAdapter.for_react, AgentScopeAdapter.for_harness])
def test_an_option_that_there_is_not_is_refused_by_name(make: Any) -> None:
    with pytest.raises(TypeError, match="no option 'reply_rules'"):
        make(describe, reply_rules={})
