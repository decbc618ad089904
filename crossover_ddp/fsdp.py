"""Hooks for FSDP2, on the network between nodes.

FSDP2 (``torch.distributed.fsdp.fully_shard``) has no communication hooks. But if each node shards
the model by itself, the shards on the nodes are replicas of each other, and their gradients are
averaged as in DDP. `register_comm_hook` does that with the hooks and states of this package, or
with one for DDP.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from crossover_ddp._ddp import checks
from crossover_ddp._engine.states import HookState
from crossover_ddp._fsdp.hop import Hop
from crossover_ddp._system import torch_private

from .averaging_hooks import LocalSGDState
from .codecs import CompressedState
from .comm_hooks import CrossoverState, crossover_hook
from .errors import UnsupportedConfigurationError

__all__ = ["register_comm_hook"]

_STATES: Final = (CrossoverState, CompressedState, LocalSGDState)
_HOP: Final = "_crossover_ddp_hop"


def register_comm_hook(
    model: FSDPModule,
    state: object,
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[Any]],
) -> None:
    """Average the gradients of an FSDP2 model over the nodes with a DDP communication hook.

    Apply ``fully_shard`` with the one-dimensional mesh of the ranks inside a node. It averages
    gradients there. Then ``hook`` averages them over the ranks that have the same shard, one on
    each node: these are the process group of ``state``. With an exact hook and two nodes, the
    result has the bits of ``fully_shard`` with the whole two-dimensional mesh. On CPUs the exchange
    continues during the rest of backward; there ``fully_shard`` itself blocks.

    For `torch.distributed._composable.replicate_with_fsdp.replicate`, or with one device a node,
    pass a mesh of one rank.

    Args:
        model: the outermost module to which ``fully_shard`` was applied.
        state: the hook's state, with ``process_group=mesh["between"].get_group()``, or that process
            group itself if the hook has no other state. A wrapped hook needs it as well, as in
            ``CrossoverState(group, hook_state=group)``. `CrossoverState`, `CompressedState` and
            `LocalSGDState` work, and so do process groups and states of torch's own hooks. Turns
            belong to all ranks of the job.
        hook: the hook of that state, such as ``compressed_hook``,
            ``reduce_scatter_all_gather_hook``, ``crossover_wrapper(...)`` or torch's
            ``allreduce_hook``.

    On failure: ``TypeError`` if ``model`` is no FSDP2 module; ``RuntimeError`` if it already has a
    hook. ``UnsupportedConfigurationError`` for a two-dimensional mesh (of hybrid or tensor
    parallelism), for a process group of other ranks, and for hooks that need DDP's buckets or whole
    matrices: ``auto_hook``, ``decoupled_hook``, ``elastic_hook``, ``kfac_hook``, ``muon_hook`` and
    ``owner_hook``. ``backward()`` raises the errors of the hook. On gloo it raises ``ExchangeError``
    on all ranks of a node if one of them has failed; on NCCL, torch's watchdog ends their processes
    after the group's timeout.

    Not collective, but all ranks must make the same call, before the first forward.

    Example::

        mesh = init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("between", "inside"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["inside"])
        fully_shard(model, mesh=mesh["inside"])
        state = CompressedState(Int8(), process_group=mesh["between"].get_group())
        register_comm_hook(model, state, compressed_hook)
    """
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"expected a module to which fully_shard was applied, got model={type(model).__name__}; "
            "call fully_shard(model, mesh=mesh['inside']) first, and pass the outermost module"
        )
    if hasattr(model, _HOP):
        raise RuntimeError(
            "expected a model without a hook, got one that has a hook already; register one hook, "
            "once for each model"
        )
    if isinstance(state, HookState) and not isinstance(state, _STATES):
        known = ", ".join(each.__name__ for each in _STATES)
        raise UnsupportedConfigurationError(
            f"expected a state of {known}, or a process group, got {type(state).__name__}: its hook "
            "needs DDP's own buckets, or matrices that are whole on this rank, where FSDP2 has "
            "shards; use one of those states"
        )
    given: Any = state
    group = checks.resolve_group(getattr(state, "process_group", given))
    _check_shards(model, group)
    if isinstance(state, CrossoverState) and hook is not crossover_hook:
        _check_wrapped(state, group)
    hop = Hop(model, state, hook, group)  # type: ignore[arg-type]
    hop.register()
    setattr(model, _HOP, hop)


def _check_wrapped(state: CrossoverState, group: dist.ProcessGroup) -> None:
    """Refuse a wrapped hook that would average over other ranks than ``group``.

    Torch's hooks use the default group if their state is None.
    """
    inner = state.hook_state
    found = inner if inner is None else getattr(inner, "process_group", inner)
    if found is None or (isinstance(found, dist.ProcessGroup) and found is not group):
        raise UnsupportedConfigurationError(
            f"expected the process group of the CrossoverState for the wrapped hook as well, got "
            f"hook_state={inner!r}: it would average different shards; pass hook_state=group, or a "
            "state of that hook with process_group=group"
        )


def _check_shards(model: FSDPModule, group: dist.ProcessGroup) -> None:
    """Refuse shards on a mesh that is not the inside of a node, as seen from ``group``."""
    groups = torch_private.fsdp_groups(model)  # type: ignore[arg-type]
    wholes: list[Any] = [whole for each in groups for whole, _ in torch_private.fsdp_shards(each)]
    if not wholes:
        raise UnsupportedConfigurationError(
            "expected a model with sharded parameters, got one without any; call fully_shard after "
            "the model has its parameters"
        )
    for whole in wholes:
        mesh = whole.device_mesh
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or f"{mesh.ndim} dimensions"
            raise UnsupportedConfigurationError(
                f"expected shards on a mesh of one dimension, got one of {names}: FSDP2 itself "
                "would average over the second one, or parallelism of tensors divides it; pass "
                "fully_shard(..., mesh=mesh['inside']) with the ranks of this node"
            )
        inside = mesh.mesh.flatten().tolist()
        between = dist.get_process_group_ranks(group)
        if {*inside} & {*between} != {dist.get_rank()}:
            raise UnsupportedConfigurationError(
                f"expected a process group that shares only this rank with the shards' mesh, got "
                f"ranks {between} and a mesh of ranks {inside}: the group must have the ranks with "
                "the same shard, one on each node; pass process_group=mesh['between'].get_group()"
            )
