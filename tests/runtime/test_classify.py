"""Whether trying again may help (RC-07, RC-08)."""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.contracts.errors import (
    AgentFactoryError,
    Conflict,
    CorruptRecord,
    HostClosed,
    Incompatible,
    InvalidRequest,
    LimitExceeded,
    StoreBusy,
    Unavailable,
    Uncertain,
)
from agentscope_durable.runtime.classify import FAILURE_CHARS_MAX, failure_of, incompatible, retryable


@pytest.mark.spec("RC-07")
@pytest.mark.parametrize(
    "error",
    [
        OSError("disk"),
        ConnectionResetError(),
        TimeoutError(),
        TimeoutError(),
        asyncio.CancelledError(),
        Unavailable("away"),
        StoreBusy("db"),
        HostClosed("backend"),
        LimitExceeded("x", 1),
        Uncertain("commit"),
        Conflict("lost a race"),
        ExceptionGroup("several", [OSError(), ExceptionGroup("more", [TimeoutError()])]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_faults_of_the_world_may_pass(error: BaseException) -> None:
    assert retryable(error)


@pytest.mark.spec("RC-08")
@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        RuntimeError("x"),
        AssertionError(),
        KeyError("x"),
        InvalidRequest("x"),
        CorruptRecord("k", "T", "x"),
        AgentFactoryError("agent", "raised"),
        ExceptionGroup("several", [OSError(), ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_faults_of_the_program_stay(error: BaseException) -> None:
    assert not retryable(error)


@pytest.mark.spec("RC-18")
def test_an_incompatible_host_is_found_in_a_group() -> None:
    error = Incompatible("x", required="a", present="b")

    assert incompatible(error)
    assert incompatible(ExceptionGroup("g", [ValueError(), error]))
    assert not incompatible(ValueError())


@pytest.mark.spec("RC-06")
def test_what_is_stored_of_an_error_is_bounded_text() -> None:
    failure = failure_of(ValueError("x" * 10_000), retry=False)

    assert (failure.kind, failure.retryable) == ("ValueError", False)
    assert len(failure.message) == FAILURE_CHARS_MAX
    group = failure_of(ExceptionGroup("g", [OSError("one"), ValueError("two")]), retry=True)
    assert (group.kind, group.message) == ("OSError", "one (and 1 more)")
    assert failure_of(ValueError("\ud800"), retry=False).message == "?"


@pytest.mark.parametrize("text", [lambda _: 1 / 0, lambda _: None], ids=["raises", "no text"])
def test_an_error_whose_text_cannot_be_told_is_stored_all_the_same(text) -> None:
    error = type("Broken", (Exception,), {"__str__": text})()

    assert failure_of(error, retry=False).kind == "Broken"
