"""The home of turns in shared memory: one segment per group and machine, one slot per local process. Our design.

Files, all in one directory of mode 0700 that belongs to the user (``/dev/shm/crossover_ddp-<uid>``), so nobody else can
put one there; it stays when the last file has gone:

- ``<group>@.turns``: the slots. Every field has one writer, the slot's owner. Zeros are free slots.
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
import ctypes
import errno
import functools
import hashlib
import os
import re
import secrets
import select
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from crossover_ddp._system.machine import machine
from crossover_ddp._system.shared_memory import SHARED_MEMORY, fcntl, open_directory, segment_directory
from crossover_ddp.errors import SegmentError

from .rules import Member, Vote

SLOT_COUNT = 253  # larger numbers in the log are words, see `rules`
EVENT_HANDLE_BYTES = 64
FREE, JOINED = 0, int.from_bytes(b"XDDPTU10", "little")
"""States of a slot; JOINED is another number in another layout."""
GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SLOTS, _LOG, _BELL = ".turns", ".log", ".{}.bell"
_LOCK_BASE = 1 << 32  # locked bytes lie beyond the end of the file: nobody locks contents
_RETRY_S = 1e-3
_SLOT_PATIENCE_S = 5.0  # a process that removes the files holds all slots, on a busy machine for long
_CLOSED: Final = -1  # a number that every system call refuses
_LONGEST_WAIT_S = 3600.0
_BELL_BYTES = 1 << 16  # all that a pipe holds: one read silences it

no_fork: Final = threading.RLock()
"""A fork waits for this lock. It is held only while files are opened, closed or rung, never over a wait."""
_all: "weakref.WeakSet[OpenFile]" = weakref.WeakSet()

Sibling = tuple[int, int]
"""A process: its slot, and its incarnation in that slot."""


class Slot(ctypes.Structure):
    """One local process of one job, as its siblings see it. Its owner alone writes there."""

    _fields_ = [
        ("state", ctypes.c_uint64),
        ("incarnation", ctypes.c_uint64),
        ("job", ctypes.c_uint64),
        ("device", ctypes.c_uint64),  # digest of the device's name
        ("lead", ctypes.c_uint64),  # the job's lead machine: the one whose log has its turns
        ("joined_at", ctypes.c_uint64),  # length of the log when the job joined
        ("queued", ctypes.c_uint64),  # last turn waited for, for people to see
        ("started", ctypes.c_uint64),  # last turn started
        ("returned", ctypes.c_uint64),  # last turn given back
        ("returned_at_ns", ctypes.c_uint64),  # CLOCK_MONOTONIC of this machine
        ("turns", ctypes.c_uint64),  # how many were given back, for people to see
        ("lease_s", ctypes.c_double),
        ("mode", ctypes.c_uint64),  # of the job's lead rank, see `rules`; for people to see
        ("trial", ctypes.c_uint64),  # whether the job takes part in trials; what follows is its vote
        ("tried", ctypes.c_uint64),
        ("pairs", ctypes.c_uint64),  # 0 while the vote is being written
        ("turns_s", ctypes.c_double),
        ("side_s", ctypes.c_double),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),  # for people to see; no decision rests on it
        ("event_count", ctypes.c_uint32),
        ("event", ctypes.c_ubyte * EVENT_HANDLE_BYTES),
        ("device_name", ctypes.c_char * 64),  # for people to see, perhaps cut
    ]


SLOT_BYTES = ctypes.sizeof(Slot)
FILE_BYTES = SLOT_COUNT * SLOT_BYTES


def digest(text: str) -> int:
    """Return a positive 63-bit hash of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def read_slots(fd: int, path: str) -> dict[int, Slot]:
    """Return the slots that say they are in use, whether or not their owners live."""
    raw = os.pread(fd, FILE_BYTES + 1, 0)
    if len(raw) != FILE_BYTES:
        raise SegmentError(
            f"expected slots of {FILE_BYTES} bytes, got another size at {path}: it was cut short, or is of another "
            "version of crossover_ddp; remove it while no job runs"
        )
    states = memoryview(raw).cast("Q")[:: SLOT_BYTES // 8].tolist()  # `state` is a slot's first field
    used = [index for index, state in enumerate(states) if state]
    if any(states[index] != JOINED for index in used):
        words = "it is of another version of crossover_ddp, or no file of turns; remove it while no job runs"
        raise SegmentError(f"expected slots of this version, got others at {path}: {words}")
    return {index: Slot.from_buffer_copy(raw, index * SLOT_BYTES) for index in used}


def members_of(slots: Mapping[int, Slot]) -> list[Member]:
    """Return slots as the rules of turns see them."""
    return [
        Member(
            slot=index,
            job=slot.job,
            incarnation=slot.incarnation,
            joined_at=slot.joined_at,
            started=slot.started,
            returned=slot.returned,
            lease_s=slot.lease_s,
            device=slot.device,
            trial=bool(slot.trial),
            tried=slot.tried,
            vote=Vote(slot.pairs, slot.turns_s, slot.side_s),
        )
        for index, slot in slots.items()
    ]


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

    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=close_all)


