"""The list of public names: `tests/public_api.txt`.

    python tools/public_api.py --write     write the file again
    python tools/public_api.py --check     fail when it is stale

A difference there is a change of the public API and is reviewed as one. A public module must have
`__all__`, sorted or not, without doubles, and every name in it must exist.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "public_api.txt"
MODULES = (
    "agentscope_durable",
    "agentscope_durable.spi",
    "agentscope_durable.testing",
    "agentscope_durable.adapters.agentscope",
)
HEADER = "# Written by tools/public_api.py --write. A difference here is a change of the public API.\n"


def public_names(module_name: str) -> list[str]:
    """The names a module offers, sorted; none for a module that does not exist yet.

    Raises:
        AttributeError: `__all__` names something the module does not have.
        ValueError: `__all__` names something twice.
    """
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Another module that is missing is a fault of this one, and not its absence.
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        return []
    names: list[str] = sorted(getattr(module, "__all__", ()))
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise ValueError(f"{module_name}.__all__ names {', '.join(sorted(doubled))} twice")
    for name in names:
        getattr(module, name)
    return names


def render() -> str:
    sections = [(module, public_names(module)) for module in MODULES]
    return HEADER + "".join(f"\n[{module}]\n" + "".join(f"{name}\n" for name in names) for module, names in sections)


def difference() -> str:
    """What a stale file lacks or has too much, as a unified diff; empty when it is current."""
    written = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    lines = difflib.unified_diff(
        written.splitlines(), render().splitlines(), "tests/public_api.txt", "the code", lineterm="", n=0
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    if parser.parse_args().write:
        FILE.write_text(render(), encoding="utf-8")
        return 0
    found = difference()
    if found:
        print(found, "\nstale: run `make docs` and read the difference as a change of the public API", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
