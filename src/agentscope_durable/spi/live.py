"""Previews: best effort, never a fact, never a cursor (EV-02)."""

from __future__ import annotations

from typing import Protocol

from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import SessionKey

Preview = PreviewStarted | EventDelta


class LiveListener(Protocol):
    def __call__(self, preview: Preview) -> None:
        """Take one preview. Called on the producer's loop: must not block and must not raise."""
        ...


class LiveEvents(Protocol):
    """Links producers of previews with observers. Its absence or loss never affects a result (ST-26)."""

    def publish(self, session: SessionKey, preview: Preview) -> None:
        """Never blocks, never raises."""
        ...

    def wanted(self, session: SessionKey) -> bool:
        """False when nobody listens, so that no work is done for nobody."""
        ...

    def attach(self, session: SessionKey, listener: LiveListener) -> None: ...

    def detach(self, session: SessionKey, listener: LiveListener) -> None: ...
