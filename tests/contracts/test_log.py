"""What a row of the log says, in the short form it is stored in."""

from __future__ import annotations

import random

import msgspec
import pytest

from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.log import (
    ModelFact,
    PrivateFact,
    StepFact,
    StoredEvent,
    Usage,
    decode_events,
    decode_facts,
    encode_events,
    encode_facts,
)
from agentscope_durable.contracts.status import ModelStatus, StepPhase, StepStatus

TURN = "tqjsy5d7sp35gup2l"
RUN, STEP = f"{TURN}.1", f"{TURN}.1.s1"
ODD = ("", ".", "..", "=", "=x", ".1", "a", "a.", "a..", "a.b", "a.b.", "a.b.c", "ab", "ä.b", "a/b", "null", TURN, RUN)
"""Ids in every relation to each other, and with every character that means something in the short form."""


def event(kind: str, *place: str) -> StoredEvent:
    thread, turn, run, step = (*place, "", "", "", "")[:4]
    return StoredEvent(kind, thread, turn, run, step, msgspec.Raw(msgspec.json.encode({"said": kind})))


def model(call: str, run: str, step: str, message: str) -> ModelFact:
    usage = Usage(900, 120)
    return ModelFact(call, run, step, 1, ModelStatus.COMPLETED, "m", message_id=message, usage=usage, elapsed_ms=3)


def test_a_row_says_where_its_events_happened_once() -> None:
    here = [event(kind, "main", TURN, RUN, STEP) for kind in ("step.phase", "message.completed", "x.app.note")]

    column = encode_events(here)

    assert column == (
        b'[["step.phase",{"said":"step.phase"},"main","tqjsy5d7sp35gup2l",".1",".s1"],'
        b'["message.completed",{"said":"message.completed"}],["x.app.note",{"said":"x.app.note"}]]'
    )
    assert decode_events(column, 7) == here


def test_the_ids_of_facts_are_written_after_the_turn_they_begin_with() -> None:
    facts: list[PrivateFact] = [
        StepFact(STEP, RUN, 1, StepPhase.MODEL, resumed_from=f"{TURN}.0.s4"),
        model(f"{RUN}.m1", RUN, STEP, f"{TURN}.r1"),
    ]

    column = encode_facts(facts)

    assert column.count(TURN.encode()) == 1
    assert decode_facts(column, "main at 2") == facts


def test_an_event_after_a_pruned_one_is_still_where_it_was() -> None:
    events = [event("a", "main", TURN, RUN, STEP), event("b", "main", TURN, RUN, STEP), event("c", "main", TURN)]
    for gone in range(8):
        left = [None if gone >> at & 1 else one for at, one in enumerate(events)]

        assert decode_events(encode_events(left), 1) == (left if any(left) else [])


def test_an_event_of_the_session_after_one_of_a_turn_is_of_no_turn() -> None:
    events = [event("session.created"), event("turn.status", "main", TURN), event("session.closed")]

    assert decode_events(encode_events(events), 1) == events


def test_any_ids_come_back_as_they_were() -> None:
    chance = random.Random(11)

    def some() -> str:
        return chance.choice(ODD)

    for _ in range(3000):
        events = [event("e", *chance.choices(ODD, k=4)) for _ in range(3)]
        facts: list[PrivateFact] = [
            model(some(), some(), some(), some()),
            StepFact(some(), some(), 2, StepPhase.ACTING, StepStatus.COMPLETED, some(), 4),
        ]
        chance.shuffle(facts)

        assert decode_events(encode_events(events), 1) == events
        assert decode_facts(encode_facts(facts), "somewhere") == facts


def test_nothing_is_no_bytes() -> None:
    assert (encode_events([]), encode_events([None, None]), encode_facts([])) == (b"", b"", b"")
    assert (decode_events(b"", 1), decode_facts(b"", "somewhere")) == ([], [])


NO_ROWS = (b"[1", b'{"a":1}', b"[[1,2]]", b'[["a"]]', b'["t",[["z",1]]]', b"\xff")
NO_FORM = (b'[["a",{},"main","t","t.1",""]]', b'["t",[["s",".1.s1","t.1",1,"MODEL","RUNNING","",0]]]')


@pytest.mark.parametrize("column", NO_ROWS + NO_FORM)
def test_what_is_no_row_or_holds_an_id_in_no_form_is_refused_with_its_place(column: bytes) -> None:
    with pytest.raises(CorruptRecord, match="events from 12"):
        decode_events(column, 12)
    with pytest.raises(CorruptRecord, match="main at 3"):
        decode_facts(column, "main at 3")
