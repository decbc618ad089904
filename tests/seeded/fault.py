"""One fault, the tables that faults stand in, and the copy of the tree that they are seeded into.

A table, ``faults/*.txt``, has after ``@`` a file, and of each mistake in it a reason after ``#``, what pytest is given
after ``$`` (if that is not what it is given for the mistake above), and a diff whose lines are whole: those with a
space or a minus stand once in the file.
"""

import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Fault:
    """A mistake that somebody could make, or has made."""

    path: str  # from the root of the tree
    why: str
    tests: list[str] = field(default_factory=list)  # what pytest is given; some of these tests must fail
    diff: list[str] = field(default_factory=list)  # lines of the file, with their sign

    def seeded(self, root: Path) -> str:
        """Return the file's text with the fault in it."""
        text = "\n" + (root / self.path).read_text()
        old, new = ("\n".join(["", *(x[1:] for x in self.diff if x[0] != sign), ""]) for sign in "+-")
        found = text.count(old)
        if found != 1 or new == old:
            raise ValueError(
                f"expected the lines of fault {self.why!r} once in {self.path}, found them {found} times; "
                "seed the same mistake into what the code is now"
            )
        return text.replace(old, new)[1:]

    def missing(self, root: Path) -> list[str]:
        def is_there(test: str) -> bool:
            file, _, function = test.partition("::")
            path, name = root / file, function.partition("[")[0]
            return path.exists() and (not name or f"def {name}(" in path.read_text())

        return [test for test in self.tests if test.startswith("tests/") and not is_there(test)]


def read(table: str) -> list[Fault]:
    path, faults = "", list[Fault]()
    for line in filter(None, table.splitlines()):
        if line[0] == "@":
            path = line[2:]
        elif line[0] == "#":
            faults.append(Fault(path, line[2:], faults[-1].tests if faults else []))
        elif line[0] == "$":
            faults[-1].tests = shlex.split(line[2:])
        else:
            faults[-1].diff.append(line)
    return faults


TABLES = sorted(Path(__file__).parent.glob("faults/*.txt"))
FAULTS = [fault for table in TABLES for fault in read(table.read_text())]


def copy_tree(target: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
