"""The networks that carry the buckets: gloo's messages, native collectives, and a CUDA device."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from tests import fake_cuda
from tests.conformance import cases
from tests.harness import inside, run_ranks

TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Backend:
    process_group: str = "gloo"
    # The context in which a rank runs its cases.
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    # The marks of its tests.
    marks: tuple[pytest.MarkDecorator, ...] = ()
    # The world sizes of the short form.
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    # Whether it adds gradients of three and more ranks in the order of `reference`.
    adds_in_order: bool = True
    # Whether it adds a codec's decoded messages in that order.
    decodes_in_order: bool = True
    # The cases that cannot run here.
    lacks: tuple[str, ...] = ()
    # Whether all hooks are torch's all-reduce here (``CROSSOVER_DISABLE=1``).
    switches_off: bool = False

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call ``function`` in all ranks, with the backend's process group."""
        return run_ranks(
            function, world_size, args=args, backend=self.process_group, timeout_s=TIMEOUT_S
        )


@contextlib.contextmanager
def on_cuda() -> Iterator[None]:
    device = torch.device("cuda", torch.distributed.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "DEVICE", device)
        yield


SWITCHED_OFF = functools.partial(mock.patch.dict, os.environ, {"CROSSOVER_DISABLE": "1"})
ON_TWO_NODES = functools.partial(mock.patch.dict, os.environ, {"CROSSOVER_LEVELS": "0,0,1,1"})


@contextlib.contextmanager
def native_on_two_nodes() -> Iterator[None]:
    with ON_TWO_NODES(), inside.force_native():
        yield


@contextlib.contextmanager
def cuda_on_two_nodes() -> Iterator[None]:
    with ON_TWO_NODES(), on_cuda():
        yield


# The cases of the short form on other backends and with other numbers of ranks.
SHORT = (
    *("many_buckets", "accumulation_viewed", "unused_parameters_viewed"),
    *("batch_norm_buffers", "clipping", "several_dtypes"),
)
# The cases that depend on the layout of shards. The short form runs them with three and four ranks.
OF_LAYOUTS = ("fewer_elements_than_ranks", "joined_ranks_with_buffers", "messages_of_the_users")
# The case sends messages on another thread: gloo does not send a device's tensors, and NCCL needs
# one order of all operations.
_LACKS = ["messages_of_the_users"]
if fake_cuda.is_here() or not torch.cuda.is_available():
    _LACKS.append("complex_parameters")  # the fake device has no conjugate views
_CUDA: dict[str, Any] = {"around": on_cuda, "world_sizes": (2,), "lacks": tuple(_LACKS)}
_CUDA_NODES: dict[str, Any] = {**_CUDA, "around": cuda_on_two_nodes, "world_sizes": (4,)}
BACKENDS = {
    "gloo": Backend(),
    "native": Backend(around=inside.force_native, world_sizes=(2,), adds_in_order=False),
    "switched_off": Backend(
        around=SWITCHED_OFF, world_sizes=(2,), adds_in_order=False, switches_off=True
    ),
    # Two ranks on each node have the tree over all ranks. A codec adds between nodes only.
    "two_levels": Backend(around=ON_TWO_NODES, world_sizes=(4,), decodes_in_order=False),
    "native_two_levels": Backend(around=native_on_two_nodes, world_sizes=(4,), adds_in_order=False),
    # A device divides before it sends, so the order of a codec's additions differs.
    "cuda_gloo": Backend(decodes_in_order=False, marks=(pytest.mark.gpu,), **_CUDA),
    "cuda_nccl": Backend("nccl", adds_in_order=False, marks=(pytest.mark.gpu,), **_CUDA),
    "cuda_gloo_two_levels": Backend(
        decodes_in_order=False, marks=(pytest.mark.gpu,), **_CUDA_NODES
    ),
    "cuda_nccl_two_levels": Backend(
        "nccl", adds_in_order=False, marks=(pytest.mark.gpu,), **_CUDA_NODES
    ),
}
