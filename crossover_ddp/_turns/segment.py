"""Turns in shared memory: one segment per group and machine, one slot per local process.

A group has these files:

- ``<group>@.turns`` holds the slots, up to the last one that was ever taken. Every field has one
  writer, the slot's owner. A free slot that was never used is all zeros.
- ``<group>@.log`` is the order of turns on all devices, with one byte (the slot) per turn; see
  [Note: turn order] in `rules`.
- ``<group>@.<slot>.bell`` is a FIFO that the slot's owner holds open for reading.

All files are in one directory of mode 0700 that belongs to the user
(``/dev/shm/crossover_ddp-<uid>``), so no other user can put files there. The directory stays when
the last file is removed. The last process to leave a group removes the group's files. If all
processes of a group were killed, the next process that joins any group removes the files.

A slot belongs to the process that holds the lock on its byte. It is an open-file-description lock,
which the kernel drops when the owner ends, for whatever reason.

[Note: plain reads and writes]
Slots are read with ``pread`` and written with ``pwrite``, not mapped. If the file is truncated
while jobs run, the process gets an error, which is caught, and the job continues to train without
turns. With a mapping the process would get a SIGBUS. On the machines that run torch, the kernel
copies an aligned field of eight bytes in one piece.

[Note: forks]
A forked child inherits the open files, and with them the lock and the bell, so it would keep the
slot of its dead parent alive. Therefore every child first closes them. It must know all of them: no
thread may fork between opening a file and noting it, so both happen under `no_fork`.

[Note: bells]
A bell does two things that a futex cannot do together: a byte written to it wakes the owner, and a
process that holds it open for writing gets POLLERR from the kernel as soon as the last reader is
gone. So one ``poll`` waits for "given back", "died" and the end of the lease at once. This needs no
watching thread and no polling loop. It interprets no process ids, so it works between containers
that share /dev/shm. Our design.
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
from enum import IntEnum
from typing import Any, Final

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
GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SLOTS, _LOG, _BELL = ".turns", ".log", ".{}.bell"
_NO_SLOT: Final = -1
# Locked bytes lie beyond the end of the file, so that they never cover its contents.
_LOCK_BASE = 1 << 32
_RETRY_S = 1e-3
# The last process to leave holds all slots while it removes the files, which may take long on a
# busy machine.
_SLOT_PATIENCE_S = 5.0
_CLOSED: Final = -1  # a descriptor that every system call refuses
_LONGEST_WAIT_S = 3600.0
_BELL_BYTES = 1 << 16  # the capacity of a pipe: one read empties it
_REMEDIES: Final = {
    errno.EMFILE: "let the process have more files (ulimit -n)",
    errno.ENFILE: "let the machine have more files (sysctl fs.file-max)",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EROFS: "mount it writable",
    errno.EACCES: "let this user read and write there, or remove it while no job runs",
}

no_fork: Final = threading.RLock()
"""A fork waits for this lock. A thread holds it while it opens, closes or writes files or rings
bells, but never while it waits."""
_open_files: "weakref.WeakSet[OpenFile]" = weakref.WeakSet()


def digest(text: str) -> int:
    """Return a positive 63-bit hash of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


# --- the format of a slot -----------------------------------------------------------------------


class SlotState(IntEnum):
    """The state that siblings see for a slot's owner. Only `TurnSegment._show` changes it."""

    FREE = 0
    """Not in the group. Entered by `TurnSegment.reserve`, which locks the slot, and by
    `TurnSegment.leave`. A slot that was never used is all zeros and so has this state."""
    JOINED = int.from_bytes(b"XDDPTU12", "little")
    """Among the siblings. Entered by `TurnSegment.join`, after all other fields were written. A
    process that is killed leaves its slot in this state. Every change to the format changes this
    number, so that each version refuses the slots of other versions."""