class GroupFiles(OpenFile):
    """The directory of a group's files; ``suffix`` is what follows the group in a file's name.

    On failure: `SegmentError` names the file and what to do; ``FileNotFoundError`` where a file is not there.
    """

    def __init__(self, group: str, base: str) -> None:
        super().__init__()
        self.stem = f"{group}@"  # no group's name holds the sign
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
            found = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
            words = (
                f"expected a file of turns at {self.path(suffix)}, got {found}; remove it while no job runs"
            )
            raise SegmentError(words) from error

    def no_room(self, suffix: str, error: OSError) -> SegmentError:
        """Return the error of a file that cannot be made."""
        words = (
            f"cannot make {self.path(suffix)}: {error.strerror}; free some of {os.path.dirname(self._path)}"
        )
        return SegmentError(words)

    def remove(self, suffix: str) -> None:
        """Remove a file, if it is still there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.stem}{suffix}", dir_fd=self.fd)


class Bells:
    """The bell of this process, and the bells of its siblings; see [Note: bells].

    Thread-safe, except `make_own` and `wait`: a thread of its own may publish a turn, and rings then.
    """

    def __init__(self, files: GroupFiles) -> None:
        self._files = files
        self.own = OpenFile()
        """The own bell; closed before `make_own`."""
        self._others: defaultdict[int, OpenFile] = defaultdict(OpenFile)  # by slot
        self._held: dict[int, Sibling] = {}  # by slot: whose bell is open

    def make_own(self, slot: int) -> None:
        """Make the bell of this process, which has that slot, in place of whatever has that name."""
        files, suffix = self._files, _BELL.format(slot)
        try:
            files.remove(suffix)
            os.mkfifo(f"{files.stem}{suffix}", 0o600, dir_fd=files.fd)
        except OSError as error:
            raise files.no_room(suffix, error) from error
        # Open for writing too, or its poll would report a hang-up whenever no sibling holds it.
        self.own.open(lambda: files.open_file(suffix, os.O_RDWR))

    def close(self) -> None:
        """Close all bells."""
        with no_fork:
            for each in (self.own, *self._others.values()):
                each.close()

    def is_alive(self, sibling: Sibling) -> bool:
        """Return whether the sibling's bell has a reader."""
        return self._reader(sibling) is not None

    def ring(self, sibling: Sibling) -> None:
        """Wake a sibling."""
        with no_fork:  # nor may anybody close the bell, and have its number taken, before it has rung
            fd = self._reader(sibling)
            if fd is not None:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full: it is awake; broken: dead
                    os.write(fd, b"\0")

    def _reader(self, sibling: Sibling) -> int | None:
        """Return the writing end of a sibling's bell, or None if nobody reads it: the sibling is dead."""
        slot, _ = sibling
        with no_fork:
            bell = self._others[slot]
            if self._held.get(slot) != sibling or bell.fd < 0:  # perhaps of the slot's earlier owner
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

    def wait(self, watched: Iterable[Sibling], timeout_s: float) -> None:
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
        self.incarnation = 0
        """Of this process in its slot, once it has joined."""
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
        try:
            if not os.fstat(self.slots_file.fd).st_size:
                os.posix_fallocate(self.slots_file.fd, 0, FILE_BYTES)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._remove_if_unused()
            raise self._files.no_room(_SLOTS, error) from error
        read_slots(self.slots_file.fd, self.path)

    def join(
        self,
        *,
        job: int,
        lead: int = 0,
        rank: int,
        world_size: int,
        lease_s: float,
        event: bytes = b"",
        trial: bool = False,
    ) -> None:
        """Take a free slot for this process, or the one that it has reserved.

        Args:
            job: number of the job, the same on all its ranks.
            lead: the job's lead machine.
            rank: rank within the job.
            world_size: how many ranks the job has.
            lease_s: how long siblings wait for a turn that neither ends nor dies.
            event: the handle of the device-side event of this process, if it has one.
            trial: whether the job takes part in trials, see `rules`.
        """
        self.reserve()
        self._lead = lead
        self.bells.make_own(self.slot)
        self.incarnation = secrets.randbits(62) | 1
        self._last_drawn = self.drawn()
        slot = Slot(
            state=FREE,
            incarnation=self.incarnation,
            job=job,
            device=self._device,
            lead=lead,
            device_name=self.device.encode()[: Slot.device_name.size - 1],
            joined_at=self._last_drawn,
            lease_s=lease_s,
            trial=trial,
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            event_count=len(event) // EVENT_HANDLE_BYTES,
        )
        ctypes.memmove(slot.event, event, len(event))
        os.pwrite(self.slots_file.fd, bytes(slot), self.slot * SLOT_BYTES)
        self.publish(state=JOINED)
        # A sibling that has just taken our new bell for that of the slot's dead owner would wait a whole lease.
        self.ring_others()

    def reserve(self) -> None:
        """Take a free slot without joining yet: from now on nobody removes the segment's files. May be called again."""
        deadline_s = time.monotonic() + _SLOT_PATIENCE_S
        while self.slot < 0:
            fd = self.slots_file.fd
            slot = next((slot for slot in range(SLOT_COUNT) if lock_slots(fd, slot, 1)), -1)
            if slot >= 0 and self.is_current():
                self.slot = slot
                self.publish(state=FREE)
            elif time.monotonic() > deadline_s:
                raise SegmentError(
                    f"expected a free slot, got all {SLOT_COUNT} taken in {self.path}; use another group"
                )
            else:  # the last process to leave holds all slots for a moment, and removes the file
                time.sleep(_RETRY_S if slot < 0 else 0.0)
                self._open_slots()

    def is_current(self) -> bool:
        """Return whether the open file of slots is still the one that joining processes find."""
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return named.st_ino == os.fstat(self.slots_file.fd).st_ino

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
        with contextlib.suppress(OSError):
            # Before the files are removed: of two processes that leave at once neither must take the other for a user.
            lock_slots(self.slots_file.fd, 0, SLOT_COUNT, fcntl.F_UNLCK)
            self._remove_if_unused()
        self.forget()
        if stranded:
            # Somebody has removed the slots, perhaps not the bells and the log, which only a process that holds all
            # slots may remove: so come and go once more, in the segment that others would find.
            with contextlib.suppress(OSError, SegmentError):
                TurnSegment(self.group, self.device, base=self._base).leave()

    def _remove_if_unused(self) -> None:
        """Remove all files of the group if no process has a slot; all slots are locked until they are closed."""
        if not (lock_slots(self.slots_file.fd, 0, SLOT_COUNT) and self.is_current()):
            return
        ours = re.compile(rf"{re.escape(self._files.stem)}(\.log|\.[0-9]+\.bell)")
        for name in os.listdir(self._files.fd):
            if ours.fullmatch(name):
                self._files.remove(name.removeprefix(self._files.stem))
        # The slots last: while that file is there, all its slots locked, no process can join and make the others anew.
        self._files.remove(_SLOTS)

    def forget(self) -> None:
        """Close every file and wake no sibling."""
        self.slot = -1
        for each in (self.slots_file, self.log_file, self.bells, self._files):
            each.close()

    # --- what this process publishes -----------------------------------------------------------------------

    def publish(self, **values: int | float) -> None:
        """Write eight-byte fields of the own slot, in the order given."""
        for name, value in values.items():
            raw = ctypes.c_double(value) if isinstance(value, float) else ctypes.c_uint64(value)
            os.pwrite(self.slots_file.fd, raw, self.slot * SLOT_BYTES + getattr(Slot, name).offset)

    def publish_returned(self, turn: int) -> None:
        """Publish that ``turn`` was given back, and wake the siblings."""
        self._turns += 1
        self.publish(returned_at_ns=time.monotonic_ns(), returned=turn)
        self.ring_others()
        self.publish(turns=self._turns)

    # --- who is on the device ------------------------------------------------------------------------------

    def slots(self, *, in_order: bool = False) -> dict[int, Slot]:
        """Return every slot of a living process on this device, the own one included.

        Args:
            in_order: of those with the same lead machine instead, on all devices.

        On failure: `SegmentError` if a file that siblings need was removed.
        """
        if any(file.is_removed() for file in (self.slots_file, self.log_file, self.bells.own)):
            raise SegmentError(
                f"expected {self.path} and the files beside it to stay while jobs run, got one removed under way; "
                "where logind removes shared memory at logout, loginctl enable-linger keeps it; start the job again"
            )
        return {
            index: slot
            for index, slot in read_slots(self.slots_file.fd, self.path).items()
            if (slot.lead == self._lead if in_order else slot.device == self._device)
            and (index == self.slot or self.bells.is_alive((index, slot.incarnation)))
        }

    def is_alive(self, slot: int, incarnation: int) -> bool:
        """Return whether that process lives and still has that slot."""
        found = self.slots().get(slot)
        return found is not None and found.incarnation == incarnation

    def members(self, *, in_order: bool = False) -> list[Member]:
        """Return the living processes that `slots` returns, as the rules of turns see them."""
        return members_of(self.slots(in_order=in_order))

    def ring_others(self) -> None:
        """Wake every sibling process on this device."""
        for index, slot in self.slots().items():
            if index != self.slot:
                self.bells.ring((index, slot.incarnation))

    def wait(self, watched: Iterable[Member], timeout_s: float) -> None:
        """Block until somebody rings, one of ``watched`` dies, or the time is over."""
        self.bells.wait([(member.slot, member.incarnation) for member in watched], timeout_s)

    # --- the order of turns, on the lead machine -----------------------------------------------------------

    def drawn(self) -> int:
        """Return how many turns have been drawn on all devices."""
        try:
            return os.stat(self._files.path(_LOG), follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def draw_turn(self) -> int:
        """Append the own slot to the log; its place there is the turn's number, from 1."""
        if self.log_file.fd < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self.log_file.open(lambda: self._files.open_file(_LOG, flags))
        os.write(self.log_file.fd, bytes([self.slot]))
        turn = os.lseek(self.log_file.fd, 0, os.SEEK_CUR)
        if turn <= self._last_drawn:  # siblings would take it for a turn of long ago
            words = f"expected a turn after {self._last_drawn}, got {turn} from the log beside {self.path}"
            raise SegmentError(f"{words}, which was cut short under way; start the jobs again")
        self._last_drawn = turn
        return turn

    def write_word(self, word: int) -> None:
        """Append a word and the own slot to the log, whole; after a `draw_turn`."""
        os.write(self.log_file.fd, bytes([word, self.slot]))

    def read_log(self, start: int, stop: int) -> bytes:
        """Return the records of turns ``start + 1`` to ``stop``."""
        records = os.pread(self.log_file.fd, stop - start, start)
        if len(records) != stop - start:
            raise SegmentError(f"expected {stop} turns, got the log beside {self.path} cut short under way")
        return records
