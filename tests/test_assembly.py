"""What an application opens by one name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import InvalidRequest, NotADatabase


async def test_a_folder_is_made_and_can_be_awaited_or_entered(tmp_path: Path) -> None:
    async with LocalBackend.open(tmp_path / "a" / "b") as backend:
        assert backend.capabilities.persistent
    again = await LocalBackend.open(tmp_path / "a" / "b")
    await again.close()

    assert (tmp_path / "a" / "b" / "durable.db").is_file()


async def test_opening_does_nothing_before_it_is_awaited(tmp_path: Path) -> None:
    LocalBackend.open(tmp_path / "later")

    assert not (tmp_path / "later").exists()


async def test_what_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidRequest, match="cannot be made") as caught:
            await LocalBackend.open(place)
        assert str(place) in str(caught.value)


async def test_a_folder_with_a_foreign_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "durable.db").write_text("mine" * 1000)

    with pytest.raises(NotADatabase):
        await LocalBackend.open(tmp_path)

    assert (tmp_path / "durable.db").read_text() == "mine" * 1000
