"""The table, read back, and errors on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple, cast

import msgspec

from agentscope_durable.contracts.errors import base, program, request, retry, state, unconfirmed
from agentscope_durable.contracts.errors.base import DurableError, Rejected, Retry, Unconfirmed, revive
from agentscope_durable.contracts.identity import ThreadKey


class ErrorRow(NamedTuple):
    """One line of the table."""

    name: str
    parent: str
    branch: str
    code: str
    http_status: int
    exit_code: int
    meaning: str
    facts: tuple[str, ...]
    advice: str


_BRANCHES: tuple[type[DurableError], ...] = (Rejected, Retry, Unconfirmed)
_FILES: tuple[ModuleType, ...] = (base, request, state, program, retry, unconfirmed)


def _classes() -> list[type[DurableError]]:
    """The classes of these files in the order they are written, so that none can be forgotten in the table."""
    return [
        entry
        for file in _FILES
        for entry in cast("list[object]", list(vars(file).values()))
        if isinstance(entry, type) and issubclass(entry, DurableError) and entry.__module__ == file.__name__
        if entry is not DurableError
    ]


def branch_of(cls: type[DurableError]) -> type[DurableError]:
    """Rejected, Retry or Unconfirmed: the branch an error class belongs to."""
    return next(branch for branch in _BRANCHES if issubclass(cls, branch))


def error_table() -> list[ErrorRow]:
    """The whole table, one row for each class, branches first, as they stand in their files.

    Pure: two calls give equal rows. The documentation is generated from it.
    """
    return [
        ErrorRow(
            name=cls.__name__,
            parent=cls.__bases__[0].__name__,
            branch=branch_of(cls).__name__,
            code=cls.code.value,
            http_status=cls.http_status,
            exit_code=cls.exit_code,
            meaning=(cls.__doc__ or "").splitlines()[0],
            facts=cls.fact_names(),
            advice=cls.advice,
        )
        for cls in _classes()
    ]


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside an exception group, at any depth; any other error is its own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves(part)]


def said(error: BaseException) -> str:
    """The text of any error; one whose `__str__` fails has none."""
    try:
        return str(error)
    except Exception as defect:  # noqa: BLE001 - the error matters, not its text
        return f"its text cannot be told: {type(defect).__name__}"


def to_wire(error: DurableError) -> dict[str, object]:
    """An error as a JSON object: `code`, `type`, `message` (without advice) and `facts`; `advice` if it has its own.

    Facts keep their Python names: they are the names of attributes, not of fields of a request.
    """
    document: dict[str, object] = {
        "code": error.code.value,
        "type": type(error).__name__,
        "message": error.what,
        "facts": cast("dict[str, object]", msgspec.to_builtins(error.facts())),
    }
    return document if error.own_advice is None else document | {"advice": error.own_advice}


def from_wire(document: Mapping[str, object]) -> DurableError:
    """The error a peer raised, as the same class with the same facts (HT-27).

    A class this release does not know becomes the most general one with its code; a code it does not know becomes
    `Unconfirmed`, since nothing is known about what happened. Facts of unknown names are left out, missing ones are
    None.

    Raises:
        ValueError: the document is not an error of this library.
    """
    name, code, what = document.get("type"), document.get("code"), document.get("message")
    facts = document.get("facts", {})
    if not (isinstance(name, str) and isinstance(code, str) and isinstance(what, str) and isinstance(facts, Mapping)):
        raise ValueError("not an error document: it needs the strings code, type and message, and the object facts")
    known = _classes()
    cls = next((c for c in known if c.__name__ == name and c.code == code), None)
    if cls is None:
        # Most general first: a branch stands before its classes only if it has a code of its own.
        cls = next((c for c in known if c not in _BRANCHES and c.code == code), Unconfirmed)
    given = dict.fromkeys(cls.fact_names()) | {
        fact: value for fact, value in cast("Mapping[str, object]", facts).items() if fact in cls.fact_names()
    }
    if given.get("thread_key") is not None:
        try:
            given["thread_key"] = msgspec.convert(given["thread_key"], ThreadKey)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an error document: {error}") from None
    advice = document.get("advice")
    return revive(cls, what, given, advice if isinstance(advice, str) else None)
