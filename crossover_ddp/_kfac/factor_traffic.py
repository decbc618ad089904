"""When K-FAC's factors travel: with the gradients' buckets, ahead of them or behind them.

Always as journeys of their own, to the layers' owners; only the moment differs. In steps that make solvers the factors
of a bucket's layers leave with it, just before its gradients.

[Note: late factors] The running factors matter when solvers are made of them, and in most steps none are. In such
steps the factors wait until the step's gradients are gathered, and then leave in groups, one behind the gradients
of each following step, while the ranks compute. All of them have left before the next step that takes factors or makes
solvers begins its exchange, so the running means are the same as if they had come at once. kfac-pytorch lets factors
trail, too; the groups are our design.

[Note: early factors] Input factors of steps that make solvers may leave during forward, as in SPD-KFAC (arXiv
2107.06533): a group when its last layer has been called and all groups before it have left. What has not left when
backward hands out its first bucket leaves then.

All ranks send the same groups in the same order. They are added to the running means in that order, too.
"""

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.trips import Trip
from crossover_ddp.errors import UnsupportedConfigurationError

from .capture import FactorCapture
from .curvature import Curvature
from .factor_messages import Due, Factor, FactorMessages, bring_factors
from .factors import BatchFactor
from .layers import Layer

Groups = tuple[tuple[int, ...], ...]
_EARLY_GROUPS: Final = 8  # each costs messages


class FactorTraffic:
    """Decides for each step what of the factors travels, and when; the same on all ranks.

    Args:
        layers: of the model.
        owners: of each layer.
        curvatures: of the layers that this rank owns; they take the factors.
        capture: where the factors are; its callbacks are taken.
        process_group: the ranks of the job, None for the default group.
        local: whether factors do not travel at all.

    Attributes:
        trails: whether the factors of the step that is under way leave behind its gradients.
        early: by index of layer, the groups whose input factors leave during forward; see [Note: early factors].
        arrived: opened when all factors that have left so far are in the running means.
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
        self._group = resolve_group(process_group)
        self._local = local
        self._called: Counter[int] = Counter()  # layers, in the order of this forward
        self._in_order: list[int] = []  # those of the last step that were called once
        capture.on_begin = self._called.clear
        capture.on_input = self._input_came
        self._model: Callable[[], DistributedDataParallel | None] = _no_model
        self.trails = False
        self.early: Groups = ()
        self._early_left = 0
        self._inputs: dict[int, BatchFactor] = {}  # means of the input factors that came early
        self._late: list[list[Due]] = []
        self._late_decay = 0.0
        self.arrived = Gate()
        self.arrived.open()
        self._newest: Trip | None = None

    @property
    def can_trail(self) -> bool:
        """Whether factors that are not needed yet can travel behind the gradients."""
        on_host = all(layer.weight.device.type == "cpu" for layer in self._layers)
        return self._group.size() > 1 and not self._local and on_host

    def adopt(self, model: DistributedDataParallel | None) -> None:
        """Take the DDP model, which knows whether a forward is the last of its step; None if it is hidden."""
        self._model = _no_model if model is None else weakref.ref(model)

    def end_step(self) -> None:
        """Note that the step's last bucket is on its way."""
        self._early_left = 0
        if self._called:
            # Of a layer that is called several times the last call cannot be recognised.
            self._in_order = [index for index, calls in self._called.items() if calls == 1]
        self._called.clear()

    # --- ahead of the gradients ------------------------------------------------------------------------------

    def plan(self, *, early: bool) -> Groups:
        """See ``KFACState.plan_factors``."""
        if self._local or any(layer.weight.device.type != "cpu" for layer in self._layers):
            raise UnsupportedConfigurationError(
                "expected factors that travel between CPU devices, got "
                + ("factors='local'" if self._local else "a model on a GPU")
                + "; leave the plan out: factors then leave with the gradients' buckets, or do not travel"
            )
        order = self._in_order
        groups = in_equal_groups([self._due(index, "a").numel for index in order], _EARLY_GROUPS)
        answer: list[Any] = [tuple(tuple(order[place] for place in group) for group in groups)]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
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
        self.send([self._due(index, "a", self._capture.take_input_ahead(index)) for index in group])

    # --- beside the gradients, or behind them ----------------------------------------------------------------

    def taken(self, index: int) -> Due:
        """Take a layer's factors of this step, without what has left early."""
        if not self.trails and any(index in group for group in self.early):
            return self._due(index, "g", self._capture.take_output(index))
        a = self._capture.take_input(index)
        return self._due(index, "ga", self._capture.take_output(index), a)

    def hold(self, due: Sequence[Due], groups: int, decay: float) -> None:
        """Take the factors of a step, see [Note: late factors].

        Args:
            due: G and A of the layers whose gradients were exchanged, in the same order on all ranks.
            groups: in how many groups they leave at most.
            decay: weight of the running factors that they are added to.
        """
        groups_of = in_equal_groups([each.numel for each in due], groups)
        self._late = [[due[place] for place in group] for group in groups_of]
        self._late_decay = decay

    def leave(self, after: Gate | None = None, *, all_groups: bool = False) -> None:
        """Send the next group of late factors, or all that are left, ``after`` a gate was opened."""
        while self._late:
            self.send(self._late.pop(0), self._late_decay, after)
            if not all_groups:
                return

    def settle(self) -> None:
        """Send what is left, and wait until all has arrived. Collective. Raises what made it impossible."""
        self.leave(all_groups=True)
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.wait()

    @property
    def nbytes(self) -> int:
        """Memory of the late factors that are held."""
        return sum(factor.nbytes for group in self._late for each in group for factor in each.factors)

    # --- all -------------------------------------------------------------------------------------------------

    def _due(self, index: int, which: str, *values: BatchFactor | None) -> Due:
        """Return "g" and "a" of a layer, or one of them; None: this rank has none."""
        shape = self._layers[index].shape
        dims = [shape.g_dim if name == "g" else shape.a_dim for name in which]
        pairs = itertools.zip_longest(dims, values)
        return Due(index, self._owners[index], which, tuple([Factor(shape.groups, *pair) for pair in pairs]))

    @torch.no_grad()
    def send(self, due: Sequence[Due], decay: float = 0.0, after: Gate | None = None) -> None:
        """Begin to add factors to the running means of their owners, of which ``decay`` remains."""
        exchange, like = Exchange.of(self._group), self._layers[0].weight
        tells = exchange.size == 1 or exchange.sends_messages(like.device)
        messages = FactorMessages(due, exchange.rank, exchange.size, like, tells=tells)
        former, self.arrived = self.arrived, Gate()
        add = functools.partial(self._add, decay)
        way = functools.partial(bring_factors, messages, add, after, former, self.arrived)
        self._newest = exchange.begin(way, like.device, "factors of K-FAC")

    def _add(self, decay: float, index: int, which: str, means: Sequence[BatchFactor]) -> None:
        """Take what has come of an own layer."""
        if which == "a":
            (self._inputs[index],) = means
            return
        g, a = means if which == "ga" else (*means, self._inputs.pop(index))
        self._curvatures[index].add(a, g, decay)


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
