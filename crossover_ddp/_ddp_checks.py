"""What DDP hands to a hook, looked at before it is used: what cannot work is refused in clear words.

[Note: looking through all objects]
``gc.get_objects()`` also returns what other threads are just making, and CPython's ``tuple(generator)`` raises
`SystemError` if somebody else has its unfinished tuple in hand. So no code of this package, whose threads run
meanwhile, makes a tuple that way (`tests/unit/test_tuples.py`), and the youngest objects are looked at only if the
model is not among the old ones.
"""

import gc
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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


def largest_bytes(bucket: dist.GradBucket) -> int:
    """Return the size of the bucket's largest gradient: DDP makes no bucket smaller than that."""
    return max(parameter.numel() for parameter in bucket.parameters()) * bucket.buffer().itemsize


def check_not_capturing(bucket: Bucket) -> None:
    """Refuse a backward pass that is captured into a CUDA graph: no hook runs when the graph is replayed."""
    if _is_captured(bucket):
        raise UnsupportedConfigurationError(
            "expected backward outside of a CUDA graph, got a hook that is called while a graph is captured: a replay "
            "would exchange nothing and take no turn; capture forward and backward of the model's parts instead "
            "(torch.cuda.make_graphed_callables before DDP, or torch.compile(mode='reduce-overhead'))"
        )


def _is_captured(bucket: Bucket) -> bool:
    on_gpu = not isinstance(bucket, tuple) and bucket.buffer().is_cuda
    return on_gpu and torch.cuda.is_current_stream_capturing()


def check_group(bucket: dist.GradBucket, process_group: dist.ProcessGroup) -> None:
    """Refuse a hook whose process group has other ranks than that of the DDP model behind ``bucket``.

    It would average over the wrong ranks without a word. A bucket does not know its model, so this looks
    through all objects: tens of milliseconds, to be spent once per bucket and not once per step.
    """
    model = model_of(bucket)
    if model is None:
        return
    expected, got = (dist.get_process_group_ranks(group) for group in (model.process_group, process_group))
    if sorted(expected) != sorted(got):
        raise UnsupportedConfigurationError(
            f"expected the process group that DDP was given, of ranks {expected}, got a process_group of "
            f"ranks {got}; register the hook with the model's own process_group"
        )


def model_of(bucket: dist.GradBucket) -> DistributedDataParallel | None:
    """Return the DDP model whose gradients ``bucket`` holds, found among all objects of the process."""
    parameter = bucket.parameters()[0]
    for generation in (2, None):  # the old ones first: [Note: looking through all objects]
        # Not isinstance: it would run the __class__ property of whatever lazy object is around.
        models = [
            candidate
            for candidate in gc.get_objects(generation)
            if issubclass(type(candidate), DistributedDataParallel)
        ]
        for model in models:
            # None: a constructor or a copy that has failed half-way.
            network = vars(model).get("_modules", {}).get("module")
            if network is not None and any(parameter is other for other in _parameters_of(network)):
                return cast(DistributedDataParallel, model)
    return None


def _parameters_of(network: torch.nn.Module) -> Iterator[torch.Tensor | None]:
    """Yield the parameters as they are: looking at a model must not make a decoupled one update itself."""
    for module in network.modules():
        yield from dict.values(module._parameters)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def names_of(parameters: list[torch.Tensor], model: DistributedDataParallel) -> str:
    """Name the first few of ``parameters`` as ``model`` does, for a message."""
    names = {id(p): name for name, p in model.module.named_parameters()}
    known = [names[id(p)] for p in parameters if id(p) in names]
    return ", ".join(known[:3]) + (", ..." if len(known) > 3 else "") if known else "not of the model either"
