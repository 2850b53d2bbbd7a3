"""Taking up a former context: restore, fork, repair."""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.commands.base import Request
from agentscope_durable.contracts.commands.host import EntryCommit
from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import TurnStatus


class NativeState(Discreet, frozen=True, kw_only=True, rename="camel"):
    """A baseline that a codec has made ready for the Thread that gets it.

    Attributes:
        binding: the definition it was made with.
        head: stream position of the Thread that it follows.
        journal: encoded JournalBatch that alone rebuilds the state; large ones as `@` + reference JSON. b"" only where
            an operator empties a Thread.
        writer: version of the library that wrote the state.
        workspace: changes after which the Thread's workspace has the entries of that position (CK-07).
        floor, numbers: how far the versions and contents of the source's workspace are counted, for a fork: its agent
            remembers them, so the copy counts on above.
    """

    binding: Binding
    head: int
    journal: bytes
    writer: str
    workspace: tuple[EntryCommit, ...] = ()
    floor: int = 0
    numbers: int = 0


class RestoreThread(Request, frozen=True, tag="restore"):
    """Bring an idle Thread back to one of its settled positions (CK-05).

    Attributes:
        at: stream position of the checkpoint.
        expected_at: that of the checkpoint the Thread stands at.
        native: None only asks: the answer is the receipt of the first time, None if it would be done now, or the
            refusal. So nothing is copied in vain, and a repeat needs no copy.
    """

    at: int
    expected_at: int
    native: NativeState | None = None


class ForkThread(Request, frozen=True, tag="fork"):
    """Begin a Thread with the context of another one, at a settled position of that (CK-08, CK-16).

    Session and Thread of the command are the target's, which alone is written.

    Attributes:
        source, at: the Thread and the position that are copied.
        native: as in `RestoreThread`.
    """

    source: ThreadKey
    at: int
    native: NativeState | None = None


class RepairThread(Request, frozen=True, tag="repair"):
    """An operator ends a Turn that cannot go on, and brings its Thread back to a settled position (C82).

    Attributes:
        turn_id: the parked Turn.
        at, expected_at: as in `RestoreThread`; 0 is before the first checkpoint.
        native: as in `RestoreThread`.
    """

    turn_id: str
    at: int
    expected_at: int
    native: NativeState | None = None


class RepairReceipt(msgspec.Struct, frozen=True, rename="camel"):
    """How the parked Turn ended, and where its Thread stands now; `position` None: it begins anew."""

    request_id: str
    turn_id: str
    status: TurnStatus
    position: str | None
    accepted_at_ms: int
