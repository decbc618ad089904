"""The part of K-FAC that runs on the hook's thread: it prepares each step and packs each bucket."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from crossover_ddp._ddp.contents import Content, contents_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.observe import Meter
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .capture import FactorCapture, WaitingDirections
from .curvature import SOLVERS, Curvature, OwnedLayer
from .factor_traffic import FactorTraffic
from .factors import WeightSharing
from .layers import Layer
from .placement import LayerCost, place
from .step import (
    Hyperparameters,
    PackedBucket,
    SpreadLayer,
    Step,
    StepHyperparameters,
    WholeLayer,
)

# The maximum number of groups in which a step's late factors leave. Each group costs messages.
_MAX_LATE_GROUPS: Final = 16


def learning_rates(
    optimizer: Optimizer | Sequence[Optimizer] | None, layers: Sequence[Layer]
) -> dict[int, float]:
    """Return the current learning rates by the parameters' ids.

    On failure: ``UnsupportedConfigurationError`` if a parameter of the layers is in none of the
    optimizers.
    """
    groups = [group for each in listed(optimizer) for group in each.param_groups]
    rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
    missing = [
        name for layer in layers for name, each in layer.parameters.items() if id(each) not in rates
    ]
    if missing:
        raise UnsupportedConfigurationError(
            "expected an optimizer that holds all parameters of K-FAC's layers, got none for "
            f"{', '.join(missing[:3])} ({len(missing)} in all), whose learning rates the KL clip "
            "needs; pass the optimizer that updates them, several as a sequence, or name the "
            "layers in skip=, or pass kl_clip=None"
        )
    return rates


def listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return the optimizers as a list. There may be one, several or none."""
    found: list[Any] = [optimizer] if hasattr(optimizer, "param_groups") else [*(optimizer or ())]
    for each in found:
        if not hasattr(each, "param_groups"):
            raise ValueError(
                "expected an optimizer or a sequence of them, got "
                f"optimizer={type(each).__name__}; pass torch.optim.Optimizer objects"
            )
    return found


