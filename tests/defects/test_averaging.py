"""Known defects of averaged replicas: what ranks must have in common, what is averaged, and what a checkpoint holds."""

import contextlib
import copy
import functools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.errors import CrossoverError
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of, heard
from tests.harness.training import Training
from tests.harness.waiting import eventually
from tests.journeys.test_bits_and_buffers import COUNTED, sent_bytes


class Masked(nn.Module):
    """A layer with a causal mask among its buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) @ torch.softmax(self.mask, -1)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float32)
    return model(inputs.to(next(model.parameters()))).square().mean()  # type: ignore[no-any-return]


class Loop(Training):
    """A model with an averaging state, and a loop around it."""

    def __init__(
        self, state: Any, network: nn.Module | None = None, *, lr: float = 0.1, **options: Any
    ) -> None:
        torch.manual_seed(0)
        hook = elastic_hook if isinstance(state, ElasticState) else local_sgd_hook
        super().__init__(
            lambda *_: (state, hook),
            dist.get_rank(),
            module=network or nn.Linear(4, 4),
            optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr)],
            loss=loss_of,
            **options,
        )

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def spread(values: torch.Tensor) -> float:
    """Return how far apart ranks are."""
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return float((everyone[0] - everyone[-1]).abs().max())


# --- what is averaged ---------------------------------------------------------------------------------------------


@pytest.mark.defect("codecs-S1")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("mode", ["local", "sync", "async"])
def test_a_mask_of_infinities_is_left_out(mode: Any) -> None:
    state = LocalSGDState(1 + 1) if mode == "local" else ElasticState(1, mode)
    loop = Loop(state, Masked()).run(6)
    stats = state.stats()
    loop.close()
    assert stats.get("not_finite", 0) == 0
    assert stats.get("exchanges", 0) + stats.get("offers", 0) + stats.get("pulls", 0) > 0


@pytest.mark.defect("strangers-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
@in_ranks(2)
def test_replicas_of_bfloat16_come_together(rank: int, mode: Any) -> None:
    """A user with bfloat16 parameters gets replicas as close as the format allows: one step of it, 1/128 at 1."""
    state = ElasticState(1, mode, 0.05)  # small pulls
    loop = Loop(state, nn.Linear(4, 40).to(torch.bfloat16), lr=0.0).run(1)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.fill_(1.0 + rank / 16)
    for _ in range(100):
        loop.run(20)
        time.sleep(0.01)  # so that rounds follow
        if (apart := spread(loop.values.float())) <= 1 / 128:
            break
    assert apart <= 1 / 128
    loop.close()


def first_centre(rank: int, world_size: int, mode: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # The owners' border is in the means.
    network = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    loop = Loop(ElasticState(9, mode), network).run(1)
    centre = loop.state.state_dict()["kept"]["centre"]["0.running_mean"]
    loop.close()
    return centre, network[0].running_mean


def in_bfloat16() -> nn.Module:
    return nn.Linear(4, 40).to(torch.bfloat16)


@pytest.mark.usefixtures("process_group")
def test_a_pull_that_averaged_applies_early_leaves_no_rest_behind() -> None:
    """A user who evaluates in mid-training goes on with what bfloat16 has rounded off of the own parameters."""
    state = ElasticState(1, "async", 0.3)
    loop = Loop(state, in_bfloat16()).run(1)
    rounds, block = state._replica._rounds, state._replica.blocks[0]

    def has_rest() -> bool:
        loop.run(1)
        return block.rest is not None

    assert eventually(has_rest)
    loop.loss()  # does what is due
    assert eventually(lambda: rounds._back is not None)
    before = block.rest
    with state.averaged():
        assert block.rest is None
    assert block.rest is before
    loop.close()


@pytest.mark.defect("codecs-S12")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_centre_begins_with_one_replica_or_the_mean(mode: str) -> None:
    """A user's centre begins with statistics of one rank, of none, or of all, not with pieces of each."""
    (centre, first), (_, second) = run_ranks(first_centre, 2, args=(mode,))
    candidates = [first, second, (first + second) / 2, torch.zeros(4)]
    assert any(torch.allclose(centre, each) for each in candidates)


# --- what ranks must have in common -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("outer_optimizer", marks=pytest.mark.defect("codecs-S7")),
        pytest.param("model", marks=pytest.mark.defect("strangers-12")),
        pytest.param("steps", marks=pytest.mark.defect("strangers-12")),
    ],
)
@in_ranks(2)
def test_ranks_that_differ_are_told(rank: int, case: str) -> None:
    """A user whose ranks differ in an argument, a name or one step of 2**24 gets an error on all ranks."""
    network, state = None, LocalSGDState(2)
    if case == "outer_optimizer":
        outer = functools.partial(torch.optim.SGD, lr=0.1 if rank else 0.9)
        state = LocalSGDState(2, outer_optimizer=outer)
    elif case == "model":
        network = nn.Sequential(OrderedDict({f"layer{rank}": nn.Linear(4, 4)}))
        torch.set_default_dtype(torch.float16)
    elif case == "steps":
        state.load_state_dict({"steps": 2**24 + rank, "kept": None})
    try:
        message = error_of(lambda: Loop(state, network).run(2))
    finally:
        torch.set_default_dtype(torch.float32)
        state.close()
    assert message.startswith(f"expected the same {case} on all ranks")
    assert case != "steps" or "call load_state_dict on all ranks" in message


