"""The README keeps its word: its commands exist, its links lead somewhere, both languages show the same code, and the
five lines that make a script durable do so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT, SECONDS_MAX, documents

ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README_zh.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def blocks(text: str) -> list[tuple[str, str]]:
    return [(match["info"], match["code"]) for match in FENCED.finditer(text)]


def test_both_languages_show_the_same_code() -> None:
    assert blocks(ENGLISH) == blocks(CHINESE)


def test_both_languages_have_the_same_sections() -> None:
    marks = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (ENGLISH, CHINESE)]

    assert marks[0] == marks[1]


def test_both_languages_lead_to_the_same_places() -> None:
    targets = [
        {target for target in LINK.findall(text) if not target.startswith(("#", "README"))}
        for text in (ENGLISH, CHINESE)
    ]

    assert targets[0] == targets[1]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_within_the_project_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{path.name} links to {target}"


def anchors(text: str) -> set[str]:
    """The names a rendered page gives to its headings."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", FENCED.sub("", text), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", title.replace("`", "").lower())
        found.add(kept.replace(" ", "-"))
    return found


def test_the_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code for _, code in blocks(ENGLISH))))
    assert {"demo", "check"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# ------------------------------------------------------------ a new user's five lines

MY_APP = """
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool

from agentscope_durable.testing.scripted_model import Call, by_round, scripted_model


def list_files() -> str:
    \"\"\"List the files of the workspace.\"\"\"
    with open("effects", "a") as ledger:
        ledger.write("list_files\\n")
    return "report.md"


allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
tools = [FunctionTool(list_files, permission=allowed)]
model = scripted_model(by_round(Call("list_files"), "One file: report.md"), ledger="provider")
"""


def before_and_after() -> tuple[str, str]:
    [diff] = [code for info, code in blocks(ENGLISH) if info == "diff"]
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return before + "\n", after + "\n"


def run_script(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run what a user has: the script, and a module `my_app` with a model and tools."""
    (folder / "my_app.py").write_text(MY_APP, encoding="utf-8")
    (folder / "script.py").write_text(script, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


def test_the_script_works_before_the_change(tmp_path: Path) -> None:
    before, _ = before_and_after()

    done = run_script(tmp_path, before)

    assert done.returncode == 0, done.stderr
    assert "One file: report.md" in done.stdout


def test_the_changed_script_gives_the_same_answer(tmp_path: Path) -> None:
    _, after = before_and_after()

    done = run_script(tmp_path, after)

    assert done.returncode == 0, done.stderr
    assert "One file: report.md" in done.stdout
    assert (tmp_path / "durable" / "durable.db").exists()


def test_the_changed_script_run_again_asks_nobody_again(tmp_path: Path) -> None:
    """The same request id: the answer is read back; neither the model nor the tool hears of it."""
    _, after = before_and_after()
    first = run_script(tmp_path, after)
    asked = (tmp_path / "provider").read_text()

    again = run_script(tmp_path, after)

    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert (tmp_path / "provider").read_text() == asked
    assert (tmp_path / "effects").read_text() == "list_files\n"


def test_the_change_is_small() -> None:
    [diff] = [code for info, code in blocks(ENGLISH) if info == "diff"]

    added = [
        line
        for line in diff.splitlines()
        if line.startswith("+") and not line[1:].lstrip().startswith(("import", "from"))
    ]
    assert len(added) <= 10
