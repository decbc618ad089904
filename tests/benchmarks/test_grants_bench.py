"""How long a grant takes from the lead rank to the job's other ranks, through the job's store."""

import statistics
import time
from typing import Any

import pytest
import torch.distributed as dist

from crossover_ddp._turns.channel import TurnChannel
from crossover_ddp._turns.rules import Grant
from tests.harness import run_ranks

from .conftest import BenchForm

MEDIAN_LIMIT_S = 1e-3
GRANTS = {"smoke": 20, "full": 500}
PAUSE_S = 5e-3  # between two turns, so that nobody is behind


def _grants(rank: int, world_size: int, count: int) -> tuple[list[float], list[int]]:
    """Return the seconds that each grant took to come here, or on the lead rank to be sent, and the turns."""
    channel = TurnChannel(None, 30.0)
    if rank:
        channel.listen(lambda: None)
    channel.gather("ready")
    times_s, turns = [], []
    for turn in range(1, count + 1):
        if rank == 0:
            time.sleep(PAUSE_S)
            begin_s = time.monotonic()
            channel.send(Grant(turn, ((1, time.monotonic_ns()),)))  # one machine, one monotonic clock
            times_s.append(time.monotonic() - begin_s)
            turns.append(turn)
        else:
            channel.ask()
            grant = channel.receive()
            times_s.append((time.monotonic_ns() - grant.after[0][1]) / 1e9)
            turns.append(grant.turn)
    dist.barrier()
    channel.close(end_grants=rank == 0)
    return times_s, turns


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_grant_reaches_the_other_ranks_in_time(
    world_size: int, bench_form: BenchForm, benchmark: Any
) -> None:
    count = GRANTS[bench_form]
    results = benchmark.pedantic(run_ranks, (_grants, world_size), {"args": (count,)}, rounds=1)
    assert all(turns == [*range(1, count + 1)] for _, turns in results)
    sending_s = statistics.median(results[0][0])
    median_s = max(statistics.median(times_s) for times_s, _ in results[1:])
    p99_s = max(sorted(times_s)[int(0.99 * (count - 1))] for times_s, _ in results[1:])
    benchmark.extra_info.update(
        world_size=world_size, sending_median_s=sending_s, grant_median_s=median_s, grant_p99_s=p99_s
    )
    if bench_form == "full":
        assert median_s < MEDIAN_LIMIT_S
