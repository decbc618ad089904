"""The rules of ``ElasticState``: all ranks pull together, each at its own pace, or wild."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from crossover_ddp._ddp.checks import check_keys
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import all_finite
from crossover_ddp.errors import UnsupportedConfigurationError

from .centre import ROUNDS_KEPT, Centre, ElasticRound, Rounds, moving_rate_for
from .replica import FlatBlock, FlatEntry, Flight, Replica, from_first_rank, wide
from .shared_centre import pull_shared, share

logger = logging.getLogger(__name__)

_HOST_MEMORY: Final = torch.device("cpu")


class TogetherElastic(Replica):
    """Synchronous EASGD: every ``sync_every`` steps all ranks pull, and wait for it."""

    mode = "sync"
    counted: tuple[str, ...] = ("pulls",)
    _centre: Centre
    _loaded: dict[str, Any] | None = None

    def __init__(self, sync_every: int, moving_rate: float | None) -> None:
        self._every, self._given_rate = sync_every, moving_rate
        self.settings = {"mode": self.mode, "sync_every": sync_every, "moving_rate": moving_rate}
        self._counts = dict.fromkeys(self.counted, 0)
        self.log: deque[ElasticRound] = deque(maxlen=ROUNDS_KEPT)

    def begin(self) -> None:
        rate = moving_rate_for(self.exchange.size, self._given_rate)
        self._centre = Centre(self.exchange, self._start(self.exchange), rate, self.meter)

    def _start(self, exchange: Exchange, device: torch.device | None = None) -> list[torch.Tensor]:
        """Return what the centre begins with, by block, on ``device`` or with the model. **Collective**."""
        own = []  # rank 0's replica counts, or what a checkpoint says: each rank has had a forward, so buffers differ
        for block in self.blocks:
            values = block.copy(block.whole, wide(block.dtype), device)
            if self._loaded is not None:
                values.copy_(block.unnamed(self._loaded["centre"], values.dtype))
            own.append(values)
        return [from_first_rank(exchange, values) for values in own]

    def act(self) -> None:
        if self.acted % self._every:
            return
        ranks, flights = self.exchange.size, []
        for place, block in enumerate(self.blocks):
            values = block.copy(block.whole, wide(block.dtype))
            trip = self._centre.begin_pull(place, values, [True] * ranks)
            flights.append(Flight(block, block.whole, values, trip, adds=True))
        self.land(flights)
        self.log.append(ElasticRound(self._counts["pulls"], (self.acted,) * ranks, self.acted))
        self._counts["pulls"] += 1

    def kept(self) -> dict[str, Any]:
        named = [
            block.named(whole)
            for block, whole in zip(self.blocks, self._whole_centre(), strict=True)
        ]
        return {"centre": {name: each for found in named for name, each in found.items()}}

    def _whole_centre(self) -> Sequence[torch.Tensor]:
        return self._centre.gathered()

    def load(self, kept: dict[str, Any]) -> None:
        check_keys(kept, {"centre"}, "the state of an ElasticState")
        self._loaded = kept

    def stats(self) -> dict[str, Any]:
        nbytes = sum(block.numel * wide(block.dtype).itemsize for block in self.blocks)
        return {
            **self._counts,
            "exchanged_bytes": self._counts["pulls"] * nbytes,
            "rounds": len(self.log),
        }


class OwnPaceElastic(TogetherElastic):
    """Asynchronous EASGD without a server, see [Note: rounds] in ``centre.py``."""

    mode = "async"
    counted = "pulls", "offers", "not_finite"
    steps_together = _is_due = False
    _rounds: Rounds
    _pulled: Sequence[FlatBlock] = ()  # in rounds
    _made: dist.ProcessGroup | None = None

    def begin(self) -> None:
        group = self._host_group()
        rate = moving_rate_for(group.size(), self._given_rate)
        self._rounds = Rounds(
            group, self._start(Exchange.of(group), _HOST_MEMORY), rate, self.meter
        )
        self.log, self._centre, self._pulled = self._rounds.log, self._rounds.centre, self.blocks

    def _host_group(self) -> dist.ProcessGroup:
        """Return a group of the model's ranks that exchanges host memory by messages. **Collective**."""
        if "cpu:gloo" in str(dist.get_backend_config(self.group)):
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        self._made = made
        return made

    def act(self) -> None:
        self._counts["pulls"] += self._rounds.collect(self.acted, self._apply)
        self._is_due = self._is_due or self.acted % self._every == 0
        if self._is_due and self._rounds.offer(self.acted, self._fill):
            self._is_due = False
            self._counts["offers"] += 1

    def _fill(self, vectors: Sequence[torch.Tensor]) -> bool:
        for block, vector in zip(self._pulled, vectors, strict=True):
            block.pack(block.whole, vector)
        return self._is_fit(vectors)

    def _is_fit(self, values: Sequence[torch.Tensor]) -> bool:
        if all(map(all_finite, values)):
            return True
        if not self._counts["not_finite"]:
            logger.warning(
                "parameters are not finite after step %d: this rank stays away from the centre, which stays as it is; "
                "lower the learning rate, clip, or use GradScaler",
                self.acted,
            )
        self._counts["not_finite"] += 1
        return False

    def _apply(self, pulls: Sequence[torch.Tensor]) -> None:
        for block, values in zip(self._pulled, pulls, strict=True):
            block.add(block.whole, values.to(block.device))

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        with self._rounds.held():
            self._counts["pulls"] += (
                self._rounds.collect(self.acted, self._apply, leave=leave) and not leave
            )
            yield

    def kept(self) -> dict[str, Any]:
        with self._rounds.held():
            return super().kept()

    def close(self) -> None:
        self._rounds.close()
        if self._made is not None:
            with contextlib.suppress(ValueError):  # all groups were destroyed before
                dist.destroy_process_group(self._made)


