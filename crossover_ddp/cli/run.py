"""``crossover-ddp run``: runs commands as sibling jobs, each with a log and a rendezvous."""

import argparse
import heapq
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from crossover_ddp._system import environment
from crossover_ddp._system.children import SHELLS_OFFSET

from .cards import VISIBLE, cards, shares
from .jobs import (
    ENDING,
    PASSED_ON,
    TICK_S,
    JobProcess,
    free_ports,
    reap_orphans,
    signals_blocked,
)
from .output import USAGE, declare, duration, say, whole

_EXAMPLES = """\
examples:
  crossover-ddp run -- 'torchrun train.py --lr 0.1' -- 'torchrun train.py --lr 0.2'
  crossover-ddp run --commands sweep.txt --at-once 2      one command a line, two at a time
  crossover-ddp run --commands sweep.txt --gpus-each 1    each job on a GPU of its own
Ctrl-C (SIGTERM, SIGHUP, SIGQUIT) goes to all jobs, a second one kills them.
exit codes: that of the first job that failed (128 + n if signal n killed it);
128 + n if signal n ended the run; 2 wrong usage: nothing was started
"""
_COMMENT = re.compile(r"""((?!#)(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"\\])+)|#.*""")  # or a word
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"$`\\]|\\[^$`])*"|\\.|("(?:[^"\\]|\\.)*")""")  # 1: not plain
_SHELLS = re.compile(r"[|&;<>()$`\n]|(?<!\S)(?:[A-Za-z_]\w*=(?:\S*:)?)?~")
_PLACE = re.compile(
    r"(?:--(?:rdzv|master)[-_](?:endpoint|port)[ =]|\bMASTER_PORT=)(?!(\S*:)?0'?( |$))(\S+)"
)
NODES: Final = re.compile(r"--nnodes[ =](?!1(:1)?( |$))")
"""Matches the commands of jobs that span several nodes."""
_AT_ONCE = 2
_NOT_STARTED = 126  # the exit code of shells


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command and its arguments."""
    about = (
        "Start jobs as siblings: one group, a log and a rendezvous for each, "
        "nothing left at the end."
    )
    parser = declare(commands, "run", run, "start sibling jobs, or a sweep", about, _EXAMPLES)
    parser.usage = (
        "crossover-ddp run [--commands FILE] [--at-once K | --gpus-each K] [--logs DIR] "
        "[-- COMMAND]..."
    )
    parser.add_argument(
        "--commands", metavar="FILE", help="one command a line; - is standard input"
    )
    at_a_time = parser.add_mutually_exclusive_group()
    at_a_time.add_argument(
        "--at-once", type=whole(1), metavar="K", help="how many run at a time (2)"
    )
    at_a_time.add_argument(
        "--gpus-each",
        type=whole(1),
        metavar="K",
        help="K cards for each job, as many jobs at a time as there are cards for",
    )
    parser.add_argument(
        "--logs", type=Path, default="crossover-run", metavar="DIR", help="(crossover-run)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the jobs, and return the exit code."""
    try:
        places = _places(arguments)
        commands = _commands(arguments, at_once=len(places))
        arguments.logs.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"crossover-ddp run: {error}\n")
        return USAGE
    named = os.environ.get(environment.GROUP)
    group = named or f"run-{os.getpid()}-{secrets.token_hex(3)}"
    groups, where = [group] * len(commands), f"group {group}"
    if arguments.gpus_each and not named:
        # Jobs on cards of their own have no turns to take, even if a hook runs before CUDA does and
        # takes the machine's processors for the device.
        groups = [f"{group}-{number}" for number in range(1, len(commands) + 1)]
        where = "a group each"
    say(f"{len(commands)} jobs, {len(places)} at once, in {where}, logs in {arguments.logs}")
    return _Runner(commands, groups, places, arguments.logs).run()


def _places(arguments: argparse.Namespace) -> list[str]:
    """Return a place for each job that runs at a time: its cards, or "" for the whole machine.

    Raises ``ValueError`` if there are too few cards, and ``OSError`` if they cannot be listed.
    """
    if arguments.gpus_each:
        return shares(cards(), arguments.gpus_each)
    return [""] * (arguments.at_once or _AT_ONCE)


