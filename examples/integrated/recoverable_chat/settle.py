"""What an operator does about a call whose outcome nobody knows: looks outside, and says what is true.

python settle.py FOLDER [--session NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import agent

from agentscope_durable import Cancelled, DurableRuntime, HostOperations, LocalBackend, SessionKey, Succeeded, WaitKind


async def main(folder: Path, name: str) -> None:
    async with LocalBackend.open(folder / "store") as backend, DurableRuntime(backend=backend) as runtime:
        session = runtime.get_session(SessionKey(agent.NAMESPACE, name))
        turn_id = (await session.main_thread().view()).current_turn_id
        if turn_id is None:
            print("nothing is under way")
            return
        turn = session.get_turn(turn_id)
        calls = {tool.call_id: tool for tool in await turn.list_tools()}
        for waiting in (await turn.status()).waiting_on:
            if waiting.kind is not WaitKind.TOOL_UNKNOWN or waiting.call_id is None:
                continue
            train = json.loads(calls[waiting.call_id].arguments)["train"]
            booked = f"call {waiting.call_id} of {turn_id}\n" in (folder / "bookings.txt").read_text()
            await HostOperations(backend).reconcile_tool(
                turn,
                waiting.call_id,
                request_id=f"settle-{turn_id}-{waiting.call_id}",
                result=Succeeded(f"booked: {train}") if booked else Cancelled("it was not booked"),
                evidence_ref="bookings.txt",
            )
            print(f"{train}: {'it was booked' if booked else 'it was not booked'}, says bookings.txt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Settles calls whose outcome nobody knows.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--session", default="main", help="which conversation; default: main")
    options = parser.parse_args()
    asyncio.run(main(options.folder, options.session))
