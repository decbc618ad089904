"""Two sibling jobs of two ranks each record themselves into one directory, and are merged from there."""

from collections import Counter
from pathlib import Path

import pytest

from lab.spans import TimelineSpan, occupancy, read_spans
from tests.harness import Job, run_jobs
from tests.harness.groups import new_group
from tests.harness.networks import mlp
from tests.harness.training import WIDTH, Training
from tests.multiprocess.test_crossover import STEPS, environment


def train(rank: int, world_size: int, seed: int) -> float:
    """Return how many leases have expired."""
    training = Training("crossover", rank, module=mlp(WIDTH, 128, 128, seed=seed)).run(STEPS)
    expired = training.state.stats()["leases_expired"]
    training.close()
    return float(expired)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the run that all tests here look at."""
    directory = tmp_path_factory.mktemp("recorded") / "timeline"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CROSSOVER_TIMELINE", str(directory))
        monkeypatch.setenv("CROSSOVER_GROUP", new_group())
        monkeypatch.setenv("CROSSOVER_TRIAL", "0")  # a trial would let both compute at once
        jobs = [Job(train, 2, (seed,), environment=environment(2), name=f"job {seed}") for seed in (1, 2)]
        assert run_jobs(jobs, timeout_s=90) == [[0.0, 0.0]] * 2
    return directory


def spans(directory: Path) -> list[TimelineSpan]:
    return [span for path in directory.glob("rank*.json") for span in read_spans(path)]


def test_jobs_devices_and_steps_are_told_apart(recorded: Path) -> None:
    found = spans(recorded)
    jobs = {span.job for span in found}
    assert len(jobs) == 2
    counts = Counter((span.job, span.rank, span.device, span.kind) for span in found)
    for job in jobs:
        for rank in (0, 1):
            own = {kind: counts[job, rank, f"device{rank}", kind] for kind in ("compute", "exchange", "wait")}
            # Nobody knows when the first step's computation began.
            assert own == {"compute": STEPS - 1, "exchange": STEPS, "wait": STEPS}
            steps = [
                span.detail["step"]
                for span in found
                if (span.job, span.rank, span.kind) == (job, rank, "exchange")
            ]
            assert steps == list(range(STEPS))
    assert {span.detail["turns"] for span in found if span.kind == "compute"} == {"untried"}


def test_no_two_jobs_computed_at_once(recorded: Path) -> None:
    found = spans(recorded)
    # From begin to end: how long both jobs were active depends on how busy the machine is.
    whole = min(span.begin_s for span in found), max(span.end_s for span in found)
    for device in ("device0", "device1"):
        shares = occupancy(found, device, window_s=whole)
        assert shares["several"] < 1e-5, "times of the trace are rounded"
        assert shares["one"] > 0
