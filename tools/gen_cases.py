"""Writes docs/cases.md: what went wrong elsewhere, in a line each, and the tests that would notice it here.

python tools/gen_cases.py --write     write the page
python tools/gen_cases.py --check     fail if the page says what is not so

A test that was added since the page was written may be missing on it: two changes that add tests at the same time are
no conflict. A test that is gone, a case that says it has none and has one, or another line, is stale.

The lines stand here; which tests a case has is read from their marks, `@pytest.mark.case("C22")`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cases.md"
TESTS = ROOT / "tests"

INTRODUCTION = """\
<!-- Written by tools/gen_cases.py from itself and from the marks of the tests. Do not edit: `make docs`. -->

# Failures of others, and our tests

What users of agent and workflow systems reported in public, each in a line of our own, and the tests that would notice
it here. The numbers are ours, and gaps in them mean nothing. What the checks as a whole show, and what they do not:
[trust.md](trust.md).

{counted}

| case | what happened | tests |
| - | - | - |
"""

CASES: dict[str, str] = {
    "C01": "a wake-up that had nothing to do with a running tool started the tool again",
    "C03": "a tool was called failed, the agent worked around it, and its effect came an hour later",
    "C04": "after a timeout among parallel calls, results matched no call, and every later task failed on that",
    "C06": "a repair of unanswered calls looked at the last message only, and that was its own notice",
    "C07": "some ways to end a task kept what it had done, and others lost it",
    "C08": "a tool's result was stored without its call, and the conversation could not be continued",
    "C10": "a crash in the middle of a batch of calls ran again what had finished",
    "C11": "a tool that was safe to run again became one that is not, between the crash and the recovery",
    "C12": "nobody had a list of the places where a crash can come, so some were never tried",
    "C13": "an exception that only says `ask a person` was taken for a failure, and the tool was tried five times",
    "C14": "in a rolling restart the old process took back its work under the shared name, and then ended",
    "C15": "one error of the database during recovery, and those tasks were forgotten for good",
    "C17": "one task that nobody could run kept a whole batch from running",
    "C18": "a task was recovered between two steps and stood there, with no error to be seen",
    "C21": "at shutdown the heartbeat stopped first, and what was still running was taken over",
    "C22": "a tool blocked the event loop, the heartbeat stopped, and a healthy host was declared dead",
    "C23": "most kinds of long operation sent no heartbeat, and no cancel reached them",
    "C25": "hosts with different clocks judged one lease differently, and live work was stolen",
    "C27": "every host repaired the same tasks again and again while there was no room to run them",
    "C28": "a task whose recovery always crashed was tried for ever",
    "C30": "a polite shutdown was taken for a cancel; a kill would have been better",
    "C31": "text that a person had seen was gone after a cancel, for it had never been stored",
    "C32": "a thread went on after its task was called cancelled",
    "C34": "a task that waited for its next attempt could be cancelled only by that attempt",
    "C36": "closing a stream ended a task, or left one running that collided with the next",
    "C38": "an option was accepted and ignored, and two tasks wrote one conversation at once",
    "C39": "parallel questions had one identity, and answers went to the wrong tool",
    "C41": "a resume on another host forgot an approval and asked again",
    "C43": "a cancel left the open question, and every later message was refused",
    "C44": "a question had a deadline, and nobody was there when it came",
    "C46": "a message came where an answer was waited for, and was taken for it",
    "C47": "after an approval a child agent was started again, and took another way",
    "C49": "what a child agent said stood in its parent's history",
    "C51": "open questions were announced before anybody listened, and never again",
    "C52": "an answer was stored, the process died, and neither the answer nor a new message was taken any more",
    "C53": "control frames of a stream had numbers, and real events were passed over after a reconnect",
    "C54": "a reader passed a number whose transaction was committed later, and never saw it",
    "C56": "the final answer was cleared at once, and who had lost the connection found nothing",
    "C58": "a write whose answer was lost was repeated, and was there twice",
    "C59": "a model stream broke and was asked for again: text stood there twice, half arguments were run",
    "C61": "state that could not be decoded came back as nothing, and the task went on with a hole",
    "C62": "any error of reading was taken for an old format, and the work was begun anew",
    "C63": "a character that a database does not take failed a task that had finished",
    "C64": "NaN and Infinity were stored by one part and refused by another",
    "C65": "a number of nineteen digits was rounded on its way through the store",
    "C67": "every model call stored the whole conversation again, until the server ended the task",
    "C69": "removing old checkpoints emptied later ones that were built on them",
    "C70": "a removal that was interrupted left half a conversation",
    "C71": "a connection was held during a model call, and was closed by the pool",
    "C73": "another process held the write lock, and tasks failed of it",
    "C74": "a fault of SQLite itself corrupted files that two connections wrote",
    "C75": "a forked child used its parent's connection, and rows went to the wrong one",
    "C76": "a notification was larger than the database takes",
    "C77": "a retry after a lost answer made a second task, and a second bill",
    "C78": "an id that was in use was used for something else, and the first could not be recovered",
    "C80": "one of the entries did not know request ids",
    "C81": "an approval took longer than the deployment lived, and could not be given any more",
    "C82": "a damaged log could not be repaired; only cancelling was left",
    "C83": "an optional argument made a resume out of a restore",
    "C85": "a task that waited held the place of others, or let them pass, and nobody had said which",
    "C86": "on the day the clocks change a schedule ran twice, or not at all",
    "C87": "an id with a slash, a dot or an emoji met a disk or a URL that reads it differently",
    "C88": "the service looked healthy, and the part that does the work was dead",
    "C90": "a tool server was restarted, and calls failed until the process was, too",
}

LATER: dict[str, str] = {
    "C44": "questions have no deadlines",
    "C47": "there are no child agents",
    "C49": "there are no child agents",
    "C85": "there are no named limits",
    "C86": "there are no schedules",
    "C88": "Windows and macOS are not claimed",
    "C90": "there is no MCP executor",
}
"""Cases without a test, because what they are about does not exist here."""


def marked(path: Path) -> Iterator[tuple[str, str]]:
    """(case, test) of a file, as its marks say; a mark on a class or a file counts for each of its tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(ROOT).as_posix()
    of_file = {
        case
        for node in tree.body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
        for case in _cases(node.value)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            for case in of_file | _decorated(node):
                yield case, f"{place}::{node.name}"
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                    for case in of_file | _decorated(node) | _decorated(inner):
                        yield case, f"{place}::{node.name}::{inner.name}"


def _decorated(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {case for decorator in node.decorator_list for case in _cases(decorator)}


def _cases(node: ast.AST) -> Iterator[str]:
    """What is marked in an expression: a mark, or a list of them, or parameter sets that have marks."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.case":
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def tests_by_case() -> dict[str, set[str]]:
    """Which tests a case has.

    Raises:
        SystemExit: a mark names a case that has no line here.
    """
    tests: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for case, test in marked(path):
            tests.setdefault(case, set()).add(test.removeprefix("tests/"))
    unknown = sorted(tests.keys() - CASES.keys())
    if unknown:
        raise SystemExit(f"tools/gen_cases.py has no line for {', '.join(unknown)}")
    return tests


def page(tests: dict[str, set[str]]) -> str:
    untold = sorted(CASES.keys() - tests.keys() - LATER.keys())
    counted = f"{len(tests)} of {len(CASES)} have tests."
    if untold:
        counted += f" Not tested yet: {', '.join(untold)}."
    lines = [INTRODUCTION.format(counted=counted)]
    for case, what in CASES.items():
        shown = "<br>".join(f"`{test}`" for test in sorted(tests.get(case, ())))
        if not shown:
            shown = f"none: {LATER[case]}" if case in LATER else "none yet"
        lines.append(f"| {case} | {what} | {shown} |\n")
    return "".join(lines)


def named(text: str) -> dict[str, set[str]]:
    """Which tests a page names for each case."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        cells = line.split(" | ")
        if len(cells) == 3 and cells[0].removeprefix("| ") in CASES:
            tests = set(re.findall(r"`([^`]+::[^`]+)`", cells[2]))
            if tests:
                found[cells[0].removeprefix("| ")] = tests
    return found


def stale(text: str) -> list[str]:
    """What a page says that is not so."""
    tests, shown = tests_by_case(), named(text)
    wrong = [
        f"{case} names {test}, which is not there or has no such mark"
        for case, of_case in shown.items()
        for test in sorted(of_case - tests.get(case, set()))
    ]
    wrong += [f"{case} has tests now" for case in sorted(tests.keys() - shown.keys())]
    if not wrong and text != page(shown):
        wrong.append("a line is another one than in tools/gen_cases.py")
    return wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true")
    group.add_argument("--check", action="store_true")
    wanted = parser.parse_args(arguments)
    if wanted.write:
        _ = PAGE.write_text(page(tests_by_case()), encoding="utf-8")
        return 0
    wrong = stale(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else ["it is not there"]
    if wrong:
        print(f"docs/{PAGE.name} is stale, run `make docs`:", *wrong, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
