"""No repr shows what somebody said: one of each struct there is, full of secrets."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

import msgspec
import pytest

import agentscope_durable
from agentscope_durable.contracts.discreet import Words

SECRET = "the code is 4711"
ROOMS = ("contracts", "domain", "spi", "journal", "backend", "runtime", "executors", "stores", "adapters")
SHOWN = frozenset(
    """
    about after agent answers applied arguments_digest author base cancel chain check child classes commands
    created_at current cursor dead declined definition_version definitions delivery digest directory drafts evidence
    evidence_ref facts finish_reason finished_reason flag harness high_watermark hints id input_kind item key keys
    kind kinds klass last_step lost_run media_type model name names namespace operation outcome owner owners
    partition parts path pause permission position prefix reason recovery refused resolved_harnesses restored_from
    resumed_from role route routes served signals skipped state state_version store strays stream subject turn type
    types unready value version what writer SweepReport.strangers Change.puts Records.ranges RequestRecord.arguments
    ToolBinding.description PolicyRequest.command PolicyRequest.tools
    """.split()
)
"""Text fields that hold ids, kinds and sentences of ours. A new name is a decision: this list, or `Words`."""


def structs() -> Iterator[type]:
    for room in ROOMS:
        package = importlib.import_module(f"{agentscope_durable.__name__}.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if isinstance(kind, type) and kind.__module__ == module.name and issubclass(kind, msgspec.Struct):
                    yield kind


KINDS = sorted(set(structs()), key=lambda kind: (kind.__module__, kind.__qualname__))


def made(kind: type, around: tuple[type, ...] = ()) -> Any:
    """A struct whose every field that may hold content holds the secret."""
    arguments = {}
    for field in msgspec.structs.fields(kind):
        required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
        value = filled(field.type, field.name, (*around, kind))
        if value is not None or required:
            arguments[field.name] = "plain" if value is None else value
    return kind(**arguments)


def filled(declared: Any, name: str, around: tuple[type, ...]) -> Any:
    """A value of a type: the secret wherever one can be, None where nothing needs to be said."""
    if declared == Words or declared in (Any, object):
        return SECRET
    if declared is str:
        known = name in SHOWN or name.endswith("_id") or f"{around[-1].__name__}.{name}" in SHOWN
        assert known, f"{around[-1].__name__}.{name}: is it `Words`, or does SHOWN name it?"
        return None
    if declared is bytes:
        return SECRET.encode()
    if declared is msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(SECRET))
    origin, parts = get_origin(declared), get_args(declared)
    if origin in (typing.Union, types.UnionType):
        values = [filled(part, name, around) for part in parts]
        return next((value for value in values if value is not None), None)
    if origin is tuple:
        return tuple(filled(part, name, around) for part in parts if part is not ...)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return {"key": filled(parts[1], name, around)}
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return [filled(parts[0], name, around)]
    if inspect.isclass(declared) and issubclass(declared, msgspec.Struct):
        return made(declared, around) if declared not in around else None
    return None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__.split('.', 1)[1]}.{kind.__name__}")
def test_a_repr_shows_no_content(kind: type) -> None:
    shown = repr(made(kind))

    assert SECRET not in shown
    assert kind.__name__ in shown
