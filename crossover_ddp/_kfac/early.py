"""Input factors that leave during forward, in groups, while the wire has nothing else to do.

[Note: one order of groups] All ranks send the same groups in the same order, before the step's buckets. A group leaves
when its last layer has been called and all groups before it have left. What has not left when backward hands out its
first bucket leaves then, with zeros for factors that this rank does not have. So a rank whose forward takes another
path, or that has run out of inputs, sends what the others send.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from crossover_ddp._exchange.transfer import Payload

from .capture import FactorCapture
from .layers import Layer
from .packing import FactorPacking, TravellingFactors, factors_payload

Groups = Sequence[Sequence[int]]


class EarlyFactors:
    """Sends the groups of one step, and keeps what arrives of them on the owners.

    Args:
        groups: of indices of layers, in the order in which they leave; may be empty.
        layers: of the model.
        owners: of each layer.
        rank, world_size: of this process.
        capture: where the factors are.
        reduce: begins to sum a payload into its owners.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        layers: Sequence[Layer],
        owners: Sequence[int],
        rank: int,
        world_size: int,
        capture: FactorCapture,
        reduce: Callable[[Payload], object],
    ) -> None:
        self.groups = groups
        self.layers = frozenset(index for group in groups for index in group)
        self._all_layers = layers
        self._owners = owners
        self._rank = rank
        self._world_size = world_size
        self._capture = capture
        self._reduce = reduce
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what came in the last step."""
        self.arrived: dict[int, tuple[FactorPacking, Tensor]] = {}
        self._called: set[int] = set()
        self._left = 0

    def input_came(self, index: int) -> None:
        """Note that a layer's factor is complete; send the groups that are."""
        self._called.add(index)
        while self._left < len(self.groups) and self._called.issuperset(self.groups[self._left]):
            self._send()

    def send_rest(self) -> None:
        """Send all groups that have not left yet."""
        while self._left < len(self.groups):
            self._send()

    def _send(self) -> None:
        group = self.groups[self._left]
        self._left += 1
        packings = {index: self._packing(index) for index in group}
        travelling = [
            TravellingFactors(
                index, self._owners[index], (packings[index],), (self._capture.take_input_ahead(index),)
            )
            for index in group
        ]
        arrived = self.arrived

        def keep(index: int, parts: list[Tensor]) -> None:
            arrived[index] = packings[index], parts[0]

        weight = self._all_layers[group[0]].weight
        self._reduce(
            factors_payload(travelling, like=weight, rank=self._rank, world_size=self._world_size, take=keep)
        )

    def _packing(self, index: int) -> FactorPacking:
        shape = self._all_layers[index].shape
        return FactorPacking(shape.groups, shape.a_dim, self._capture.room(index).a, self._world_size)
