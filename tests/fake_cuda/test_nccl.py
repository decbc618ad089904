"""NCCL's collectives on the device: right numbers, whatever is late; ranks may share a device."""

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks

from . import DEVICES, late

pytestmark = pytest.mark.fake_cuda

RANKS = 3


def values(rank: int, count: int = 6) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def collect(rank: int, world_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Call each collective without any wait of the host in between."""
    torch.cuda.set_device(rank % DEVICES)
    with late(seed=seed, nccl_us=100, nccl_jitter_us=3000, kernel_jitter_us=1000, copy_jitter_us=1000):
        own = values(rank).pin_memory().cuda(non_blocking=True)
        out: dict[str, torch.Tensor] = {}
        for name, op in (
            ("sum", dist.ReduceOp.SUM),
            ("mean", dist.ReduceOp.AVG),
            ("most", dist.ReduceOp.MAX),
        ):
            dist.all_reduce(out.setdefault(name, own.clone()), op=op)
        dist.all_reduce(out.setdefault("bfloat16", own.bfloat16()))
        dist.reduce_scatter_tensor(out.setdefault("scattered", own.new_empty(2)), own)
        dist.all_gather_into_tensor(
            out.setdefault("gathered", own.new_empty(2 * world_size)), own[:2].clone()
        )
        dist.broadcast(out.setdefault("broadcast", own.clone()), src=1)
        dist.all_to_all_single(out.setdefault("exchanged", torch.empty_like(own)), own)
        received = out.setdefault("received", torch.empty_like(own))
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        messages = [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        pair = dist.new_group([0, 2])
        if isinstance(pair, dist.ProcessGroup):  # not on the rank that has no part in it
            dist.all_reduce(out.setdefault("pair", own.clone()), group=pair)
    return {name: tensor.cpu() for name, tensor in out.items()}


@pytest.mark.parametrize("seed", [1, 2])
def test_collectives_are_right_however_late(seed: int) -> None:
    given = [values(rank) for rank in range(RANKS)]
    total = given[0] + given[1] + given[2]
    shares = [each * torch.tensor(1 / RANKS) for each in given]
    for rank, got in enumerate(run_ranks(collect, RANKS, args=(seed,), backend="nccl")):
        wanted = {
            "sum": total,
            "mean": shares[0] + shares[1] + shares[2],
            "most": torch.stack(given).amax(0),
            "bfloat16": given[0].bfloat16() + given[1].bfloat16() + given[2].bfloat16(),
            "scattered": total[2 * rank : 2 * rank + 2],
            "gathered": torch.cat([each[:2] for each in given]),
            "broadcast": given[1],
            "exchanged": torch.cat([each[2 * rank : 2 * rank + 2] for each in given]),
            "received": given[(rank - 1) % RANKS],
            **({"pair": given[0] + given[2]} if rank != 1 else {}),
        }
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


def read_at_once(rank: int, world_size: int, waits: bool) -> bool:
    """Tell whether a collective that is late is seen on the current stream."""
    torch.cuda.set_device(rank)
    number = torch.ones(1, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    with late(nccl_us=500_000):
        work = dist.all_reduce(number, async_op=True)
        if waits:
            work.wait()
        seen = number.clone()
        torch.cuda.current_stream().synchronize()
    number.cpu()
    work.wait()
    torch.cuda.synchronize()
    return seen.item() == world_size


@pytest.mark.parametrize("waits", [True, False])
def test_who_does_not_wait_for_a_collective_reads_too_early(waits: bool) -> None:
    assert run_ranks(read_at_once, 2, args=(waits,), backend="nccl") == [waits, waits]
