"""The socket for native baselines: what an agent library must do so that a Thread can be restored or forked.

It is the pure part of an adapter. An API host registers it for a definition that it does not run, so it builds no
agent and imports no model's SDK (CK-02).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.journal import CheckpointRow
from agentscope_durable.contracts.records import Binding


class JournalRow(Discreet, frozen=True):
    """One native block as stored: stream position and encoded JournalBatch."""

    at: int
    journal: bytes


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A settled position as it is stored, for the host that copies it.

    Attributes:
        binding: the definition of its Thread.
        base_at, digest: the rows from there to the position rebuild the state, and add up to this; 0 and "" for none.
        writer: version of the library that wrote the state.
        head: stream position of the Thread's last commit.
        through: position as of which its workspace belongs to the settled one; 0 for none.
    """

    binding: Binding
    base_at: int
    digest: str
    writer: str
    head: int
    through: int = 0


class NativeBaseline(Discreet, frozen=True, kw_only=True):
    """The native state at a settled position, and where it is to go.

    Attributes:
        source: the Thread it was committed in.
        target: the Thread that gets it; the same one for a restore.
        binding: the definition both are pinned to.
        writer: version of the library that wrote it.
        rows: what rebuilds it, oldest first; their digest was checked.
    """

    source: ThreadKey
    target: ThreadKey
    binding: Binding
    writer: str
    rows: tuple[JournalRow, ...]


class CheckpointCodec(Protocol):
    """Makes a settled baseline ready for the Thread that gets it.

    Promises, checked by the contract suite of `HarnessAdapter`:

    pure        Runs no agent, model or tool; the same baseline gives the same rows. It may run in any thread.
    whole       The rows begin with a `Base` and alone rebuild the state.
    rebound     For another Thread, what names the source as the owner of the state names the target instead.
    checked     What does not fold is `CorruptRecord`; another state version, or a state that the library here cannot
                read, is `Incompatible`.
    """

    def __call__(self, baseline: NativeBaseline, /) -> Sequence[CheckpointRow]:
        """
        Raises:
            CorruptRecord, Incompatible: see `checked`.
        """
        ...
