"""Elastic averaging between steps: all ranks together, or each at its own pace."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from crossover_ddp._engine.endings import on_destruction
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.errors import UnsupportedConfigurationError

from .centre import CentreParts, check_loaded, gathered, packed, pull_of, start_vectors, whole
from .checks import all_finite, check_finite
from .means import Means
from .rounds import ElasticRound, ElasticRounds, Ending, Pull

if TYPE_CHECKING:
    from .replica import Replica

logger = logging.getLogger(__name__)

MOVING: Final = 0.9
"""β of EASGD: by default the ranks' rates add up to it."""
HOST_MEMORY: Final = torch.device("cpu")


def moving_rate_for(ranks: int, given: float | None) -> float:
    """Return α; refuse one with which the centre and the ranks' mean swing ever more widely."""
    rate = MOVING / ranks if given is None else given
    if not 0 < rate < 2 / (ranks + 1):
        raise ValueError(
            f"expected 0 < moving_rate < 2 / (ranks + 1) = {2 / (ranks + 1):.4g}, got moving_rate={rate}: beyond it "
            "the distance of mean and centre grows in every round; leave it out for 0.9 / ranks"
        )
    return rate


class TogetherElastic:
    """Synchronous EASGD: every ``sync_every`` steps all ranks pull, and wait for it.

    Args:
        sync_every: steps between two pulls.
        moving_rate: α, or None for 0.9 / ranks.
    """

    def __init__(self, sync_every: int, moving_rate: float | None) -> None:
        self._every = sync_every
        self._given_rate = moving_rate
        self._loaded: dict[str, Any] | None = None
        self._pulls = self._bytes = 0
        self._centre: CentreParts
        self._means: Means
        self._replica: Replica

    def __repr__(self) -> str:
        return f"elastic, together, every {self._every} steps"

    @property
    def settings(self) -> Mapping[str, object]:
        """See `Rule`."""
        return {"mode": "sync", "sync_every": self._every, "moving_rate": self._given_rate}

    @property
    def steps_together(self) -> bool:
        """See `Rule`."""
        return True

    @property
    def has_local_steps(self) -> bool:
        """See `Rule`."""
        return True

    def is_local(self, steps: int) -> bool:
        """See `Rule`."""
        return True

    def begin(self, replica: "Replica") -> None:
        """See `Rule`."""
        assert replica.means is not None
        self._replica, self._means = replica, replica.means
        self._rate = moving_rate_for(self._means.exchange.size, self._given_rate)
        self._centre = CentreParts(self._means, start_vectors(replica.blocks, self._loaded), self._rate)

    def act(self, steps: int) -> None:
        """See `Rule`."""
        if steps % self._every:
            return
        for place, block in enumerate(self._means.blocks):
            sent = packed(block)
            former = sent.clone()
            trip = self._centre.begin_pull(place, former, self._means.exchange.size)
            self._replica.wait_without_turn(trip)
            check_finite(former, self._means.exchange.rank, steps, [sent])
            block.add(whole(block), pull_of(sent, former, self._rate))
            self._bytes += sent.nbytes
        self._pulls += 1

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """See `Rule`."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """See `Rule`."""
        return {"centre": gathered(self._means, self._means.blocks, self._centre.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
        self._loaded = check_loaded(state)

    def stats(self) -> dict[str, Any]:
        """See `Rule`."""
        return {"pulls": self._pulls, "exchanged_bytes": self._bytes}

    def close(self) -> None:
        """See `Rule`."""


class OwnPaceElastic:
    """Asynchronous EASGD without a server, see [Note: rounds] in ``rounds.py``.

    Args:
        sync_every: steps of this rank between two offers; more if the network needs longer.
        moving_rate: α, or None for 0.9 / ranks.
    """

    def __init__(self, sync_every: int, moving_rate: float | None) -> None:
        self._every = sync_every
        self._given_rate = moving_rate
        self._loaded: dict[str, Any] | None = None
        self._due = False
        self._steps = 0
        self._counts = {"offers": 0, "pulls": 0, "not_finite": 0}
        self._rounds: ElasticRounds | None = None
        self._centre: CentreParts
        self._replica: Replica

    def __repr__(self) -> str:
        return f"elastic, at their own pace, every {self._every} steps"

    @property
    def settings(self) -> Mapping[str, object]:
        """See `Rule`."""
        return {"mode": "async", "sync_every": self._every, "moving_rate": self._given_rate}

    @property
    def steps_together(self) -> bool:
        """See `Rule`."""
        return False

    @property
    def has_local_steps(self) -> bool:
        """See `Rule`."""
        return True

    def is_local(self, steps: int) -> bool:
        """See `Rule`."""
        return True

    def begin(self, replica: "Replica") -> None:
        """See `Rule`."""
        self._replica = replica
        assert replica.group is not None
        group = host_group(replica.group)
        start = start_vectors(replica.blocks, self._loaded, HOST_MEMORY)
        self._rounds, self._centre = begin_rounds(group, start, self._given_rate)

    # --- between two steps -----------------------------------------------------------------------------------

    def act(self, steps: int) -> None:
        """See `Rule`."""
        self._steps = steps
        rounds = self._running()
        self._counts["pulls"] += rounds.collect(steps, self._apply)
        self._due = self._due or steps % self._every == 0
        if self._due and rounds.offer(steps, self._fill):
            self._due = False
            self._counts["offers"] += 1

    def _fill(self, vectors: Sequence[torch.Tensor]) -> bool:
        for block, vector in zip(self._replica.blocks, vectors, strict=True):
            block.pack(whole(block), vector)
        return self._note_fitness(all_finite(vectors))

    def _note_fitness(self, fit: bool) -> bool:
        if not fit:
            if not self._counts["not_finite"]:
                logger.warning(
                    "parameters are not finite after step %d: this rank stays away from the centre, which stays as it "
                    "is; lower the learning rate, clip, or use GradScaler",
                    self._steps,
                )
            self._counts["not_finite"] += 1
        return fit

    def _apply(self, pull: Pull) -> None:
        for block, delta in zip(self._replica.blocks, pull.deltas, strict=True):
            block.add(whole(block), delta.to(block.device))

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """See `Rule`."""
        rounds = self._running()
        rounds.hold()
        try:
            pulled = rounds.collect(self._steps, self._apply, leave=leave)
            self._counts["pulls"] += pulled and not leave
            yield
        finally:
            rounds.resume()

    def _running(self) -> ElasticRounds:
        assert self._rounds is not None
        return self._rounds

    # --- what is kept ----------------------------------------------------------------------------------------

    @property
    def log(self) -> list[ElasticRound]:
        """Return the rounds so far."""
        return [] if self._rounds is None else list(self._rounds.log)

    def state_dict(self) -> dict[str, Any]:
        """See `Rule`."""
        means, rounds = self._replica.means, self._running()
        assert means is not None
        rounds.hold()
        try:
            parts = [
                part.to(block.device) for part, block in zip(self._centre.parts, means.blocks, strict=True)
            ]
            return {"centre": gathered(means, means.blocks, parts)}
        finally:
            rounds.resume()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
        self._loaded = check_loaded(state)

    def stats(self) -> dict[str, Any]:
        """See `Rule`."""
        return {**self._counts, "rounds": len(self.log)}

    def close(self) -> None:
        """See `Rule`."""
        if self._rounds is not None:
            self._rounds.close()


def begin_rounds(
    group: dist.ProcessGroup, start: Sequence[torch.Tensor], given_rate: float | None
) -> tuple[ElasticRounds, CentreParts]:
    """Start the rounds of all ranks of ``group``. **Collective**."""
    rate = moving_rate_for(group.size(), given_rate)
    ended = Ending()
    on_destruction(group, ended.join)  # what is registered first comes last: after the engine's own end
    exchange = Exchange(group)
    centre = CentreParts(Means(exchange, ()), start, rate)
    rounds = ElasticRounds(exchange, centre, start, rate, ended)
    on_destruction(group, ended.tell)
    return rounds, centre


def host_group(group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Return a group of the same ranks, or some of them, that exchanges host memory by messages. **Collective**."""
    everyone = dist.get_process_group_ranks(group)
    if ranks is None and "cpu:gloo" in str(dist.get_backend_config(group)):
        return group
    chosen = everyone if ranks is None else [everyone[rank] for rank in ranks]
    made = dist.new_group(chosen, backend="gloo", use_local_synchronization=True)
    if not isinstance(made, dist.ProcessGroup):
        raise UnsupportedConfigurationError(
            f"expected this process among ranks {chosen}, got none of them; register the hook on its own model"
        )
    return made
