"""One table of errors: each says whose move it is, carries its facts, and survives the ways an error travels."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from agentscope_durable.contracts import errors
from agentscope_durable.contracts.errors import (
    Conflict,
    DurableError,
    ErrorCode,
    HostClosed,
    MissingExtra,
    Rejected,
    RequestConflict,
    Retry,
    Unavailable,
    Uncertain,
    Unconfirmed,
    WaitTimeout,
    error_table,
    from_wire,
    to_wire,
)
from agentscope_durable.contracts.ids import SessionKey, ThreadKey

PROJECT = Path(__file__).parents[2]
KEY = ThreadKey(SessionKey("application", "conversation-1"))
CLASSES = [getattr(errors, row.name) for row in error_table()]


def example(cls: type[DurableError]) -> DurableError:
    """An instance made as its signature asks: every fact has a value of its own."""
    if cls in (Rejected, Retry, Unconfirmed) or cls.__init__ is DurableError.__init__:
        return cls("something happened")
    positional: list[object] = []
    named: dict[str, object] = {}
    types = typing.get_type_hints(cls.__init__)
    for number, parameter in enumerate(list(inspect.signature(cls.__init__).parameters.values())[1:]):
        kind = types[parameter.name]
        value: object = KEY if kind is ThreadKey else 40 + number if "int" in str(kind) else f"{parameter.name}-value"
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    return cls(*positional, **named)  # type: ignore[arg-type]


EXAMPLES = [pytest.param(example(cls), id=cls.__name__) for cls in CLASSES]


@pytest.mark.parametrize("error", EXAMPLES)
def test_a_message_says_what_happened_to_which_id_and_what_to_do(error: DurableError) -> None:
    message = str(error)

    assert message == f"{error.what}. {error.advice}"
    assert error.advice and not error.advice.endswith(".")
    identities = [value for name, value in error.facts().items() if name.endswith("_id") or name in ("identity", "key")]
    for identity in identities:
        assert repr(identity) in message


@pytest.mark.parametrize("error", EXAMPLES)
def test_every_parameter_is_kept_as_a_fact(error: DurableError) -> None:
    # Facts and parameters share their names: what was given can be read back.
    for name in list(inspect.signature(type(error).__init__).parameters)[1:]:
        if name != "what":
            assert getattr(error, name) is not None
            assert name in error.facts()


@pytest.mark.parametrize("error", EXAMPLES)
def test_an_error_survives_a_copy_and_a_process_boundary(error: DurableError) -> None:
    for other in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert other.facts() == error.facts()


@pytest.mark.parametrize("error", EXAMPLES)
def test_an_error_survives_the_wire(error: DurableError) -> None:
    document = json.loads(json.dumps(to_wire(error)))

    other = from_wire(document)

    assert type(other) is type(error)
    assert (str(other), other.facts()) == (str(error), error.facts())


@pytest.mark.parametrize("error", EXAMPLES)
def test_advice_for_the_place_it_is_raised_at_goes_with_an_error(error: DurableError) -> None:
    own = copy.copy(error).advising("Stop the hosts and run it again")

    for other in (copy.copy(own), pickle.loads(pickle.dumps(own)), from_wire(json.loads(json.dumps(to_wire(own))))):
        assert str(other) == f"{error.what}. Stop the hosts and run it again"
        assert (other.own_advice, other.facts()) == (own.advice, error.facts())
    assert error.own_advice is None and error.advice == type(error).advice, "of its class alone nothing changed"
    assert "advice" not in to_wire(error)


def test_an_error_of_a_newer_peer_becomes_the_most_general_one_with_its_code() -> None:
    newer = {"code": "CONFLICT", "type": "QueueConflict", "message": "m", "facts": {"queue": "q"}}

    assert type(from_wire(newer)) is Conflict
    assert type(from_wire(newer | {"code": "UNAVAILABLE"})) is Unavailable


def test_of_an_unknown_code_nothing_is_known_so_it_may_have_happened() -> None:
    assert type(from_wire({"code": "MELTED", "type": "Melted", "message": "m"})) is Unconfirmed


def test_a_fact_an_older_peer_did_not_send_is_none() -> None:
    error = from_wire({"code": "CONFLICT", "type": "RequestConflict", "message": "m", "facts": {"request_id": "r"}})

    assert isinstance(error, RequestConflict)
    assert (error.request_id, error.field) == ("r", None)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"code": "CONFLICT"},
        {"code": 5, "type": "Conflict", "message": "m"},
        {"code": "CONFLICT", "type": "Conflict", "message": "m", "facts": []},
        {"code": "TIMEOUT", "type": "WaitTimeout", "message": "m", "facts": {"thread_key": "main"}},
    ],
)
def test_what_is_no_error_document_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not an error document"):
        from_wire(document)


def test_a_wire_fact_cannot_set_what_is_not_a_fact() -> None:
    document = {"code": "CONFLICT", "type": "Conflict", "message": "m", "facts": {"code": "x", "__class__": "y"}}

    error = from_wire(document)

    assert type(error) is Conflict and error.code is ErrorCode.CONFLICT


# ------------------------------------------------------------ the table


def test_the_table_holds_every_public_error_and_every_code() -> None:
    rows = error_table()

    assert rows == error_table()
    others = {name for name in errors.__all__ if name.islower()} | {"DurableError", "ErrorCode", "ErrorRow"}
    assert {row.name for row in rows} == set(errors.__all__) - others
    assert {row.code for row in rows} == set(ErrorCode)
    assert all(row.meaning.endswith(".") for row in rows)


def test_every_error_belongs_to_one_branch_and_no_retry_looks_like_a_rejection() -> None:
    for cls in CLASSES:
        assert sum(issubclass(cls, branch) for branch in (Rejected, Retry, Unconfirmed)) == 1
        assert 400 <= cls.http_status <= 599
        # 0 is success, 1 an uncaught exception, and above 125 the shell's own.
        assert 2 <= cls.exit_code <= 124
    assert not {row.exit_code for row in error_table() if row.branch == "Rejected"} & {
        row.exit_code for row in error_table() if row.branch != "Rejected"
    }


def test_a_timeout_is_a_timeout_error_with_identity_and_a_missing_extra_an_import_error() -> None:
    timeout = WaitTimeout(KEY, "t1", timeout_ms=1)
    assert isinstance(timeout, TimeoutError)
    assert (timeout.thread_key, timeout.turn_id) == (KEY, "t1")

    missing = MissingExtra("the AgentScope adapter", "agentscope")
    assert isinstance(missing, ImportError)
    assert "pip install 'agentscope-durable[agentscope]'" in str(missing)


def test_a_closed_host_is_a_reason_to_ask_another_one() -> None:
    assert isinstance(HostClosed("runtime"), Retry)
    assert isinstance(Uncertain("submit"), Unconfirmed) and not isinstance(Uncertain("submit"), Retry)


def test_the_documentation_is_what_the_table_says() -> None:
    tool = [sys.executable, str(PROJECT / "tools" / "gen_errors.py"), "--check"]

    done = subprocess.run(tool, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(PROJECT / "src")})

    assert done.returncode == 0, done.stderr


def test_importing_the_words_loads_nothing_but_msgspec_and_rfc8785() -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "import agentscope_durable.contracts.errors, agentscope_durable.contracts.messages\n"
        "import agentscope_durable.contracts.ids, agentscope_durable.contracts.durable_json\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    environment = {"PYTHONPATH": str(PROJECT / "src")}

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)

    foreign = set(done.stdout.split()) - set(sys.stdlib_module_names) - {"agentscope_durable"}
    # msgspec itself takes typing_extensions where it is installed.
    assert foreign <= {"msgspec", "rfc8785", "typing_extensions"}
