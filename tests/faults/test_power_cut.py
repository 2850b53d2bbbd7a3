"""The power fails: what was written and not synced is lost, torn or garbled, in the log and in the file.

One telling leaves an image of the disk at many of its writes and syncs. From each a machine starts again: the file is
sound, every commit that was acknowledged is there (synchronous FULL), and the story is told to its end.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest

from tests.faults.disk import disk_below
from tests.faults.story import Account
from tests.faults.world import DATABASE, World

pytestmark = pytest.mark.backend("sqlite")

ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
SAMPLE = 16


class Image(NamedTuple):
    """What a power cut would have left, and what had happened until then."""

    moment: int
    files: dict[str, bytes]
    commits: list[str]
    account: Account


def images(folder: Path, moments: frozenset[int], *, full: bool = True) -> tuple[list[Image], int]:
    """One telling, with an image at these of its writes and syncs; and how many there are."""
    folder.mkdir()
    World(folder).close()
    found: list[Image] = []
    passed = 0
    with disk_below(folder / DATABASE) as disk:
        world = World(folder, full=full)

        def look() -> None:
            nonlocal passed
            passed += 1
            if passed in moments:
                files = disk.after_power_cut(f"{SEED} {passed}")
                found.append(Image(passed, files, world.commits, world.account.copy()))

        disk.on_change = look
        try:
            world.play()
        finally:
            world.close()
    return found, passed


def found_in(folder: Path, image: Image) -> list[str]:
    """What does not hold of the files as they were found."""
    folder.mkdir()
    for ending, content in image.files.items():
        if content or not ending:
            (folder / (DATABASE + ending)).write_bytes(content)
    connection = apsw.Connection(str(folder / DATABASE))
    wrong = [str(line) for (line,) in connection.execute("pragma integrity_check") if line != "ok"]
    there = {commit_id.hex() for (commit_id,) in connection.execute("select commit_id from log")}
    connection.close()
    lost = [commit_id for commit_id in image.commits if commit_id not in there]
    if lost:
        wrong.append(f"{len(lost)} of {len(image.commits)} acknowledged commits are lost")
    return wrong


def goes_on(folder: Path, image: Image) -> list[str]:
    """What does not hold when a machine starts from the image."""
    wrong = found_in(folder, image)
    world = World(folder, image.account, boot=2)
    try:
        world.play()
        return wrong + world.judge() + world.integrity()
    finally:
        world.close()


@pytest.mark.matrix
@pytest.mark.timeout(0 if ALL else 900)
def test_what_was_acknowledged_survives_a_power_cut(tmp_path: Path) -> None:
    _, passed = images(tmp_path / "whole", frozenset())
    moments = range(1, passed + 1)
    chosen = frozenset(moments if ALL else random.Random(SEED).sample(moments, SAMPLE))
    found, _ = images(tmp_path / "told", chosen)
    assert len(found) >= len(chosen) // 2
    broken = {image.moment: wrong for image in found if (wrong := goes_on(tmp_path / str(image.moment), image))}
    assert not broken, f"a power cut at moment n: {broken}"


def test_without_the_flush_of_each_commit_it_would_not(tmp_path: Path) -> None:
    """The check of the check: `synchronous=NORMAL` promises less, and that is seen."""
    _, passed = images(tmp_path / "whole", frozenset(), full=False)
    moments = frozenset(random.Random(SEED).sample(range(1, passed + 1), SAMPLE))
    found, _ = images(tmp_path / "told", moments, full=False)
    assert any("acknowledged" in wrong for image in found for wrong in found_in(tmp_path / str(image.moment), image))
