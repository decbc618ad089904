"""The norm of all gradients together, of parts of them on each rank or of whole ones, and clipping by it.

[Note: one norm] Whether a step is deferred may hang on a clock, and what a run computes must not. So norms are summed
in float64, of the same elements in whatever order, and rounded to the gradients' type at the end.
"""

import functools
import math
from collections.abc import Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from .pending import Pending

_PIECE_NUMEL: Final = 1 << 18


def clip(
    pending: Pending,
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """See `DecoupledState.clip_grad_norm_`. Each rank looks at its own parts, unless some rank has whole gradients.

    **Collective**: three numbers per rank are exchanged.
    """
    pending.collect()
    shares, parameters = pending.shares, pending.parameters()
    if norm_type != 2.0 and any(
        update.gradient.is_complex() for share in shares for update in share.updates
    ):
        raise ValueError(
            f"expected norm_type=2 for complex gradients, got norm_type={norm_type}; call flush() and "
            "torch.nn.utils.clip_grad_norm_"
        )
    pieces = [piece for share in shares for piece in share.own_pieces()]
    summed = _sum_of_powers(pieces, norm_type, parameters[0].device)
    # gloo's maximum loses NaN.
    is_nan, is_whole = summed.isnan(), torch.full_like(summed, not shares)
    exchanged = torch.stack((summed.nan_to_num(nan=0.0, posinf=math.inf), is_nan, is_whole))
    dist.all_reduce(
        exchanged, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group
    )
    if shares and not exchanged[2]:
        summed, factor = torch.where(exchanged[1] > 0, math.nan, exchanged[0]), shares[0].factor
        norm = _root(summed, norm_type, [share.bucket.flat.dtype for share in shares])
        norm = norm if factor is None else norm * factor
    else:
        pending.make_whole()
        shares, gradients = [], [p.grad.detach() for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        summed = _sum_of_powers(gradients, norm_type, gradients[0].device)
        norm = _root(summed, norm_type, [gradient.dtype.to_real() for gradient in gradients])
    if error_if_nonfinite and not bool(norm.isfinite()):  # what torch raises, for the same reason
        raise RuntimeError(
            f"expected a finite norm of the gradients, got norm={norm.item()} for norm_type={norm_type}; "
            "look for the step that blew up, or pass error_if_nonfinite=False"
        )
    if pending.shares is not shares:  # whole by now; a signal's handler may have read
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for share in shares:
        share.factor = factor if share.factor is None else share.factor * factor
    return norm


def _sum_of_powers(
    tensors: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the sum of the numbers' powers, or the greatest of them, see [Note: one norm]."""
    summed = torch.zeros((), dtype=torch.float64, device=device)
    for values in tensors:
        if math.isinf(norm_type):
            norm = torch.linalg.vector_norm(values, norm_type)
            summed = torch.maximum(summed, norm.to(device, torch.float64))
            continue
        if values.is_complex() and norm_type == 2.0:  # as parts have them
            values = torch.view_as_real(values)
        dtype = torch.complex128 if values.is_complex() else torch.float64
        # In pieces: torch makes a copy in the type of the sum.
        for piece in values.reshape(-1).split(_PIECE_NUMEL):
            norm = torch.linalg.vector_norm(piece, norm_type, dtype=dtype)
            summed = summed + norm.to(device, torch.float64) ** norm_type
    return summed


def _root(summed: torch.Tensor, norm_type: float, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    """Return the norm whose powers have this sum, in the widest of the gradients' types."""
    norm: torch.Tensor = summed if math.isinf(norm_type) else summed ** (1.0 / norm_type)
    return norm.to(functools.reduce(torch.promote_types, dtypes))
