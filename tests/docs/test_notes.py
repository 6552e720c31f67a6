"""The notes on speed and the changelog: their form, so that they stay readable as they grow."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTES = (ROOT / "benchmarks" / "notes.md").read_text()
TITLES = re.findall(r"^## (.*)$", NOTES, re.MULTILINE)
DATED = re.compile(r"20\d\d-\d\d-\d\d: ")


def anchor(title):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_lines_are_no_longer_than_120_columns():
    for name in ("benchmarks/notes.md", "CHANGELOG.md"):
        long = [n for n, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > 120]
        assert not long, f"{name}: {long}"


def test_the_contents_name_every_entry_in_its_order():
    listed = [re.sub(r"\s+", " ", m) for m in re.findall(r"^- \[(.*?)\]\(#", NOTES, re.MULTILINE | re.DOTALL)]
    assert listed == TITLES[1:] and TITLES[:2] == ["Contents", "What was refuted"]
    assert re.findall(r"\]\(#([^)]*)\)", NOTES.split("## What was refuted")[0]) == [anchor(t) for t in TITLES[1:]]


def test_every_entry_has_a_day_and_the_commits_of_its_text():
    days = []
    for title, text in zip(TITLES, re.split(r"^## .*$", NOTES, flags=re.MULTILINE)[1:], strict=True):
        if title in ("Contents", "What was refuted"):
            continue
        assert DATED.match(title), title
        days.append(title[:10])
        if "changelog" not in title:
            assert re.match(rf"\s*\*{title[:10]}, [0-9a-f]{{7}}", text), title
    assert days == sorted(days)


def test_what_was_refuted_has_a_day_of_an_entry():
    days = {title[5:10] for title in TITLES if DATED.match(title)}
    table = NOTES.split("## What was refuted")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:3] == "| 1"]
    assert len(rows) > 40 and all(len(row) == 4 and row[0] in days and row[1] and row[3] for row in rows)


def test_the_changelog_is_for_users():
    """What a point takes four lines to say belongs in the documents, and figures in the notes."""
    text = (ROOT / "CHANGELOG.md").read_text()
    points = re.split(r"^(?=- |\*\*|## )", text, flags=re.MULTILINE)
    assert not [point for point in points if len(point.rstrip().splitlines()) > 5]
    assert "TFLOP" not in text and len(text.splitlines()) < 60
