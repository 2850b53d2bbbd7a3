"""How a command fails: one sentence, the code of the table, no traceback, and a store that stays as it was."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from agentscope_durable import cli
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.cli import app as application
from agentscope_durable.cli import main
from agentscope_durable.contracts.errors import StoreBusy, Uncertain, error_table
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.testing.scripted_harness import final
from tests.cli.conftest import KEY, ROOT, SESSION, Done, Durable, begun, environment
from tests.runtime.conftest import Hosts

pytestmark = pytest.mark.backend("sqlite")
Typed = Callable[..., Any]
SECONDS_MAX = 90


def traces(place: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


READING = [["sessions"], ["turns", SESSION], ["turn", "t1"], ["explain", "t1"], ["events", SESSION]]
WRITING = [["submit", SESSION, "go"], ["cancel", "t1"], ["resume", "t1", "--revision", "1"]]


@pytest.mark.parametrize("command", [*READING, *WRITING], ids=lambda command: command[0])
def test_where_there_is_no_store_none_is_made(durable: Durable, tmp_path: Path, command: list[str]) -> None:
    missing = tmp_path / "missing"

    done = durable(*command, "--store", str(missing), "--json", code=3)

    assert done.error["facts"] == {"kind": "store", "identity": str(missing)}
    assert done.out == "" and not missing.exists()
    assert "--store or DURABLE_STORE" in durable(*command, "--store", str(missing), code=3).err


@pytest.mark.parametrize(
    "command", [["turn", "t1"], ["cancel", "t1"], ["history", SESSION], ["runs", "t1"]], ids=lambda command: command[0]
)
async def test_what_is_not_in_this_store_may_be_in_another(tmp_path: Path, typed: Typed, command: list[str]) -> None:
    async with LocalBackend.open(tmp_path):
        pass

    done: Done = await typed(*command, code=3)

    assert "--store or DURABLE_STORE" in done.err and "backend" not in done.err


def _foreign(place: Path) -> None:
    (place / "durable.db").write_bytes(b"a letter to somebody")


def _newer(place: Path) -> None:
    connection = apsw.Connection(str(place / "durable.db"))
    connection.execute("update meta set value='9.9' where key='revision'")
    connection.close()


@pytest.mark.spec("BE-27", "PT-12")
@pytest.mark.parametrize("command", [*READING, *WRITING], ids=lambda command: command[0])
@pytest.mark.parametrize("spoil", [_foreign, _newer])
def test_what_is_no_store_of_this_release_is_left_as_it_is(
    durable: Durable, tmp_path: Path, command: list[str], spoil: Callable[[Path], None]
) -> None:
    import asyncio

    async def make() -> None:
        async with LocalBackend.open(tmp_path):
            pass

    asyncio.run(make())
    spoil(tmp_path)
    before = traces(tmp_path)

    done = durable(*command, code=7)

    assert done.err.startswith("error: the store ") and "nothing was changed" in done.err
    assert traces(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["turn", "t-nobody"], 3),
        (["explain", "t-nobody"], 3),
        (["runs", "t-nobody"], 3),
        (["steps", "t-nobody"], 3),
        (["models", "t-nobody.1"], 3),
        (["interactions", "t-nobody"], 3),
        (["cancel", "t-nobody"], 3),
        (["respond", "t-nobody", "i", "--approve"], 3),
        (["session", "app/nobody"], 3),
        (["threads", "app/nobody"], 3),
        (["turns", "app/nobody"], 3),
        (["turns", SESSION, "--thread", "nobody"], 3),
        (["history", "app/nobody"], 3),
        (["events", "app/nobody"], 3),
        (["events", "app/nobody", "--follow"], 3),
        (["events", "t-nobody"], 3),
        (["submit", "app/nobody", "go"], 3),
        (["submit", SESSION, "go", "--thread", "nobody"], 3),
        (["turns", "no-slash"], 2),
        (["turns", SESSION, "--limit", "0"], 2),
        (["turns", SESSION, "--limit", "-1"], 2),
        (["turns", SESSION, "--limit", "1001"], 2),
        (["turns", SESSION, "--limit", "9" * 40], 2),
        (["turns", SESSION, "--limit", "many"], 2),
        (["events", SESSION, "--limit", "0"], 2),
        (["history", SESSION, "--limit", "1001"], 2),
        (["turns", SESSION, "--cursor", "nonsense"], 2),
        (["turns", SESSION, "--cursor", "é"], 2),
        (["events", SESSION, "--after", "e1-000000000000-1"], 2),
        (["events", SESSION, "--after", "nonsense"], 2),
        (["events", SESSION, "--after", "nonsense", "--follow"], 2),
        (["turn", "a\x1b[2Jb"], 2),
        (["turn", "a\udce9b"], 2),
        (["turn", ""], 2),
        (["turn", "x" * 300], 2),
        (["submit", SESSION, "go", "--request-id", ""], 2),
        (["submit", SESSION, "go", "--request-id", "a\nb"], 2),
        (["submit", SESSION, "go", "--thread", "\x00"], 2),
        (["session", "a\x07/b"], 2),
        (["signal", "t-nobody", "x.k", "--payload", "NaN"], 2),
        (["resume", "t-nobody"], 2),
        (["turns"], 2),
        (["turns", SESSION, "--nothing"], 2),
        (["no-such-command"], 2),
        (["sessions", "--store", "mysql://host/database"], 2),
    ],
    ids=lambda given: (
        " ".join(given)[:40].encode("ascii", "replace").decode() if isinstance(given, list) else str(given)
    ),
)
async def test_bad_input_is_named_and_changes_nothing(
    hosts: Hosts, typed: Typed, command: list[str], code: int
) -> None:
    await begun(hosts, [final()], start=False)

    people: Done = await typed(*command, code=code)
    script: Done = await typed(*command, "--json", code=code)

    shown = "".join(line for line in people.err.splitlines() if not line.startswith("request id"))
    assert shown.startswith("error: ") and "Traceback" not in people.err
    assert not any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in shown)
    assert (script.error["exitCode"], script.out, people.out) == (code, "", "")
    assert {"code", "type", "message", "facts", "advice"} <= script.error.keys()


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (["no-such-command"], "See `durable --help`"),
        (["--store", "x", "sessions"], "Options stand behind the name of the command"),
        (["turns"], "See `durable turns --help`"),
        (["turns", SESSION, "--nothing"], "See `durable turns --help`"),
        (["turns", SESSION, "--cursor", "nonsense"], "leave out --cursor to start at the beginning"),
        (["events", SESSION, "--after", "nonsense"], "leave out --after to start at the beginning"),
        (["result", "TURN"], "Wait for it with --wait SECONDS"),
        (["result", "TURN", "--wait", "0.01"], "ask `durable explain` why"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
async def test_what_is_advised_can_be_typed(hosts: Hosts, typed: Typed, command: list[str], advice: str) -> None:
    _, turn = await begun(hosts, [final()], start=False)
    command = [turn.turn_id if word == "TURN" else word for word in command]

    people: Done = await typed(*command, code=None)
    script: Done = await typed(*command, "--json", code=people.code)

    assert people.code and advice in people.err
    assert advice in script.error["advice"], "the same for scripts"


@pytest.mark.parametrize("listing", ["turns", "threads", "history", "runs"])
async def test_a_cursor_of_another_listing_or_session_is_refused(hosts: Hosts, typed: Typed, listing: str) -> None:
    runtime, turn = await begun(hosts, [final()], start=False)
    session = runtime.get_session(KEY)
    other = await runtime.create_session(SessionKey("app", "c2"), "agent")
    for number in range(2):
        await session.submit(f"a{number}", "go")
        await other.submit(f"b{number}", "go")
    foreign: Done = await typed("turns", "app/c2", "--limit", "1", "--json")
    sessions: Done = await typed("sessions", "--limit", "1", "--json")
    events: Done = await typed("events", "app/c2", "--limit", "1", "--json")
    subject = turn.turn_id if listing == "runs" else SESSION
    cursors = [sessions.json["cursor"], events.json["cursor"]]
    if listing != "turns":
        cursors.append(foreign.json["cursor"])

    for cursor in cursors:
        assert (await typed(listing, subject, "--cursor", cursor, "--json", code=2)).error["type"] == "InvalidCursor"


async def test_a_cursor_of_events_is_a_sessions_own(hosts: Hosts, typed: Typed) -> None:
    runtime, _ = await begun(hosts, [final()], start=False)
    await runtime.create_session(SessionKey("app", "c2"), "agent")
    foreign: Done = await typed("events", "app/c2", "--json")

    done: Done = await typed("events", SESSION, "--after", foreign.json["cursor"], "--json", code=2)

    assert "another session" in done.error["message"]


@pytest.mark.parametrize("error", [StoreBusy("durable.db"), Uncertain("the commit", request_id="r")])
async def test_an_error_of_the_store_has_the_code_of_the_table(
    hosts: Hosts, typed: Typed, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    _, turn = await begun(hosts, [final()], start=False)
    monkeypatch.setattr(LocalBackend, "execute", fail)
    wanted = {row.name: row.exit_code for row in error_table()}[type(error).__name__]

    done: Done = await typed("pause", turn.turn_id, "--json", code=wanted)

    # With this id the request can be asked again, or asked about.
    assert done.error["requestId"].startswith("cli-")


def test_help_names_every_command_and_says_nothing_is_wrong(durable: Durable) -> None:
    commands = [command.callback for command in application.app.registered_commands if command.callback]
    named = {command.__name__.replace("_", "-") for command in commands}

    for arguments in ([], ["--help"], ["-h"]):
        said = durable(*arguments).out
        assert all(name in said for name in named)
        assert not [line for line in said.splitlines()[1:] if line.endswith("...")], "what each does is said to its end"
    for name in named:
        assert "--store" in durable(name, "--help").out


# ------------------------------------------------------------ as a process


def installed(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentscope_durable", *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_the_process_ends_with_the_code(tmp_path: Path) -> None:
    done = installed("sessions", "--store", str(tmp_path), "--json")

    assert (done.returncode, done.stdout) == (3, "")
    assert json.loads(done.stderr)["error"]["code"] == "NOT_FOUND"


async def test_text_of_any_script_is_printed_whatever_the_locale_says(hosts: Hosts, tmp_path: Path) -> None:
    await begun(hosts, [final()], text="grüße 日本語 👍", start=False)

    done = installed("history", SESSION, "--store", str(tmp_path), LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="")

    assert "grüße 日本語 👍" in done.stdout, done.stderr


async def test_a_reader_that_has_read_enough_is_no_error(hosts: Hosts, tmp_path: Path) -> None:
    runtime, _ = await begun(hosts, [final()], start=False)
    session = runtime.get_session(KEY)
    for number in range(200):
        await session.submit(f"x{number}", "go " * 500)
    command = f"{sys.executable} -m agentscope_durable history {SESSION} --limit 1000 --store {tmp_path}"

    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("more", [[], ["--json"]])
async def test_output_that_cannot_be_written_is_an_error(hosts: Hosts, tmp_path: Path, more: list[str]) -> None:
    await begun(hosts, [final()], start=False)

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "agentscope_durable", "turns", SESSION, "--store", str(tmp_path), *more],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    assert done.returncode == application.NOT_SHOWN, done.stderr
    [said] = done.stderr.splitlines()
    assert said.startswith("error: No space left on device")


def test_ctrl_c_while_the_command_is_being_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)

    with pytest.raises(SystemExit) as ended:
        cli.entry()

    assert ended.value.code == cli.INTERRUPTED


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_which_one_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from agentscope_durable.cli import entry; entry()"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )

    assert done.returncode == 11
    assert "pip install 'agentscope-durable[cli]'" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_main_without_the_extra_raises_what_names_it() -> None:
    program = (
        "import sys; sys.modules['typer'] = None\n"
        "from agentscope_durable.cli import main\n"
        "try:\n    main(['sessions'])\nexcept ImportError as error:\n    print(error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=True,
    )

    assert "agentscope-durable[cli]" in done.stdout


def test_the_installed_script_is_this_program() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]

    assert scripts == {"durable": "agentscope_durable.cli:entry"}
    assert callable(main)
