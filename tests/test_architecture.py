"""The import table and the other rules that a reviewer should not have to remember.

`docs/architecture.md` explains the rooms; this file is what enforces them. Every import counts:
at the top of a file, inside a function, under TYPE_CHECKING, and through `import_module("...")`.
To add a room, a driver or an exception, edit the tables below and say why.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import pytest

PACKAGE = "agentscope_durable"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# --- The tables -------------------------------------------------------------------------------

INNER = frozenset({"contracts", "domain", "spi"})
HOSTS_AND_SHELVES = INNER | {"backend", "runtime", "worker", "executors", "stores", "journal", "adapters", "transports"}
EDGES = frozenset({"assembly", "cli", "console", "__main__", "testing.kit"})
# A folder that is a room of its own within another one.
INNER_ROOMS = ("testing.kit",)

# room -> the rooms it may import. An edge may be imported by another edge only.
ROOMS: dict[str, frozenset[str]] = {
    "contracts": frozenset(),
    "domain": frozenset({"contracts"}),
    "spi": frozenset({"contracts"}),
    "backend": INNER,
    "runtime": INNER,
    "worker": INNER,
    "executors": INNER,
    "testing": INNER,
    "stores": frozenset({"contracts", "spi"}),
    "journal": frozenset({"contracts", "spi"}),
    "adapters": INNER | {"journal"},
    "transports": INNER | {"runtime", "worker", "executors"},
    "assembly": HOSTS_AND_SHELVES,
    "cli": HOSTS_AND_SHELVES | EDGES,
    "console": HOSTS_AND_SHELVES | EDGES,
    "__main__": HOSTS_AND_SHELVES | EDGES,
    # The users' kit runs whole agents in processes of their own, so it chooses concrete parts.
    "testing.kit": HOSTS_AND_SHELVES | EDGES | {"testing"},
    "_failpoints": frozenset(),
    # The application's API. Re-exports only, so it may not reach for what needs an extra.
    "__init__": INNER | {"backend", "runtime", "worker", "executors", "assembly"},
}

# The leaf that every other room may import: failpoints are where the durable writes are.
FAILPOINTS = "_failpoints"
WITHOUT_FAILPOINTS = frozenset({"contracts", "domain", FAILPOINTS, "__init__"})

# Each technology on its own: a shelf imports no other shelf. A module whose name starts with "_"
# is shared by the shelves beside it. The number is how many name parts below the room name a shelf.
SHELVES = {"stores": 2, "adapters": 1, "transports": 1, "executors": 1}

# module prefix -> third parties it may import, anywhere. The longest prefix wins.
# The language the words are written in: docs/decisions/0002.
EVERYWHERE = frozenset({"msgspec"})
THIRD_PARTIES: dict[str, frozenset[str]] = {
    "contracts": frozenset({"msgspec", "rfc8785"}),
    "contracts.schema": frozenset({"msgspec", "rfc8785", "jsonschema"}),
    "testing": frozenset({"pytest"}),
    # A store's file names one driver: see ONE_DRIVER.
    "stores": frozenset({"apsw", "asyncpg", "opendal"}),
    "executors.mcp": frozenset({"mcp"}),
    "transports.postgres": frozenset({"asyncpg"}),
    "transports.http": frozenset({"httpx", "starlette", "uvicorn"}),
    "transports.rocketmq": frozenset({"rocketmq"}),
}
# module prefix -> third parties it may import inside functions and for types only.
LAZY_THIRD_PARTIES: dict[str, frozenset[str]] = {
    "testing": frozenset({"agentscope"}),
    "journal": frozenset({"agentscope"}),
    "adapters.agentscope": frozenset({"agentscope", "pydantic", "jsonschema"}),  # what AgentScope itself speaks
    "adapters.claude": frozenset({"anthropic"}),
    "adapters.agui": frozenset({"ag_ui"}),
}
ONE_DRIVER = "stores"

# What `import agentscope_durable` may load besides the standard library.
LOADED_AT_IMPORT = frozenset({"msgspec", "rfc8785"})

# Time belongs to the stores and to spi/environment; chance and threads to spi/environment alone.
# Not listed on purpose: asyncio.timeout and wait_for. They bound a wait, they decide nothing.
ENVIRONMENT = "spi.environment"
TIME = frozenset(
    {"asyncio.sleep", "time.sleep", "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns"}
    | {"time.perf_counter", "time.perf_counter_ns", "time.clock_gettime", "time.clock_gettime_ns"}
    | {"time.localtime", "time.gmtime", "time.ctime", "time.strftime", "time.process_time", "time.thread_time"}
    | {"datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"}
)
CHANCE = frozenset({"os.urandom", "os.getrandom", "uuid.uuid1", "uuid.uuid4", "random.*", "secrets.*"})
THREADS = frozenset(
    {"threading.Thread", "threading.Timer", "_thread.start_new_thread", "asyncio.to_thread", "os.fork"}
    | {"concurrent.futures.ThreadPoolExecutor", "concurrent.futures.ProcessPoolExecutor", "multiprocessing.*"}
)
# Methods that mean the same whatever object they are called on.
TIME_METHODS = frozenset({"call_later", "call_at"})
THREAD_METHODS = frozenset({"run_in_executor"})

PICKLES = frozenset(
    {"pickle", "cPickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "jsonpickle"}
)

# (module, what it uses or imports) -> why this one place may. An entry that nothing needs fails.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("testing.kit.forks", "os.fork"): "a process that is killed must be a process, and a clean one forks fastest",
}

# --- Reading the source -----------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    module: str  # dotted, relative to the package when `inside`
    inside: bool  # of this package
    line: int
    lazy: bool  # inside a function
    for_types: bool  # under `if TYPE_CHECKING`


@dataclass
class Module:
    name: str  # "domain.lease"; "__init__" is the package itself
    is_package: bool
    path: Path
    tree: ast.Module
    imports: list[Import] = field(default_factory=list)

    @property
    def room(self) -> str:
        return _room(self.name)


def _room(name: str) -> str:
    inner = (room for room in INNER_ROOMS if name == room or name.startswith(f"{room}."))
    return next(inner, name.split(".")[0])


class Tree:
    """The package's modules, parsed once."""

    def __init__(self, source: Path, exceptions: dict[tuple[str, str], str]) -> None:
        self.modules: dict[str, Module] = {}
        self._exceptions = exceptions
        self._used: set[tuple[str, str]] = set()
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1]) or "__init__" if is_package else ".".join(parts)
            self.modules[name] = Module(name, is_package, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
        for module in self.modules.values():
            module.imports.extend(self._imports(module, module.tree, lazy=False, for_types=False))

    def excepted(self, module: Module, what: str) -> bool:
        key = (module.name, what)
        self._used.add(key)
        return key in self._exceptions

    def stale_exceptions(self) -> Iterator[str]:
        for name, what in sorted(self._exceptions.keys() - self._used):
            yield f"EXCEPTIONS: {name} does not use {what} any more"

    def _imports(self, module: Module, node: ast.AST, *, lazy: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            here = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and _is_type_checking(child.test):
                for statement in child.body:
                    yield from self._imports(module, _block(statement), lazy=here, for_types=True)
                for statement in child.orelse:
                    yield from self._imports(module, _block(statement), lazy=here, for_types=for_types)
                continue
            for dotted in self._named(module, child):
                inside = dotted == PACKAGE or dotted.startswith(f"{PACKAGE}.")
                target = (dotted[len(PACKAGE) + 1 :] or "__init__") if inside else dotted
                yield Import(target, inside, getattr(child, "lineno", 0), here, for_types)
            yield from self._imports(module, child, lazy=here, for_types=for_types)

    def _named(self, module: Module, node: ast.AST) -> Iterator[str]:
        """The full names of the modules that one statement or call imports."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                own = [] if module.name == "__init__" else module.name.split(".")
                up = node.level - (1 if module.is_package else 0)
                base = ".".join([PACKAGE, *own[: len(own) - up], *([base] if base else [])])
            for alias in node.names:
                # `from .contracts import errors` names a module, `from .errors import Retry` does not.
                deeper = f"{base}.{alias.name}"
                yield deeper if deeper.removeprefix(f"{PACKAGE}.") in self.modules else base
        elif isinstance(node, ast.Call) and _dotted(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value if not first.value.startswith(".") else f"{PACKAGE}{first.value}"


def _block(statement: ast.stmt) -> ast.Module:
    return ast.Module(body=[statement], type_ignores=[])


def _is_type_checking(test: ast.expr) -> bool:
    return _dotted(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of names, "" of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _longest(table: dict[str, frozenset[str]], name: str) -> frozenset[str]:
    matching = [prefix for prefix in table if name == prefix or name.startswith(f"{prefix}.")]
    return table[max(matching, key=len)] if matching else frozenset()


# --- The rules --------------------------------------------------------------------------------


def _where(module: Module, line: int) -> str:
    return f"{module.name.replace('.', '/')}:{line}"


def _shelf(name: str) -> str | None:
    """The shelf a module stands on, or None where it stands on none."""
    room, *rest = name.split(".")
    depth = SHELVES.get(room)
    if depth is None or len(rest) < depth or any(part.startswith("_") for part in rest[:depth]):
        return None
    return ".".join([room, *rest[:depth]])


def check_rooms(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        allowed = ROOMS.get(module.room)
        if allowed is None:
            yield f"{_where(module, 1)}: {module.room!r} is no room; the table of rooms is in {Path(__file__).name}"
            continue
        for found in module.imports:
            if not found.inside or tree.excepted(module, found.module):
                continue
            room = _room(found.module)
            if room == FAILPOINTS:
                if module.room in WITHOUT_FAILPOINTS:
                    yield f"{_where(module, found.line)}: {module.room} may not import _failpoints"
            elif room == "__init__":
                if module.room not in EDGES:
                    yield f"{_where(module, found.line)}: imports the package's own API, which imports everything"
            elif room != module.room and room not in allowed:
                yield f"{_where(module, found.line)}: {module.room} may not import {found.module}"


def check_transitive(tree: Tree) -> Iterator[str]:
    """What a module reaches over any number of imports stays within its room's row, and on its own shelf.

    Importing a.b.c also runs a/__init__ and a/b/__init__, so these count as imported. The package's own
    __init__ does not: it is loaded in any case, and `check_loaded` bounds it.
    """
    edges = {
        name: {target for found in module.imports if found.inside for target in _with_parents(found.module)}
        for name, module in tree.modules.items()
    }
    for name, module in tree.modules.items():
        if module.room in EDGES or module.room == "__init__" or module.room not in ROOMS:
            continue
        came_from: dict[str, str] = {name: ""}
        queue = [name]
        while queue:
            here = queue.pop()
            for target in edges.get(here, set()) | set(_with_parents(here)[1:]):
                if target in tree.modules and target not in came_from and target != "__init__":
                    came_from[target] = here
                    queue.append(target)
        shelf = _shelf(name)
        for target in sorted(came_from):
            room = _room(target)
            path = _path(came_from, target)
            if room not in ROOMS[module.room] | {module.room, FAILPOINTS}:
                # What it imports itself was judged by check_rooms.
                if came_from[target] != name and not tree.excepted(module, target):
                    yield f"{_where(module, 1)}: {module.room} reaches {target} through {path}"
            elif room == FAILPOINTS and module.room in WITHOUT_FAILPOINTS and module.room != FAILPOINTS:
                yield f"{_where(module, 1)}: {module.room} reaches _failpoints through {path}"
            other = _shelf(target)
            if shelf and other and other != shelf and room == module.room and not tree.excepted(module, target):
                yield f"{_where(module, 1)}: the shelf {shelf} reaches the shelf {other} through {path}"


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _path(came_from: dict[str, str], target: str) -> str:
    path = [target]
    while came_from[path[-1]]:
        path.append(came_from[path[-1]])
    return " < ".join(path)


def check_third_parties(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        drivers: set[str] = set()
        for found in module.imports:
            root = found.module.split(".")[0]
            if found.inside or root in sys.stdlib_module_names or root in EVERYWHERE:
                continue
            drivers.add(root)
            if (
                root in EVERYWHERE
                or module.room in EDGES
                or tree.excepted(module, root)
                or root in _longest(THIRD_PARTIES, module.name)
            ):
                continue
            if root not in _longest(LAZY_THIRD_PARTIES, module.name):
                yield f"{_where(module, found.line)}: {module.room} may not import {root}"
            elif not (found.lazy or found.for_types):
                yield f"{_where(module, found.line)}: {root} may be imported inside functions only"
        if module.room == ONE_DRIVER and len(drivers) > 1:
            yield f"{_where(module, 1)}: one file, one driver; this one has {', '.join(sorted(drivers))}"


def check_loaded(tree: Tree) -> Iterator[str]:
    """What `import agentscope_durable` loads: follow the imports that run."""
    if "__init__" not in tree.modules:
        return
    came_from: dict[str, str] = {"__init__": ""}
    queue = ["__init__"]
    while queue:
        module = tree.modules[queue.pop()]
        for found in module.imports:
            if found.lazy or found.for_types:
                continue
            root = found.module.split(".")[0]
            if not found.inside and root not in sys.stdlib_module_names and root not in LOADED_AT_IMPORT:
                path = _path(came_from, module.name)
                yield f"{_where(module, found.line)}: `import {PACKAGE}` would load {root} through {path}"
            for target in _with_parents(found.module) if found.inside else ():
                if target in tree.modules and target not in came_from:
                    came_from[target] = module.name
                    queue.append(target)


def check_environment(tree: Tree) -> Iterator[str]:
    """Time, chance and threads come from spi/environment, so that a test can take them over."""
    for module in tree.modules.values():
        if module.name == ENVIRONMENT:
            continue
        forbidden = CHANCE | THREADS if module.room == "stores" else CHANCE | THREADS | TIME
        methods = THREAD_METHODS if module.room == "stores" else THREAD_METHODS | TIME_METHODS
        for node, dotted in _uses(module.tree):
            pattern = dotted if dotted in forbidden else f"{dotted.split('.')[0]}.*"
            if pattern in forbidden and not tree.excepted(module, dotted):
                yield f"{_where(module, node.lineno)}: {dotted} outside spi/environment"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                attribute = node.func.attr
                of_loop = attribute == "time" and "loop" in ast.unparse(node.func.value) and module.room != "stores"
                if (attribute in methods or of_loop) and not tree.excepted(module, attribute):
                    yield f"{_where(module, node.lineno)}: .{attribute}() outside spi/environment"


def _uses(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Every use of an imported name as its full dotted name; annotations name types and use nothing."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def walk(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
        if isinstance(node, ast.Call) and _harmless(full(node.func), node):
            for child in (*node.args, *node.keywords):
                yield from walk(child)
            return
        if isinstance(node, ast.Attribute | ast.Name):
            name = full(node)
            if name:
                yield node, name
                return
        for field_name, value in ast.iter_fields(node):
            if field_name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child)

    def full(node: ast.expr) -> str:
        dotted = _dotted(node)
        first, _, rest = dotted.partition(".")
        if first not in aliases:
            return ""
        return f"{aliases[first]}.{rest}" if rest else aliases[first]

    yield from walk(tree)


def _harmless(dotted: str, call: ast.Call) -> bool:
    if dotted == "asyncio.sleep":  # sleep(0) gives way; it waits for nothing.
        return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    # A generator with a seed repeats itself: no chance in it.
    return dotted == "random.Random" and bool(call.args)


def check_pickle(tree: Tree) -> Iterator[str]:
    for module in tree.modules.values():
        for found in module.imports:
            if not found.inside and found.module.split(".")[0] in PICKLES:
                yield f"{_where(module, found.line)}: {found.module}: stored data is JSON, never a pickle"


def check_swallowed(tree: Tree) -> Iterator[str]:
    """A failure is recorded, translated or raised; it is never dropped."""
    for module in tree.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                if node.type is None:
                    yield f"{_where(module, node.lineno)}: bare except"
                elif _catches_all(node.type) and all(_does_nothing(statement) for statement in node.body):
                    yield f"{_where(module, node.lineno)}: except {ast.unparse(node.type)} that drops the error"
            elif _is_call_of(node, "suppress") and any(_catches_all(argument) for argument in node.args):
                yield f"{_where(module, node.lineno)}: suppress() of every error"


def _is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] == name


def _catches_all(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_catches_all(element) for element in node.elts)
    return _dotted(node).split(".")[-1] in ("Exception", "BaseException")


def _does_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


RULES = [
    check_rooms,
    check_transitive,
    check_third_parties,
    check_loaded,
    check_environment,
    check_pickle,
    check_swallowed,
]

# --- The tests --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(SOURCE, EXCEPTIONS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(tree: Tree, rule) -> None:
    broken = sorted(set(rule(tree)))
    assert not broken, "\n" + "\n".join(broken)


def test_no_exception_outlives_its_need() -> None:
    tree = Tree(SOURCE, EXCEPTIONS)
    for rule in RULES:
        list(rule(tree))
    assert list(tree.stale_exceptions()) == []


# A sound package in small; each violation below is laid over it.
SOUND = {
    "__init__.py": "from .assembly import LocalBackend\nfrom .contracts.ids import SessionKey\n",
    "_failpoints.py": "import os\n",
    "assembly.py": "def LocalBackend():\n    from .stores.records.sqlite import Store\n    return Store\n",
    "contracts/__init__.py": "",
    "contracts/ids.py": "import msgspec\n",
    "domain/__init__.py": "",
    "domain/lease.py": "from ..contracts.ids import SessionKey\n",
    "spi/__init__.py": "from agentscope_durable.contracts import ids\n",
    "spi/environment.py": "import time, os, threading\nnow = time.time\n",
    "backend/__init__.py": "from .. import _failpoints\nfrom ..domain import lease\n",
    "stores/__init__.py": "",
    "stores/records/__init__.py": "",
    "stores/records/_codec.py": "",
    "stores/records/memory.py": "import time\nfrom ._codec import x\nnow = time.time()\n",
    "stores/records/sqlite.py": "import apsw\nfrom ._codec import x\nfrom ...spi import ids\n",
    "adapters/__init__.py": "",
    "adapters/agentscope/__init__.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agentscope.agent import Agent\n"
        "def build():\n    import agentscope\n"
    ),
    "runtime/__init__.py": (
        "import asyncio, random, threading\nasync def f(t: threading.Thread):\n    await asyncio.sleep(0)\n"
        "    random.Random(7)\n    try:\n        pass\n    except Exception as error:\n        print(error)\n"
    ),
    "cli/__init__.py": "import typer\nfrom ..assembly import LocalBackend\nfrom .. import SessionKey\n",
}

VIOLATIONS: list[tuple[str, str, str]] = [
    ("domain/lease.py", "from ..spi import x", "domain may not import spi"),
    (
        "domain/lease.py",
        "def f():\n    from agentscope_durable.stores.records import sqlite",
        "domain may not import stores",
    ),
    (
        "domain/lease.py",
        "import typing\nif typing.TYPE_CHECKING:\n    from ..runtime import x",
        "domain may not import runtime",
    ),
    (
        "domain/lease.py",
        "import importlib\nimportlib.import_module('agentscope_durable.backend')",
        "domain may not import",
    ),
    ("domain/lease.py", "from .. import SessionKey", "imports the package's own API"),
    ("domain/lease.py", "from .. import _failpoints", "domain may not import _failpoints"),
    ("contracts/ids.py", "from .._failpoints import hit", "contracts may not import _failpoints"),
    ("contracts/ids.py", "from ..domain import lease", "contracts may not import domain"),
    ("_failpoints.py", "from .contracts import ids", "_failpoints may not import contracts"),
    ("runtime/__init__.py", "from ..stores.records import memory", "runtime may not import stores"),
    ("runtime/__init__.py", "from ..assembly import LocalBackend", "runtime may not import assembly"),
    ("runtime/__init__.py", "from ..testing import x", "runtime may not import testing"),
    ("assembly.py", "from .testing import x", "assembly may not import testing"),
    ("__init__.py", "from .adapters.agentscope import x", "__init__ may not import adapters"),
    ("stores/records/memory.py", "from .sqlite import Store", "the shelf stores.records.memory reaches the shelf"),
    ("stores/records/__init__.py", "from .sqlite import Store", "the shelf stores.records.memory reaches the shelf"),
    ("stores/records/_codec.py", "from . import sqlite", "the shelf stores.records.memory reaches the shelf"),
    ("helpers.py", "", "'helpers' is no room"),
    ("domain/lease.py", "import rfc8785", "domain may not import rfc8785"),
    ("contracts/ids.py", "def f():\n    import jsonschema", "contracts may not import jsonschema"),
    ("stores/records/sqlite.py", "import asyncpg", "one file, one driver; this one has apsw, asyncpg"),
    ("stores/records/sqlite.py", "import rfc8785", "stores may not import rfc8785"),
    (
        "adapters/agentscope/__init__.py",
        "from agentscope.agent import Agent",
        "agentscope may be imported inside functions",
    ),
    ("runtime/__init__.py", "def f():\n    import agentscope", "runtime may not import agentscope"),
    ("assembly.py", "from .stores.records.sqlite import Store", "would load apsw"),
    ("domain/lease.py", "import time\nx = time.time()", "time.time outside"),
    ("domain/lease.py", "from time import monotonic as m\nx = m()", "time.monotonic outside"),
    ("domain/lease.py", "import datetime as d\nx = d.datetime.now(d.UTC)", "datetime.datetime.now outside"),
    ("runtime/__init__.py", "from datetime import datetime\nx = datetime.now", "datetime.datetime.now outside"),
    ("runtime/__init__.py", "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)", "asyncio.sleep outside"),
    (
        "runtime/__init__.py",
        "import asyncio\nasync def f():\n    await asyncio.to_thread(f)",
        "asyncio.to_thread outside",
    ),
    ("runtime/__init__.py", "def f(loop):\n    loop.run_in_executor(None, f)", ".run_in_executor() outside"),
    ("runtime/__init__.py", "def f(loop):\n    loop.call_later(1, f)", ".call_later() outside"),
    ("runtime/__init__.py", "import asyncio\nx = asyncio.get_running_loop().time()", ".time() outside"),
    ("runtime/__init__.py", "import random\nx = random.random()", "random.random outside"),
    ("runtime/__init__.py", "import random\nx = random.Random()", "random.Random outside"),
    ("runtime/__init__.py", "import secrets\nx = secrets.token_hex()", "secrets.token_hex outside"),
    ("runtime/__init__.py", "import uuid\nx = uuid.uuid4()", "uuid.uuid4 outside"),
    ("runtime/__init__.py", "import threading\nx = threading.Thread()", "threading.Thread outside"),
    ("runtime/__init__.py", "from concurrent.futures import ThreadPoolExecutor\nx = ThreadPoolExecutor()", "outside"),
    ("stores/records/memory.py", "import os\nx = os.urandom(4)", "os.urandom outside"),
    ("stores/records/memory.py", "import threading\nx = threading.Thread()", "threading.Thread outside"),
    ("stores/records/memory.py", "import pickle", "never a pickle"),
    ("runtime/__init__.py", "try:\n    x = 1\nexcept:\n    raise", "bare except"),
    ("runtime/__init__.py", "try:\n    x = 1\nexcept Exception:\n    pass", "that drops the error"),
    ("runtime/__init__.py", "try:\n    x = 1\nexcept (OSError, BaseException):\n    ...", "that drops the error"),
    (
        "runtime/__init__.py",
        "import contextlib\nwith contextlib.suppress(Exception):\n    x = 1",
        "suppress() of every error",
    ),
]


def _write(folder: Path, extra: tuple[str, str] | None = None) -> Tree:
    source = folder / PACKAGE
    for name, text in SOUND.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if extra is not None:
        path = source / extra[0]
        path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + extra[1] + "\n", encoding="utf-8")
    return Tree(source, {("domain.lease", "time.ctime"): "never needed"})


def test_the_checker_finds_nothing_in_a_sound_package(tmp_path: Path) -> None:
    sound = _write(tmp_path)

    assert [broken for rule in RULES for broken in rule(sound)] == []
    assert list(sound.stale_exceptions()) == ["EXCEPTIONS: domain.lease does not use time.ctime any more"]


@pytest.mark.parametrize(("path", "text", "message"), VIOLATIONS)
def test_the_checker_catches_a_violation(tmp_path: Path, path: str, text: str, message: str) -> None:
    spoilt = _write(tmp_path, (path, text))
    found = [broken for rule in RULES for broken in rule(spoilt)]

    assert any(message in broken for broken in found), found
    assert all(":" in broken for broken in found)


def test_an_exception_with_a_reason_is_kept(tmp_path: Path) -> None:
    spoilt = _write(tmp_path, ("domain/lease.py", "import time\nx = time.ctime()"))

    assert list(check_environment(spoilt)) == []
    assert list(spoilt.stale_exceptions()) == []