def _commands(arguments: argparse.Namespace, at_once: int) -> list[list[str]]:
    """Return the words of each job's command.

    Raises ``ValueError`` for text that is not a command, commands that share a rendezvous, or a
    command that chooses its cards while each gets its own, and ``OSError`` if the file cannot be
    read.
    """
    found = [
        command_words(group[0]) if len(group) == 1 else list(group) for group in arguments.groups
    ]
    if arguments.commands:
        from_input = arguments.commands == "-"
        text = sys.stdin.read() if from_input else Path(arguments.commands).read_text()
        found += [words for line in _joined(text).splitlines() if (words := command_words(line))]
    if not found or not all(found):
        raise ValueError("expected commands after -- or in --commands FILE, got none")
    texts = [shlex.join(words) for words in found]
    if at_once > 1:
        _check_rendezvous(texts)
    if arguments.gpus_each and (choosing := [text for text in texts if f"{VISIBLE}=" in text]):
        raise ValueError(
            f"expected commands that leave their cards to --gpus-each, got {choosing[0]!r}; remove "
            f"{VISIBLE}= from it"
        )
    return found


def _check_rendezvous(commands: Sequence[str]) -> None:
    """Raise ``ValueError`` if two commands name the same rendezvous.

    The job that ends first would take the other job's store down with it. An etcd server is not
    part of a job, so jobs may share one.
    """
    places = [
        place[3] for text in commands if "etcd" not in text and (place := _PLACE.search(text))
    ]
    if len({*places}) < len(places):
        raise ValueError(
            f"expected a rendezvous of its own for each job, got {places}; use other ports"
        )


def _joined(text: str) -> str:
    """Remove comments, then join continued lines.

    A backslash at the end of a comment does not continue the line.
    """
    return _COMMENT.sub(r"\1", text).replace("\\\n", "").strip()


def command_words(text: str) -> list[str]:
    """Split a command as a shell would.

    Raises ``ValueError`` for syntax that only a shell can execute, so that it is not passed to the
    program as plain text.
    """
    text = _joined(text)
    if syntax := _SHELLS.search(_QUOTED.sub(r"x\1", text)):
        raise ValueError(
            f"expected a command without shell syntax, got {syntax[0]!r} in {text!r}: no shell "
            "runs it; put plain text in single quotes, or let a shell run it: bash -c '…'"
        )
    return shlex.split(text)


