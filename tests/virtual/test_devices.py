"""One hash on CUDA devices, over NCCL and gloo. NCCL adds more than two ranks in its own order."""

import pytest

from tests.harness import run_ranks

from .jobs import Job, hash_of_job

pytestmark = pytest.mark.fake_cuda


def assert_one_hash(job: Job, backend: str, *sizes: int) -> None:
    found = {size: {*run_ranks(hash_of_job, size, args=(job,), backend=backend)} for size in sizes}
    assert len(set.union(*found.values())) == 1, found


@pytest.mark.parametrize(
    ("hook", "backend"),
    [("split", "gloo"), ("split", "nccl"), ("decoupled", "nccl"), ("owners", "nccl")],
)
def test_devices_have_one_hash(hook: str, backend: str) -> None:
    assert_one_hash(Job("mlp", hook=hook, device="cuda", steps=3), backend, 1, 2, 4)


def test_muon_on_devices() -> None:
    job = Job("mlp", "muon", hook="muon", device="cuda", steps=3)
    assert_one_hash(job, "nccl", 1, 4)


def test_buffers_and_uneven_sums_on_devices() -> None:
    assert_one_hash(Job("cnn", device="cuda", steps=3), "nccl", 1, 3)