@dataclass(eq=False, kw_only=True)
class Preconditioner:
    """Packs each bucket, counts steps, and holds the layers that this rank owns."""

    # The model inside of DDP and torch.compile. The reference is weak because DDP holds the state
    # where Python's garbage collector does not see it.
    model: weakref.ref[nn.Module]
    # The layers that K-FAC treats, and their costs in the same order.
    treated: Sequence[Layer]
    costs: Sequence[LayerCost]
    hyperparameters: Hyperparameters
    group: dist.ProcessGroup
    solver: Literal["inverse", "eigen"]
    # Whether the damping is divided between both factors according to their traces.
    pi: bool
    sharing: WeightSharing
    accumulated: Literal["mean", "sum"]
    # Whether owners use only their own factors, so that no factors travel.
    local: bool
    loss_scale: Callable[[], float]
    # Returns the learning rates by the parameters' ids.
    rates: Callable[[], dict[int, float]]

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        # The number of steps between two solvers, as of step 0. The choice of owners depends on it.
        self.inverse_steps = self.hyperparameters.at(0).inverse_steps
        self._waiting = WaitingDirections(self.treated)
        # The index of each parameter's layer, by the parameter's id.
        self._layer_of: dict[int, int] = {}
        for index, layer in enumerate(self.treated):
            for parameter in layer.parameters.values():
                self._layer_of[id(parameter)] = index
        self.begin(place(self.costs, self.world_size, self.inverse_steps))

    def begin(self, owners: Sequence[int], steps: int = 0) -> None:
        """Reset to the state after ``steps`` steps, with no factors or solvers yet.

        ``owners[i]`` is the rank that owns layer ``i``.
        """
        # The number of backward passes whose gradients have been exchanged.
        self.steps = steps
        # This rank's part of each layer.
        self.layers: list[OwnedLayer] = []
        of_layers = zip(self.treated, self.costs, owners, strict=True)
        for index, (layer, cost, owner) in enumerate(of_layers):
            curvature = self.curvature(layer) if owner == self.rank else None
            self.layers.append(OwnedLayer(index, layer, cost, owner, curvature))
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
        # For each bucket, by index: the tensor that travelled for it in the last step, for reuse.
        self.free: dict[int, Tensor] = {}
        # The backward pass under way. None before its first bucket is packed.
        self._step: Step | None = None
        # Whether a bucket in the backward pass under way was refused, perhaps before `_step` was
        # created.
        self._has_refused = False
        self._is_closed = False
        # The ids of the model's parameters, as they were when a bucket was last compared with them.
        self._known: set[int] = set()
        self._prepare_step()

    def curvature(self, layer: Layer) -> Curvature:
        """Create the state that a layer's owner keeps, without factors or a solver."""
        start: Any = "identity" if self.sharing == "kfac-pytorch" else "batch"
        return Curvature(layer.shape, SOLVERS[self.solver], self.pi, start)

    @property
    def own(self) -> dict[str, Curvature]:
        """The curvatures of the layers that this rank owns, by the layer's name."""
        return {
            each.layer.name: each.curvature for each in self.layers if each.curvature is not None
        }

    def close(self) -> None:
        """Take no more factors and compute no more solvers from now on."""
        self._is_closed = True
        self.traffic.late.clear()
        self.capture.close()

    # --- a step -----------------------------------------------------------------------------------

    def _prepare_step(self, after: Gate | None = None) -> None:
        """Prepare the next step: switch the capture on or off, and send late factors.

        ``after`` is the gate of the previous step's gradients. The factors leave when it is open.
        """
        # The next backward pass raises it, if there is one.
        self._error: Exception | None = None
        try:
            now = self._now()
        except Exception as error:
            # A schedule may end with the last step, so this may never be raised.
            self._error = error
            self.capture.active = False
            return
        self.capture.active = now.takes_factors and not environment.is_set(environment.DISABLE)
        # The next step's factors and solvers build on all factors taken so far.
        self.traffic.leave(after, all_groups=now.takes_factors or now.inverts)

    def _now(self) -> StepHyperparameters:
        now = self.hyperparameters.at(self.steps)
        if self._is_closed:
            return now._replace(takes_factors=False, inverts=False)
        return now

    @torch.no_grad()
    def enter(self, bucket: dist.GradBucket, meter: Meter) -> None:
        """Prepare a backward pass if ``bucket`` is its first. ``meter`` counts factor traffic."""
        if bucket.index():
            return
        self.traffic.meter = meter
        if self._step is not None:
            # The previous backward pass ended before its last bucket.
            self._step.refuse()
        self._step = None
        self._has_refused = False
        self.capture.begin_exchange()

    def refuse(self, bucket: dist.GradBucket) -> None:
        """Note that ``bucket`` will not be exchanged, so that no journey waits for it."""
        self._has_refused = True
        if self._step is not None:
            self._step.refuse()
        if bucket.is_last():
            if self._step is not None:
                self._step.end()
            self.end()

    def end(self) -> None:
        """Count the step whose last bucket is under way or refused, and prepare the next step."""
        ended = self._step
        after = None
        self._step = None
        if ended is not None:
            after = ended.all_written
            self._waiting.wait({self._layer_of[parameter] for parameter in ended.gradients})
            if ended.late_factors:
                groups = min(ended.now.factor_steps, _MAX_LATE_GROUPS)
                self.traffic.hold(ended.late_factors, groups, ended.now.decay)
        self._has_refused = False
        self.steps += 1
        self.capture.begin_step()
        self._prepare_step(after)

    def _begin(self, device: torch.device) -> Step:
        if self._error is not None:
            raise self._error
        now = self._now()
        rates = {} if now.kl_clip is None else self.rates()
        step = Step(now, rates, self.loss_scale(), device)
        if self._has_refused:
            step.refuse()
        return step

    # --- a bucket ---------------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self, bucket: dist.GradBucket) -> PackedBucket:
        """Pack the tensor that travels for ``bucket``, and send the factors of its layers.

        If the bucket has to be refused, this raises the error that says why.
        """
        # `.data` has a version counter of its own. So user code's writes show in the gradients'
        # counters, and ours do not.
        buffer = bucket.buffer().data
        if self._step is None:
            self._step = self._begin(buffer.device)
        step = self._step
        contents = [
            each._replace(gradient=each.gradient.data) for each in contents_of(bucket, buffer)
        ]
        self._check_known(bucket, contents)
        ids = [id(parameter) for parameter, *_ in contents]
        self._waiting.check([self._layer_of[each] for each in ids if each in self._layer_of])
        layers, passing, completed_later = self._sorted(step, contents)
        if bucket.is_last() and not step.is_refused:
            self._check_complete(step)
        if step.now.takes_factors and layers:
            self._send_factors(step, layers)
        return PackedBucket(
            bucket.index(),
            buffer,
            contents,
            layers,
            passing,
            rank=self.rank,
            size=self.world_size,
            free=self.free,
            factors_added=self.traffic.arrived,
            completed_later=completed_later,
        )

    def _send_factors(self, step: Step, layers: Sequence[WholeLayer | SpreadLayer]) -> None:
        """Take the layers' factors. Send them now or later, see [Note: late factors]."""
        factors = [self.traffic.taken(layer.owned) for layer in layers]
        if self.traffic.can_trail and not step.now.inverts:
            step.late_factors += factors
        else:
            self.traffic.send([each for of_layer in factors for each in of_layer], step.now.decay)

    def expect(self, bucket: Bucket, packed: PackedBucket) -> Step:
        """Count a packed bucket whose journey is about to begin, and return its step."""
        step = self._step
        assert step is not None
        step.all_preconditioned.expect_one_more()
        step.all_written.expect_one_more()
        if bucket.last:
            step.end()
        bucket.tensor = packed.flat
        return step

    def _sorted(
        self, step: Step, contents: Sequence[Content]
    ) -> tuple[list[WholeLayer | SpreadLayer], tuple[Span, ...], list[Gate]]:
        """Sort a bucket's contents into layers and spans that pass through.

        Returns:
            The layers that the bucket completes, the spans that pass through, and one gate for each
            layer that a later bucket completes.
        """
        complete = []
        passing = []
        incomplete = set()
        for parameter, gradient, span in contents:
            index = self._layer_of.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            step.gradients[id(parameter)] = gradient
            incomplete.add(index)
            parameters = self.treated[index].parameters.values()
            if all(id(each) in step.gradients for each in parameters):
                complete.append(self._bucket_layer(step, self.layers[index]))
                incomplete.remove(index)
        gates = []
        # A refused step writes nothing, so these gates would never open.
        if not step.is_refused:
            gates = [step.layer_written.setdefault(index, Gate()) for index in sorted(incomplete)]
        return complete, tuple(passing), gates

    def _bucket_layer(self, step: Step, owned: OwnedLayer) -> WholeLayer | SpreadLayer:
        parameters = owned.layer.parameters.values()
        weight, *bias = [step.gradients[id(each)] for each in parameters]
        # Without a clip there are no rates, and none are needed.
        lr, *of_bias = [step.rates.get(id(each), 0.0) for each in parameters]
        bias_lr = of_bias[0] if of_bias else lr
        # A row may hold weights and a bias, so its term in the clip's sum allows for only one rate.
        is_whole = step.now.inverts or owned.solver is None or bias_lr != lr
        kind = WholeLayer if is_whole else SpreadLayer
        gradients = [weight.mT if owned.layer.shape.transposed else weight, *bias]
        return kind(owned, gradients, lr, bias_lr, step.layer_written.get(owned.index))

    def _check_known(self, bucket: dist.GradBucket, contents: Sequence[Content]) -> None:
        given = {id(content.parameter) for content in contents}
        if bucket.index() or given <= self._known:
            return
        model = self.model()
        self._known = set() if model is None else {id(each) for each in model.parameters()}
        if not given <= self._known:
            raise UnsupportedConfigurationError(
                "this KFACState was made for another model: a bucket holds parameters that its "
                "model does not have; make a KFACState for each model"
            )

    def _check_complete(self, step: Step) -> None:
        """Refuse the last bucket in a backward pass if some of a layer's gradients have not come.

        The layer's other gradients would be exchanged neither as plain gradients nor as a
        direction.
        """
        for layer in self.treated:
            missing = [
                name for name, each in layer.parameters.items() if id(each) not in step.gradients
            ]
            if 0 < len(missing) < len(layer.parameters):
                raise UnsupportedConfigurationError(
                    "expected gradients of all parameters of K-FAC's layers, got none of "
                    f"{missing[0]}, which was frozen since the KFACState was made, or which DDP "
                    "ignores; make the KFACState after that, or name the layer in skip="
                )
