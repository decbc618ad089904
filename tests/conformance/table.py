"""What the cells of `test_conformance` promise, as a page shows it."""

from collections.abc import Mapping

from tests.conformance.cases import CASES
from tests.conformance.hooks import HOOKS, Row


def table() -> str:
    """Return a table in Markdown, a row a hook."""
    lines = [f"| hook, with plain DDP in {len(CASES)} situations | results | refuses |", "|---|---|---|"]
    lines += [f"| `{name}` | {_results(row)} | {_named(row.refuses)} |" for name, row in HOOKS.items()]
    return "\n".join(lines)


def _results(row: Row) -> str:
    if row.lossy:
        found = f"near {row.like.replace('_', ' ')}" if row.like else "near"
    elif row.like:
        found = f"the bits of `{row.like}`"
    else:
        found = "same bits" if row.order else "same bits with 1 and 2 ranks, near with more"
    return found + "".join(f"; {case.replace('_', ' ')}: {why}" for case, why in row.differs.items())


def _named(refuses: Mapping[str, str]) -> str:
    return ", ".join(case.replace("_", " ") for case in refuses) or "nothing"
