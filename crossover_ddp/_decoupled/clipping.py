"""Clips norms other than the 2-norm where parameters have owners.

`LazyGradients` answers for the 2-norm.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from .owned import OwnedPending


def clip(
    pending: OwnedPending,
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip gradients; see `OwnerState.clip_grad_norm_`.

    Powers are added in float64, so that the norm does not depend on the owners.

    **Collective**: each rank exchanges two numbers.
    """
    pending.check_can_step()
    parameters = pending.parameters()
    means = [mean for each in pending.owned for mean in each.own_means()]
    summed = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for mean in means:
        if math.isinf(norm_type):
            norm = torch.linalg.vector_norm(mean, norm_type).to(summed)
            summed = torch.maximum(summed, norm)
        else:
            summed += torch.linalg.vector_norm(mean, norm_type, dtype=torch.float64) ** norm_type
    # gloo's maximum drops NaN, so a separate number records whether there is one.
    exchanged = torch.stack((summed.nan_to_num(nan=0.0, posinf=math.inf), summed.isnan()))
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    dist.all_reduce(exchanged, operation, group=group)
    summed = torch.where(exchanged[1] > 0, math.nan, exchanged[0])
    norm = summed if math.isinf(norm_type) else summed ** (1.0 / norm_type)
    norm = norm.to(parameters[0].dtype)
    if error_if_nonfinite and not bool(norm.isfinite()):  # like torch
        raise RuntimeError(
            "expected a finite norm of the gradients, got "
            f"norm={norm.item()} for norm_type={norm_type}; look for the step that diverged, "
            "or pass error_if_nonfinite=False"
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
