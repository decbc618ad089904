"""One hash on CUDA devices, over NCCL and gloo. NCCL adds more than two ranks in its own order."""

import pytest

from tests.harness import run_ranks

from .jobs import Job, hash_of_job

pytestmark = pytest.mark.fake_cuda


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("hook", ["split", "decoupled", "owners", "muon"])
def test_devices_have_one_hash(hook: str, backend: str) -> None:
    optimizer = "muon" if hook == "muon" else "adamw"
    job = Job("mlp", optimizer, hook=hook, device="cuda", steps=3)
    found = {
        size: {*run_ranks(hash_of_job, size, args=(job,), backend=backend)} for size in (1, 2, 4)
    }
    assert len(set.union(*found.values())) == 1, found


def test_buffers_and_uneven_sums_on_devices() -> None:
    job = Job("cnn", device="cuda", steps=3)
    found = {size: {*run_ranks(hash_of_job, size, args=(job,), backend="nccl")} for size in (1, 3)}
    assert len(set.union(*found.values())) == 1, found
