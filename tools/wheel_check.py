"""What a user gets from the wheel, without any extra: `make wheel`.

Builds the sdist, and from it the wheel, installs the wheel with its three dependencies into an empty
environment, and looks at it there. What the package does not have yet is printed as "later" and is
no failure, so that the check may run from the first commit on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "agentscope_durable"
SOURCE = ROOT / "src" / PACKAGE
SCHEMAS = f"{PACKAGE}/contracts/schemas/v1/"
SECONDS_MAX = 300


class Failed(Exception):
    """A promise of the wheel that does not hold; the text says which."""


class Later(Exception):
    """There is nothing to check yet."""


INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps({found.metadata["Name"]: found.version for found in distributions()}))
"""

# Prints what importing the package loaded and started.
IMPORT = f"""
import json, os, sys, threading
before = set(sys.modules)
here = set(os.listdir("."))
import {PACKAGE}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
loaded = sorted(roots - sys.stdlib_module_names - {{"{PACKAGE}"}})
threads = [thread.name for thread in threading.enumerate()]
print(json.dumps({{"loaded": loaded, "threads": threads, "files": sorted(set(os.listdir(".")) - here)}}))
"""

# Imports every module. One that needs an extra must say so; nothing else may fail, and nothing may start.
IMPORT_ALL = f"""
import importlib, json, pkgutil, sys, threading
import {PACKAGE}
failed = {{}}
def failure(name):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = [isinstance(error, ImportError), f"{{type(error).__name__}}: {{error}}"]
for found in pkgutil.walk_packages({PACKAGE}.__path__, "{PACKAGE}.", onerror=lambda name: None):
    if not found.name.endswith(".__main__"):
        failure(found.name)
threads = [thread.name for thread in threading.enumerate()]
print(json.dumps({{"failed": failed, "threads": threads, "agentscope": "agentscope" in sys.modules}}))
"""

# Each extra, and the first thing a user without it does. It must raise an ImportError naming the extra.
WITHOUT_EXTRA: dict[str, tuple[str, str, str]] = {
    "agentscope": (
        f"{PACKAGE}.adapters.agentscope",
        "AgentScopeAdapter",
        f"from {PACKAGE}.adapters.agentscope import AgentScopeAdapter\n"
        "AgentScopeAdapter.for_react(lambda binding: None)\n",
    ),
    "objects": (
        f"{PACKAGE}.stores.objects.cloud",
        "S3ObjectStore",
        f"from {PACKAGE}.stores.objects.cloud import S3ObjectStore\nS3ObjectStore(bucket='b', region='r')\n",
    ),
    "postgres": (
        f"{PACKAGE}.stores.records.postgres",
        "PostgresRecordStore",
        f"import asyncio\nfrom {PACKAGE} import PostgresBackend\n"
        "asyncio.run(PostgresBackend.initialize_schema('postgresql://127.0.0.1/x'))\n",
    ),
    "cli": (f"{PACKAGE}.cli", "main", f"from {PACKAGE}.cli import main\nmain()\n"),
}

# Modules for people who write tests: pytest is theirs to bring.
NEED_PYTEST = f"{PACKAGE}.testing"

OPEN_STORE = f"""
import asyncio, sys
from {PACKAGE} import LocalBackend
assert "apsw" not in sys.modules, "apsw was loaded before a store was opened"
async def main():
    async with LocalBackend.open("./durable"):
        assert "apsw" in sys.modules
asyncio.run(main())
import pathlib
assert pathlib.Path("durable/durable.db").is_file(), list(pathlib.Path("durable").iterdir())
"""

# What users write, for a strict type checker. `NAMES` are what it needs of the package.
SNIPPET_NAMES = {"DurableRuntime", "EventDeltaType", "Harness", "LocalBackend", "SessionKey"}
SNIPPET = f"""
from {PACKAGE} import DurableRuntime, EventDeltaType, Harness, LocalBackend, SessionKey
from {PACKAGE}.spi import HarnessAdapter


async def main(adapter: HarnessAdapter) -> str:
    async with LocalBackend.open("./durable") as backend:
        harnesses = [Harness("assistant", "definition-v1", adapter)]
        async with DurableRuntime(backend=backend, harnesses=harnesses) as runtime:
            session = await runtime.create_session(SessionKey("application", "conversation-1"), "assistant")
            await runtime.start()
            async with session.stream_events(deltas={{EventDeltaType.MESSAGE}}) as events:
                turn = await session.submit("request-1", "Describe this workspace")
                async for event in events:
                    print(event)
                    break
            print(await turn.wait(timeout=60))
            return turn.turn_id
"""
# The control: a checker that accepts this has not seen the package's types.
WRONG_NAMES = {"SessionKey"}
WRONG = f"from {PACKAGE} import SessionKey\n\nkey: int = SessionKey('application', 'conversation-1')\n"


