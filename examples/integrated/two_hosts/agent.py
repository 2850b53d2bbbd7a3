"""The agent of this example: it reminds a customer of a bill and charges the card.

An ordinary AgentScope agent with two tools. Nothing in this file knows how many hosts there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentscope_durable.testing.endpoint import endpoint_model
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import MODEL_REQUEST, Answer, Call, rounds_so_far, scripted_model

SCHEMA, NAMESPACE, NAME, VERSION = "two_hosts", "two-hosts", "billing", "v1"
SYSTEM_PROMPT = (
    "You collect bills. First look the bill up, then charge the card once, then say in three sentences what you did."
)
CHARGE = "charge"
"""Ledger name of money that really moved."""


def script(messages: list[Any], _tools: Any, _choice: Any, _n: int) -> Answer:
    """What a good model would say. It follows the conversation: a request that is repeated gets the same answer."""
    asked = next(message.get_text_content() for message in messages if message.role == "user")
    bill = asked.rstrip(".").rpartition(" ")[2]
    answers: list[Answer] = [
        [f"I look up bill {bill}, and whether it was paid meanwhile.", Call("find_bill", {"bill": bill})],
        [f"Bill {bill} is still open, so I charge the card on file, once.", Call("charge_card", {"bill": bill})],
        f"Bill {bill} is paid. The card on file was charged once, and the customer gets a receipt by mail.",
    ]
    return answers[min(rounds_so_far(messages), len(answers) - 1)]


def make_agent(ledger: EffectLedger, *, delay: float) -> Callable[[Any], Any]:
    """The factory: a new agent with new tools for each Run.

    Args:
        ledger: where what happened outside is written down.
        delay: seconds before each word of the scripted model.
    """

    def find_bill(bill: str) -> str:
        """Look a bill up.

        Args:
            bill: its number.
        """
        return f"bill {bill}: 120 EUR, open since Monday"

    def charge_card(bill: str) -> str:
        """Charge the card on file. It moves money.

        Args:
            bill: its number.
        """
        ledger.append(CHARGE, bill=bill)
        return f"120 EUR were charged for bill {bill}"

    def factory(_binding: Any) -> Any:
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, Toolkit

        from agentscope_durable.adapters.agentscope import AgentBuilder

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
        return AgentBuilder(
            name=NAME,
            system_prompt=SYSTEM_PROMPT,
            model=endpoint_model() or scripted_model(script, ledger=ledger, chunk_chars=None, delay=delay),
            toolkit=Toolkit(
                tools=[
                    FunctionTool(find_bill, is_read_only=True, permission=allowed),  # may run again after a crash
                    FunctionTool(charge_card, permission=allowed),  # is never started a second time
                ]
            ),
        )

    return factory


__all__ = ["CHARGE", "MODEL_REQUEST", "NAME", "NAMESPACE", "SCHEMA", "VERSION", "make_agent"]
