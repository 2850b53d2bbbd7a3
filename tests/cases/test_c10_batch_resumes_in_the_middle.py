"""C10: checkpointing existed only around a whole group, so a crash in the middle re-ran tools that had finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import external, final, local, together
from tests.cases.programs import job_of
from tests.census.forks import ForkServer

COUNT = 10
SCRIPTS = {
    "in order": [together(*(local(f"t{n}", value=n) for n in range(COUNT))), final("{results}")],
    "side by side": [together(*(external("ops", f"t{n}") for n in range(COUNT))), final("{results}")],
}


@pytest.mark.case("C10")
@pytest.mark.parametrize(
    ("backend", "after"), [*(("sqlite", n) for n in range(COUNT + 1)), *(("postgres", n) for n in (0, 5, COUNT))]
)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_what_has_finished_is_not_run_again_and_the_rest_is_run_once(
    forks: ForkServer, tmp_path: Path, kind: str, backend: str, after: int
) -> None:
    job = {**job_of(backend, tmp_path), "kind": kind, "die_after": after}
    died = forks.run("tests.cases.programs:ten_calls", job)
    assert died.killed, died.output
    before = EffectLedger(tmp_path / "effects")
    assert before.count("tool") + before.count("effect") == after

    ended = forks.run("tests.cases.programs:ten_calls", {**job, "die_after": -1})
    assert ended.code == 0, ended.output
    told = json.loads(ended.output.splitlines()[-1])
    assert told["done"] == COUNT - after
    assert told["states"] == ["COMPLETED"] * COUNT
    calls = [line["call"] for line in before.lines("tool") + before.lines("effect")]
    assert sorted(calls) == sorted(f"c1.{n}" for n in range(COUNT))
    results = told["answer"].split(", ")
    assert sorted(results) == sorted(str(n) if kind == "in order" else f"t{n} done" for n in range(COUNT))
    assert before.count("model") == 2
