"""The home of turns in shared memory: one segment per group and machine, one slot per local process. Our design.

Files, all in one directory of mode 0700 that belongs to the user (``/dev/shm/crossover_ddp-<uid>``), so nobody else can
put one there; it stays when the last file has gone. The last process to leave removes the files of its group; those of
groups whose processes were killed are removed by the next process that joins any group:

- ``<group>@.turns``: the slots, up to the last one that was ever taken. Every field has one writer, the slot's owner.
  Zeros are free slots.
- ``<group>@.log``: the order of turns on all devices, one byte (the slot) per turn, see [Note: turn order] in `rules`.
- ``<group>@.<slot>.bell``: a FIFO that the slot's owner holds open for reading.

A slot belongs to the process that holds the lock on its byte (an open-file-description lock, which the kernel drops
when the owner ends, in whatever way).

[Note: plain reads and writes]
Slots are read with ``pread`` and written with ``pwrite``, not mapped: somebody who truncates the file under way costs
an error that is caught (the job goes on without turns), where a mapping would cost a SIGBUS. Aligned eight-byte fields
are copied by the kernel in one piece on the machines that run torch.

[Note: forks]
A forked child inherits the open files, and with them the lock and the bell, so it would keep the slot of its dead
parent alive. Therefore every child closes them first. It must know all of them: no thread may fork between the opening
of a file and the moment when it is noted, so both happen under `no_fork`.

[Note: bells]
A bell does two things that a futex cannot do together: a byte written to it wakes the owner, and a process that holds
it open for writing gets POLLERR from the kernel the moment its last reader is gone. So one ``poll`` waits for "given
back", "died" and the end of the lease at once. No thread watches, nothing polls in a loop, no process id is
interpreted: it works between containers that share /dev/shm.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
import select
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from crossover_ddp._system.machine import machine
from crossover_ddp._system.shared_memory import (
    SHARED_MEMORY,
    fcntl,
    open_directory,
    segment_directory,
)
from crossover_ddp.errors import SegmentError

from .rules import Member, Process

SLOT_COUNT = 253  # larger numbers in the log are words, see `rules`
_NAME_BYTES: Final = 64
FREE, JOINED = 0, int.from_bytes(b"XDDPTU12", "little")
"""States of a slot; JOINED is another number in another layout."""
GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SLOTS, _LOG, _BELL = ".turns", ".log", ".{}.bell"
_LOCK_BASE = 1 << 32  # locked bytes lie beyond the end of the file: nobody locks contents
_RETRY_S = 1e-3
_SLOT_PATIENCE_S = (
    5.0  # a process that removes the files holds all slots, on a busy machine for long
)
_CLOSED: Final = -1  # a number that every system call refuses
_LONGEST_WAIT_S = 3600.0
_REMEDIES: Final = {
    errno.EMFILE: "let the process have more files (ulimit -n)",
    errno.ENFILE: "let the machine have more files (sysctl fs.file-max)",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EROFS: "mount it writable",
    errno.EACCES: "let this user read and write there, or remove it while no job runs",
}
_BELL_BYTES = 1 << 16  # all that a pipe holds: one read silences it

no_fork: Final = threading.RLock()
"""A fork waits for this lock. It is held only while files are opened, closed, written or rung, never over a wait."""
_all: "weakref.WeakSet[OpenFile]" = weakref.WeakSet()

_CODES: Final = {int: "Q", bool: "Q", float: "d", bytes: f"{_NAME_BYTES}s"}
_LAYOUT: Final = struct.Struct("".join(map(_CODES.__getitem__, Member.__annotations__.values())))
"""Of a slot: the fields of a `Member` in their order, but in the place of its number the slot's state."""
_OFFSETS: Final = {"state": 0, **{name: 8 * place for place, name in enumerate(Member._fields)}}
SLOT_BYTES = _LAYOUT.size
FILE_BYTES = SLOT_COUNT * SLOT_BYTES


