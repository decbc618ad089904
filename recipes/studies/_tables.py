"""Results on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

Cell = float | str | None
Cells = Mapping[str, Cell]
WIDE = 220
"""Characters of a line in a file, which has no edge that cells would have to fit."""


def show_table(console: Console, title: str, rows: Iterable[Cells]) -> None:
    """Print rows of cells by their headings; a number has three decimals, and what is not there is a dash."""
    listed = list(rows)
    table = Table(title=title)
    headings = list(dict.fromkeys(heading for row in listed for heading in row))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in listed:
        table.add_row(*(_text(row.get(heading)) for heading in headings))
    console.print(table, width=None if console.is_terminal else WIDE)


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else f"{cell:.3f}"
