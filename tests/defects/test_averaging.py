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
from tests.harness import in_ranks, inside, run_ranks
from tests.harness.groups import impatient_group
from tests.harness.oracles import error_of, heard
from tests.harness.training import Training
from tests.journeys.test_bits_and_buffers import COUNTED, sent_bytes


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(inputs.to(next(model.parameters()))).square().mean()  # type: ignore[no-any-return]


def loop_of(
    state: Any, network: nn.Module | None = None, *, lr: float = 0.1, **options: Any
) -> Training:
    torch.manual_seed(0)
    return Training(
        lambda *_: (state, elastic_hook if isinstance(state, ElasticState) else local_sgd_hook),
        dist.get_rank(),
        module=network or nn.Linear(4, 4),
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr)],
        loss=loss_of,
        **options,
    )


def in_bfloat16() -> nn.Module:
    return nn.Linear(4, 40).to(torch.bfloat16)


def spread(values: torch.Tensor) -> float:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return float((everyone[0] - everyone[-1]).abs().max())


@pytest.mark.defect("codecs-S1")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("mode", ["local", "sync", "async"])
def test_a_mask_of_infinities_is_left_out(mode: Any) -> None:
    state = LocalSGDState(2) if mode == "local" else ElasticState(1, mode)
    network = nn.Linear(4, 4)
    network.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    loop_of(state, network).run(6).close()
    stats = state.stats()
    assert stats.get("not_finite", 0) == 0
    assert stats.get("exchanges", 0) + stats.get("offers", 0) + stats.get("pulls", 0) > 0


@pytest.mark.defect("strangers-5")
@pytest.mark.parametrize("mode", ["sync", "async"])
@in_ranks(2)
def test_replicas_of_bfloat16_come_together(rank: int, mode: Any) -> None:
    """A user with bfloat16 parameters gets replicas as close as the format allows: one step of it, 1/128 at 1."""
    state = ElasticState(1, mode, 0.05)  # small pulls
    loop = loop_of(state, in_bfloat16(), lr=0.0).run(1)
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


@pytest.mark.defect("codecs-S7", "strangers-12")
@pytest.mark.parametrize("case", ["outer_optimizer", "model", "steps"])
@in_ranks(2)
def test_ranks_that_differ_are_told(rank: int, case: str) -> None:
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
        message = error_of(lambda: loop_of(state, network).run(2))
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
    loop = loop_of(state)
    for _ in range(6000):
        loop.run(1)
        if state.rounds():
            break
        time.sleep(0.01)
    state.close()
    assert state.rounds()[0].offered[0] > 2**24


def train_wild(rank: int, world_size: int, device: str) -> tuple[torch.Tensor, int]:
    """Return the centre's way from the beginning, and how many process groups are left behind."""
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with inside.pretend_host(f"host {rank}"):
        loop = loop_of(ElasticState(1, "wild", 0.3), lr=0.0, device=device).run(1)
    with torch.no_grad():
        start = loop.model.module.weight.cpu().clone()
        loop.model.module.weight.add_(float(rank))
    loop.run(4)
    centre = loop.state.state_dict()["kept"]["centre"]["weight"]
    loop.close()
    return centre - start, len(groups) - before


@pytest.mark.defect("codecs-S9", "codecs-S19")
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.fake_cuda)],
)
def test_the_wild_centre_is_of_one_moment_and_leaves_no_process_group(
    device: str, backend: str
) -> None:
    for moved, left in run_ranks(train_wild, 2, args=(device,), backend=backend):
        assert float(moved.max() - moved.min()) < 1e-6
        assert left == 0


@COUNTED
@pytest.mark.defect("codecs-S20")
@in_ranks(2)
def test_a_rank_without_an_offer_sends_no_zeros(rank: int) -> None:
    """While rank 0 alone trains on, rank 1 sends a slow rank's half of the centre in a round, and no whole model."""
    loop = loop_of(ElasticState(1, "async"), nn.Linear(4, 100_000), lr=0.0).run(2)
    dist.barrier()
    sent = []
    for count in (5, 15):
        while len(loop.state.rounds()) < count:
            if rank:
                time.sleep(0.01)
            else:
                loop.run(1)
        sent.append(sent_bytes())
    assert not any(each.offered[1] for each in loop.state.rounds()[5:15])
    loop.close()
    assert rank == 0 or sent[1] - sent[0] < 0.75 * 10 * 4 * loop.values.numel()


