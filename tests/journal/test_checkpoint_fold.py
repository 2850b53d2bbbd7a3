"""The native state is what its rows say, from the last base on, at every position."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.contracts.errors import CorruptRecord, InvalidRequest
from agentscope_durable.contracts.journal import (
    JOURNAL_FORMAT,
    STATE_VERSION,
    Base,
    Block,
    CacheEntry,
    CacheOrder,
    CheckpointRow,
    Drop,
    Field,
    FromOutcome,
    JournalBatch,
    JournalEntry,
    JournalEventType,
    MessageMeta,
    MetaPatch,
    Patch,
    Trim,
    check_entry_type,
)
from agentscope_durable.journal.checkpoint import base_rows, fold, row_bytes, to_state_json


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def batches(*commits: tuple[CheckpointRow, ...] | JournalBatch) -> list[tuple[int, JournalBatch]]:
    """Commits at the positions 1, 2, ..., each having been stored and read again."""
    stored: list[tuple[int, JournalBatch]] = []
    for position, commit in enumerate(commits, start=1):
        if not isinstance(commit, JournalBatch):
            begins = bool(commit) and isinstance(commit[0], Base)
            commit = JournalBatch(position - 1, (), commit, begins)
        stored.append((position, JournalBatch.decode(commit.encode(), position=position)))
    return stored


def state(*commits: tuple[CheckpointRow, ...] | JournalBatch) -> dict[str, Any]:
    return json.loads(to_state_json(fold(batches(*commits))))


def answered(position: int, *blocks: object) -> JournalBatch:
    """A commit that stores a model's answer."""
    entry = JournalEntry(JournalEventType.MODEL_RESULT, raw({"content": blocks}))
    return JournalBatch(position - 1, (entry,))


CALL = {"type": "tool_call", "id": "c", "input": '{"x": 1}', "state": "pending"}
START = (Base(), Field("summary", None, raw("")), MessageMeta(0, raw({"id": "m", "usage": None}), 0))


# ------------------------------------------------------------ rows


def test_an_empty_state_has_its_fields_and_no_messages() -> None:
    assert state((Base(), Field("session_id", None, raw("s")))) == {"session_id": "s", "context": []}


def test_blocks_are_appended_and_replaced_in_their_place() -> None:
    folded = state(START, (Block(0, 0, raw({"text": "a"})), Block(0, 1, raw({"text": "b"}))), (Block(0, 0, raw("A")),))

    assert folded["context"] == [{"id": "m", "usage": None, "content": ["A", {"text": "b"}]}]


def test_a_patch_changes_fields_without_repeating_the_others() -> None:
    patched = (Patch(0, 0, {"state": raw("finished"), "suggested_rules": raw([1])}),)

    (block,) = state(START, (Block(0, 0, raw(CALL)),), patched)["context"][0]["content"]

    assert block == {**CALL, "state": "finished", "suggested_rules": [1]}


def test_a_block_is_taken_from_the_answer_it_came_in() -> None:
    folded = state(
        START,
        answered(2, {"type": "text", "id": "t", "text": "hello"}, CALL),
        (FromOutcome(0, 0, 2, 0), FromOutcome(0, 1, 2, 1, {"state": raw("allowed")})),
        (Patch(0, 1, {"state": raw("finished")}),),
    )

    assert folded["context"][0]["content"] == [
        {"type": "text", "id": "t", "text": "hello"},
        {**CALL, "state": "finished"},
    ]


def test_an_answer_and_the_block_taken_from_it_may_share_a_commit() -> None:
    both = JournalBatch(1, answered(2, CALL).entries, (FromOutcome(0, 0, 2, 0),))

    assert state(START, both)["context"][0]["content"] == [CALL]


