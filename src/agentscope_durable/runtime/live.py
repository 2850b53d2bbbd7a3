"""Previews: text on its way, for whoever looks at this moment (EV-02, D22).

Rule 1: a preview is never a fact and never waited for. Publishing does not block and does not raise; an observer that
is too slow loses previews, and the fact that follows says it all.
Rule 2: what an observer is shown has no hole. Increments that do not fit are joined to the one before; where that is
not possible the preview ends there, until its fact.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.live import LiveListener, Preview

log = logging.getLogger("agentscope_durable.runtime")

PREVIEWS_MAX = 256
"""Previews that wait for one observer."""
PREVIEW_CHARS_MAX = 1024 * 1024
"""Characters joined into one increment while an observer is away; more end the preview."""
BROKEN_MAX = 256
"""Previews remembered as broken off per observer."""

Subject = tuple[str, str]
"""What a preview is of: ("", message), or (Turn, call), because Turns may use the same call ids."""
PreviewKey = tuple[str, int, Subject]
"""Message, attempt and subject."""


def subject(preview: Preview) -> Subject:
    return ("", preview.message_id) if preview.call_id is None else (preview.turn_id, preview.call_id)


def preview_key(preview: Preview) -> PreviewKey:
    return preview.message_id, preview.attempt, subject(preview)


class _Attached:
    """One listener, and what was published for it elsewhere than on its own event loop."""

    def __init__(self, listener: LiveListener) -> None:
        self.listener = listener
        self._loop = _running_loop()
        self._lock = threading.Lock()
        self._inbox: deque[Preview] = deque()
        self._here = True

    def tell(self, preview: Preview) -> None:
        """From any thread. What does not fit is left out: the observer sees a hole, and ends that preview."""
        if self._loop is None or (self._loop is _running_loop() and not self._inbox):
            self._call(preview)
            return
        with self._lock:
            waiting = bool(self._inbox)
            if len(self._inbox) >= PREVIEWS_MAX:
                return
            self._inbox.append(preview)
        if not waiting:
            # It raises when that loop is closed: then there is nobody to tell any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        while True:
            with self._lock:
                if not self._inbox:
                    return
                preview = self._inbox.popleft()
            self._call(preview)

    def _call(self, preview: Preview) -> None:
        if not self._here:
            return
        try:
            self.listener(preview)
        except Exception as error:  # noqa: BLE001 - an observer's defect is not the producer's (ST-26)
            log.error("an observer of previews raised %s", type(error).__name__)

    def leave(self) -> None:
        self._here = False


class LocalLiveEvents:
    """Links producers and observers within one assembly (ST-24), on any number of event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: dict[SessionKey, tuple[_Attached, ...]] = {}

    def publish(self, session: SessionKey, preview: Preview) -> None:
        for one in self._attached.get(session, ()):
            one.tell(preview)

    def wanted(self, session: SessionKey) -> bool:
        return session in self._attached

    def attach(self, session: SessionKey, listener: LiveListener) -> None:
        with self._lock:
            self._attached[session] = (*self._attached.get(session, ()), _Attached(listener))

    def detach(self, session: SessionKey, listener: LiveListener) -> None:
        _ = self.detached(session, listener)

    def detached(self, session: SessionKey, listener: LiveListener) -> int:
        """`detach`; how often it was attached."""
        with self._lock:
            before = self._attached.get(session, ())
            # Two looks at one bound method are equal and not the same object.
            rest = tuple(one for one in before if one.listener != listener)
            for one in before:
                if one not in rest:
                    one.leave()
            if rest:
                self._attached[session] = rest
            else:
                self._attached.pop(session, None)
            return len(before) - len(rest)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class PreviewQueue:
    """The previews that wait for one observer: at most `PREVIEWS_MAX`, and none with a hole.

    Args:
        wants: which previews the observer asked for.
        wake: called when there is something to look at.
    """

    def __init__(self, wants: Callable[[Preview], bool], wake: Callable[[], None]) -> None:
        self._wants = wants
        self._wake = wake
        self._waiting: deque[Preview] = deque()
        # Characters shown or waiting of each preview that has begun, in the order they began.
        self._reached: dict[PreviewKey, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __call__(self, preview: Preview) -> None:
        if not self._wants(preview):
            return
        key = preview_key(preview)
        if isinstance(preview, PreviewStarted):
            if len(self._waiting) >= PREVIEWS_MAX:
                return
            self._reached[key] = 0
            while len(self._reached) > BROKEN_MAX:
                del self._reached[next(iter(self._reached))]
            self._waiting.append(preview)
        else:
            # A stranger began before this observer came; one that does not continue has a hole. Both end here.
            if self._reached.get(key) != preview.offset or not self._take(key, preview):
                self._reached.pop(key, None)
                return
            self._reached[key] = preview.offset + len(preview.text)
        self._wake()

    def _take(self, key: PreviewKey, delta: EventDelta) -> bool:
        if len(self._waiting) < PREVIEWS_MAX:
            self._waiting.append(delta)
            return True
        for index in range(len(self._waiting) - 1, -1, -1):
            earlier = self._waiting[index]
            if preview_key(earlier) != key:
                continue
            if isinstance(earlier, PreviewStarted) or len(earlier.text) + len(delta.text) > PREVIEW_CHARS_MAX:
                return False
            self._waiting[index] = replace(earlier, text=earlier.text + delta.text)
            return True
        return False

    def pop(self) -> Preview:
        return self._waiting.popleft()

    @property
    def first(self) -> Preview:
        return self._waiting[0]

    def take_message(self, message_id: str) -> list[Preview]:
        """Take out what waits of one message, in order: its fact is about to be shown."""
        found = [preview for preview in self._waiting if preview.message_id == message_id]
        if found:
            self._waiting = deque(preview for preview in self._waiting if preview.message_id != message_id)
        return found

    def take_call(self, turn_id: str, call_id: str) -> list[Preview]:
        """Take out what waits of one call's arguments, in order."""
        call = turn_id, call_id
        found = [preview for preview in self._waiting if subject(preview) == call]
        if found:
            self._waiting = deque(preview for preview in self._waiting if subject(preview) != call)
        return found

    def clear(self) -> None:
        """What waits is not shown, and what has begun is not continued."""
        self._waiting.clear()
        self._reached.clear()

    def close_message(self, message_id: str, attempt: int | None = None) -> None:
        """Nothing more of this message is shown, or of one attempt of it: its fact was shown."""
        for key in [key for key in self._reached if key[0] == message_id and attempt in (None, key[1])]:
            del self._reached[key]

    def close_call(self, turn_id: str, call_id: str) -> None:
        for key in [key for key in self._reached if key[2] == (turn_id, call_id)]:
            del self._reached[key]
