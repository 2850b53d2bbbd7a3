"""What a model wrote and what is stored of native objects, when it is not what it should be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentscope_durable.adapters.agentscope.codec import (
    chat_response,
    native_blocks,
    read_answer,
    structured_response,
)
from agentscope_durable.adapters.agentscope.models import complete
from agentscope_durable.contracts.errors import CorruptRecord

PIECES = [b"", b"\x00", b"\xff", b"[", b'"', b"9" * 400, b"null", b"1e999", b"-", b"{}"]
DEEP = "[" * 100_000
ANSWER = (
    b'{"content":[{"type":"text","id":"b","text":"hello"},{"type":"tool_call","id":"c","name":"look","input":"{}"}],'
    b'"id":"r","created_at":"2026-01-01","finished_reason":"completed","reasoning":1,"attempt":1,'
    b'"usage":{"input_tokens":1,"output_tokens":2,"time":0.5},"metadata":{}}'
)
RECEIPT = (
    b'{"content":{"a":1},"id":"s","created_at":"2026-01-01",'
    b'"usage":{"input_tokens":1,"output_tokens":2,"time":1.5},"metadata":{}}'
)


def _answer(data: bytes) -> Any:
    return chat_response(read_answer(msgspec.Raw(data), position=7))


READERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "answer": (ANSWER, _answer),
    "block": (b'{"type":"text","id":"b","text":"hello"}', lambda data: native_blocks([msgspec.Raw(data)])),
    "receipt": (RECEIPT, lambda data: structured_response(msgspec.Raw(data))),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_was_stored_is_read(reader: str) -> None:
    stored, read = READERS[reader]
    assert read(stored)


@pytest.mark.parametrize("reader", READERS)
@given(data=st.data())
def test_a_broken_byte_of_a_native_object_is_read_as_something_else_or_is_corrupt(
    reader: str, data: st.DataObject
) -> None:
    stored, read = READERS[reader]
    content = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        piece = data.draw(
            st.sampled_from([b"", b"\x00", b"\xff", b"[", b'"', b"9" * 400, b"null", b"1e999", b"-", b"{}"])
        )
        content[at : at + data.draw(st.integers(0, 8))] = piece
    with contextlib.suppress(CorruptRecord):
        read(bytes(content))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("data", [DEEP.encode(), b"\xff", b"null", b"[]", b"{}", b'{"type":"text"}', b'{"usage":7}'])
def test_what_is_no_native_object_is_corrupt(reader: str, data: bytes) -> None:
    """They went through as the errors of whoever read them, which no store and no operator is told of (0045)."""
    with pytest.raises(CorruptRecord):
        READERS[reader][1](data)


@given(st.text(st.characters(), max_size=40))
@example(f'{{"a":{DEEP}}}')
@example("}")
@example('{"a":1}')
def test_arguments_on_their_way_are_whole_or_not(text: str) -> None:
    assert complete(text) in (True, False)


def test_arguments_of_endless_nesting_are_not_whole() -> None:
    assert not complete(f'{{"a":{DEEP}}}')