def digest(text: str) -> int:
    """Return a positive 63-bit hash of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def read_slots(fd: int, path: str) -> list[Member]:
    """Return the slots that say they are in use, whether or not their owners live."""
    raw = os.pread(
        fd, FILE_BYTES + 1, 0
    )  # mostly a few hundred bytes: it is as long as its last slot needs
    if len(raw) % SLOT_BYTES:
        raise SegmentError(
            f"expected slots of {SLOT_BYTES} bytes, got a part of one at {path}: it was cut short, or is of another "
            "version of crossover_ddp; remove it while no job runs"
        )
    states = memoryview(raw).cast("Q")[:: SLOT_BYTES // 8].tolist()
    used = [*itertools.compress(range(SLOT_COUNT), states)]
    if any(states[index] != JOINED for index in used):
        words = "it is of another version of crossover_ddp, or no file of turns; remove it while no job runs"
        raise SegmentError(f"expected slots of this version, got others at {path}: {words}")
    return [Member(index, *_LAYOUT.unpack_from(raw, index * SLOT_BYTES)[1:]) for index in used]


# --- locks of slots, which belong to the open file and end with it ------------------------------------------------


def _lock_request(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, _LOCK_BASE + start, length, 0)


def lock_slots(fd: int, start: int, length: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Try to lock slots, or unlock them; return whether that was done."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_request(kind, start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def slots_are_locked(fd: int, start: int, length: int) -> bool:
    """Return whether another open file holds a lock on any of the slots. Takes no lock; ``fd`` may be read-only."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_request(fcntl.F_WRLCK, start, length))
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


# --- files, which a forked child closes ---------------------------------------------------------------------------


class OpenFile:
    """An open file that a forked child closes before it does anything else. Thread-safe."""

    def __init__(self) -> None:
        self.fd = _CLOSED
        """Its descriptor; -1, which every system call refuses, while it is closed."""
        with no_fork:
            _guard_forks()
            _all.add(self)

    def open(self, opening: Callable[[], int]) -> None:
        """Hold the descriptor that ``opening`` returns, instead of the one before."""
        with no_fork:
            self.close()
            self.fd = opening()

    def close(self) -> None:
        """Close the file, if it is open."""
        with no_fork:
            fd, self.fd = self.fd, _CLOSED
            if fd != _CLOSED:
                os.close(fd)

    def is_removed(self) -> bool:
        """Return whether the file is open and has no name any more."""
        return self.fd != _CLOSED and not os.fstat(self.fd).st_nlink


@functools.cache
def _guard_forks() -> None:
    def close_all() -> None:
        for each in list(_all):
            each.close()
        no_fork.release()

    os.register_at_fork(
        before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=close_all
    )


