"""The home of turns in shared memory: one segment per group and machine, one slot per local process.

Files, all in one directory of mode 0700 that belongs to the user (``/dev/shm/crossover_ddp-<uid>``):

- ``<group>@.turns``: a header and the slots, see `slot_table`. Every field has one writer, the slot's owner.
- ``<group>@.log``: the order of turns on all devices, one byte (the slot) per turn, see `log_file`.
- ``<group>@.<slot>.bell``: a FIFO that the slot's owner holds open for reading, see [Note: bells] in `bells`.

A slot belongs to the process that holds the lock on its byte (an open-file-description lock, which the kernel drops
when the owner ends, in whatever way); a forked child must not keep it, see [Note: forks] in `descriptors`.
Our design.
"""

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Iterable

from crossover_ddp._system.machine import machine
from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp.errors import SegmentError

from .bells import Bells
from .log_file import LogFile
from .private_files import KEEP_FILES, PrivateFiles
from .rules import DEFAULT_LEASE_S, Member
from .slot_table import SlotTable
from .slots import EVENT_HANDLE_BYTES, FREE, GROUP_NAME, JOINED, SLOT_COUNT, Slot, digest, stem_of

_RETRY_S = 1e-3
_SLOT_PATIENCE_S = 5.0  # a process that removes the files holds all slots, on a busy machine for long
_LASTING_FIELDS = ("state", "incarnation", "job", "device", "lead", "joined_at", "lease_s", "lease_mirror_s")


