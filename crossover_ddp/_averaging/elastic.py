"""The rules of ``ElasticState``: all ranks pull together, each at its own pace, or wild."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.links import all_finite
from crossover_ddp.errors import UnsupportedConfigurationError

from .centre import Centre, ElasticRound, Rounds, moving_rate_for
from .replica import Replica, Rule, from_first_rank, wide
from .shared_centre import pull_shared, share

logger = logging.getLogger(__name__)

_HOST_MEMORY: Final = torch.device("cpu")


class TogetherElastic(Rule):
    """Synchronous EASGD: every ``sync_every`` steps all ranks pull, and wait for it."""

    mode = "sync"

    def __init__(self, sync_every: int, moving_rate: float | None) -> None:
        self._every, self._given_rate = sync_every, moving_rate
        self.settings = {"mode": self.mode, "sync_every": sync_every, "moving_rate": moving_rate}
        self._loaded: dict[str, Any] | None = None
        self._counts: dict[str, Any] = {"pulls": 0}
        self._centre: Centre

    def begin(self, replica: Replica) -> None:
        super().begin(replica)
        rate = moving_rate_for(replica.exchange.size, self._given_rate)
        self._centre = Centre(replica.exchange, self._start(replica.exchange), rate, replica.meter)
        self._counts["exchanged_bytes"] = 0

    def _start(self, exchange: Exchange, device: torch.device | None = None) -> list[torch.Tensor]:
        """Return what the centre begins with, by block: rank 0's replica, or what a checkpoint says. **Collective**.

        Buffers differ by now, since each rank has had a forward.
        """
        own = []
        for block in self.replica.blocks:
            dtype, at = wide(block.dtype), device or block.device
            loaded = None if self._loaded is None else block.unnamed(self._loaded["centre"], dtype).to(at)
            own.append(block.copy(dtype=dtype, device=at) if loaded is None else loaded)
        return [from_first_rank(exchange, values) for values in own]

    def act(self, steps: int) -> None:
        if steps % self._every:
            return
        for place, block in enumerate(self.replica.blocks):
            values = block.copy(dtype=wide(block.dtype))
            trip = self._centre.begin_pull(place, values, [True] * self.replica.exchange.size)
            self.replica.wait(trip, without_turn=True)
            self.replica.check_finite(values, block.pieces(block.whole), steps)
            block.add(block.whole, values)
            self._counts["exchanged_bytes"] += values.nbytes
        self._counts["pulls"] += 1

    def kept(self) -> dict[str, Any]:
        return self._named(self._centre.gathered())

    def _named(self, centre: Sequence[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, torch.Tensor] = {}
        for block, values in zip(self.replica.blocks, centre, strict=True):
            found.update(block.named(values))
        return {"centre": found}

    def load(self, kept: dict[str, Any]) -> None:
        if set(kept) != {"centre"}:
            raise ValueError(
                f"expected a state with the key 'centre', got keys {sorted(kept)}; pass the state of an ElasticState"
            )
        self._loaded = kept

    def stats(self) -> dict[str, Any]:
        return self._counts


class OwnPaceElastic(TogetherElastic):
    """Asynchronous EASGD without a server, see [Note: rounds] in ``centre.py``."""

    mode = "async"
    steps_together = False

    def __init__(self, sync_every: int, moving_rate: float | None) -> None:
        super().__init__(sync_every, moving_rate)
        self._counts |= {"offers": 0, "not_finite": 0}
        self._is_due, self._steps = False, 0
        self._rounds: Rounds | None = None
        self._made: list[dist.ProcessGroup] = []

    def begin(self, replica: Replica) -> None:
        self.replica = replica
        group = self._host_group()
        self._rounds = Rounds(
            group, self._start(Exchange.of(group), _HOST_MEMORY), self._given_rate, replica.meter
        )

    def _host_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Return a group of the model's ranks, or some, that exchanges host memory by messages. **Collective**."""
        group = self.replica.group
        everyone = dist.get_process_group_ranks(group)
        if ranks is None and "cpu:gloo" in str(dist.get_backend_config(group)):
            return group
        chosen = everyone if ranks is None else [everyone[rank] for rank in ranks]
        made = dist.new_group(chosen, backend="gloo", use_local_synchronization=True)
        if not isinstance(made, dist.ProcessGroup):
            raise UnsupportedConfigurationError(
                f"expected this process among ranks {chosen}, got none of them; register the hook on its own model"
            )
        self._made.append(made)
        return made

    # --- between two steps -----------------------------------------------------------------------------------

    def act(self, steps: int) -> None:
        self._steps = steps
        rounds = self._running()
        self._counts["pulls"] += rounds.collect(steps, self._apply)
        self._is_due = self._is_due or steps % self._every == 0
        if self._is_due and rounds.offer(steps, self._fill):
            self._is_due = False
            self._counts["offers"] += 1

    def _fill(self, vectors: Sequence[torch.Tensor]) -> bool:
        for block, vector in zip(self.replica.blocks, vectors, strict=True):
            block.pack(block.whole, vector)
        return self._is_fit(vectors)

    def _is_fit(self, values: Sequence[torch.Tensor]) -> bool:
        if all(map(all_finite, values)):
            return True
        if not self._counts["not_finite"]:
            logger.warning(
                "parameters are not finite after step %d: this rank stays away from the centre, which stays as it is; "
                "lower the learning rate, clip, or use GradScaler",
                self._steps,
            )
        self._counts["not_finite"] += 1
        return False

    def _apply(self, pulls: Sequence[torch.Tensor]) -> None:
        for block, values in zip(self.replica.blocks, pulls, strict=True):
            block.add(block.whole, values.to(block.device))

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        rounds = self._running()
        with rounds.held():
            pulled = rounds.collect(self._steps, self._apply, leave=leave)
            self._counts["pulls"] += pulled and not leave
            yield

    def _running(self) -> Rounds:
        assert self._rounds is not None
        return self._rounds

    # --- what is kept ----------------------------------------------------------------------------------------

    @property
    def log(self) -> list[ElasticRound]:
        return [] if self._rounds is None else list(self._rounds.log)

    def kept(self) -> dict[str, Any]:
        rounds = self._running()
        with rounds.held():
            return self._named(rounds.centre.gathered())

    def stats(self) -> dict[str, Any]:
        return {**self._counts, "rounds": len(self.log)}

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        for group in self._made:
            with contextlib.suppress(ValueError):  # all groups were destroyed before
                dist.destroy_process_group(group)
        self._made.clear()


