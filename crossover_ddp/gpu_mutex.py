"""The GPU mutex: jobs that share devices take turns on them.

A turn belongs to a job, all its ranks; every device sees the same order of turns; see [Note: turn order] in
`crossover_ddp._turns.rules`. `CrossoverState` and the other hooks use a mutex by themselves; this class is for code
that takes turns without a hook, and for giving the turn away during evaluation and checkpoints.

What a turn is made of is in `crossover_ddp._turns.turns`. The mutex joins and leaves, and keeps every failure of turns
away from the job.
"""

import contextlib
import datetime
import logging
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from crossover_ddp._system import environment
from crossover_ddp._turns.channel import patience_limit_s
from crossover_ddp._turns.joining import NotJoinedError, join, leave
from crossover_ddp._turns.rules import Lease, Mode, Patience
from crossover_ddp._turns.turns import Counters, Turns
from crossover_ddp.errors import CrossoverError, TurnError

logger = logging.getLogger(__name__)

_HOOK_JOIN_TIMEOUT_S = 60.0  # the ranks come from the same exchange


class GPUMutex:
    """Take turns on a device with sibling jobs: the jobs of one user that name the same group.

    The mutex is advisory and never stands in a job's way: it passes over a sibling that dies at once, and a sibling
    that is stopped after its lease. If turns fail on this rank, for any reason, the rank trains on without them, with
    one warning. The results of training do not depend on the mutex.

    Args:
        name: group of siblings; default ``CROSSOVER_GROUP``, else ``default``.
        device: what is shared: a ``torch.device``, a GPU's index, or any text that names a device on the whole
            cluster. Default: the current GPU if this process uses one, else the CPU, whose name
            is ``CROSSOVER_DEVICE`` or made from the machine's boot id.
        process_group: the job; default the default group, or this process alone where there is none.
        lease: seconds that siblings wait for a turn of this job that does not end, or a ``timedelta``. Default
            four of the job's long recent turns (three outliers do not count), at least 5 s and at most 60 s. However
            long siblings' leases are, a rank waits in one `acquire` for at most a quarter of its own group's timeout.
        trial: for training. The siblings try, if all of them agree, whether they are faster side by side, and take no
            turns then; and a rank that computes nothing in its turn (it waits for data, sleeps) lets the next job
            begin. Hooks' own mutexes do so, ``CROSSOVER_TRIAL=0`` forbids it. Default: a turn lasts until it is
            given back.

    On failure: `SegmentError` for a foreign or malformed segment, `TurnError` for a second mutex of the process in the
    group, on every rank alike; nothing is held then. A hook that makes its own mutex trains on without turns instead,
    with one warning.

    **Collective**: the constructor and `acquire` must be called by all ranks of the job, none a thousand turns ahead of
    another; nothing else.

    Example::

        mutex = GPUMutex()
        mutex.acquire()
        compute()
        mutex.release()
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        device: torch.device | str | int | None = None,
        process_group: ProcessGroup | None = None,
        lease: float | datetime.timedelta | None = None,
        trial: bool = False,
    ) -> None:
        if isinstance(lease, datetime.timedelta):
            lease = lease.total_seconds()
        if lease is not None and not lease > 0:
            raise ValueError(
                f"expected a lease > 0 seconds, got lease={lease}; leave it out for the default"
            )
        try:
            self._join(name, device, process_group, None if lease is None else float(lease), trial)
        except NotJoinedError as error:
            raise error.reason from error.__cause__

    @classmethod
    def for_hook(
        cls, device: torch.device | None, process_group: ProcessGroup, trial: bool
    ) -> "GPUMutex":
        """Return the mutex of a hook's own: where the job cannot join it takes no turns, with one warning.

        Raises wrong arguments only (a bad ``CROSSOVER_GROUP``): the user has not asked for a mutex, so it must not stop
        the job.
        **Collective.**
        """
        mutex = cls.__new__(cls)
        try:
            mutex._join(None, device, process_group, None, trial, timeout_s=_HOOK_JOIN_TIMEOUT_S)
        except NotJoinedError as error:
            if isinstance(error.reason, ValueError | TypeError):
                raise error.reason from error.__cause__
            mutex.disabled_because = f"{type(error.reason).__name__}: {error.reason}"
            logger.log(  # if all ranks know the reason, rank 0 alone warns
                logging.INFO if error.agreed and process_group.rank() else logging.WARNING,
                "cannot take turns in group %r: %s. This job trains on without them: same results, no crossover",
                mutex.name,
                error.reason,
            )
        return mutex

    # --- joining and leaving -------------------------------------------------------------------------------

    def _join(
        self,
        name: str | None,
        device: torch.device | str | int | None,
        process_group: ProcessGroup | None,
        lease_s: float | None,
        trial: bool,
        timeout_s: float | None = None,
    ) -> None:
        self.name = name if name is not None else environment.sibling_group()
        # Without a default group this process is the job.
        group = (process_group or dist.group.WORLD) if dist.is_initialized() else None
        self.ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        """The job, as ranks of the default group; empty where there was no group: this process alone."""
        self.job = 0
        self.device = ""
        self.closed = False
        """Whether `close` was called, whether or not turns had failed before."""
        self.disabled_because = (
            "CROSSOVER_DISABLE is set" if environment.is_set(environment.DISABLE) else None
        )
        self._lease = Lease(lease_s)
        self._patience = Patience(patience_limit_s(group))
        self._counters = Counters()
        self._turns: Turns | None = None  # None before joining and after leaving
        self._finalizer: weakref.finalize[..., GPUMutex] | None = None
        if self.disabled_because is not None:
            return
        trial = trial and environment.is_set(environment.TRIAL, default="1")
        lease_s = self._lease.seconds
        membership = join(
            self.name, device, group, lease_s=lease_s, trial=trial, timeout_s=timeout_s
        )
        self.job, self.device = membership.job, membership.segment.device
        mutex = weakref.ref(self)  # or its own thread would keep the mutex alive

        def failed(error: Exception) -> None:
            if (living := mutex()) is not None:
                living._give_up(error)

        try:
            self._turns = Turns(
                membership, self._lease, self._patience, self._counters, trial, failed
            )
        except (
            RuntimeError
        ) as error:  # peers, which have joined, hear at once that no grants will come
            leave(membership)
            problem = TurnError(f"expected a thread for turns, got: {error}; raise ulimit -u")
            raise NotJoinedError(problem, agreed=False) from error
        self._finalizer = weakref.finalize(self, self._turns.close)
        logger.info(
            "takes turns on %s with the jobs of group %r (job %x)", self.device, self.name, self.job
        )

    def close(self) -> None:
        """Leave for good: siblings no longer wait for this job. Not collective; may be called twice.

        A turn that another thread waits for ends at once, without the turn.
        """
        self.closed = True
        if self._turns is not None:
            self._turns, self.disabled_because = None, "closed"
        if self._finalizer is not None:
            self._finalizer()

    def _give_up(self, error: Exception) -> None:
        """Train on without turns, which have failed."""
        if self._turns is None:
            return
        self._turns, self.disabled_because = None, f"{type(error).__name__}: {error}"
        logger.warning(
            "turns on %s failed (%s); this job trains on without them: same results, no crossover",
            self.device,
            self.disabled_because,
        )

    def __enter__(self) -> "GPUMutex":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = self.disabled_because or ("holds a turn" if self.holding else "between turns")
        return f"GPUMutex(name={self.name!r}, device={self.device or None!r}, {state})"

    # --- turns ---------------------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether this rank is inside a turn."""
        turns = self._turns
        return turns is not None and turns.holding

    @property
    def shared(self) -> bool:
        """Whether a sibling was on this rank's device when the last turn began.

        While it is False `acquire` does not wait.
        """
        turns = self._turns
        return turns is not None and turns.shared

    @property
    def awaits_device(self) -> bool:
        """Whether a caller should wait for the device before `acquire`: where that waits, or both ways are timed.

        A host that runs ahead of its device would count steps of one way that the device does in the other.
        """
        return self.shared or (
            self._turns is not None and self._counters.mode is Mode.TRYING_SIDE_BY_SIDE
        )

    @property
    def mode(self) -> str:
        """How this rank computes beside its siblings: "untried" (in turns), "turns", "side by side", "trying …"."""
        return self._counters.mode.name.lower().replace("_", " ")

    def request(self) -> None:
        """Draw the turn of the next `acquire` before it is needed, so that its number travels meanwhile.

        Optional, once for an `acquire`, and like it called by all ranks. Never blocks, never raises.
        """
        if (turns := self._turns) is not None:
            turns.request()

    def acquire(
        self,
        *,
        blocking: bool = True,
        ahead: bool = False,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> bool:
        """Block until this job's turn has come on this device: siblings' kernels are done then.

        Siblings that die are passed over at once, others after their lease; without siblings it does not wait. If
        turns fail the job goes on without them. Inside a turn a job of one rank goes on at once, one of several ranks
        gives it back first.

        Args:
            blocking: with False do nothing if this would wait for a sibling. Call it again, with True, then.
            ahead: without effect, as ``streams``; both go with the next version.
            streams: without effect.

        Returns whether it is done: False only where it would have waited.

        On failure: `UnsupportedConfigurationError` while the current stream captures a CUDA graph, whose replays
            would take no turn; nothing has changed then. Raises nothing else.
        """
        if ahead or streams:
            words = "acquire(ahead=…, streams=…) has no effect: the host waits, and alone nobody does; leave it out"
            warnings.warn(words, FutureWarning, stacklevel=2)
        turns = self._turns
        return turns is None or turns.acquire(blocking=blocking)

    def release(self, *, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Give the turn back once the current stream has finished what it has queued; on a CPU at once.

        Never blocks; does nothing outside a turn. Not collective.

        Args:
            streams: further streams of the GPU whose kernels belong to the turn and are not awaited by the current
                stream; default the current one alone.

        On failure: as `acquire`.
        """
        if (turns := self._turns) is not None:
            turns.release(streams)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Give the turn away while the body runs: evaluation, a checkpoint, anything long that is not training.

        Not collective: one rank alone may pause. A job of one rank takes its turn back at the end; one of several
        ranks takes it with the end of its next exchange, since a turn belongs to all its ranks or to none.
        """
        held = self.holding
        self.release()
        try:
            yield
        finally:
            turns = self._turns
            if held and turns is not None and not turns.has_peers:
                self.acquire()

    # --- figures -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters of this rank: turns, seconds held and waited, hand-over latencies, siblings.

        "turns_pay" is the verdict of the last trial, None without one.
        A hand-over lasts from a sibling's release to the begin of the turn here, if this rank waited for it; seconds.
        """
        turns = self._turns
        return {
            "group": self.name,
            "device": self.device or None,
            "job": f"{self.job:x}",
            **self._counters.summary(),
            "holding": self.holding,
            "siblings": self._count_siblings(),
            "lease_s": self._lease.seconds,
            "leases_expired": self._patience.expired_count,
            "ordered_by": "host" if turns is not None else None,
            "disabled_because": self.disabled_because,
        }

    def _count_siblings(self) -> int | None:
        """Return how many other jobs are on the device; None if that cannot be seen."""
        turns = self._turns
        try:
            return turns.count_siblings() if turns is not None else 0
        except (OSError, CrossoverError):
            return None
