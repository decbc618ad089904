"""Cut a job's output into lines, to be shown between lines of other jobs. Pure: bytes in, lines out."""

LIMIT_BYTES = 1 << 16


class Lines:
    r"""The lines of one stream.

    A line ends with ``\n``. Text that a progress bar overwrites (``\r``) is dropped, as on a terminal; `overwriting`
    returns what the bar shows now.

    Args:
        limit_bytes: a longer line comes in pieces.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pending = b""
        self._overwrites = False
        self._shown = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without their ends."""
        *complete, pending = (self._pending + data).split(b"\n")
        lines = [line for each in complete if (line := _visible(each)) is not None]
        if complete:
            self._overwrites = False
        self._overwrites |= b"\r" in pending
        # A last \r may be the first half of \r\n.
        body, end = (pending[:-1], b"\r") if pending.endswith(b"\r") else (pending, b"")
        pending = body.rpartition(b"\r")[2] + end
        while len(pending) > self._limit_bytes:
            lines.append(pending[: self._limit_bytes])
            pending = pending[self._limit_bytes :]
        self._pending = pending
        return lines

    def overwriting(self) -> bytes | None:
        """Return what a progress bar shows now; None if that is not new."""
        shown = self._pending.rstrip(b"\r")
        if not self._overwrites or not shown.strip() or shown == self._shown:
            return None
        self._shown = shown
        return shown

    def rest(self) -> list[bytes]:
        """Return what is left at the end of the stream: a last line without an end."""
        pending, self._pending = self._pending, b""
        line = _visible(pending) if pending else None
        return [] if line is None else [line]


def _visible(line: bytes) -> bytes | None:
    """Return what a terminal shows of a line in the end; None if the line was erased."""
    shown = line.rstrip(b"\r")
    before, overwritten, last = shown.rpartition(b"\r")
    return None if overwritten and before and not last.strip() else last


def prefix(name: str, width: int, colour: int | None) -> bytes:
    """Return what stands before each line of a job.

    Args:
        name: of the job.
        width: of the longest name.
        colour: number of the job, for terminals; None for no colour.
    """
    text = f"{name:<{width}} | "
    return (
        text.encode() if colour is None else f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m{text}\x1b[0m".encode()
    )


_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # no red: that looks like an error
