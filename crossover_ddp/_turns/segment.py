"""The home of turns in shared memory: one segment per group and device, one slot per local process.

Files, all in one directory of mode 0700 that belongs to the user (``/dev/shm/crossover_ddp-<uid>``):

- ``<group>-<device>.turns``: a header and the slots. Every field has one writer, the slot's owner.
- ``<group>-<device>.log``: the order of turns, one byte (the slot) per turn; appended to on lead devices only.
- ``<group>-<device>.<slot>.bell``: a FIFO that the slot's owner holds open for reading.
- ``<group>-<device>.<token>.word``: a page that a process's device writes; see `semaphore_order`.

[Note: bells]
A bell does two things that a futex cannot do together: a byte written to it wakes the owner, and whoever
holds it open for writing gets POLLERR from the kernel the moment its last reader is gone, so that one ``poll``
waits for "given back", "died" and the lease at once. No thread watches, nothing polls, no process id
is interpreted: it works between containers that share /dev/shm.

[Note: plain reads and writes]
Slots are read with ``pread`` and written with ``pwrite``, not mapped: somebody who truncates the file under
way costs an error that is caught (the job goes on without turns), where a mapping would cost a SIGBUS. Aligned
eight-byte fields are copied by the kernel in one piece on the machines that run torch.

A slot belongs to whoever holds the lock on its byte (an open-file-description lock, which the kernel drops
when the owner ends, in whatever way). A forked child would inherit lock and bell, so it closes them; for it to know
them all, no thread may fork between the opening of a descriptor and its being noted: see `_forks`.
Our design.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import secrets
import select
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from crossover_ddp._system.shared_memory import (
    SHARED_MEMORY,
    check_owned,
    open_directory,
    segment_directory,
)
from crossover_ddp.errors import SegmentError

from .rules import DEFAULT_LEASE_S, Member
from .slots import (
    EVENT_HANDLE_BYTES,
    FILE_BYTES,
    FREE,
    GROUP_NAME,
    HEADER_BYTES,
    JOINED,
    LAYOUT,
    MAGIC,
    SLOT_BYTES,
    SLOT_COUNT,
    Header,
    Slot,
    device_field,
    digest,
    is_named,
    lock_slots,
    read_header,
    remove_unused,
)

logger = logging.getLogger(__name__)

_OPEN_ATTEMPTS = 100
_RETRY_S = 1e-3
_SLOT_PATIENCE_S = (
    5.0  # whoever leaves holds all slots while it removes the files, on a busy machine for long
)
_LONGEST_WAIT_S = 3600.0
_LASTING_FIELDS = ("state", "incarnation", "job", "devices", "joined_at", "lease_s", "lease_mirror_s")
_BELL_BYTES = 1 << 16  # all that a pipe holds: one read silences it


_open_segments: "weakref.WeakSet[TurnSegment]" = weakref.WeakSet()
# Held while a descriptor is opened and noted, or closed and forgotten, and by whoever forks; never over a wait.
_forks = threading.RLock()
_fork_guarded = False


def _guard_forks() -> None:
    global _fork_guarded
    if not _fork_guarded:
        os.register_at_fork(
            before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_forget_in_child
        )
        _fork_guarded = True


def _forget_in_child() -> None:
    for segment in list(_open_segments):
        segment.forget()
    _forks.release()


def _open_directory(base: str) -> tuple[int, str]:
    """Open the directory, made if it is missing."""
    path = segment_directory(base)
    if os.path.isdir(base):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SegmentError(f"cannot make {path}: {error.strerror}; make {base} writable") from error
    return open_directory(base), path


class TurnSegment:
    """The local process's place among the jobs of one group on one device.

    Args:
        group: siblings name the same group; letters, digits, ``.``, ``_``, ``-``.
        device: any text that names the device on the whole cluster (a GPU's UUID).
        base: where shared memory is mounted.

    On failure: `SegmentError` names the file and what to do; nothing of another user's is touched.
    Not thread-safe, except `ring_self` and `publish_returned`.
    """

    def __init__(self, group: str, device: str, *, base: str = SHARED_MEMORY) -> None:
        if not GROUP_NAME.fullmatch(group):
            raise ValueError(
                f"expected a group name of 1-64 letters, digits, '.', '_', '-', got name={group!r}"
            )
        _guard_forks()
        self.device = device
        self.slot = -1
        self._group = group
        self._stem = f"{group}-{digest(device):016x}"
        self._base = base
        self._directory = ""
        self._own: Slot | None = None
        self._drawn_numel = 0
        self._fd = self._log_fd = self._bell_fd = self._directory_fd = -1
        self._bells: dict[tuple[int, int], int] = {}
        self._bells_lock = threading.RLock()  # a turn may be given back by a thread of its own
        with _forks:
            _open_segments.add(self)
        try:
            self._open()
        except BaseException:
            self.forget()
            raise

    @property
    def path(self) -> str:
        """The file that holds the slots."""
        return os.path.join(self._directory, f"{self._stem}.turns")

    # --- opening and leaving -------------------------------------------------------------------------------

    def _open_private(self, suffix: str, flags: int, *, is_kind: Callable[[int], bool] = stat.S_ISREG) -> int:
        name = f"{self._stem}{suffix}"
        path = os.path.join(self._directory, name)
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._directory_fd)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):  # no file; a bell that nobody reads
                raise
            found = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise SegmentError(
                f"expected a file of user {os.geteuid()}, got {found} at {path}; remove it while no job runs"
            ) from error
        try:
            check_owned(fd, path)
            if not is_kind(os.fstat(fd).st_mode):
                raise SegmentError(
                    f"expected another kind of file at {path}, got mode {os.fstat(fd).st_mode:o}; "
                    "remove it while no job runs"
                )
        except SegmentError:
            os.close(fd)
            raise
        return fd

    def _open(self) -> None:
        for _ in range(_OPEN_ATTEMPTS):
            # The last one to leave takes the file and the directory with it, at any moment of this.
            with contextlib.suppress(FileNotFoundError):
                self._enter_directory()
                with _forks:
                    try:
                        self._fd = self._open_private(".turns", os.O_RDWR)
                    except FileNotFoundError:
                        self._create()
                        self._fd = self._open_private(".turns", os.O_RDWR)
                self._check_contents()
                return
        raise SegmentError(f"expected {self.path} to stay after it was made, got it removed again and again")

    def _enter_directory(self) -> None:
        if self._directory_fd >= 0 and os.fstat(self._directory_fd).st_nlink:
            return
        with _forks:
            if self._directory_fd >= 0:
                os.close(self._directory_fd)
                self._directory_fd = -1
            self._directory_fd, self._directory = _open_directory(self._base)

    def _create(self) -> None:
        """Make the whole file aside and link it in, so that nobody ever sees half of one."""
        suffix = f".{secrets.token_hex(8)}.new"
        aside = f"{self._stem}{suffix}"
        fd = self._open_private(suffix, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            header = Header(MAGIC, LAYOUT, SLOT_COUNT, device_field(self.device))
            os.pwrite(fd, bytes(header), 0)
            with contextlib.suppress(FileExistsError):
                os.link(
                    aside, f"{self._stem}.turns", src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd
                )
        except FileNotFoundError:
            raise  # taken for a leftover by the last one to leave
        except OSError as error:
            raise SegmentError(
                f"cannot make {self.path}: {error.strerror}; free some of {self._base}"
            ) from error
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=self._directory_fd)

    def _check_contents(self) -> None:
        header = read_header(self._fd, self.path)
        if header.device != device_field(self.device):
            raise SegmentError(
                f"expected layout {LAYOUT} for device {self.device!r}, got something else at {self.path}; "
                "remove it while no job runs"
            )

    def _is_current(self) -> bool:
        return is_named(self._fd, self._stem, self._directory_fd)

    def _lock(self, start: int, length: int, kind: int = fcntl.F_WRLCK) -> bool:
        return lock_slots(self._fd, start, length, kind)

    def join(
        self,
        *,
        job: int,
        devices: int,
        rank: int,
        world_size: int,
        lease_s: float,
        events: bytes = b"",
        waits_on_host: bool = False,
    ) -> None:
        """Take a free slot for this process, or the one that it has reserved.

        Args:
            job: number of the job, the same on all its ranks.
            devices: digest of the job's set of devices.
            rank: rank within the job.
            world_size: how many ranks the job has.
            lease_s: how long siblings wait for a turn that neither ends nor dies.
            events: the device-side events of this process, as handles of 64 bytes each.
            waits_on_host: siblings are to tell their turns only when the device has done them.
        """
        self.reserve()
        self._make_bell()
        slot = Slot(
            state=FREE,
            incarnation=secrets.randbits(62) | 1,
            job=job,
            devices=devices,
            joined_at=self.log_numel(),
            lease_s=lease_s,
            lease_mirror_s=-lease_s,
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            event_count=len(events) // EVENT_HANDLE_BYTES,
            waits_on_host=waits_on_host,
        )
        ctypes.memmove(slot.events, events, len(events))
        os.pwrite(self._fd, bytes(slot), self._offset(self.slot))
        self._publish(state=JOINED)
        slot.state = JOINED
        self._own, self._drawn_numel = slot, slot.joined_at
        # Whoever has just found the slot's dead owner with our new bell would wait for it a whole lease.
        self.ring_others()

    def reserve(self) -> None:
        """Take a free slot without joining yet: from now on nobody removes the segment's files. May be called again."""
        if self.slot < 0:
            self._take_slot()
            self._publish(state=FREE)

    def _take_slot(self) -> None:
        deadline_s = time.monotonic() + _SLOT_PATIENCE_S
        while time.monotonic() < deadline_s:
            self.slot = next((index for index in range(SLOT_COUNT) if self._lock(index, 1)), -1)
            if self.slot >= 0 and self._is_current():
                return
            # The last one to leave holds all slots for a moment and takes the file with it.
            time.sleep(_RETRY_S if self.slot < 0 else 0.0)
            with _forks:
                self.slot, stale = -1, self._fd
                self._fd = -1
                os.close(stale)
            self._open()
        raise SegmentError(
            f"expected a free slot, got all {SLOT_COUNT} taken in {self.path}; use another group"
        )

    def _make_bell(self) -> None:
        name = self._bell_name(self.slot)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory_fd)
            os.mkfifo(name, 0o600, dir_fd=self._directory_fd)
        except OSError as error:
            path = os.path.join(self._directory, name)
            raise SegmentError(
                f"cannot make {path}: {error.strerror}; remove it or free some of {self._base}"
            ) from error
        # Open for writing too, or its poll would report a hang-up whenever no sibling holds it.
        with _forks:
            self._bell_fd = self._open_private(f".{self.slot}.bell", os.O_RDWR, is_kind=stat.S_ISFIFO)

    def leave(self) -> None:
        """Give the slot up, wake whoever waits for it, and remove the files if nobody is left."""
        if self._fd < 0:
            return
        if self.slot >= 0:
            with contextlib.suppress(OSError, SegmentError):
                self._publish(state=FREE)
                self.ring_others()
                os.unlink(self._bell_name(self.slot), dir_fd=self._directory_fd)
        removed = False
        with contextlib.suppress(OSError):
            removed = self.slot >= 0 and not os.fstat(self._fd).st_nlink
            if self.slot >= 0:  # first: two that leave at once must not each take the other for one who stays
                self._lock(self.slot, 1, fcntl.F_UNLCK)
            remove_unused(self._fd, self._stem, self._directory_fd, self._directory)
        self.forget()
        if removed:
            # Somebody has removed the slots, perhaps not the bells and the log. To remove is for whoever holds
            # all slots, so come and go once more, in the segment that others would find.
            with contextlib.suppress(OSError, SegmentError):
                TurnSegment(self._group, self.device, base=self._base).leave()

    def forget(self) -> None:
        """Close every file without a word to anybody (in a forked child the parent's slot stays as it is)."""
        with _forks:
            fds = [self._fd, self._log_fd, self._bell_fd, self._directory_fd, *self._bells.values()]
            self._fd = self._log_fd = self._bell_fd = self._directory_fd = -1
            self._bells = {}
            self.slot = -1
            for fd in fds:
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            _open_segments.discard(self)

    # --- files of the processes' own, beside the segment -----------------------------------------------------

    def make_private_file(self, suffix: str) -> int:
        """Make a file of this process's own, which goes with the segment's at the latest; return its descriptor."""
        return self._open_private(suffix, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_private_file(self, suffix: str) -> int:
        """Open a sibling's file; return its descriptor."""
        return self._open_private(suffix, os.O_RDWR)

    def remove_private_file(self, suffix: str) -> None:
        """Remove a file of this process's own if it is still there."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self._stem}{suffix}", dir_fd=self._directory_fd)

    # --- slots ---------------------------------------------------------------------------------------------

    @staticmethod
    def _offset(slot: int) -> int:
        return HEADER_BYTES + slot * SLOT_BYTES

    def _publish(self, **fields: int) -> None:
        """Write eight-byte fields of the own slot, in the order given."""
        for name, value in fields.items():
            offset = self._offset(self.slot) + getattr(Slot, name).offset
            os.pwrite(self._fd, value.to_bytes(8, sys.byteorder), offset)

    def publish_started(self, turn: int) -> None:
        """Tell that the own process computes in ``turn`` now."""
        self._publish(started=turn)

    def publish_returned(self, turn: int) -> None:
        """Give ``turn`` back, and wake whoever waits."""
        self._publish(returned_at_ns=time.monotonic_ns(), returned=turn)
        self.ring_others()

    def publish_waits_on_host(self) -> None:
        """Ask siblings to tell their turns only when the device has done them."""
        self._publish(waits_on_host=1)

    def publish_lease(self, lease_s: float) -> None:
        """Tell how long siblings should wait for the own turns."""
        offset = self._offset(self.slot) + Slot.lease_s.offset
        os.pwrite(self._fd, struct.pack("=dd", lease_s, -lease_s), offset)
        if self._own is not None:
            self._own.lease_s, self._own.lease_mirror_s = lease_s, -lease_s

    def slots(self) -> dict[int, Slot]:
        """Return every slot that is in use by a living process, the own one included."""
        if not os.fstat(self._fd).st_nlink:
            raise SegmentError(f"expected {self.path} to stay while jobs run, got it removed under way")
        raw = os.pread(self._fd, FILE_BYTES - HEADER_BYTES, HEADER_BYTES)
        if len(raw) != FILE_BYTES - HEADER_BYTES:
            raise SegmentError(f"expected {FILE_BYTES} bytes, got {self.path} cut short under way")
        states = memoryview(raw).cast("Q")[:: SLOT_BYTES // 8].tolist()  # `state` is a slot's first field
        found = {
            index: Slot.from_buffer_copy(raw, index * SLOT_BYTES)
            for index, state in enumerate(states)
            if state == JOINED
        }
        return {
            index: slot
            for index, slot in found.items()
            if index == self.slot or self._bell(index, slot.incarnation) is not None
        }

    def is_alive(self, slot: int, incarnation: int) -> bool:
        """Tell whether that process lives and still has that slot."""
        found = self.slots().get(slot)
        return found is not None and found.incarnation == incarnation

    def members(self) -> list[Member]:
        """Return the living processes on this device as the rules of turns see them.

        On failure: `SegmentError` if siblings cannot see or ring the own process any more as it has joined.
        """
        slots = self.slots()
        self._check_own(slots.get(self.slot))
        return [
            Member(
                index,
                slot.job,
                slot.incarnation,
                slot.joined_at,
                slot.started,
                slot.returned,
                slot.lease() or DEFAULT_LEASE_S,
            )
            for index, slot in slots.items()
        ]

    def _check_own(self, found: Slot | None) -> None:
        """Whoever is overlooked by its siblings would compute beside them for ever, and nobody would be told."""
        if self._own is None:
            return
        if found is None or any(getattr(found, name) != getattr(self._own, name) for name in _LASTING_FIELDS):
            raise SegmentError(f"expected the own slot of {self.path} to stay, got it overwritten under way")
        if not os.fstat(self._bell_fd).st_nlink:
            raise SegmentError(f"expected the own bell beside {self.path} to stay, got it removed under way")

    # --- bells: see [Note: bells] --------------------------------------------------------------------------

    def _bell_name(self, slot: int) -> str:
        return f"{self._stem}.{slot}.bell"

    def _bell(self, slot: int, incarnation: int) -> int | None:
        """Return the writing end of a sibling's bell, or None if the sibling is dead."""
        key = (slot, incarnation)
        with self._bells_lock:
            if key not in self._bells and not self._hold_bell(slot, incarnation):
                return None
            fd = self._bells[key]
            watch = select.poll()
            watch.register(fd, 0)
            if watch.poll(0):
                with _forks:
                    os.close(self._bells.pop(key))
                return None
            return fd

    def _hold_bell(self, slot: int, incarnation: int) -> bool:
        """Open a sibling's bell in place of its slot's earlier owner's; tell whether anybody reads it."""
        with _forks:
            for stale in [known for known in self._bells if known[0] == slot]:
                os.close(self._bells.pop(stale))
            try:
                fd = self._open_private(f".{slot}.bell", os.O_WRONLY, is_kind=stat.S_ISFIFO)
            except OSError:  # no reader, or no bell: its owner has ended
                return False
            self._bells[slot, incarnation] = fd
            return True

    def ring_others(self) -> None:
        """Wake every sibling process on this device."""
        for index, slot in self.slots().items():
            with self._bells_lock:  # nobody closes the bell, and has its number taken, before it has rung
                fd = None if index == self.slot else self._bell(index, slot.incarnation)
                if fd is not None:
                    with contextlib.suppress(
                        BlockingIOError, BrokenPipeError
                    ):  # full: it is awake; broken: dead
                        os.write(fd, b"\0")

    def ring_self(self) -> None:
        """End the own `wait` from another thread."""
        if self._bell_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._bell_fd, b"\0")

    def wait(self, watched: Iterable[Member], timeout_s: float) -> None:
        """Block until somebody rings, one of ``watched`` dies, or the time is over."""
        watch = select.poll()
        watch.register(self._bell_fd, select.POLLIN)
        for member in watched:
            fd = self._bell(member.slot, member.incarnation)
            if fd is None:
                return
            watch.register(fd, 0)
        # The kernel takes no more than 24 days; whoever calls us looks again anyway.
        watch.poll(min(max(0.0, timeout_s), _LONGEST_WAIT_S) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell_fd, _BELL_BYTES)

    # --- the lead device's log: see [Note: turn order] in _turns -------------------------------------------

    def log_numel(self) -> int:
        """Return how many turns have been drawn on this device."""
        try:
            return os.stat(f"{self._stem}.log", dir_fd=self._directory_fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def draw_turn(self) -> int:
        """Append the own slot to the log; its place there is the turn's number, from 1."""
        if self._log_fd < 0:
            with _forks:
                self._log_fd = self._open_private(".log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        if not os.fstat(self._log_fd).st_nlink:
            raise SegmentError(f"expected the log beside {self.path} to stay, got it removed under way")
        os.write(self._log_fd, bytes([self.slot]))
        turn = os.lseek(self._log_fd, 0, os.SEEK_CUR)
        if turn <= self._drawn_numel:  # siblings would take it for a turn of long ago
            raise SegmentError(
                f"expected a turn after {self._drawn_numel}, got the log beside {self.path} cut short under way"
            )
        self._drawn_numel = turn
        return turn

    def read_log(self, start: int, stop: int) -> bytes:
        """Return the records of turns ``start + 1`` to ``stop``."""
        records = os.pread(self._log_fd, stop - start, start)
        if len(records) != stop - start:
            raise SegmentError(f"expected {stop} turns, got the log beside {self.path} cut short under way")
        return records