def test_outcomes_of_one_commit_are_counted_on() -> None:
    result = JournalEntry(JournalEventType.TOOL_RESULT, raw({"content": [{"type": "tool_result", "id": "c"}]}))
    other = JournalEntry(JournalEventType.TOOL_INTENT, raw({"content": ["no outcome"]}))
    both = JournalBatch(1, (*answered(2, "hm", CALL).entries, other, result), ())

    folded = state(START, both, (FromOutcome(0, 0, 2, 1), FromOutcome(0, 1, 2, 2)))

    assert folded["context"][0]["content"] == [CALL, {"type": "tool_result", "id": "c"}]


def test_a_failed_request_beside_an_answer_does_not_hide_it() -> None:
    failed = JournalEntry(JournalEventType.MODEL_RESULT, raw({"error": "TimeoutError"}))
    commit = JournalBatch(1, (failed, *answered(2, CALL).entries), (FromOutcome(0, 0, 2, 0),))

    assert state(START, commit)["context"][0]["content"] == [CALL]


def test_the_fields_of_a_message_are_patched_or_written_anew() -> None:
    usage = (MetaPatch(0, {"usage": raw({"input_tokens": 10})}),)
    shorter = (Block(0, 0, raw(1)), Block(0, 1, raw(2)), MessageMeta(0, raw({"id": "m", "usage": "u"}), 1))

    assert state(START, usage)["context"] == [{"id": "m", "usage": {"input_tokens": 10}, "content": []}]
    assert state(START, shorter)["context"] == [{"id": "m", "usage": "u", "content": [1]}]


def test_a_trimmed_context_keeps_its_first_messages() -> None:
    folded = state(START, (MessageMeta(1, raw({"id": "n"}), 0), Block(1, 0, raw(1))), (Trim(1),), (Trim(0),))

    assert folded["context"] == []


def test_a_field_changes_as_a_whole_or_by_member() -> None:
    start = (Base(), Field("reply_context", None, raw({"reply_id": "r", "cur_iter": 0, "schema": {"big": 1}})))
    folded = state(
        start,
        (Field("reply_context", "cur_iter", raw(1)), Field("middle_context", None, raw({}))),
        (Field("middle_context", "a/b.c", raw([1])), Field("middle_context", "gone", raw(1))),
        (Drop("middle_context", "gone"),),
    )

    assert folded["reply_context"] == {"reply_id": "r", "cur_iter": 1, "schema": {"big": 1}}
    assert folded["middle_context"] == {"a/b.c": [1]}


def test_cached_files_are_stored_once_and_moved_by_number() -> None:
    start = (Base(), Field("tool_context", None, raw({"max_cache_files": 2})))
    a, b = {"file_path": "a"}, {"file_path": "b"}
    commits = (
        start,
        (CacheEntry(0, raw(a)), CacheEntry(1, raw(b)), CacheOrder((0, 1))),
        (CacheOrder((1, 0)),),
        (CacheOrder((0,)),),
    )

    assert state(*commits[:3])["tool_context"] == {"max_cache_files": 2, "read_file_cache": [b, a]}
    assert state(*commits)["tool_context"]["read_file_cache"] == [a]


def test_an_empty_cache_is_an_empty_list_also_where_it_is_the_only_member() -> None:
    assert state((Base(), Field("tool_context", None, raw({})), CacheOrder(())))["tool_context"] == {
        "read_file_cache": []
    }


def test_bodies_come_out_as_they_went_in() -> None:
    exact = b'{"text":"\\u0000 \\ud83d\\ude00","n":100000000000000000000000000000000000000000,"f":1.10,"z":1,"a":2}'

    stored = to_state_json(fold(batches((*START, Block(0, 0, msgspec.Raw(exact))))))

    assert exact in stored


# ------------------------------------------------------------ epochs


def test_restoring_begins_at_the_last_base() -> None:
    old = (Base(), Field("summary", None, raw("")), MessageMeta(0, raw({"id": "old"}), 0))
    new = (Base(), Field("summary", None, raw("S")), MessageMeta(0, raw({"id": "kept"}), 0))
    everything = batches(old, (Block(0, 0, raw(1)),), new, (Block(0, 0, raw(2)),))

    from_the_base = fold(everything[2:])

    assert from_the_base == fold(everything)
    assert (from_the_base.base_at, from_the_base.position) == (3, 4)
    assert json.loads(to_state_json(from_the_base)) == {"summary": "S", "context": [{"id": "kept", "content": [2]}]}


