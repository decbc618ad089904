"""Print the tables for docs/loops.md, which `test_conformance` holds to what it has seen."""

from tests.conformance.cases import CASES
from tests.conformance.hooks import HOOKS, MATRIX, ROWS, SITUATIONS, Row


def table() -> str:
    """Return the table of hooks, with all situations at once."""
    lines = [
        f"| hook, with plain DDP in {len(CASES)} situations | results | refuses |",
        "|---|---|---|",
    ]
    for name, row in HOOKS.items():
        results = results_of(row)
        for case, reason in row.differs.items():
            results += f"; {case.replace('_', ' ')}: {reason}"
        refused = ", ".join(case.replace("_", " ") for case in row.refuses) or "nothing"
        lines.append(f"| `{name}` | {results} | {refused} |")
    return "\n".join(lines)


def results_of(row: Row) -> str:
    if row.lossy:
        return f"near {row.like.replace('_', ' ')}" if row.like else "near"
    if row.like:
        return f"the bits of `{row.like}`"
    return "same bits" if row.order else "same bits with 1 and 2 ranks, near with more"


def matrix() -> str:
    """Return the table of what scripts do, by hook. Notes are numbered below it."""
    notes: dict[str, int] = {}
    lines = ["| | " + " | ".join(MATRIX) + " |", "|---" * (1 + len(MATRIX)) + "|"]
    for label, case in SITUATIONS.items():
        cells = [cell_of(ROWS[name], case, notes) for name in MATRIX.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for note, number in notes.items())]
    return "\n".join(lines)


def cell_of(row: Row, case: str, notes: dict[str, int]) -> str:
    """Return the text of a cell, and number its note."""
    note = row.notes.get(case) or row.differs.get(case) or row.untested.get(case)
    if case in row.refuses or note == "refused":
        return "refused"
    if note is None:
        return "yes"
    word = "no" if case in row.untested else "yes"
    return f"{word} ({notes.setdefault(note, len(notes) + 1)})"


if __name__ == "__main__":
    print(matrix())
    print()
    print(table())