# The slot's state, followed by the fields of a `Member`. Each has its offset in bytes and its
# `struct` code (Q: unsigned integer, d: float64, 64s: 64 bytes). The file never leaves the machine,
# so numbers are in native byte order. Processes of other jobs read the slots, perhaps with another
# version of this package: see `SlotState.JOINED` before you change anything here.
_SLOT_FORMAT: Final = {
    "state": (0, "Q"),
    "job": (8, "Q"),
    "incarnation": (16, "Q"),
    "joined_at": (24, "Q"),
    "started": (32, "Q"),
    "returned": (40, "Q"),
    "lease_s": (48, "d"),
    "device": (56, "Q"),
    "trial": (64, "Q"),
    "tried": (72, "Q"),
    "pairs": (80, "Q"),
    "turns_s": (88, "d"),
    "side_s": (96, "d"),
    "lead": (104, "Q"),
    "returned_at_ns": (112, "Q"),
    "queued": (120, "Q"),
    "turns": (128, "Q"),
    "mode": (136, "Q"),
    "rank": (144, "Q"),
    "world_size": (152, "Q"),
    "pid": (160, "Q"),
    "device_name": (168, "64s"),
}
SLOT_BYTES = 232
FILE_BYTES = SLOT_COUNT * SLOT_BYTES
_SLOT: Final = struct.Struct("".join(code for _, code in _SLOT_FORMAT.values()))


def pack_slot(state: SlotState, member: Member) -> bytes:
    """Return the contents of a slot as bytes."""
    values: dict[str, Any] = {"state": state, **member._asdict()}
    return _SLOT.pack(*[values[name] for name in _SLOT_FORMAT])


def _unpack_slot(raw: bytes, slot: int) -> Member:
    values = _SLOT.unpack_from(raw, slot * SLOT_BYTES)
    fields: dict[str, Any] = dict(zip(_SLOT_FORMAT, values, strict=True))
    del fields["state"]
    return Member(slot=slot, **fields)


