"""K-FAC on the gradient's own buckets: register `kfac_hook` with ``ddp_model.register_comm_hook``.

Our design: the bucket is cut by layer owner, the factors of its layers go to the same owner, as a journey of their own
just before it (where no solver is made, behind the gradients of this step and the next ones), the owner inverts them
and preconditions its layers, and the all-gather that the gradient needs anyway brings the preconditioned gradient to
everybody. Placement after SPD-KFAC (arXiv 2107.06533), local factors after DP-KFAC (arXiv 2206.15143).
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._compression.codec import CodecChoice, in_words
from crossover_ddp._compression.compression import Compression
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._ddp.groups import told_by_all
from crossover_ddp._engine.buckets import Bucket, Turn
from crossover_ddp._engine.exchange import Exchange, answered
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.states import Agreement, HookState
from crossover_ddp._kfac import settings
from crossover_ddp._kfac.factors import WeightSharing
from crossover_ddp._kfac.journeys import Hyper, Hypers
from crossover_ddp._kfac.layers import find_layers, group_of, unwrapped
from crossover_ddp._kfac.preconditioner import Preconditioner, learning_rates, listed

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex

__all__ = ["KFACState", "kfac_hook"]

logger = logging.getLogger(__name__)


class KFACState(HookState):
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
        loss_scale: what the loss was multiplied by before ``backward()``, such as ``scaler.get_scale``.
        accumulated: with several ``backward()`` per step, whether each loss is its share of the step's ("mean"), such
            as a mean divided by their number, or a mean of its own ("sum").
        skip: list of names of modules, or patterns of names, that shall pass through. Each must match a module.
        max_factor_dim: a layer with more inputs or outputs than this passes through, with a warning. A solver costs
            time with the cube and memory with the square: 14 s of one CPU core and 256 MiB a factor at 8192.
        process_group: the ranks of the job; must be the group of the DDP model. Default: that of ``model`` if it is
            wrapped already, else the default group.
        mutex: take turns with sibling jobs; making solvers is compute inside the turn. Default: no turns.
        codec: compresses gradients on their way to owners, and directions on their way back, with error feedback; one
            for both, or a pair. Factors and all else travel exact. Such as ``crossover_ddp.codecs.Int8()``. No layer is
            spread then, and the first two steps travel exact. Default: none.
        compare_replicas: raise ``ReplicasDifferError`` if parameters differ after 1, 2, 4, … steps, and every thousand.

    `DecoupledState` takes a KFACState, too: ``DecoupledState(optimizer, kfac=KFACState(model, optimizer))``. Then the
    preconditioned gradient arrives, and is applied, while the next forward runs.

    ``damping``, ``factor_decay``, ``kl_clip``, ``factor_update_steps`` and ``inv_update_steps`` may be functions of the
    step's number, equal on all ranks. Owners, and which layers are spread, follow from ``inv_update_steps`` of step 0.

    On failure: ``ValueError`` for arguments; ``UnsupportedConfigurationError``, here or from the first ``backward()``,
    for models that cannot work; ``ExchangeError`` from ``backward()`` when a peer dies (on NCCL see
    `reduce_scatter_all_gather_hook`). A factor that cannot be inverted is damped further, one that is not finite is
    dropped; `report` counts both.

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
        loss_scale: float | Callable[[], float] = 1.0,
        accumulated: Literal["mean", "sum"] = "mean",
        skip: Sequence[str] = (),
        max_factor_dim: int = 8192,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        codec: CodecChoice | None = None,
        compare_replicas: bool = True,
    ) -> None:
        hypers = Hypers(damping, factor_decay, kl_clip, factor_update_steps, inv_update_steps)
        first = hypers.at(0)  # says what is wrong with them
        choices: dict[str, str] = {
            "solver": solver,
            "weight_sharing": weight_sharing,
            "factors": factors,
        }
        choices["accumulated"] = accumulated
        settings.check_choices(choices)
        arguments = {**dict(zip(hypers._fields, first, strict=False)), **choices, "pi": pi}
        if not isinstance(max_factor_dim, int) or max_factor_dim < 1:
            raise ValueError(
                "expected a whole number of rows, 1 or more, got "
                f"max_factor_dim={max_factor_dim!r}; 8192 is the default"
            )
        if not listed(optimizer) and kl_clip is not None:
            raise ValueError(
                f"expected the optimizer, whose learning rates enter the KL clip, got optimizer={optimizer}; pass it, "
                "or kl_clip=None"
            )
        self.process_group = group_of(model) if process_group is None else process_group
        self.optimizer = optimizer
        self.mutex = mutex
        self.codec = codec
        self.compare_replicas = compare_replicas
        self.agreement = Agreement()
        group = resolve_group(self.process_group)
        layers, self.passing = find_layers(model, skip, max_factor_dim)
        settings.check_parameters(layers, model)
        # No codec for rows of a layer; in the eigenbasis nobody has measured a gain.
        spread_steps = first.inverse_steps if codec is None and solver == "inverse" else None
        costs = settings.layer_costs(model, layers, group.size(), spread_steps)
        costs = settings.agree(costs, layers, group, arguments)
        settings.check_any(layers, self.passing)
        if kl_clip is not None:
            learning_rates(optimizer, layers)  # says what is wrong with them
        if group.rank() == 0:
            settings.warn_of_large(self.passing)
            settings.warn_of_adaptive(optimizer, layers)
        self._flush: Callable[[], None] = nothing  # alone nothing is under way between steps
        self._is_deferred = False
        self._preconditioner = Preconditioner(
            model=weakref.ref(unwrapped(model)),
            treated=layers,
            costs=costs,
            hypers=hypers,
            group=group,
            solver=solver,
            pi=pi,
            sharing=weight_sharing,
            accumulated=accumulated,
            local=factors == "local",
            keeps_turn=mutex is not None,
            loss_scale=loss_scale if callable(loss_scale) else lambda: float(loss_scale),
            rates=lambda: learning_rates(self.optimizer, layers),
        )
        scale = self._preconditioner.loss_scale
        self._compression = (
            None if codec is None else Compression(codec, scale, self, has_work=True)
        )
        logger.info("%s", self)

    def said(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return what all ranks must have in common when training begins or goes on."""
        return {"codec": in_words(self.codec), "steps of KFACState": self._preconditioner.steps}

    # --- for users -------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of backward passes whose gradients were exchanged."""
        return self._preconditioner.steps

    @property
    def owners(self) -> dict[str, int]:
        """Rank of each layer that K-FAC treats, by the layer's name."""
        return {each.layer.name: each.owner for each in self._preconditioner.layers}

    def report(self) -> str:
        """Describe the layers, their owners, the owners' loads, and what passes through. Not collective."""
        owned, lines = self._preconditioner, [repr(self)]
        for each in owned.layers:
            cost, own = each.cost, each.curvature
            lines.append(
                f"{cost.name}: A {cost.a_dim}, G {cost.g_dim}"
                + (f", {cost.groups} groups" if cost.groups > 1 else "")
                + f", rank {each.owner}, {1e3 * cost.step_s(owned.inverse_steps):.3g} ms"
                + (", spread over all ranks" if each.solver is not None else "")
            )
            if own is not None:
                counts = {"times damped further": own.strained, "batches dropped": own.dropped}
                lines[-1] += "".join(f", {count} {what}" for what, count in counts.items() if count)
        for rank in range(owned.world_size):
            load_s = sum(
                e.cost.step_s(owned.inverse_steps) for e in owned.layers if e.owner == rank
            )
            lines.append(f"rank {rank} works for {1e3 * load_s:.3g} ms a step")
        lines += [f"{name} passes through: {reason}" for name, reason in self.passing.items()]
        return "\n  ".join(lines)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps: "factors", "solvers", "buffers". Not collective."""
        owned = self._preconditioner
        own = owned.own.values()
        others = [
            each.solver
            for each in owned.layers
            if each.curvature is None and each.solver is not None
        ]
        return {
            "factors": sum(each.factor_bytes() for each in own),
            "solvers": sum(each.solver_bytes() for each in own)
            + sum(each.nbytes for each in others),
            "buffers": owned.traffic.nbytes + sum(flat.nbytes for flat in owned.free.values()),
        }

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, and what went wrong with this rank's layers: "strained" and "dropped".

        "strained": factors that were damped further because they could not be inverted. "dropped": batches that changed
        nothing, including those of a layer without a gradient.

        Part of a `DecoupledState`, what travels is counted there. Not collective. See docs/troubleshooting.md.
        """
        own = self._preconditioner.own.values()
        found = {
            "strained": sum(each.strained for each in own),
            "dropped": sum(each.dropped for each in own),
        }
        coded = None if self._compression is None else self._compression.stats()
        return {**self._told(codec=self.codec, coded=coded), **found}

    def drain(self) -> None:
        """Let the next step travel exact, residuals included; see `CompressedState.drain`. **Collective**."""
        if self._compression is not None:
            self._compression.drain()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        coded, group = self._compression, self._preconditioner.group
        if coded is not None and all(told_by_all(group, coded.is_drained)):
            coded.load({}, None)  # the next steps travel exact, as a resumed job's

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step, and of all layers factors, solvers and counts, on the host.

        The same on all ranks, so that any rank can save it, and any number of ranks resume from it. A codec's residuals
        are not in it: call `drain` before the last step, or they are lost, with a warning.

        **Collective**: all ranks must call it, between two steps. On failure: ``ExchangeError``, if one does not
        after the process group's timeout, and if factors on their way are lost.
        """
        self._flush()
        if self._compression is not None and not self._compression.is_drained:
            logger.warning(
                "a codec's residuals are not saved; call drain() before the step before state_dict()"
            )
        owned = self._preconditioner
        owned.traffic.settle()
        own = {name: each.state_dict() for name, each in owned.own.items()}
        states = {
            name: state for each in told_by_all(owned.group, own) for name, state in each.items()
        }
        return {
            "steps": self.steps,
            "solver": owned.solver,
            "world_size": owned.world_size,
            "owners": [*self.owners.values()],
            "layers": {name: states[name] for name in self.owners},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called. Not collective, but all ranks must.

        With as many ranks as then each layer keeps its owner, so that sums are rounded as before; with others each
        rank takes what it owns now.

        Raises ``ValueError`` if the state is of another model, or of another ``solver``.
        """
        self._flush()
        owned = self._preconditioner
        if "layers" not in state:
            raise ValueError(
                f"expected the state dict of a KFACState, got keys {sorted(state)}; pass what its state_dict() "
                "returned, or checkpoint() with kfac_hook"
            )
        expected, got = list(self.owners), list(state["layers"])
        if sorted(expected) != sorted(got) or state["solver"] != owned.solver:
            raise ValueError(
                f"expected the state of layers {expected} with solver={owned.solver!r}, got {got} with "
                f"solver={state['solver']!r}; make the model and KFACState as they were when it was saved"
            )
        for layer in owned.treated:  # on all ranks alike, before anything is changed
            shape, saved = layer.shape, state["layers"][layer.name]
            for factor, dim in ((saved["a"], shape.a_dim), (saved["g"], shape.g_dim)):
                if factor is not None and (*factor.shape,) != (shape.groups, dim, dim):
                    raise ValueError(
                        f"expected a factor of shape {(shape.groups, dim, dim)} for layer {layer.name!r}, got "
                        f"{(*factor.shape,)}; load the state of the same model"
                    )
        same = state["world_size"] == owned.world_size
        owned.close()
        owned.begin(state["owners"] if same else [*self.owners.values()], state["steps"])
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

    def close(self) -> None:
        """Take the hooks off the model's modules; later steps precondition with what is known.

        Not collective, but all ranks must, between the same two steps: later steps send no factors.
        """
        self._flush()
        self._preconditioner.close()

    def __repr__(self) -> str:
        owned = self._preconditioner
        return (
            f"KFACState({len(owned.layers)} layers, {len(owned.own)} of them on rank {owned.rank} of "
            f"{owned.world_size}, solver={owned.solver!r}, {owned.hypers})"
        )

    # --- for the hook ----------------------------------------------------------------------------------------

    def defer(self, state: Any) -> None:
        """Become part of ``state``, a `DecoupledState`, whose ``flush`` ends what is under way."""
        if self.mutex is not state.mutex:
            raise ValueError(
                f"expected one mutex, got mutex={state.mutex!r} and a KFACState with mutex={self.mutex!r}; pass it to "
                "both"
            )
        if (group := resolve_group(self.process_group)) is not resolve_group(state.process_group):
            raise ValueError(
                f"expected one process group, got a KFACState of another, of {group.size()} ranks; pass process_group= "
                "to both states"
            )
        if self._is_deferred or self.codec is not None:
            raise UnsupportedConfigurationError(
                "expected a new KFACState without a codec for each DecoupledState, got one "
                f"{'that is part of another' if self._is_deferred else 'with a codec'}; make a KFACState(model, "
                "optimizer) for it"
            )
        self._flush, self._is_deferred, self.agreement = state.flush, True, state.agreement

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
        """Start the exchange of ``bucket``, for the hooks, as `Exchange.carry`. Raises what makes it impossible.

        ``before`` is called when what another backward pass has left is ended; it may refuse the bucket.
        """
        pack = functools.cache(
            lambda: self._preconditioner.pack(bucket)
        )  # when all else has been checked
        way = functools.partial(self._preconditioner.way, pack)
        self._preconditioner.enter(bucket, exchange.meter_of(state))
        coded = (
            None if self._compression is None else self._compression.around(bucket, exchange, pack)
        )
        try:
            before()
            taken = exchange.carry(
                bucket, way, turn=turn, state=state, around=coded, hands_back=hands_back
            )
        except Exception:
            self._preconditioner.refuse(bucket)
            raise
        if bucket.is_last():
            self._preconditioner.end()
        return taken


def kfac_hook(state: KFACState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks and precondition it on the way, layer by layer on the layers' owners.

    Args:
        state: made once per model, on all ranks; see `KFACState`.
        bucket: DDP's bucket.

    Returns:
        A Future of the bucket's own buffer. With a KL clip all Futures of a step complete together.

    On failure: as `reduce_scatter_all_gather_hook`; see also `KFACState`. Nothing leaves the hook.

    **Collective**: DDP calls it on all ranks in the same order.
    """

    def carry(exchange: Exchange) -> torch.futures.Future[torch.Tensor]:
        if state._is_deferred:
            raise UnsupportedConfigurationError(
                "expected decoupled_hook for a KFACState that is part of a DecoupledState, got kfac_hook; register "
                "DecoupledState(optimizer, kfac=...) with decoupled_hook, or make another KFACState"
            )
        turn = cast(Turn | None, state.mutex)
        return state.exchange(exchange, bucket, state=state, turn=turn).future

    return answered(
        state,
        bucket,
        KFACState,
        "K-FAC needs its gradients whole before optimizer.step(), so it cannot be combined with another state: pass "
        "mutex= to share the device",
        carry,
    )
