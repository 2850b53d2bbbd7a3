"""Public is a list: what may be imported stands in `public_api.txt`, and no name gets there by accident."""

from __future__ import annotations

import sys
import types

import pytest

from tools import public_api


def test_the_public_names_are_the_listed_ones() -> None:
    found = public_api.difference()

    assert found == "", f"\n{found}\n\nrun `make docs` and read the difference as a change of the public API"


def test_a_module_that_does_not_exist_yet_has_no_names() -> None:
    assert public_api.public_names("agentscope_durable.never") == []


@pytest.mark.parametrize(
    ("names", "error"), [(["missing"], AttributeError), (["present", "present"], ValueError)], ids=["absent", "doubled"]
)
def test_a_wrong_list_is_refused(monkeypatch: pytest.MonkeyPatch, names: list[str], error: type[Exception]) -> None:
    module = types.ModuleType("agentscope_durable_example")
    module.present = 1  # type: ignore[attr-defined]
    module.__all__ = names  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    with pytest.raises(error, match=names[0]):
        public_api.public_names(module.__name__)
