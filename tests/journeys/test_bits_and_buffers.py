"""Results have plain DDP's bits and buffers, and each hook sends the bytes that it promises."""

import math
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from crossover_ddp._ddp.module_buffers import ModuleBuffers
from crossover_ddp._engine.links import GlooLink
from tests.harness import in_ranks, inside
from tests.harness.networks import mlp
from tests.harness.training import WAYS, WIDTH, Training, losses_of, muon_and_sgd, noted


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.defect("codecs-S18")
@in_ranks()
def test_the_numbers_of_transfers_may_wrap_around(rank: int, world_size: int) -> torch.Tensor:
    """Gloo's tags contain these numbers. Here on the sixteenth channel, with long buckets."""
    with inside.start_near_wrap(left=20):
        ours, plain = (
            Training(way, rank, module=mlp(WIDTH, 700, 700, WIDTH, seed=3)).run(6)
            for way in ("split", None)
        )
    torch.testing.assert_close(
        ours.values, plain.values, atol=0.0 if world_size == 2 else 1e-6, rtol=0.0
    )
    return ours.values[::1000]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("way", ["split", "int8", "kfac", "muon", "decoupled", "owned"])
def test_a_single_rank_exchanges_at_once_and_without_a_thread(way: str) -> None:
    before = threading.enumerate()
    done: list[bool] = []
    noting = noted(lambda bucket, future: done.append(future.done() or not bucket.is_last()))
    training = Training(way, around=noting).run(3)
    assert threading.enumerate() == before
    assert all(done)
    training.close()


@pytest.mark.parametrize(
    ("default", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@in_ranks(2, timeout_s=180)  # two trainings with each hook
def test_no_hook_depends_on_the_default_dtype(
    rank: int, default: torch.dtype, dtype: torch.dtype
) -> None:
    for way in WAYS:
        found, usual = (losses_of(way, rank, dtype, each) for each in (default, torch.float32))
        if way == "elastic":  # its ranks pull the centre at any time, so that no two runs are alike
            assert all(map(math.isfinite, found))
        else:
            assert found == usual, way


@in_ranks(2)
def test_a_late_mean_does_not_count_as_a_change_of_the_gradient(rank: int) -> None:
    """A graph has saved a gradient whose mean arrives later. Its backward must not raise."""
    training = Training("decoupled", rank).run(6)
    weight = next(training.model.module.parameters())
    if rank:
        training.model.module[0].weight.register_hook(lambda _: time.sleep(0.3))
    training.backward()
    factor = torch.ones_like(weight, requires_grad=True)
    product = weight.grad * factor  # saves the gradient for its backward
    training.state.flush()
    product.sum().backward()


@pytest.mark.parametrize("late", [0, 1])
@in_ranks(2)
def test_a_deferred_forward_waits_for_buffers_and_for_no_other_gather(rank: int, late: int) -> None:
    """The early rank's gathers are held until the late rank's forward has begun.

    That forward needs all buffers before, so it must not wait for these gathers.
    """
    store = _get_default_store()
    gather = GlooLink.all_gather
    copy = ModuleBuffers.copy
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    training = Training("decoupled", rank, module=module).run(6)
    training.state.flush()
    dist.barrier()
    through = f"through {late}"
    begun = f"begun {late}"

    def held(link: Any, *args: Any) -> Any:
        # The main thread's gathers are those of buffers.
        if threading.current_thread() is not threading.main_thread():
            store.wait([begun], timedelta(seconds=20))
        return gather(link, *args)

    def copied(buffers: ModuleBuffers) -> Any:
        time.sleep(0.2)  # gathers that nothing holds back would arrive meanwhile
        return copy(buffers)

    if rank == late:
        training.held[0].register_hook(lambda _: store.wait([through], timedelta(seconds=20)))
        with mock.patch.object(ModuleBuffers, "copy", copied):
            training.step()
        module.register_forward_pre_hook(lambda *_: store.set(begun, ""))
    else:
        with mock.patch.object(GlooLink, "all_gather", held):
            training.backward()
            store.set(through, "")
            training.update()
            training.loss()  # the late rank's forward begins meanwhile
            store.wait([begun], timedelta(seconds=20))
    if rank == late:
        training.loss()
    training.close()


COUNTED = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the kernel does not count the bytes of a process"
)
WIDE = 128
# The bytes that a rank of two sends in a step, in both halves of the exchange, as a range of parts
# of the model's bytes. K-FAC has its own test in multiprocess/test_kfac_wire.py. Hooks that send as
# much as the split are in multiprocess/test_stats.py, which counts the bytes that gloo is given.
SENT = {"split": (1.0, 1.05), "int8": (0.25, 0.32), "muon": (0.7, 0.8)}


def sent_bytes() -> int:
    """Return the bytes that this process has written so far, nearly all to sockets."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar"):
            return int(line.split()[1])
    raise AssertionError("the kernel shows no wchar")


@COUNTED
@pytest.mark.parametrize(("way", "world_size"), [*((way, 2) for way in SENT), ("split", 4)])
@in_ranks()
def test_bytes_on_the_wire(rank: int, world_size: int, way: str) -> None:
    training = Training(
        way,
        rank,
        module=mlp(WIDTH, WIDE, WIDE, WIDE, WIDE, seed=0),
        optimizers=muon_and_sgd if way == "muon" else None,
        bucket_cap_mb=0.05,
    ).run(6)
    dist.barrier()
    begin = sent_bytes()
    training.run(10)
    dist.barrier()
    sent = torch.tensor([float(sent_bytes() - begin)])
    training.close()  # not counted: ranks exchange the optimizer state of owners
    dist.all_reduce(sent)
    part = 2 * (world_size - 1) / world_size  # of the model's bytes; 1 for two ranks
    expected = part * sum(p.numel() * 4 for p in training.held)
    low, high = SENT[way]
    mean = float(sent) / 10 / world_size
    assert low * expected <= mean <= high * expected + 4000 * (world_size - 1), mean / expected
