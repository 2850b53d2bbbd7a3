"""The connections of one process to the others of its folder, and the thread that serves them.

Rule 1: what is published is sent at once, by whoever publishes, if the connection takes it; else it waits in a bounded
buffer for the thread. Nobody is waited for.
Rule 2: each process tells the others what it wants to be told. So a producer knows without asking whether anybody wants
previews, and nobody is woken by what does not concern him. Who has not said it yet is told every hint.
Rule 3: where there are no such sockets, or they fail, this process is on its own: it polls, like any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final

from agentscope_durable.contracts import keys as record_keys
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.hints import ANYTHING, LocalWakeups, Ringable
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.spi.environment import SYSTEM, Environment, Thread
from agentscope_durable.spi.live import LiveListener, Preview
from agentscope_durable.transports.machine.frames import (
    KEYS_MAX,
    VERSION,
    Frame,
    Hello,
    Hints,
    Interest,
    Malformed,
    Show,
    encode,
    interests,
    show,
)
from agentscope_durable.transports.machine.peer import Peer
from agentscope_durable.transports.machine.place import Place

__all__ = ["MachineBus", "MachineLiveEvents", "MachineWakeups"]

log = logging.getLogger("agentscope_durable.transports")

PEERS_MAX: Final = 64
"""Connections of one process. Who comes later polls."""
LOOK_SECONDS: Final = 2.0
"""Between two looks for processes without a connection: one was not reached, or cannot be connected to."""
HELLO_SECONDS: Final = 5.0
"""A connection that has not said who it is by then is no process of ours."""
READY_SECONDS: Final = 2.0
"""How long opening a store waits for the connections to the processes that are there."""
CLOSE_SECONDS: Final = 2.0
_READ_BYTES: Final = 64 * 1024
_SESSIONS_MAX: Final = 4096
"""Sessions whose key is kept instead of computed again."""


class MachineBus:
    """One process's place among those that use a folder.

    Args:
        folder: for the sockets; made if it is not there.
        read_only: leave no trace in the folder: connect to others, and take no connections.
    """

    def __init__(self, folder: Path, *, environment: Environment = SYSTEM, read_only: bool = False) -> None:
        self._place = Place(folder, read_only=read_only)
        self._folder = folder
        self._environment = environment
        self._read_only = read_only
        self._name = environment.random_bytes(8).hex()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._peers: list[Peer] = []
        # One connection for each process, so that nothing is told twice.
        self._targets: tuple[Peer, ...] = ()
        self._interest: dict[str, int] = {}
        self._listening_to_all = 0
        self._started = False
        self._stopping = False
        self._ready = threading.Event()
        self._thread: Thread | None = None
        self._listening: socket.socket | None = None
        self._waker: tuple[socket.socket, socket.socket] | None = None
        self._selector: selectors.BaseSelector | None = None
        self._accepting = False
        self._looked_at = 0.0
        self.wakeups = MachineWakeups(self)
        self.live = MachineLiveEvents(self)
        _buses.add(self)

    # ---- life ----

    def start(self) -> None:
        """Begin to connect; twice is fine. Never blocks."""
        with self._lock:
            if self._started or self._stopping:
                return
            self._started = True
        self._thread = self._environment.start_thread(self._run, name="machine-events")

    async def opened(self) -> None:
        """Start, and come back when the processes that are there have a connection, or cannot have one."""
        self.start()
        await self._environment.call_in_thread(lambda: self._ready.wait(READY_SECONDS))

    async def close(self) -> None:
        """Leave. Twice is fine."""
        thread = self.stop()
        if thread is not None:
            await self._environment.call_in_thread(lambda: thread.join(CLOSE_SECONDS))

    def stop(self) -> Thread | None:
        if os.getpid() != self._pid:
            return None
        with self._lock:
            self._stopping = True
            self._wake()
        return self._thread

    # ---- for those who publish ----

    def publish_hints(self, keys: tuple[str, ...]) -> None:
        if not self._targets:
            if not self._started:
                self.start()
            return
        if len(keys) > KEYS_MAX:
            keys = (ANYTHING,)
        with self._lock:
            frames: dict[tuple[str, ...], bytes] = {}
            for peer in self._targets:
                wanted = peer.wants(keys)
                if wanted:
                    data = frames.get(wanted)
                    if data is None:
                        data = frames[wanted] = encode(Hints(wanted))
                    self._send(peer, data)

    def publish_preview(self, session: SessionKey, preview: Preview) -> None:
        if not self.wants_previews(session):
            return
        try:
            data = show(session, preview)
        except Malformed as error:
            log.info("a preview was left out: %s", error, extra={"session_id": session.session_id})
            return
        key = _preview_key(session)
        with self._lock:
            for peer in self._targets:
                if key in peer.interest:
                    self._send(peer, data)

    def wants_previews(self, session: SessionKey) -> bool:
        """Whether another process does."""
        if not self._targets:
            if not self._started:
                self.start()
            return False
        return self._wanting(session) > 0

    def _wanting(self, session: SessionKey) -> int:
        key = _preview_key(session)
        return sum(key in peer.interest for peer in self._targets)

    # ---- for those who listen ----

    def want(self, keys: Iterable[str]) -> None:
        """Be told these from now on."""
        self.start()
        with self._lock:
            new = [key for key in keys if key not in self._interest]
            for key in keys:
                self._interest[key] = self._interest.get(key, 0) + 1
            self._tell_interest(new, wanted=True)

    def want_no_more(self, keys: Iterable[str]) -> None:
        with self._lock:
            gone: list[str] = []
            for key in keys:
                self._interest[key] -= 1
                if not self._interest[key]:
                    del self._interest[key]
                    gone.append(key)
            self._tell_interest(gone, wanted=False)

    def want_everything(self, more: int) -> None:
        """One listener more, or less, to every hint."""
        self.start()
        with self._lock:
            self._listening_to_all += more
            for peer in self._peers:
                self._introduce(peer)

    def _tell_interest(self, keys: list[str], *, wanted: bool) -> None:
        if keys:
            everything = self._listening_to_all > 0
            for frame in interests(keys, wanted=wanted, everything=everything):
                data = encode(frame)
                # On every connection: it is the other side's choice which one it uses.
                for peer in self._peers:
                    self._send(peer, data)

    def _introduce(self, peer: Peer) -> None:
        """All that this process wants to be told."""
        everything = self._listening_to_all > 0
        for frame in interests(list(self._interest), anew=True, everything=everything):
            self._send(peer, encode(frame))

    def _send(self, peer: Peer, data: bytes) -> None:
        if not peer.send(data):
            self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            # Full: it is awake already.
            with contextlib.suppress(OSError):
                self._waker[1].send(b"\0")

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - this process polls then (rule 3)
            log.warning("previews and hints stay within this process: %s", error)
            self._shut()
            return
        finally:
            self._ready.set()
        try:
            while not self._stopping:
                self._serve()
        except Exception:
            log.exception("previews and hints stay within this process from now on")
        finally:
            self._shut()

    def _open(self) -> None:
        self._selector = selectors.DefaultSelector()
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        self._waker = reader, writer
        if not self._read_only:
            self._listening = self._place.listen(self._name)
        self._connect()

    def _connect(self) -> None:
        """To all that are there and not connected yet."""
        self._looked_at = now = self._environment.monotonic()
        if self._listening is not None and not self._accepting:
            assert self._selector is not None
            self._selector.register(self._listening, selectors.EVENT_READ, None)
            self._accepting = True
        with self._lock:
            known = {peer.name for peer in self._peers}
            for peer in self._peers:
                if peer.name is None and now - peer.since > HELLO_SECONDS:
                    peer.failed = True
        for name in sorted(self._place.names() - known - {self._name}):
            if len(self._peers) >= PEERS_MAX:
                return
            connection = self._place.connect(name)
            if connection is not None:
                self._welcome(connection, name)

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptors are left: not at once again.
                assert self._selector is not None
                self._selector.unregister(self._listening)
                self._accepting = False
                return
            if len(self._peers) >= PEERS_MAX:
                connection.close()
                continue
            connection.setblocking(False)
            self._welcome(connection, None)

    def _welcome(self, connection: socket.socket, name: str | None) -> None:
        peer = Peer(connection, self._environment.monotonic(), name)
        with self._lock:
            self._peers.append(peer)
            self._send(peer, encode(Hello(VERSION, self._name)))
            self._introduce(peer)
            self._choose()

    def _choose(self) -> None:
        """Two processes that began at the same moment have two connections: each uses one of them."""
        chosen: dict[object, Peer] = {}
        for peer in self._peers:
            if not peer.failed:
                chosen.setdefault(peer.name or peer, peer)
        self._targets = tuple(chosen.values())

    def _serve(self) -> None:
        assert self._selector is not None and self._waker is not None
        self._register()
        ready = self._selector.select(LOOK_SECONDS)
        for key, events in ready:
            if key.fileobj is self._waker[0]:
                with contextlib.suppress(BlockingIOError):
                    while self._waker[0].recv(_READ_BYTES):
                        pass
            elif key.fileobj is self._listening:
                self._accept()
            else:
                self._attend(key.data, events)
        if self._environment.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._connect()

    def _register(self) -> None:
        assert self._selector is not None
        with self._lock:
            for peer in [peer for peer in self._peers if peer.failed]:
                self._peers.remove(peer)
                if peer.registered:
                    self._selector.unregister(peer.connection)
                peer.connection.close()
                self._choose()
            for peer in self._peers:
                if peer.missed and not peer.waiting:
                    peer.missed = False
                    peer.send(encode(Hints((ANYTHING,))))
                    self._introduce(peer)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.waiting else 0)
                if not peer.registered:
                    self._selector.register(peer.connection, events, peer)
                elif peer.registered != events:
                    self._selector.modify(peer.connection, events, peer)
                peer.registered = events

    def _attend(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with self._lock:
                peer.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            data = peer.connection.recv(_READ_BYTES)
            for frame in peer.frames.take(data):
                self._hear(peer, frame)
        except BlockingIOError:
            return
        except (OSError, Malformed) as error:
            if isinstance(error, Malformed):
                log.warning("a connection is ended that does not speak like one of ours: %s", error)
            data = b""
        if not data:
            with self._lock:
                peer.failed = True

    def _hear(self, peer: Peer, frame: Frame) -> None:
        match frame:
            case Hello():
                with self._lock:
                    peer.name = frame.name
                    self._choose()
            case Interest():
                with self._lock:
                    peer.note(frame)
            case Hints():
                self.wakeups.local.publish(frame.keys)
            case Show():
                self.live.local.publish(frame.session, frame.preview)

    def _shut(self) -> None:
        with self._lock:
            self._stopping = True
            self._targets = ()
            for peer in self._peers:
                peer.connection.close()
            self._peers.clear()
            waker, self._waker = self._waker, None
        if self._listening is not None:
            self._place.remove(self._name)
            self._listening.close()
        if self._selector is not None:
            self._selector.close()
        for end in waker or ():
            end.close()
        self._place.close()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's. Held here too, they would outlive it."""
        self._lock = threading.Lock()
        self._read_only = True
        self._listening, listening = None, self._listening
        if listening is not None:
            listening.close()
        self._shut()


