"""Lanes in which campaigns run, and their shape: stories, each a function of its seed, told and judged one by one.

A lane is a nursery, which forks ranks as it is told, with what they have logged. Several lanes run at once.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness._preloaded import ForkedScript
from tests.harness.children import end, wait_any
from tests.harness.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 120.0  # then the nursery hangs
_END_S = 5.0
UNSHARE = {
    "users": ["--user", "--map-root-user", "--pid", "--fork", "--mount", "--mount-proc"],
    "memory": ["--mount", "--pid", "--fork", "--mount-proc"],
}


def why_no_container(kind: str) -> str:
    """Return why this machine lends no container of a kind, see `nursery`; empty if it does."""
    try:
        tried = subprocess.run(["unshare", *UNSHARE[kind], "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unshare is not installed"
    return f"unshare is not permitted: {tried.stderr.strip()}" if tried.returncode else ""


class Lane:
    """A nursery of ranks, told over its stdin; each answers in JSON, a line each.

    A rank is ``live(order)`` of the module ``worker``. ``container``: what the nursery has of its own, see there.
    """

    def __init__(self, worker: str, container: str = "") -> None:
        words = [sys.executable, str(ROOT / "tests" / "faults" / "nursery.py"), worker, container]
        pipe, own = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._is_container = bool(container)
        self._process: Any = ForkedScript(
            words, own, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=2
        )
        self._hear()

    def tell(self, what: str, /, **arguments: Any) -> Any:
        """Let the nursery do something and return its answer."""
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> Any:
        watchdog = threading.Timer(ANSWER_S, self._process.signal_session, [signal.SIGKILL])
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        assert line, (
            f"expected an answer of nursery {self._process.pid} in {ANSWER_S:.0f} s, got its end"
        )
        return json.loads(line)

    def bear(self, order: dict[str, Any], replaced: "Rank | None" = None) -> "Rank":
        """Fork a rank, which logs to ``order["log"]``; perhaps with the process id of another one, which is killed."""
        after = str(replaced.path) if replaced else None
        return Rank(Path(order["log"]), self, self.tell("born", order=order, after=after))

    def kill(self) -> None:
        """End the nursery; of a container its first process, since who waits for that has waited for all in it."""
        pid = self._process.pid
        if self._is_container:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), signal.SIGKILL)
                wait_any([self._process], _END_S)
        end([self._process], grace_s=0.0)

    def __enter__(self) -> "Lane":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process.returncode is None:
            self._process.stdin.close()
            wait_any([self._process], _END_S)
            self.kill()


@dataclass
class Log:
    """What one rank has written down."""

    path: Path

    def records(self) -> list[Any]:
        """Return whole lines; the last one may be cut off."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def error(self) -> str:
        path = Path(f"{self.path}.err")
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    # Of a rank that trains, see `trainee`.

    def steps(self) -> list[list[float]]:
        return [record for record in self.records() if isinstance(record, list)]

    def losses(self) -> list[float]:
        return [record[3] for record in self.steps()]

    def longest_s(self) -> float:
        return max(end_s - begin_s for _, begin_s, end_s, _ in self.steps())

    def stats(self) -> dict[str, Any] | None:
        """Return its figures once it has ended."""
        return next(
            (record["stats"] for record in self.records() if isinstance(record, dict)), None
        )


@dataclass
class Rank(Log):
    """A rank that a lane has borne."""

    lane: Lane
    pid: int = 0  # in the lane's container

    def signal(self, number: signal.Signals) -> None:
        self.lane.tell("strike", log=str(self.path), number=number)

    def alive(self) -> bool:
        return str(self.path) in self.lane.tell("alive")


def hung(ranks: Sequence[Rank], bound_s: float) -> list[Rank]:
    """Return the ranks that do not end in time by themselves: they write down where they are, and are killed."""
    eventually(lambda: not any(rank.alive() for rank in ranks), bound_s, every_s=0.005)
    found = [rank for rank in ranks if rank.alive()]
    for rank in found:
        rank.signal(signal.SIGUSR1)
    time.sleep(0.5 * bool(found))
    for rank in found:
        rank.signal(signal.SIGKILL)
    return found


# What came out of a story: figures, of which whole numbers and counters are summed and others the largest count, and
# every promise that was broken, in words.
Told = tuple[dict[str, Any], Sequence[str]]


def arguments(
    description: str | None, *, events: int, lanes: int, keep: str
) -> argparse.ArgumentParser:
    """Return what the command lines of all campaigns have, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=events, help="faults in all")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) % 10**6, help="of the first story"
    )
    parser.add_argument("--lanes", type=int, default=lanes, help="stories at once")
    parser.add_argument("--keep", type=Path, default=Path(keep), help="for records of failures")
    return parser


def campaign(
    args: argparse.Namespace,
    program: str,
    each: int,
    open_lane: Callable[[], AbstractContextManager[Any]],
    live: Callable[[int, int, Any, Path], Told],
    **more: Any,
) -> dict[str, Any]:
    """Live stories with seeds in a row, of ``each`` events, until there were enough, and print what came out.

    ``open_lane`` makes what stories are lived in, one for each that runs at a time; ``live`` lives one, told its seed,
    its events, its lane and a directory for records.
    """
    counts = [min(each, args.events - done) for done in range(0, args.events, each)]
    stories, begin_s = iter([*enumerate(counts, args.seed)]), time.monotonic()
    figures, failures, lock = dict[str, Any](), list[dict[str, Any]](), threading.Lock()

    def live_in_a_lane() -> None:
        with open_lane() as lane:
            for seed, events in stories:  # each is one thread's
                with tempfile.TemporaryDirectory(prefix="campaign-") as directory:
                    found, broken = live(seed, events, lane, Path(directory))
                    with lock:
                        note(seed, events, found, broken, Path(directory))

    def note(
        seed: int, events: int, found: dict[str, Any], broken: Sequence[str], directory: Path
    ) -> None:
        for name, value in found.items():
            before = figures.setdefault(name, type(value)())
            figures[name] = max(before, value) if isinstance(value, float) else before + value
        if broken:
            failures.append({"seed": seed, "events": events, "violations": [*broken]})
            again = f"python -m {program} --seed {seed} --events {events}"
            said = [f"seed {seed}: {len(broken)} violations; again: {again}", *broken[:12]]
            print("\n  ".join(said), file=sys.stderr, flush=True)
            (directory / "violations").write_text("\n".join(broken))
            shutil.copytree(directory, args.keep / f"seed{seed}", dirs_exist_ok=True)

    with ThreadPoolExecutor(args.lanes) as pool:
        for future in [pool.submit(live_in_a_lane) for _ in range(min(args.lanes, len(counts)))]:
            future.result()
    violations = sum(len(failure["violations"]) for failure in failures)
    wall_s = round(time.monotonic() - begin_s, 1)
    found = {"seed": args.seed, **more, "wall_s": wall_s, "stories": len(counts), **figures}
    found |= {"violations": violations, "failures": failures}
    print(json.dumps(found, indent=1))
    return found
