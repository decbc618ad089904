"""Seed each fault and run its tests; the exit code is the number of faults that nothing has found."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.seeded.fault import FAULTS, Fault, copy_tree

TIMEOUT_S = 900.0
FAILED = 1  # pytest's code where tests ran and some failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeded", description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults with one of these in their file or reason")
    parser.add_argument(
        "--lanes", type=int, default=1, help="faults at a time, each in a copy of the tree (default 1)"
    )
    args = parser.parse_args()
    words = args.words
    chosen = [each for each in FAULTS if not words or any(word in each.path + each.why for word in words)]
    if not chosen:
        parser.error(f"no fault has any of {words} in its file or reason")
    if args.lanes < 1:
        parser.error(f"expected --lanes >= 1, got --lanes={args.lanes}; each lane runs one fault at a time")
    lanes = SimpleQueue[Path]()

    def seen(numbered: tuple[int, Fault]) -> bool:
        number, fault = numbered
        root = lanes.get()
        try:
            return is_seen(fault, root, f"{number} of {len(chosen)}")
        finally:
            lanes.put(root)

    with ExitStack() as stack:
        for _ in range(args.lanes):
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seeded-")))
            copy_tree(root)
            lanes.put(root)
        pool = stack.enter_context(ThreadPoolExecutor(args.lanes))
        unseen = len(chosen) - sum(pool.map(seen, enumerate(chosen, 1)))
    print(f"{len(chosen) - unseen} of {len(chosen)} seeded faults were seen", flush=True)
    return unseen


def is_seen(fault: Fault, root: Path, number: str) -> bool:
    """Seed a fault, run its tests, and take it out again."""
    path = root / fault.path
    sound, seeded = path.read_text(), fault.seeded(root)
    path.write_text(seeded)
    begin_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests],
            cwd=root,
            env=environment(root),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        path.write_text(sound)
    seen = done.returncode == FAILED
    red = [
        " by " + line.split()[1]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    verdict = "seen" + "".join(red[:1]) if seen else f"NOT SEEN (pytest's exit code {done.returncode})"
    print(f"{number}: {fault.path}: {fault.why}: {verdict}, {time.monotonic() - begin_s:.0f} s", flush=True)
    if not seen:
        print(done.stdout[-2000:] + done.stderr[-2000:], flush=True)
    return seen


def environment(root: Path) -> Mapping[str, str]:
    """Return the variables under which the copy is imported, in the suite's short form."""
    kept = {name: value for name, value in os.environ.items() if name != "CROSSOVER_CAMPAIGN"}
    # No bytecode: a fault may be as long as what it replaces, and be there in the same second.
    return {**kept, "PYTHONPATH": str(root), "CROSSOVER_BENCH": "smoke", "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    sys.exit(main())
