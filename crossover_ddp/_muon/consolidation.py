"""All ranks' momentum in one place, for a checkpoint."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._engine.endings import let_collectives_go

from .momentum import OwnedMomentum


@torch.no_grad()
def consolidate(
    matrices: Sequence[Tensor],
    owners: Sequence[int],
    momentum: OwnedMomentum,
    group: dist.ProcessGroup,
    to: int | None,
) -> None:
    """Send each matrix's momentum from its owner to all ranks; rank ``to`` keeps it, or all for None.

    Collective: all ranks, between two steps.
    """
    rank = group.rank()
    if group.size() == 1 or not matrices:
        return
    own = [owner == rank and momentum.kept(index) is not None for index, owner in enumerate(owners)]
    exists = torch.tensor(own, dtype=torch.int32, device=matrices[0].device)
    dist.all_reduce(exists, group=group)
    others: dict[int, Tensor] = {}
    for index, (matrix, found) in enumerate(zip(matrices, exists.tolist(), strict=True)):
        if not found:
            continue
        kept = momentum.kept(index) if owners[index] == rank else None
        sent = torch.empty_like(matrix, memory_format=torch.preserve_format) if kept is None else kept
        dist.broadcast(_in_memory(sent), group=group, group_src=owners[index])
        if kept is None and to in (None, rank):
            others[index] = sent
    if to in (None, rank):
        momentum.complete(others)
    let_collectives_go(group)  # these may be a job's last


def _in_memory(matrix: Tensor) -> Tensor:
    """Return the same elements in the order of memory: what is sent must be contiguous."""
    return matrix if matrix.is_contiguous() else matrix.T
