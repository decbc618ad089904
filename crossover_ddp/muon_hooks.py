"""Muon on the gradient's own buckets: register `muon_hook` with ``ddp_model.register_comm_hook``.

Our design: under DDP every rank repeats Muon's Newton-Schulz of every matrix. Here each matrix has an owner. The
reduce-scatter brings it the summed gradient, it keeps the momentum and computes the direction, once for all ranks, and
the all-gather brings the direction to everybody, in bfloat16, as torch computes it: 0.75 of the bytes of an all-reduce
of float32 gradients. ``muon.step()`` stays torch's own. Muon: Keller Jordan, https://kellerjordan.github.io/posts/muon/
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Muon

from crossover_ddp._ddp.checks import check_not_capturing, resolve_group
from crossover_ddp._engine.buckets import Agreement, Pausable, check_state, guarded
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.muon import (
    Directions,
    check_optimizer,
    check_torch,
    newton_schulz_flop,
    power_of_two,
)

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex, turns_disabled

__all__ = ["MuonState", "muon_hook", "muon_parameters"]

logger = logging.getLogger(__name__)


class MuonState(Pausable):
    """State of `muon_hook`: each matrix of a ``torch.optim.Muon`` is orthogonalised once, on its owner.

    The training loop stays as it is: ``backward()``, then ``muon.step()`` and the step of the optimizer that has the
    other parameters. ``muon.step()`` applies the direction that came with the exchange, with the learning rate, weight
    decay and ``adjust_lr_fn`` of its own moment; ``momentum``, ``nesterov`` and the settings of Newton-Schulz are those
    of ``backward()``. Parameters equal those of plain DDP and ``torch.optim.Muon`` to the last bit with one or two
    ranks, and with more up to the order in which gradients are added.

    After ``backward()`` the gradients of Muon's matrices are zero on all ranks, or NaN if the mean was not finite, so
    that a GradScaler skips the step everywhere. The other parameters' gradients are the mean over the ranks. Clipping
    therefore sees the others only; Muon's directions do not depend on the size of a gradient. `grad_norm` tells the
    norm of what the matrices had.

    The momentum of a matrix is on its owner only. Call `consolidate` on all ranks before ``muon.state_dict()``, which
    then is torch's own format, and can be loaded with and without this hook, with any number of ranks.

    A step that is not taken changes nothing: after a mean that is not finite the next ``backward()`` goes on; after
    others call ``muon.zero_grad()``. Otherwise a second exchange without ``muon.step()`` is an error. Accumulate in
    ``no_sync()``.

    Args:
        muon: the optimizer; its matrices must be the DDP model's. Parameters of other optimizers need no mention.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: take turns with sibling jobs; Newton-Schulz is compute inside the turn. Default: no turns.
        loss_scale: what the loss was multiplied by before ``backward()``, such as ``scaler.get_scale``: a power of two,
            or a function that returns one. Default 1.
        compare_replicas: compare the ranks' parameters after 1, 2, 4, … steps and every thousand, by eight bytes; a
            difference raises ``ReplicasDifferError`` from ``backward()``.

    Attributes:
        owners: rank of each matrix, in the order of ``muon.param_groups``.
        loads: cost of each rank's Newton-Schulz in a step, in FLOP: 20·m²·n + 10·m³ a matrix, m the smaller side.

    On failure: ``TypeError`` for another optimizer, ``ValueError`` for a loss scale that is no power of two;
    ``UnsupportedConfigurationError``, here, from ``backward()`` or from ``muon.step()``, for what cannot work, with
    what to change; ``ExchangeError`` from ``backward()`` when a peer dies.

    **Collective**: all ranks make the state, of Muons that are built alike, and register the hook.
    ``CROSSOVER_DISABLE=1``, set before, makes the hook a plain all-reduce, and leaves Muon alone.

    Example::

        model.register_comm_hook(MuonState(muon), muon_hook)
    """

    def __init__(
        self,
        muon: Muon,
        *,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        compare_replicas: bool = True,
    ) -> None:
        check_optimizer(muon)
        check_torch()
        if not callable(loss_scale):
            power_of_two(loss_scale)
        self.process_group = process_group
        self.compare_replicas = compare_replicas
        self.muon = muon
        self.mutex = mutex
        self.agreement = Agreement()
        group = resolve_group(process_group)
        self._rank, self._world_size = group.rank(), group.size()
        pairs = [(matrix, each) for each in muon.param_groups for matrix in each["params"] if matrix.numel()]
        self._matrices = [matrix for matrix, _ in pairs]
        costs = [
            newton_schulz_flop(_shape(matrix), each["ns_steps"]) if matrix.requires_grad else 0
            for matrix, each in pairs
        ]
        self._assignment = assign(costs, group.size())
        self.owners, self.loads = self._assignment.owners, self._assignment.loads
        self._directions: Directions | None = None
        if turns_disabled():
            return
        self._directions = Directions(
            muon,
            {id(matrix): owner for matrix, owner in zip(self._matrices, self.owners, strict=True)},
            group.rank(),
            group.size(),
            loss_scale=loss_scale if callable(loss_scale) else lambda: loss_scale,
            state=self,
        )
        logger.info("%s", self)

    # --- for users -------------------------------------------------------------------------------------------

    @property
    def newton_schulz_calls(self) -> int:
        """Number of directions that this rank has computed so far."""
        return 0 if self._directions is None else self._directions.calls

    def grad_norm(self) -> torch.Tensor:
        """Return the 2-norm of the matrices' mean gradients in the last backward pass, without the loss's scale.

        With the norm n of the other parameters' gradients, such as ``clip_grad_norm_`` returns, that of the model is
        ``math.hypot(state.grad_norm(), n)``. float64, the same on all ranks. Not collective.

        Raises ``UnsupportedConfigurationError`` before the first exchange.
        """
        latest = None if self._directions is None else self._directions.latest
        if latest is None:
            raise UnsupportedConfigurationError(
                "expected a backward() with muon_hook before grad_norm(), got none yet; with CROSSOVER_DISABLE=1 the "
                "gradients are in p.grad"
            )
        return latest.grad_norm

    def consolidate(self, to: int | None = None) -> None:
        """Bring the momentum of all matrices into ``muon.state``, where it stays until the next step.

        Args:
            to: the rank of the group that keeps all of it; None: all ranks do.

        On failure: ``ValueError`` if there is no such rank; what torch's collectives raise when a peer has died.

        **Collective**: all ranks, between two steps.

        Example::

            state.consolidate(to=0)
            if rank == 0:
                torch.save(muon.state_dict(), path)
        """
        if self._directions is not None:
            self._directions.kept.consolidate(resolve_group(self.process_group), to)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps: "momentum", "next_momentum", "buffers". Not collective."""
        if self._directions is None:
            return {"momentum": 0, "next_momentum": 0, "buffers": 0}
        return self._directions.memory_usage()

    def close(self) -> None:
        """Give Muon back as torch made it. Later exchanges fail. Not collective, but after `consolidate` on all ranks.

        Raises ``UnsupportedConfigurationError`` if Muon would be left with a part of its momentum.
        """
        if self._directions is not None:
            self._directions.kept.check_whole()
            self._directions.close()

    def __repr__(self) -> str:
        own_count = sum(owner == self._rank for owner in self.owners)
        return (
            f"MuonState({len(self.owners)} matrices, {own_count} of them on rank {self._rank} of {self._world_size}, "
            f"the busiest rank has {self._assignment.busiest_share:.0%} of the cost)"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "expected a model without its hook, got a MuonState to be pickled or copied, which belongs to one process; "
            "copy or save model.module, and after consolidate() muon.state_dict()"
        )

    # --- for the hook ----------------------------------------------------------------------------------------

    @property
    def is_disabled(self) -> bool:
        """Whether ``CROSSOVER_DISABLE=1`` was set when the state was made."""
        return self._directions is None

    def _said(self) -> dict[str, object]:
        """Return what all ranks must have in common."""
        settings = [
            {name: value for name, value in each.items() if name != "params"}
            for each in self.muon.param_groups
        ]
        return {"matrices": [_shape(matrix) for matrix in self._matrices], "settings": settings}

    def exchange(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``; for `muon_hook`. Raises what makes it impossible."""
        directions = cast(Directions, self._directions)
        try:
            return (
                Exchange.of(group)
                .carry(
                    bucket,
                    lambda taken, link: directions.way(bucket, taken, link),
                    turn=self.mutex,
                    state=self,
                )
                .future
            )
        finally:
            if bucket.is_last():
                directions.end()


def muon_hook(state: MuonState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks, and bring the directions of Muon's matrices to all of them.

    Args:
        state: made once per model, on all ranks; see `MuonState`.
        bucket: DDP's bucket.

    Returns:
        A Future of the bucket's own buffer, with zeros for Muon's matrices.

    On failure: as `reduce_scatter_all_gather_hook`; see also `MuonState`. Nothing leaves the hook.

    **Collective**: DDP calls it on all ranks in the same order.

    Example::

        model.register_comm_hook(MuonState(muon), muon_hook)
    """

    def answer() -> torch.futures.Future[torch.Tensor]:
        check_state(state, MuonState, "pass MuonState(muon), with mutex= to share the device")
        group = resolve_group(state.process_group)
        state.agreement.make(group, state._said)
        if state.is_disabled:
            return allreduce_hook(group, bucket)
        check_not_capturing(bucket)
        with Exchange.of(group).comparing(bucket, state, state.compare_replicas):
            return state.exchange(group, bucket)

    return guarded(bucket, answer)


def muon_parameters(
    model: nn.Module, *, head: nn.Module | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters of ``model`` as torch's page on Muon says: matrices of hidden layers, and all others.

    Embeddings, whatever is tied to them, and the head are no hidden layers. Matrices that a module keeps as parameters
    of its own, such as embeddings of positions, are taken for hidden ones.

    Args:
        model: the module that is trained.
        head: the module that makes the outputs. Default: the last one that has a matrix.

    Returns:
        What is for ``torch.optim.Muon``, and what is for another optimizer, each in the model's order.

    Example::

        matrices, others = muon_parameters(model)
        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)
    """
    having = [
        module for module in model.modules() if any(p.ndim == 2 for p in module.parameters(recurse=False))
    ]
    apart: list[nn.Module] = [
        module for module in having if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    apart += [head] if head is not None else having[-1:]
    kept = {id(p) for module in apart for p in module.parameters()}
    parameters = [*model.parameters()]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in kept]
    hidden = {id(p) for p in matrices}
    return matrices, [p for p in parameters if id(p) not in hidden]


def _shape(matrix: torch.Tensor) -> tuple[int, int]:
    rows, columns = matrix.shape
    return rows, columns
