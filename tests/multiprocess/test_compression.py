"""Codecs between real ranks: same parameters everywhere, nothing lost, bytes on the wire, and what DDP can do.

After seven coded steps thresholds are refreshed the second time, and all else has happened. Longer runs, and the long
tests with each number of ranks, are for the campaign.
"""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import (
    CompressedState,
    Int8,
    SIDCo,
    Threshold,
    compressed_hook,
)
from crossover_ddp.comm_hooks import CrossoverState, crossover_hook, reduce_scatter_all_gather_hook
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.turn import RecordingTurn
from tests.multiprocess.compressed_training import (
    CODECS,
    added_in_order,
    backward,
    batch,
    digest,
    gradients,
    network,
    wrapped,
)
from tests.multiprocess.identity_codec import Identity

WORLD_SIZES = (2, 3, 4)
TWO_AND_THREE = WORLD_SIZES if IN_CAMPAIGN else (2, 3)
TWO_AND_FOUR = WORLD_SIZES if IN_CAMPAIGN else (2, 4)
STEPS = 200 if IN_CAMPAIGN else 8
KEPT_STEPS = 12 if IN_CAMPAIGN else 7
JOINED_STEPS = (4, 7) if IN_CAMPAIGN else (3, 5)
RATE_STEPS = 20 if IN_CAMPAIGN else 7


# --- bits --------------------------------------------------------------------------------------------------


def without_codec(rank: int, world_size: int) -> list[list[str]]:
    digests = []
    for state, hook in [
        (None, reduce_scatter_all_gather_hook),
        (CompressedState(codec=None), compressed_hook),
    ]:
        model = wrapped()
        model.register_comm_hook(state, hook)
        digests.append([])
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
            digests[-1].append(digest(gradients(model)))
    return digests


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_without_a_codec_the_bits_are_those_of_the_split(world_size: int) -> None:
    for split, compressed in run_ranks(without_codec, world_size):
        assert split == compressed


def with_identity(rank: int, world_size: int) -> None:
    model, alone = wrapped(), network()
    model.register_comm_hook(CompressedState(codec=Identity()), compressed_hook)
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step)
        if step:  # the first one travels on the ring
            for got, mean in zip(gradients(model), added_in_order(alone, world_size, step), strict=True):
                assert torch.equal(got, mean)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_identity_codec_adds_in_the_order_of_ranks(world_size: int) -> None:
    run_ranks(with_identity, world_size)


# --- nothing is lost -----------------------------------------------------------------------------------------


def conservation(rank: int, world_size: int, name: str, drained: bool) -> float:
    """Return by how much the sum of all applied differs from that of all gradients less what is kept."""
    model, alone = wrapped(), network()
    state = CompressedState(codec=CODECS[name])
    model.register_comm_hook(state, compressed_hook)
    names = [parameter_name for parameter_name, _ in alone.named_parameters()]
    applied = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    given = [torch.zeros_like(p, dtype=torch.float64) for p in alone.parameters()]
    for step in range(KEPT_STEPS):
        if drained and step == KEPT_STEPS - 1:
            state.drain()
        model.zero_grad()
        alone.zero_grad()
        backward(model, rank, step)
        backward(alone, rank, step)
        for total, gradient in zip(applied, gradients(model), strict=True):
            total += gradient
        for total, gradient in zip(given, gradients(alone), strict=True):
            total += gradient / world_size
    kept = state.state_dict()["residuals"]
    assert not drained or not any(residual.any() for residual in kept.values())
    if not drained and name != "identity":
        assert max(float(residual.abs().max()) for residual in kept.values()) > 1e-5
    for each, total in zip(names, given, strict=True):
        if each in kept:
            total -= kept[each].view_as(total).double() / world_size
        dist.all_reduce(total)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(applied, given, strict=True))


def conservations(rank: int, world_size: int) -> dict[str, float]:
    return {name: conservation(rank, world_size, name, False) for name in CODECS}


@pytest.mark.parametrize("world_size", TWO_AND_THREE)
def test_what_is_applied_and_what_is_kept_are_all_gradients(world_size: int) -> None:
    for errors in run_ranks(conservations, world_size):
        assert errors.keys() == CODECS.keys()
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", ["int8", "sidco"])
def test_a_drained_step_applies_all_that_was_kept(name: str) -> None:
    assert max(run_ranks(conservation, 3, args=(name, True))) < 1e-5


# --- the same parameters on all ranks ------------------------------------------------------------------------


