"""Decoupled training with a codec: the bits of `CompressedState`, only later; on all ranks the same."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.codecs import CompressedState, Int8, SIDCo, compressed_hook
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.multiprocess.compressed_training import CODECS, backward, digest, wrapped

WORLD_SIZES = (2, 3, 4) if IN_CAMPAIGN else (2, 3)
STEPS = 200 if IN_CAMPAIGN else 7  # of which five are deferred, one of them with two micro-batches
# Steps after which it is decided whether to defer.
TRIAL_STEPS = 34


class Job:
    """A model, its optimizer, and what its gradients travel by."""

    def __init__(self, name: str, decoupled: bool, defer: str = "always", **options: object) -> None:
        self.model = wrapped(gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if decoupled:
            self.state = DecoupledState(self.optimizer, codec=CODECS[name], defer=defer, **options)  # type: ignore[arg-type]
            self.model.register_comm_hook(self.state, decoupled_hook)
        else:
            self.state = CompressedState(CODECS[name])  # type: ignore[assignment]
            self.model.register_comm_hook(self.state, compressed_hook)

    def step(self, rank: int, number: int) -> None:
        """Take one step, of two micro-batches every third time."""
        self.optimizer.zero_grad()
        if number % 3 == 2:
            with self.model.no_sync():
                backward(self.model, rank, 1000 + number)
        backward(self.model, rank, number)
        self.optimizer.step()

    def digest(self) -> str:
        return digest(list(self.model.parameters()))


def both_ways(rank: int, world_size: int, name: str, defer: str, steps: int) -> tuple[str, str]:
    """Return the parameters with the codec alone, and under decoupled training."""
    digests = []
    for decoupled in (False, True):
        job = Job(name, decoupled, defer)
        for number in range(steps):
            job.step(rank, number)
        digests.append(job.digest())
    return digests[0], digests[1]


def all_codecs(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    return {name: both_ways(rank, world_size, name, "always", STEPS) for name in CODECS}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parameters_are_those_of_the_codec_alone_on_all_ranks(world_size: int) -> None:
    first, *others = run_ranks(all_codecs, world_size)
    assert len({decoupled for _, decoupled in first.values()}) == len(CODECS)
    for each in (first, *others):
        assert all(alone == decoupled for alone, decoupled in each.values()), each
        assert each == first


def test_it_makes_no_difference_which_steps_are_deferred() -> None:
    results = run_ranks(both_ways, 2, args=("pair", "auto", TRIAL_STEPS))
    assert len({digest for result in results for digest in result}) == 1


def clipped(rank: int, world_size: int) -> tuple[list[float], list[float], str]:
    """Clip by the state and, from the same parameters on, by torch; return both norms of each step."""
    job, alone = Job("int8", True), Job("int8", False)
    norms, expected = [], []
    for number in range(6):
        for each in (job, alone):
            each.optimizer.zero_grad()
            backward(each.model, rank, number)
        norms.append(float(job.state.clip_grad_norm_(0.1)))
        expected.append(float(nn.utils.clip_grad_norm_(alone.model.parameters(), 0.1)))
        job.optimizer.step()
        alone.optimizer.step()
    return norms, expected, job.digest()


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_sees_decoded_values(world_size: int) -> None:
    results = run_ranks(clipped, world_size)
    for norms, expected, _ in results:
        assert norms == pytest.approx(expected, rel=1e-4)
        assert min(norms) > 0.1
    assert len({last for *_, last in results}) == 1


def drained(rank: int, world_size: int) -> tuple[float, float, str]:
    """Return the greatest residual before and after an exact step."""
    job = Job("pair", True)
    for number in range(4):
        job.step(rank, number)
    before = job.state.state_dict()["codec"]["residuals"]
    job.state.drain()
    job.step(rank, 4)
    after = job.state.state_dict()["codec"]["residuals"]
    job.step(rank, 5)
    greatest = [
        max((float(each.abs().max()) for each in kept.values()), default=0.0) for kept in (before, after)
    ]
    return greatest[0], greatest[1], job.digest()


def test_a_drained_step_leaves_nothing_behind() -> None:
    results = run_ranks(drained, 3)
    for before, after, _ in results:
        assert before > 0
        assert after == 0
    assert len({last for *_, last in results}) == 1


def resumed(rank: int, world_size: int, way: str) -> tuple[str, float]:
    """Stop after four steps; return the parameters after four more, and how far they are from those without a stop."""
    job, other = Job("int8", True), Job("int8", True)
    for number in range(4):
        job.step(rank, number)
        other.step(rank, number)
    saved = {"model": job.model.module.state_dict(), "optimizer": job.optimizer.state_dict()}
    state = job.state.state_dict()
    assert any(residual.any() for residual in state["codec"]["residuals"].values())
    job = Job("int8", True)
    job.model.module.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])
    if way == "loaded":
        job.state.load_state_dict(state)
    for number in range(4, 8):
        job.step(rank, number)
        other.step(rank, number)
    apart = [
        (a - b).detach().abs().max()
        for a, b in zip(job.model.parameters(), other.model.parameters(), strict=True)
    ]
    return job.digest(), float(max(apart))


def test_residuals_go_on_after_a_stop() -> None:
    loaded, forgotten = (run_ranks(resumed, 2, args=(way,)) for way in ("loaded", "forgotten"))
    assert len({last for last, _ in loaded}) == 1
    assert max(apart for _, apart in loaded) < min(apart for _, apart in forgotten)


def joined(rank: int, world_size: int) -> dict[str, str]:
    """Let rank 0 run out of inputs some steps early, twice."""
    steps, early = (4, 3) if IN_CAMPAIGN else (3, 2)  # the third step is the first that is deferred
    digests = {}
    for name in CODECS:
        job = Job(name, True)
        for epoch in range(2):
            with Join([job.model]):
                for number in range(steps + early * (rank > 0)):
                    job.optimizer.zero_grad()
                    backward(job.model, rank, 10 * epoch + number)
                    job.optimizer.step()
        digests[name] = job.digest()
    return digests


def test_ranks_may_run_out_of_inputs() -> None:
    first, *others = run_ranks(joined, 3)
    assert others == [first, first]


def rate(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    model = DistributedDataParallel(network, **DecoupledState.ddp_options(network))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = DecoupledState(optimizer, codec=(SIDCo(0.01), Int8()), defer="always")
    model.register_comm_hook(state, decoupled_hook)
    for step in range(10):
        optimizer.zero_grad()
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
    return float(state.stats()["codec"]["rate"])


def test_it_tells_the_rate() -> None:
    # 0.01 and 0.254 of half of the bytes each, with twice the bytes for an element's place, and headers.
    for found in run_ranks(rate, 2):
        assert 0.12 < found < 0.16