class GroupFiles(OpenFile):
    """The directory of a group's files; ``suffix`` is what follows the group in a file's name.

    On failure: `SegmentError` names the file and what to do; ``FileNotFoundError`` where a file is not there.
    """

    def __init__(self, group: str, base: str) -> None:
        super().__init__()
        self.stem = f"{group}@"  # no group's name holds the sign
        self._base = base
        self._path = segment_directory(base)
        self.open(lambda: open_directory(base, make=True))

    def path(self, suffix: str) -> str:
        """Return the path of a file, for messages and for people."""
        return os.path.join(self._path, f"{self.stem}{suffix}")

    def open_file(self, suffix: str, flags: int) -> int:
        """Return the descriptor of a file; a symbolic link is no file."""
        try:
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(f"{self.stem}{suffix}", flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):  # no file; a bell without a reader
                raise
            raise self.refused(suffix, error) from error

    def refused(self, suffix: str, error: OSError) -> SegmentError:
        """Return the error of a file that cannot be opened or made."""
        found = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        remedy = _REMEDIES.get(error.errno or 0, "remove it while no job runs")
        return SegmentError(
            f"expected a file of turns at {self.path(suffix)}, got {found}; {remedy}"
        )

    def remove(self, suffix: str) -> None:
        """Remove a file, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.stem}{suffix}", dir_fd=self.fd)

    def remove_dead_groups(self) -> None:
        """Remove the files of other groups whose processes have all ended without leaving (killed, ``os._exit``).

        See `remove_if_unused`. Files that this version does not know, or cannot open, are left alone.
        """
        for name in os.listdir(self.fd):
            group, _, suffix = name.partition("@")
            if suffix == _SLOTS and f"{group}@" != self.stem and GROUP_NAME.fullmatch(group):
                with contextlib.suppress(OSError, SegmentError):
                    self._remove_if_dead(group)

    def _remove_if_dead(self, group: str) -> None:
        other = GroupFiles(group, self._base)
        slots = OpenFile()
        try:
            slots.open(lambda: other.open_file(_SLOTS, os.O_RDWR))
            read_slots(slots.fd, other.path(_SLOTS))
            remove_if_unused(other, slots)
        finally:
            slots.close()
            other.close()


def remove_if_unused(files: GroupFiles, slots: OpenFile) -> None:
    """Remove all files of a group if no process has a slot there; all slots stay locked until ``slots`` is closed.

    A process that joins meanwhile finds all slots locked, or a slot of a file that has no name any more, and opens the
    file of that name once more (`TurnSegment.reserve`).
    """
    if not lock_slots(slots.fd, 0, SLOT_COUNT) or slots.is_removed():
        return
    ours = re.compile(rf"{re.escape(files.stem)}(\.log|\.[0-9]+\.bell)")
    for name in os.listdir(files.fd):
        if ours.fullmatch(name):
            files.remove(name.removeprefix(files.stem))
    # The slots last: while that file is there, all its slots locked, no process can join and make the others again.
    files.remove(_SLOTS)


class Bells:
    """The bell of this process, and the bells of its siblings; see [Note: bells].

    Thread-safe, except `make_own` and `wait`: a thread of its own may publish a turn, and rings then.
    """

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self.own = OpenFile()
        """The own bell; closed before `make_own`."""
        self._others: defaultdict[int, OpenFile] = defaultdict(OpenFile)  # by slot
        self._held: dict[int, Process] = {}  # by slot: whose bell is open

    def make_own(self, slot: int) -> None:
        """Make the bell of this process, which has that slot, in place of whatever has that name."""
        files, suffix = self._files, _BELL.format(slot)
        try:
            files.remove(suffix)
            os.mkfifo(f"{files.stem}{suffix}", 0o600, dir_fd=files.fd)
        except OSError as error:
            raise files.refused(suffix, error) from error
        # Open for writing too, or its poll would report a hang-up whenever no sibling holds it.
        self.own.open(lambda: files.open_file(suffix, os.O_RDWR))

    def close(self) -> None:
        """Close all bells."""
        with no_fork:
            for each in (self.own, *self._others.values()):
                each.close()

    def is_alive(self, sibling: Process) -> bool:
        """Return whether the sibling's bell has a reader."""
        return self._reader(sibling) is not None

    def ring(self, sibling: Process) -> None:
        """Wake a sibling."""
        with (
            no_fork
        ):  # nor may anybody close the bell, and have its number taken, before it has rung
            fd = self._reader(sibling)
            if fd is not None:
                with contextlib.suppress(
                    BlockingIOError, BrokenPipeError
                ):  # full: it is awake; broken: dead
                    os.write(fd, b"\0")

    def _reader(self, sibling: Process) -> int | None:
        """Return the writing end of a sibling's bell, or None if nobody reads it: the sibling is dead."""
        slot, _ = sibling
        with no_fork:
            bell = self._others[slot]
            if (
                self._held.get(slot) != sibling or bell.fd < 0
            ):  # perhaps of the slot's earlier owner
                self._held[slot] = sibling
                with contextlib.suppress(OSError):  # no reader, or no bell: its owner has ended
                    bell.open(lambda: self._files.open_file(_BELL.format(slot), os.O_WRONLY))
            if bell.fd < 0:
                return None
            poll = select.poll()
            poll.register(bell.fd, 0)
            if poll.poll(0):
                bell.close()
                return None
            return bell.fd

    def ring_own(self) -> None:
        """End the own `wait` from another thread."""
        with no_fork, contextlib.suppress(OSError):  # as in `ring`
            os.write(self.own.fd, b"\0")

    def wait(self, watched: Iterable[Process], timeout_s: float) -> None:
        """Block until somebody rings, one of ``watched`` dies, or the time is over."""
        poll = select.poll()
        poll.register(self.own.fd, select.POLLIN)
        for sibling in watched:
            fd = self._reader(sibling)
            if fd is None:
                return
            poll.register(fd, 0)
        # The kernel takes no more than 24 days; the caller looks again anyway.
        poll.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self.own.fd, _BELL_BYTES)


# --- a process among its siblings ---------------------------------------------------------------------------------


