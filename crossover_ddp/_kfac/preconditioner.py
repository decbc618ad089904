"""K-FAC on the hook's thread: what this rank owns, what each bucket sends, what steps need before and after."""

import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from crossover_ddp._ddp.contents import Content, contents_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket, JourneyTurn
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.observe import Meter
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .capture import FactorCapture, WaitingDirections
from .curvature import SOLVERS, Curvature, OwnedLayer
from .factor_traffic import FactorTraffic
from .factors import WeightSharing
from .journeys import HyperNow, Hypers, Packed, Rows, Step, Whole, precondition
from .layers import Layer
from .placement import LayerCost, place

_MOST_GROUPS: Final = 16  # of late factors; each costs messages


def learning_rates(
    optimizer: Optimizer | Sequence[Optimizer] | None, layers: Sequence[Layer]
) -> dict[int, float]:
    """Return those of this moment, by the parameters' ids; refuse optimizers that do not hold all of the layers."""
    groups = [group for each in listed(optimizer) for group in each.param_groups]
    rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
    missing = [
        name for layer in layers for name, each in layer.parameters.items() if id(each) not in rates
    ]
    if missing:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that holds all parameters of K-FAC's layers, got none for {', '.join(missing[:3])} "
            f"({len(missing)} in all), whose learning rates the KL clip needs; pass the optimizer that updates them, "
            "several as a sequence, or name the layers in skip=, or pass kl_clip=None"
        )
    return rates


def listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return the optimizers of one, of several or of none."""
    found: list[Any] = [optimizer] if hasattr(optimizer, "param_groups") else [*(optimizer or ())]
    for each in found:
        if not hasattr(each, "param_groups"):
            raise ValueError(
                f"expected an optimizer or a sequence of them, got optimizer={type(each).__name__}; pass "
                "torch.optim.Optimizer objects"
            )
    return found


@dataclass(eq=False, kw_only=True)
class Preconditioner:
    """Packs each bucket, counts steps, and has the layers that this rank owns.

    Args:
        model: weakly, since DDP holds the state where no collector sees it; without what wraps it.
        treated, costs: in one order.
        local: whether factors do not travel.
        keeps_turn: whether making solvers is compute inside the job's turn.

    Attributes:
        inverse_steps: how often solvers are made at the beginning.
        layers: what this rank has of each.
        free: by bucket, what has travelled in its place.
    """

    model: weakref.ref[nn.Module]
    treated: Sequence[Layer]
    costs: Sequence[LayerCost]
    hypers: Hypers
    group: dist.ProcessGroup
    solver: Literal["inverse", "eigen"]
    pi: bool
    sharing: WeightSharing
    accumulated: Literal["mean", "sum"]
    local: bool
    keeps_turn: bool
    loss_scale: Callable[[], float]
    rates: Callable[[], dict[int, float]]

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self.inverse_steps = self.hypers.at(0).inverse_steps
        self._waiting = WaitingDirections(self.treated)
        layers = enumerate(self.treated)
        self._layer_of = {
            id(each): index for index, layer in layers for each in layer.parameters.values()
        }
        self.begin(place(self.costs, self.world_size, self.inverse_steps))

    def begin(self, owners: Sequence[int], steps: int = 0) -> None:
        """Have the layers of which this rank is among ``owners``, with nothing known, after so many steps."""
        self.steps = steps
        of_layers = zip(self.treated, self.costs, owners, strict=True)
        self.layers = [
            OwnedLayer(
                index, layer, cost, owner, self.curvature(layer) if owner == self.rank else None
            )
            for index, (layer, cost, owner) in enumerate(of_layers)
        ]
        model = self.model()
        assert model is not None
        self.capture = FactorCapture(
            self.treated,
            model=model,
            sharing=self.sharing,
            accumulated=self.accumulated,
            loss_scale=self.loss_scale,
            only=[each.index for each in self.layers if each.curvature] if self.local else None,
            ranks=1 if self.local else self.world_size,
        )
        self.traffic = FactorTraffic(self.layers, self.capture, self.group, self.local)
        self.free: dict[int, Tensor] = {}
        self._step: Step | None = None
        self._is_refused = self._closed = False
        self._known: set[int] = set()  # the model's parameters
        self._prepare_step()

    def curvature(self, layer: Layer) -> Curvature:
        """Make what an owner of a layer has, with nothing known yet."""
        start: Any = "identity" if self.sharing == "kfac-pytorch" else "batch"
        return Curvature(layer.shape, SOLVERS[self.solver], self.pi, start)

    @property
    def own(self) -> dict[str, Curvature]:
        """What this rank owns, by name of layer."""
        return {
            each.layer.name: each.curvature for each in self.layers if each.curvature is not None
        }

    def close(self) -> None:
        """Take no factors and make no solvers from now on."""
        self._closed = True
        self.traffic.late.clear()
        self.capture.close()

    # --- a step ----------------------------------------------------------------------------------------------

    def _prepare_step(self, after: Gate | None = None) -> None:
        """Capture what the next step needs; send what it builds on ``after`` the former one's gradients."""
        self._error: Exception | None = None
        try:
            now = self._now()
        except Exception as error:  # of a function that knows no further step; there may be none
            self._error, self.capture.active = error, False
            return
        self.capture.active = now.takes_factors and not environment.is_set(environment.DISABLE)
        self.traffic.leave(after, all_groups=now.takes_factors or now.inverts)

    def _now(self) -> HyperNow:
        now = self.hypers.at(self.steps)
        return now._replace(takes_factors=False, inverts=False) if self._closed else now

    @torch.no_grad()
    def enter(self, bucket: dist.GradBucket, meter: Meter) -> None:
        """Prepare the exchange of a backward pass, if one begins with ``bucket``; ``meter`` counts its factors."""
        if bucket.index():
            return
        self.traffic.meter = meter
        if self._step is not None:
            self._step.refuse()  # of a pass that did not end
        self._step, self._is_refused = None, False
        self.capture.begin_exchange()

    def refuse(self, bucket: dist.GradBucket) -> None:
        """Note that ``bucket`` is not exchanged: nobody waits for it."""
        self._is_refused = True
        if self._step is not None:
            self._step.refuse()
        if bucket.is_last():
            if self._step is not None:
                self._step.end()
            self.end()

    def end(self) -> None:
        """Count a step whose last bucket is under way, or refused, and prepare the next one."""
        ended, self._step, after = self._step, None, None
        if ended is not None:
            after = ended.written
            self._waiting.wait({self._layer_of[parameter] for parameter in ended.waiting})
            if ended.taken:
                self.traffic.hold(
                    ended.taken, min(ended.now.factor_steps, _MOST_GROUPS), ended.now.decay
                )
        self._is_refused = False
        self.steps += 1
        self.capture.begin_step()
        self._prepare_step(after)

    def _begin(self, device: torch.device) -> Step:
        if self._error is not None:
            raise self._error
        now = self._now()
        rates = {} if now.kl_clip is None else self.rates()
        step = Step(now, rates, self.loss_scale(), device)
        if self._is_refused:
            step.refuse()
        return step

    # --- a bucket --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self, bucket: dist.GradBucket) -> Packed:
        """Pack what travels in the bucket's place, and send the factors of its layers. Raises what refuses it."""
        # Its own version counter: the user's changes show in the gradients', ours do not.
        buffer = bucket.buffer().data
        if self._step is None:
            self._step = self._begin(buffer.device)
        step, traffic = self._step, self.traffic
        contents = [
            each._replace(gradient=each.gradient.data) for each in contents_of(bucket, buffer)
        ]
        self._check_known(bucket, contents)
        self._waiting.check(
            [self._layer_of[id(p)] for p, *_ in contents if id(p) in self._layer_of]
        )
        layers, passing, elsewhere = self._completed(step, contents)
        if bucket.is_last() and not step.is_refused:
            self._check_whole(step)
        if step.now.takes_factors and layers:
            taken = [traffic.taken(layer.owned) for layer in layers]
            if traffic.can_trail and not step.now.inverts:
                step.taken += taken
            else:
                traffic.send([factor for of_layer in taken for factor in of_layer], step.now.decay)
        return Packed(
            bucket.index(),
            buffer,
            contents,
            layers,
            passing,
            rank=self.rank,
            size=self.world_size,
            free=self.free,
            factors=traffic.arrived,
            elsewhere=elsewhere,
        )

    def way(
        self, pack: Callable[[], Packed], bucket: Bucket, link: Link, turn: JourneyTurn
    ) -> Coroutine[Any, Any, None]:
        """Return the journey of what ``pack`` returns; nothing else raises any more."""
        packed, step = pack(), self._step
        assert step is not None
        step.worked.expect()
        step.written.expect()
        if bucket.last:
            step.end()
        bucket.tensor = packed.flat
        return precondition(
            packed,
            step,
            bucket,
            link,
            turn,
            solvers_in_turn=step.now.inverts and self.keeps_turn,
        )

    def _completed(
        self, step: Step, contents: Sequence[Content]
    ) -> tuple[list[Whole | Rows], tuple[Span, ...], list[Gate]]:
        """Return the layers that this bucket completes, what passes through, and gates of layers in a later one."""
        complete, passing, begun = [], [], set()
        for parameter, gradient, span in contents:
            index = self._layer_of.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            step.waiting[id(parameter)] = gradient
            begun.add(index)
            if all(id(each) in step.waiting for each in self.treated[index].parameters.values()):
                complete.append(self._bucket_layer(step, self.layers[index]))
                begun.remove(index)
        waits = (
            () if step.is_refused else sorted(begun)
        )  # a refused step writes nothing, and opens no gate
        return complete, tuple(passing), [step.whole.setdefault(index, Gate()) for index in waits]

    def _bucket_layer(self, step: Step, owned: OwnedLayer) -> Whole | Rows:
        parts = owned.layer.parameters.values()
        weight, *bias = [step.waiting[id(each)] for each in parts]
        lr, *of_bias = [
            step.rates.get(id(each), 0.0) for each in parts
        ]  # without a clip they are not read
        bias_lr = of_bias[0] if of_bias else lr
        # A bias of another rate has no part of its own in the rows' share of the clip's sum.
        kind = Whole if step.now.inverts or owned.solver is None or bias_lr != lr else Rows
        gradients = [weight.mT if owned.layer.shape.transposed else weight, *bias]
        return kind(owned, gradients, lr, bias_lr, step.whole.get(owned.index))

    def _check_known(self, bucket: dist.GradBucket, contents: Sequence[Content]) -> None:
        given = {id(content.parameter) for content in contents}
        if bucket.index() or given <= self._known:
            return
        network = self.model()
        self._known = {*map(id, () if network is None else network.parameters())}
        if not given <= self._known:
            raise UnsupportedConfigurationError(
                "expected the hook on the model that KFACState was made of, got a bucket with other parameters; "
                "make a KFACState for each model"
            )

    def _check_whole(self, step: Step) -> None:
        """Refuse a layer of which only a part has come: neither a plain gradient nor a direction would be exchanged."""
        for layer in self.treated:
            missing = [
                name for name, each in layer.parameters.items() if id(each) not in step.waiting
            ]
            if 0 < len(missing) < len(layer.parameters):
                raise UnsupportedConfigurationError(
                    f"expected gradients of all parameters of K-FAC's layers, got none of {missing[0]}, which was "
                    "frozen since the KFACState was made, or which DDP ignores; make the KFACState after that, or name "
                    "the layer in skip="
                )