@pytest.mark.defect("strangers-23")
@pytest.mark.parametrize("elastic", [False, True])
@in_ranks(2, environment={"CROSSOVER_DISABLE": "1"})
def test_a_disabled_state_takes_all_calls(rank: int, elastic: bool) -> None:
    state = ElasticState(2) if elastic else LocalSGDState(2)
    loop = loop_of(state).run(3)
    before = loop.values
    state.average()
    with state.averaged():
        loop.model.state_dict()
    assert torch.equal(loop.values, before)
    assert spread(loop.values) == 0
    state.close()


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_a_saver_of_one_replica_is_warned_once_and_of_exchanges_in_flight(rank: int) -> None:
    """A user of DiLoCo whose checkpoint would lose an outer step on resume is told so, too."""
    outer = functools.partial(torch.optim.SGD, lr=0.7)
    loop, counts = loop_of(LocalSGDState(2, delay=1, outer_optimizer=outer)).run(2), []
    with heard() as said:

        def note() -> None:
            loop.model.state_dict()
            counts.append(sum("enter state.averaged()" in each for each in said))

        with loop.state.averaged():
            note()
            loop.state.state_dict()
        assert not said
        note()
        loop.run(1)
        note()
        loop.run(1).state.state_dict()
        assert "does not hold the exchanges in flight after step 4" in said[-1]
        loop.state.average()
        note()
    loop.close()
    assert counts == [0, 1, 1, 1]
    assert len(said) == 2


@pytest.mark.defect("strangers-10")
@in_ranks(2)
def test_a_mean_that_one_rank_asks_for_is_an_error(rank: int) -> None:
    group = impatient_group(2)
    loop = loop_of(LocalSGDState(2, process_group=group), process_group=group)

    def train() -> None:
        loop.run(3)
        with loop.state.averaged() if rank == 0 else contextlib.nullcontext():
            pass
        loop.run(3)

    assert error_of(train) != "no error"
    loop.close()


@pytest.mark.parametrize("call", ["average", "averaged", "checkpoint"])
@in_ranks(2)
def test_no_other_mean_is_taken_inside_of_averaged(rank: int, call: str) -> None:
    """A user who saves there is refused, also on one rank alone, and goes on as if nothing had happened."""
    state = LocalSGDState(4, delay=3, outer_optimizer=functools.partial(torch.optim.SGD, lr=0.7))
    loop = loop_of(state).run(5)
    assert state.stats()["in_flight"]
    before, said = loop.values, "no error"

    def nested() -> None:
        given = [loop.optimizer] if call == "checkpoint" else []
        with (
            state.averaged()
            if call == "averaged"
            else contextlib.nullcontext(getattr(state, call)(*given))
        ):
            pass

    with state.averaged():
        inside = loop.values
        if rank == 0:
            said = error_of(nested)
        assert torch.equal(loop.values, inside)
    assert rank or f"{call}() was called inside of state.averaged()" in said
    assert torch.equal(loop.values, before)
    assert error_of(nested) == "no error"
    loop.close()


@in_ranks(2)
def test_a_state_of_an_optimizer_that_is_not_finite_is_taken_over_by_nobody(rank: int) -> None:
    loop = loop_of(LocalSGDState(4)).run(2)
    state, own = loop.optimizer.state[loop.model.module.weight], torch.full((4, 4), float(rank))
    own[0, 0] = float("inf") if rank else 0.0
    state["momentum_buffer"] = own.clone()
    before = loop.values
    message = error_of(lambda: loop.state.checkpoint(loop.optimizer))
    assert "expected finite state of the optimizers on all ranks" in message
    assert ("this rank's are among them" in message) == (rank == 1)
    assert torch.equal(state["momentum_buffer"], own)
    assert torch.equal(loop.values, before)
    loop.close()


OUTER = [functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), torch.optim.Adam]
# A state with an outer optimizer, its network, and the steps before the checkpoint.
RESUMED: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], int]] = {
    "bfloat16": (lambda _: ElasticState(1, "sync", 0.05), in_bfloat16, 3),
    # The others have made their outer step by then.
    "first_fragment_has_left": (
        lambda o: LocalSGDState(8, 0, 4, outer_optimizer=o),
        lambda: None,
        7,
    ),
    "a_fragment_is_empty": (lambda o: LocalSGDState(2, 0, 2, outer_optimizer=o), nn.PReLU, 5),
}


@pytest.mark.parametrize("case", RESUMED)
@in_ranks(2)
def test_a_checkpoint_resumes(rank: int, case: str) -> None:
    make, network, steps = RESUMED[case]
    for outer in OUTER:
        loop, other = (loop_of(make(outer), network()) for _ in range(2))
        loop.run(steps)
        saved = copy.deepcopy(loop.state.checkpoint(loop.optimizer))
        other.state.restore(saved, other.optimizer)
        other.steps = steps
        assert torch.equal(*(each.run(9).values for each in (loop, other)))
        loop.close()
        other.close()
