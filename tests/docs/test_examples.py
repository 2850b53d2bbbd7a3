"""The code in the documents runs.

In README*.md and docs/**/*.md these fenced blocks run, by their info string:

    python          code; it may use `await` at its top level
    python a.py     the content of a file of that name, from there on
    console run     commands, each after "$ ", and what each prints, with "..." for anything within a line

The blocks of one file run in order, in one process of their own, in an empty folder, with no network and no key to
count on. Others, as `python no-run` and `console`, do not run. A block inside an HTML comment runs too and is not
shown: that is where a document keeps its set-up.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
SECONDS_MAX = 600
"""A bound for a document that hangs. The tutorial starts a dozen processes, and a busy machine is slow."""

RUNNER = Path(__file__).with_name("runner.py")


def statement(info: list[str], line: int, content: str) -> str | None:
    """What stands in the program for a block that is not code itself; None: the block does not run."""
    match info:
        case ["python", name] if name.endswith(".py"):
            return f"save({name!r}, {content!r})"
        case ["console", "run"]:
            return f"console({line}, {content!r})"
        case _:
            return None


def runnable(text: str) -> str:
    """The document as a program, each line where it stands in the document; "" when nothing runs."""
    lines: list[str] = []
    fence: re.Match[str] | None = None
    opened = 0
    block: list[str] = []
    found = False
    for number, line in enumerate(text.splitlines()):
        match = FENCE.match(line)
        kept = ""
        if fence is not None and match and match["info"] == "":
            made = statement(fence["info"].split(), opened + 1, "".join(f"{one}\n" for one in block))
            if made is not None:
                lines[opened] = made
                found = True
            fence = None
        elif fence is None and match:
            fence, opened, block = match, number, []
            found = found or match["info"].split() == ["python"]
        elif fence is not None:
            block.append(line.removeprefix(fence["indent"]))
            if fence["info"].split() == ["python"]:
                kept = block[-1]
        lines.append(kept)
    return "\n".join(lines) + "\n" if found else ""


def run(name: str, source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # A document promises to work as it stands: no setting of this machine may help it.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DURABLE_", "OPENAI_"))}
    return subprocess.run(
        [sys.executable, str(RUNNER), name],
        input=source,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def documents() -> list[Path]:
    return sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])


pytestmark = pytest.mark.timeout(SECONDS_MAX + 60)
WITH_CODE = [path for path in documents() if runnable(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_the_document_runs(path: Path, tmp_path: Path) -> None:
    done = run(str(path), runnable(path.read_text(encoding="utf-8")), tmp_path)

    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"


EXAMPLE = """# Title

```python
import asyncio
seen = [1]
```

```python no-run
raise SystemExit("never")
```

```text
```

1. A list:

   ```python
   await asyncio.sleep(0)
   seen.append(2)
   ```

```python left.py
print("here")
print("and 17 more")
```

```console run
$ python left.py > left.txt; python left.py
here
and ... more
$ kill -9 $$
Killed
```

<!--
```python
assert seen == [1, 2]
```
-->
"""


def test_the_blocks_of_a_document_run_in_order_in_a_folder_of_their_own(tmp_path: Path) -> None:
    done = run("example.md", runnable(EXAMPLE), tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "left.txt").read_text() == "here\nand 17 more\n"


def test_a_command_that_prints_something_else_is_a_failure(tmp_path: Path) -> None:
    done = run("example.md", runnable("# Title\n\n```console run\n$ echo one; echo two\none\n```\n"), tmp_path)

    assert done.returncode == 1
    assert "line 3: $ echo one; echo two" in done.stderr
    assert "should print:\none\n\nand printed:\none\ntwo\n" in done.stderr


def test_a_failure_points_into_the_document(tmp_path: Path) -> None:
    done = run("example.md", runnable("# Title\n\n```python\nfine = 1\nraise ValueError('no')\n```\n"), tmp_path)

    assert done.returncode == 1
    assert 'File "example.md", line 5' in done.stderr


def test_a_document_without_runnable_code_has_none() -> None:
    assert runnable("# Title\n```text\npython\n```\n```python no-run\nx\n```\n") == ""
