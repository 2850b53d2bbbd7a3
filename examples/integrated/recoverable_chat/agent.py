"""The agent of the chat: it plans a day in a city and books a train.

An ordinary AgentScope agent with three tools. Nothing in this file knows about crashes, and nothing has to.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentscope_durable.testing.endpoint import endpoint_model
from agentscope_durable.testing.scripted_model import Answer, Call, rounds_so_far, scripted_model

NAMESPACE, NAME, VERSION = "recoverable-chat", "guide", "v1"
SYSTEM_PROMPT = (
    "You plan a day in a city. First ask for the weather and the trains, both at once. Then say in four sentences what "
    "the day could be, and book one train. At the end say in one sentence what you did."
)


class Pace:
    """How fast things go here, so that there is time to look and to kill.

    While there is a file `hold` in the folder, whatever is named in it waits: a word of the model, or a tool.
    """

    def __init__(self, folder: Path, seconds_a_word: float) -> None:
        self._hold = folder / "hold"
        self._seconds = seconds_a_word

    async def word(self, word: str) -> None:
        await self.take(word.strip(" .,:"), words=1)

    async def take(self, what: str, *, words: int) -> None:
        await asyncio.sleep(words * self._seconds)
        while self._hold.exists() and self._hold.read_text().strip() == what:
            await asyncio.sleep(0.05)


# ------------------------------------------------------------ what it can do


def tools(folder: Path, pace: Pace) -> list[Any]:
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool

    from agentscope_durable.adapters.agentscope import current_origin

    async def weather(city: str) -> str:
        """Say how the weather will be.

        Args:
            city: name of the city.
        """
        await pace.take("weather", words=15)
        return f"{city}: dry until two, then rain, 19 degrees"

    async def trains(city: str) -> str:
        """List the trains to a city.

        Args:
            city: name of the city.
        """
        await pace.take("trains", words=25)
        return f"to {city}: 07:42 and 09:15"

    async def book_train(train: str) -> str:
        """Book a seat. It costs money.

        Args:
            train: when it leaves, and where it goes.
        """
        origin = current_origin()  # the call that this is: a name that a booking office could know it by
        with (folder / "bookings.txt").open("a") as ledger:
            ledger.write(f"{train}, call {origin and origin.call_id} of {origin and origin.turn_id}\n")
        await pace.take("book_train", words=5)
        return f"booked: {train}"

    harmless = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only looks")
    return [
        # Read-only tools may run again after a crash.
        FunctionTool(weather, is_read_only=True, permission=harmless),
        FunctionTool(trains, is_read_only=True, permission=harmless),
        # No permission is given, so AgentScope asks first; and it is not started a second time (replay rule "never").
        FunctionTool(book_train),
    ]


# ------------------------------------------------------------ what it thinks with


def script(messages: list[Any], _tools: Any, _choice: Any, _n: int) -> Answer:
    """What a good model would say. It follows the conversation: a request that is repeated gets the same answer."""
    said = [i for i, message in enumerate(messages) if role(message) == "user"]
    asked = [i for i in said if place(messages[i])]
    if not asked or text(messages[said[-1]]).endswith("?"):
        return "I am here. Name a city, for example: Plan a day in Porto"
    since = messages[asked[-1] :]
    city = place(since[0])
    wishes = [text(message) for message in since[1:] if role(message) == "user"]
    match rounds_so_far(since):
        case 0:
            look = [Call("weather", {"city": city}), Call("trains", {"city": city})]
            return [f"A day in {city}. I look at the sky and at the timetable.", *look]
        case 1:
            return [
                "The morning stays dry and the rain comes after lunch. So first the old town and the bridge on foot, "
                f"then the market hall, and a museum under a roof. The early train to {city} leaves time for all of "
                "it, and I would like to book it.",
                Call("book_train", {"train": f"07:42 to {city}"}),
            ]
        case 2:
            booked = any("booked:" in str(message) for message in since)
            end = "The train is booked." if booked else "I have booked nothing."
            return " ".join([end, *(f"And I keep in mind: {wish}." for wish in wishes), f"Enjoy {city}!"])
        case _:
            return "You are welcome."


def role(message: Any) -> str:
    return message["role"] if isinstance(message, dict) else message.role


def text(message: Any) -> str:
    return str(message["content"]) if isinstance(message, dict) else message.get_text_content() or ""


def place(message: Any) -> str:
    found = re.search(r"\bday in (\w+)", text(message))
    return found[1] if found else ""


def make_agent(folder: Path, *, seconds_a_word: float) -> Callable[[Any], Any]:
    """The factory: a new agent with new tools for each Run."""
    pace = Pace(folder, seconds_a_word)

    def factory(_binding: Any) -> Any:
        from agentscope.tool import Toolkit

        from agentscope_durable.adapters.agentscope import AgentBuilder

        model = endpoint_model() or scripted_model(script, chunk_chars=None, delay=pace.word)
        return AgentBuilder(
            name=NAME, system_prompt=SYSTEM_PROMPT, model=model, toolkit=Toolkit(tools=tools(folder, pace))
        )

    return factory