def train(rank: int, world_size: int, name: str, steps: int) -> str:
    """Train with two micro-batches in a step; return the parameters' digest."""
    model = wrapped()
    model.register_comm_hook(None if name == "none" else CompressedState(CODECS[name]), compressed_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    return digest(list(model.parameters()))


def train_all(rank: int, world_size: int, steps: int) -> dict[str, str]:
    return {name: train(rank, world_size, name, steps) for name in CODECS}


@pytest.mark.parametrize("world_size", TWO_AND_FOUR)
def test_parameters_are_the_same_on_all_ranks(world_size: int) -> None:
    first, *others = run_ranks(train_all, world_size, args=(STEPS,))
    assert len(set(first.values())) == len(CODECS)
    for other in others:
        assert other == first


def join(rank: int, world_size: int) -> dict[str, str]:
    """Let rank 0 run out of inputs some steps early, twice."""
    digests = {}
    for name in CODECS:
        model = wrapped()
        model.register_comm_hook(CompressedState(CODECS[name]), compressed_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in range(2):
            with Join([model]):
                for step in range(JOINED_STEPS[rank > 0]):
                    optimizer.zero_grad()
                    backward(model, rank, 10 * epoch + step)
                    optimizer.step()
            # Join ends with the parameters of the last rank that has joined.
        digests[name] = digest(list(model.parameters()))
    return digests


def test_ranks_may_run_out_of_inputs() -> None:
    first, *others = run_ranks(join, 3)
    assert others == [first, first]


class Branches(nn.Module):
    """The second branch is used in some steps, on rank 0 alone in others, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 30), nn.Linear(20, 30)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.first(inputs) + (self.second(inputs) if both else 0)).square().mean()


def branches(rank: int, world_size: int) -> tuple[float, list[bool], str]:
    network, alone = Branches(), Branches()
    model = DistributedDataParallel(network, find_unused_parameters=True)
    state = CompressedState(Int8())
    model.register_comm_hook(state, compressed_hook)
    applied, given, is_none = torch.zeros(30, 20).double(), torch.zeros(30, 20).double(), []
    for step in range(8):
        both = step % 4 in (0, 1) or (step % 4 == 2 and rank == 0)
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
        model.zero_grad()
        alone.zero_grad()
        model(inputs, both).backward()
        alone(inputs, both).backward()
        is_none.append(network.second.weight.grad is None)
        for total, weight in ((applied, network.second.weight), (given, alone.second.weight)):
            if weight.grad is not None:
                total += weight.grad
    kept = state.state_dict()["residuals"]["second.weight"].view(30, 20)
    given = (given - kept.double()) / world_size
    dist.all_reduce(given)
    return float((applied - given).abs().max() / given.abs().max()), is_none, digest([applied])


def test_a_parameter_that_nobody_uses_keeps_its_residual_for_later() -> None:
    results = run_ranks(branches, 2)
    for error, is_none, _ in results:
        assert error < 1e-5
        assert is_none == [False, False, False, True] * 2
    assert len({last for *_, last in results}) == 1


# --- Inf and NaN ---------------------------------------------------------------------------------------------


def spoiled(gradient: torch.Tensor, bad: float) -> torch.Tensor:
    """Return a gradient with one bad element, which rank 0 owns."""
    gradient = gradient.clone()
    gradient[0, 0] = bad
    return gradient


def overflow(rank: int, world_size: int, name: str, bad: float) -> tuple[list[bool], list[str]]:
    model = wrapped()
    state = CompressedState(CODECS[name])
    model.register_comm_hook(state, compressed_hook)
    weight = model.module[3].weight
    finite, digests = [], []
    for step in range(5):
        model.zero_grad()
        handle = weight.register_hook(functools.partial(spoiled, bad=bad)) if step == 2 else None
        if handle is not None and rank != 1:
            handle.remove()
        backward(model, rank, step)
        if handle is not None and rank == 1:
            handle.remove()
        finite.append(all(bool(torch.isfinite(gradient).all()) for gradient in gradients(model)))
        kept = state.state_dict()["residuals"].values()
        assert all(bool(torch.isfinite(residual).all()) for residual in kept)
        digests.append(digest([torch.nan_to_num(gradient) for gradient in gradients(model)]))
    return finite, digests


@pytest.mark.parametrize(("name", "bad"), [("int8", math.inf), ("half", math.nan), ("sidco", math.nan)])
def test_inf_and_nan_reach_all_ranks_and_no_residual(name: str, bad: float) -> None:
    results = run_ranks(overflow, 3, args=(name, bad))
    for finite, digests in results:
        assert finite == [True, True, False, True, True]
        assert digests == results[0][1]


def scales(rank: int, world_size: int) -> float:
    """Return by how much gradients of a loss whose scale changes differ from those of a constant one."""
    results = []
    for factors in ([1.0] * 4, [1.0, 1.0, 4.0, 0.5]):
        factor = iter(factors)
        current = [1.0]
        model = wrapped()
        model.register_comm_hook(
            CompressedState(SIDCo(0.05), loss_scale=lambda current=current: current[0]), compressed_hook
        )
        for step, current[0] in enumerate(factor):
            model.zero_grad()
            inputs, labels = batch(rank, step)
            (nn.functional.cross_entropy(model(inputs), labels) * current[0]).backward()
        results.append(torch.cat([gradient.flatten() for gradient in gradients(model)]) / current[0])
    assert float(results[0].abs().max()) > 1e-3
    return float((results[0] - results[1]).abs().max())


def test_residuals_follow_the_scale_of_the_loss() -> None:
    assert max(run_ranks(scales, 2)) < 1e-6


# --- bytes ---------------------------------------------------------------------------------------------------


def rate_of(rank: int, world_size: int, name: str) -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)),
        bucket_cap_mb=0.6,
    )
    codec = Int8() if name == "int8" else SIDCo(0.01)
    state = CompressedState(codec)
    model.register_comm_hook(state, compressed_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(RATE_STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(16, 256, generator=generator)).square().mean().backward()
        optimizer.step()
    return state.stats()["rate"]


@pytest.mark.parametrize(("name", "most"), [("int8", 0.26), ("sidco", 0.04)])
def test_bytes_sent_are_few_and_as_many_with_more_ranks(name: str, most: float) -> None:
    two, four = (run_ranks(rate_of, world_size, args=(name,)) for world_size in (2, 4))
    assert max(*two, *four) <= most
    assert sum(four) / 4 == pytest.approx(sum(two) / 2, rel=0.05)


def drifting(rank: int, world_size: int) -> float:
    """Return the rate of a codec that asks for four times its rate at first, and gets it in the first step only."""
    model = wrapped()
    state = CompressedState(Threshold(0.02, refresh_steps=1))
    model.register_comm_hook(state, compressed_hook)
    for step in range(20):
        model.zero_grad()
        backward(model, rank, step)
    return state.stats()["rate"]


def test_a_header_tells_the_room_of_the_next_message() -> None:
    # Of the values 0.044, with the first steps 0.05; a tenth of the elements are exact, or room for indices.
    assert max(run_ranks(drifting, 2)) < 0.075


# --- around the state ----------------------------------------------------------------------------------------


def resume(rank: int, world_size: int) -> float:
    """Return how far the sums are apart if the residuals move to another model's state half-way."""
    applied = {}
    for is_saved in (False, True):
        model, state = wrapped(), CompressedState(Int8())
        model.register_comm_hook(state, compressed_hook)
        total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for step in range(6):
            if step == 3 and is_saved:
                saved = state.state_dict()
                assert any(residual.any() for residual in saved["residuals"].values())
                model, state = wrapped(), CompressedState(Int8())
                state.load_state_dict(saved)
                again = state.state_dict()
                assert again["residuals"].keys() == saved["residuals"].keys()
                model.register_comm_hook(state, compressed_hook)
            if step == 5:
                state.drain()
            model.zero_grad()
            backward(model, rank, step)
            total += torch.cat([gradient.flatten() for gradient in gradients(model)])
        applied[is_saved] = total
    return float((applied[True] - applied[False]).abs().max() / applied[False].abs().max())


def test_residuals_are_saved_and_loaded() -> None:
    assert max(run_ranks(resume, 2)) < 1e-6


def options_of_ddp(rank: int, world_size: int) -> list[str]:
    digests = []
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        model = wrapped(**options)
        model.register_comm_hook(CompressedState(Int8()), compressed_hook)
        for step in range(5):
            model.zero_grad()
            backward(model, rank, step)
            digests.append(digest(gradients(model)))
    half = DistributedDataParallel(network().to(torch.bfloat16), bucket_cap_mb=0.02)
    half.register_comm_hook(CompressedState(Int8()), compressed_hook)
    for step in range(3):
        inputs, labels = batch(rank, step)
        half.zero_grad()
        nn.functional.cross_entropy(half(inputs.to(torch.bfloat16)), labels).backward()
        digests.append(digest([gradient.float() for gradient in gradients(half)]))
    return digests


def test_gradients_are_the_same_on_all_ranks_with_any_option_of_ddp() -> None:
    first, *others = run_ranks(options_of_ddp, 3)
    assert others == [first, first]


def in_double(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(network().double())
    model.register_comm_hook(CompressedState(Int8()), compressed_hook)
    inputs, labels = batch(rank, 0)
    with pytest.raises(UnsupportedConfigurationError, match=r"got dtype=torch\.float64.*pass codec=None"):
        nn.functional.cross_entropy(model(inputs.double()), labels).backward()


def test_float64_is_refused() -> None:
    run_ranks(in_double, 2)


def turns(rank: int, world_size: int) -> tuple[list[list[str]], list[str]]:
    orders, digests = [], []
    for make, hook in ((CompressedState, compressed_hook), (CrossoverState, crossover_hook)):
        model, mutex = wrapped(), RecordingTurn()
        state = make(codec=(SIDCo(0.05), Int8()), mutex=mutex)
        model.register_comm_hook(state, hook)
        for step in range(4):
            if step == 3:
                state.drain()
            backward(model, rank, step)
        assert not any(residual.any() for residual in state.state_dict()["residuals"].values())
        (rate,) = mutex.rates  # of the second step, the first one with codecs, in the third
        assert 0.1 < rate < 0.4
        orders.append(mutex.order)
        digests.append(digest(gradients(model)))
    return orders, digests


def test_the_turn_is_given_away_while_messages_travel() -> None:
    for orders, digests in run_ranks(turns, 2):
        assert orders == [["release", "request", "acquire"] * 4] * 2
        assert digests[0] == digests[1]
