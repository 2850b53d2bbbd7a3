"""PostgreSQL's faults in our own words.

Rule 1: what the server refused with an error is rolled back, and nothing of it was written. What ends the connection
says nothing about a statement that was under way: it may be committed, and only the log can tell.
Rule 2: a role, a right or a table that is refused while the store is being opened is the caller's to correct. When the
store is open it has worked a moment ago, and an operator is at it: what needs it waits, and nothing ends over it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from agentscope_durable.contracts.errors import (
    DurableError,
    Forbidden,
    Misuse,
    NotFound,
    StoreBusy,
    StoreFull,
    StoreReadOnly,
    Unavailable,
)
from agentscope_durable.stores._postgres_driver import asyncpg

__all__ = ["FAULTS", "lost", "one_of_them", "raced", "refused", "translate"]

FAULTS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)
"""What a statement or a connection can fail with that is not our own doing. The third is what asyncpg says when a
server ends a connection just as it is used."""
_READ_ONLY: Final = frozenset({"25006"})
_BUSY: Final = frozenset({"40001", "40P01", "55P03", "57014", "55006"})
_FULL: Final = frozenset({"53100"})
_FORBIDDEN: Final = frozenset({"42501", "28000", "28P01"})
_MISSING: Final = frozenset({"3D000", "3F000", "42P01", "42703"})
_DATA: Final = ("22", "23", "54", "42")
_ENDED: Final = ("08", "57P", "58")
_RACED: Final = frozenset({"40001", "40P01"})
_EVERYBODYS: Final = _FORBIDDEN | _MISSING
"""What the server refuses to whoever asks, whatever for."""
_FORBIDDEN_ADVICE: Final = "Grant the role what docs/postgresql.md lists, or correct the user and the password"
_MISSING_ADVICE: Final = (
    "Make its tables once with `PostgresBackend.initialize_schema`, or correct the database or schema"
)
_GOES_ON: Final = "then ask again, with the same request id; running Turns go on by themselves"


def _state(error: BaseException) -> str:
    return str(getattr(error, "sqlstate", None) or "") if isinstance(error, asyncpg.PostgresError) else ""


def lost(error: BaseException) -> bool:
    """Whether the connection ended with it, so that what was sent may have happened."""
    if isinstance(error, asyncpg.PostgresError):
        fatal = getattr(error, "severity_en", None) in ("FATAL", "PANIC")
        return fatal or isinstance(error, asyncpg.PostgresConnectionError) or _state(error).startswith(_ENDED)
    return isinstance(error, (*FAULTS, asyncio.IncompleteReadError)) and not isinstance(error, DurableError)


def refused(error: BaseException) -> bool:
    """Whether the server, or the driver before it sent anything, refused what was asked: nothing of it is written."""
    return not lost(error) and (bool(_state(error)) or isinstance(error, DurableError | asyncpg.DataError))


def raced(error: BaseException) -> bool:
    """Whether the server gave it up for the sake of somebody else's transaction: nothing is written, decide again."""
    return _state(error) in _RACED


def one_of_them(error: BaseException) -> bool:
    """Whether a value of some change is at fault, and not what all of them need."""
    state = _state(error)
    if state in _EVERYBODYS:
        return False
    return state.startswith(_DATA) or isinstance(error, asyncpg.DataError | UnicodeError)


def translate(error: BaseException, location: str, *, opening: bool = False) -> BaseException:
    """A fault as an error of this library. Nothing was written when it is raised.

    Args:
        opening: the store is being opened (rule 2).
    """
    if isinstance(error, DurableError | asyncio.CancelledError):
        return error
    state = _state(error)
    if state in _READ_ONLY:
        ours: DurableError = StoreReadOnly(location)
    elif state in _BUSY:
        ours = StoreBusy(location)
    elif state in _FULL:
        ours = StoreFull(location)
    elif state in _FORBIDDEN and opening:
        ours = Forbidden("the store's role or password", identity=location).advising(_FORBIDDEN_ADVICE)
    elif state in _FORBIDDEN:
        ours = Unavailable(
            f"the store {location!r} refuses the role, its password or a right that it had ({state})"
        ).advising(f"{_FORBIDDEN_ADVICE}; {_GOES_ON}")
    elif state in _MISSING and opening:
        ours = NotFound("store", location).advising(_MISSING_ADVICE)
    elif state in _MISSING:
        ours = Unavailable(
            f"the database, schema or tables of the store {location!r} are not there any more ({state})"
        ).advising(f"Bring back what was there, or correct the database or schema; {_GOES_ON}")
    elif isinstance(error, asyncpg.PostgresError) and not lost(error) and state.startswith(_DATA):
        ours = Misuse(f"a change cannot be stored: {type(error).__name__} ({state})")
    elif isinstance(error, FAULTS):
        reason = f" ({state})" if state else ""
        ours = Unavailable(f"the store {location!r} cannot be reached: {type(error).__name__}{reason}")
    else:
        return error
    ours.__cause__ = error
    return ours
