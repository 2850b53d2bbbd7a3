"""Previews and hints between the processes of a machine: here two ends in one process, and strangers in between."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import spi
from agentscope_durable.assembly import LiveEvents
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.testing import LiveEventsContract, WakeupsContract
from agentscope_durable.testing.live_events import HERE, SECONDS, Seen, preview, until
from agentscope_durable.testing.wakeups import heard
from agentscope_durable.transports.machine import MachineBus, MachineLiveEvents, MachineWakeups
from agentscope_durable.transports.machine import bus as bus_module
from agentscope_durable.transports.machine import place as place_module
from agentscope_durable.transports.machine.bus import _preview_key
from agentscope_durable.transports.machine.frames import (
    FRAME_BYTES_MAX,
    KEYS_MAX,
    VERSION,
    Frames,
    Hello,
    Hints,
    Interest,
    Show,
    encode,
)
from agentscope_durable.transports.machine.peer import WAITING_BYTES_MAX
from agentscope_durable.transports.machine.place import ADDRESS_BYTES_MAX, NEW_SECONDS, Place


class TestMachineLiveEvents(LiveEventsContract):
    async def open(self, place: Path) -> spi.LiveEvents:
        bus = MachineBus(place / "live")
        await bus.opened()
        return bus.live

    async def close(self, end: spi.LiveEvents) -> None:
        assert isinstance(end, MachineLiveEvents)
        await end.close()


class TestMachineWakeups(WakeupsContract):
    async def open(self, place: Path) -> spi.Wakeups:
        bus = MachineBus(place / "live")
        await bus.opened()
        return bus.wakeups

    async def close(self, end: spi.Wakeups) -> None:
        assert isinstance(end, MachineWakeups)
        await end._bus.close()


@asynccontextmanager
async def buses(folder: Path, count: int, **options: Any) -> AsyncGenerator[list[MachineBus]]:
    opened = [MachineBus(folder, **options) for _ in range(count)]
    try:
        await asyncio.gather(*(bus.opened() for bus in opened))
        yield opened
    finally:
        for bus in opened:
            await bus.close()


def sockets(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if stat.S_ISSOCK(path.stat().st_mode))


def connect(bus: MachineBus) -> socket.socket:
    """A stranger."""
    place = Place(bus._folder)
    stranger = place.connect(bus._name)
    place.close()
    assert stranger is not None
    stranger.setblocking(True)
    return stranger


async def talk(producer: MachineBus, observer: MachineBus) -> None:
    """Previews and hints cross."""
    seen = Seen()
    observer.live.attach(HERE, seen)
    await until(lambda: producer.live.wanted(HERE))
    await until(lambda: bool(seen.numbers), lambda: producer.live.publish(HERE, preview(1)))
    observer.live.detach(HERE, seen)
    async with observer.wakeups.listen(frozenset({"k"})) as listening:
        assert await heard(listening, producer.wakeups, "k") == {"k"}


@pytest.mark.spec("ST-25")
async def test_a_socket_is_for_its_user_alone_and_goes_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    async with buses(folder, 2) as (producer, observer):
        await talk(producer, observer)
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
        assert [stat.S_IMODE(path.stat().st_mode) for path in sockets(folder)] == [0o600, 0o600]

    assert list(folder.iterdir()) == []
    await until(lambda: not any(thread.name == "machine-events" for thread in threading.enumerate()))


@pytest.mark.parametrize("length", [ADDRESS_BYTES_MAX - 40, ADDRESS_BYTES_MAX, 300])
async def test_the_folder_may_have_a_path_of_any_length(tmp_path: Path, length: int) -> None:
    folder = tmp_path
    while len(os.fsencode(folder)) < length:
        folder = folder / ("d" * min(50, max(1, length - len(os.fsencode(folder)) - 1)))
    async with buses(folder, 2) as (producer, observer):
        await talk(producer, observer)


async def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    for name in ("killed.socket", "not listening.new", "just begun.new"):
        left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        left.bind(str(folder / name))
        left.listen()
        left.close()
    (folder / "no socket.socket").write_text("a file")
    long_ago = (folder / "not listening.new").stat().st_mtime - 2 * NEW_SECONDS
    os.utime(folder / "not listening.new", (long_ago, long_ago))

    async with buses(folder, 2) as (producer, observer):
        await talk(producer, observer)
        assert {path.name for path in folder.iterdir()} == {
            "just begun.new",
            *(f"{bus._name}.socket" for bus in (producer, observer)),
        }


async def test_many_that_start_at_once_hear_each_other_once(tmp_path: Path) -> None:
    async with buses(tmp_path / "live", 8) as everyone:
        seen = [Seen() for _ in everyone]
        for bus, one in zip(everyone, seen, strict=True):
            bus.live.attach(HERE, one)
        await until(lambda: all(len({peer.name for peer in bus._targets}) == 7 for bus in everyone))
        await until(lambda: all(bus._wanting(HERE) == 7 for bus in everyone))
        for number, bus in enumerate(everyone):
            bus.live.publish(HERE, preview(number))

        await until(lambda: all(len(one.numbers) >= 8 for one in seen))
        assert [sorted(one.numbers) for one in seen] == [list(range(8))] * 8


STRANGE: dict[str, bytes] = {
    "no frames": b"GET / HTTP/1.1\r\nHost: durable\r\n\r\n",
    "zeros": bytes(64),
    "too long": (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
    "no JSON": (5).to_bytes(4, "big") + b"hello",
    "another kind": (14).to_bytes(4, "big") + b'{"type":"bye"}',
    "another version": encode(Hello(99, "x")),
    "deep": (200_000).to_bytes(4, "big") + b"[" * 200_000,
    "too many keys": (lambda body: len(body).to_bytes(4, "big") + body)(
        b'{"type":"hints","keys":[' + b",".join([b'"k"'] * 2000) + b"]}"
    ),
    "no text": (lambda body: len(body).to_bytes(4, "big") + body)(b'{"type":"hints","keys":["\xff\xfe"]}'),
}


@pytest.mark.parametrize("name", STRANGE)
async def test_a_stranger_harms_nobody(tmp_path: Path, name: str) -> None:
    async with buses(tmp_path / "live", 2) as (producer, observer):
        stranger = connect(producer)
        stranger.sendall(STRANGE[name])
        stranger.settimeout(SECONDS)
        # What it was told before is no secret; then the connection is ended.
        await asyncio.to_thread(_until_closed, stranger)
        await talk(producer, observer)
        await talk(observer, producer)


def _until_closed(stranger: socket.socket) -> None:
    try:
        while stranger.recv(65536):
            pass
    except ConnectionResetError:
        pass
    finally:
        stranger.close()


async def test_a_frame_may_come_in_any_pieces(tmp_path: Path) -> None:
    async with buses(tmp_path / "live", 1) as (bus,):
        stranger = connect(bus)
        async with bus.wakeups.listen(frozenset({"k", "l"})) as listening:
            for byte in encode(Hello(VERSION, "another")) + encode(Hints(("k",))):
                stranger.sendall(bytes([byte]))
            assert await anext(listening) == {"k"}
            stranger.sendall(encode(Hints(("k",))) + encode(Hints(("l",))))
            assert "k" in await anext(listening)
        stranger.close()


async def test_one_that_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(bus_module, "LOOK_SECONDS", 0.02)
    async with buses(tmp_path / "live", 1) as (bus,):
        stranger = connect(bus)
        stranger.settimeout(SECONDS)
        await asyncio.to_thread(_until_closed, stranger)
        await until(lambda: not bus._peers)


async def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "PEERS_MAX", 3)
    async with buses(tmp_path / "live", 1) as (bus,):
        strangers = [connect(bus) for _ in range(3)]
        await until(lambda: len(bus._peers) == 3)
        late = connect(bus)
        late.settimeout(SECONDS)
        await asyncio.to_thread(_until_closed, late)
        assert len(bus._peers) == 3
        for stranger in strangers:
            stranger.close()
        await until(lambda: not bus._peers)


@pytest.mark.spec("ST-25")
async def test_a_process_that_had_no_descriptors_left_connects_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "LOOK_SECONDS", 0.02)
    refusals: list[str] = []
    asked = socket.socket

    def none_left(*_: Any) -> socket.socket:
        refusals.append("socket")
        raise OSError(errno.EMFILE, "Too many open files")

    async with buses(tmp_path / "live", 1) as (first,):
        monkeypatch.setattr(place_module.socket, "socket", none_left)
        # Somebody to look for. He is connected to when there are descriptors again.
        (tmp_path / "live" / "0.socket").touch()
        await until(lambda: len(refusals) > 2)
        monkeypatch.setattr(place_module.socket, "socket", asked)
        async with buses(tmp_path / "live", 1) as (second,):
            await talk(first, second)
            await talk(second, first)


async def test_who_does_not_read_loses_and_is_told_so_later(tmp_path: Path) -> None:
    """It is stopped, swapped out, or in a debugger. The others hear everything meanwhile."""
    async with buses(tmp_path / "live", 2) as (producer, observer):
        seen = Seen()
        observer.live.attach(HERE, seen)
        stopped = connect(producer)
        stopped.sendall(encode(Hello(VERSION, "stopped")) + encode(Interest((_preview_key(HERE), "k"), anew=True)))
        await until(lambda: producer._wanting(HERE) == 2)
        for number in range(3 * WAITING_BYTES_MAX // 1000):
            producer.live.publish(HERE, preview(number, "x" * 1000))
            if number % 50 == 0:
                await until(lambda number=number: number in seen.numbers)
        await until(lambda: number in seen.numbers)
        (peer,) = [peer for peer in producer._peers if peer.name == "stopped"]
        assert len(peer.waiting) <= WAITING_BYTES_MAX
        assert peer.missed
        assert seen.numbers == list(range(3 * WAITING_BYTES_MAX // 1000))
        producer.wakeups.publish(("k",))

        # It reads again: what was left out is not made up for, but it is told to look.
        frames, got = Frames(), []
        stopped.settimeout(SECONDS)
        while Hints(("*",)) not in got:
            got += list(frames.take(await asyncio.to_thread(stopped.recv, 65536)))
        shown = [frame.preview.offset for frame in got if isinstance(frame, Show)]
        assert shown == list(range(len(shown)))
        assert any(isinstance(frame, Interest) and frame.anew for frame in got[-2:])
        stopped.close()
        observer.live.detach(HERE, seen)


@pytest.mark.spec("ST-26")
async def test_one_that_only_reads_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    async with buses(folder, 1, read_only=True) as (early,):
        assert not folder.exists()
        async with buses(folder, 1) as (producer,):
            names = sorted(path.name for path in folder.iterdir())
            async with buses(folder, 1, read_only=True) as (observer,):
                await talk(producer, observer)
                assert sorted(path.name for path in folder.iterdir()) == names
            # It was there first and cannot be connected to; it looks again by itself.
            await talk(producer, early)


@pytest.mark.spec("ST-26")
async def test_where_there_can_be_no_socket_a_process_is_on_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "live").write_text("a file")
    async with buses(tmp_path / "live", 1) as (alone,):
        await talk(alone, alone)
    assert "stay within this process" in caplog.text
    assert (tmp_path / "live").read_text() == "a file"


async def test_a_child_that_was_forked_does_not_hold_its_parents_connections(tmp_path: Path) -> None:
    async with buses(tmp_path / "live", 2) as (parent, other):
        await talk(parent, other)
        hold, release = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(release)
                parent.live.publish(HERE, preview(1))
                parent.wakeups.publish(("k",))
                assert parent.stop() is None
                os.read(hold, 1)
                os._exit(0)
            except BaseException:
                os._exit(1)
        os.close(hold)
        try:
            await talk(parent, other)
            await parent.close()
            await until(lambda: not other._targets)
        finally:
            os.close(release)
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert [path.name for path in (tmp_path / "live").iterdir()] == [f"{other._name}.socket"]


async def test_more_sessions_than_a_frame_holds_can_be_observed(tmp_path: Path) -> None:
    async with buses(tmp_path / "live", 1) as (observer,):
        keys = [SessionKey("app", f"s{number}") for number in range(2 * KEYS_MAX + 1)]
        seen = Seen()
        for key in keys:
            observer.live.attach(key, seen)
        async with buses(tmp_path / "live", 1) as (producer,):
            await until(lambda: all(producer.live.wanted(key) for key in keys))
            for key in keys:
                observer.live.detach(key, seen)
            await until(lambda: not any(producer.live.wanted(key) for key in keys))


@pytest.mark.spec("ST-25")
async def test_a_folder_of_its_own_serves_a_store_that_is_elsewhere(tmp_path: Path) -> None:
    """`LiveEvents.machine` begins when it is used."""
    producer, observer = LiveEvents.machine(tmp_path / "p"), LiveEvents.machine(tmp_path / "p")
    assert not (tmp_path / "p").exists()
    seen = Seen()
    observer.attach(HERE, seen)
    await until(lambda: producer.wanted(HERE))
    await until(lambda: bool(seen.numbers), lambda: producer.publish(HERE, preview(1)))
    await producer.close()
    await observer.close()
    await observer.close()

    assert list((tmp_path / "p").iterdir()) == []
    assert not observer.wanted(SessionKey("app", "other"))
