"""The shape of campaigns: stories, each a function of its seed, run in lanes and judged one by one.

A lane is a process that forks ranks (`nursery`), with the records of these ranks. Several lanes run
at once.
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
ANSWER_S = 120.0  # a nursery that takes longer to answer hangs
_END_S = 5.0
UNSHARE = {
    "users": ["--user", "--map-root-user", "--pid", "--fork", "--mount", "--mount-proc"],
    "memory": ["--mount", "--pid", "--fork", "--mount-proc"],
}


def why_no_container(kind: str) -> str:
    """Return why this machine cannot make a container of this kind, see `nursery`; else ""."""
    try:
        tried = subprocess.run(["unshare", *UNSHARE[kind], "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unshare is not installed"
    return f"unshare is not permitted: {tried.stderr.strip()}" if tried.returncode else ""


class Lane:
    """A process that forks ranks. Orders and answers are lines of JSON, over its stdin and stdout.

    Args:
        worker: a module; a rank runs its ``live(order)``.
        container: the kind of container that the process enters, see `nursery`; default none.
    """

    def __init__(self, worker: str, container: str = "") -> None:
        words = [sys.executable, str(ROOT / "tests" / "faults" / "nursery.py"), worker, container]
        pipe, own = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._is_container = bool(container)
        self._process: Any = ForkedScript(
            words, own, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=2
        )
        self._read_answer()

    def call(self, order: str, /, **arguments: Any) -> Any:
        """Let the nursery carry out an order, and return its answer."""
        self._process.stdin.write(json.dumps({"do": order, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> Any:
        watchdog = threading.Timer(ANSWER_S, self._process.signal_session, [signal.SIGKILL])
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        assert line, f"nursery {self._process.pid} ended, or did not answer within {ANSWER_S:.0f} s"
        return json.loads(line)

    def bear(self, order: dict[str, Any], replaced: "Rank | None" = None) -> "Rank":
        """Fork a rank, which logs to ``order["log"]``.

        Args:
            order: passed to the rank.
            replaced: a rank to kill first, whose process id the new one gets; default none.
        """
        after = str(replaced.path) if replaced else None
        return Rank(Path(order["log"]), self, self.call("born", order=order, after=after))

    def kill(self) -> None:
        """End the nursery and all its ranks.

        A container's first process is killed: the kernel then ends all others, before it is reaped.
        """
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
    """The record of one rank."""

    path: Path

    def records(self) -> list[Any]:
        """Return the whole lines. The last line may be incomplete, which is left out."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def error(self) -> str:
        path = Path(f"{self.path}.err")
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    # Records of a rank that trains, see `trainee`.

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
    """A rank that a lane has forked."""

    lane: Lane
    pid: int = 0  # as in the lane's container

    def signal(self, number: signal.Signals) -> None:
        self.lane.call("strike", log=str(self.path), number=number)

    def alive(self) -> bool:
        return str(self.path) in self.lane.call("alive")


def hung(ranks: Sequence[Rank], bound_s: float) -> list[Rank]:
    """Return the ranks that do not end by themselves in time, after killing them.

    Each first writes its threads' stacks to its error file.
    """
    eventually(lambda: not any(rank.alive() for rank in ranks), bound_s, every_s=0.005)
    found = [rank for rank in ranks if rank.alive()]
    for rank in found:
        rank.signal(signal.SIGUSR1)
    time.sleep(0.5 * bool(found))
    for rank in found:
        rank.signal(signal.SIGKILL)
    return found


# The outcome of a story: its figures, and a sentence for every broken promise. Over all stories,
# whole numbers and counters are summed, and the largest of other figures is kept.
Outcome = tuple[dict[str, Any], Sequence[str]]


def arguments(
    description: str | None, *, events: int, lanes: int, keep: str
) -> argparse.ArgumentParser:
    """Return a parser with the options that all campaigns have, with these defaults."""
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
    live: Callable[[int, int, Any, Path], Outcome],
    **more: Any,
) -> dict[str, Any]:
    """Run stories with consecutive seeds until there were enough events, and print the outcome.

    Args:
        args: from the parser of `arguments`.
        program: the campaign's module, to print how to repeat a story.
        each: events of a story.
        open_lane: makes a lane; there is one for each story that runs at the same time.
        live: runs a story, given its seed, its events, its lane and a directory for records.
        more: further figures to print.
    """
    counts = [min(each, args.events - done) for done in range(0, args.events, each)]
    stories = iter([*enumerate(counts, args.seed)])
    begin_s = time.monotonic()
    figures: dict[str, Any] = {}
    failures: list[dict[str, Any]] = []
    lock = threading.Lock()

    def live_in_a_lane() -> None:
        with open_lane() as lane:
            for seed, events in stories:  # the threads share the iterator
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
            text = [f"seed {seed}: {len(broken)} violations; repeat with {again}", *broken[:12]]
            print("\n  ".join(text), file=sys.stderr, flush=True)
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
