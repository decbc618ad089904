"""Parameters are compared between ranks in some steps, and an error names those that differ."""

import functools
import gc
import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._engine import observe
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.networks import Branches, mlp
from tests.harness.oracles import error_of, heard
from tests.harness.training import WAYS, WIDTH, Training, optimizers_of

OFF = "CROSSOVER_COMPARE_REPLICAS"
# Parameters of these dtypes can be broadcast by gloo, as DDP does at its beginning.
KINDS = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64)
# Steps 1, 2, 4 and 8 are compared, each in the step after it.
STEPS = 10


def part_from(training: Training, name: str) -> None:
    with torch.no_grad():
        training.model.module.get_parameter(name).flatten()[0] += 1


@pytest.mark.defect("strangers-0", "kfac-S10")
@pytest.mark.parametrize(
    "way", ["split", "crossover", "wrapped", "int8", "decoupled", "kfac", "muon"]
)
@in_ranks(3)
def test_a_difference_is_one_error_that_names_parameter_ranks_and_step(rank: int, way: str) -> None:
    training = Training(way, rank)
    training.run(5)
    if rank == 2:
        part_from(training, "2.weight")
    message = error_of(lambda: training.run(4))
    assert message.startswith("expected the same parameters on all ranks, got 2.weight")
    assert " differ in step 8, 2.weight between ranks [0, 1] and [2]; " in message
    assert training.model.module[0].bias.grad.isfinite().all(), "the mean was lost"
    training.drop()
    training.run(3)  # step 16 is the next that is compared


class Kinds(nn.Module):
    """Frozen parameters of many dtypes, and a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)
        kinds = [torch.ones(3, 5).to(kind).t() for kind in KINDS]
        kinds += [torch.full((3,), torch.nan), torch.empty(0)]
        self.kinds = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.kinds[-1].sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", [None, *range(len(KINDS))])
@in_ranks(2)
def test_parameters_of_any_kind_are_compared_by_their_bits(rank: int, place: int | None) -> None:
    """The parameters are frozen, so a difference is a warning, once."""
    training = Training("crossover", rank, module=Kinds())
    if rank and place is not None:
        training.model.module.kinds[place].data = torch.zeros(5, 3).to(KINDS[place])
    with heard() as messages:
        with training.model.no_sync():
            training.backward()
        training.run(8)
    warnings = [each for each in messages if each.startswith("frozen parameters differ")]
    assert len(warnings) == (place is not None)
    assert place is None or f"since step 1 at the latest: kinds.{place}. " in warnings[0]


@pytest.mark.parametrize(
    "how", ["ignored", "argument", "argument on one rank", "environment", "nothing"]
)
@in_ranks(2)
def test_replicas_may_differ_on_purpose(rank: int, how: str) -> None:
    module = mlp(WIDTH, WIDTH, WIDTH, seed=3)
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    training = Training("crossover" if how.startswith("argument") else "split", rank, module=module)
    if how == "argument" or (how == "argument on one rank" and rank):
        training.state.compare_replicas = False
    with torch.no_grad():
        module[2].weight += rank
    with mock.patch.dict(os.environ, {OFF: "0"} if how == "environment" else {}):
        assert (error_of(lambda: training.run(5)) == "no error") == (how != "nothing")


@in_ranks(2)
def test_ranks_that_have_joined_are_not_compared(rank: int) -> None:
    """Rank 0 runs out of data: its parameters stay behind until Join's end."""
    training = Training("split", rank)
    with Join([training.model]):
        training.run(3 + 6 * rank)


# With owners the owner's parameters replace those of other ranks at the end of a step.
@pytest.mark.parametrize("way", ["split", "owned"])
@in_ranks(2)
def test_each_model_of_a_group_counts_its_own_steps(rank: int, way: str) -> None:
    """Two models of one group train in turns. The second one differs between the ranks."""
    first, second = Training(way, rank), Training(way, rank, module=mlp(WIDTH, 4, WIDTH, seed=1))
    if rank:
        part_from(second, "2.bias")

    def rounds_of_steps() -> None:
        for _ in range(2):
            first.step()
            second.run(2)

    assert "2.bias that differ in step 1" in error_of(rounds_of_steps)


@pytest.mark.parametrize("way", ["decoupled", "owned"])
@in_ranks(2)
def test_updates_that_one_rank_has_read_and_another_has_not_are_no_difference(
    rank: int, way: str
) -> None:
    training = Training(way, rank, module=Branches(rank), find_unused_parameters=True).run(18)
    training.close()