class _Runner:
    """Runs commands in order, at most one in each place.

    Args:
        commands: the words of each command.
        groups: the siblings' group of each command.
        places: the cards of a place, or "" for the whole machine.
        logs: the directory for logs.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        groups: Sequence[str],
        places: Sequence[str],
        logs: Path,
    ) -> None:
        self._commands = commands
        self._groups = groups
        self._logs = logs
        # The places in which no job runs.
        self._free = [*places]
        # The places of running jobs, by number.
        self._taken: dict[int, str] = {}
        # The running jobs by number, from 1 on.
        self._running: dict[int, JobProcess] = {}
        # Signals that asked the run to end.
        self._signals: list[int] = []
        # When each failed job ended, and with which exit code.
        self._failed: list[tuple[float, int]] = []
        # How long each job took that ended well.
        self._took_s: list[float] = []
        self._started = 0
        self._free_ports = free_ports()

    def run(self) -> int:
        """Run all jobs. Return the exit code once every process of every job has ended."""
        with signals_blocked() as numbers:
            try:
                self._start_due()
                while self._running:
                    came = signal.sigtimedwait(numbers, self._patience_s())
                    if came:
                        self._pass_on(came.si_signo)
                    over = [number for number, job in self._running.items() if job.supervise()]
                    for number in over:
                        self._report_end(number, self._running.pop(number))
                    reap_orphans(job.pid for job in self._running.values())
                    self._start_due()
                    if over:
                        self._report_progress()
            finally:
                for job in self._running.values():
                    job.finish()
        if self._signals:
            return SHELLS_OFFSET + self._signals[0]
        _, code = min(self._failed, default=(0, 0))
        return code

    def _patience_s(self) -> float:
        """Return how long to wait for a signal.

        The time is short while a job ends, because no signal reports the end of an orphan.
        """
        ending = self._signals or any(job.code is not None for job in self._running.values())
        return TICK_S if ending else 1.0

    def _start_due(self) -> None:
        while self._started < len(self._commands) and self._free and not self._signals:
            words = self._commands[self._started]
            self._started += 1
            log = self._logs / f"{self._started}.log"
            place = self._free[0]
            try:
                job = JobProcess(words, self._variables(words, place), log)
                self._running[self._started] = job
                self._taken[self._started] = self._free.pop(0)
                on = f" on {VISIBLE}={place}" if place else ""
                say(f"{self._started} started{on}: {shlex.join(words)}")
            except (OSError, ValueError) as error:  # ValueError: a zero byte
                self._failed.append((time.monotonic(), _NOT_STARTED))
                say(f"{self._started} ended with {_NOT_STARTED}, not started: {error}")

    def _variables(self, words: Sequence[str], place: str) -> dict[str, str]:
        """Return the environment for the job that is about to start.

        If a job spans several nodes, the runs on these nodes must give it the same port. They count
        up from a port that all of them know: ``MASTER_PORT``, or torchrun's default.
        """
        first = os.environ.get("MASTER_PORT", "")
        if not first and NODES.search(shlex.join(words)):
            first = "29500"
        is_known = first.isdecimal()
        port = int(first) + self._started - 1 if is_known else next(self._free_ports)
        own = {
            environment.GROUP: self._groups[self._started - 1],
            "MASTER_PORT": str(port),
            "PET_MASTER_PORT": str(port),  # read by torchrun
        }
        if timeline := os.environ.get(environment.TIMELINE):
            own[environment.TIMELINE] = os.path.join(timeline, str(self._started))
        if place:
            own[VISIBLE] = place
        return {**os.environ, **own}

    def _pass_on(self, number: int) -> None:
        """Act on a signal: end all jobs, kill them at a second Ctrl-C, or pass the signal on."""
        again = number == signal.SIGINT and number in self._signals
        for job in self._running.values():
            if again:
                job.finish()
            elif number in ENDING:
                job.end(number)
            elif number in PASSED_ON:
                job.send(number)
        if number in ENDING:
            self._signals.append(number)
            say(f"{signal.Signals(number).name} passed on; Ctrl-C again kills, as do 30 s")

    def _report_end(self, number: int, job: JobProcess) -> None:
        self._free.append(self._taken.pop(number))
        if job.code:
            self._failed.append((job.began_s + job.took_s, job.code))
        else:
            self._took_s.append(job.took_s)
        last_lines = f"\n{job.last_lines()}".rstrip() if job.code else ""
        say(f"{number} ended with {job.code} after {job.took_s:.1f} s, {job.log}{last_lines}")

    def _report_progress(self) -> None:
        """Write how many jobs are done, and the expected end if a job has ended well."""
        now_s = time.monotonic()
        running_s = [now_s - job.began_s for job in self._running.values()]
        waiting = 0 if self._signals else len(self._commands) - self._started
        left_s = expected_s(self._took_s, running_s, waiting)
        text = (
            f"{len(self._took_s)} of {len(self._commands)} done, {len(running_s)} running, "
            f"{len(self._failed)} failed"
        )
        say(text if left_s is None else f"{text}; about {duration(left_s)} left")


def expected_s(took_s: Sequence[float], running_s: Sequence[float], waiting: int) -> float | None:
    """Return how long a queue still takes if each job takes as long as the others on average.

    ``took_s`` has the lengths of jobs that have ended well, ``running_s`` the times for which jobs
    have run. A job that takes longer is expected to end at once. Return None if no job has ended
    well, or none runs.
    """
    if not took_s or not running_s:
        return None
    mean_s = fmean(took_s)
    ends_s = [max(0.0, mean_s - each_s) for each_s in running_s]
    heapq.heapify(ends_s)
    for _ in range(waiting):
        heapq.heapreplace(ends_s, ends_s[0] + mean_s)
    return max(ends_s)
