"""Previews: best effort, never a fact, never a cursor (EV-02)."""

from __future__ import annotations

from typing import Protocol

from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import SessionKey

Preview = PreviewStarted | EventDelta


class LiveListener(Protocol):
    def __call__(self, preview: Preview) -> None:
        """Take one preview. Called on the event loop it was attached on: must not block and must not raise."""
        ...


class LiveEvents(Protocol):
    """Links producers of previews with observers. Its absence or loss never affects a result (ST-26).

    Promises, each checked by name in `testing.LiveEventsContract`:

    told       A listener is told previews of its Session that are published while it is attached, each at most once.
    ordered    Those of one producer arrive in the order in which they were published; some may be missing.
    scoped     Previews of another Session never arrive.
    at home    A listener is called on the event loop on which it was attached, wherever the producer is.
    harmless   `publish` never blocks and never raises: not over a listener that raises, is slow, or whose loop ended.
    detached   Once `detach` returned, the listener is not called any more.
    wanted     `wanted` is True while a listener is attached, and False soon after the last one was detached.
    """

    def publish(self, session: SessionKey, preview: Preview) -> None:
        """Tell those who are attached. Never blocks, never raises; may be called from any event loop."""
        ...

    def wanted(self, session: SessionKey) -> bool:
        """False when nobody listens, so that no work is done for nobody. Asked for each increment: cheap."""
        ...

    def attach(self, session: SessionKey, listener: LiveListener) -> None:
        """Tell `listener` what is published from now on, on the running event loop."""
        ...

    def detach(self, session: SessionKey, listener: LiveListener) -> None:
        """Tell it nothing more. Twice is fine. Called on the loop it was attached on."""
        ...
