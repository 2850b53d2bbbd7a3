"""What may be submitted, and what a public message is."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.errors import InvalidRequest, TooLarge
from agentscope_durable.contracts.ids import MessageId, RequestId
from agentscope_durable.contracts.messages import (
    INPUT_BYTES_MAX,
    Audio,
    Base64,
    Content,
    Image,
    Input,
    InputKind,
    Message,
    Role,
    Text,
    Url,
    Video,
    as_input,
    input_digest_value,
)

PICTURE = base64.b64encode(b"\x89PNG picture").decode()


def refusal_of(given: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        as_input(given)  # type: ignore[arg-type]
    return caught.value


# ------------------------------------------------------------ inputs


@pytest.mark.spec("MG-01")
def test_a_string_is_an_input_of_one_text() -> None:
    assert as_input("Describe this workspace") == Input("1", [Text("Describe this workspace")])
    assert as_input(Input("1", [Text("a"), Text("b")])) == Input("1", (Text("a"), Text("b")))


@pytest.mark.case("C63")
@pytest.mark.parametrize(
    "text", [" \n.", "a\x00b", "\uffff", "\U0001f469\u200d\U0001f680", "e\u0301", "\u202e", "x" * 2**20]
)
def test_unusual_text_is_admitted_exactly(text: str) -> None:
    admitted = as_input(text)

    assert msgspec.json.decode(msgspec.json.encode(admitted), type=Input) == admitted
    assert admitted.content[0] == Text(text)


@pytest.mark.case("C63")
def test_a_lone_surrogate_is_refused_at_admission_with_its_path() -> None:
    assert refusal_of("a\ud800").path == "$.content[0].text"
    error = refusal_of(Input("1", [Text("fine"), Image(Url("https://example.com/\udc00", "image/png"))]))
    assert error.path == "$.content[1].source.url"


@pytest.mark.parametrize("kind", [Image, Audio, Video])
@pytest.mark.parametrize("source", [Url("https://example.com/a", "x-any/thing"), Base64(PICTURE, "image/png")])
@pytest.mark.spec("MG-04")
def test_each_kind_of_media_travels_by_url_and_by_base64(kind: Any, source: Url | Base64) -> None:
    admitted = as_input(Input("1", [Text("look"), kind(source)]))

    read = as_input(durable_json.loads(msgspec.json.encode(admitted)))  # type: ignore[arg-type]
    assert read == admitted
    assert isinstance(read.content[1], kind)


@pytest.mark.spec("PT-11")
def test_the_wire_form_is_tagged_and_camel_case() -> None:
    given = Input("1", [Text("look"), Image(Url("https://example.com/a.png", "image/png"))])

    assert input_digest_value(as_input(given)) == {
        "version": "1",
        "content": [
            {"type": "text", "text": "look"},
            {
                "type": "image",
                "source": {"type": "url", "url": "https://example.com/a.png", "mediaType": "image/png"},
            },
        ],
    }


@pytest.mark.spec("MG-03")
def test_a_native_message_is_refused_by_its_name() -> None:
    class Msg:
        content = "hello"

    Msg.__module__ = "agentscope.message"

    for foreign in (Msg(), Input("1", [Msg()]), Input("1", [Image(Msg())])):  # type: ignore[list-item,arg-type]
        error = refusal_of(foreign)
        assert "agentscope.message" in error.reason and "Msg" in error.reason
        assert "Text" in error.reason or "Url" in error.reason


@pytest.mark.parametrize("given", [None, 5, b"text", ["text"], Text("text"), object()])
@pytest.mark.spec("MG-03")
def test_anything_else_is_refused(given: object) -> None:
    assert "is not an input" in refusal_of(given).reason


@pytest.mark.spec("MG-07")
@pytest.mark.parametrize("version", ["2", "", "1.0", 1, None])
def test_another_version_is_refused(version: Any) -> None:
    assert refusal_of(Input(version, [Text("a")])).path == "$.version"
    assert refusal_of({"version": version, "content": [{"type": "text", "text": "a"}]}).path == "$.version"


@pytest.mark.spec("MG-08")
def test_no_content_is_refused() -> None:
    for empty in (Input("1", []), Input(), {"version": "1", "content": []}, {"version": "1"}):
        assert refusal_of(empty).path == "$.content"


@pytest.mark.spec("MG-08")
@pytest.mark.parametrize(
    "blank", ["", " ", "\t\r\n", "\u00a0\u3000", Input("1", [Text(""), Text("\n")])], ids=lambda value: repr(value)[:20]
)
def test_nothing_but_white_space_is_no_content(blank: Any) -> None:
    refusal = refusal_of(blank)
    assert (refusal.path, "says nothing" in refusal.reason) == ("$.content", True)


def test_media_needs_no_words() -> None:
    picture = Image(Url("https://example.org/a.png", "image/png"))
    assert as_input(Input("1", [Text(""), picture])).content == (Text(""), picture)
    assert as_input(" a\n").content == (Text(" a\n"),), "what was said is not changed"


@pytest.mark.spec("MG-08")
@pytest.mark.parametrize(
    "data", ["", "a", "ab", "abc", "abc=d", "ab==cd==", "a b=", "YWJj\n", "YWJ-", "====", "\u00e9\u00e9==", "YWJj="]
)
def test_base64_that_does_not_decode_is_refused(data: str) -> None:
    assert refusal_of(Input("1", [Audio(Base64(data, "audio/wav"))])).path == "$.content[0].source.data"


@given(st.binary(min_size=1, max_size=100))
def test_base64_of_any_bytes_is_admitted(data: bytes) -> None:
    as_input(Input("1", [Video(Base64(base64.b64encode(data).decode(), "video/mp4"))]))


@pytest.mark.parametrize("media_type", ["", "image", "image/", "/png", "image/png/x", "image png", "image/p\nng", 5])
def test_a_media_type_that_is_none_is_refused(media_type: Any) -> None:
    assert refusal_of(Input("1", [Image(Base64(PICTURE, media_type))])).path == "$.content[0].source.mediaType"


@pytest.mark.parametrize("url", ["", "picture.png", "//example.com", "https:", "https://a b", "https://a\n", None])
def test_a_url_that_is_not_absolute_is_refused(url: Any) -> None:
    assert refusal_of(Input("1", [Image(Url(url, "image/png"))])).path == "$.content[0].source.url"


@pytest.mark.parametrize("media_type", ["image/svg+xml", "audio/ogg;codecs=opus", "application/vnd.a.b-c"])
def test_an_unusual_media_type_is_admitted(media_type: str) -> None:
    as_input(Input("1", [Image(Url("oss://bucket/key", media_type))]))


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"content": "text"}, "$.content"),
        ({"content": [{"type": "document", "text": "a"}]}, "$.content[0].type"),
        ({"content": [{"text": "a"}]}, "$.content[0]"),
        ({"content": [{"type": "text", "text": 5}]}, "$.content[0].text"),
        ({"content": [{"type": "text"}]}, "$.content[0]"),
        ({"content": [{"type": "text", "text": "a", "extra": 1}]}, "$.content[0].extra"),
        ({"content": [{"type": "text", "text": "a"}], "metadata": {}}, "$.metadata"),
        ({"content": [{"type": "image", "source": {"type": "file", "id": "f"}}]}, "$.content[0].source.type"),
        (
            {"content": [{"type": "image", "source": {"type": "url", "url": "a:b", "media_type": "a/b"}}]},
            "$.content[0].source",
        ),
    ],
)
def test_a_wire_form_that_is_not_exactly_an_input_is_refused_with_its_path(document: Any, path: str) -> None:
    assert refusal_of({"version": "1", **document}).path == path


def test_an_input_beyond_its_bound_is_refused_with_both_sizes() -> None:
    fits = "x" * (INPUT_BYTES_MAX - len(msgspec.json.encode(as_input("."))) + 1)
    as_input(fits)

    with pytest.raises(TooLarge) as caught:
        as_input(fits + "x")
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (INPUT_BYTES_MAX + 1, INPUT_BYTES_MAX)


def test_an_admitted_input_does_not_change_with_the_list_it_was_made_of() -> None:
    content: list[Content] = [Text("a")]
    admitted = as_input(Input("1", content))

    content.append(Text("b"))

    assert admitted == as_input("a")
    assert hash(admitted) == hash(as_input("a"))


def test_the_same_input_has_one_digest_however_it_was_given() -> None:
    forms = ["a", Input("1", [Text("a")]), {"content": [{"text": "a", "type": "text"}], "version": "1"}]

    digests = {durable_json.digest(input_digest_value(as_input(form))) for form in forms}  # type: ignore[arg-type]

    assert len(digests) == 1


def test_a_picture_is_not_written_into_logs() -> None:
    assert PICTURE not in repr(as_input(Input("1", [Image(Base64(PICTURE, "image/png"))])))


# ------------------------------------------------------------ public messages

QUESTION = Message(
    id=MessageId("m1"),
    role=Role.USER,
    content=[Text("What is "), Text("this?")],
    sequence=3,
    request_id=RequestId("r1"),
    input_kind=InputKind.SUBMIT,
    created_at_ms=1_764_500_000_000,
)


@pytest.mark.spec("MG-06", "PT-11")
def test_a_users_message_says_which_request_brought_it() -> None:
    assert msgspec.json.decode(msgspec.json.encode(QUESTION)) == {
        "id": "m1",
        "role": "user",
        "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}],
        "sequence": 3,
        "requestId": "r1",
        "inputKind": "submit",
        "createdAtMs": 1_764_500_000_000,
    }


def test_an_answer_keeps_its_structured_output_and_its_media() -> None:
    answer = Message(
        id=MessageId("m2"),
        role=Role.ASSISTANT,
        content=[Text("A cat"), Image(Base64(PICTURE, "image/png"))],
        sequence=4,
        attempt=2,
        revision=3,
        created_at_ms=5,
        incomplete=True,
        structured={"animal": "cat", "sure": 0.5, "legs": [1, 2, 3, None]},
    )

    assert msgspec.json.decode(msgspec.json.encode(answer), type=Message) == answer


def test_a_message_prints_as_its_text() -> None:
    assert str(QUESTION) == QUESTION.text == "What is this?"


def test_a_message_of_a_newer_release_can_be_read() -> None:
    document = msgspec.to_builtins(QUESTION) | {"newField": 1}

    assert msgspec.convert(document, Message) == QUESTION
