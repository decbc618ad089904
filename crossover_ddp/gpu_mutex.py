"""The GPU mutex: jobs that share devices take turns on them.

A turn belongs to a job, that is, to all its ranks, and every device sees the same order of turns;
see [Note: turn order] in `crossover_ddp._turns.rules`. `CrossoverState` creates its own mutex.
Use this class to take turns with another hook or without one, and to give the turn away during
evaluation and checkpoints.

The mutex joins the siblings and leaves them, and no failure of turns reaches the job. The turns
themselves are in `crossover_ddp._turns.turns`.
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

_HOOK_JOIN_TIMEOUT_S = 60.0  # a hook's ranks reach this point in the same exchange


class GPUMutex:
    """Take turns on a device with sibling jobs: jobs of the same user that name the same group.

    The mutex is advisory and never blocks a job forever. If a sibling dies, a rank passes over it
    at once; if a sibling stops, a rank passes over it after the sibling's lease. If turns fail on
    this rank, for any reason, the rank logs one warning and trains on without them. The results of
    training do not depend on the mutex.

    Args:
        name: the name of the siblings' group. Default: ``CROSSOVER_GROUP``, or ``default`` if that
            is not set.
        device: the shared device: a ``torch.device``, a GPU's index, or any text that names the
            device throughout the cluster. Default: the current GPU if this process uses one, else
            the CPU, whose name is ``CROSSOVER_DEVICE`` or derived from the machine's boot id.
        process_group: the ranks that make up the job. Default: the default group, or this process
            alone if there is none.
        lease: how long siblings wait for a turn of this job that does not end, in seconds or as a
            ``timedelta``. Default: four times the job's typical long turn (the fourth longest of
            the last 16), at least 5 s and at most 60 s. However long the siblings' leases are, a
            rank waits in one `acquire` for at most a quarter of its own group's timeout.
        trial: pass True for training only. If all siblings pass True, they try whether they are
            faster side by side, and if so they take no turns. With True a rank also lets the next
            job begin when it computes nothing in its turn, because it waits for data or sleeps.
            Hooks pass True for their own mutexes, and ``CROSSOVER_TRIAL=0`` overrides it. Default
            False: a turn lasts until it is given back.

    On failure: the constructor raises `SegmentError` for a foreign or malformed segment, and
    `TurnError` for the process's second mutex in the same group on the same device. Every rank
    raises alike, and nothing is held afterwards. A hook that creates its own mutex logs
    one warning instead, and trains on without turns.

    **Collective**: all ranks of the job must call the constructor and `acquire`, and no rank may be
    a thousand turns ahead of another. Nothing else is collective.

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
        """Create a hook's own mutex. If the job cannot join, it logs a warning and takes no turns.

        Raises an error only for wrong arguments (a bad ``CROSSOVER_GROUP``): the user has not asked
        for a mutex, so no other failure may stop the job. **Collective.**
        """
        mutex = cls.__new__(cls)
        try:
            mutex._join(None, device, process_group, None, trial, timeout_s=_HOOK_JOIN_TIMEOUT_S)
        except NotJoinedError as error:
            if isinstance(error.reason, ValueError | TypeError):
                raise error.reason from error.__cause__
            mutex.disabled_because = f"{type(error.reason).__name__}: {error.reason}"
            # If all ranks know the reason, rank 0 alone warns.
            level = logging.INFO if error.agreed and process_group.rank() else logging.WARNING
            logger.log(
                level,
                "cannot take turns in group %r: %s. This job trains on without them: same results, "
                "no crossover",
                mutex.name,
                error.reason,
            )
        return mutex

    # --- joining and leaving --------------------------------------------------------------------

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
        """The job's ranks in the default group; empty if this process alone is the job."""
        self.job = 0
        self.device = ""
        self.closed = False
        """Whether `close` was called, even if turns had failed before."""
        self.disabled_because: str | None = None
        """Why this rank takes no turns; None while it takes turns."""
        self._lease = Lease(lease_s)
        self._patience = Patience(patience_limit_s(group))
        self._counters = Counters()
        # None before joining, and after this rank has stopped taking turns.
        self._turns: Turns | None = None
        # Leaves the siblings when the mutex is closed or collected.
        self._finalizer: weakref.finalize[..., GPUMutex] | None = None
        if environment.is_set(environment.DISABLE):
            self.disabled_because = "CROSSOVER_DISABLE is set"
            return
        trial = trial and environment.is_set(environment.TRIAL, default="1")
        membership = join(
            self.name,
            device,
            group,
            lease_s=self._lease.seconds,
            trial=trial,
            timeout_s=timeout_s,
        )
        self.job = membership.job
        self.device = membership.segment.device
        # A weak reference: a strong one would let the thread for turns keep the mutex alive.
        mutex = weakref.ref(self)

        def failed(error: Exception) -> None:
            living = mutex()
            if living is not None:
                living._give_up(error)

        try:
            self._turns = Turns(
                membership, self._lease, self._patience, self._counters, trial, failed
            )
        except RuntimeError as error:
            leave(membership)  # the peers have joined, and must not wait for grants
            problem = TurnError(f"cannot start the thread for turns: {error}; raise ulimit -u")
            raise NotJoinedError(problem, agreed=False) from error
        self._finalizer = weakref.finalize(self, self._turns.close)
        logger.info(
            "takes turns on %s with the jobs of group %r (job %x)", self.device, self.name, self.job
        )

    def close(self) -> None:
        """Leave the siblings, which then stop waiting for this job. The job takes no more turns.

        Not collective. It is safe to call more than once. If another thread is waiting in
        `acquire`, that call returns at once, without a turn.
        """
        self.closed = True
        if self._turns is not None:
            self._disable("closed")
        if self._finalizer is not None:
            self._finalizer()

    def _give_up(self, error: Exception) -> None:
        """Stop taking turns after an error, and warn once. The job trains on."""
        if self._turns is None:
            return
        self._disable(f"{type(error).__name__}: {error}")
        logger.warning(
            "turns on %s failed (%s); this job trains on without them: same results, no crossover",
            self.device,
            self.disabled_because,
        )

    def _disable(self, reason: str) -> None:
        self._turns = None
        self.disabled_because = reason

    def __enter__(self) -> "GPUMutex":
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = self.disabled_because or ("holds a turn" if self.holding else "between turns")
        return f"GPUMutex(name={self.name!r}, device={self.device or None!r}, {state})"

    # --- turns ----------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """Whether this rank is inside a turn."""
        turns = self._turns
        return turns is not None and turns.holding

    @property
    def shared(self) -> bool:
        """Whether another job was on this rank's device when the last turn began.

        While it is False, `acquire` does not wait.
        """
        turns = self._turns
        return turns is not None and turns.shared

    @property
    def awaits_device(self) -> bool:
        """Whether the caller should wait for the device before `acquire`.

        It should if `acquire` waits for siblings, and during a trial. If the host ran ahead of its
        device in a trial, it would time a step in one mode while the device computes it in the
        other.
        """
        return self.shared or (
            self._turns is not None and self._counters.mode is Mode.TRYING_SIDE_BY_SIDE
        )

    @property
    def mode(self) -> str:
        """How this rank shares the device with its siblings.

        The value is "untried" (the rank takes turns, before the first trial), "trying turns",
        "trying side by side", "turns" or "side by side".
        """
        return self._counters.mode.name.lower().replace("_", " ")

    def request(self) -> None:
        """Draw the turn for the next `acquire` in advance, so that its number travels meanwhile.

        This call is optional. Make it at most once before each `acquire`, and on all ranks or on
        none. It never blocks and never raises.
        """
        turns = self._turns
        if turns is not None:
            turns.request()

    def acquire(
        self,
        *,
        blocking: bool = True,
        ahead: bool = False,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> bool:
        """Block until this job's turn on this device has come, and siblings' kernels are done.

        A sibling that dies is passed over at once, and any other sibling after its lease. Without
        siblings the call does not wait. If turns fail, it returns, and the job trains on without
        them. If the rank is already inside a turn, a job of one rank keeps that turn; a job of
        several ranks first gives it back.

        Args:
            blocking: whether to wait for siblings. If False and a wait would be necessary, the call
                does nothing; call it again with True to wait. Default True.
            ahead: this argument has no effect. The next version removes it.
            streams: this argument has no effect. The next version removes it.

        Returns:
            False if ``blocking`` is False and the call would have waited, else True.

        On failure: raises `UnsupportedConfigurationError` while the current stream captures a CUDA
            graph, because its replays would take no turn. Nothing has changed then. Raises nothing
            else.

        **Collective.**
        """
        if ahead or streams:
            warnings.warn(
                "acquire(ahead=…, streams=…) has no effect, since the host waits for siblings; "
                "leave both out",
                FutureWarning,
                stacklevel=2,
            )
        turns = self._turns
        return turns is None or turns.acquire(blocking=blocking)

    def release(self, *, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Give the turn back: on a CPU at once, on a GPU behind the current stream's queued work.

        It never blocks, and it does nothing outside a turn. Not collective.

        Args:
            streams: other streams on the GPU whose kernels belong to the turn, if the current
                stream does not wait for them. Default: none.

        On failure: like `acquire`.
        """
        turns = self._turns
        if turns is not None:
            turns.release(streams)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Give the turn away while the body runs evaluation, a checkpoint or other long work.

        Not collective: one rank alone may pause. At the end, a job of one rank takes its turn back.
        A job of several ranks takes its next turn at the end of its next exchange, because a turn
        belongs to all of the job's ranks or to none.
        """
        held = self.holding
        self.release()
        try:
            yield
        finally:
            turns = self._turns
            if held and turns is not None and not turns.has_peers:
                self.acquire()

    # --- figures --------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return this rank's figures: turns, seconds held and waited, hand-overs, siblings.

        "turns_pay" is the verdict of the last trial, or None before the first one. A hand-over is
        the time in seconds from a sibling's release to the beginning of this rank's turn. It is
        counted only if this rank waited for the sibling.
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
        """Return how many other jobs are on the device, or None if the segment cannot be read."""
        turns = self._turns
        try:
            return turns.count_siblings() if turns is not None else 0
        except (OSError, CrossoverError):
            return None