class WildElastic(OwnPaceElastic):
    """EA-wild: every ``sync_every`` steps a rank pulls itself and its host's centre together, without asking anybody.

    Where there are several hosts, the first rank of each offers its centre in rounds, in the place of parameters.

    [Note: the watch] Who writes to memory notices nobody's death. So all ranks' threads go through rounds, also where
    nobody offers anything: a rank that dies or is stopped ends them on all others, as it does with "async".
    """

    mode = "wild"
    _shared: Sequence[torch.Tensor]

    def begin(self) -> None:
        narrow = [str(block.dtype) for block in self.blocks if wide(block.dtype) != block.dtype]
        if narrow:
            raise UnsupportedConfigurationError(
                f"expected parameters of float32 with mode='wild', got dtype={narrow[0]}, in which small pulls vanish; "
                "use mode='async', which keeps what is rounded off"
            )
        group = self._host_group()
        self._rate = moving_rate_for(group.size(), self._given_rate)
        start = self._start(Exchange.of(group), _HOST_MEMORY)
        self._shared, leaders, mates = share(group, start)
        self._first, hosts = mates.index(group.rank()) / len(mates), len(leaders)
        self._offers = hosts > 1 and group.rank() in leaders
        if hosts > 1:
            self._pulled = [
                FlatBlock([FlatEntry("centre", each.detach)], []) for each in self._shared
            ]
        self._rounds = Rounds(
            group, start if hosts > 1 else (), moving_rate_for(hosts, None), self.meter
        )
        self.log = self._rounds.log
        self._counts |= {"own_pulls": 0, "hosts": hosts}

    def act(self) -> None:
        self._rounds.check()
        if self._offers:
            super().act()
        pieces = [block.pieces(block.whole) for block in self.blocks]
        if self.acted % self._every == 0 and self._is_fit(
            [piece for each in pieces for piece in each]
        ):
            for centre, each in zip(self._shared, pieces, strict=True):
                pull_shared(centre, each, self._rate, self._first)
            self._counts["own_pulls"] += 1

    # In flight is nothing for parameters: what is pulled in rounds is the centre.
    kept, at_rest = TogetherElastic.kept, TogetherElastic.at_rest

    def _whole_centre(self) -> Sequence[torch.Tensor]:
        """Return the centre of rank 0's host, when nobody writes to it any more."""
        self.exchange.gather_numbers([0.0], self.blocks[0].device)
        pairs = zip(self._shared, self.blocks, strict=True)
        return [
            from_first_rank(self.exchange, vector.to(block.device, copy=True))
            for vector, block in pairs
        ]

    def close(self) -> None:
        super().close()
        self._shared = self._pulled = ()
