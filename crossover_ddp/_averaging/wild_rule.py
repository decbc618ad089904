"""EA-wild: ranks of a host share one centre in memory, hosts pull their centres together."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.errors import UnsupportedConfigurationError

from .centre import gathered, start_vectors, whole
from .checks import all_finite
from .elastic_rules import HOST_MEMORY, OwnPaceElastic, begin_rounds, host_group, moving_rate_for
from .flat import wide
from .rounds import ElasticRounds, Pull
from .shared_centre import Hosts, SharedCentre, share

if TYPE_CHECKING:
    import torch

    from .replica import Replica


class WildElastic(OwnPaceElastic):
    """Every ``sync_every`` steps a rank pulls itself and its host's centre together, without asking anybody.

    The first rank of each host takes part in rounds of all hosts, with the centre in the place of its parameters.

    [Note: the watch] Who writes to memory notices nobody's death. So all ranks' threads go through rounds in which
    nothing travels but the table: a rank that dies or is stopped ends them on all others, as it does with "async".
    """

    _shared: SharedCentre
    _hosts: Hosts
    _watch: ElasticRounds

    def __repr__(self) -> str:
        return f"elastic, wild, every {self._every} steps"

    @property
    def settings(self) -> Mapping[str, object]:
        """See `Rule`."""
        return {**super().settings, "mode": "wild"}

    def begin(self, replica: "Replica") -> None:
        """See `Rule`."""
        self._replica = replica
        narrow = [str(block.dtype) for block in replica.blocks if wide(block.dtype) != block.dtype]
        if narrow:
            raise UnsupportedConfigurationError(
                f"expected parameters of float32 with mode='wild', got dtype={narrow[0]}, in which small pulls vanish; "
                "use mode='async', which keeps what is rounded off"
            )
        assert replica.group is not None and replica.exchange is not None
        group = host_group(replica.group)
        self._rate = moving_rate_for(group.size(), self._given_rate)
        start = start_vectors(replica.blocks, self._loaded, HOST_MEMORY)
        self._shared, self._hosts = share(Exchange.of(group), start)
        self._first = self._hosts.mates.index(group.rank()) / len(self._hosts.mates)
        if len(self._hosts.leaders) > 1 and group.rank() in self._hosts.leaders:
            leaders = host_group(group, self._hosts.leaders)
            self._rounds, self._centre = begin_rounds(leaders, start, None)
        self._watch, _ = begin_rounds(group, (), None)

    def act(self, steps: int) -> None:
        """See `Rule`."""
        self._steps = steps
        self._watch.check()
        if self._rounds is not None:
            super().act(steps)
        if steps % self._every == 0 and self._is_fit():
            for place, block in enumerate(self._replica.blocks):
                self._shared.pull(place, block.pieces(whole(block)), self._rate, self._first)
            self._counts["own_pulls"] = self._counts.get("own_pulls", 0) + 1

    def _is_fit(self) -> bool:
        pieces = [piece for block in self._replica.blocks for piece in block.pieces(whole(block))]
        return self._note_fitness(all_finite(pieces))

    # What travels between hosts is the centre.

    def _fill(self, vectors: "Sequence[torch.Tensor]") -> bool:
        for vector, centre in zip(vectors, self._shared.vectors, strict=True):
            vector.copy_(centre)
        return True

    def _apply(self, pull: Pull) -> None:
        for place, delta in enumerate(pull.deltas):
            self._shared.add(place, delta)

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """See `Rule`: what is in flight changes the centre, not the parameters."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """See `Rule`."""
        means = self._replica.means
        assert means is not None
        parts = []
        for vector, block in zip(self._shared.vectors, means.blocks, strict=True):
            on_device = vector.to(block.device)
            own = means.own_span(on_device)
            parts.append(on_device[own.start : own.stop])
        return {"centre": gathered(means, means.blocks, parts)}

    def stats(self) -> dict[str, Any]:
        """See `Rule`."""
        return {**super().stats(), "hosts": len(self._hosts.leaders)}

    def close(self) -> None:
        """See `Rule`."""
        super().close()
        self._watch.close()
        self._shared.vectors.clear()
