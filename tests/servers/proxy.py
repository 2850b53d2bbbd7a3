"""A proxy before PostgreSQL that loses a request or an answer at a chosen message, stalls, or refuses connections.

It reads the protocol as far as it must: which statement a message executes, and when the server has answered. So a
test says "lose the answer of this statement" and gets exactly that: the server has done the work and has said so, and
the client finds its connection broken.

    async with Proxy(server.port) as proxy:
        lost = proxy.lose_answer(executes("COMMIT"))
        ...
        await lost.wait()
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

SSL_REQUEST, GSS_REQUEST = 80877103, 80877104
CHUNK_BYTES = 65_536


@dataclass(frozen=True)
class Message:
    """What a client sent after its login: the protocol's letter, the content, and the statement it executes, or ""."""

    kind: str
    body: bytes
    number: int
    """How many messages this client has sent after its login, with this one."""
    statement: str


Chosen = Callable[[Message], bool]


def executes(part: str) -> Chosen:
    """The message that executes a statement with this text in it, whatever its case."""
    return lambda message: part.lower() in message.statement.lower()


def is_number(number: int) -> Chosen:
    """The n-th message of a connection, from 1."""
    return lambda message: message.number == number


class _What(Enum):
    LOSE_REQUEST = auto()
    LOSE_ANSWER = auto()
    STALL = auto()


@dataclass
class _Order:
    """Something to do at the first message that is chosen. It is done once."""

    what: _What
    chosen: Chosen
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    statements: dict[bytes, str] = field(default_factory=dict)
    portals: dict[bytes, str] = field(default_factory=dict)
    messages: int = 0
    swallow: _Order | None = None
    """The order to lose the answer that the server is about to give."""

    def cut(self) -> None:
        """Both sides find their connection reset."""
        self.client.transport.abort()
        self.server.transport.abort()

    def message(self, kind: str, body: bytes) -> Message:
        """Note what the message prepares or binds, and tell what it executes."""
        self.messages += 1
        statement = ""
        match kind:
            case "P":
                name, text, _ = body.split(b"\0", 2)
                self.statements[name] = text.decode(errors="replace")
            case "B":
                portal, name, _ = body.split(b"\0", 2)
                self.portals[portal] = self.statements.get(name, "")
            case "E":
                statement = self.portals.get(body.split(b"\0", 1)[0], "")
            case "Q":
                statement = body[:-1].decode(errors="replace")
            case _:
                pass
        return Message(kind, body, self.messages, statement)


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes on to another. An order holds for all connections together."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.port = 0
        self.connected = 0
        """How many connections there have been."""
        self._listener: asyncio.Server | None = None
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._orders: list[_Order] = []
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self.cut()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)

    def lose_request(self, chosen: Chosen) -> asyncio.Event:
        """Cut the connection when this message comes, before the server has it. The event is set when it is done."""
        return self._order(_What.LOSE_REQUEST, chosen)

    def lose_answer(self, chosen: Chosen) -> asyncio.Event:
        """Pass this message on, let the server do its work and answer, and cut the connection instead of answering."""
        return self._order(_What.LOSE_ANSWER, chosen)

    def stall_at(self, chosen: Chosen) -> asyncio.Event:
        """From this message on nothing goes to or fro, on any connection, until `flow`."""
        return self._order(_What.STALL, chosen)

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Cut all connections that there are."""
        for connection in self._connections:
            connection.cut()

    async def refuse(self) -> None:
        """Nobody can connect until `accept`. The connections that there are stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def accept(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _order(self, what: _What, chosen: Chosen) -> asyncio.Event:
        order = _Order(what, chosen)
        self._orders.append(order)
        return order.done

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        self.connected += 1
        connection = _Connection(writer, server_writer)
        here = asyncio.current_task()
        assert here is not None
        self._connections[connection] = here

        async def until_it_ends(passing: Awaitable[None]) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                await passing
            # Whoever ends, ends both; what is on its way to the other side still gets there.
            for side in (connection.client, connection.server):
                side.close()

        try:
            await asyncio.gather(
                until_it_ends(self._from_client(connection, reader)),
                until_it_ends(self._from_server(connection, server_reader)),
            )
        finally:
            connection.cut()
            del self._connections[connection]

    async def _from_client(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        code = SSL_REQUEST
        while code in (SSL_REQUEST, GSS_REQUEST):
            head = await reader.readexactly(8)
            length, code = struct.unpack("!II", head)
            connection.server.write(head + await reader.readexactly(length - 8))
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
            kind = chr(head[0])
            if kind != "p":  # the password is a part of the login
                message = connection.message(kind, body)
                for order in [order for order in self._orders if order.chosen(message)]:
                    self._orders.remove(order)
                    match order.what:
                        case _What.LOSE_REQUEST:
                            connection.cut()
                            order.done.set()
                            return
                        case _What.LOSE_ANSWER:
                            connection.swallow = order
                        case _What.STALL:
                            self.stall()
                            order.done.set()
            await self._flowing.wait()
            connection.server.write(head + body)
            await connection.server.drain()

    async def _from_server(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        # Before the login a server that knows no encryption answers with a lone N, and its messages begin with R or E.
        while (first := await reader.readexactly(1)) == b"N":
            connection.client.write(first)
        while True:
            head = first + await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
            await self._flowing.wait()
            if connection.swallow is None:
                connection.client.write(head + body)
                await connection.client.drain()
            elif first == b"Z":
                # Ready for the next query: the server has done all of this one.
                connection.cut()
                connection.swallow.done.set()
                return
            first = await reader.readexactly(1)
