"""The notes in changes/ can be told apart by their numbers, and what links to one finds it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTES = sorted(path.name for path in (ROOT / "changes").glob("*.md") if path.name != "README.md")
LINK = re.compile(r"\[(\d{4})\]\((?:\.\./)?changes/([^)#]+)\)")


def test_each_note_has_a_number_of_its_own() -> None:
    assert NOTES
    assert [name for name in NOTES if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name)] == []
    assert [number for number, times in Counter(name[:4] for name in NOTES).items() if times > 1] == []


def test_a_heading_with_a_number_has_the_number_of_its_file() -> None:
    headings = {name: (ROOT / "changes" / name).read_text(encoding="utf-8").splitlines()[0] for name in NOTES}

    assert [name for name, text in headings.items() if re.match(r"# \d{4}", text) and text[2:6] != name[:4]] == []


def test_a_link_to_a_note_leads_to_it_and_says_its_number() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [link for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]

    assert links
    assert [link for link in links if link[1] not in NOTES or link[0] != link[1][:4]] == []
