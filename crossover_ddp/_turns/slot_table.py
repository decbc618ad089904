"""The file of slots: made, opened, checked, locked, read and written. Our design.

[Note: plain reads and writes]
Slots are read with ``pread`` and written with ``pwrite``, not mapped: somebody who truncates the file under way costs
an error that is caught (the job goes on without turns), where a mapping would cost a SIGBUS. Aligned eight-byte fields
are copied by the kernel in one piece on the machines that run torch.
"""

import contextlib
import fcntl
import os
import secrets
import struct
import sys

from crossover_ddp.errors import SegmentError

from .descriptors import Descriptors
from .private_files import KEEP_FILES, PrivateFiles
from .slots import (
    FILE_BYTES,
    HEADER_BYTES,
    JOINED,
    LAYOUT,
    MAGIC,
    SLOT_BYTES,
    SLOT_COUNT,
    SegmentHeader,
    Slot,
    is_named,
    lock_slots,
    read_header,
    remove_unused,
)

_SUFFIX = ".turns"
_SLOTS = "slots"
_OPEN_ATTEMPTS = 100


def slot_offset(slot: int) -> int:
    """Return where a slot begins in the file."""
    return HEADER_BYTES + slot * SLOT_BYTES


class SlotTable:
    """The open file of slots.

    Args:
        files: where it is.

    On failure: `SegmentError` names the file and what to do. Not thread-safe, but for reads and writes of fields.
    """

    def __init__(self, files: PrivateFiles) -> None:
        self._files = files
        self._descriptors = Descriptors()

    @property
    def fd(self) -> int:
        """The open file; -1 before `open` and after `close`."""
        return self._descriptors.get(_SLOTS)

    @property
    def path(self) -> str:
        """The file's path."""
        return self._files.path(_SUFFIX)

    # --- opening and removing ------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the file that other jobs find now, made if there is none."""
        self._descriptors.close(_SLOTS)
        for _ in range(_OPEN_ATTEMPTS):
            # The last process to leave removes the file and the directory, at any moment of this.
            with contextlib.suppress(FileNotFoundError):
                self._files.enter()
                self._descriptors.open(_SLOTS, self._opened_or_made)
                read_header(self.fd, self.path)
                return
        raise SegmentError(f"expected {self.path} to stay after it was made, got it removed again and again")

    def _opened_or_made(self) -> int:
        try:
            return self._files.open(_SUFFIX, os.O_RDWR)
        except FileNotFoundError:
            self._make()
            return self._files.open(_SUFFIX, os.O_RDWR)

    def _make(self) -> None:
        """Make the whole file aside and link it in, so that nobody ever sees half of one."""
        aside = f".{secrets.token_hex(8)}.new"
        fd = self._files.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            os.pwrite(fd, bytes(SegmentHeader(MAGIC, LAYOUT, SLOT_COUNT)), 0)
            with contextlib.suppress(FileExistsError):
                self._files.link(aside, _SUFFIX)
        except FileNotFoundError:
            raise  # the last process to leave took it for a leftover
        except OSError as error:
            raise SegmentError(
                f"cannot make {self.path}: {error.strerror}; free some of {self._files.base}"
            ) from error
        finally:
            os.close(fd)
            self._files.remove(aside)

    def is_current(self) -> bool:
        """Return whether the open file is still the one that joining processes find."""
        return is_named(self.fd, self._files.stem, self._files.directory_fd)

    def is_removed(self) -> bool:
        """Return whether somebody has removed the open file."""
        return not os.fstat(self.fd).st_nlink

    def remove_if_unused(self) -> None:
        """Remove all files of the group if no process has a slot; `close` must follow."""
        remove_unused(self.fd, self._files.stem, self._files.directory_fd, self._files.directory)

    def close(self) -> None:
        """Close the file, and give up the locks with it."""
        self._descriptors.close_all()

    # --- slots ---------------------------------------------------------------------------------------------

    def lock_free_slot(self) -> int:
        """Lock the first free slot, and return it; -1 if all are taken."""
        return next((slot for slot in range(SLOT_COUNT) if lock_slots(self.fd, slot, 1)), -1)

    def unlock(self, slot: int) -> None:
        """Give a slot's lock up."""
        lock_slots(self.fd, slot, 1, fcntl.F_UNLCK)

    def write(self, index: int, slot: Slot) -> None:
        """Write a whole slot."""
        os.pwrite(self.fd, bytes(slot), slot_offset(index))

    def write_fields(self, index: int, **values: int) -> None:
        """Write eight-byte fields of a slot, in the order given."""
        for name, value in values.items():
            offset = slot_offset(index) + getattr(Slot, name).offset
            os.pwrite(self.fd, value.to_bytes(8, sys.byteorder), offset)

    def write_lease(self, index: int, lease_s: float) -> None:
        """Write a slot's lease and the mirror that proves it, which lie side by side."""
        os.pwrite(self.fd, struct.pack("=dd", lease_s, -lease_s), slot_offset(index) + Slot.lease_s.offset)

    def read(self) -> dict[int, Slot]:
        """Return the slots that say they are in use, whether or not their owners live."""
        if self.is_removed():
            raise SegmentError(
                f"expected {self.path} to stay while jobs run, got it removed under way; {KEEP_FILES}"
            )
        raw = os.pread(self.fd, FILE_BYTES - HEADER_BYTES, HEADER_BYTES)
        if len(raw) != FILE_BYTES - HEADER_BYTES:
            raise SegmentError(f"expected {FILE_BYTES} bytes, got {self.path} cut short under way")
        states = memoryview(raw).cast("Q")[:: SLOT_BYTES // 8].tolist()  # `state` is a slot's first field
        return {
            index: Slot.from_buffer_copy(raw, index * SLOT_BYTES)
            for index, state in enumerate(states)
            if state == JOINED
        }