def read_slots(fd: int, path: str) -> list[Member]:
    """Return the slots in state `SlotState.JOINED`, whether or not their owners are alive.

    Raises `SegmentError` if another version of this package wrote the file, or if the file was cut
    short.

    Args:
        fd: the open file of slots.
        path: its path, for messages.
    """
    # Usually a few hundred bytes: the file ends with the last slot that was ever taken.
    raw = os.pread(fd, FILE_BYTES + 1, 0)
    if len(raw) % SLOT_BYTES:
        raise SegmentError(
            f"expected slots of {SLOT_BYTES} bytes at {path}, got an incomplete one: the file was "
            "cut short, or was written by another version of crossover_ddp; remove it while no job "
            "runs"
        )
    states = memoryview(raw).cast("Q")[:: SLOT_BYTES // 8].tolist()
    used = [*itertools.compress(range(SLOT_COUNT), states)]
    if any(states[slot] != SlotState.JOINED for slot in used):
        raise SegmentError(
            f"{path} was written by another version of crossover_ddp, or is not a file of turns; "
            "remove it while no job runs"
        )
    return [_unpack_slot(raw, slot) for slot in used]


# --- locks on slots, which belong to the open file and end with it ------------------------------


def _lock_request(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, _LOCK_BASE + start, length, 0)


def lock_slots(fd: int, start: int, length: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Try to lock or unlock slots, and return whether this succeeded."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_request(kind, start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def slots_are_locked(fd: int, start: int, length: int) -> bool:
    """Return whether another open file holds a lock on any of the slots.

    This takes no lock, so ``fd`` may be read-only.
    """
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_request(fcntl.F_WRLCK, start, length))
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


# --- files, which a forked child closes ---------------------------------------------------------


class OpenFile:
    """An open file that a forked child closes before it does anything else. Thread-safe."""

    def __init__(self) -> None:
        # The file's descriptor, or `_CLOSED` while the file is closed.
        self.fd = _CLOSED
        with no_fork:
            _guard_forks()
            _open_files.add(self)

    def open(self, opening: Callable[[], int]) -> None:
        """Close the file that is open, if any, and hold the descriptor that ``opening`` returns."""
        with no_fork:
            self.close()
            self.fd = opening()

    def close(self) -> None:
        """Close the file if it is open."""
        with no_fork:
            fd, self.fd = self.fd, _CLOSED
            if fd != _CLOSED:
                os.close(fd)

    def is_removed(self) -> bool:
        """Return whether the file is open but no longer in its directory."""
        return self.fd != _CLOSED and not os.fstat(self.fd).st_nlink


@functools.cache
def _guard_forks() -> None:
    def close_all() -> None:
        for each in list(_open_files):
            each.close()
        no_fork.release()

    os.register_at_fork(
        before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=close_all
    )


class GroupFiles(OpenFile):
    """Give access to a group's files in their directory.

    A file's name consists of the group's name, an ``@`` and the ``suffix`` that the methods take.

    On failure: `SegmentError` names the file and the remedy. A missing file raises
    ``FileNotFoundError``.
    """

    def __init__(self, group: str, base: str) -> None:
        super().__init__()
        self.stem = f"{group}@"  # a group's name cannot contain the sign
        self._base = base
        self._directory = segment_directory(base)
        self.open(lambda: open_directory(base, make=True))

    def path(self, suffix: str) -> str:
        """Return the path of a file, for messages and for users."""
        return os.path.join(self._directory, f"{self.stem}{suffix}")

    def open_file(self, suffix: str, flags: int) -> int:
        """Open a file and return its descriptor. Symbolic links are refused."""
        try:
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(f"{self.stem}{suffix}", flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):  # no file; a bell without a reader
                raise
            raise self.failure(suffix, error) from error

    def failure(self, suffix: str, error: OSError) -> SegmentError:
        """Return the error to raise when a file cannot be opened or created."""
        found = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        remedy = _REMEDIES.get(error.errno or 0, "remove it while no job runs")
        return SegmentError(
            f"expected a file of turns at {self.path(suffix)}, got {found}; {remedy}"
        )

    def remove(self, suffix: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.stem}{suffix}", dir_fd=self.fd)

    def remove_dead_groups(self) -> None:
        """Remove the files of every other group whose processes all ended without leaving.

        A process ends without leaving if it is killed or calls ``os._exit``. See
        `remove_if_unused`. Files that this version cannot open, or did not write, are left alone.
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
            read_slots(slots.fd, other.path(_SLOTS))  # raises if another version wrote the file
            remove_if_unused(other, slots)
        finally:
            slots.close()
            other.close()


def remove_if_unused(files: GroupFiles, slots: OpenFile) -> None:
    """Remove all files of a group if no process has a slot in it.

    All slots stay locked until ``slots`` is closed. A process that joins meanwhile either finds all
    slots locked or gets a slot of a removed file. In both cases it opens the file by name again
    (`TurnSegment.reserve`).

    Args:
        files: the group's files.
        slots: the group's open file of slots.
    """
    if not lock_slots(slots.fd, 0, SLOT_COUNT) or slots.is_removed():
        return
    group_file = re.compile(rf"{re.escape(files.stem)}(\.log|\.[0-9]+\.bell)")
    for name in os.listdir(files.fd):
        if group_file.fullmatch(name):
            files.remove(name.removeprefix(files.stem))
    # Remove the slots last: while that file exists with all its slots locked, no process can join
    # and create the other files again.
    files.remove(_SLOTS)


class Bells:
    """The bell of this process and the bells of its siblings; see [Note: bells].

    All methods except `make_own` and `wait` are thread-safe, since any thread may publish a turn,
    which rings the siblings' bells.
    """

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        # The bell of this process. It is closed until `make_own` opens it.
        self.own = OpenFile()
        # The bells of siblings, by slot, and the sibling for which each bell was opened.
        self._others: defaultdict[int, OpenFile] = defaultdict(OpenFile)
        self._opened_for: dict[int, Process] = {}

    def make_own(self, slot: int) -> None:
        """Create the bell of this process, replacing any file of the same name.

        Args:
            slot: the slot of this process.
        """
        files, suffix = self._files, _BELL.format(slot)
        try:
            files.remove(suffix)
            os.mkfifo(f"{files.stem}{suffix}", 0o600, dir_fd=files.fd)
        except OSError as error:
            raise files.failure(suffix, error) from error
        # It is also opened for writing. Otherwise its poll would report a hang-up whenever no
        # sibling holds it open.
        self.own.open(lambda: files.open_file(suffix, os.O_RDWR))

    def close(self) -> None:
        """Close all bells."""
        with no_fork:
            for each in (self.own, *self._others.values()):
                each.close()

    def is_alive(self, sibling: Process) -> bool:
        """Return whether the sibling's bell has a reader."""
        return self._open_for_writing(sibling) is not None

    def ring(self, sibling: Process) -> None:
        """Wake a sibling."""
        # The lock keeps other threads from closing the bell, and the descriptor from being reused
        # for another file, before the byte is written.
        with no_fork:
            fd = self._open_for_writing(sibling)
            if fd is None:
                return
            # If the bell is full, the sibling is awake. If it is broken, the sibling is dead.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(fd, b"\0")

    def _open_for_writing(self, sibling: Process) -> int | None:
        """Return a descriptor of the sibling's bell, or None if the sibling is dead."""
        slot, _ = sibling
        with no_fork:
            bell = self._others[slot]
            # The bell that is open may belong to an earlier owner of the slot.
            if self._opened_for.get(slot) != sibling or bell.fd < 0:
                self._opened_for[slot] = sibling
                # The bell has no reader, or does not exist, if its owner has ended.
                with contextlib.suppress(OSError):
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
        """End the `wait` of another thread of this process."""
        with no_fork, contextlib.suppress(OSError):  # locked for the same reason as in `ring`
            os.write(self.own.fd, b"\0")

    def wait(self, watched: Iterable[Process], timeout_s: float) -> None:
        """Block until this process's bell rings, a watched sibling dies, or the time is up.

        Args:
            watched: the siblings whose death ends the wait.
            timeout_s: how long to wait at most.
        """
        poll = select.poll()
        poll.register(self.own.fd, select.POLLIN)
        for sibling in watched:
            fd = self._open_for_writing(sibling)
            if fd is None:
                return
            poll.register(fd, 0)
        # The kernel accepts at most 24 days. Waking early is harmless: the caller checks again.
        poll.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self.own.fd, _BELL_BYTES)


