"""How a commit policy is asked: before the rule, in its transaction, with its own reads added.

Rule 1: it decides over what begins, never over what has happened: reports are exempt, so no fact is lost.
Rule 2: whatever goes wrong in it refuses the command, once, and says so. It is no reason to ask again: the same policy
would fail in the same way, for as long as somebody tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Reads, View
from agentscope_durable.contracts.errors import DurableError, Misuse, PolicyFailed, Rejected
from agentscope_durable.contracts.ids import check_id
from agentscope_durable.contracts.records import PolicyRecord, decode, decode_json
from agentscope_durable.contracts.status import Audience
from agentscope_durable.domain.rules import RULES
from agentscope_durable.spi.policy import POLICY_READS_MAX, CommitPolicy, PolicyRequest, PolicyView

__all__ = ["REPORTS", "Asked", "ask", "check_policy", "governed"]

REPORTS: Final = frozenset(
    {c.SettleTurn, c.PostponeSettlement, c.FileFact, c.RecordOutcome, c.RecordObject},
)
"""Commands that only say what has happened, or make ready to say it."""

_NOT_NAMES: Final = frozenset({"digest", "arguments_digest", "writer"})


def check_policy(policy: CommitPolicy | None) -> None:
    """
    Raises:
        Misuse: it cannot be asked inside a transaction.
    """
    if policy is None:
        return
    for name in ("reads", "check"):
        method = getattr(policy, name, None)
        if not callable(method):
            raise Misuse(f"a commit policy has a method {name!r}; {type(policy).__name__} has none")
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise Misuse(f"{type(policy).__name__}.{name} is asynchronous; inside a transaction nothing is awaited")


def governed(command: c.AnyCommand) -> bool:
    """Whether a policy is asked about it."""
    if type(command) in REPORTS or RULES[type(command)].audience is Audience.OPERATOR:
        return False
    return not (isinstance(command, c.CommitStep) and command.end is not None)


class Asked:
    """One command before one policy. `reads` are added to the rule's; `check` is called by the decision."""

    def __init__(self, policy: CommitPolicy, request: PolicyRequest, names: tuple[str, ...]) -> None:
        self._policy = policy
        self._request = request
        self._names = names

    @property
    def reads(self) -> Reads:
        return Reads(keys=tuple(keys.policy(name) for name in self._names))

    def check(self, view: View, now_ms: int) -> None:
        head = view.head
        seen = PolicyView(
            records=_Records({name: _value(view, name) for name in self._names}),
            running=frozenset() if head is None else frozenset(head.threads),
            threads=0 if head is None else head.thread_count,
            now_ms=now_ms,
        )
        answer: object
        try:
            answer = self._policy.check(self._request, seen)
        except Exception as error:
            raise _told(error, self._request, "check") from error
        _sync(answer, self._policy, self._request, "check")


def ask(policy: CommitPolicy, command: c.AnyCommand, audience: Audience) -> Asked:
    """
    Raises:
        PolicyFailed: it could not say what it reads.
        Rejected: it refuses already.
    """
    request = _request(command, audience)
    names: object
    try:
        names = policy.reads(request)
    except Exception as error:
        raise _told(error, request, "reads") from error
    _sync(None if isinstance(names, tuple) else names, policy, request, "reads")
    if not isinstance(names, tuple) or len(names) > POLICY_READS_MAX:
        raise PolicyFailed(request.command, f"reads() is a tuple of at most {POLICY_READS_MAX} names")
    try:
        return Asked(policy, request, tuple(check_id("reads", name) for name in dict.fromkeys(names)))
    except DurableError as error:
        raise PolicyFailed(request.command, f"reads() is a tuple of names: {error.what}") from error


class _Records(Mapping[str, Any]):
    """Says what is missing in `reads`, instead of an empty KeyError."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise Misuse(f"the policy record {name!r} was not read: name it in reads()")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _value(view: View, name: str) -> Any:
    key = keys.policy(name)
    stored = view.get(key)
    return None if stored is None else decode_json(decode(PolicyRecord, stored, key=key).value.inline, key=key)


def _told(error: Exception, request: PolicyRequest, method: str) -> DurableError:
    """The policy's own refusal, or that it failed. Not with the text of a stranger's error: it may hold a secret."""
    if isinstance(error, Rejected) and not isinstance(error, Misuse):
        return error
    reason = error.what if isinstance(error, Misuse) else f"{type(error).__name__} in {method}()"
    return PolicyFailed(request.command, reason)


def _sync(answer: object, policy: CommitPolicy, request: PolicyRequest, method: str) -> None:
    if answer is None:
        return
    if inspect.iscoroutine(answer):
        answer.close()
    if inspect.isawaitable(answer):
        raise PolicyFailed(request.command, f"{type(policy).__name__}.{method} is to be awaited; nothing is, here")
    if method == "check":
        # A policy that answers False has not refused, and who wrote it believes that it has.
        raise PolicyFailed(request.command, f"check() returned {type(answer).__name__}: it refuses by raising")


@cache
def _fields(kind: type[c.AnyCommand]) -> tuple[str, ...]:
    """The fields of a command that are identifiers: plain text that is nobody's words."""
    return tuple(f.name for f in msgspec.structs.fields(kind) if f.type is str and f.name not in _NOT_NAMES)


def _request(command: c.AnyCommand, audience: Audience) -> PolicyRequest:
    names = {name: str(getattr(command, name)) for name in _fields(type(command))}
    return PolicyRequest(
        command=str(command.__struct_config__.tag),
        audience=audience,
        session=command.session,
        thread_id=names.pop("thread_id", ""),
        turn_id=names.pop("turn_id", ""),
        request_id=names.pop("request_id", ""),
        names=names,
        tools=tuple(tool.name for tool in command.tools if tool.name) if isinstance(command, c.CommitStep) else (),
    )