class TurnSegment:
    """The local process's place among the jobs of one group on one machine.

    Args:
        group: siblings name the same group; letters, digits, ``.``, ``_``, ``-``.
        device: any text that names the device on the whole cluster (a GPU's UUID).
        base: where shared memory is mounted.

    On failure: `SegmentError` names the file and what to do; nothing of another user's is touched.
    Not thread-safe, except `publish_returned` and its bells.
    """

    def __init__(self, group: str, device: str, *, base: str = SHARED_MEMORY) -> None:
        if not GROUP_NAME.fullmatch(group):
            raise ValueError(
                f"expected a group name of 1-64 letters, digits, '.', '_', '-', got name={group!r}"
            )
        self.group, self.device = group, device
        self.slot = -1
        self._base = base
        self._device = digest(device)
        self._lead = self._turns = self._last_drawn = 0
        self._files = GroupFiles(group, base)
        self.path = self._files.path(_SLOTS)
        """The file that holds the slots."""
        self.slots_file, self.log_file = OpenFile(), OpenFile()
        self.bells = Bells(self._files)
        try:
            self._open_slots()
        except BaseException:
            self.forget()
            raise

    @property
    def machine(self) -> int:
        """A number of all processes that see this segment; no other segment on any machine has it at this time."""
        found = os.fstat(self.slots_file.fd)
        return digest(f"{machine()} {found.st_dev} {found.st_ino}")

    # --- joining and leaving -------------------------------------------------------------------------------

    def _open_slots(self) -> None:
        """Open the file that other jobs find now, made if there is none."""
        self.slots_file.open(lambda: self._files.open_file(_SLOTS, os.O_RDWR | os.O_CREAT))
        read_slots(self.slots_file.fd, self.path)

    def join(self, member: Member) -> None:
        """Take a free slot for this process, or the one that it has reserved, and show ``member`` there.

        The slot, and what tells who this process is, are filled in.
        """
        self.reserve()
        self._lead = member.lead
        self.bells.make_own(self.slot)
        self._last_drawn = self.drawn()
        own = member._replace(
            slot=FREE,
            incarnation=secrets.randbits(62) | 1,
            joined_at=self._last_drawn,
            device=self._device,
            pid=os.getpid(),
            device_name=self.device.encode(),
        )
        os.pwrite(self.slots_file.fd, _LAYOUT.pack(*own), self.slot * SLOT_BYTES)
        self.publish(state=JOINED)
        # A sibling that has just taken our new bell for that of the slot's dead owner would wait a whole lease.
        self.ring_others()

    def reserve(self) -> None:
        """Take a free slot without joining yet: from now on nobody removes the segment's files. May be called again."""
        deadline_s = time.monotonic() + _SLOT_PATIENCE_S
        while self.slot < 0:
            fd = self.slots_file.fd
            slot = next((slot for slot in range(SLOT_COUNT) if lock_slots(fd, slot, 1)), -1)
            if slot >= 0 and not self.slots_file.is_removed():
                try:
                    os.posix_fallocate(fd, slot * SLOT_BYTES, SLOT_BYTES)  # whole slots, in one go
                except OSError as error:
                    raise self._files.refused(_SLOTS, error) from error
                self.slot = slot
                self.publish(state=FREE)
                self._files.remove_dead_groups()
            elif time.monotonic() > deadline_s:
                raise SegmentError(
                    f"expected a free slot, got all {SLOT_COUNT} taken in {self.path}; use another group"
                )
            else:  # the last process to leave holds all slots for a moment, and removes the file
                time.sleep(_RETRY_S if slot < 0 else 0.0)
                self._open_slots()

    def leave(self) -> None:
        """Give the slot up, wake the siblings, and remove the files if nobody is left. May be called again."""
        if self.slots_file.fd < 0:
            return self.forget()
        stranded = False
        with contextlib.suppress(OSError, SegmentError):
            stranded = self.slots_file.is_removed()
            if self.slot >= 0 and not stranded:  # or the bell of that name may be another process's
                self.publish(state=FREE)
                self.ring_others()
                self._files.remove(_BELL.format(self.slot))
        with (
            no_fork
        ):  # a late publication must not go into what may be another process's from here on
            self.slot = -1
        with contextlib.suppress(OSError):
            # Before the files are removed: of two processes that leave at once neither must take the other for a user.
            lock_slots(self.slots_file.fd, 0, SLOT_COUNT, fcntl.F_UNLCK)
            remove_if_unused(self._files, self.slots_file)
        self.forget()
        if stranded:
            # Somebody has removed the slots, perhaps not the bells and the log, which only a process that holds all
            # slots may remove: so come and go once more, in the segment that others would find.
            with contextlib.suppress(OSError, SegmentError):
                TurnSegment(self.group, self.device, base=self._base).leave()

    def forget(self) -> None:
        """Close every file and wake no sibling."""
        self.slot = -1
        for each in (self.slots_file, self.log_file, self.bells, self._files):
            each.close()

    # --- what this process publishes -----------------------------------------------------------------------

    def publish(self, **values: int | float) -> None:
        """Write eight-byte fields of the own slot, in the order given."""
        for name, value in values.items():
            raw = struct.pack("d" if isinstance(value, float) else "Q", value)
            with no_fork:  # nor may another thread leave, and the number be another file's
                os.pwrite(self.slots_file.fd, raw, self.slot * SLOT_BYTES + _OFFSETS[name])

    def publish_returned(self, turn: int) -> None:
        """Publish that ``turn`` was given back, and wake the siblings."""
        self.publish(returned_at_ns=time.monotonic_ns(), returned=turn)
        self.ring_others()
        self.count_turn()

    def count_turn(self) -> None:
        """Publish that one more turn is over, for people to see."""
        self._turns += 1
        self.publish(turns=self._turns)

    # --- who is on the device ------------------------------------------------------------------------------

    def members(self, *, in_order: bool = False) -> list[Member]:
        """Return every living process on this device, or ``in_order`` with the job on all devices; itself included.

        On failure: `SegmentError` if a file that siblings need was removed.
        """
        found = [
            each
            for each in read_slots(self.slots_file.fd, self.path)
            if (each.lead == self._lead if in_order else each.device == self._device)
            and (each.slot == self.slot or self.bells.is_alive(each.process))
        ]
        is_missing = self.slot not in [
            each.slot for each in found
        ]  # others would compute beside it
        if is_missing or any(
            file.is_removed() for file in (self.slots_file, self.log_file, self.bells.own)
        ):
            raise SegmentError(
                f"expected {self.path} and the files beside it to stay while jobs run, got one removed under way, or "
                "cut short; where logind removes shared memory at logout, loginctl enable-linger keeps it; start the "
                "job again"
            )
        return found

    def ring_others(self) -> None:
        """Wake every sibling process on this device; the bell of a dead one is not rung."""
        for each in read_slots(self.slots_file.fd, self.path):
            if each.device == self._device and each.slot != self.slot:
                self.bells.ring(each.process)

    # --- the order of turns, on the lead machine -----------------------------------------------------------

    def drawn(self) -> int:
        """Return how many turns have been drawn on all devices."""
        try:
            return os.stat(self._files.path(_LOG), follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def _open_log(self) -> None:
        if self.log_file.fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self.log_file.open(lambda: self._files.open_file(_LOG, flags))

    def draw_turn(self) -> int:
        """Append the own slot to the log; its place there is the turn's number, from 1."""
        self._open_log()
        with no_fork:  # as in `publish`
            os.write(self.log_file.fd, bytes([self.slot]))
            turn = os.lseek(self.log_file.fd, 0, os.SEEK_CUR)
        if turn <= self._last_drawn:  # siblings would take it for a turn of long ago
            words = f"expected a turn after {self._last_drawn}, got {turn} from the log beside {self.path}"
            raise SegmentError(f"{words}, which was cut short under way; start the jobs again")
        self._last_drawn = turn
        return turn

    def write_word(self, word: int) -> None:
        """Append a word and the own slot to the log, whole; after a `draw_turn`."""
        with no_fork:  # as in `publish`
            os.write(self.log_file.fd, bytes([word, self.slot]))

    def read_log(self, start: int, stop: int) -> bytes:
        """Return the records of turns ``start + 1`` to ``stop``."""
        self._open_log()
        records = os.pread(self.log_file.fd, stop - start, start)
        if len(records) != stop - start:
            raise SegmentError(
                f"expected {stop} turns, got the log beside {self.path} cut short under way"
            )
        return records
