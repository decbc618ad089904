"""What `crossover-ddp status --watch` costs the jobs that it watches.

Two jobs of one rank each share a core and keep it busy with turns of a fixed amount of work; the watcher has to run on
that core as well, so whatever it takes, it takes from them.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.harness import run_ranks
from tests.harness.groups import new_group
from tests.harness.waiting import eventually

from .conftest import BenchForm
from .turns import lone_mutex, pinned

ROOT = Path(__file__).resolve().parents[2]
TURNS = {"smoke": 150, "full": 2000}
INTERVAL_S = {"smoke": "0.1", "full": "1"}
ROUNDS = {"smoke": 1, "full": 7}
WORK = 60_000  # about 2 ms
RATIO_LIMIT = 1.02


class Shared(NamedTuple):
    """What one of the jobs tells."""

    turn_s: float
    handover_s: float
    turns: int
    disabled_because: str | None


def _share(rank: int, world_size: int, group: str, core: int, turns: int) -> Shared:
    with pinned(core), lone_mutex(group) as mutex:
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(turns):
            mutex.acquire()
            sum(range(WORK))
            mutex.release()
        turn_s = (time.perf_counter() - begin_s) / turns
        stats = mutex.stats()
        return Shared(turn_s, stats["handover_median_s"], stats["turns"], stats["disabled_because"])


@contextmanager
def watching(group: str, core: int, interval_s: str, shown: Path) -> Iterator[None]:
    """Watch from before the first turn until after the last."""
    command = [sys.executable, "-m", "crossover_ddp.cli", "status", "--watch", interval_s, "--group", group]
    with shown.open("w") as file, pinned(core):
        watcher = subprocess.Popen(command, cwd=ROOT, stdout=file)
    try:
        assert eventually(lambda: shown.stat().st_size > 0)  # its start is no watching
        yield
    finally:
        watcher.terminate()
        watcher.wait(30)


def _one_round(form: BenchForm, shown: Path) -> tuple[float, float, float]:
    """Return the time of a turn watched over not watched, and the hand-over of both."""
    group, core, turns = new_group(), min(os.sched_getaffinity(0)), TURNS[form]

    def share() -> list[Shared]:
        jobs: list[Shared] = run_ranks(_share, 2, args=(group, core, turns))
        assert all(job.disabled_because is None and job.turns == turns for job in jobs)
        return jobs

    before = share()
    with watching(group, core, INTERVAL_S[form], shown):
        during = share()
    assert f"group {group} on dev0" in shown.read_text()
    alone = [*before, *share()]
    ratio = statistics.mean(job.turn_s for job in during) / statistics.mean(job.turn_s for job in alone)
    watched_s, alone_s = (statistics.median(job.handover_s for job in jobs) for jobs in (during, alone))
    return ratio, watched_s, alone_s


def test_watching_costs_the_jobs_nothing_measurable(
    bench_form: BenchForm, benchmark: Any, tmp_path: Path
) -> None:
    rounds = ROUNDS[bench_form]

    def all_rounds() -> list[tuple[float, float, float]]:
        return [_one_round(bench_form, tmp_path / "shown") for _ in range(rounds)]

    ratios, watched_s, alone_s = zip(*benchmark.pedantic(all_rounds, rounds=1), strict=True)
    ratio = statistics.median(ratios)
    benchmark.extra_info.update(
        ratio=ratio,
        ratios=ratios,
        handover_watched_s=statistics.median(watched_s),
        handover_alone_s=statistics.median(alone_s),
    )
    if bench_form == "full":
        assert ratio < RATIO_LIMIT