def test_every_position_stays_restorable() -> None:
    everything = batches(START, *((Block(0, j, raw(j)),) for j in range(5)))

    for position in range(1, 7):
        content = json.loads(to_state_json(fold(everything[:position])))["context"][0]["content"]
        assert content == list(range(position - 1))


def test_stored_bytes_count_from_the_base() -> None:
    everything = batches(START, (Block(0, 0, raw("x" * 1000)),), START)

    assert fold(everything[:2]).stored_bytes > 1000
    assert fold(everything).stored_bytes == sum(map(row_bytes, START)) < 200


def test_a_thread_without_a_checkpoint_has_nothing_to_restore() -> None:
    checkpoint = fold(batches(answered(1, CALL)))

    assert (checkpoint.base_at, checkpoint.position) == (None, 1)
    with pytest.raises(CorruptRecord, match="position 1"):
        to_state_json(checkpoint)


def test_a_state_becomes_the_base_of_another_thread() -> None:
    source = {
        "session_id": "s",
        "summary": [{"type": "text", "text": "S"}],
        "tool_context": {"read_file_cache": [{"file_path": "a"}, {"file_path": "a"}], "activated_groups": ["g"]},
        "middle_context": {"k": {"deep": [1, {"x": None}]}},
        "context": [{"id": "m", "content": [CALL, {"text": "é"}]}, {"id": "n", "content": []}],
    }

    rows = base_rows(json.dumps(source).encode())

    assert state(rows) == source
    assert state((*rows, Trim(1)))["context"] == source["context"][:1]


def test_what_is_no_state_makes_no_base() -> None:
    for wrong in (b"[]", b'{"context": {}}', b'{"context": [1]}', b'{"tool_context": []}', b"{"):
        with pytest.raises(CorruptRecord):
            base_rows(wrong)


# ------------------------------------------------------------ damage


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Block(1, 0, raw(1)), "no message 1"),
        (Block(0, 2, raw(1)), "has 1 blocks, so 2 is not its next"),
        (Block(0, -1, raw(1)), "has 1 blocks"),
        (Block(-1, 0, raw(1)), "no message -1"),
        (Patch(0, 1, {"state": raw(1)}), "no block 1"),
        (Patch(0, 0, {"state": raw(1)}), "Expected `object`"),
        (MetaPatch(3, {}), "no message 3"),
        (MessageMeta(0, raw({}), 2), "has 1 blocks, not 2"),
        (MessageMeta(2, raw({}), 0), "no message 2"),
        (MessageMeta(1, raw({}), 1), "no message 1"),
        (Trim(2), "there are 1 messages, not 2"),
        (FromOutcome(0, 1, 7, 0), "position 7"),
        (FromOutcome(0, 1, 2, 5), "no block 5"),
        (Field("nothing", "key", raw(1)), "no field 'nothing'"),
        (Field("summary", "key", raw(1)), "Expected `object`"),
        (Drop("nothing", "key"), "no field 'nothing'"),
        (Drop("tasks_context", "key"), "no member to drop"),
        (CacheOrder((4,)), "was not stored"),
        (Base(), "stands first"),
    ],
)
def test_a_row_that_refers_to_something_missing_names_itself(row: CheckpointRow, reason: str) -> None:
    start = (*START, Field("tasks_context", None, raw({})), Block(0, 0, raw("a text")))

    with pytest.raises(CorruptRecord) as refused:
        fold(batches(start, answered(2, CALL), (Trim(1), row)))

    assert "journal position 3" in str(refused.value)
    assert f"row 1 ({type(row).__name__})" in refused.value.reason
    assert reason in refused.value.reason


def test_an_answer_before_the_base_is_missing() -> None:
    with pytest.raises(CorruptRecord, match="position 1"):
        fold(batches(answered(1, CALL), START, (FromOutcome(0, 0, 1, 0),)))


