"""Seed each fault and run its tests. The exit code is the number of faults that none has found."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.seeded.fault import FAULTS, ROOT, Fault, copy_tree

TIMEOUT_S = 900.0
# No bytecode: Python would take it for current if a fault has the same length as the code that it
# replaces, and is written within the same second.
ENVIRONMENT = {"CROSSOVER_BENCH": "smoke", "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    words = sys.argv[1:]
    os.environ.pop("CROSSOVER_CAMPAIGN", None)  # the suite's short form must find the faults
    chosen = [each for each in FAULTS if not words or any(word in describe(each) for word in words)]
    if not chosen:
        sys.exit(f"no fault has any of {words} in its file, function or reason")
    with tempfile.TemporaryDirectory(prefix="seeded-") as directory:
        copy_tree(Path(directory))
        seen = 0
        for number, fault in enumerate(chosen, 1):
            seen += is_seen(fault, Path(directory), f"{number} of {len(chosen)}")
    print(f"{seen} of {len(chosen)} seeded faults were seen", flush=True)
    return len(chosen) - seen


def describe(fault: Fault) -> str:
    """Return the file, the function and the reason."""
    path, _ = fault.seeded(ROOT)
    if path == fault.target:
        return f"{path}: {fault.why}"
    return f"{path}: {fault.target}: {fault.why}"


def is_seen(fault: Fault, root: Path, number: str) -> bool:
    """Seed a fault into the tree at ``root``, run its tests, and return whether any has failed."""
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
    seen = done.returncode == 1  # pytest's exit code if tests ran and some failed
    if seen:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        verdict = " by ".join(["seen", *failed[:1]])
    else:
        verdict = f"NOT SEEN (pytest's exit code {done.returncode})"
    print(f"{number}: {describe(fault)}: {verdict}, {time.monotonic() - begin_s:.0f} s", flush=True)
    if not seen:
        print(done.stdout[-2000:] + done.stderr[-2000:], flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