class TurnSegment:
    """The local process's place among the jobs of one group on one machine.

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
        self.device = device
        self.slot = -1
        self.group = group
        """Siblings name the same one."""
        self._own: Slot | None = None
        self._files = PrivateFiles(stem_of(group), base)
        self.table = SlotTable(self._files)
        self.bells = Bells(self._files)
        self.log = LogFile(self._files)
        try:
            self.table.open()
        except BaseException:
            self.forget()
            raise

    @property
    def path(self) -> str:
        """The file that holds the slots."""
        return self.table.path

    @property
    def machine(self) -> int:
        """A number of all processes that see this segment; no other segment on any machine has it at this time."""
        found = os.fstat(self.table.fd)
        return digest(f"{machine()} {found.st_dev} {found.st_ino}")

    # --- joining and leaving -------------------------------------------------------------------------------

    def join(
        self,
        *,
        job: int,
        lead: int = 0,
        rank: int,
        world_size: int,
        lease_s: float,
        events: bytes = b"",
    ) -> None:
        """Take a free slot for this process, or the one that it has reserved.

        Args:
            job: number of the job, the same on all its ranks.
            lead: the job's lead machine.
            rank: rank within the job.
            world_size: how many ranks the job has.
            lease_s: how long siblings wait for a turn that neither ends nor dies.
            events: the device-side events of this process, as handles of 64 bytes each.
        """
        self.reserve()
        self.bells.make_own(self.slot)
        slot = Slot(
            state=FREE,
            incarnation=secrets.randbits(62) | 1,
            job=job,
            device=digest(self.device),
            lead=lead,
            device_name=self.device.encode()[: Slot.device_name.size - 1],
            joined_at=self.log.numel(),
            lease_s=lease_s,
            lease_mirror_s=-lease_s,
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            event_count=len(events) // EVENT_HANDLE_BYTES,
        )
        ctypes.memmove(slot.events, events, len(events))
        self.table.write(self.slot, slot)
        self.table.write_fields(self.slot, state=JOINED)
        slot.state = JOINED
        self._own = slot
        self.log.begin(slot.joined_at)
        # A sibling that has just taken our new bell for that of the slot's dead owner would wait a whole lease.
        self.ring_others()

    def reserve(self) -> None:
        """Take a free slot without joining yet: from now on nobody removes the segment's files. May be called again."""
        if self.slot < 0:
            self._take_slot()
            self.table.write_fields(self.slot, state=FREE)

    def _take_slot(self) -> None:
        deadline_s = time.monotonic() + _SLOT_PATIENCE_S
        while time.monotonic() < deadline_s:
            slot = self.table.lock_free_slot()
            if slot >= 0 and self.table.is_current():
                self.slot = slot
                return
            # The last process to leave holds all slots for a moment, and removes the file.
            time.sleep(_RETRY_S if slot < 0 else 0.0)
            self.table.open()
        raise SegmentError(
            f"expected a free slot, got all {SLOT_COUNT} taken in {self.path}; use another group"
        )

    def leave(self) -> None:
        """Give the slot up, wake the siblings, and remove the files if nobody is left."""
        if self.table.fd < 0:
            return
        removed = self.slot >= 0 and self._give_slot_up()
        with contextlib.suppress(OSError):
            self.table.remove_if_unused()
        self.forget()
        if removed:
            # Somebody has removed the slots, perhaps not the bells and the log. Only a process that holds all slots may
            # remove those, so come and go once more, in the segment that others would find.
            with contextlib.suppress(OSError, SegmentError):
                TurnSegment(self.group, self.device, base=self._files.base).leave()

    def _give_slot_up(self) -> bool:
        """Free the slot and its bell; return whether somebody had removed the segment under way."""
        with contextlib.suppress(OSError, SegmentError):
            self.table.write_fields(self.slot, state=FREE)
            self.ring_others()
            self.bells.remove_own(self.slot)
        removed = False
        with contextlib.suppress(OSError):
            removed = self.table.is_removed()
            # Before the files are removed: of two processes that leave at once neither must take the other for a user.
            self.table.unlock(self.slot)
        return removed

    def forget(self) -> None:
        """Close every file and wake no sibling."""
        self.slot = -1
        self.table.close()
        self.bells.close()
        self.log.close()
        self._files.close()

    # --- what this process publishes -----------------------------------------------------------------------

    def publish_started(self, turn: int) -> None:
        """Publish that this process computes in ``turn`` now."""
        self.table.write_fields(self.slot, started=turn)

    def publish_returned(self, turn: int) -> None:
        """Publish that ``turn`` was given back, and wake the siblings."""
        self.table.write_fields(self.slot, returned_at_ns=time.monotonic_ns(), returned=turn)
        self.ring_others()

    def publish_lease(self, lease_s: float) -> None:
        """Publish how long siblings should wait for this process's turns."""
        self.table.write_lease(self.slot, lease_s)
        if self._own is not None:
            self._own.lease_s, self._own.lease_mirror_s = lease_s, -lease_s

    # --- who is on the device ------------------------------------------------------------------------------

    def slots(self, *, everywhere: bool = False) -> dict[int, Slot]:
        """Return every slot of a living process on this device, or on all devices; the own one included."""
        here = digest(self.device)
        return {
            index: slot
            for index, slot in self.table.read().items()
            if (everywhere or slot.device == here)
            and (index == self.slot or self.bells.is_alive((index, slot.incarnation)))
        }

    def is_alive(self, slot: int, incarnation: int) -> bool:
        """Return whether that process lives and still has that slot."""
        found = self.slots().get(slot)
        return found is not None and found.incarnation == incarnation

    def members(self, *, everywhere: bool = False) -> list[Member]:
        """Return the living processes on this device, or on all devices, as the rules of turns see them.

        On failure: `SegmentError` if siblings can no longer see this process as it has joined, or no longer ring it.
        """
        slots = self.slots(everywhere=everywhere)
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
        """Raise if siblings overlook this process: it would compute beside them for ever, without a warning."""
        if self._own is None:
            return
        if found is None or any(getattr(found, name) != getattr(self._own, name) for name in _LASTING_FIELDS):
            raise SegmentError(f"expected the own slot of {self.path} to stay, got it overwritten under way")
        if self.bells.own_is_removed():
            raise SegmentError(
                f"expected the own bell beside {self.path} to stay, got it removed under way; {KEEP_FILES}"
            )

    # --- waking and waiting --------------------------------------------------------------------------------

    def ring_others(self) -> None:
        """Wake every sibling process on this device."""
        for index, slot in self.slots().items():
            if index != self.slot:
                self.bells.ring((index, slot.incarnation))

    def ring_self(self) -> None:
        """End the own `wait` from another thread."""
        self.bells.ring_own()

    def wait(self, watched: Iterable[Member], timeout_s: float) -> None:
        """Block until somebody rings, one of ``watched`` dies, or the time is over."""
        self.bells.wait([(member.slot, member.incarnation) for member in watched], timeout_s)

    # --- the order of turns, on the lead machine -----------------------------------------------------------

    def draw_turn(self) -> int:
        """Append the own slot to the log; its place there is the turn's number, from 1."""
        return self.log.draw(self.slot)

    def read_log(self, start: int, stop: int) -> bytes:
        """Return the records of turns ``start + 1`` to ``stop``."""
        return self.log.read(start, stop)