def test_rows_without_a_base_are_refused() -> None:
    with pytest.raises(CorruptRecord, match="no base"):
        fold(batches((Trim(0),)))


def test_the_flag_and_the_rows_agree_on_a_base() -> None:
    for damaged in (JournalBatch(0, (), START, False), JournalBatch(0, (), (), True)):
        with pytest.raises(CorruptRecord, match="other way round"):
            fold(batches(damaged))


def test_batches_out_of_order_are_refused() -> None:
    first, second = batches(START, (Trim(1),))

    for order in ([second, first], [first, first], [(5, second[1]), (6, JournalBatch(3))]):
        with pytest.raises(CorruptRecord):
            fold(order)


@given(st.data())
def test_a_damaged_batch_is_refused_or_reads_as_another_batch(data: st.DataObject) -> None:
    stored = JournalBatch(4, answered(5, CALL).entries, (*START, Patch(0, 0, {"a": raw(1)})), True).encode()
    at = data.draw(st.integers(0, len(stored) - 1))
    damaged = stored[:at] + data.draw(st.binary(max_size=2)) + stored[at + 1 :]

    try:
        batch = JournalBatch.decode(damaged, position=5)
    except CorruptRecord as refused:
        assert refused.key == "journal position 5"
    else:
        assert JournalBatch.decode(batch.encode(), position=5) == batch


# ------------------------------------------------------------ the format


def test_a_batch_reads_back_as_it_was_written() -> None:
    rows: tuple[CheckpointRow, ...] = (
        Base(),
        Field("a", None, raw(1)),
        Field("a", "b", raw(1)),
        Drop("a", "b"),
        CacheEntry(1, raw({})),
        CacheOrder((1, 2)),
        MessageMeta(0, raw({}), 0),
        MetaPatch(0, {"usage": raw(None)}),
        Block(0, 0, raw({})),
        FromOutcome(0, 0, 1, 0),
        FromOutcome(0, 0, 1, 0, {"state": raw("finished")}),
        Patch(0, 0, {"state": raw("finished")}),
        Trim(0),
    )
    batch = JournalBatch(7, (JournalEntry("x.team/word", raw({"é": "\u2028"})),), rows, True)

    assert JournalBatch.decode(batch.encode(), position=8) == batch
    assert JournalBatch.decode(JournalBatch(7).encode(), position=8) == JournalBatch(7)


def test_the_stored_form_is_format_2() -> None:
    batch = JournalBatch(
        41,
        (JournalEntry(JournalEventType.MODEL_RESULT, msgspec.Raw(b'{"content":[{"id":"t"}]}')),),
        (FromOutcome(0, 1, 42, 0), Patch(0, 0, {"state": raw("finished")}), Field("reply_context", "cur_iter", raw(1))),
    )

    assert batch.encode() == (
        b'[41,[["model/result",{"content":[{"id":"t"}]}]],'
        b'[["r",0,1,42,0,null],["p",0,0,{"state":"finished"}],["f","reply_context","cur_iter",1]],false]'
    )
    assert (STATE_VERSION, JOURNAL_FORMAT) == ("agentscope-thread-journal-v2", 2)


def test_entries_are_native_or_an_applications_own() -> None:
    for accepted in (*JournalEventType, "x.audit", "x.team-1/word.v2", "x.a/b/c"):
        assert check_entry_type(accepted) == accepted
    for refused in (
        "",
        "run",
        "run/started",
        "x",
        "x.",
        "x./a",
        "x.a//b",
        "y.a",
        "X.a",
        "x.a b",
        "x.é",
        "x." + "a" * 127,
    ):
        with pytest.raises(InvalidRequest):
            check_entry_type(refused)


def test_bodies_are_spliced_in_and_not_encoded_again() -> None:
    body = msgspec.Raw(b'{"text": "spaces and \\u00e9 stay"}')

    assert bytes(body) in JournalBatch(0, (JournalEntry("x.a", body),), (Base(), Block(0, 0, body)), True).encode()
