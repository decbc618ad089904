"""What arrives: the bits of plain DDP whatever the sizes, the traffic of others, and the number of messages before."""

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
from crossover_ddp._engine.links import _GlooLink
from tests.harness import in_ranks, inside
from tests.harness.networks import mlp
from tests.harness.training import WAYS, WIDTH, Training, losses_of, muon_and_sgd, noted


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.defect("codecs-S18")
@in_ranks()
def test_numbers_of_transfers_and_with_them_tags_begin_anew(
    rank: int, world_size: int
) -> torch.Tensor:
    """On a sixteenth channel, with buckets of several messages."""
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
def test_alone_all_is_done_at_once_without_a_thread(way: str) -> None:
    before, done = threading.enumerate(), list[bool]()
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
@in_ranks(2)
def test_no_hook_depends_on_the_default_dtype(
    rank: int, default: torch.dtype, dtype: torch.dtype
) -> None:
    for way in WAYS:
        found, usual = (losses_of(way, rank, dtype, each) for each in (default, torch.float32))
        # An elastic rank meets the centre whenever it likes.
        assert all(map(math.isfinite, found)) if way == "elastic" else found == usual, way


@in_ranks(2)
def test_our_hand_does_not_count_as_a_change_of_the_users_gradients(rank: int) -> None:
    """Keep a graph with a gradient whose mean arrives late: autograd must not find it changed, which it is by us."""
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
    """Hold the early rank's gathers until the later one's forward has begun, which has all buffers before."""
    store, gather, copy = _get_default_store(), _GlooLink.all_gather, ModuleBuffers.copy
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    training = Training("decoupled", rank, module=module).run(6)
    training.state.flush()
    dist.barrier()
    through, begun = f"through {late}", f"begun {late}"

    def held(link: Any, *what: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # which begins with buffers
            store.wait([begun], timedelta(seconds=20))
        return gather(link, *what)

    def copied(buffers: ModuleBuffers) -> Any:
        time.sleep(0.2)  # time enough for gathers, where nothing keeps them
        return copy(buffers)

    if rank == late:
        training.held[0].register_hook(lambda _: store.wait([through], timedelta(seconds=20)))
        with mock.patch.object(ModuleBuffers, "copy", copied):
            training.step()
        module.register_forward_pre_hook(lambda *_: store.set(begun, ""))
    else:
        with mock.patch.object(_GlooLink, "all_gather", held):
            training.backward()
            store.set(through, "")
            training.update()
            training.loss()  # in which the later rank's forward begins
            store.wait([begun], timedelta(seconds=20))
    if rank == late:
        training.loss()
    training.close()


COUNTED = pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="the kernel does not count what a process writes"
)
WIDE = 128
# Sent by a rank of two, as parts of the model's bytes: half there, half back. K-FAC's: multiprocess/test_kfac_wire.py;
# of others that send as much as the split, what is given to gloo: multiprocess/test_stats.py.
SENT = {"split": (1.0, 1.05), "int8": (0.25, 0.32), "muon": (0.7, 0.8)}


def sent_bytes() -> int:
    """Return what this process has written so far, to sockets above all, as the kernel counts it."""
    line = next(
        line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")
    )
    return int(line.split()[1])


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
    training.close()
    sent = torch.tensor([float(sent_bytes() - begin)])
    dist.all_reduce(sent)
    of_others = 2 * (world_size - 1) / world_size  # 1 for two ranks, of whose halves each sends one
    own = of_others * sum(p.numel() * 4 for p in training.held)
    low, high = SENT[way]
    mean = float(sent) / 10 / world_size
    assert low * own <= mean <= high * own + 4000 * (world_size - 1), mean / own
