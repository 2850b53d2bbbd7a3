"""The page: shows a conversation, takes what is typed, and runs nothing.

    python chat.py FOLDER [--session NAME]

It may be stopped, killed and started again at any moment, as often as you like: what it shows is in the store, and what
was typed and not yet acknowledged is in the outbox.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import agent
from page import Page
from screen import Now, Screen, screen

from agentscope_durable import (
    Committed,
    Definition,
    DurableRuntime,
    DurableSession,
    DurableTurn,
    EventDeltaType,
    Explanation,
    LocalBackend,
    Rejected,
    Retry,
    SessionKey,
    Unconfirmed,
)
from agentscope_durable.adapters.agentscope import STATE_VERSION

AGAIN_SECONDS = 0.5
LOOK_SECONDS = 1.0
SEND_SECONDS = 2.0
"""For what was typed last to be acknowledged before the page closes; else it stays in the outbox."""
HELP = "/steer TEXT  /pause  /resume  /cancel  /status  /quit, or just say something"


class Outbox:
    """What was typed and is not yet known to be stored: a file for each request.

    A request is written here before it is sent and removed after it was acknowledged. A client that dies in between
    leaves the file, and the next one sends the same request again. The store takes a request id once, so it does not
    matter whether the first one had arrived.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, **request: str) -> None:
        # Names sort by time: what was typed first is sent first.
        request_id = f"chat-{time.time_ns()}-{os.urandom(4).hex()}"
        part = self._folder / f"{request_id}.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump({"request_id": request_id, **request}, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self._folder / f"{request_id}.json")

    def requests(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        for path in sorted(self._folder.glob("*.json")):
            with suppress(FileNotFoundError):  # another client of this folder was faster
                found.append(json.loads(path.read_text(encoding="utf-8")))
        return found

    def remove(self, request_id: str) -> None:
        (self._folder / f"{request_id}.json").unlink(missing_ok=True)


class Chat:
    def __init__(self, session: DurableSession, outbox: Outbox, screen: Screen) -> None:
        self._session = session
        self._outbox = outbox
        self._screen = screen
        self._page = Page(session.key)
        self._seen: Explanation | None = None
        self._sending: list[str] = []
        self._to_send = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._to_look = asyncio.Event()

    async def run(self, typed: asyncio.Queue[str | None]) -> None:
        for line in await self._page.load(self._session):
            self._screen.say(line.who, line.text)
        self._to_send.set()  # what a client before this one has left
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(work()) for work in (self._follow, self._send, self._look)]
            while (line := await typed.get()) not in (None, "/quit"):
                try:
                    await self._take(line.strip())
                except (Rejected, Retry, Unconfirmed) as error:  # whose move it is stands in its text
                    self._screen.say("note", str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(SEND_SECONDS):
                    await self._all_sent.wait()
            for task in others:
                task.cancel()

    # ---- what is shown ----

    async def _follow(self) -> None:
        """Facts after those of the snapshot, without a gap, and previews of what is on its way."""
        events = self._session.stream_events(after=self._page.cursor, deltas={EventDeltaType.MESSAGE})
        async with events:
            async for event in events:
                for line in self._page.accept(event):
                    self._screen.say(line.who, line.text)
                if isinstance(event, Committed):
                    self._to_look.set()
                self._show()

    async def _look(self) -> None:
        """How the Turn is, after each fact and once a second: that no brain runs it is told by nobody."""
        while True:
            with suppress(Retry):
                turn = self._turn
                self._seen = None if turn is None else await turn.explain()
            self._show()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._to_look.wait()
            self._to_look.clear()

    def _status(self) -> str:
        """How the Turn is, and what somebody has to do if it is somebody's move."""
        if self._seen is None:
            return "nothing is under way"
        moves = [reason for reason in self._seen.reasons if reason.actor != "nobody"]
        return self._seen.turn.status + "".join(f", {reason.kind}: {reason.next_action}" for reason in moves)

    def _show(self) -> None:
        self._screen.show(
            Now(
                words=dict(self._page.previews),
                tools=[f"{tool.name} {tool.arguments}" for tool in self._page.running],
                questions=[f"{one.name} {one.arguments}  y or n" for one in self._page.questions],
                sending=list(self._sending),
                status=self._status(),
            )
        )

    # ---- what is typed ----

    @property
    def _turn(self) -> DurableTurn | None:
        return None if self._page.turn_id is None else self._session.get_turn(self._page.turn_id)

    async def _take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if not line:
            return
        if line in ("y", "n"):
            await self._answer(line == "y")
        elif not line.startswith("/"):
            self._post(operation="submit", text=line)
        elif command == "/steer" and rest and self._turn is not None:
            self._post(operation="steer", text=rest, turn_id=self._turn.turn_id)
        elif command in ("/pause", "/resume", "/cancel", "/status") and self._turn is not None:
            await self._control(command, self._turn)
        else:
            self._screen.say("note", HELP if self._turn is not None else f"nothing is under way. {HELP}")

    async def _answer(self, approved: bool) -> None:
        if not self._page.questions or self._turn is None:
            self._screen.say("note", "nothing is asked")
            return
        question = self._page.questions[0]
        # The question is the identity: answered twice, by whomever, it is answered once.
        await self._turn.respond(f"answer-{question.interaction_id}", question.interaction_id, approved)

    async def _control(self, command: str, turn: DurableTurn) -> None:
        request_id = f"{command[1:]}-{time.time_ns()}"
        match command:
            case "/pause":
                await turn.pause(request_id)
            case "/resume":
                # The revision that was seen: a click on a page that is out of date resumes nothing.
                await turn.resume(request_id, 0 if self._seen is None else self._seen.turn.revision)
            case "/cancel":
                await turn.cancel(f"cancel-{turn.turn_id}")
            case "/status":
                runs = ", ".join(f"{run.number} {run.status}" for run in await turn.list_runs())
                self._screen.say("note", f"{(await turn.explain()).summary} Its runs: {runs or 'none'}")

    # ---- what is sent ----

    def _post(self, **request: str) -> None:
        self._outbox.put(**request)
        self._all_sent.clear()
        self._to_send.set()

    async def _send(self) -> None:
        """Send what is in the outbox, in its order, until it is acknowledged: with the same request id each time."""
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            requests = self._outbox.requests()
            while requests:
                self._sending = [request["text"] for request in requests]
                self._show()
                if await self._sent(requests[0]):
                    self._outbox.remove(requests.pop(0)["request_id"])
                else:
                    await asyncio.sleep(AGAIN_SECONDS)
            self._sending = []
            self._all_sent.set()
            self._show()

    async def _sent(self, request: dict[str, str]) -> bool:
        try:
            match request["operation"]:
                case "submit":
                    await self._session.submit(request["request_id"], request["text"])
                case "steer":
                    await self._session.get_turn(request["turn_id"]).steer(request["request_id"], request["text"])
        except Rejected as error:  # it never will be: say so, and do not try again
            self._screen.say("note", f"not sent: {request['text']!r}: {error}")
        except (Retry, Unconfirmed):
            return False
        return True


async def main(folder: Path, name: str) -> None:
    (folder / "chat.pid").write_text(str(os.getpid()))
    definition = Definition(agent.NAME, agent.VERSION, STATE_VERSION)
    typed: asyncio.Queue[str | None] = asyncio.Queue()
    async with (
        LocalBackend.open(folder / "store") as backend,
        DurableRuntime(backend=backend, definitions=[definition]) as runtime,  # never started: it admits and reads
    ):
        session = await runtime.create_session(SessionKey(agent.NAMESPACE, name), agent.NAME)
        outbox = Outbox(folder / "outbox" / quote(name, safe=""))
        with screen(typed) as shown:
            await Chat(session, outbox, shown).run(typed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A page of the chat. It runs nothing.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--session", default="main", help="which conversation; default: main")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with suppress(KeyboardInterrupt):
        asyncio.run(main(options.folder, options.session))
    print("the page is closed; what is under way goes on")