# --- a process among its siblings ---------------------------------------------------------------


class TurnSegment:
    """The membership of this process in one group on one machine: its slot, its bell and the log.

    Args:
        group: the name of the group, which is the same for all siblings. It may contain letters,
            digits, ``.``, ``_`` and ``-``.
        device: any text that identifies the device in the whole cluster, such as a GPU's UUID.
        base: the shared-memory mount point; default ``/dev/shm``.

    On failure: `SegmentError` names the file and the remedy; files of other users stay untouched.
    Not thread-safe, except `publish_returned` and the bells.
    """

    def __init__(self, group: str, device: str, *, base: str = SHARED_MEMORY) -> None:
        if not GROUP_NAME.fullmatch(group):
            raise ValueError(
                f"expected a group name of 1-64 letters, digits, '.', '_', '-', got name={group!r}"
            )
        self.group = group
        self.device = device
        # The slot of this process. It is `_NO_SLOT` before `reserve`, and again after `leave`.
        self.slot = _NO_SLOT
        self._base = base
        self._device_digest = digest(device)
        # The job's lead machine, once the process has joined.
        self._lead = 0
        # How many turns were given back. `crossover-ddp status` shows it.
        self._turns = 0
        # The last turn that is known to be drawn. A later draw must have a higher number.
        self._last_drawn = 0
        self._files = GroupFiles(group, base)
        # The path of the file that holds the slots.
        self.path = self._files.path(_SLOTS)
        self.slots_file = OpenFile()
        # The first draw or read opens it, so it is open only on lead ranks.
        self.log_file = OpenFile()
        self.bells = Bells(self._files)
        try:
            self._open_slots()
        except BaseException:
            self.forget()
            raise

    @property
    def machine(self) -> int:
        """A number that identifies this segment in all processes that see it.

        No other segment has the same number at the same time.
        """
        found = os.fstat(self.slots_file.fd)
        return digest(f"{machine()} {found.st_dev} {found.st_ino}")

    # --- joining and leaving --------------------------------------------------------------------

    def _open_slots(self) -> None:
        """Open the file of slots that other jobs find at the moment, or create it if missing."""
        self.slots_file.open(lambda: self._files.open_file(_SLOTS, os.O_RDWR | os.O_CREAT))
        read_slots(self.slots_file.fd, self.path)  # raises if another version wrote the file

    def join(self, member: Member) -> None:
        """Join the siblings: show ``member`` in the slot that this process has reserved.

        If no slot was reserved, reserve a free one. This method fills in the fields that identify
        the process and its device.
        """
        self.reserve()
        self._lead = member.lead
        self.bells.make_own(self.slot)
        self._last_drawn = self.drawn()
        own = member._replace(
            incarnation=secrets.randbits(62) | 1,
            joined_at=self._last_drawn,
            device=self._device_digest,
            pid=os.getpid(),
            device_name=self.device.encode(),
        )
        raw = pack_slot(SlotState.FREE, own)
        os.pwrite(self.slots_file.fd, raw, self.slot * SLOT_BYTES)
        self._show(SlotState.JOINED)
        # Wake all siblings: one that has just mistaken our new bell for the bell of the slot's dead
        # owner would wait for a whole lease.
        self.ring_others()

    def reserve(self) -> None:
        """Lock a free slot without joining yet. This does nothing if a slot is already locked.

        From here on no other process removes the segment's files.
        """
        deadline_s = time.monotonic() + _SLOT_PATIENCE_S
        while self.slot == _NO_SLOT:
            fd = self.slots_file.fd
            slots = range(SLOT_COUNT)
            slot = next((slot for slot in slots if lock_slots(fd, slot, 1)), _NO_SLOT)
            if slot != _NO_SLOT and not self.slots_file.is_removed():
                try:
                    # Allocate the whole slot in one call, so that readers never see a part of it.
                    os.posix_fallocate(fd, slot * SLOT_BYTES, SLOT_BYTES)
                except OSError as error:
                    raise self._files.failure(_SLOTS, error) from error
                self.slot = slot
                self._show(SlotState.FREE)
                self._files.remove_dead_groups()
            elif time.monotonic() > deadline_s:
                raise SegmentError(
                    f"expected a free slot, got all {SLOT_COUNT} taken in {self.path}; "
                    "use another group"
                )
            else:
                # The last process to leave holds all slots for a moment, and removes the file.
                time.sleep(_RETRY_S if slot == _NO_SLOT else 0.0)
                self._open_slots()

    def leave(self) -> None:
        """Give up the slot, wake the siblings, and remove the files if no process is left.

        It is safe to call this more than once.
        """
        if self.slots_file.fd < 0:
            self.forget()
            return
        was_removed = False
        with contextlib.suppress(OSError, SegmentError):
            was_removed = self.slots_file.is_removed()
            # If the file was removed, the bell of this name may belong to another process.
            if self.slot != _NO_SLOT and not was_removed:
                self._show(SlotState.FREE)
                self.ring_others()
                self._files.remove(_BELL.format(self.slot))
        # Forget the slot before unlocking it. From then on it may belong to another process, and a
        # late publication must not go into it.
        with no_fork:
            self.slot = _NO_SLOT
        with contextlib.suppress(OSError):
            # Unlock the slot before removing the files: if two processes leave at the same time,
            # neither may mistake the other one for a user of the files.
            lock_slots(self.slots_file.fd, 0, SLOT_COUNT, fcntl.F_UNLCK)
            remove_if_unused(self._files, self.slots_file)
        self.forget()
        if was_removed:
            # The slots were removed from outside, but perhaps not the bells and the log. Only a
            # process that holds all slots may remove those, so join and leave once more, in the
            # segment that other processes would find.
            with contextlib.suppress(OSError, SegmentError):
                TurnSegment(self.group, self.device, base=self._base).leave()

    def forget(self) -> None:
        """Close every file without waking siblings."""
        self.slot = _NO_SLOT
        for each in (self.slots_file, self.log_file, self.bells, self._files):
            each.close()

    # --- publishing -----------------------------------------------------------------------------

    def _show(self, state: SlotState) -> None:
        """Change the state of this process's slot. Siblings see it from here on."""
        self.publish(state=state)

    def publish(self, **values: int | float) -> None:
        """Write eight-byte fields of this process's slot in the order of the arguments."""
        for name, value in values.items():
            offset, code = _SLOT_FORMAT[name]
            raw = struct.pack(code, value)
            # Without the lock, another thread could leave meanwhile, and the descriptor could
            # become that of another file.
            with no_fork:
                os.pwrite(self.slots_file.fd, raw, self.slot * SLOT_BYTES + offset)

    def publish_returned(self, turn: int) -> None:
        """Publish that ``turn`` was given back, and wake the siblings."""
        self.publish(returned_at_ns=time.monotonic_ns(), returned=turn)
        self.ring_others()
        self.count_turn()

    def count_turn(self) -> None:
        """Publish that one more turn is over, for `crossover-ddp status`."""
        self._turns += 1
        self.publish(turns=self._turns)

    # --- members --------------------------------------------------------------------------------

    def members(self, *, in_order: bool = False) -> list[Member]:
        """Return every living process on this device, including this one.

        Args:
            in_order: return every living process with the same lead machine instead, whatever
                device it uses; default False.

        On failure: `SegmentError` if a file that siblings need was removed.
        """
        found = [
            each
            for each in read_slots(self.slots_file.fd, self.path)
            if (each.lead == self._lead if in_order else each.device == self._device_digest)
            and (each.slot == self.slot or self.bells.is_alive(each.process))
        ]
        # If its slot or files are missing, siblings compute beside this process.
        has_slot = any(each.slot == self.slot for each in found)
        files = (self.slots_file, self.log_file, self.bells.own)
        if not has_slot or any(file.is_removed() for file in files):
            raise SegmentError(
                f"{self.path}, or a file beside it, was removed while jobs were running, or cut "
                "short; where logind removes shared memory at logout, run loginctl enable-linger; "
                "start the job again"
            )
        return found

    def ring_others(self) -> None:
        """Wake every living sibling process on this device."""
        for each in read_slots(self.slots_file.fd, self.path):
            if each.device == self._device_digest and each.slot != self.slot:
                self.bells.ring(each.process)

    # --- the order of turns, on the lead machine ------------------------------------------------

    def drawn(self) -> int:
        """Return how many records the log has."""
        try:
            return os.stat(self._files.path(_LOG), follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def _open_log(self) -> None:
        if self.log_file.fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self.log_file.open(lambda: self._files.open_file(_LOG, flags))

    def draw_turn(self) -> int:
        """Append this process's slot to the log, and return the number of the turn drawn.

        The number is the position of the record, counted from 1.
        """
        self._open_log()
        with no_fork:  # for the same reason as in `publish`
            os.write(self.log_file.fd, bytes([self.slot]))
            turn = os.lseek(self.log_file.fd, 0, os.SEEK_CUR)
        if turn <= self._last_drawn:  # siblings would take it for an earlier turn
            raise SegmentError(
                f"the log beside {self.path} was cut short while jobs were running: it gave turn "
                f"{turn} after turn {self._last_drawn}; start the jobs again"
            )
        self._last_drawn = turn
        return turn

    def write_word(self, word: int) -> None:
        """Append a word and this process's slot to the log in one write.

        `draw_turn`, which opens the log, must have been called before.
        """
        with no_fork:  # for the same reason as in `publish`
            os.write(self.log_file.fd, bytes([word, self.slot]))

    def read_log(self, start: int, stop: int) -> bytes:
        """Return the log's records from number ``start + 1`` to number ``stop``."""
        self._open_log()
        records = os.pread(self.log_file.fd, stop - start, start)
        if len(records) != stop - start:
            raise SegmentError(
                f"the log beside {self.path} was cut short while jobs were running: expected "
                f"{stop} records; start the jobs again"
            )
        return records
