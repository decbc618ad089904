"""A rank that waits in its turn for a peer behind a stopped sibling does not take that for its own turn's length."""

import time
import uuid

import torch.distributed as dist

from crossover_ddp._turns.rules import DEFAULT_LEASE_S
from crossover_ddp._turns.segment import TurnSegment
from crossover_ddp.gpu_mutex import GPUMutex
from tests.harness import run_ranks

SIBLINGS_LEASE_S = 1.6  # four of them are more than the default lease
ROUNDS = 3


def sibling(group: str, device: str) -> TurnSegment:
    """A job on both devices, by hand."""
    segment = TurnSegment(group, device)
    segment.join(
        job=77,
        lead=segment.machine,
        rank=int(device[-1]),
        world_size=2,
        lease_s=SIBLINGS_LEASE_S,
    )
    return segment


def train_beside_a_sibling_that_sticks_on_one_device(
    rank: int, world_size: int, group: str
) -> tuple[float, float, list[float]]:
    own = sibling(group, f"dev{rank}")
    dist.barrier()
    mutex = GPUMutex(group, device=f"dev{rank}")
    held = []
    for _ in range(ROUNDS):
        turn = [own.draw_turn() if rank == 0 else 0]
        dist.broadcast_object_list(turn, src=0)
        own.publish(started=turn[0])
        if rank == 0:
            own.publish_returned(turn[0])  # on device 1 it stops inside its turn
        dist.barrier()
        before_s = mutex.stats()["held_s"]
        mutex.acquire()
        dist.barrier()  # inside the turn: DDP's buffers, for instance
        mutex.release()
        held.append(mutex.stats()["held_s"] - before_s)
        dist.barrier()
        own.publish_returned(turn[0])
        time.sleep(0.05)
    lease_s, expired = mutex.stats()["lease_s"], mutex.stats()["leases_expired"]
    mutex.close()
    own.leave()
    return lease_s, expired, held


def test_waiting_for_a_peer_behind_a_lease_does_not_lengthen_the_own_lease() -> None:
    group = f"tests-{uuid.uuid4().hex[:8]}"
    first, second = run_ranks(
        train_beside_a_sibling_that_sticks_on_one_device, 2, args=(group,), timeout_s=60
    )
    assert second[1] == ROUNDS, "rank 1 lost patience each time"
    assert first[1] == 0
    assert all(held_s > SIBLINGS_LEASE_S * 0.9 for held_s in first[2]), "rank 0 held its turn meanwhile"
    assert first[0] == second[0] == DEFAULT_LEASE_S