class MachineWakeups:
    """`Wakeups` of one process and the others of its folder."""

    def __init__(self, bus: MachineBus) -> None:
        self._bus = bus
        self.local = LocalWakeups()

    def publish(self, keys: tuple[str, ...]) -> None:
        self.local.publish(keys)
        self._bus.publish_hints(keys)

    @asynccontextmanager
    async def listen(self, keys: frozenset[str] | None = None) -> AsyncGenerator[AsyncIterator[frozenset[str]]]:
        async with self.local.listen(keys) as heard:
            self._tell(keys, 1)
            try:
                yield heard
            finally:
                self._tell(keys, -1)

    @contextmanager
    def ring(self, keys: frozenset[str], bell: Ringable) -> Generator[None]:
        with self.local.ring(keys, bell):
            self._tell(keys, 1)
            try:
                yield
            finally:
                self._tell(keys, -1)

    def _tell(self, keys: frozenset[str] | None, more: int) -> None:
        if keys is None:
            self._bus.want_everything(more)
        elif more > 0:
            self._bus.want(keys)
        else:
            self._bus.want_no_more(keys)


class MachineLiveEvents:
    """`LiveEvents` of one process and the others of its folder."""

    def __init__(self, bus: MachineBus) -> None:
        self._bus = bus
        self.local = LocalLiveEvents()

    def publish(self, session: SessionKey, preview: Preview) -> None:
        self.local.publish(session, preview)
        self._bus.publish_preview(session, preview)

    def wanted(self, session: SessionKey) -> bool:
        return self.local.wanted(session) or self._bus.wants_previews(session)

    def attach(self, session: SessionKey, listener: LiveListener) -> None:
        self.local.attach(session, listener)
        self._bus.want((_preview_key(session),))

    def detach(self, session: SessionKey, listener: LiveListener) -> None:
        for _ in range(self.local.detached(session, listener)):
            self._bus.want_no_more((_preview_key(session),))

    async def close(self) -> None:
        """Leave the folder: previews stay within this process from now on. Twice is fine."""
        await self._bus.close()


_preview_keys: dict[SessionKey, str] = {}


def _preview_key(session: SessionKey) -> str:
    key = _preview_keys.get(session)
    if key is None:
        if len(_preview_keys) >= _SESSIONS_MAX:
            _preview_keys.clear()
        name = record_keys.partition(session).encode("utf-8", "surrogatepass")
        key = _preview_keys[session] = "p:" + blake2b(name, digest_size=12).hexdigest()
    return key


_buses: weakref.WeakSet[MachineBus] = weakref.WeakSet()


def _forget_all() -> None:
    for bus in list(_buses):
        bus.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