@pytest.mark.defect("strangers-12")
@pytest.mark.usefixtures("process_group")
def test_a_count_of_steps_is_exact_in_rounds() -> None:
    """A user's log of rounds has the step after 2**24, too, which no float32 holds."""
    state = ElasticState(1, "async")
    state.load_state_dict({"steps": 2**24, "kept": None})
    loop = Loop(state)
    for _ in range(6000):
        loop.run(1)
        if state.rounds():
            break
        time.sleep(0.01)
    state.close()
    assert state.rounds()[0].offered[0] > 2**24


@pytest.mark.defect("codecs-S2")
@in_ranks(2)
def test_one_averaging_state_serves_one_model(rank: int) -> None:
    loop = Loop(LocalSGDState(2))
    other = Loop(loop.state)
    loop.run(1)
    assert "a state for each model" in error_of(lambda: other.run(1))
    loop.close()


def sixteen_states(rank: int, world_size: int) -> list[float]:
    for _ in range(15):
        Loop(ElasticState(1, "async")).run(2).close()
    loop, module = Loop(ElasticState(1, "async")), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    # With the same data on all ranks, and about as many messages a step as the state has.
    other, losses = Training("split", module=module, bucket_cap_mb=25), []
    for _ in range(400):
        loop.run(1)
        losses.append(other.step())
    loop.close()
    return losses


@pytest.mark.defect("codecs-S18")
def test_a_sixteenth_state_keeps_its_messages_apart() -> None:
    """A user who makes one asynchronous state after another in a process gets no message of another exchange."""
    assert run_ranks(sixteen_states, 2) == run_ranks(sixteen_states, 1) * 2


def train_wild(rank: int, world_size: int, device: str) -> tuple[torch.Tensor, int]:
    """Return the centre's way from the beginning, and how many process groups are left behind."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with inside.pretend_host(f"host {rank}"):
        loop = Loop(ElasticState(1, "wild", 0.3), lr=0.0, device=device).run(1)
    with torch.no_grad():
        start = loop.model.module.weight.clone()
        loop.model.module.weight.add_(float(rank))
        start = start.cpu()
    loop.run(4)
    centre = loop.state.state_dict()["kept"]["centre"]["weight"]
    loop.close()
    return centre - start, len(groups) - before


@pytest.mark.defect("codecs-S9", "codecs-S19")
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.fake_cuda)]
)
def test_the_wild_centre_is_of_one_moment_on_one_host_and_leaves_no_process_group(
    device: str, backend: str
) -> None:
    """A user's checkpoint holds one centre: here all elements move alike."""
    for moved, left in run_ranks(train_wild, 2, args=(device,), backend=backend):
        assert float(moved.max() - moved.min()) < 1e-6
        assert left == 0


def bytes_of_a_bystander(rank: int, world_size: int) -> tuple[float, set[int | None]]:
    """Rank 0 alone trains on; return what this rank sends in a round, as a part of the model, and rank 1's offers."""
    loop = Loop(ElasticState(1, "async"), nn.Linear(4, 100_000), lr=0.0).run(2)
    dist.barrier()
    sent = []
    for count in (5, 15):
        while len(loop.state.rounds()) < count:
            if rank:
                time.sleep(0.01)
            else:
                loop.run(1)
        sent.append(sent_bytes())
    offers = {each.offered[1] for each in loop.state.rounds()[5:15]}
    loop.close()
    return (sent[1] - sent[0]) / 10 / (4 * loop.values.numel()), offers


@COUNTED
@pytest.mark.defect("codecs-S20")
def test_a_rank_without_an_offer_sends_no_zeros() -> None:
    """A user whose ranks differ in speed has at most a slow rank's half of the centre on the link, no whole model."""
    _, (sent, offers) = run_ranks(bytes_of_a_bystander, 2)
    if offers != {None}:
        pytest.fail("rank 1 has offered something")
    assert sent < 0.75


# --- disabled, checkpoints ---------------------------------------------------------------------------------


