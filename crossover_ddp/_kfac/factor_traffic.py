"""How K-FAC's factors travel: as triangles or columns, in the gradients' buckets, ahead of them or behind them."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.link_probe import measure_link
from crossover_ddp._exchange.step import GradientFuture
from crossover_ddp._exchange.step_times import StepTimes
from crossover_ddp._exchange.transfer import Payload
from crossover_ddp._planning import Link
from crossover_ddp.errors import UnsupportedConfigurationError

from .capture import FactorCapture
from .curvature import Curvature
from .early import EarlyFactors
from .factor_step import factor_step_of
from .factor_sums import ColumnRoom
from .late import LateFactors
from .layers import Layer
from .packing import FactorPacking, TravellingFactors
from .payload import KFACRound
from .placement import (
    FactorPlan,
    LayerCost,
    choose_early,
    columns_that_travel,
    decided,
)

Groups = tuple[tuple[int, ...], ...]


class FactorTraffic:
    """Decides for each step what of the factors travels, and when; the same on all ranks.

    Args:
        layers: of the model.
        owners: of each layer.
        costs: of the layers, in the same order.
        curvatures: of the layers that this rank owns.
        capture: where the factors are; its callbacks are taken.
        process_group: the ranks of the job, None for the default group.
        local: whether factors do not travel at all.

    Attributes:
        trails: whether the factors of the step that is under way leave behind its gradients.
        steps_apart: whether owners' steps run on a thread of their own, as those of deferred buckets do.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        owners: Sequence[int],
        costs: Sequence[LayerCost],
        *,
        curvatures: Mapping[int, Curvature],
        capture: FactorCapture,
        process_group: dist.ProcessGroup | None,
        local: bool,
    ) -> None:
        self._layers = layers
        self._owners = owners
        self._costs = costs
        self._capture = capture
        self._process_group = process_group
        self._local = local
        group = resolve_group(process_group)
        self._rank, self._world_size = group.rank(), group.size()
        self.times = StepTimes()
        capture.on_begin = self.times.begin
        capture.on_input = self._input_came
        capture.room = self.room
        self._counts = [0] * (2 * len(layers))
        self._rooms: list[ColumnRoom] | None = None
        self._ended: KFACRound | None = None
        self._await_ended: Callable[[], None] | None = None
        self.steps_apart = False
        self._engine: Exchange | None = None
        self._model: Callable[[], DistributedDataParallel | None] = _no_model
        self.trails = False
        self.early = self._early_factors(())
        self.late = LateFactors(
            curvatures=curvatures,
            like=layers[0].weight if layers else torch.empty(0),
            rank=self._rank,
            world_size=self._world_size,
            reduce=functools.partial(self._reduce, behind=True),
        )

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
        if self._await_ended is not None:
            self._await_ended()
            self._await_ended = None
        if ended is not None and ended.greatest_counts is not None:
            self._counts = [
                max(pair) for pair in zip(self._counts, ended.greatest_counts.tolist(), strict=True)
            ]
        return self._counts

    def travelling(self, index: int, g: Tensor | None, a: Tensor | None) -> TravellingFactors:
        """Return a layer's factors of this step as they travel behind the gradients; None: this rank has none."""
        a_packing, g_packing = self._packings(index)
        return TravellingFactors(index, self._owners[index], (g_packing, a_packing), (g, a))

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

    def end_step(self, round: KFACRound, wait: Callable[[], None] | None) -> None:
        """Note that the step's last bucket is on its way, and the ranks' messages with it; ``wait`` waits for them."""
        self._ended, self._await_ended, self._rooms = round, wait, None
        self.early.begin_step()

    # --- what leaves early -----------------------------------------------------------------------------------

    def plan(self, early: bool | None) -> FactorPlan:
        """See ``KFACState.plan_factors``."""
        group = resolve_group(self._process_group)
        if self._local or any(layer.weight.device.type != "cpu" for layer in self._layers):
            raise UnsupportedConfigurationError(
                "expected factors that travel between CPU devices, got "
                + ("factors='local'" if self._local else "a model on a GPU")
                + "; leave the plan out: factors then ride in the gradients' buckets, or do not travel"
            )
        link = measure_link(group)
        answer: list[Any] = [None]
        if self._rank == 0 and self.times.steps:
            answer[0] = self._planned(link, early)
        dist.broadcast_object_list(answer, group=group, group_src=0)
        if answer[0] is None:
            raise UnsupportedConfigurationError(
                "expected recorded factor steps to plan by, got none on rank 0; train some steps first, the first "
                "two have other buckets"
            )
        plan, groups = cast(tuple[FactorPlan, Groups], answer[0])
        self.early = self._early_factors(groups)
        return plan

    def _planned(self, link: Link, early: bool | None) -> tuple[FactorPlan, Groups]:
        """Return the plan, and its groups by the layers' indices."""
        packings = [self._packings(index) for index in range(len(self._layers))]
        order, step = factor_step_of(
            self.times,
            [4 * a.numel for a, _ in packings],
            [4 * g.numel for _, g in packings],
            self._busiest_owner_s,
        )
        plan = choose_early(step, link) if early is None else decided(step, link, early=early)
        return plan, tuple([tuple([order[place] for place in group]) for group in plan.early])

    def _packings(self, index: int) -> tuple[FactorPacking, FactorPacking]:
        shape, room = self._layers[index].shape, self.room(index)
        return (
            FactorPacking(shape.groups, shape.a_dim, room.a, self._world_size),
            FactorPacking(shape.groups, shape.g_dim, room.g, self._world_size),
        )

    def _busiest_owner_s(self, layers: Sequence[int]) -> float:
        loads_s = [0.0] * self._world_size
        for index in layers:
            loads_s[self._owners[index]] += self._costs[index].inverse_s
        return max(loads_s)

    def _early_factors(self, groups: Groups) -> EarlyFactors:
        return EarlyFactors(
            groups,
            layers=self._layers,
            owners=self._owners,
            rank=self._rank,
            world_size=self._world_size,
            capture=self._capture,
            reduce=functools.partial(self._reduce, behind=False),
        )

    def _reduce(self, payload: Payload, *, behind: bool) -> GradientFuture:
        if self._engine is None:
            self._engine = Exchange.of(resolve_group(self._process_group))
        return self._engine.reduce(replace(payload, is_long=self.steps_apart), behind=behind)

    def _input_came(self, index: int) -> None:
        self.times.reach(index)
        model = self._model()
        # A sum over micro-batches is complete with the last one only.
        if (
            not self.trails
            and index in self.early.layers
            and (model is None or model.require_backward_grad_sync)
        ):
            self.early.input_came(index)


def _no_model() -> None:
    return None
