"""The replicas of ``ElasticState``, one class for each mode."""

import abc
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from crossover_ddp._ddp.checks import check_keys
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import all_finite
from crossover_ddp.errors import UnsupportedConfigurationError

from .centre import ROUNDS_KEPT, AveragingThread, Centre, ElasticRound, Pull, moving_rate_for
from .replica import FlatBlock, FlatEntry, PendingSlice, Replica, from_first_rank, wide_dtype
from .shared_centre import pull_shared, share

logger = logging.getLogger(__name__)

_HOST_MEMORY: Final = torch.device("cpu")


class ElasticReplica(Replica):
    """A replica that is pulled towards a centre. Each subclass keeps the centre elsewhere."""

    mode: ClassVar[str]

    def __init__(self, sync_every: int, moving_rate: float | None, pull: Pull) -> None:
        self._every = sync_every
        self._given_rate = moving_rate
        # The coroutine that carries one pull of a block.
        self._pull = pull
        self.settings = {"mode": self.mode, "sync_every": sync_every, "moving_rate": moving_rate}
        # This rank's statistics. Each mode adds its own.
        self._counts = {"pulls": 0}
        self.log: deque[ElasticRound] = deque(maxlen=ROUNDS_KEPT)

    def _is_due(self) -> bool:
        return self.acted % self._every == 0

    def _initial_centre(
        self, exchange: Exchange, device: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Return the centre's initial values, one vector per block. **Collective**.

        They come from the loaded checkpoint if there is one, otherwise from rank 0's replica. Rank
        0's is used because each rank has run a forward, so buffers may differ between ranks.

        Args:
            exchange: connects the ranks.
            device: the device of the returned values. Default: the model's device.
        """
        initial = []
        for block in self.blocks:
            values = block.copy(block.whole, wide_dtype(block.dtype), device)
            if self.loaded is not None:
                values.copy_(block.unnamed(self.loaded["centre"], values.dtype))
            initial.append(values)
        return [from_first_rank(exchange, values) for values in initial]

    def state_dict(self) -> dict[str, Any]:
        centre: dict[str, torch.Tensor] = {}
        for block, whole in zip(self.blocks, self._gathered_centre(), strict=True):
            centre.update(block.named(whole))
        return {"centre": centre}

    @abc.abstractmethod
    def _gathered_centre(self) -> Sequence[torch.Tensor]:
        """Return the whole centre, one vector per block. **Collective**."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, {"centre"}, "the state of an ElasticState")
        self.loaded = state

    def stats(self) -> dict[str, Any]:
        nbytes = sum(block.numel * wide_dtype(block.dtype).itemsize for block in self.blocks)
        return {
            **self._counts,
            "exchanged_bytes": self._counts["pulls"] * nbytes,
            "rounds": len(self.log),
        }


class SyncElasticReplica(ElasticReplica):
    """Synchronous EASGD: every ``sync_every`` steps, all ranks pull and wait for the result."""

    mode = "sync"

    def begin(self) -> None:
        rate = moving_rate_for(self.exchange.size, self._given_rate)
        initial = self._initial_centre(self.exchange)
        self._centre = Centre(self.exchange, initial, rate, self.meter, self._pull)

    def act(self) -> None:
        if not self._is_due():
            return
        ranks = self.exchange.size
        slices = []
        for number, block in enumerate(self.blocks):
            values = block.copy(block.whole, wide_dtype(block.dtype))
            trip = self._centre.begin_pull(number, values, [True] * ranks)
            slices.append(PendingSlice(block, block.whole, values, trip, adds=True))
        self.apply(slices)
        self.log.append(ElasticRound(self._counts["pulls"], (self.acted,) * ranks, self.acted))
        self._counts["pulls"] += 1

    def close(self) -> None:
        """Do nothing: this replica has no thread to stop."""

    def _gathered_centre(self) -> Sequence[torch.Tensor]:
        return self._centre.gathered()


class BackgroundElasticReplica(ElasticReplica):
    """A replica whose exchanges run in the rounds of a background thread; see [Note: rounds]."""

    steps_together = False

    def __init__(self, sync_every: int, moving_rate: float | None, pull: Pull) -> None:
        super().__init__(sync_every, moving_rate, pull)
        self._counts |= {"offers": 0, "not_finite": 0}
        # The blocks that rounds pull: the model's blocks, or those of a host's centre.
        self._offered_blocks: Sequence[FlatBlock] = ()
        # Whether an offer is due that could not be made yet.
        self._owes_offer = False
        # A process group that this replica created and must destroy.
        self._own_group: dist.ProcessGroup | None = None

    def _host_group(self) -> dist.ProcessGroup:
        """Return a group of the model's ranks that can exchange host memory by messages.

        **Collective**.
        """
        if "cpu:gloo" in str(dist.get_backend_config(self.group)):
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        self._own_group = group
        return group

    def _start_rounds(
        self, group: dist.ProcessGroup, initial: Sequence[torch.Tensor], rate: float
    ) -> None:
        self._thread = AveragingThread(group, initial, rate, self.meter, self._pull)
        self.log = self._thread.log

    def _collect_and_offer(self) -> None:
        """Apply the pull that has arrived, if any, and make an offer if one is due."""
        self._counts["pulls"] += self._thread.collect(self.acted, self._add_pulls)
        self._owes_offer = self._owes_offer or self._is_due()
        if self._owes_offer and self._thread.offer(self.acted, self._fill):
            self._owes_offer = False
            self._counts["offers"] += 1

    def _fill(self, vectors: Sequence[torch.Tensor]) -> bool:
        """Write an offer to ``vectors``; return whether it is finite."""
        for block, vector in zip(self._offered_blocks, vectors, strict=True):
            block.pack(block.whole, vector)
        return self._is_finite(vectors)

    def _is_finite(self, values: Sequence[torch.Tensor]) -> bool:
        """Return whether ``values`` are finite; warn the first time that they are not."""
        if all(map(all_finite, values)):
            return True
        if not self._counts["not_finite"]:
            logger.warning(
                "parameters are not finite after step %d: this rank does not pull the centre, "
                "which stays as it is; lower the learning rate, clip, or use GradScaler",
                self.acted,
            )
        self._counts["not_finite"] += 1
        return False

    def _add_pulls(self, pulls: Sequence[torch.Tensor]) -> None:
        for block, values in zip(self._offered_blocks, pulls, strict=True):
            block.add(block.whole, values.to(block.device))

    def close(self) -> None:
        self._thread.close()
        if self._own_group is not None:
            with contextlib.suppress(ValueError):  # all groups have already been destroyed
                dist.destroy_process_group(self._own_group)


class AsyncElasticReplica(BackgroundElasticReplica):
    """Asynchronous EASGD without a server: background rounds pull each rank's parameters."""

    mode = "async"

    def begin(self) -> None:
        group = self._host_group()
        rate = moving_rate_for(group.size(), self._given_rate)
        initial = self._initial_centre(Exchange.of(group), _HOST_MEMORY)
        self._start_rounds(group, initial, rate)
        self._offered_blocks = self.blocks

    def act(self) -> None:
        self._collect_and_offer()

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        with self._thread.held():
            is_collected = self._thread.collect(self.acted, self._add_pulls, leave=leave)
            if is_collected and not leave:
                self._counts["pulls"] += 1
            yield

    def state_dict(self) -> dict[str, Any]:
        with self._thread.held():
            return super().state_dict()

    def _gathered_centre(self) -> Sequence[torch.Tensor]:
        return self._thread.centre.gathered()


class WildElasticReplica(BackgroundElasticReplica):
    """EA-wild: every ``sync_every`` steps, a rank pulls its host's centre without coordination.

    If there are several hosts, the first rank of each one offers the host's centre in rounds.
    Parameters are never in flight, so `at_rest` has nothing to apply.

    [Note: the watch] A rank cannot detect through shared memory that a peer has died. So the
    threads of all ranks run rounds, even on a single host, where no rank makes offers. If a rank
    dies or is stopped, the rounds end on all other ranks, just as in mode "async".
    """

    mode = "wild"

    def begin(self) -> None:
        narrow = [
            str(block.dtype) for block in self.blocks if wide_dtype(block.dtype) != block.dtype
        ]
        if narrow:
            raise UnsupportedConfigurationError(
                f"expected parameters of float32 with mode='wild', got dtype={narrow[0]}, in which "
                "small pulls vanish; use mode='async', which keeps the rounding errors"
            )
        group = self._host_group()
        self._rate = moving_rate_for(group.size(), self._given_rate)
        initial = self._initial_centre(Exchange.of(group), _HOST_MEMORY)
        # The host's centre in shared memory, one vector per block.
        self._shared, leaders, host_ranks = share(group, initial)
        # Where in a block this rank begins, as a fraction. It differs for each rank of the host.
        self._first = host_ranks.index(group.rank()) / len(host_ranks)
        hosts = len(leaders)
        self._offers = hosts > 1 and group.rank() in leaders
        if hosts > 1:
            self._offered_blocks = [
                FlatBlock([FlatEntry("centre", vector.detach)], []) for vector in self._shared
            ]
        self._start_rounds(group, initial if hosts > 1 else (), moving_rate_for(hosts, None))
        self._counts |= {"own_pulls": 0, "hosts": hosts}

    def act(self) -> None:
        self._thread.check()
        if self._offers:
            self._collect_and_offer()
        pieces = [block.pieces(block.whole) for block in self.blocks]
        all_pieces = [piece for each in pieces for piece in each]
        if self._is_due() and self._is_finite(all_pieces):
            for centre, each in zip(self._shared, pieces, strict=True):
                pull_shared(centre, each, self._rate, self._first)
            self._counts["own_pulls"] += 1

    def _gathered_centre(self) -> Sequence[torch.Tensor]:
        """Wait until no rank writes to the centre, then return that of rank 0's host."""
        # A barrier: after it, every rank is between two steps.
        self.exchange.gather_numbers([0.0], self.blocks[0].device)
        found = []
        for block, vector in zip(self.blocks, self._shared, strict=True):
            own = vector.to(block.device, copy=True)
            found.append(from_first_rank(self.exchange, own))
        return found

    def close(self) -> None:
        super().close()
        self._shared = []
        self._offered_blocks = ()
