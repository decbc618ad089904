"""What carries the buckets: gloo by messages, a backend with collectives of its own, and a CUDA device on both."""

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
    around: Callable[[], contextlib.AbstractContextManager[object]] = (
        contextlib.nullcontext
    )  # all of a rank
    marks: tuple[pytest.MarkDecorator, ...] = ()  # of its tests
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)  # in the short form
    adds_in_order: bool = True  # from three ranks on as `reference` does
    decodes_in_order: bool = True  # a codec's messages, too
    lacks: tuple[str, ...] = ()  # cases that cannot run there
    switches_off: bool = (
        False  # hooks are torch's all-reduce there, as ``CROSSOVER_DISABLE=1`` has it
    )

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
# All that runs there in the short form, and what adds to it from three ranks on.
SHORT = (
    *("many_buckets", "accumulation_viewed", "unused_parameters_viewed"),
    *("batch_norm_buffers", "clipping", "several_dtypes"),
)
OF_LAYOUTS = ("fewer_elements_than_ranks", "joined_ranks_with_buffers", "messages_of_the_users")
# Messages of another thread: gloo sends none of a device's tensors, NCCL wants one order of all. The fake device has no
# conjugate views.
_LACKS = ["messages_of_the_users"]
_LACKS += [] if torch.cuda.is_available() and not fake_cuda.is_here() else ["complex_parameters"]
_CUDA: dict[str, Any] = {"around": on_cuda, "world_sizes": (2,), "lacks": tuple(_LACKS)}
BACKENDS = {
    "gloo": Backend(),
    "native": Backend(around=inside.force_native, world_sizes=(2,), adds_in_order=False),
    "switched_off": Backend(
        around=SWITCHED_OFF, world_sizes=(2,), adds_in_order=False, switches_off=True
    ),
    "cuda_gloo": Backend(
        decodes_in_order=False, marks=(pytest.mark.gpu,), **_CUDA
    ),  # a device divides before it sends
    "cuda_nccl": Backend("nccl", adds_in_order=False, marks=(pytest.mark.gpu,), **_CUDA),
}
