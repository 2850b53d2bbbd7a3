"""The keys everything is addressed by.

They stand apart from `ids`, which re-exports them, because errors carry them and the rule for ids raises errors.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["MAIN_THREAD_ID", "SessionKey", "ThreadKey", "TurnKey"]

MAIN_THREAD_ID: Final = "main"
"""The Thread every Session is created with."""


class SessionKey(msgspec.Struct, frozen=True, rename="camel", order=True):
    """One conversation of one application: the partition everything of it is stored under.

    A key is not checked when it is made (it may come from a stored row); admission checks it with `ids.check_key`.
    """

    namespace: str
    session_id: str


class ThreadKey(msgspec.Struct, frozen=True, rename="camel", order=True):
    """One agent's context within a Session."""

    session: SessionKey
    thread_id: str = MAIN_THREAD_ID


class TurnKey(msgspec.Struct, frozen=True, rename="camel", order=True):
    """Where a Turn is."""

    session: SessionKey
    thread_id: str
    turn_id: str

    @property
    def thread_key(self) -> ThreadKey:
        return ThreadKey(self.session, self.thread_id)
