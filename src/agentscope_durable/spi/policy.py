"""The socket for an application's own rules: what may be committed, judged inside the transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience

POLICY_READS_MAX = 16
"""Policy records one command reads."""
POLICY_BYTES_MAX = 64 * 1024
"""JSON of one policy record: it is read again and again, inside transactions."""


class PolicyRequest(msgspec.Struct, frozen=True):
    """What is asked: which command, by whom, about what. Never what is said in it.

    Attributes:
        command: its name, as `submit`, `create_thread`, `claim`, `commit_step`, `fork`.
        audience: PUBLIC for what an application's users ask, HOST for what a host does.
        thread_id, turn_id, request_id: "" where the command has none.
        names: every other identifier in it, by the name of its field: `owner`, `call_id`, `key`, `kind`, ...
        tools: names of the tools whose calls a `commit_step` begins.
    """

    command: str
    audience: Audience
    session: SessionKey
    thread_id: str = ""
    turn_id: str = ""
    request_id: str = ""
    names: Mapping[str, str] = {}
    tools: tuple[str, ...] = ()


class PolicyView(Discreet, frozen=True):
    """What the transaction sees at that moment. All of it is of the Session the command is about.

    Attributes:
        records: the values of the policy records that `reads` named, None where there is none.
        running: Threads that a host owns now: whose Turns run, or are being settled.
        threads: how many Threads there are.
        now_ms: by the store's clock.
    """

    records: Mapping[str, Any]
    running: frozenset[str]
    threads: int
    now_ms: int


class CommitPolicy(Protocol):
    """An application's rule inside the transaction (BE-18): it may refuse a command, and then nothing is stored.

    Both methods are synchronous and pure (BE-19): no IO, no clock, no memory. They may be called again for the same
    command, after a lost race. They are asked about everything that begins something; not about what only reports what
    has happened (an outcome, the end of a Run, a settlement), because a fact that is refused is a fact that is lost,
    and not about an operator's commands, which are how a wrong rule is put right.
    """

    def reads(self, request: PolicyRequest) -> tuple[str, ...]:
        """Names of the policy records to read in the same transaction, at most POLICY_READS_MAX."""
        ...

    def check(self, request: PolicyRequest, view: PolicyView) -> None:
        """Raise `PolicyRefused("why")` to refuse. Anything else it raises refuses too, as a defect: `PolicyFailed`."""
        ...