# --- parameters that differ on purpose while gradients travel: allowed with plain DDP ---

COMPARED = [way for way in WAYS if way not in ("averaged", "elastic")]


def copies(training: Training) -> list[torch.Tensor]:
    return [each.detach().clone() for each in training.model.parameters()]


@torch.no_grad()
def put_back(training: Training, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(training.held, values, strict=True):
        parameter.copy_(value)


def put_back_data(training: Training, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(training.held, values, strict=True):
        parameter.data = value


def noise(training: Training) -> list[torch.Tensor]:
    """Return other values on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * training.steps + training.rank)
    return [0.01 * torch.randn(each.shape, generator=generator) for each in training.held]


@torch.no_grad()
def add(training: Training, values: list[torch.Tensor]) -> None:
    torch._foreach_add_(list(training.model.parameters()), values)


def sam(training: Training) -> float:
    """Sharpness-aware minimization whose first pass stays on its rank."""
    with training.model.no_sync():
        training.backward()
    ups = [0.05 * each.grad / each.grad.norm() for each in training.held]
    before = copies(training)
    training.drop()
    add(training, ups)
    loss = training.backward()
    put_back(training, before)
    training.update()
    return loss


def sam_by_data(training: Training) -> float:
    with training.model.no_sync():
        training.backward()
    ups = [0.05 * each.grad.data / each.grad.data.norm() for each in training.held]
    before = [each.data for each in training.held]
    training.drop()
    for parameter, up in zip(training.model.parameters(), ups, strict=True):
        parameter.data = parameter.data + up
    loss = training.backward()
    put_back_data(training, before)
    training.update()
    return loss


def perturbed(training: Training) -> float:
    """Adversarial weight perturbation: the only forward of a step uses perturbed weights."""
    before = copies(training)
    add(training, noise(training))
    loss = training.backward()
    put_back(training, before)
    training.update()
    return loss


def noisy_forward(training: Training) -> float:
    """A hook of the model adds noise to the weights; they are put back after backward."""
    if not hasattr(training.model, "adds_noise"):
        training.model.adds_noise = True

        def before(*_: Any) -> None:
            training.before_noise = copies(training)
            add(training, noise(training))

        training.model.module.register_forward_pre_hook(before)
    loss = training.backward()
    put_back(training, training.before_noise)
    training.update()
    return loss


LOOPS = [sam, sam_by_data, perturbed, noisy_forward]


def with_loops(ways: list[str]) -> list[tuple[str, Any]]:
    """Return pairs of a way and a loop: all of them in the campaign, else two loops for each way.

    `perturbed` is one of these, as the only loop where parameters differ when forward begins.
    """
    others = [loop for loop in LOOPS if loop is not perturbed]
    pairs = []
    for place, way in enumerate(ways):
        chosen = [perturbed, others[place % len(others)]]
        pairs += [(way, loop) for loop in (LOOPS if IN_CAMPAIGN else chosen)]
    return pairs


@pytest.mark.torch_version
@pytest.mark.parametrize(("way", "loop"), with_loops(COMPARED))
@in_ranks(2)
def test_parameters_that_are_put_back_before_step_are_no_difference(
    rank: int, way: str, loop: Any
) -> None:
    found = []
    for each in (None, way):
        if way in ("int8", "kfac") and each is None:
            continue
        training = Training(each, rank, optimizers=functools.partial(optimizers_of, way))
        found.append([loop(training) for _ in range(STEPS)])
        training.close()
        found[-1].append(float(training.values.double().sum()))
    assert found[0] == found[-1]


@pytest.mark.parametrize(
    ("way", "loop"), with_loops(["split", "decoupled", "owned", "kfac", "muon"])
)
@in_ranks(2)
def test_a_real_difference_is_found_in_such_a_loop(rank: int, way: str, loop: Any) -> None:
    """With owners a step removes a difference, so it must arise in the step that is compared."""
    training = Training(way, rank)
    for _ in range(7):
        loop(training)
    if rank:
        part_from(training, "2.weight")

    def train() -> None:
        for _ in range(3):
            loop(training)

    assert "2.weight that differ in step 8, 2.weight between ranks [0] and [1]" in error_of(train)


@pytest.mark.parametrize("way", ["split", "decoupled"])
@in_ranks(2)
def test_perturbed_parameters_are_no_error_where_steps_are_skipped(rank: int, way: str) -> None:
    """A GradScaler skips the first steps. Then ranks have summed perturbed parameters only."""
    training = Training(way, rank)
    for step in range(9):
        before = copies(training)
        add(training, noise(training))
        training.backward()
        if way == "decoupled":
            training.state.flush()
        put_back(training, before)
        if step in (2, 3):
            training.drop()
        else:
            training.update()
    training.close()


@in_ranks(2)
def test_a_loop_without_an_optimizer_is_compared_as_well(rank: int) -> None:
    training = Training("split", rank)

    def train(steps: int) -> None:
        for _ in range(steps):
            training.backward()
            with torch.no_grad():
                for parameter in training.held:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            training.steps += 1

    train(9)
    if rank:
        part_from(training, "2.weight")
    assert "2.weight that differ in step 16" in error_of(lambda: train(12))


@pytest.mark.parametrize("way", ["split", "decoupled", "muon"])
@in_ranks(2)
def test_adapters_that_are_merged_on_one_rank_leave_a_warning(rank: int, way: str) -> None:
    """LoRA: rank 0 merges its adapters for a sample, and takes them out with a rounding error."""
    module = mlp(WIDTH, WIDTH, WIDTH, seed=3)
    module[0].requires_grad_(False)
    training = Training(way, rank, module=module, optimizers=functools.partial(optimizers_of, way))
    with heard() as messages:
        for _ in range(3):
            training.run(6)
            if rank == 0:
                module[0].weight.data.add_(0.3).sub_(0.3)
    training.close()
    warnings = [
        each
        for each in messages
        if each.startswith("frozen parameters differ between ranks since step 8")
    ]
    assert len(warnings) == 1 and "0.weight" in warnings[0]
    assert "0.bias" not in warnings[0]


@pytest.mark.parametrize("way", ["split", "decoupled", "owned"])
@in_ranks(2)
def test_a_layer_unfrozen_after_wrapping_is_named(rank: int, way: str) -> None:
    module = mlp(WIDTH, WIDTH, WIDTH, seed=3)
    module[0].requires_grad_(False)

    def trained(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        ]

    training = Training(way, rank, module=module, optimizers=trained).run(5)
    module[0].requires_grad_(True)

    def train() -> None:
        training.optimizer.add_param_group({"params": list(module[0].parameters())})
        training.run(6)

    message = error_of(train)
    assert "requires_grad was set after the model was wrapped" in message
    assert "0.weight, 0.bias" in message


# --- other loops that are allowed with plain DDP ---


def averages_on_rank_0(training: Training) -> None:
    """Rank 0 alone evaluates an average of the weights, which it swaps in and out."""
    training.step()
    if training.rank == 0 and training.steps % 3 == 0:
        if hasattr(training.state, "flush"):
            training.state.flush()
        values = [each.data.clone() for each in training.held]
        for each in training.held:
            each.data.mul_(0.9)
        with torch.no_grad():
            training.model.module(torch.ones(2, WIDTH))
        put_back_data(training, values)


def toggles(training: Training) -> None:
    """As GANs do: a part is frozen while another one is trained, without an exchange."""
    first = training.model.module[0]
    for each in first.parameters():
        each.requires_grad_(False)
    with training.model.no_sync(), torch.no_grad():
        training.loss()
    for each in first.parameters():
        each.requires_grad_(True)
    training.step()


def resumes(training: Training) -> None:
    training.step()
    if training.steps in (3, 4, 7, 8):
        training.load(training.save())


@pytest.mark.parametrize("loop", [averages_on_rank_0, toggles, resumes])
@pytest.mark.parametrize("way", ["split", "crossover", "int8", "decoupled"])
@in_ranks(2)
def test_other_loops_of_plain_ddp_are_no_difference(rank: int, way: str, loop: Any) -> None:
    found = []
    for each in (None, way) if way != "int8" else (way,):
        training = Training(each, rank)
        for _ in range(STEPS):
            loop(training)
        training.close()
        found.append(training.weights())
    assert all(map(torch.equal, found[0], found[-1]))


@in_ranks(2)
def test_a_model_that_is_collected_while_it_is_compared_leaves_no_hook(rank: int) -> None:
    """The ids of its parameters may be those of other tensors later."""
    before = len(observe._at_begin)
    gone = Training("split", rank)
    gone.backward()
    assert len(observe._at_begin) == before + 1
    del gone
    gc.collect()
    Training(None, rank).step()
    assert len(observe._at_begin) <= before
