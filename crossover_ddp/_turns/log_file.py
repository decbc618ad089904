"""The lead machine's log as a file: one byte, the slot, for each turn drawn. See [Note: turn order] in `rules`.

Our design.
"""

import os

from crossover_ddp.errors import SegmentError

from .descriptors import Descriptors
from .private_files import KEEP_FILES, PrivateFiles

_SUFFIX = ".log"
_LOG = "log"


class LogFile:
    """Draw turns by appending to the log, and read what others have appended.

    Args:
        files: where the log is.

    On failure: `SegmentError` if somebody has removed the log or cut it short, or if it is not this user's.
    """

    def __init__(self, files: PrivateFiles) -> None:
        self._files = files
        self._descriptors = Descriptors()
        self._drawn_numel = 0

    @property
    def fd(self) -> int:
        """The open log; -1 before the first turn is drawn here."""
        return self._descriptors.get(_LOG)

    def numel(self) -> int:
        """Return how many turns have been drawn on this device."""
        return self._files.size_bytes(_SUFFIX)

    def begin(self, numel: int) -> None:
        """Expect every turn drawn here to come after the first ``numel``."""
        self._drawn_numel = numel

    def draw(self, slot: int) -> int:
        """Append ``slot``; its place in the log is the turn's number, from 1."""
        if self.fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptors.open(_LOG, lambda: self._files.open(_SUFFIX, flags))
        if not os.fstat(self.fd).st_nlink:
            raise SegmentError(f"expected {self._where()} to stay, got it removed under way; {KEEP_FILES}")
        os.write(self.fd, bytes([slot]))
        turn = os.lseek(self.fd, 0, os.SEEK_CUR)
        if turn <= self._drawn_numel:  # siblings would take it for a turn of long ago
            raise SegmentError(
                f"expected a turn after {self._drawn_numel}, got {self._where()} cut short under way"
            )
        self._drawn_numel = turn
        return turn

    def read(self, start: int, stop: int) -> bytes:
        """Return the records of turns ``start + 1`` to ``stop``."""
        records = os.pread(self.fd, stop - start, start)
        if len(records) != stop - start:
            raise SegmentError(f"expected {stop} turns, got {self._where()} cut short under way")
        return records

    def _where(self) -> str:
        return f"the log beside {self._files.path('.turns')}"

    def close(self) -> None:
        """Close the log."""
        self._descriptors.close_all()
