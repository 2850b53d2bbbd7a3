"""What is missing for a Turn that could run and that no living host can take, and what to do about it.

The Turn's status and its explanation say it in these words, both with the version of the state: two hosts that have the
same definition may keep its state in formats that the other cannot read.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentscope_durable.contracts.records import CLASS_SEPARATOR, Binding
from agentscope_durable.contracts.results import NOTICE_VERSION, HostNotice

__all__ = ["get_definition", "get_writer", "spoken"]


def spoken(binding: Binding) -> str:
    """The definition's version, as people say it."""
    return f"{binding.harness}@{binding.definition_version}"


def get_definition(binding: Binding, living: Iterable[HostNotice]) -> str:
    """What to do when no living host has the version that a Thread is pinned to (RT-28, PT-10)."""
    notices = list(living)
    # One version with other states.
    same = CLASS_SEPARATOR.join((binding.harness, binding.definition_version, ""))
    states = sorted({klass[len(same) :] for one in notices for klass in one.classes if klass.startswith(same)})
    action = f"Start a host that has {spoken(binding)} (state {binding.state_version}) registered"
    if states:
        action += (
            f", with the release of its adapter that reads this state: the living ones have {spoken(binding)} with"
            f" state {', '.join(states)}."
        )
    else:
        action += "; the Turn waits as long as it takes."
    foreign = max((notice.version for notice in notices if notice.version != NOTICE_VERSION), default=None)
    if foreign is not None:
        action += f" A host tells what it serves in version {foreign}; this release reads version {NOTICE_VERSION}."
    return action


def get_writer(binding: Binding, writer: str) -> str:
    """What to do when hosts have the version, and none reads what this writer wrote of a Turn in flight (D21)."""
    return (
        f"Start a host that has {spoken(binding)} with version {writer} of its agent library, which wrote the state of"
        " this Turn."
    )
