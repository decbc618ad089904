"""Where torch.compile lets DDP hand over buckets before backward has ended, as docs/loops.md says."""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.usefixtures("process_group", "fresh_compiler"), pytest.mark.torch_version]
WIDTH = 600  # two layers do not fit into a bucket of 1.2 MiB; torch wants 1 MiB at least
EVENTS: list[str] = []


@torch.library.custom_op("crossover_tests::mark", mutates_args=())
def mark(value: Tensor) -> Tensor:
    return value.clone()


@torch.library.custom_op("crossover_tests::mark_backward", mutates_args=())
def mark_backward(gradient: Tensor) -> Tensor:
    EVENTS.append("layer")
    return gradient.clone()


mark.register_fake(torch.empty_like)
mark_backward.register_fake(torch.empty_like)
mark.register_autograd(lambda context, gradient: mark_backward(gradient))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return mark(x + self.inner(x).tanh())  # type: ignore[no-any-return]


def note_bucket(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    EVENTS.append("bucket")
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize(
    ("way", "optimize_ddp", "overlaps"),
    [
        ("none", True, True),
        ("network", True, True),
        ("blocks", True, True),
        ("model", True, True),
        ("network", False, False),
    ],
)
def test_buckets_are_handed_over_before_backward_has_ended(
    way: str, optimize_ddp: bool, overlaps: bool
) -> None:
    network: Any = nn.Sequential(*(Block() for _ in range(3)))
    if way == "network":
        network = torch.compile(network, backend="aot_eager")
    for block in network if way == "blocks" else ():
        block.compile(backend="aot_eager")
    model = DistributedDataParallel(network, bucket_cap_mb=1.2)
    model.register_comm_hook(None, note_bucket)
    called = torch.compile(model, backend="aot_eager") if way == "model" else model
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        for _ in range(3):  # DDP rebuilds its buckets after the first
            EVENTS.clear()
            called(torch.randn(2, WIDTH)).sum().backward()
    assert EVENTS.count("layer") == 3
    last_layer = max(index for index, event in enumerate(EVENTS) if event == "layer")
    assert ("bucket" in EVENTS[:last_layer]) == overlaps
