"""Clips the total norm of all gradients, from each rank's parts or from whole gradients.

[Note: one norm] A clock may decide whether a step is deferred, but the results of a run must not
depend on the clock. So powers are summed in float64 over the same elements, in any order, and the
norm is rounded to the gradients' type at the end.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from .pending import DeferredBucket, Pending

_PIECE_NUMEL: Final = 1 << 18


def clip(
    pending: Pending,
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip gradients; see `DecoupledState.clip_grad_norm_`.

    Each rank reads only its own parts, unless some rank has already completed its gradients.

    **Collective**: each rank exchanges three numbers.
    """
    with pending.lock:  # a thread that saves a checkpoint could complete gradients meanwhile
        pending.collect()
        buckets = pending.awaiting_step
        parameters = pending.parameters()
        _check_real(buckets, norm_type)
        pieces = [piece for each in buckets for piece in each.own_pieces()]
        summed = _sum_of_powers(pieces, norm_type, parameters[0].device)
        # gloo's maximum drops NaN, so a separate number reports whether there is one.
        is_nan = summed.isnan()
        is_whole = torch.full_like(summed, not buckets)
        exchanged = torch.stack((summed.nan_to_num(nan=0.0, posinf=math.inf), is_nan, is_whole))
        operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        dist.all_reduce(exchanged, operation, group=group)
        if buckets and not exchanged[2]:
            summed = torch.where(exchanged[1] > 0, math.nan, exchanged[0])
            norm = _root(summed, norm_type, [each.bucket.flat.dtype for each in buckets])
            if buckets[0].factor is not None:
                norm = norm * buckets[0].factor
        else:
            pending.make_whole()
            buckets = []
            gradients = [p.grad.detach() for p in parameters if p.grad is not None]
            if not gradients:
                return torch.zeros(())
            summed = _sum_of_powers(gradients, norm_type, gradients[0].device)
            norm = _root(summed, norm_type, [gradient.dtype.to_real() for gradient in gradients])
        if error_if_nonfinite and not bool(norm.isfinite()):  # like torch
            raise RuntimeError(
                "expected a finite norm of the gradients, got "
                f"norm={norm.item()} for norm_type={norm_type}; look for the step that diverged, "
                "or pass error_if_nonfinite=False"
            )
        if pending.awaiting_step is not buckets:
            # The gradients are complete: this call, or a signal handler's read, has completed them.
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for each in buckets:
            each.factor = factor if each.factor is None else each.factor * factor
        return norm


def _check_real(buckets: Sequence[DeferredBucket], norm_type: float) -> None:
    updates = [update for each in buckets for update in each.updates]
    if norm_type != 2.0 and any(update.gradient.is_complex() for update in updates):
        raise ValueError(
            f"expected norm_type=2 for complex gradients, got norm_type={norm_type}; call flush() "
            "and torch.nn.utils.clip_grad_norm_"
        )


def _sum_of_powers(
    tensors: Iterable[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return the sum of the elements' powers, or the largest magnitude; see [Note: one norm]."""
    summed = torch.zeros((), dtype=torch.float64, device=device)
    for values in tensors:
        if math.isinf(norm_type):
            norm = torch.linalg.vector_norm(values, norm_type)
            summed = torch.maximum(summed, norm.to(device, torch.float64))
            continue
        if values.is_complex() and norm_type == 2.0:  # the parts of buckets are real too
            values = torch.view_as_real(values)
        dtype = torch.complex128 if values.is_complex() else torch.float64
        # Work in pieces, because torch makes a copy in the type of the sum.
        for piece in values.reshape(-1).split(_PIECE_NUMEL):
            norm = torch.linalg.vector_norm(piece, norm_type, dtype=dtype)
            summed = summed + norm.to(device, torch.float64) ** norm_type
    return summed


def _root(summed: torch.Tensor, norm_type: float, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    """Take the root of the summed powers. Return the norm in the widest gradient dtype."""
    norm: torch.Tensor = summed if math.isinf(norm_type) else summed ** (1.0 / norm_type)
    return norm.to(functools.reduce(torch.promote_types, dtypes))
