"""The code in the documents runs.

In README*.md and docs/**/*.md a fenced block with the info string `python` runs; `python no-run` does
not. The blocks of one file run in order, in one process of their own, in an empty folder, with no
network and no key to count on. A block may use `await` at its top level. A block inside an HTML comment runs too
and is not shown: that is where a document keeps its set-up.
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
SECONDS_MAX = 120

# Compiled under the document's name, with each block on its own lines: a traceback points there.
RUNNER = """
import ast, asyncio, inspect, sys
name, text = sys.argv[1], sys.stdin.read()
code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
scope = {"__name__": "__main__"}
if code.co_flags & inspect.CO_COROUTINE:
    asyncio.run(eval(code, scope))
else:
    exec(code, scope)
"""


def runnable(text: str) -> str:
    """The runnable blocks of a document, each line where it stands in the document; "" when there is none."""
    lines: list[str] = []
    fence: re.Match[str] | None = None
    found = False
    for line in text.splitlines():
        match = FENCE.match(line)
        kept = ""
        if fence is not None and match and match["info"] == "":
            fence = None
        elif fence is None and match:
            fence = match
            found = found or match["info"].split() == ["python"]
        elif fence is not None and fence["info"].split() == ["python"]:
            kept = line.removeprefix(fence["indent"])
        lines.append(kept)
    return "\n".join(lines) + "\n" if found else ""


def run(name: str, source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # A document promises to work as it stands: no setting of this machine may help it.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DURABLE_", "OPENAI_"))}
    return subprocess.run(
        [sys.executable, "-c", RUNNER, name],
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

<!--
```python
assert seen == [1, 2]
print(open("left.txt", "w").write("here"))
```
-->
"""


def test_the_blocks_of_a_document_run_in_order_in_a_folder_of_their_own(tmp_path: Path) -> None:
    done = run("example.md", runnable(EXAMPLE), tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "left.txt").read_text() == "here"


def test_a_failure_points_into_the_document(tmp_path: Path) -> None:
    done = run("example.md", runnable("# Title\n\n```python\nfine = 1\nraise ValueError('no')\n```\n"), tmp_path)

    assert done.returncode == 1
    assert 'File "example.md", line 5' in done.stderr


def test_a_document_without_runnable_code_has_none() -> None:
    assert runnable("# Title\n```text\npython\n```\n```python no-run\nx\n```\n") == ""
