"""Print the table of hooks and situations for docs/loops.md, which `test_conformance` holds."""

from tests.conformance.cases import CASES
from tests.conformance.hooks import HOOKS, Row


def table() -> str:
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


if __name__ == "__main__":
    print(table())
