"""The agent of the demonstration: it looks into an incident and fixes it.

An ordinary AgentScope agent. Nothing in this file knows about crashes, and nothing has to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentscope_durable import SessionKey
from agentscope_durable.testing.endpoint import endpoint_model
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import (
    MODEL_REQUEST,
    Answer,
    Call,
    Text,
    rounds_so_far,
    scripted_model,
)

KEY = SessionKey("demo", "incident-1")
DEFINITION = "responder"
VERSION = "v1"
ROUTE = "hands"
AGENT = "responder"

QUESTION = "Checkout has been failing for customers since 09:40. Find out why and fix it."
STEER = "The database team asks: leave the database alone."

SYSTEM_PROMPT = (
    "You are on call. First read the metrics of the failing service, then collect one trace of it, then roll back the "
    "deploy that caused the trouble, once. At the end tell people what happened and what you did, in three sentences."
)

NUMBERS = "I look at the numbers first."
SUSPICION = (
    "Errors rose from 0.1 % to 38 % at 09:40, one minute after deploy 4182 went out. The database answers as fast as "
    "yesterday and memory is flat, so I do not believe in a shortage. One complete trace of a failing request will "
    "tell which call breaks, and whether it is the new code."
)
REMEDY = "Every failing request dies in the new currency rounding of deploy 4182. I ask to roll it back."
ANSWER = "Checkout works again. Deploy 4182 broke the rounding of currencies; I have rolled it back."

EFFECT = "effect"
"""Ledger name of something that happened in the world outside."""


# ------------------------------------------------------------ what it can do


def read_metrics(service: str) -> str:
    """Read the error rate and latency of a service.

    Args:
        service: name of the service.
    """
    return f"{service}: errors 38 % since 09:40, before that 0.1 %; p99 210 ms; last deploy 4182 at 09:39"


def roll_back(ledger: EffectLedger) -> Callable[..., str]:
    def roll_back(deploy: str) -> str:
        """Roll a deploy back to the one before it.

        Args:
            deploy: number of the deploy.
        """
        ledger.append(EFFECT, tool="roll_back", deploy=deploy)
        return f"deploy {deploy} is rolled back; errors are at 0.1 %"

    return roll_back


def collect_trace(service: str) -> str:
    """Record one complete trace of a failing request.

    Args:
        service: name of the service.
    """
    raise NotImplementedError("it runs outside the agent: see executor_functions")


def executor_functions(ledger: EffectLedger, *, pause: float) -> dict[str, Callable[..., Any]]:
    """Tools that run outside the agent's loop, by name."""

    async def trace(service: str) -> str:
        import asyncio

        ledger.append(EFFECT, tool="collect_trace", service=service)
        await asyncio.sleep(pause)
        return f"{service}: POST /pay -> rounding.to_minor_units(): KeyError 'CLF' (new in deploy 4182)"

    return {"collect_trace": trace}


# ------------------------------------------------------------ what it thinks with


def script(messages: list[Any], _tools: Any, _choice: Any, _n: int) -> Answer:
    """What a good model would say: it follows the conversation, so a request that is repeated gets the same answer."""
    steered = any(STEER in _text_of(message) for message in messages)
    answers: list[Answer] = [
        [NUMBERS, Call("read_metrics", {"service": "checkout"})],
        [SUSPICION, Call("collect_trace", {"service": "checkout"})],
        [REMEDY, Call("roll_back", {"deploy": "4182"})],
        Text(f"{ANSWER} The database was not touched, as asked." if steered else ANSWER),
    ]
    return answers[min(rounds_so_far(messages), len(answers) - 1)]


def _text_of(message: Any) -> str:
    return str(message.get("content")) if isinstance(message, dict) else str(message.get_text_content())


def make_model(ledger: EffectLedger, *, delay: float) -> Any:
    """The endpoint that the environment names, else a model that plays its part in the script."""
    import httpx

    async def count(request: httpx.Request) -> None:
        if request.method == "POST":
            ledger.append(MODEL_REQUEST, model=os.environ["DURABLE_MODEL"])

    def client() -> httpx.AsyncClient:
        return httpx.AsyncClient(event_hooks={"request": [count]}, timeout=120)

    model = endpoint_model(http_client=client)
    return model or scripted_model(script, ledger=ledger, delay=delay, model="scripted")


def make_agent(ledger: EffectLedger, *, delay: float) -> Callable[[Any], Any]:
    """The factory: a new agent with new tools for each Run."""

    def factory(_binding: Any) -> Any:
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, Toolkit

        from agentscope_durable.adapters.agentscope import AgentBuilder

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="harmless")
        return AgentBuilder(
            name=AGENT,
            system_prompt=SYSTEM_PROMPT,
            model=make_model(ledger, delay=delay),
            toolkit=Toolkit(
                tools=[
                    FunctionTool(read_metrics, is_read_only=True, permission=allowed),
                    FunctionTool(collect_trace, permission=allowed),
                    FunctionTool(roll_back(ledger)),  # no permission given: AgentScope asks first
                ]
            ),
        )

    return factory


def ledger_in(folder: Path) -> EffectLedger:
    return EffectLedger(folder / "ledger.jsonl")
