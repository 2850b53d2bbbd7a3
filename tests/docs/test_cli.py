"""docs/cli.md and docs/diagnosis.md are compared with the code: commands, documents, exit codes, rows."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from agentscope_durable.cli.app import INTERRUPTED, NOT_SHOWN, app
from agentscope_durable.cli.care import DAMAGE, TROUBLE
from agentscope_durable.cli.extra import typer
from agentscope_durable.contracts import commands, messages, views
from agentscope_durable.contracts import examination as examination_words
from agentscope_durable.contracts import explanation as explanation_words
from agentscope_durable.contracts.errors import error_table
from agentscope_durable.contracts.events import EventPage
from agentscope_durable.contracts.status import Actor, ReasonKind
from agentscope_durable.domain.explanation import explain
from tests.domain.test_explanation import situations

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
DIAGNOSIS = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[a-z]+[^|]*) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
COMMANDS = {name: (usage, document) for usage, document in ROWS for name in [usage[1:].split("`")[0].split()[0]]}


def test_every_command_is_in_the_table_with_its_options() -> None:
    group = typer.main.get_command(app)
    known = group.commands  # type: ignore[attr-defined]

    assert COMMANDS.keys() == known.keys()
    for name, (usage, _) in COMMANDS.items():
        declared = {option for parameter in known[name].params for option in parameter.opts if option.startswith("--")}
        assert set(re.findall(r"--[a-z-]+", usage)) <= declared, name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_document_of_a_command_is_a_view_with_these_fields(name: str) -> None:
    document = COMMANDS[name][1]
    known = {**vars(views), **vars(messages), **vars(commands), **vars(explanation_words), **vars(examination_words)}
    known["EventPage"] = EventPage

    for word in re.findall(r"`([A-Z][A-Za-z]+)`", document):
        assert word in known, word
    listed = re.match(r"`([A-Z][A-Za-z]+)`: ((?:`[a-zA-Z]+`,? ?)+)", document)
    if listed:
        fields = msgspec.structs.fields(known[listed[1]])
        assert set(re.findall(r"`([a-zA-Z]+)`", listed[2])) == {field.encode_name for field in fields}


def test_the_exit_codes_are_those_of_the_table_of_errors() -> None:
    section = PAGE.partition("## Exit codes")[2].partition("\n## ")[0]
    named = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}

    assert named == {0, TROUBLE, NOT_SHOWN, INTERRUPTED} | {row.exit_code for row in error_table()}
    assert DAMAGE in named


def test_every_row_of_the_diagnosis_is_explained_with_whose_move_it_is() -> None:
    rows = DIAGNOSIS.partition("| - | - | - | - |")[2]
    told = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", rows, re.MULTILINE))
    actors: dict[ReasonKind, set[Actor]] = {}
    for known in situations():
        for reason in explain(known).reasons:
            actors.setdefault(reason.kind, set()).add(reason.actor)

    assert told.keys() == set(ReasonKind)
    for kind, found in actors.items():
        assert all(actor.value in told[kind] for actor in found), (kind, found, told[kind])
