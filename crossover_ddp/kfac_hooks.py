"""K-FAC on the gradient's own buckets: register `kfac_hook` with ``ddp_model.register_comm_hook``.

Our design: the bucket is cut by layer owner, the factors of its layers ride in the same reduce-scatter, the owner
inverts them and preconditions its layers, and the all-gather that the gradient needs anyway brings the preconditioned
gradient to everybody. Placement after SPD-KFAC (arXiv 2107.06533), local factors after DP-KFAC (arXiv 2206.15143).
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from crossover_ddp._exchange.ddp_checks import (
    check_not_capturing,
    flat_gradients,
    model_of,
    resolve_group,
)
from crossover_ddp._exchange.engine import Exchange
from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.transfer import Cargo, Turn
from crossover_ddp._kfac.buckets import Content, contents_of
from crossover_ddp._kfac.capture import FactorCapture
from crossover_ddp._kfac.columns import WeightSharing
from crossover_ddp._kfac.costs import agree, layer_costs
from crossover_ddp._kfac.curvature import Curvature, Start
from crossover_ddp._kfac.factor_traffic import FactorTraffic
from crossover_ddp._kfac.factors import BatchFactor, DampedInverse, Eigenbasis, Solver
from crossover_ddp._kfac.late import HeldFactors
from crossover_ddp._kfac.layers import Layer, find_layers, group_of, unwrapped
from crossover_ddp._kfac.payload import BucketCargo, Passenger, Round, StepPlan
from crossover_ddp._kfac.placement import FactorPlan, Placement, place, placed
from crossover_ddp._kfac.settings import (
    Hyper,
    Hypers,
    check_any,
    check_choices,
    check_held,
    check_max_dim,
    check_parameters,
    check_together,
    learning_rates,
    warn_of_large,
)
from crossover_ddp._kfac.spread import SpreadLayers
from crossover_ddp._system.worker import Worker

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex, turns_disabled

__all__ = ["FactorPlan", "KFACState", "kfac_hook"]

logger = logging.getLogger(__name__)

_MOST_GROUPS: Final = 16  # each costs a message
_SOLVERS: Final[dict[str, type[Solver]]] = {"inverse": DampedInverse, "eigen": Eigenbasis}


class KFACState:
    """State of `kfac_hook`: gradients leave the exchange preconditioned, at the wire traffic of SGD.

    The training loop stays as it is: after ``backward()`` every ``p.grad`` of a Linear or Conv2d layer holds the
    K-FAC direction, for whatever ``optimizer.step()`` makes of it; other parameters hold the plain mean. A step that
    updates the factors adds one reduction of their triangles to the traffic, in this step or behind the next ones; a
    layer with more than half of a bucket, which all ranks precondition together, adds its solver when it is new.

    Args:
        model: the model, wrapped by DDP or not. Loss: the mean over the local mini-batch.
        optimizer: whose learning rates enter the KL clip, or a sequence of several. They must hold the parameters of
            all layers that are treated. Needed unless ``kl_clip`` is None.
        damping: γ, added to the factors' product. Default 0.001.
        factor_decay: weight of the old factors in the running mean, new = decay * old + (1 - decay) * batch.
        kl_clip: κ: all preconditioned gradients V are scaled by min(1, √(κ / Σ lr² V·∇)); None leaves them.
        factor_update_steps: factors are taken in every n-th step.
        inv_update_steps: new solvers are made of them in every n-th step.
        solver: "inverse" (Cholesky of each damped factor) or "eigen" (damping in the product's eigenbasis).
        pi: share the damping out between both factors by their traces; "inverse" only.
        weight_sharing: "expand" or "reduce" (Eschenhagen et al., arXiv 2311.00636) for layers applied at many
            positions of a sample, or "kfac-pytorch", which has that package's scale and start of the factors.
        factors: "global" averages the factors over the ranks; "local" (DP-KFAC) takes the owner's own: no traffic.
        inversion: "at_once", or "background": former solvers serve on until the new ones are there.
        loss_scale: what the loss was multiplied by before ``backward()``, such as ``scaler.get_scale``.
        accumulated: with several ``backward()`` per step, whether their losses were divided by their number ("mean").
        skip: names of modules, or patterns of names, that shall pass through.
        max_factor_dim: a layer with more inputs or outputs than this passes through, with a warning. A solver costs
            time with the cube and memory with the square: 14 s of one CPU core and 256 MiB a factor at 8192.
        costs: which costs of inversions decide who owns a layer: "typical" ones, so that the same job has the same
            owners, and rounds its sums alike, in every run; or those "measured" on rank 0 when the state is made.
        process_group: the ranks of the job; must be the group of the DDP model. Default: that of ``model`` if it is
            wrapped already, else the default group.
        mutex: take turns with sibling jobs; making solvers is compute inside the turn. Default: no turns.

    ``damping``, ``factor_decay``, ``kl_clip``, ``factor_update_steps`` and ``inv_update_steps`` may be functions of the
    step's number, equal on all ranks.

    On failure: ``ValueError`` for arguments; ``UnsupportedConfigurationError``, here or from the first ``backward()``,
    for models that cannot work; ``ExchangeError`` from ``backward()`` when a peer dies. A factor that cannot be
    inverted is damped further, one that is not finite is dropped; `report` counts both.

    **Collective**: all ranks make the state, of the same model with the same arguments, and register the hook.
    ``CROSSOVER_DISABLE=1`` makes the hook a plain all-reduce.

    Example::

        model.register_comm_hook(KFACState(model, optimizer), kfac_hook)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        damping: Hyper = 0.001,
        factor_decay: Hyper = 0.95,
        kl_clip: Hyper | None = 0.001,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 10,
        solver: Literal["inverse", "eigen"] = "inverse",
        pi: bool = True,
        weight_sharing: WeightSharing = "expand",
        factors: Literal["global", "local"] = "global",
        inversion: Literal["at_once", "background"] = "at_once",
        loss_scale: float | Callable[[], float] = 1.0,
        accumulated: Literal["mean", "sum"] = "mean",
        skip: Sequence[str] = (),
        max_factor_dim: int = 8192,
        costs: Literal["typical", "measured"] = "typical",
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
    ) -> None:
        check_choices(
            solver=solver,
            weight_sharing=weight_sharing,
            factors=factors,
            inversion=inversion,
            accumulated=accumulated,
            costs=costs,
        )
        self._hyper = Hypers(damping, factor_decay, kl_clip, factor_update_steps, inv_update_steps)
        self._inverse_steps = self._hyper.at(0).inverse_steps  # says what is wrong with them
        check_max_dim(max_factor_dim)
        check_together(kl_clip=kl_clip, optimizer=optimizer, inversion=inversion, mutex=mutex)
        self.process_group = group_of(model) if process_group is None else process_group
        self.optimizer = optimizer
        self.mutex = mutex
        self._loss_scale = loss_scale
        self._solver: Literal["inverse", "eigen"] = solver
        self._local = factors == "local"
        self._inverter = Worker("crossover-invert") if inversion == "background" else None
        self._take_model(model, skip, max_factor_dim, measure=costs == "measured")
        self._lrs = self._learning_rates(kl_clip is not None)
        start: Start = "identity" if weight_sharing == "kfac-pytorch" else "batch"
        self._new_curvature = functools.partial(Curvature, solver=_SOLVERS[solver], pi=pi, start=start)
        self._new_capture = functools.partial(
            FactorCapture,
            self._layers,
            model=model,
            sharing=weight_sharing,
            loss_scale=self._scale_now,
            accumulated=accumulated,
        )
        self._capture = FactorCapture((), sharing=weight_sharing)
        self._steps = 0
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._own(place(self._costs, self._world_size, self._inverse_cost, self._inverse_steps))
        logger.info("%s", self)

    def _own(self, placement: Placement) -> None:
        """Begin with nothing known of the layers that this rank owns now."""
        self._placement = placement
        self._round: Round | None = None
        self._held: list[HeldFactors] = []
        self._model_seen = False
        self._curvatures = {
            index: self._new_curvature(self._layers[index].shape)
            for index, owner in enumerate(placement.owners)
            if owner == self._rank
        }
        self._capture.close()
        self._spread = SpreadLayers([index for index, cost in enumerate(self._costs) if cost.spread])
        self._capture = self._new_capture(only=self._curvatures if self._local else None)
        self._traffic = FactorTraffic(
            self._layers,
            placement,
            self._costs,
            self._inverse_cost,
            capture=self._capture,
            process_group=self.process_group,
            local=self._local,
        )

    def _take_model(
        self, model: nn.Module, skip: Sequence[str], max_factor_dim: int, *, measure: bool
    ) -> None:
        """Find the model's layers, the same as on all ranks, and what they cost."""
        group = resolve_group(self.process_group)
        self._rank, self._world_size = group.rank(), group.size()
        self._network = weakref.ref(unwrapped(model))
        self._layers, self.passing = find_layers(model, skip, max_factor_dim)
        check_parameters(self._layers, model)
        self._roles = _roles(self._layers)
        # New solvers that are made in the background come at another step on each rank.
        steps = self._inverse_steps if self._inverter is None else None
        costs = layer_costs(model, self._layers, self._world_size, steps)
        solver = _SOLVERS[self._solver] if measure else None
        self._inverse_cost, self._costs = agree(costs, self._layers, group, measured=solver)
        check_any(self._layers, self.passing)
        if self._rank == 0:
            warn_of_large(self.passing)

    # --- for users -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of backward passes whose gradients were exchanged."""
        return self._steps

    def report(self) -> str:
        """Describe the layers, their owners, the owners' loads, and what passes through. Not collective."""
        lines = [repr(self)]
        for row in self._placement.rows(self._costs, self._inverse_cost, self._inverse_steps):
            curvature = self._curvatures.get(self._index(row.name))
            trouble = "" if curvature is None else _trouble(curvature)
            lines.append(
                f"  {row.name}: A {row.a_dim}, G {row.g_dim}"
                + (f", {row.groups} groups" if row.groups > 1 else "")
                + f", rank {row.owner}, {1e3 * row.seconds:.3g} ms"
                + (", spread over all ranks" if self._index(row.name) in self._spread.solvers else "")
                + trouble
            )
        for rank, load_s in enumerate(self._placement.loads_s):
            lines.append(f"  rank {rank} works for {1e3 * load_s:.3g} ms a step")
        lines += [f"  {name} passes through: {reason}" for name, reason in self.passing.items()]
        return "\n".join(lines)

    def plan_factors(self, *, early: bool | None = None) -> FactorPlan:
        """Choose whether input factors leave during forward, on a wire that is idle then, or ride in the buckets.

        That is, in steps that make solvers; in others they follow behind the gradients. By the times of the factor
        steps so far, a few probes of the link, and the cost model in ``_kfac/placement.py``; early factors of layers
        that are close together leave in one message. Call it again when the buckets or the link have changed.

        Args:
            early: True or False decides instead of the model; the groups are the model's all the same.

        Returns:
            Rank 0's plan, the same on all ranks, with the predicted seconds of a factor step both ways.

        On failure: ``UnsupportedConfigurationError``, on all ranks, with local factors, which do not travel, on a GPU,
        where the host's clock does not tell when kernels run, and before rank 0 has recorded a factor step.

        **Collective**: all ranks of the job, between two steps.
        """
        plan = self._traffic.plan(early)
        logger.info("%d groups of input factors leave during forward", len(plan.early))
        return plan

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps: "factors", "solvers", "buffers". Not collective."""
        return {
            "factors": sum(curvature.factor_bytes() for curvature in self._curvatures.values()),
            "solvers": sum(curvature.solver_bytes() for curvature in self._curvatures.values())
            + sum(
                each.nbytes() for index, each in self._spread.solvers.items() if index not in self._curvatures
            ),
            "buffers": sum(buffer.nbytes for buffer in self._buffers.values()) + self._traffic.late.nbytes,
        }

    def stats(self) -> dict[str, int]:
        """Return what went wrong with this rank's layers: "strained" and "dropped". Not collective."""
        return {
            "strained": sum(curvature.strained for curvature in self._curvatures.values()),
            "dropped": sum(curvature.dropped for curvature in self._curvatures.values()),
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Give the turn away during the block: evaluation, a checkpoint; see `GPUMutex.paused`."""
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step, and of all layers factors, solvers and counts, on the host.

        The same on all ranks, so that any rank can save it, and any number of ranks resume from it.

        **Collective**: all ranks must call it, between two steps. On failure: what ``all_gather_object`` raises,
        after the process group's timeout, if one does not.
        """
        self._traffic.late.settle()
        own = {
            self._layers[index].name: curvature.state_dict() for index, curvature in self._curvatures.items()
        }
        gathered: list[dict[str, Any]] = [{}] * self._world_size
        dist.all_gather_object(gathered, own, group=resolve_group(self.process_group))
        layers = {name: state for each in gathered for name, state in each.items()}
        return {
            "steps": self._steps,
            "solver": self._solver,
            "world_size": self._world_size,
            "owners": list(self._placement.owners),
            "columns": list(self._traffic.counts()),
            "layers": {layer.name: layers[layer.name] for layer in self._layers},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called. Not collective, but all ranks must.

        With as many ranks as then each layer keeps its owner, so that sums are rounded as before; with others each
        rank takes what it owns now. A plan of `plan_factors` has to be made again.

        Raises ``ValueError`` if the state is of another model, or of another ``solver``.
        """
        expected, got = [layer.name for layer in self._layers], list(state["layers"])
        if sorted(expected) != sorted(got) or state["solver"] != self._solver:
            raise ValueError(
                f"expected the state of layers {expected} with solver={self._solver!r}, got {got} with "
                f"solver={state['solver']!r}; make the model and KFACState as they were when it was saved"
            )
        same = state["world_size"] == self._world_size
        owners = state["owners"] if same else self._placement.owners
        self._own(placed(self._costs, owners, self._world_size, self._inverse_cost, self._inverse_steps))
        for index, curvature in self._curvatures.items():
            layer = self._layers[index]
            curvature.load_state_dict(state["layers"][layer.name], layer.weight.device)
        for index in [index for index, cost in enumerate(self._costs) if cost.spread]:
            layer = self._layers[index]
            if state["layers"][layer.name].get("root") is None:
                continue
            if index in self._curvatures:
                solver = self._curvatures[index].spread()
            else:
                others = self._new_curvature(layer.shape)
                others.load_state_dict(state["layers"][layer.name], layer.weight.device)
                solver = others.spread()
            if solver is not None:
                self._spread.solvers[index] = solver
        self._steps = state["steps"]
        self._traffic.load_counts(state["columns"])
        self._prepare_step()

    def close(self) -> None:
        """Take the hooks off the model's modules; later steps precondition with what is known. Not collective."""
        self._capture.close()
        if self._inverter is not None:
            self._inverter.stop()

    def __repr__(self) -> str:
        return (
            f"KFACState({len(self._layers)} layers, {len(self._curvatures)} of them on rank {self._rank} of "
            f"{self._world_size}, solver={self._solver!r}, {self._hyper})"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "expected a model without its hook, got a KFACState to be pickled or copied, which belongs to one process; "
            "copy or save model.module, also in AveragedModel(model.module), and the state's state_dict()"
        )

    # --- for the hook ----------------------------------------------------------------------------------------

    def exchange(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``; for `kfac_hook`. Raises what makes it impossible."""
        try:
            turn = cast(Turn | None, self.mutex)
            return Exchange.of(group).submit(
                bucket, turn=turn, load=functools.partial(self._load, bucket), state=self
            )
        finally:
            if not isinstance(bucket, dist.GradBucket) or bucket.is_last():
                self._end_round()

    @torch.no_grad()
    def _load(self, bucket: dist.GradBucket) -> Cargo:
        buffer = flat_gradients(bucket)
        if self._round is None or bucket.index() == 0:
            self._capture.begin_exchange()
            self._round = self._new_round()
            if self._round.plan.takes_factors:
                self._traffic.early.send_rest()
            self._held = []
        contents = contents_of(bucket, buffer)
        self._check_known(bucket, contents)
        passengers, passing = self._board(self._round, contents)
        if self._round.plan.takes_factors or self._round.plan.factors_trail:
            if bucket.is_last():
                self._round.counts = self._traffic.own_counts()
            indices = tuple([passenger.index for passenger in passengers])
            self._traffic.times.bucket_ready(buffer.nbytes, indices, last=bucket.is_last())
        key = (bucket.index(), buffer.dtype, buffer.device)

        def take(numel: int) -> Tensor:
            buffer_of_key = self._buffers.get(key)
            if buffer_of_key is None or buffer_of_key.numel() != numel:
                buffer_of_key = self._buffers[key] = buffer.new_empty(numel)
            return buffer_of_key

        return BucketCargo(self._round, passengers, buffer, passing, last=bucket.is_last(), take=take).cargo()

    def _new_round(self) -> Round:
        hyper = self._hyper.at(self._steps)
        self._lrs = self._learning_rates(hyper.kl_clip is not None)
        plan = StepPlan(
            rank=self._rank,
            world_size=self._world_size,
            owners=self._placement.owners,
            damping=hyper.damping,
            decay=hyper.decay,
            kl_clip=hyper.kl_clip,
            scale=self._scale_now(),
            takes_factors=hyper.takes_factors and not self._traffic.trails,
            factors_trail=hyper.takes_factors and self._traffic.trails,
            inverts=hyper.inverts,
            factors_travel=not self._local,
            inverter=self._inverter,
            keeps_turn=hyper.inverts and self.mutex is not None,
            solver=self._solver,
        )
        return Round(plan, self._curvatures, self._traffic.early.arrived, self._spread.solvers)

    def _learning_rates(self, clips: bool) -> dict[int, float]:
        """Return those of this moment by the parameters' ids; raise if the clip would miss one."""
        if not clips:
            return {}
        rates = learning_rates(self.optimizer)
        check_held(self._layers, rates)
        return rates

    def _board(self, round: Round, contents: Sequence[Content]) -> tuple[list[Passenger], tuple[Span, ...]]:
        """Return the layers that this bucket completes, and the spans that pass through."""
        passengers, passing = [], []
        for parameter, gradient, span in contents:
            index = self._roles.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            layer = self._layers[index]
            round.waiting[id(parameter)] = gradient
            others = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
            if all(id(other) in round.waiting for other in others):
                passengers.append(self._passenger(round, index, layer))
        return passengers, tuple(passing)

    def _passenger(self, round: Round, index: int, layer: Layer) -> Passenger:
        weight = round.waiting[id(layer.weight)]
        if layer.shape.transposed:
            weight = weight.mT
        bias = None if layer.bias is None else round.waiting[id(layer.bias)]
        trails = round.plan.factors_trail
        wanted = round.plan.takes_factors and (round.plan.factors_travel or index in self._curvatures)
        sends_a = trails or index not in self._traffic.early.layers
        a = self._capture.take_input(index) if (wanted or trails) and sends_a else None
        g = self._capture.take_output(index) if wanted or trails else None
        if trails:
            self._held.append(HeldFactors(index, a, g, self._traffic.room(index)))
            a = g = None
        lr = self._lrs.get(id(layer.weight), 0.0)  # without a clip it is not read
        spread, sends_solver = self._spread.of(index, renewed=round.plan.inverts)
        return Passenger(
            index,
            layer.shape,
            weight,
            bias,
            lr,
            a,
            g,
            sends_a,
            self._traffic.room(index),
            spread,
            sends_solver,
        )

    def _scale_now(self) -> float:
        return self._loss_scale() if callable(self._loss_scale) else self._loss_scale

    def _end_round(self) -> None:
        ended, self._round = self._round, None
        if ended is not None:
            self._traffic.end_step(ended)
        hyper = self._hyper.at(self._steps)
        if ended is not None and ended.plan.factors_trail:
            add = functools.partial(_add_factors, self._curvatures, hyper.decay)
            self._traffic.late.hold(self._held, min(hyper.factor_steps, _MOST_GROUPS), add)
            self._held = []
        self._steps += 1
        self._capture.begin_step()
        self._prepare_step()

    def _prepare_step(self) -> None:
        """Capture what the next step needs; have on the way what it builds on."""
        hyper = self._hyper.at(self._steps)
        self._capture.active = hyper.takes_factors
        self._traffic.trails = hyper.takes_factors and not hyper.inverts and self._traffic.can_trail
        self._traffic.late.leave(all_groups=hyper.takes_factors or hyper.inverts)

    def _check_known(self, bucket: dist.GradBucket, contents: Sequence[Content]) -> None:
        network = self._network()
        if network is None or bucket.index() or self._model_seen:
            return
        known = {id(parameter) for parameter in network.parameters()}
        if any(id(content.parameter) not in known for content in contents):
            raise UnsupportedConfigurationError(
                "expected the hook on the model that KFACState was made of, got a bucket with other parameters; "
                "make a KFACState for each model"
            )
        self._traffic.adopt(model_of(bucket, state=self))
        self._model_seen = True

    def _index(self, name: str) -> int:
        return next(index for index, layer in enumerate(self._layers) if layer.name == name)


def kfac_hook(state: KFACState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks and precondition it on the way, layer by layer on the layers' owners.

    Args:
        state: made once per model, on all ranks; see `KFACState`.
        bucket: DDP's bucket.

    Returns:
        A Future of the bucket's own buffer; all Futures of a step complete together.

    On failure: as `reduce_scatter_all_gather_hook`; see also `KFACState`. Nothing leaves the hook.

    **Collective**: DDP calls it on all ranks in the same order.

    Example::

        model.register_comm_hook(KFACState(model, optimizer), kfac_hook)
    """
    try:
        _check_state(state)
        group = resolve_group(state.process_group)
        if turns_disabled():
            return allreduce_hook(group, bucket)
        check_not_capturing(bucket)
        return state.exchange(group, bucket)
    except Exception as error:  # whatever it is, it must not leave the hook
        return Exchange.refuse(bucket, error)


def _check_state(state: object) -> None:
    if not isinstance(state, KFACState):
        raise UnsupportedConfigurationError(
            f"expected a KFACState, got state={type(state).__name__}; K-FAC needs its gradients whole before "
            "optimizer.step(), so it cannot be combined with another state: pass mutex= to share the device"
        )


def _add_factors(
    curvatures: Mapping[int, Curvature], decay: float, index: int, a: BatchFactor, g: BatchFactor
) -> None:
    curvatures[index].add(a, g, decay)


def _roles(layers: Sequence[Layer]) -> dict[int, int]:
    """Return which layer a parameter belongs to, by its id."""
    parameters = [(index, each) for index, layer in enumerate(layers) for each in (layer.weight, layer.bias)]
    return {id(parameter): index for index, parameter in parameters if parameter is not None}


def _trouble(curvature: Curvature) -> str:
    found = [
        f"{count} {what}"
        for count, what in (
            (curvature.strained, "times damped further"),
            (curvature.dropped, "batches dropped"),
        )
        if count
    ]
    return "".join(f", {text}" for text in found)
