"""Start jobs side by side, show their output, pass signals on, and end all of them whatever happens.

One thread runs one loop: a job's output and its end wake it; twice a second it looks at turns. See [Note: no process is
left behind] in `crossover_ddp._system.children`.
"""

import contextlib
import enum
import os
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from crossover_ddp._system.children import SHELLS_OFFSET, Child, send, with_mark
from crossover_ddp._system.environment import RUN_JOB

from .first_look import FirstLook
from .output import JobOutput, Terminal, open_log
from .turn_watch import TurnWatch

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)  # what Slurm sends before the end, if asked to
SUSPENDING: Final = signal.SIGTSTP
_LOOK_S: Final = 0.5
_SWEEP_S: Final = 0.1
_STATUS_S: Final = 60.0
_PROGRESS_BAR_S: Final = 5.0
_NOT_FOUND, _NOT_STARTED = 127, 126


class JobState(enum.Enum):
    """How far a job is."""

    WAITING = "not started"
    RUNNING = "running"
    LEAVING = "leaving"
    """The command has ended, but not every process that it has started."""
    OVER = "ended"


@dataclass(frozen=True)
class Planned:
    """One job, ready to be started."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    """All its variables."""
    where: str
    """The place where its ranks meet, for people."""


@dataclass(frozen=True)
class Settings:
    """How to run them."""

    group: str
    at_once: int = 2
    grace_s: float = 30.0
    fail_fast: bool = False
    logs: Path | None = None


@dataclass
class JobResult:
    """What became of one job; times in seconds since the run's begin."""

    name: str
    state: JobState = JobState.WAITING
    began_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    ended_by_us: bool = False
    """The runner ended it: because of a signal, or because another job had failed."""
    left_over: int = 0
    """How many processes were left after the command had ended; the runner ended them."""

    @property
    def failed(self) -> bool:
        """Whether it ended badly on its own."""
        return self.exit_code not in (None, 0) and not self.ended_by_us

    def in_words(self) -> str:
        """Return how it ended, for people."""
        how = "ended"
        if self.exit_code:
            how = (
                f"was ended, exit code {self.exit_code},"
                if self.ended_by_us
                else f"failed ({self.exit_code})"
            )
        duration_s = (self.ended_s or 0.0) - (self.began_s or 0.0)
        left = f"; ended what it left running ({self.left_over})" if self.left_over else ""
        return f"{self.name} {how} after {duration_s:.1f} s{left}"


@dataclass(frozen=True)
class RunOutcome:
    """What became of the run."""

    wall_s: float
    signal: int | None
    """The first signal that asked it to end."""
    jobs: Sequence[JobResult]
    turns: Mapping[str, int]

    @property
    def exit_code(self) -> int:
        """0 if all ended well; 128 + the signal that ended the run; else the code of the first job that failed."""
        if self.signal is not None:
            return SHELLS_OFFSET + self.signal
        failed = [job for job in self.jobs if job.failed]
        first = min(failed, key=lambda job: job.ended_s or 0.0, default=None)
        return (first.exit_code or 0) if first is not None else 0


