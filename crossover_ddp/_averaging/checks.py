"""What cannot train without waiting is refused, with the line to change."""

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.checks import OWN_BUFFERS, check_group, model_of, wants_buffers_broadcast
from crossover_ddp.errors import UnsupportedConfigurationError

from .flat import FlatBlock

_OWN: Final = "crossover_ddp."
_KFAC: Final = "crossover_ddp._kfac"


def model_behind(bucket: dist.GradBucket, state: object, group: dist.ProcessGroup) -> DistributedDataParallel:
    """Return the model that ``state`` was registered with; raise what makes averaging impossible."""
    check_group(bucket, group)
    model = model_of(bucket, state=state)
    if model is None:
        raise UnsupportedConfigurationError(
            "expected the DDP model of these gradients among all objects that Python's collector knows, got none; "
            "call gc.freeze() after the first backward(), not before"
        )
    for hook, registered in getattr(model, "_comm_hooks", ()):
        if registered is not state or not getattr(hook, "__module__", _OWN).startswith(_OWN):
            raise UnsupportedConfigurationError(
                f"expected this hook registered by itself, got it inside of {getattr(hook, '__qualname__', hook)}: "
                "local steps send no gradients, so a wrapper has nothing to compress and no turn to give away; "
                "register it directly (and pass mutex= for turns)"
            )
    return model


def check_waits_for_nobody(model: DistributedDataParallel) -> None:
    """Refuse what makes ranks wait for each other in every step."""
    if model.find_unused_parameters:
        raise UnsupportedConfigurationError(
            "expected find_unused_parameters=False, got True: DDP would exchange a map of used parameters in every "
            "step; build DistributedDataParallel(..., find_unused_parameters=False) and let every parameter take part"
        )
    if wants_buffers_broadcast(model) and any(True for _ in model.module.buffers()):
        raise UnsupportedConfigurationError(
            f"expected {OWN_BUFFERS}=False, got True: DDP would broadcast rank 0's buffers in every step; build "
            f"DistributedDataParallel(..., {OWN_BUFFERS}=False), buffers are averaged with the parameters"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedConfigurationError(
                f"expected modules without collectives, got SyncBatchNorm {name}, which waits for all ranks in every "
                "step; use BatchNorm, whose statistics are averaged with the parameters"
            )
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(str(getattr(hook, "__module__", "")).startswith(_KFAC) for hook in hooks):
            raise UnsupportedConfigurationError(
                f"expected a model without K-FAC, got a KFACState that watches module '{name}': it preconditions the "
                "mean gradient, which a local step does not have; register kfac_hook instead, or make no KFACState"
            )


def digest_of(blocks: Sequence[FlatBlock]) -> str:
    """Return a short text that differs where names, shapes or dtypes do."""
    said = [
        (entry.name, tuple(entry.get().shape), str(block.dtype))
        for block in blocks
        for entry in block.entries
    ]
    return f"{len(said)} tensors, {hashlib.sha256(repr(said).encode()).hexdigest()[:12]}"


def check_finite(values: torch.Tensor, rank: int, steps: int, own: Sequence[torch.Tensor]) -> None:
    """Refuse a mean that is not finite, before it is written anywhere.

    Args:
        values: the mean.
        rank: of this process.
        steps: how many were done.
        own: what this rank has sent.
    """
    if all_finite([values]):
        return
    guilty = "see the other ranks" if all_finite(own) else "this rank's are among them"
    raise UnsupportedConfigurationError(
        f"expected finite parameters on all ranks, got infinities or NaN in the mean after step {steps} ({guilty}; "
        f"this is rank {rank}); no rank has taken the mean over. Lower the learning rate, clip, or use GradScaler, and "
        "restart from a checkpoint"
    )


def all_finite(vectors: Sequence[torch.Tensor]) -> bool:
    """Tell whether all elements are finite numbers: one pass, no intermediate results, since training waits for it.

    NaN is the least and the greatest of elements that contain it. A million elements take 0.15 ms on one core, where
    ``isfinite(…).all()`` takes 8 ms and the norm of the greatest magnitude 19 ms.
    """
    return all(_is_finite(*torch.aminmax(vector)) for vector in vectors if vector.numel())


def _is_finite(least: torch.Tensor, greatest: torch.Tensor) -> bool:
    return bool(least.isfinite() & greatest.isfinite())
