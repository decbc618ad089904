"""One hash of parameters, buffers, optimizer state and all losses on any number of ranks."""

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN

from .jobs import MODELS, Job, hash_of_job

EXACT = ("split", "crossover", "decoupled", "owners")


def assert_one_hash(job: Job, *sizes: int) -> None:
    found = {size: {*run_ranks(hash_of_job, size, args=(job,))} for size in sizes}
    assert len(set.union(*found.values())) == 1, found


def grid() -> list[Job]:
    """Return all of the grid in the campaign, and otherwise a job of each hook."""
    if not IN_CAMPAIGN:
        jobs = [Job("cnn", "adamw", hook=hook, steps=4) for hook in EXACT]
        return [*jobs, Job("gpt", "muon", hook="muon", steps=4)]
    jobs = [
        Job(model, optimizer, count, hook, steps=30)
        for model in MODELS
        for optimizer in ("sgd", "adamw", "muon")
        for count in (4, 8)
        for hook in (*EXACT, "muon")
    ]
    # Muon's hook needs the optimizer Muon, and decoupled_hook one that treats each parameter alone.
    return [
        job
        for job in jobs
        if (job.hook != "muon" or job.optimizer == "muon")
        and (job.hook != "decoupled" or job.optimizer != "muon")
    ]


@pytest.mark.parametrize(
    "job", grid(), ids=lambda job: f"{job.model}-{job.optimizer}-{job.count}-{job.hook}"
)
def test_all_numbers_of_ranks_have_one_hash(job: Job) -> None:
    assert_one_hash(job, 1, 2, 4)


@pytest.mark.parametrize(
    ("count", "sizes"), [(8, (1, 3)), (6, (1, 2, 4, 5)), (12, (3, 4)), (5, (1, 2, 5))]
)
def test_uneven_virtual_ranks_have_the_same_hash(count: int, sizes: tuple[int, ...]) -> None:
    assert_one_hash(Job(count=count, steps=3), *sizes)


LOOPS = {
    "clipping": Job(clips="torch"),
    "decoupled-state-clipping": Job("gpt", hook="decoupled", clips="state"),
    "decoupled-clipping": Job(hook="decoupled", clips="torch"),
    "owners-scaler": Job(hook="owners", clips="state", scale=2.0**30, autocast=torch.float16),
    "scaler": Job(scale=2.0**10, autocast=torch.float16),
    "autocast": Job(autocast=torch.bfloat16),
    "copied-gradients": Job(options={"gradient_as_bucket_view": False}),
    "zeroed": Job(zeroes=True),
    "decoupled-zeroed": Job(hook="decoupled", zeroes=True),
    "one-bucket": Job(options={"bucket_cap_mb": 25}),
    "float16": Job("mlp", dtype=torch.float16),
    "bfloat16": Job("mlp", dtype=torch.bfloat16),
    "small-last-batch": Job(loader={"drop_last": False}, samples=37, steps=9),
}


@pytest.mark.parametrize("job", LOOPS.values(), ids=LOOPS)
def test_loops_of_all_kinds_have_one_hash(job: Job) -> None:
    assert_one_hash(job, 1, 4)


def test_workers_do_not_change_samples() -> None:
    alone = run_ranks(hash_of_job, 1, args=(Job(steps=7),))
    assert run_ranks(hash_of_job, 1, args=(Job(steps=7, loader={"num_workers": 2}),)) == alone


@pytest.mark.parametrize("hook", ["split", "decoupled", "owners"])
@pytest.mark.parametrize("levels", ["0,0,1,1", "0,1,0,1"])
def test_two_levels_have_the_same_hash(hook: str, levels: str) -> None:
    """Nodes of consecutive ranks add in the order of the tree. Others must not add on two levels."""
    job = Job(hook=hook, steps=3)
    alone = run_ranks(hash_of_job, 1, args=(job,))
    of_nodes = run_ranks(hash_of_job, 4, args=(job,), environment={"CROSSOVER_LEVELS": levels})
    assert {*of_nodes} == {*alone}