def run(*command: str | Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DURABLE_"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def must(*command: str | Path, cwd: Path, stdin: str = "") -> str:
    done = run(*command, cwd=cwd, stdin=stdin)
    if done.returncode:
        raise Failed(
            f"{' '.join(str(part) for part in command[:5])} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class Wheel:
    """The built files and the empty environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "environment" / "bin" / "python"
        self.dist = folder / "dist"
        self.empty = folder / "empty"
        self.empty.mkdir()

    @property
    def wheel(self) -> Path:
        return next(self.dist.glob("*.whl"))

    def script(self, text: str) -> str:
        """Run a program in the empty environment and an empty folder."""
        folder = Path(tempfile.mkdtemp(dir=self.empty))
        return must(self.python, "-I", "-c", text, cwd=folder)

    def exports(self) -> set[str]:
        text = self.script(f"import {PACKAGE}\nprint(*getattr({PACKAGE}, '__all__', ()))")
        return set(text.split())

    def has(self, module: str) -> bool:
        path = module.replace(".", "/")
        names = set(zipfile.ZipFile(self.wheel).namelist())
        return f"{path}.py" in names or f"{path}/__init__.py" in names

    def offers(self, module: str, name: str) -> bool:
        """Whether the module has the name; one that asks for its extra at once counts as having it."""
        text = f"import importlib\nprint(hasattr(importlib.import_module({module!r}), {name!r}))"
        return "False" not in self.script(_catching(text, otherwise="pass"))

    # --- the checks, in order -------------------------------------------------------------------

    def build(self) -> str:
        """wheel and sdist build"""
        must(sys.executable, "-m", "build", "--no-isolation", "--outdir", self.dist, ROOT, cwd=self.folder)
        return ", ".join(sorted(path.name for path in self.dist.iterdir()))

    def contents(self) -> str:
        """every source file is in both, and nothing else of the working copy"""
        source = {
            f"{PACKAGE}/{path.relative_to(SOURCE).as_posix()}"
            for path in SOURCE.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
        }
        wheel = set(zipfile.ZipFile(self.wheel).namelist())
        packaged = {name for name in wheel if name.startswith(f"{PACKAGE}/")}
        if packaged != source:
            raise Failed(f"the wheel and src differ: {sorted(packaged ^ source)}")
        if f"{PACKAGE}/py.typed" not in wheel:
            raise Failed("py.typed is missing")
        if not any(name.endswith("/LICENSE") for name in wheel):
            raise Failed("the licence is missing")
        metadata = zipfile.ZipFile(self.wheel).read(next(name for name in wheel if name.endswith("/METADATA"))).decode()
        if (ROOT / "README.md").exists() and not metadata.partition("\n\n")[2].strip():
            raise Failed('the README is not the description: pyproject.toml needs readme = "README.md"')
        with tarfile.open(next(self.dist.glob("*.tar.gz"))) as archive:
            sdist = {name.partition("/")[2] for name in archive.getnames()}
        missing = {f"src/{name}" for name in source} - sdist
        if missing or "LICENSE" not in sdist:
            raise Failed(f"the sdist lacks {sorted(missing) or 'LICENSE'}")
        strange = {name.split("/")[0] for name in sdist if name.startswith((".venv", "build/", "dist/", "durable/"))}
        if strange:
            raise Failed(f"the sdist contains {sorted(strange)}")
        return f"{len(packaged)} files"

    def install(self) -> str:
        """it installs without extras, and asks for its three dependencies alone"""
        venv.create(self.folder / "environment", with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "--quiet"]
        must(*pip, "install", "--constraint", ROOT / "constraints.txt", self.wheel, cwd=self.folder)
        installed: dict[str, str] = json.loads(self.script(INSTALLED))
        if installed.keys() != {"agentscope-durable", "apsw", "msgspec", "rfc8785"}:
            raise Failed(f"installed: {sorted(installed)}")
        return ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))

    def imports(self) -> str:
        """importing it loads no optional library and starts nothing"""
        seen = json.loads(self.script(IMPORT))
        if not set(seen["loaded"]) <= {"msgspec", "rfc8785"}:
            raise Failed(f"loaded: {seen['loaded']}")
        if seen["threads"] != ["MainThread"] or seen["files"]:
            raise Failed(f"started threads {seen['threads']}, wrote files {seen['files']}")
        return f"loaded {', '.join(seen['loaded']) or 'nothing'}"

    def imports_all(self) -> str:
        """every module imports, or names the extra it needs; none starts anything"""
        seen = json.loads(self.script(IMPORT_ALL))
        wrong = [
            f"{name}: {text}"
            for name, (is_import_error, text) in seen["failed"].items()
            if not is_import_error
            or not ("pytest" in text if name.startswith(NEED_PYTEST) else "agentscope-durable[" in text)
        ]
        if wrong:
            raise Failed("\n".join(wrong))
        if seen["threads"] != ["MainThread"] or seen["agentscope"]:
            raise Failed(f"threads {seen['threads']}, agentscope loaded: {seen['agentscope']}")
        return f"need something more: {', '.join(sorted(seen['failed'])) or 'none'}"

    def opens_a_store(self) -> str:
        """a local backend opens without any extra, and only then loads apsw"""
        if "LocalBackend" not in self.exports():
            raise Later("LocalBackend")
        self.script(OPEN_STORE)
        return "durable/durable.db"

    def says_which_extra(self) -> str:
        """a missing extra is named in the error"""
        checked: list[str] = []
        for extra, (module, name, program) in WITHOUT_EXTRA.items():
            if not self.has(module) or not self.offers(module, name):
                continue
            wanted = f"agentscope-durable[{extra}]"
            done = run(self.python, "-I", "-c", _catching(program), cwd=self.empty)
            if done.returncode or wanted not in done.stdout or "pip install" not in done.stdout:
                raise Failed(
                    f"{module} without its extra must raise an ImportError naming {wanted}:\n{done.stdout}{done.stderr}"
                )
            checked.append(extra)
        if not checked:
            raise Later("modules that need an extra")
        return ", ".join(checked)

    def schemas(self) -> str:
        """every packaged schema is a valid JSON schema"""
        packaged = sorted(name for name in zipfile.ZipFile(self.wheel).namelist() if name.startswith(SCHEMAS))
        names = [name.removeprefix(SCHEMAS) for name in packaged if name.endswith(".json")]
        if not names:
            raise Later("schemas")
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        for name in names:
            text = self.script(
                "from importlib.resources import files\n"
                f"print(files('{PACKAGE}').joinpath('contracts/schemas/v1/{name}').read_text('utf-8'))"
            )
            schema = json.loads(text)
            if "$schema" not in schema:
                raise Failed(f"{name} does not say which dialect it is written in")
            try:
                validator_for(schema).check_schema(schema)
            except SchemaError as error:
                raise Failed(f"{name}: {error.message}") from error
        return f"{len(names)} schemas"

    def types(self) -> str:
        """a strict type checker understands a user's program"""
        exports = self.exports()
        if missing := SNIPPET_NAMES - exports:
            snippet, note = f"import {PACKAGE}\n\nprint({PACKAGE}.__name__)\n", f"later in full: {sorted(missing)}"
        else:
            snippet, note = SNIPPET, "the main use"
        errors = self._type_errors("snippet.py", snippet)
        if errors:
            raise Failed("\n".join(errors))
        if exports >= WRONG_NAMES and not self._type_errors("wrong.py", WRONG):
            raise Failed("a wrong program passed: the types of the installed package were not seen")
        return note

    def _type_errors(self, name: str, text: str) -> list[str]:
        folder = self.folder / "user"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}', encoding="utf-8")
        done = run(
            *(sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", self.python, folder / name),
            cwd=folder,
        )
        report = json.loads(done.stdout)
        return [
            f"{Path(found['file']).name}:{found['range']['start']['line'] + 1}: {found['message']}"
            for found in report["generalDiagnostics"]
            if found["severity"] == "error"
        ]


def _catching(program: str, *, otherwise: str = "raise SystemExit('no error')") -> str:
    """The program, with its ImportError printed; `otherwise` is what follows when there is none."""
    indented = "".join(f"    {line}\n" for line in program.splitlines())
    return f"try:\n{indented}except ImportError as error:\n    print(error)\nelse:\n    {otherwise}\n"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as name:
        wheel = Wheel(Path(name))
        checks: list[Callable[[], str]] = [
            wheel.build,
            wheel.contents,
            wheel.install,
            wheel.imports,
            wheel.imports_all,
            wheel.opens_a_store,
            wheel.says_which_extra,
            wheel.schemas,
            wheel.types,
        ]
        failed = False
        for check in checks:
            try:
                print(f"wheel: ok     {check.__doc__}: {check()}")
            except Later as later:
                print(f"wheel: later  {check.__doc__}: no {later} yet")
            except Failed as failure:
                print(f"wheel: FAILED {check.__doc__}\n{failure}")
                failed = True
                if check in (wheel.build, wheel.install):
                    break  # Without these there is nothing to look at.
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
