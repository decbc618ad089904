"""Show the output of jobs line by line, each behind its job's name, on the terminal and in files."""

import contextlib
import os
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, TextIO

from .lines import Lines, prefix

_OWN_NAME: Final = "run"
_CHUNK_BYTES: Final = 1 << 16
_READS_AT_ONCE: Final = 16  # then other streams have their turn


class Terminal:
    """The terminal, on which all jobs and the runner write.

    Args:
        names: of all jobs.
        only_errors: write everything to standard error, since standard output is for something else.

    A stream that cannot be written (closed, a full disk, a terminal that is gone) shows nothing more; the jobs go on.
    """

    def __init__(self, names: Sequence[str], *, only_errors: bool) -> None:
        self._width = max(len(name) for name in (*names, _OWN_NAME))
        streams = (sys.stderr, sys.stderr) if only_errors else (sys.stdout, sys.stderr)
        self._streams: tuple[BinaryIO, ...] = tuple([stream.buffer for stream in streams])
        self._prefixes = [
            {
                name: prefix(name, self._width, index if coloured(stream, os.environ) else None)
                for index, name in enumerate(names)
            }
            for stream in streams
        ]
        self._own_prefix = prefix(_OWN_NAME, self._width, None)
        self._lost: set[BinaryIO] = set()

    def show(self, name: str, stream: int, lines: Sequence[bytes]) -> None:
        """Show lines of a job's standard output (0) or standard error (1)."""
        before = self._prefixes[stream][name]
        self._write(self._streams[stream], b"".join(before + line + b"\n" for line in lines))

    def say(self, text: str) -> None:
        """Show a line of the runner's own."""
        self._write(self._streams[1], self._own_prefix + text.encode(errors="replace") + b"\n")

    def _write(self, stream: BinaryIO, data: bytes) -> None:
        if stream in self._lost or not data:
            return
        try:
            write_all(stream, data)
        except (OSError, ValueError):
            self._lost.add(stream)
            silence(stream)


def write_all(stream: BinaryIO, data: bytes) -> None:
    """Write all of it, also where another program has made the terminal non-blocking; `OSError` if nobody takes it."""
    left = memoryview(data)
    while True:
        try:
            while left:
                written = stream.write(left) or 0  # unbuffered it takes a part, or says None
                left = left[written:]
                if not written:
                    select.select([], [stream], [])
            stream.flush()
            return
        except BlockingIOError as full:
            left = left[full.characters_written :]
            select.select([], [stream], [])


def silence(stream: IO[Any]) -> None:
    """Let what is still buffered go nowhere, or the interpreter would fail at its exit: the exit code is the jobs'."""
    with contextlib.suppress(OSError, ValueError):  # not a file: nothing to do at the exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def coloured(stream: TextIO, variables: Mapping[str, str]) -> bool:
    """Return whether the stream is a terminal with colours, and the user has not switched them off."""
    if variables.get("NO_COLOR") or variables.get("TERM") == "dumb":
        return False
    return bool(variables.get("FORCE_COLOR")) or stream.isatty()


class JobOutput:
    """The two streams of one job, and the file that keeps them.

    Args:
        name: of the job.
        streams: its standard output and standard error, not blocking.
        terminal: where lines are shown.
        log: a file for the same lines without names; None keeps nothing.
    """

    def __init__(
        self, name: str, streams: Sequence[IO[bytes]], terminal: Terminal, log: BinaryIO | None
    ) -> None:
        self._name = name
        self._terminal = terminal
        self._log = log
        self._lines = {stream.fileno(): (number, Lines()) for number, stream in enumerate(streams)}

    def read(self, fd: int, *, to_the_end: bool = False) -> bool:
        """Show what has arrived on a stream; return whether more may come.

        Args:
            fd: the stream's.
            to_the_end: read until there is nothing at the moment.
        """
        number, lines = self._lines[fd]
        reads = 0
        while to_the_end or reads < _READS_AT_ONCE:
            reads += 1
            try:
                data = os.read(fd, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not data:
                self._keep(number, lines.rest())
                return False
            self._keep(number, lines.feed(data))
        return True

    def show_progress(self) -> None:
        """Show the present state of progress bars."""
        for number, lines in self._lines.values():
            shown = lines.overwriting()
            if shown is not None:
                self._terminal.show(self._name, number, [shown])

    def finish(self) -> None:
        """Show what is left, at the end of the job."""
        for number, lines in self._lines.values():
            self._keep(number, lines.rest())
        if self._log is not None:
            self._log.close()

    def _keep(self, number: int, lines: Sequence[bytes]) -> None:
        self._terminal.show(self._name, number, lines)
        if self._log is not None and lines:
            try:
                self._log.write(b"".join(line + b"\n" for line in lines))
            except OSError as error:  # a full disk must not end a job
                self._terminal.say(f"{self._name}: no more is logged: {error.strerror}")
                self._log.close()
                self._log = None


def open_log(directory: Path | None, name: str) -> BinaryIO | None:
    """Open the file of a job's lines anew, unbuffered, so that ``tail -f`` shows them at once."""
    return None if directory is None else (directory / f"{name}.log").open("wb", buffering=0)
