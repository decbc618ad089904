"""Print what the cells of `test_conformance` promise: the table of hooks and situations for docs/loops.md."""

from tests.conformance.cases import CASES
from tests.conformance.hooks import HOOKS


def table() -> str:
    lines = [
        f"| hook, with plain DDP in {len(CASES)} situations | results | refuses |",
        "|---|---|---|",
    ]
    for name, row in HOOKS.items():
        if row.lossy:
            found = f"near {row.like.replace('_', ' ')}" if row.like else "near"
        elif row.like:
            found = f"the bits of `{row.like}`"
        else:
            found = "same bits" if row.order else "same bits with 1 and 2 ranks, near with more"
        found += "".join(f"; {case.replace('_', ' ')}: {why}" for case, why in row.differs.items())
        refused = ", ".join(case.replace("_", " ") for case in row.refuses) or "nothing"
        lines.append(f"| `{name}` | {found} | {refused} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
