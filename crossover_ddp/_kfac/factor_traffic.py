"""How K-FAC's factors travel: as triangles or columns; beside the gradients' buckets, ahead of them or behind them.

Always in messages of their own, which are summed into the layers' owners; only the moment differs. In steps that make
solvers the factors of a bucket's layers leave with it, just before its gradients.

[Note: late factors] The running factors matter when solvers are made of them, and in most steps none are. In such
steps the factors wait until the step's gradients are gathered, and then leave in groups, one behind the gradients
of each following step, while the ranks compute. All of them have left before the next step that takes factors or makes
solvers begins its exchange, so the running means are the same as if they had come at once. kfac-pytorch lets factors
trail, too; the groups are our design.

[Note: early factors] Input factors of steps that make solvers may leave during forward, as in SPD-KFAC (arXiv
2107.06533): a group when its last layer has been called and all groups before it have left. What has not left when
backward hands out its first bucket leaves then.

All ranks send the same groups in the same order; a rank that does not have a factor, since its forward takes another
path or it has run out of inputs, sends zeros for it.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._engine.places import GradientFuture
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp.errors import UnsupportedConfigurationError

from .capture import FactorCapture
from .curvature import Curvature
from .factor_sums import ColumnRoom
from .factors import BatchFactor
from .layers import Layer
from .packing import FactorPacking, TravellingFactors, factors_payload
from .placement import columns_that_travel

Groups = tuple[tuple[int, ...], ...]
_EARLY_GROUPS: Final = 8  # each costs a message


class FactorTraffic:
    """Decides for each step what of the factors travels, and when; the same on all ranks.

    Args:
        layers: of the model.
        owners: of each layer.
        curvatures: of the layers that this rank owns; they take late factors, on a thread of the engine.
        capture: where the factors are; its callbacks are taken.
        process_group: the ranks of the job, None for the default group.
        local: whether factors do not travel at all.

    Attributes:
        trails: whether the factors of the step that is under way leave behind its gradients.
        steps_apart: whether owners' steps run on a thread of their own, as those of deferred buckets do.
        early: by index of layer, the groups whose input factors leave during forward; see [Note: early factors].
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        owners: Sequence[int],
        *,
        curvatures: Mapping[int, Curvature],
        capture: FactorCapture,
        process_group: dist.ProcessGroup | None,
        local: bool,
    ) -> None:
        self._layers = layers
        self._owners = owners
        self._curvatures = curvatures
        self._capture = capture
        self._process_group = process_group
        self._local = local
        group = resolve_group(process_group)
        self._rank, self._world_size = group.rank(), group.size()
        self._called: Counter[int] = Counter()  # layers, in the order of this forward
        self._in_order: list[int] = []  # those of the last step that were called once
        capture.on_begin = self._called.clear
        capture.on_input = self._input_came
        capture.room = self.room
        self._counts = [0] * (2 * len(layers))
        self._rooms: list[ColumnRoom] | None = None
        self._ended: tuple[Callable[[], Tensor | None], Callable[[], None] | None] | None = None
        self.steps_apart = False
        self._engine: Exchange | None = None
        self._model: Callable[[], DistributedDataParallel | None] = _no_model
        self.trails = False
        self.early: Groups = ()
        self._early_left = 0
        self._arrived: dict[int, BatchFactor] = {}  # means of the input factors that came early
        self._late: list[list[TravellingFactors]] = []
        self._late_decay = 0.0
        self._newest: GradientFuture | None = None

    @property
    def can_trail(self) -> bool:
        """Whether factors that are not needed yet can travel behind the gradients."""
        return (
            self._world_size > 1
            and not self._local
            and all(layer.weight.device.type == "cpu" for layer in self._layers)
        )

    def adopt(self, model: DistributedDataParallel | None) -> None:
        """Take the DDP model, which knows whether a forward is the last of its step; None if it is hidden."""
        self._model = _no_model if model is None else weakref.ref(model)

    def counts_come(self, greatest: Callable[[], Tensor | None], wait: Callable[[], None] | None) -> None:
        """Note that the ranks' numbers of columns are on their way.

        Args:
            greatest: returns the greatest over all ranks.
            wait: blocks until they have come; None: backward does.
        """
        self._ended, self._rooms = (greatest, wait), None

    def end_step(self) -> None:
        """Note that the step's last bucket is on its way."""
        self._early_left = 0
        self._arrived = {}
        if self._called:
            # Of a layer that is called several times the last call cannot be recognised.
            self._in_order = [index for index, calls in self._called.items() if calls == 1]
        self._called.clear()

    # --- how many columns ------------------------------------------------------------------------------------

    def room(self, index: int) -> ColumnRoom:
        """Return how many columns a layer's factors may have in this step: what the ranks needed in the last one."""
        if self._rooms is None:
            counts = self.counts()
            pairs = zip(self._layers, counts[::2], counts[1::2], strict=True)
            self._rooms = [self._room(layer, a_count, g_count) for layer, a_count, g_count in pairs]
        return self._rooms[index]

    def _room(self, layer: Layer, a_count: int, g_count: int) -> ColumnRoom:
        if self._local:
            return ColumnRoom()
        return ColumnRoom(
            columns_that_travel(a_count, layer.shape.a_dim, self._world_size),
            columns_that_travel(g_count, layer.shape.g_dim, self._world_size),
        )

    def counts(self) -> list[int]:
        """Return the greatest numbers of columns, of A and G by layer, that a rank has ever had.

        Not those of the last step alone: it may have been a short batch at the end of an epoch.
        """
        ended, self._ended = self._ended, None
        if ended is not None:
            greatest, wait = ended
            if wait is not None:
                wait()
            if (found := greatest()) is not None:
                self._counts = [max(pair) for pair in zip(self._counts, found.tolist(), strict=True)]
        return self._counts

    def load_counts(self, counts: Sequence[int]) -> None:
        """Go on with the counts of a checkpoint."""
        self._counts, self._rooms, self._ended = list(counts), None, None

    def own_counts(self) -> Tensor | None:
        """Return how many columns this rank had in this step, to be sent to all; None if factors do not travel."""
        if self._local or not self._layers:
            return None
        counts = [count for index in range(len(self._layers)) for count in self._capture.counts(index)]
        device = self._layers[0].weight.device
        # From pinned memory: the host need not wait for the device.
        sent = torch.tensor(counts, dtype=torch.int32, pin_memory=device.type == "cuda")
        return sent.to(device, non_blocking=True)

    # --- ahead of the gradients ------------------------------------------------------------------------------

    def plan(self, *, early: bool) -> Groups:
        """See ``KFACState.plan_factors``."""
        if self._local or any(layer.weight.device.type != "cpu" for layer in self._layers):
            raise UnsupportedConfigurationError(
                "expected factors that travel between CPU devices, got "
                + ("factors='local'" if self._local else "a model on a GPU")
                + "; leave the plan out: factors then leave with the gradients' buckets, or do not travel"
            )
        sizes = [self._packings(index)[0].numel for index in range(len(self._layers))]
        order = self._in_order
        groups = in_equal_groups([sizes[index] for index in order], _EARLY_GROUPS)
        answer: list[Any] = [tuple(tuple(order[place] for place in group) for group in groups)]
        dist.broadcast_object_list(answer, group=resolve_group(self._process_group), group_src=0)
        if early and not answer[0]:
            raise UnsupportedConfigurationError(
                "expected layers that are called once in a forward, got none on rank 0 so far; train some steps that "
                "take factors first, or leave the plan out"
            )
        self.early = answer[0] if early else ()
        return self.early

    def _input_came(self, index: int) -> None:
        self._called[index] += 1
        model = self._model()
        # A sum over micro-batches is complete with the last one only.
        if self.trails or (model is not None and not model.require_backward_grad_sync):
            return
        while self._early_left < len(self.early) and all(
            self._called[each] for each in self.early[self._early_left]
        ):
            self._send_early()

    def send_rest(self) -> None:
        """Send all groups of early factors that have not left yet."""
        while self._early_left < len(self.early):
            self._send_early()

    def _send_early(self) -> None:
        group = self.early[self._early_left]
        self._early_left += 1
        arrived = self._arrived

        def keep(index: int, factors: list[BatchFactor]) -> None:
            (arrived[index],) = factors

        self._send(
            [self._travelling(index, a=self._capture.take_input_ahead(index)) for index in group], keep
        )

    # --- beside the gradients, or behind them ----------------------------------------------------------------

    def taken(self, index: int) -> TravellingFactors:
        """Take a layer's factors of this step, without what has left early."""
        if not self.trails and any(index in group for group in self.early):
            return self._travelling(index, g=self._capture.take_output(index))
        a = self._capture.take_input(index)
        return self._travelling(index, g=self._capture.take_output(index), a=a)

    def add(
        self, factors: Sequence[TravellingFactors], decay: float, *, behind: bool = False
    ) -> GradientFuture:
        """Begin to add factors to the running means of their owners, of which ``decay`` remains."""
        arrived = self._arrived

        def add(index: int, means: list[BatchFactor]) -> None:
            g, a = means if len(means) > 1 else (*means, arrived.pop(index))
            self._curvatures[index].add(a, g, decay)

        return self._send(factors, add, behind=behind)

    def hold(self, factors: Sequence[TravellingFactors], groups: int, decay: float) -> None:
        """Take the factors of a step, see [Note: late factors].

        Args:
            factors: G and A of the layers whose gradients were exchanged, in the same order on all ranks.
            groups: in how many groups they leave at most.
            decay: weight of the running factors that they are added to.
        """
        sizes = [each.numel for each in factors]
        self._late = [[factors[place] for place in group] for group in in_equal_groups(sizes, groups)]
        self._late_decay = decay

    def leave(self, *, all_groups: bool = False) -> None:
        """Send the next group of late factors, or all that are left."""
        while self._late:
            self._newest = self.add(self._late.pop(0), self._late_decay, behind=True)
            if not all_groups:
                return

    def settle(self) -> None:
        """Send what is left, and wait until all has arrived. Collective. Raises what made it impossible."""
        self.leave(all_groups=True)
        self.arrive()

    def arrive(self) -> None:
        """Wait until all late factors that have left have arrived. Not collective. Raises what made it impossible."""
        # They arrive in their order, and after a failure no later one does.
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.wait()

    @property
    def nbytes(self) -> int:
        """Memory of the late factors that are held."""
        return sum(each.nbytes for group in self._late for each in group)

    # --- all -------------------------------------------------------------------------------------------------

    def _travelling(self, index: int, **own: Tensor | None) -> TravellingFactors:
        """Return "g" and "a" of a layer, or one of them, as they travel; None: this rank has none."""
        packings = dict(zip("ag", self._packings(index), strict=True))
        return TravellingFactors(
            index, self._owners[index], tuple(packings[name] for name in own), tuple(own.values())
        )

    def _packings(self, index: int) -> tuple[FactorPacking, FactorPacking]:
        shape, room = self._layers[index].shape, self.room(index)
        return (
            FactorPacking(shape.groups, shape.a_dim, room.a, self._world_size),
            FactorPacking(shape.groups, shape.g_dim, room.g, self._world_size),
        )

    def _send(
        self,
        factors: Sequence[TravellingFactors],
        take: Callable[[int, list[BatchFactor]], None],
        *,
        behind: bool = False,
    ) -> GradientFuture:
        if self._engine is None:
            self._engine = Exchange.of(resolve_group(self._process_group))
        payload = factors_payload(
            factors, like=self._layers[0].weight, rank=self._rank, world_size=self._world_size, take=take
        )
        return self._engine.reduce(replace(payload, is_long=self.steps_apart), behind=behind)


def in_equal_groups(sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Cut into at most ``count`` consecutive groups of about the same sum; none is empty."""
    total = max(1, sum(sizes))
    ends = list(itertools.accumulate(sizes))

    def group(place: int) -> int:
        """Return in which ``count``-th of the whole the middle of this one lies."""
        return min(count - 1, int((ends[place] - sizes[place] / 2) * count / total))

    for _, places in itertools.groupby(range(len(sizes)), key=group):
        yield list(places)


def _no_model() -> None:
    return None
