"""Pages repeat measured figures as docs/measurements.md has them, and name what repeats them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.documents import section
from tests.recipes.test_documents import missing
from tests.rules import figures
from tests.rules.figures import MEASUREMENTS, NO_COMMAND, README, Measured, disagreements

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / README, *sorted((ROOT / "docs").glob("*.md")))
}
PASSAGES = figures.passages(Measured(PAGES[MEASUREMENTS]))
SUMMARY = section(PAGES[MEASUREMENTS], "In one table")
# A condition of a measurement in the README's table, which is no figure of it.
CONDITION = r"M/C \d(?:\.\d)?(?: to \d\.\d)?"


def test_all_pages_have_the_measured_figures() -> None:
    assert disagreements(PAGES, PASSAGES) == []


def changed(text: str, start: int, end: int) -> str:
    """Return the text with another last digit between two positions."""
    found = [*re.finditer(r"\d", text[start:end])][-1]
    at = start + found.start()
    return text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]


def with_one_change() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a page with one figure of one passage changed, for each of them."""
    for passage in PASSAGES:
        for match in passage.pattern().finditer(PAGES[passage.page]):
            for group in range(1, len(passage.figures) + 1):
                text = changed(PAGES[passage.page], *match.span(group))
                yield f"{passage.page}: {match[group]}", {passage.page: text}


def test_a_figure_that_is_changed_in_one_place_is_found() -> None:
    changes = [*with_one_change()]
    assert len(changes) >= sum(len(passage.figures) for passage in PASSAGES)
    assert [where for where, page in changes if disagreements(page, PASSAGES) == []] == []


@pytest.mark.parametrize(
    ("row", "page"),
    [
        ("| 250 Mbit/s in turns | 941 | – | 1.55 |", README),
        ("| narrow ResNet-18 | 2.65 | 0.104, 0.260, 0.275 | **0.74** |", README),
        ("| 3.00 (2026-11-27) | 58 | 200 |", "docs/averaging.md"),
        ("| turns | 1.27 |", "docs/gpu.md"),
        (
            "| N | convnet | 0.90 | 0.679 | 0.609 | 0.834 | 0.642 (10) | **1.30** |",
            figures.CHOOSING,
        ),
    ],
)
def test_a_table_that_is_changed_alone_is_found(row: str, page: str) -> None:
    text = PAGES[MEASUREMENTS]
    assert text.count(row) == 1
    start = text.index(row)
    # The last number of the quoted cells becomes another one.
    measured = Measured(changed(text, start, start + len(row)))
    assert disagreements({page: PAGES[page]}, figures.passages(measured)) != []


def uncovered(readme: str) -> list[str]:
    """Return the factors and percentages in the README's table that no passage covers."""
    table = section(readme, "Which line for which job").split("\n\n")[1]
    ours = [passage.pattern() for passage in PASSAGES if passage.page == README]
    spans = [match.span() for pattern in ours for match in pattern.finditer(table)]
    rest = "".join(
        letter
        for at, letter in enumerate(table)
        if not any(start <= at < end for start, end in spans)
    )
    return re.findall(r"\d+\.\d+|\d+(?:\.\d+)? %", re.sub(CONDITION, "", rest))


def test_every_figure_in_the_table_of_the_readme_is_covered() -> None:
    assert uncovered(PAGES[README]) == []
    assert uncovered(PAGES[README].replace("not measured |", "1.20 |", 1)) == ["1.20"]


def test_every_figure_in_the_readme_can_be_repeated() -> None:
    used = {passage.command for passage in PASSAGES if passage.page == README}
    assert NO_COMMAND not in used
    assert [command for command in sorted(used) if command not in SUMMARY] == []


def test_the_summary_names_commands_that_exist() -> None:
    cells = [row["run again by"] for row in Measured(PAGES[MEASUREMENTS]).rows("In one table")]
    commands = [each for cell in cells for each in re.findall(r"`([^`]+)`", cell)]
    full = [
        f"python recipes/studies/run.py {each}" if each.startswith("--") else each
        for each in commands
    ]
    assert "make campaign" in full
    assert {each: found for each in full if (found := missing(each))} == {}
    scripts = [each.split()[0] for each in commands if each.startswith("tests/")]
    assert scripts
    assert all((ROOT / each).is_file() for each in scripts)
    without = [cell for cell in cells if not re.search(r"`|same|tests", cell)]
    assert [cell for cell in without if not re.search(r"no command|in \[git\]", cell)] == []