class WildElastic(OwnPaceElastic):
    """EA-wild: every ``sync_every`` steps a rank pulls itself and its host's centre together, without asking anybody.

    The first rank of each host takes part in rounds of all hosts, with the centre in the place of its parameters.

    [Note: the watch] Who writes to memory notices nobody's death. So all ranks' threads go through rounds in which
    nothing travels but the table: a rank that dies or is stopped ends them on all others, as it does with "async".
    """

    mode = "wild"
    _shared: list[torch.Tensor]
    _leaders: Sequence[int] = ()
    _watch: Rounds | None = None

    def begin(self, replica: Replica) -> None:
        self.replica = replica
        narrow = [str(block.dtype) for block in replica.blocks if wide(block.dtype) != block.dtype]
        if narrow:
            raise UnsupportedConfigurationError(
                f"expected parameters of float32 with mode='wild', got dtype={narrow[0]}, in which small pulls vanish; "
                "use mode='async', which keeps what is rounded off"
            )
        group = self._host_group()
        exchange = Exchange.of(group)
        self._rate = moving_rate_for(group.size(), self._given_rate)
        start = self._start(exchange, _HOST_MEMORY)
        self._shared, self._leaders, mates = share(group, start)
        self._first = mates.index(group.rank()) / len(mates)
        if len(self._leaders) > 1 and group.rank() in self._leaders:
            self._rounds = Rounds(self._host_group(self._leaders), start, None, replica.meter)
        self._watch = Rounds(group, (), None)
        self._counts["own_pulls"] = 0

    def act(self, steps: int) -> None:
        self._steps = steps
        assert self._watch is not None
        self._watch.check()
        if self._rounds is not None:
            super().act(steps)
        pieces = [block.pieces(block.whole) for block in self.replica.blocks]
        if steps % self._every == 0 and self._is_fit([piece for each in pieces for piece in each]):
            for centre, each in zip(self._shared, pieces, strict=True):
                pull_shared(centre, each, self._rate, self._first)
            self._counts["own_pulls"] += 1

    # What travels between hosts is the centre.

    def _fill(self, vectors: Sequence[torch.Tensor]) -> bool:
        for vector, centre in zip(vectors, self._shared, strict=True):
            vector.copy_(centre)
        return True

    def _apply(self, pulls: Sequence[torch.Tensor]) -> None:
        for centre, values in zip(self._shared, pulls, strict=True):
            centre.add_(values)

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """See `Rule`: what is in flight changes the centre, not the parameters."""
        yield

    def kept(self) -> dict[str, Any]:
        """See `Rule`: the centre of rank 0's host, when nobody writes to it any more."""
        exchange = self.replica.exchange
        exchange.gather_numbers([0.0], self.replica.blocks[0].device)
        copies = [
            vector.to(block.device, copy=True)
            for vector, block in zip(self._shared, self.replica.blocks, strict=True)
        ]
        return self._named([from_first_rank(exchange, copy) for copy in copies])

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "hosts": len(self._leaders)}

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._shared.clear()
        super().close()
