"""The picture: its window, and what is written in it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.picture import draw, middle_window
from tests.recipes.made_up_spans import siblings


def test_nothing_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected spans, got none"):
        draw([], tmp_path / "x.png")


def test_the_middle_of_a_long_run_is_shown() -> None:
    assert middle_window(siblings(100), steps=8) == (92.0, 108.0)
    assert middle_window(siblings(3), steps=8) == (0.0, 7.0)


def test_names_and_shares_are_written_in_the_picture(tmp_path: Path) -> None:
    path = draw(siblings(10), tmp_path / "deep" / "x.svg", title="title")
    # matplotlib draws glyphs, and says which in comments
    written = "".join(path.read_text().split("<!--")[1:])
    for text in (
        "device0",
        "device1",
        "job a",
        "job b",
        "waits for its turn",
        "busy 100%",
        "idle 0%",
        "title",
    ):
        assert f" {text}" in written
    ElementTree.parse(path)
