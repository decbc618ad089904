"""K-FAC inside the gradient exchange: register `kfac_hook` with ``ddp_model.register_comm_hook``.

    model.register_comm_hook(KFACState(model, optimizer), kfac_hook)

After ``backward()`` every ``p.grad`` of a Linear or Conv2d layer is the K-FAC direction, and
``optimizer.step()`` applies it as it applies any gradient. The module begins with `precondition`,
the coroutine that carries one bucket. The state, `KFACState`, and the hook, `kfac_hook`, follow.

Each layer has one owner, the rank that keeps its factors. The bucket's reduce-scatter brings the
layer's gradient to the owner, which preconditions it. The all-gather that the gradient needs anyway
brings the direction to all ranks. The factors travel in journeys of their own, in
``_kfac/factors.py``. Our design. The placement follows SPD-KFAC (arXiv 2107.06533), and local
factors follow DP-KFAC (arXiv 2206.15143).
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import logging
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._compression.codec import CodecChoice, in_words
from crossover_ddp._compression.compression import Compression
from crossover_ddp._ddp.checks import BoundModel, resolve_group
from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, Turn
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.states import HookState
from crossover_ddp._kfac import settings
from crossover_ddp._kfac.curvature import OwnedLayer, WeightSharing
from crossover_ddp._kfac.layers import ddp_in, find_layers, group_of, unwrapped
from crossover_ddp._kfac.preconditioner import (
    Hyperparameter,
    Hyperparameters,
    PackedBucket,
    Preconditioner,
    Step,
    learning_rates,
    listed,
)

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex

__all__ = ["KFACState", "kfac_hook"]

logger = logging.getLogger(__name__)


async def precondition(
    packed: PackedBucket,
    step: Step,
    bucket: Bucket,
    link: Link,
    turn: JourneyTurn,
    *,
    solvers_in_turn: bool,
) -> None:
    """Carry one bucket: average each layer at its owner, precondition it, gather directions.

    A direction is a layer's preconditioned gradient, and takes the gradient's place. A solver is
    the inverse or eigenbasis that preconditions it.

    With ``solvers_in_turn`` the owners make solvers before the job gives its turn away: that is
    compute of this step.

    **Spread layers** Most of ``packed.layers`` are whole: each travels to its owner and back. A
    layer that fills most of a bucket may be spread. It travels whole when its solver is new, and
    the owner then sends the solver to all ranks. In the steps between, each rank preconditions some
    of the layer's rows, see [Note: spread layers].

    **Late factors** Factors travel in journeys of their own. If this step takes factors and makes
    solvers, the journey with the factors of these layers began just before this one, and
    ``packed.factors_added`` opens at its end. In other steps, factors on CPUs are late: they leave
    in groups, one group when ``step.all_written`` opens in this step, and one in each following
    step, see [Note: late factors].

    If a peer dies, the timeout passes or the process group ends, the ``await`` under way raises.
    That ends all journeys of the group, and ``backward()`` raises the error. Nothing is undone
    here.

    [Note: who waits for whom] A solver is made of the running means. It waits for the factors that
    were sent before it, and these wait for those sent before them, because a running mean depends
    on the order. No direction is written before the scale of the KL clip is known, and the scale
    depends on the owners' work on all buckets of the step. A layer whose weight and bias come in
    two buckets travels with the last of them. The journey of the other bucket ends when the layer
    is written. These waits form no circle: factors wait for buckets of former steps only, owners'
    work for factors, the scale for owners' work, buckets for the scale and for later buckets.
    """
    if not solvers_in_turn:
        # This step's compute is launched: a sibling job may compute while gradients travel.
        turn.release()
    # Wait until backward has computed the gradients. On a device its kernels may still run.
    await bucket.computed()
    # `packed.flat` holds the bucket's gradients, sorted by rank. Each rank sends every other rank
    # its part. Afterwards this rank's part is the mean over the ranks: of the layers that it owns,
    # of its rows of spread layers, and of its share of the parameters that are not preconditioned.
    await link.reduce_scatter(packed.flat, packed.layout)
    if not solvers_in_turn:
        # Half-way: join the siblings' queue for the next turn.
        turn.request()

    # An inversion may take long, so it runs where it delays no other bucket's reduction.
    await link.compute()
    for layer in packed.layers:
        if layer.needs_solver(step.now):
            # Solvers are made of the running means: wait for all factors sent before this bucket.
            await packed.factors_added
        with packed.exact():  # in full precision, even under autocast
            # The owner preconditions a whole layer. Each rank preconditions its rows of a spread
            # layer. The result is this rank's term in the KL clip's sum, if it has one.
            term = layer.precondition(step.now, link.rank)
        if term is not None:
            step.kl_terms[layer.owned.index] = term
    step.all_preconditioned.count_down()
    if bucket.last:
        # The KL clip's scale needs this rank's terms of all buckets: wait for their journeys.
        await step.all_preconditioned
        if bucket.deferred:
            # Gathers of deferred buckets begin when all are reduced, so the scale travels ahead of
            # them. Otherwise it travels behind the last gather (below), which would have to wait
            # for the slowest owner.
            await step.agree_on_scale(link)

    # A deferred bucket waits until all buckets are reduced: the next forward needs the last one
    # first. If the training thread has dropped the bucket meanwhile, there is nothing to gather.
    if not bucket.deferred or await bucket.all_reduced():
        if solvers_in_turn:
            # The owners' inversions were the last compute of this step.
            turn.release()
            turn.request()
        # Each owner sends its directions to all ranks.
        await link.all_gather(packed.flat, packed.layout)
        # New solvers of layers that will be spread follow from their owners to all ranks.
        await packed.share_solvers(link, renew=step.now.inverts)
        if bucket.last and not bucket.deferred:
            await step.agree_on_scale(link)
        # All other buckets wait here for the last one, which computes the scale.
        await step.scale_known
        # If a layer has one part in this bucket and the rest in a later one, the later bucket's
        # journey writes both.
        for layer_written in packed.completed_later:
            await layer_written
        # If a bucket of the step was refused, `backward()` raises: leave the gradients as they are.
        if not step.is_refused:
            packed.unpack(step.scale)
    packed.free[packed.number] = packed.flat  # a later step packs this bucket there
    # The last bucket opens this latch, and then one group of late factors leaves.
    step.all_written.count_down()
    # The optimizer and the next forward need the turn. For a deferred bucket this does nothing: the
    # next forward acquires it.
    await turn.acquire()


class KFACState(HookState):
    """State of `kfac_hook`: the exchange preconditions gradients at the wire traffic of SGD.

    The training loop stays as it is. After ``backward()`` every ``p.grad`` of a Linear or Conv2d
    layer holds the K-FAC direction, which any optimizer's ``step()`` can apply. Other parameters'
    gradients hold the plain mean. A step that updates the factors also sends one reduction of their
    triangles, in the same step or behind the next ones. If a layer takes up more than half of a
    bucket, all ranks precondition it together. Such a layer also sends its solver whenever that is
    new.

    Args:
        model: the model, wrapped by DDP or not. Its loss must be the mean over the local
            mini-batch.
        optimizer: the optimizer whose learning rates enter the KL clip, or a sequence of several
            optimizers. Together they must hold the parameters of all layers that K-FAC treats. This
            argument is required unless ``kl_clip`` is None.
        damping: γ, which is added to the product of the factors. Default 0.001.
        factor_decay: the weight of the old factors in the running mean: new = decay * old +
            (1 - decay) * batch. Default 0.95.
        kl_clip: κ. All preconditioned gradients V are scaled by min(1, √(κ / Σ lr² V·∇)). With None
            they are not scaled. Default 0.001.
        factor_update_steps: the number of steps from one update of the factors to the next. Default
            1.
        inv_update_steps: the number of steps after which new solvers are computed from the factors.
            Default 10.
        solver: "inverse" inverts each damped factor by Cholesky. "eigen" applies the damping in the
            eigenbasis of the product. Default "inverse".
        pi: divide the damping between both factors according to their traces. This applies only to
            "inverse". Default True.
        weight_sharing: how to treat layers that are applied at many positions of a sample: "expand"
            or "reduce" (Eschenhagen et al., arXiv 2311.00636), or "kfac-pytorch", which scales and
            initializes the factors as that package does. Default "expand".
        factors: "global" averages the factors over the ranks. "local" (DP-KFAC) uses the owner's
            own factors and sends none. Default "global".
        loss_scale: the factor by which the loss is multiplied before ``backward()``, or a function
            that returns it, such as ``scaler.get_scale``. Default 1.
        accumulated: how the losses are scaled if a step has several ``backward()`` calls. Pass
            "mean" if each loss is its share of the step's loss, such as a mean divided by the
            number of calls. Pass "sum" if each loss is a mean of its own. Default "mean".
        skip: names of modules, or patterns of names. The gradients of these modules are averaged
            but not preconditioned. Each name or pattern must match a module.
        max_factor_dim: a layer with more inputs or outputs than this passes through, with a
            warning. A solver's time grows with the cube of this number and its memory with the
            square: at 8192, the default, a factor takes 14 s on one CPU core and 256 MiB.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            group of ``model`` if it is wrapped already, else the default group.
        mutex: the mutex for taking turns with sibling jobs. Solvers are computed inside the turn.
            Default: no turns.
        codec: compress gradients on their way to owners, and directions on their way back, with
            error feedback. Pass one codec for both ways, such as ``crossover_ddp.Int8()``,
            or a pair. Factors and everything else are not compressed. With a codec no layer is
            spread, and the first two steps are not compressed. Default: no codec.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.

    A KFACState can also be passed to `DecoupledKFACState`: ``DecoupledKFACState(optimizer,
    KFACState(model, optimizer))``. Then the preconditioned gradient arrives, and is applied, during
    the next forward.

    ``damping``, ``factor_decay``, ``kl_clip``, ``factor_update_steps`` and ``inv_update_steps`` may
    be functions of the step's number, which must be equal on all ranks. The value of
    ``inv_update_steps`` in step 0 determines the owners and the choice of spread layers.

    On failure: the constructor raises ``ValueError`` for wrong arguments. For models that cannot
    work, the constructor or the first ``backward()`` raises ``UnsupportedConfigurationError``.
    ``backward()`` raises ``ExchangeError`` when a peer dies (for NCCL see
    `reduce_scatter_all_gather_hook`). A factor that cannot be inverted is damped further, and a
    factor that is not finite is dropped; `report` counts both.

    **Collective**: all ranks create the state, for the same model with the same arguments, and
    register the hook. ``CROSSOVER_DISABLE=1`` turns the hook into a plain all-reduce.

    Example::

        model.register_comm_hook(KFACState(model, optimizer), kfac_hook)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        damping: Hyperparameter = 0.001,
        factor_decay: Hyperparameter = 0.95,
        kl_clip: Hyperparameter | None = 0.001,
        factor_update_steps: int | Callable[[int], int] = 1,
        inv_update_steps: int | Callable[[int], int] = 10,
        solver: Literal["inverse", "eigen"] = "inverse",
        pi: bool = True,
        weight_sharing: WeightSharing = "expand",
        factors: Literal["global", "local"] = "global",
        loss_scale: float | Callable[[], float] = 1.0,
        accumulated: Literal["mean", "sum"] = "mean",
        skip: Sequence[str] = (),
        max_factor_dim: int = 8192,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        codec: CodecChoice | None = None,
        compare_replicas: bool = True,
    ) -> None:
        hyperparameters = Hyperparameters(
            damping, factor_decay, kl_clip, factor_update_steps, inv_update_steps
        )
        first = hyperparameters.at(0)  # raises for values out of range
        choices: dict[str, str] = {
            "solver": solver,
            "weight_sharing": weight_sharing,
            "factors": factors,
            "accumulated": accumulated,
        }
        settings.check_choices(choices)
        if not isinstance(max_factor_dim, int) or max_factor_dim < 1:
            raise ValueError(
                "expected a whole number of rows, 1 or more, got "
                f"max_factor_dim={max_factor_dim!r}; 8192 is the default"
            )
        if not listed(optimizer) and kl_clip is not None:
            raise ValueError(
                "expected the optimizer, whose learning rates enter the KL clip, got "
                f"optimizer={optimizer}; pass it, or kl_clip=None"
            )
        group = group_of(model) if process_group is None else process_group
        super().__init__(group, None, compare_replicas)
        network = unwrapped(model)
        self.bound_model = BoundModel(ddp_in(model), network)
        self.optimizer = optimizer
        self.mutex = mutex
        self.codec = codec
        group = resolve_group(group)
        layers, self.passing = find_layers(model, skip, max_factor_dim)
        settings.check_parameters(layers, model)
        # A codec cannot encode the rows of a spread layer. In the eigenbasis no gain was measured.
        spread_steps = first.inverse_steps if codec is None and solver == "inverse" else None
        costs = settings.layer_costs(model, layers, group.size(), spread_steps)
        # The last two fields are left out, because they are derived from the others.
        values_at_first_step = dict(zip(hyperparameters._fields, first, strict=False))
        costs = settings.agree(costs, layers, group, {**values_at_first_step, **choices, "pi": pi})
        settings.check_any(layers, self.passing)
        if kl_clip is not None:
            learning_rates(optimizer, layers)  # raises if parameters are missing
        if group.rank() == 0:
            settings.warn_of_large(self.passing)
            settings.warn_of_adaptive(optimizer, layers)
        # Ends the journeys that a DecoupledKFACState has under way between two steps. Without a
        # DecoupledKFACState there are no such journeys.
        self._flush: Callable[[], None] = nothing
        self._is_deferred = False
        self._preconditioner = Preconditioner(
            model=weakref.ref(network),
            treated=layers,
            costs=costs,
            hyperparameters=hyperparameters,
            group=group,
            solver=solver,
            pi=pi,
            sharing=weight_sharing,
            accumulated=accumulated,
            local=factors == "local",
            loss_scale=loss_scale if callable(loss_scale) else lambda: float(loss_scale),
            rates=lambda: learning_rates(self.optimizer, layers),
        )
        self._compression = None
        if codec is not None:
            scale = self._preconditioner.loss_scale
            self._compression = Compression(codec, scale, self, has_work=True)
        logger.info("%s", self)

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that must be equal on all ranks when training begins or resumes."""
        return {"codec": in_words(self.codec), "steps of KFACState": self._preconditioner.steps}

    # --- for users --------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of backward passes whose gradients were exchanged."""
        return self._preconditioner.steps

    @property
    def owners(self) -> dict[str, int]:
        """The rank that owns each layer treated by K-FAC, by the layer's name."""
        return {each.layer.name: each.owner for each in self._preconditioner.layers}

    def report(self) -> str:
        """Describe the layers, owners, each rank's load, and the parameters that pass through.

        Not collective.
        """
        owned = self._preconditioner
        lines = [repr(self)]
        lines += [self._described(each) for each in owned.layers]
        for rank in range(owned.world_size):
            costs = [each.cost for each in owned.layers if each.owner == rank]
            load_s = sum(cost.step_s(owned.inverse_steps) for cost in costs)
            lines.append(f"rank {rank} works for {1e3 * load_s:.3g} ms a step")
        lines += [f"{name} passes through: {reason}" for name, reason in self.passing.items()]
        return "\n  ".join(lines)

    def _described(self, owned: OwnedLayer) -> str:
        """Return the line for one layer in `report`."""
        cost = owned.cost
        step_s = cost.step_s(self._preconditioner.inverse_steps)
        line = f"{cost.name}: A {cost.a_dim}, G {cost.g_dim}"
        if cost.groups > 1:
            line += f", {cost.groups} groups"
        line += f", rank {owned.owner}, {1e3 * step_s:.3g} ms"
        if owned.solver is not None:
            line += ", spread over all ranks"
        if owned.curvature is not None:
            if owned.curvature.strained:
                line += f", {owned.curvature.strained} times damped further"
            if owned.curvature.dropped:
                line += f", {owned.curvature.dropped} batches dropped"
        return line

    def memory_usage(self) -> dict[str, int]:
        """Return how many bytes of "factors", "solvers" and "buffers" this rank keeps.

        Not collective.
        """
        owned = self._preconditioner
        factors = solvers = 0
        for layer in owned.layers:
            if layer.curvature is not None:
                factors += layer.curvature.factor_bytes()
                solvers += layer.curvature.solver_bytes()
            elif layer.solver is not None:
                solvers += layer.solver.nbytes
        buffers = owned.traffic.nbytes + sum(flat.nbytes for flat in owned.free.values())
        return {"factors": factors, "solvers": solvers, "buffers": buffers}

    def stats(self) -> dict[str, Any]:
        """Return the common statistics and two counts for this rank's layers.

        "strained" counts the factors that were damped further because they could not be inverted.
        "dropped" counts the batches that changed no factor, including batches in which a layer had
        no gradient.

        If this state is part of a `DecoupledKFACState`, the `DecoupledKFACState` counts the
        traffic. Not collective. See docs/troubleshooting.md.
        """
        own = self._preconditioner.own.values()
        coded = None if self._compression is None else self._compression.stats()
        return {
            **self._common_stats(codec=self.codec, coded=coded),
            "strained": sum(each.strained for each in own),
            "dropped": sum(each.dropped for each in own),
        }

    def drain(self) -> None:
        """Let the next step travel without compression, together with all residuals.

        See `CompressedState.drain`. **Collective**.
        """
        if self._compression is not None:
            self._compression.drain()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        coded = self._compression
        group = self._preconditioner.group
        if coded is not None and all(gather_objects(group, coded.is_drained)):
            # The next steps are not compressed, like those of a resumed job.
            coded.load({}, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the step's number, and all layers' factors, solvers and counts, on the host.

        The result is the same on all ranks, so that any rank can save it and any number of ranks
        can resume from it. It does not contain a codec's residuals: call `drain` before the last
        step. Otherwise the residuals are lost, and a warning is logged.

        **Collective**: all ranks must call it between two steps. On failure: ``ExchangeError`` if a
        rank does not call it within the process group's timeout, or if factors are lost on the way.
        """
        self._flush()
        if self._compression is not None and not self._compression.is_drained:
            logger.warning(
                "a codec's residuals are not saved; call drain() before the step before "
                "state_dict()"
            )
        owned = self._preconditioner
        owned.traffic.settle()
        own = {name: each.state_dict() for name, each in owned.own.items()}
        states: dict[str, Any] = {}
        for of_rank in gather_objects(owned.group, own):
            states.update(of_rank)
        return {
            "steps": self.steps,
            "solver": owned.solver,
            "world_size": owned.world_size,
            "owners": [*self.owners.values()],
            "layers": {name: states[name] for name in self.owners},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state_dict` was called. Not collective, but all ranks must call it.

        If the number of ranks is the same, each layer keeps its owner, so that sums are rounded as
        before. If it differs, each rank takes the layers that it owns now.

        Raises ``ValueError`` if the state was saved with another model or another ``solver``.
        """
        self._flush()
        owned = self._preconditioner
        self._check_loadable(state)
        has_same_ranks = state["world_size"] == owned.world_size
        owners = state["owners"] if has_same_ranks else [*self.owners.values()]
        owned.close()
        owned.begin(owners, state["steps"])
        for each in owned.layers:
            saved = state["layers"][each.layer.name]
            is_spread = each.cost.spread and saved.get("root") is not None
            if is_spread or each.curvature is not None:
                curvature = each.curvature or owned.curvature(each.layer)
                curvature.load_state_dict(saved, each.layer.weight.device)
                each.solver = curvature.spread() if is_spread else None
        if self._compression is not None:
            self._compression.load({}, None)
        self.agreement.forget()

    def _check_loadable(self, state: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a state that does not fit, on all ranks alike."""
        owned = self._preconditioner
        if "layers" not in state:
            raise ValueError(
                f"expected the state dict of a KFACState, got keys {sorted(state)}; pass the "
                "result of its state_dict(), or checkpoint() with kfac_hook"
            )
        expected = list(self.owners)
        got = list(state["layers"])
        if sorted(expected) != sorted(got) or state["solver"] != owned.solver:
            raise ValueError(
                f"expected the state of layers {expected} with solver={owned.solver!r}, got {got} "
                f"with solver={state['solver']!r}; make the model and KFACState as they were when "
                "it was saved"
            )
        for layer in owned.treated:
            shape = layer.shape
            saved = state["layers"][layer.name]
            for factor, dim in ((saved["a"], shape.a_dim), (saved["g"], shape.g_dim)):
                if factor is not None and (*factor.shape,) != (shape.groups, dim, dim):
                    raise ValueError(
                        f"expected a factor of shape {(shape.groups, dim, dim)} for layer "
                        f"{layer.name!r}, got {(*factor.shape,)}; load the state of the same model"
                    )

    def close(self) -> None:
        """Remove the hooks from the model's modules. Later steps use the existing solvers.

        Not collective, but all ranks must call it between the same two steps, because later steps
        send no factors.
        """
        self._flush()
        self._preconditioner.close()

    def __repr__(self) -> str:
        owned = self._preconditioner
        return (
            f"KFACState({len(owned.layers)} layers, {len(owned.own)} of them on rank {owned.rank} "
            f"of {owned.world_size}, solver={owned.solver!r}, {owned.hyperparameters})"
        )

    # --- for the hooks ----------------------------------------------------------------------------

    def defer(self, state: Any) -> None:
        """Become part of a `DecoupledKFACState`, whose ``flush`` ends the journeys under way."""
        if self.mutex is not state.mutex:
            raise ValueError(
                f"expected one mutex, got mutex={state.mutex!r} and a KFACState with "
                f"mutex={self.mutex!r}; pass it to both"
            )
        group = resolve_group(self.process_group)
        if group is not resolve_group(state.process_group):
            raise ValueError(
                f"expected one process group, got a KFACState of another, of {group.size()} ranks; "
                "pass process_group= to both states"
            )
        if self._is_deferred or self.codec is not None:
            found = "that is part of another" if self._is_deferred else "with a codec"
            raise UnsupportedConfigurationError(
                "expected a new KFACState without a codec for each DecoupledKFACState, got one "
                f"{found}; make a KFACState(model, optimizer) for it"
            )
        self._flush = state.flush
        self._is_deferred = True
        self.agreement = state.agreement

    def exchange(
        self,
        exchange: Exchange,
        bucket: dist.GradBucket,
        *,
        state: object,
        turn: Turn | None,
        hands_back: bool = False,
        before: Callable[[], object] = nothing,
    ) -> Bucket:
        """Start the exchange of ``bucket`` for a hook, as `Exchange.send` does.

        This first ends an unfinished backward pass. Then it calls ``before``, which may raise.

        Raises the error that refuses the bucket.
        """
        preconditioner = self._preconditioner

        # With a codec, the codec calls this first; otherwise the journey does. By then all other
        # checks have passed. The bucket is packed only once.
        @functools.cache
        def pack() -> PackedBucket:
            if bucket.parameters()[0] not in self.bound_model.names:  # once per bucket
                self.bound_model.bind(bucket, state)
            return preconditioner.pack(bucket)

        def make(
            under_way: Bucket, link: Link, journey_turn: JourneyTurn
        ) -> Coroutine[Any, Any, None]:
            packed = pack()
            # Nothing below raises, so every bucket that a step expects does travel.
            step = preconditioner.expect(under_way, packed)
            solvers_in_turn = step.now.inverts and self.mutex is not None
            return precondition(
                packed, step, under_way, link, journey_turn, solvers_in_turn=solvers_in_turn
            )

        preconditioner.enter(bucket, exchange.meter_of(state))
        coded = None
        if self._compression is not None:
            coded = self._compression.around(bucket, exchange, pack)
        try:
            before()
            taken = exchange.send(
                bucket, make, turn=turn, state=state, around=coded, hands_back=hands_back
            )
        except Exception:
            preconditioner.refuse(bucket)
            raise
        if bucket.is_last():
            preconditioner.end()
        return taken


def kfac_hook(state: KFACState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks, and precondition each of its layers on the layer's owner.

    Args:
        state: the model's state; create one per model, on all ranks, see `KFACState`.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that holds the bucket's own buffer. With a KL clip all Futures of a step complete
        together.

    On failure: like `reduce_scatter_all_gather_hook`; see also `KFACState`. The hook itself raises
    nothing.

    **Collective**: DDP calls it on all ranks in the same order.
    """

    def start(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
        if state._is_deferred:
            raise UnsupportedConfigurationError(
                "expected decoupled_hook for a KFACState that is part of a DecoupledKFACState, got "
                "kfac_hook; register DecoupledKFACState(optimizer, kfac) with decoupled_hook, or "
                "make another KFACState"
            )
        turn = cast(Turn | None, state.mutex)
        return state.exchange(exchange, bucket, state=state, turn=turn).future

    return run_hook(
        state,
        bucket,
        KFACState,
        "K-FAC needs its gradients whole before optimizer.step(), so it cannot be combined with "
        "another state: pass mutex= to share the device",
        start,
    )
