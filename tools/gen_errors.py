"""Writes docs/errors.md from the one table of errors.

python tools/gen_errors.py --write     write the page
python tools/gen_errors.py --check     fail if the page is not what the table says
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agentscope_durable.contracts.errors import ErrorRow, error_table

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"

INTRODUCTION = """\
<!-- Written by tools/gen_errors.py from src/agentscope_durable/contracts/errors/. Do not edit: `make docs`. -->

# Errors

Every error of this library says whose move it is. Catch a branch, and read the attributes; the text is for people.

```text
DurableError
{tree}
```

- **Rejected**: asked like this it can never succeed. Change the request, the state or the program.
- **Retry**: nothing was changed. Ask again, with the same request id.
- **Unconfirmed**: it may have happened, or not. Query it, or repeat it with the *same* request id: a request is
  admitted once, however often it is asked. A new request id could do it twice.

`str(error)` says what happened, to which id, and what to do next. `error.code` is the word used on the wire, in the
CLI's JSON output and in stored failures; it never changes. *Exit* is the exit status of the `durable` command.
A tool that failed, or may have run, is not an error but a value of the Turn.
"""


def page() -> str:
    rows = error_table()
    children: dict[str, list[ErrorRow]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)

    def tree(parent: str, depth: int) -> list[str]:
        lines: list[str] = []
        for row in children.get(parent, []):
            lines.append("  " * depth + row.name)
            lines += tree(row.name, depth + 1)
        return lines

    parts = [INTRODUCTION.format(tree="\n".join(tree("DurableError", 1)))]
    for branch in children["DurableError"]:
        parts.append(f"\n## {branch.name}\n\n{branch.meaning}\n\n")
        parts.append("| error | code | HTTP | exit | when | attributes | what to do |\n")
        parts.append("| - | - | - | - | - | - | - |\n")
        for row in rows:
            if row.branch == branch.name:
                facts = ", ".join(f"`{fact}`" for fact in row.facts)
                parts.append(
                    f"| `{row.name}` | `{row.code}` | {row.http_status} | {row.exit_code} "
                    f"| {row.meaning} | {facts} | {row.advice} |\n"
                )
    return "".join(parts)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    choice = arguments.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="write docs/errors.md")
    choice.add_argument("--check", action="store_true", help="fail if docs/errors.md is stale")
    write: bool = arguments.parse_args().write
    if write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is stale: run `python tools/gen_errors.py --write`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
