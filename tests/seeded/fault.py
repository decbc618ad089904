"""One fault, and the copy of the tree that it is seeded into."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A mistake that somebody could make, or has made.

    Args:
        why: what goes wrong with it, in a few words.
        path: of the file, from the root of the tree.
        old, new: text that stands once in the file, and what takes its place.
        tests: what pytest is given; some of these tests must fail.
    """

    why: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def seeded(self, root: Path) -> str:
        """Return the file's text with the fault in it."""
        text = (root / self.path).read_text()
        found = text.count(self.old)
        if found != 1 or self.new == self.old:
            raise ValueError(
                f"expected the text of fault {self.why!r} once in {self.path}, found it {found} times; "
                "seed the same mistake into what the code is now"
            )
        return text.replace(self.old, self.new)

    def missing(self, root: Path) -> list[str]:
        """Return the files and functions of tests that are not there."""
        missing = []
        for test in (test for test in self.tests if test.startswith("tests/")):
            file, _, function = test.partition("::")
            path, name = root / file, function.partition("[")[0]
            if not path.exists() or (name and f"def {name}(" not in path.read_text()):
                missing.append(test)
        return missing


def copy_tree(target: Path) -> None:
    """Copy what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
