"""What an examination has looked at and found, bounded; and the checks it is made of."""

from __future__ import annotations

from typing import Any, Final

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import DurableError, Retry
from agentscope_durable.contracts.examination import FINDINGS_MAX, CheckView, Examination, Finding
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Severity

__all__ = ["ASK", "CHECKS", "DEEP", "Report", "spoken"]

CHECKS: Final[dict[str, str]] = {
    "store": "what the store itself finds wrong with its file",
    "hosts": "hosts that are gone and still own work",
    "locks": "lock files that belong to no host",
    "sessions": "heads of Sessions and their Threads",
    "schedule": "work that no host would ever find",
    "threads": "native state from the last base to the last checkpoint, against its digest",
    "objects": "large bodies that are referred to, or belong to nobody",
    "log": "every commit, against its sums",
    "records": "every record",
    "checkpoints": "every settled position, against its digest",
}
"""Every check, in the order in which they are told, and what it looks at."""
DEEP: Final = ("log", "records", "checkpoints")
"""Checks that read everything there is."""

ASK: Final = "Keep the store as it is and make a copy of it; restore a backup, or repair it from that copy."
AGAIN: Final = "Look again when it can be reached; until then nothing is known of it."


class Report:
    """What was looked at and found, bounded."""

    def __init__(self, *, deep: bool) -> None:
        self.deep = deep
        self._looked_at = dict.fromkeys(CHECKS, 0)
        self._found = dict.fromkeys(CHECKS, 0)
        self._skipped: dict[str, str] = {} if deep else dict.fromkeys(DEEP, "it reads everything: with --deep only")
        self._findings: list[Finding] = []
        self._worst: set[Severity] = set()

    def look(self, check: str, count: int = 1) -> None:
        self._looked_at[check] += count

    def skip(self, check: str, why: str) -> None:
        self._skipped[check] = why

    def find(self, check: str, severity: Severity, subject: str, problem: str, next_action: str, **where: Any) -> None:
        self._found[check] += 1
        self._worst.add(severity)
        if len(self._findings) < FINDINGS_MAX:
            self._findings.append(Finding(check, severity, subject, problem, next_action, **where))

    def fault(self, check: str, subject: str, error: DurableError, session: SessionKey | None = None) -> None:
        """Something could not even be read. That a store is away says nothing of what it holds (C62)."""
        if isinstance(error, Retry):
            self.find(check, Severity.TROUBLE, subject, f"it cannot be read now: {error.what}", AGAIN, session=session)
        else:
            self.find(check, Severity.DAMAGE, subject, error.what, ASK, session=session)

    def view(self, store: dict[str, str]) -> Examination:
        order = list(Severity)
        findings = sorted(self._findings, key=lambda finding: order.index(finding.severity))
        checks = tuple(
            CheckView(
                name=name,
                about=about,
                looked_at=self._looked_at[name],
                findings=self._found[name],
                skipped=self._skipped.get(name),
            )
            for name, about in CHECKS.items()
        )
        return Examination(
            sound=not self._worst - {Severity.NOTE},
            store=store,
            checks=checks,
            findings=tuple(findings),
            more=sum(self._found.values()) - len(findings),
            deep=self.deep,
        )


def spoken(session: SessionKey) -> str:
    return f"session {keys.spell(session)}"