@pytest.mark.defect("strangers-23")
@pytest.mark.parametrize("elastic", [False, True])
@in_ranks(2, environment={"CROSSOVER_DISABLE": "1"})
def test_a_disabled_state_takes_all_calls(rank: int, elastic: bool) -> None:
    state = ElasticState(2) if elastic else LocalSGDState(2)
    loop = Loop(state).run(3)
    before = loop.values
    state.average()
    with state.averaged():
        loop.model.state_dict()
    assert torch.equal(loop.values, before)
    assert spread(loop.values) == 0
    state.close()


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_a_saver_of_one_replica_is_warned_once(rank: int) -> None:
    loop, counts = Loop(LocalSGDState(2)), []
    with heard() as said:

        def note() -> None:
            loop.model.state_dict()
            counts.append(sum("enter state.averaged()" in each for each in said))

        loop.run(3)
        with loop.state.averaged():
            note()
        note()
        loop.run(1)
        note()
        loop.state.average()
        note()
    loop.close()
    assert counts == [0, 1, 1, 1]


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_a_state_dict_in_flight_is_warned_of(rank: int) -> None:
    """A user of DiLoCo whose checkpoint would lose an outer step on resume is told so."""
    outer = functools.partial(torch.optim.SGD, lr=0.7)
    loop, counts = Loop(LocalSGDState(2, delay=1, outer_optimizer=outer)), []
    with heard() as said:
        loop.run(2)
        for block in (loop.state.averaged(), contextlib.nullcontext()):
            with block:
                loop.state.state_dict()
            counts.append(sum("does not hold the exchanges in flight after step 2" in each for each in said))
    loop.close()
    assert counts == [0, 1]


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_a_mean_that_one_rank_asks_for_is_an_error(rank: int) -> None:
    """A user who enters averaged() on rank 0 alone gets an error, not the other rank's next exchange as a mean."""
    group = impatient_group(2)
    loop = Loop(LocalSGDState(2, process_group=group), process_group=group)

    def train() -> None:
        loop.run(3)
        with loop.state.averaged() if rank == 0 else contextlib.nullcontext():
            pass
        loop.run(3)

    assert error_of(train) != "no error"
    loop.close()


class TwoTypes(nn.Module):
    """A layer in float32, and a buffer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("noted", torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]


MEANS = {
    "elastic": functools.partial(ElasticState, sync_every=2, mode="sync"),
    "at once": functools.partial(LocalSGDState, sync_every=2),
    "late": functools.partial(LocalSGDState, sync_every=2, delay=1),
}


@pytest.mark.parametrize("way", MEANS)
@in_ranks(2)
def test_of_a_mean_that_is_not_finite_nothing_is_taken_over(way: str) -> None:
    """Whatever of it has come: what is of another type lies in a block of its own."""
    loop = Loop(MEANS[way](), TwoTypes()).run(2)
    loop.model.module.noted[0] = float("nan")
    own = loop.values
    with contextlib.suppress(CrossoverError):
        for _ in range(3):
            loop.loss()
            assert torch.equal(loop.values, own)
            loop.step()
            own = loop.values
    assert torch.equal(loop.values, own)
    assert "expected finite parameters" in error_of(loop.loss)


# --- resumed jobs -------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer in bfloat16, and in float32 one number, which is its first parameter or its last."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        if is_first:
            self.scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(4, 4).to(torch.bfloat16)
        if not is_first:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs.to(torch.bfloat16)) * self.scale


OUTER = {
    "nesterov": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
}


def check_resumes(make: Callable[[], Any], network: Callable[[], nn.Module], steps: int) -> None:
    """Compare a job that goes on from a checkpoint with a new one that resumes there."""
    loop, other = Loop(make(), network()).run(steps), Loop(make(), network())
    saved = copy.deepcopy(loop.state.checkpoint(loop.optimizer))
    other.state.restore(saved, other.optimizer)
    other.steps = steps
    ends = [each.run(9).values for each in (loop, other)]
    loop.close()
    other.close()
    assert torch.equal(*ends)


@pytest.mark.parametrize("outer", OUTER)
@in_ranks(2)
def test_a_checkpoint_before_the_first_fragment_has_left_resumes(rank: int, outer: str) -> None:
    """The others have made their outer step by then."""
    make = functools.partial(LocalSGDState, 8, fragments=4, outer_optimizer=OUTER[outer])
    check_resumes(make, lambda: nn.Linear(4, 4), 7)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("is_first", [True, False])
@in_ranks(2)
def test_a_checkpoint_with_fragments_of_no_element_resumes(rank: int, is_first: bool, outer: str) -> None:
    make = functools.partial(LocalSGDState, 2, fragments=2, outer_optimizer=OUTER[outer])
    check_resumes(make, lambda: Scaled(is_first=is_first), 5)


@in_ranks(2)
def test_a_checkpoint_in_bfloat16_resumes(rank: int) -> None:
    check_resumes(lambda: ElasticState(1, "sync", 0.05), in_bfloat16, 3)
