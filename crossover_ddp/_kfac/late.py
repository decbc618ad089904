"""Factors that are not needed yet travel behind the gradients, when the wire has nothing else to do.

[Note: late factors] The running factors matter when solvers are made of them, and in most steps none are. In such
steps the factors wait until the step's gradients are gathered, and then leave in groups, one behind the gradients
of each following step, while the ranks compute. All of them have left before the next step that takes factors or makes
solvers begins its exchange, so the running means are the same as if they had come at once. kfac-pytorch lets factors
trail, too; the groups are our design. All ranks send the same groups in the same order, a rank without factors zeros.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from crossover_ddp._exchange.step import GradientFuture
from crossover_ddp._exchange.transfer import Payload

from .curvature import Curvature
from .packing import TravellingFactors, factors_payload


class LateFactors:
    """Sends one step's factors in groups.

    Args:
        curvatures: of the layers that this rank owns; they take what arrives, on a thread of the engine.
        like: a parameter of the model.
        rank, world_size: of this process.
        reduce: begins to sum a payload into its owners, behind all that was handed out before.
    """

    def __init__(
        self,
        *,
        curvatures: Mapping[int, Curvature],
        like: Tensor,
        rank: int,
        world_size: int,
        reduce: Callable[[Payload], GradientFuture],
    ) -> None:
        self._curvatures = curvatures
        self._like = like
        self._rank = rank
        self._world_size = world_size
        self._reduce = reduce
        self._groups: list[list[TravellingFactors]] = []
        self._decay = 0.0
        self._newest: GradientFuture | None = None

    def hold(self, factors: Sequence[TravellingFactors], groups: int, decay: float) -> None:
        """Take the factors of a step.

        Args:
            factors: G and A of the layers whose gradients were exchanged, in the same order on all ranks.
            groups: in how many groups they leave at most.
            decay: weight of the running factors that they are added to.
        """
        sizes = [each.numel for each in factors]
        self._groups = [[factors[place] for place in group] for group in in_equal_groups(sizes, groups)]
        self._decay = decay

    def leave(self, *, all_groups: bool = False) -> None:
        """Send the next group, or all that are left."""
        while self._groups:
            self._newest = self._reduce(self._payload(self._groups.pop(0)))
            if not all_groups:
                return

    def settle(self) -> None:
        """Send what is left, and wait until all has arrived. Collective. Raises what made it impossible."""
        self.leave(all_groups=True)
        self.arrive()

    def arrive(self) -> None:
        """Wait until all that has left has arrived. Not collective. Raises what made it impossible."""
        # They arrive in their order, and after a failure no later one does.
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.wait()

    @property
    def nbytes(self) -> int:
        """Memory of what is held."""
        return sum(each.nbytes for group in self._groups for each in group)

    def _payload(self, group: Sequence[TravellingFactors]) -> Payload:
        packings = {each.layer: each.packings for each in group}
        decay = self._decay

        def add(layer: int, parts: list[Tensor]) -> None:
            g, a = (packing.unpack(part) for packing, part in zip(packings[layer], parts, strict=True))
            self._curvatures[layer].add(a, g, decay)

        return factors_payload(group, like=self._like, rank=self._rank, world_size=self._world_size, take=add)


def in_equal_groups(sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Cut into at most ``count`` consecutive groups of about the same sum; none is empty."""
    total = max(1, sum(sizes))
    ends = list(itertools.accumulate(sizes))

    def group(place: int) -> int:
        """Return in which ``count``-th of the whole the middle of this one lies."""
        return min(count - 1, int((ends[place] - sizes[place] / 2) * count / total))

    for _, places in itertools.groupby(range(len(sizes)), key=group):
        yield list(places)
