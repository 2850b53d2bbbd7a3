"""What `doctor` answers: what was looked at, and what is wrong, down to the record it is about (C82)."""

from __future__ import annotations

from typing import Final

from agentscope_durable.contracts.discreet import Words
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Severity
from agentscope_durable.contracts.views import View

__all__ = ["FINDINGS_MAX", "CheckView", "Examination", "Finding"]

FINDINGS_MAX: Final = 1000
"""Findings an examination lists; the rest it counts."""


class Finding(View, frozen=True):
    """One thing that is not as it should be.

    Attributes:
        check: which check found it.
        severity: damaged data, trouble that somebody should end, or a mere note.
        subject: what it is about: a file, a host, a Thread, a commit, a record, an object.
        problem: what is wrong with it, in a sentence.
        next_action: what to do about it, in a sentence.
        session, thread_id, turn_id: where it is, None where it is in no Session, Thread or Turn.
        commands: what to type, as in `Reason`.
    """

    check: str
    severity: Severity
    subject: str
    problem: Words
    next_action: Words
    session: SessionKey | None = None
    thread_id: str | None = None
    turn_id: str | None = None
    commands: tuple[tuple[str, ...], ...] = ()


class CheckView(View, frozen=True):
    """One check and how far it got.

    Attributes:
        name: stable.
        about: what it looks at, in a few words.
        looked_at: how many things of that kind.
        findings: how many of them are not as they should be.
        skipped: why it was not made; None if it was.
    """

    name: str
    about: str
    looked_at: int = 0
    findings: int = 0
    skipped: str | None = None


class Examination(View, frozen=True):
    """The state of a store.

    Attributes:
        sound: nothing is damaged, and nothing needs anybody.
        store: how it is set up: format, versions, settings.
        checks: in the order in which they were made.
        findings: what is wrong, the worst first; at most FINDINGS_MAX.
        more: findings that are not listed.
        deep: the expensive checks were made, too.
    """

    sound: bool
    store: dict[str, str]
    checks: tuple[CheckView, ...]
    findings: tuple[Finding, ...] = ()
    more: int = 0
    deep: bool = False
