"""Seed each fault and run its tests; the exit code is the number of faults that nothing has found."""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.seeded.fault import FAULTS, ROOT, Fault, copy_tree

TIMEOUT_S = 900.0
# No bytecode: a fault may be as long as what it replaces, and be there in the same second.
ENVIRONMENT = {"CROSSOVER_BENCH": "smoke", "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    words = sys.argv[1:]
    os.environ.pop("CROSSOVER_CAMPAIGN", None)  # in the suite's short form
    chosen = [each for each in FAULTS if not words or any(word in describe(each) for word in words)]
    if not chosen:
        sys.exit(f"no fault has any of {words} in its file, function or reason")
    with tempfile.TemporaryDirectory(prefix="seeded-") as directory:
        copy_tree(Path(directory))
        places = [f"{number} of {len(chosen)}" for number in range(1, len(chosen) + 1)]
        seen = sum(map(is_seen, chosen, itertools.repeat(Path(directory)), places))
    print(f"{seen} of {len(chosen)} seeded faults were seen", flush=True)
    return len(chosen) - seen


def describe(fault: Fault) -> str:
    """Return the file, the function and the reason."""
    path, _ = fault.seeded(ROOT)
    return (
        f"{path}: {fault.why}" if path == fault.target else f"{path}: {fault.target}: {fault.why}"
    )


def is_seen(fault: Fault, root: Path, number: str) -> bool:
    name, seeded = fault.seeded(root)
    path = root / name
    sound = path.read_text()
    path.write_text(seeded)
    begin_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests],
            cwd=root,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        path.write_text(sound)
    seen = done.returncode == 1  # where tests ran and some failed
    red = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    verdict = (
        " by ".join(["seen", *red[:1]])
        if seen
        else f"NOT SEEN (pytest's exit code {done.returncode})"
    )
    print(f"{number}: {describe(fault)}: {verdict}, {time.monotonic() - begin_s:.0f} s", flush=True)
    if not seen:
        print(done.stdout[-2000:] + done.stderr[-2000:], flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