@dataclass
class _Running:
    """A job that has been started."""

    result: JobResult
    process: Child
    mark: str
    output: JobOutput
    open_fds: set[int] = field(default_factory=set)
    kill_at_s: float | None = None

    def survivors(self) -> list[int]:
        """Return the living processes of the job; after the command has ended, those that it has left."""
        return with_mark(RUN_JOB, self.mark)

    def kill(self) -> None:
        """Kill all processes of the job. Call it again later: one may fork between the look and the kill."""
        self.process.signal_session(signal.SIGKILL)
        send(self.survivors(), signal.SIGKILL)

    def pause(self) -> None:
        """Stop all processes of the job; twice, since one may fork between the look and the stop."""
        for _ in range(2):
            send(self.survivors(), signal.SIGSTOP)

    def close(self) -> None:
        """Close what this process holds open of the job, once the command has ended."""
        self.process.signal_session(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


class Runner:
    """Run jobs in their order, at most ``settings.at_once`` at a time.

    Args:
        jobs: all of them.
        settings: how to run them.
        terminal: where their lines and the runner's own are shown.
        first_look: measures the first job alone and says how many fit; None starts ``at_once`` jobs at once.

    `run` must be called once, on the main thread: it takes the signals meanwhile.
    """

    def __init__(
        self,
        jobs: Sequence[Planned],
        settings: Settings,
        terminal: Terminal,
        first_look: FirstLook | None = None,
    ) -> None:
        self._planned = {job.name: job for job in jobs}
        self.results = [JobResult(job.name) for job in jobs]
        self._settings = settings
        self.at_once = settings.at_once
        self._terminal = terminal
        self._first_look = first_look
        self._running: dict[str, _Running] = {}
        self._marks: dict[str, str] = {}
        self._selector = selectors.DefaultSelector()
        self._begin_s = time.monotonic()
        self._signals: list[int] = []
        self._signals_told = 0
        self._starting, self._missed = "", list[int]()  # signals that came while that job was being started
        self._stopping = False

    # --- the loop ------------------------------------------------------------------------------------------

    def run(self) -> RunOutcome:
        """Return once every process of every job has ended."""
        self._watch = TurnWatch(self._settings.group, RUN_JOB, self._marks)
        with self._taking_signals():
            try:
                self._loop()
            finally:
                self._end_all()
                self._selector.close()
        return RunOutcome(
            wall_s=self._now_s(),
            signal=self._ending_signal(),
            jobs=self.results,
            turns={name: self._watch.turns[name] for name in self._planned},
        )

    def _loop(self) -> None:
        look_s = bar_s = status_s = 0.0
        self._start_due()
        while self._running:
            leaving = any(job.result.state is JobState.LEAVING for job in self._running.values())
            for key, _ in self._selector.select(_SWEEP_S if leaving else _LOOK_S):
                key.data()
            now_s = time.monotonic()
            self._tell_signals()
            for job in list(self._running.values()):
                self._attend(job, now_s)
            if now_s >= look_s:
                look_s = now_s + _LOOK_S
                self._look()
            if now_s >= bar_s:
                bar_s = now_s + _PROGRESS_BAR_S
                for job in self._running.values():
                    job.output.show_progress()
            if now_s >= status_s:
                if status_s:
                    self._tell_status()
                status_s = now_s + _STATUS_S
            self._heed_first_look()
            self._start_due()

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _look(self) -> None:
        self._watch.look()
        if self._first_look is not None:
            takes_turns = self._watch.has_joined(self.results[0].name)
            self._first_look.look(self._marks, takes_turns=takes_turns)

    def _heed_first_look(self) -> None:
        first_look = self._first_look
        if first_look is None or not first_look.is_over(running=self.results[0].state is JobState.RUNNING):
            return
        self._first_look = None
        fitting = first_look.fitting()
        for line in first_look.report(self.at_once):
            self._terminal.say(line)
        if fitting is not None:
            self.at_once = max(1, min(self.at_once, fitting))

    def _tell_status(self) -> None:
        parts = [f"{name} {self._watch.turns[name]} turns" for name in self._running]
        waiting = sum(result.state is JobState.WAITING for result in self.results)
        self._terminal.say(
            f"after {self._now_s():.0f} s: {', '.join(parts)}" + (f"; {waiting} waiting" if waiting else "")
        )

    # --- one job -------------------------------------------------------------------------------------------

    def _start_due(self) -> None:
        for result in self.results:
            alone = self._first_look is not None
            if self._stopping or len(self._running) >= (1 if alone else self.at_once):
                return
            if result.state is JobState.WAITING:
                self._start(result)

    def _start(self, result: JobResult) -> None:
        planned = self._planned[result.name]
        mark = f"{os.getpid()}-{self._begin_s:.6f}/{planned.name}"
        self._marks[mark] = planned.name
        result.began_s = self._now_s()
        self._starting, self._missed = planned.name, []
        try:
            process = Child(
                planned.words,
                {**planned.environment, RUN_JOB: mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._terminal.say(f"{planned.name} cannot be started: {planned.words[0]}: {error.strerror}")
            result.state, result.ended_s = JobState.OVER, self._now_s()
            result.exit_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_STARTED
            self._after_end(result)
            return
        assert process.stdout is not None and process.stderr is not None
        streams = (process.stdout, process.stderr)
        log: BinaryIO | None = open_log(self._settings.logs, planned.name)
        job = _Running(result, process, mark, JobOutput(planned.name, streams, self._terminal, log))
        self._running[planned.name] = job
        while self._missed:
            process.signal_session(self._missed.pop(0))
        result.state = JobState.RUNNING
        for stream in streams:
            os.set_blocking(stream.fileno(), False)
            self._listen(stream.fileno(), partial(self._read, job, stream.fileno()))
            job.open_fds.add(stream.fileno())
        end_fd = os.pidfd_open(process.pid)
        self._listen(end_fd, partial(self._note_end, end_fd))
        self._terminal.say(f"{planned.name} started: {shlex.join(planned.words)} ({planned.where})")
        if self._stopping and job.kill_at_s is None:  # a signal came before it could be passed on to this job
            self._terminate(job, self._ending_signal() or signal.SIGTERM)

    def _ending_signal(self) -> int | None:
        return next((number for number in self._signals if number in ENDING), None)

    def _listen(self, fd: int, answer: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, answer)

    def _read(self, job: _Running, fd: int) -> None:
        if not job.output.read(fd):
            self._selector.unregister(fd)
            job.open_fds.discard(fd)

    def _note_end(self, end_fd: int) -> None:
        """Only wake the loop."""
        self._selector.unregister(end_fd)
        os.close(end_fd)

    def _attend(self, job: _Running, now_s: float) -> None:
        """Note a job's end, and end the processes that it has left."""
        result = job.result
        if result.state is JobState.RUNNING:
            code = job.process.poll()
            if code is not None:
                result.exit_code = code if code >= 0 else SHELLS_OFFSET - code
                result.ended_s = self._now_s()
                result.state = JobState.LEAVING
                self._end_left_over(job, now_s)
        if result.state is JobState.LEAVING and not job.survivors():
            self._close(job)
        elif job.kill_at_s is not None and now_s >= job.kill_at_s:
            job.kill()

    def _end_left_over(self, job: _Running, now_s: float) -> None:
        left = job.survivors()
        job.result.left_over = len(left)
        if left:
            job.process.signal_session(signal.SIGTERM, signal.SIGCONT)
            send(left, signal.SIGTERM, signal.SIGCONT)
            if job.kill_at_s is None:
                job.kill_at_s = now_s + self._settings.grace_s

    def _close(self, job: _Running) -> None:
        for fd in list(job.open_fds):
            job.output.read(fd, to_the_end=True)
            self._selector.unregister(fd)
        job.output.finish()
        job.close()
        job.result.state = JobState.OVER
        del self._running[job.result.name]
        self._after_end(job.result)

    def _after_end(self, result: JobResult) -> None:
        self._terminal.say(result.in_words())
        if result.failed and self._settings.fail_fast and not self._stopping:
            self._stopping = True
            for other in self._running.values():
                self._terminate(other, signal.SIGTERM)

    def _terminate(self, job: _Running, number: int) -> None:
        """Ask a job to end, and set the time when it will be killed."""
        if job.result.state is JobState.RUNNING:
            job.result.ended_by_us = True
        # A stopped process takes no signal before it goes on.
        job.process.signal_session(number, signal.SIGCONT)
        if job.kill_at_s is None:
            job.kill_at_s = time.monotonic() + self._settings.grace_s

    def _end_all(self) -> None:
        """End every process of every job, whatever has happened here."""
        for job in list(self._running.values()):
            job.kill()
        deadline_s = time.monotonic() + self._settings.grace_s
        while self._running and time.monotonic() < deadline_s:
            for job in list(self._running.values()):
                job.kill()
                self._attend(job, time.monotonic())
            time.sleep(_SWEEP_S / 10)

    # --- signals -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        """Handle signals at once, even while this thread waits for a terminal; ignored ones stay ignored (nohup)."""
        waking, wakes = socket.socketpair()
        with waking, wakes:
            for end in (waking, wakes):
                end.setblocking(False)
            before = {
                number: signal.signal(number, self._on_signal)
                for number in (*ENDING, *PASSED_ON, SUSPENDING)
                if signal.getsignal(number) is not signal.SIG_IGN
            }
            waker = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
            self._listen(waking.fileno(), lambda: waking.recv(4096))
            try:
                yield
            finally:
                signal.set_wakeup_fd(waker)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on. Show nothing here: the signal may have interrupted a write to the terminal."""
        again = number == signal.SIGINT and number in self._signals
        self._signals.append(number)
        if number == SUSPENDING:
            self._suspend()
            return
        self._stopping = self._stopping or number in ENDING
        if number in PASSED_ON and self._starting not in self._running:
            self._missed.append(number)
        for job in list(self._running.values()):
            if number in PASSED_ON:
                job.process.signal_session(number)
                continue
            self._terminate(job, number)
            if again:
                job.process.signal_session(signal.SIGKILL)
                job.kill_at_s = time.monotonic()

    def _suspend(self) -> None:
        """Stop this process and all jobs until the user continues it; a terminal's Ctrl-Z does not reach the jobs.

        Jobs that went on alone would write until their pipes are full, and then stop inside a turn. Without a shell
        with job control nobody could continue the runner: then the kernel does not stop it, and the jobs go on.
        """
        for job in list(self._running.values()):
            job.pause()
        before = signal.signal(SUSPENDING, signal.SIG_DFL)
        os.kill(os.getpid(), SUSPENDING)
        signal.signal(SUSPENDING, before)
        for job in list(self._running.values()):
            send(job.survivors(), signal.SIGCONT)

    def _tell_signals(self) -> None:
        while self._signals_told < len(self._signals):
            number = self._signals[self._signals_told]
            again = number == signal.SIGINT and number in self._signals[: self._signals_told]
            self._signals_told += 1
            text = f"{signal.Signals(number).name} passed on to {', '.join(self._running) or 'nobody'}"
            if number == SUSPENDING:
                text = f"going on after {SUSPENDING.name}, with {', '.join(self._running) or 'nobody'}"
            elif again:
                text = "killing all jobs"
            elif number in ENDING:
                text += f"; killed in {self._settings.grace_s:.0f} s, or at once with Ctrl-C" + (
                    " again" * (signal.SIGINT in self._signals)
                )
            self._terminal.say(text)
