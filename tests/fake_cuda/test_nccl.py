"""NCCL's collectives on the device give correct results with any lateness; ranks share devices."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import in_ranks

from . import DEVICES, late

pytestmark = pytest.mark.fake_cuda

RANKS = 3


def values(rank: int, count: int = 6) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("seed", [1, 2])
@in_ranks(RANKS, backend="nccl")
def test_collectives_are_correct_with_any_lateness(rank: int, seed: int) -> None:
    """The host does not wait between the calls."""
    torch.cuda.set_device(rank % DEVICES)
    with late(
        seed=seed, nccl_us=100, nccl_jitter_us=3000, kernel_jitter_us=1000, copy_jitter_us=1000
    ):
        own = values(rank).pin_memory().cuda(non_blocking=True)
        copied = ("sum", "mean", "most", "broadcast", "exchanged", "received", "pair")
        out = {name: own.clone() for name in copied}
        for name, op in (("sum", "SUM"), ("mean", "AVG"), ("most", "MAX")):
            dist.all_reduce(out[name], op=getattr(dist.ReduceOp, op))
        dist.all_reduce(out.setdefault("bfloat16", own.bfloat16()))
        dist.reduce_scatter_tensor(out.setdefault("scattered", own.new_empty(2)), own)
        dist.all_gather_into_tensor(
            out.setdefault("gathered", own.new_empty(2 * RANKS)), own[:2].clone()
        )
        dist.broadcast(out["broadcast"], src=1)
        dist.all_to_all_single(out["exchanged"], own)
        right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
        messages = [
            dist.P2POp(dist.isend, own, right),
            dist.P2POp(dist.irecv, out["received"], left),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        pair = dist.new_group([0, 2])
        if isinstance(pair, dist.ProcessGroup):  # false on the rank outside of the group
            dist.all_reduce(out["pair"], group=pair)
    given = [values(rank) for rank in range(RANKS)]
    total = given[0] + given[1] + given[2]
    shares = [each * torch.tensor(1 / RANKS) for each in given]
    wanted = {
        "sum": total,
        "mean": shares[0] + shares[1] + shares[2],
        "most": torch.stack(given).amax(0),
        "bfloat16": given[0].bfloat16() + given[1].bfloat16() + given[2].bfloat16(),
        "scattered": total[2 * rank : 2 * rank + 2],
        "gathered": torch.cat([each[:2] for each in given]),
        "broadcast": given[1],
        "exchanged": torch.cat([each[2 * rank : 2 * rank + 2] for each in given]),
        "received": given[left],
        "pair": given[1] if rank == 1 else given[0] + given[2],
    }
    for name, tensor in wanted.items():
        assert torch.equal(out[name].cpu(), tensor), name


@pytest.mark.parametrize("waits", [True, False])
@in_ranks(2, backend="nccl")
def test_a_read_without_a_wait_sees_the_value_before_the_collective(rank: int, waits: bool) -> None:
    torch.cuda.set_device(rank)
    number = torch.ones(1, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    with late(nccl_us=500_000):
        work = dist.all_reduce(number, async_op=True)
        if waits:
            work.wait()
        time.sleep(0.1)  # less than the collective is late
        seen = number.clone()
        torch.cuda.current_stream().synchronize()
    number.cpu()
    work.wait()
    torch.cuda.synchronize()
    assert seen.item() == (2 if waits else 1)
