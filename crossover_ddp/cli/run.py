"""``crossover-ddp run``: commands as sibling jobs, some at a time, with a log and a rendezvous for each."""

import argparse
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from crossover_ddp._system import environment

from .jobs import (
    ENDING,
    PASSED_ON,
    SHELLS_OFFSET,
    TICK_S,
    Job,
    free_ports,
    reap,
    waited_for_signals,
)
from .output import USAGE, declare, say, whole

_EXAMPLES = """\
examples:
  crossover-ddp run -- 'torchrun train.py --lr 0.1' -- 'torchrun train.py --lr 0.2'
  crossover-ddp run --commands sweep.txt --at-once 2      one command a line, two at a time
Ctrl-C (SIGTERM, SIGHUP, SIGQUIT) goes to all jobs, a second one kills them. exit codes: that of the first job that
failed (128 + n if signal n killed it); 128 + n if signal n ended the run; 2 wrong usage: nothing was started
"""
_COMMENT = re.compile(r"""((?!#)(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"\\])+)|#.*""")  # or a word
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"$`\\]|\\[^$`])*"|\\.|("(?:[^"\\]|\\.)*")""")  # 1: not plain
_SHELLS = re.compile(r"[|&;<>()$`\n]|(?<!\S)(?:[A-Za-z_]\w*=(?:\S*:)?)?~")
_PLACE = re.compile(
    r"(?:--(?:rdzv|master)[-_](?:endpoint|port)[ =]|\bMASTER_PORT=)(?!(\S*:)?0'?( |$))(\S+)"
)
_NODES = re.compile(r"--nnodes[ =](?!1(:1)?( |$))")
_NOT_STARTED = 126  # as shells number it


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    about = "Start jobs as siblings: one group, a log and a rendezvous for each, nothing left at the end."
    parser = declare(commands, "run", run, "start sibling jobs, or a sweep", about, _EXAMPLES)
    parser.usage = "crossover-ddp run [--commands FILE] [--at-once K] [--logs DIR] [-- COMMAND]..."
    parser.add_argument(
        "--commands", metavar="FILE", help="one command a line; - is standard input"
    )
    parser.add_argument(
        "--at-once", type=whole(1), default=2, metavar="K", help="how many run at a time (2)"
    )
    parser.add_argument(
        "--logs", type=Path, default="crossover-run", metavar="DIR", help="(crossover-run)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the jobs; return the exit code."""
    try:
        commands = _commands(arguments)
        arguments.logs.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"crossover-ddp run: {error}\n")
        return USAGE
    group = os.environ.get(environment.GROUP) or f"run-{os.getpid()}-{secrets.token_hex(3)}"
    say(
        f"{len(commands)} jobs, {arguments.at_once} at once, in group {group}, logs in {arguments.logs}"
    )
    return _Runner(commands, group, arguments.logs, arguments.at_once).run()


def _commands(arguments: argparse.Namespace) -> list[list[str]]:
    """Return the words of each job; raise ``ValueError`` or ``OSError`` for what is none."""
    found = [
        command_words(group[0]) if len(group) == 1 else list(group) for group in arguments.groups
    ]
    if arguments.commands:
        text = (
            sys.stdin.read() if arguments.commands == "-" else Path(arguments.commands).read_text()
        )
        found += [words for line in _joined(text).splitlines() if (words := command_words(line))]
    if not found or not all(found):
        raise ValueError("expected commands after -- or in --commands FILE, got none")
    texts = [shlex.join(words) for words in found]
    places = [place[3] for text in texts if "etcd" not in text and (place := _PLACE.search(text))]
    if (
        len({*places}) < len(places) and arguments.at_once > 1
    ):  # one would end with the other's store
        raise ValueError(
            f"expected a rendezvous of its own for each job, got {places}; use other ports"
        )
    return found


def _joined(text: str) -> str:
    """Drop comments, in which a last backslash means nothing; then join the lines that continue."""
    return _COMMENT.sub(r"\1", text).replace("\\\n", "").strip()


def command_words(text: str) -> list[str]:
    """Cut a text as a shell would; `ValueError` for what only a shell acts on, never passed on as plain text."""
    text = _joined(text)
    if syntax := _SHELLS.search(_QUOTED.sub(r"x\1", text)):
        raise ValueError(
            f"expected a command without shell syntax, got {syntax[0]!r} in {text!r}: no shell runs it; put plain "
            "text in single quotes, or let a shell run it: bash -c '…'"
        )
    return shlex.split(text)


class _Runner:
    """Runs commands in their order, ``at_once`` at a time."""

    def __init__(
        self, commands: Sequence[Sequence[str]], group: str, logs: Path, at_once: int
    ) -> None:
        self._commands, self._group, self._logs, self._at_once = commands, group, logs, at_once
        self._running: dict[int, Job] = {}
        self._signals: list[int] = []
        self._failed: list[tuple[float, int]] = []
        self._begun = 0
        self._free_ports = free_ports()

    def run(self) -> int:
        """Return the exit code once every process of every job has ended."""
        with waited_for_signals() as numbers:
            try:
                self._start_due()
                while self._running:
                    leaving = self._signals or any(
                        job.code is not None for job in self._running.values()
                    )
                    came = signal.sigtimedwait(numbers, TICK_S if leaving else 1.0)
                    self._pass_on(came.si_signo if came else signal.SIGCHLD)
                    for number in [
                        number for number, job in self._running.items() if job.is_over()
                    ]:
                        self._note_end(number, self._running.pop(number))
                    reap(job.pid for job in self._running.values())
                    self._start_due()
            finally:
                for job in self._running.values():
                    job.finish()
        return (
            SHELLS_OFFSET + self._signals[0]
            if self._signals
            else min(self._failed, default=(0, 0))[1]
        )

    def _start_due(self) -> None:
        while (
            self._begun < len(self._commands)
            and len(self._running) < self._at_once
            and not self._signals
        ):
            words, self._begun = self._commands[self._begun], self._begun + 1
            log = self._logs / f"{self._begun}.log"
            try:
                self._running[self._begun] = Job(words, self._variables(words), log)
                say(f"{self._begun} started: {shlex.join(words)}")
            except (OSError, ValueError) as error:  # ValueError: a zero byte
                self._failed.append((time.monotonic(), _NOT_STARTED))
                say(f"{self._begun} ended with {_NOT_STARTED}, not started: {error}")

    def _variables(self, words: Sequence[str]) -> dict[str, str]:
        """Return a job's environment; ports on which several nodes must agree are counted from one they know."""
        first = (
            os.environ.get("MASTER_PORT") or (_NODES.search(shlex.join(words)) and "29500") or ""
        )
        port = str(int(first) + self._begun - 1 if first.isdecimal() else next(self._free_ports))
        own = {
            environment.GROUP: self._group,
            "MASTER_PORT": port,
            "PET_MASTER_PORT": port,
        }  # torchrun's
        if timeline := os.environ.get(environment.TIMELINE):
            own[environment.TIMELINE] = os.path.join(timeline, str(self._begun))
        return {**os.environ, **own}

    def _pass_on(self, number: int) -> None:
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

    def _note_end(self, number: int, job: Job) -> None:
        if job.code:
            self._failed.append((job.began_s + job.took_s, job.code))
        last_lines = f"\n{job.last_lines()}".rstrip() if job.code else ""
        say(f"{number} ended with {job.code} after {job.took_s:.1f} s, {job.log}{last_lines}")
