"""Clips norms other than the 2-norm where parameters have owners.

`LazyGradients` answers for the 2-norm.
"""

import functools

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

    The norm of each gradient comes from its owner, and all ranks combine the norms in the order of
    the parameters, in float64. So the result depends neither on the owners nor on their number.

    **Collective**: each rank exchanges a number for each parameter.
    """
    pending.check_can_step()
    parameters = pending.parameters()
    norm_of = functools.partial(torch.linalg.vector_norm, ord=norm_type, dtype=torch.float64)
    norms = torch.zeros(len(parameters), dtype=torch.float64, device=parameters[0].device)
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    for each in pending.owned:
        for parameter, mean in each.own_means():
            norms[place[id(parameter)]] = norm_of(mean)
    dist.all_reduce(norms, group=group)  # all but the owner add zero
    norm: torch.Tensor = norm_of(norms).to(parameters[0].dtype)
    if error_if_nonfinite and not bool(norm.isfinite()):  # like torch
        raise RuntimeError(
            "expected a finite norm of the gradients, got "
            f"norm={norm.item()} for norm_type={norm_type}; look for the step that diverged, "
            "or pass error_if_nonfinite=False"
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
