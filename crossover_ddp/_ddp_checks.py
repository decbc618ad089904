"""What DDP hands to a hook, looked at before it is used: what cannot work is refused in clear words."""

import torch
import torch.distributed as dist

from .errors import UnsupportedConfigurationError

# The C++ reducer passes a GradBucket, the python reducer a (gradient, parameter) tuple.
Bucket = dist.GradBucket | tuple[torch.Tensor, ...]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``process_group``, or the default group for None, or say why it cannot be used."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise UnsupportedConfigurationError(
            "expected an initialized default process group, got process_group=None; "
            "call torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedConfigurationError(
            f"expected a process group that this process belongs to, got process_group={group!r}; "
            "pass the group that DDP was given"
        )
    return group


def flat_gradients(bucket: Bucket) -> torch.Tensor:
    """Return the bucket's flat dense buffer, or say why there is none."""
    if isinstance(bucket, tuple):
        raise UnsupportedConfigurationError(
            "expected a bucket of DDP's C++ reducer, got a (gradient, parameter) tuple; "
            "set torch._dynamo.config.optimize_ddp to another value than 'python_reducer'"
        )
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise UnsupportedConfigurationError(
            f"expected dense gradients, got bucket {bucket.index()} with layout={buffer.layout}; "
            "build the embedding with sparse=False"
        )
    if buffer.dtype not in _DTYPES:
        raise UnsupportedConfigurationError(
            f"expected gradients of {_names(_DTYPES)}, got bucket {bucket.index()} with dtype={buffer.dtype}; "
            "convert the parameters"
        )
    return buffer


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
