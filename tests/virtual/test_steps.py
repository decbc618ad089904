"""Steps of virtual ranks: their count, abandoned micro-batches, memory, and float16."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp as ddp
from tests.harness import run_ranks, single_process_group

from .jobs import Job, Running


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with single_process_group():
        yield


def small(
    count: int, dtype: torch.dtype = torch.float32
) -> tuple[DistributedDataParallel, ddp.VirtualRanks]:
    """Return a linear layer under DDP, and its virtual ranks."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False).to(dtype))
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    return model, ddp.VirtualRanks(model, count)


def test_a_step_is_counted_before_the_optimizer_steps() -> None:
    """So a checkpoint behind ``optimizer.step()`` has it, although the loop has not continued."""
    model, ranks = small(2)
    counted = []
    for at, batch in enumerate(ranks.micro_batches([torch.ones(3)] * 6)):
        model(batch).sum().backward()
        counted.append((ranks.step, ranks.state_dict()["step"], ranks.is_step_end))
        if at == 3:
            break
    assert counted == [(0, 0, False), (1, 1, True), (1, 1, False), (2, 2, True)]


@pytest.mark.parametrize("way", ["raise", "break"])
@pytest.mark.parametrize(
    ("model", "hook"),
    [
        ("gpt", "split"),
        ("mlp", "decoupled"),
        ("cnn", "split"),
    ],
)
def test_an_abandoned_step_begins_again(model: str, hook: str, way: str) -> None:
    job = Job(model, hook=hook, count=4, steps=3)
    undisturbed = Running(job).run()
    expected = undisturbed.hash()
    undisturbed.close()
    running = Running(job).run(1)
    with contextlib.suppress(KeyError):
        for at, (inputs, _) in enumerate(running.ranks.micro_batches(running.loader)):
            running.model(inputs).sum().backward()
            if at == 2 and way == "raise":
                raise KeyError("ours")
            if at == 2:
                break
    assert running.ranks.step == 1
    assert running.run().hash() == expected
    running.close()


def test_an_abandoned_step_leaves_no_gradient_of_a_single_micro_batch() -> None:
    running = Running(Job("mlp", count=2, steps=2))
    for inputs, _ in running.ranks.micro_batches(running.loader):
        running.model(inputs).sum().backward()
        break
    undisturbed = Running(Job("mlp", count=2, steps=2)).run()
    assert running.run().hash() == undisturbed.hash()


def test_memory_of_earlier_gradients_is_free_when_the_optimizer_steps() -> None:
    model, ranks = small(3)
    kept: list[Any] = []
    for batch in ranks.micro_batches([torch.ones(3)] * 3):
        model(batch).sum().backward()
        if not ranks.is_step_end:
            kept.append(weakref.ref(model.module.weight.grad))
            assert kept[-1]() is not None
    assert [reference() for reference in kept] == [None, None]


class Counting(nn.Linear):
    """Counts its forwards in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        self.register_buffer("count", torch.zeros(()))
        self.counts: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.counts.append(float(self.count))
        self.count += 1
        return super().forward(inputs)


def test_all_micro_batches_of_a_step_begin_with_the_same_buffers() -> None:
    module = Counting()
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    for batch in ddp.VirtualRanks(model, 3).micro_batches([torch.ones(3)] * 6):
        model(batch).sum().backward()
    assert module.counts == [0, 0, 0, 1, 1, 1]
    assert float(module.count) == 2


def test_generators_continue_as_before_between_micro_batches() -> None:
    model, ranks = small(2)
    torch.manual_seed(1)
    expected = [float(torch.rand(())) for _ in range(2)]
    torch.manual_seed(1)
    inside = []
    found = []
    for _ in range(2):
        with ranks.micro_batch():
            inside.append(float(torch.rand(())))
            model(torch.ones(3)).sum().backward()
        found.append(float(torch.rand(())))
    assert found == expected
    assert len({*inside, *expected}) == 4


def float16_mean(rank: int, world_size: int) -> Tensor:
    model, ranks = small(8, torch.float16)
    for batch in ranks.micro_batches([torch.full((3,), 2.0**14).half()] * len(ranks.own)):
        model(batch).sum().backward()
    gradient: Tensor = model.module.weight.grad
    return gradient.clone()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sums_of_float16_do_not_overflow(size: int) -> None:
    """The sum of all micro-batches is twice the largest number, and their mean is small."""
    for mean in run_ranks(float16_mean, size):
        assert mean.tolist() == [[2.0**14] * 3]


def test_a_mean_is_divided_once_where_the_count_is_no_power_of_two() -> None:
    model, ranks = small(3)
    for batch in ranks.micro_batches([torch.full((3,), 0.1 * k) for k in (1, 2, 3)]):
        model(batch).sum().backward()
    leaves = [torch.full((1, 3), 0.1 * k) for k in (1, 2, 3)]
    assert torch.equal(model.module.weight.grad, (leaves[0] + leaves[1] + leaves[2]) / 3)


def test_losses_are_in_the_order_of_virtual_ranks_and_are_reported_once() -> None:
    model, ranks = small(2)
    for number in range(4):
        with ranks.micro_batch():
            model(torch.ones(3)).sum().backward()
            ranks.report(torch.tensor(float(number)))
    assert ranks.losses() == [0.0, 1.0, 2.0, 3.0]
    assert ranks.losses() == []


def test_losses_of_an_abandoned_step_are_not_reported() -> None:
    model, ranks = small(2)
    for number in range(3):
        with contextlib.suppress(KeyError), ranks.micro_batch():
            model(torch.ones(3)).sum().backward()
            ranks.report(torch.tensor(float(number)))
            if not number:
                raise KeyError("ours")
    assert ranks.losses() == [1.0, 2.0]


def test_a_loss_may_be_reported_before_or_after_backward() -> None:
    model, ranks = small(2)
    for number in range(4):
        with ranks.micro_batch():
            loss = model(torch.ones(3)).sum()
            if number % 2:
                ranks.report(torch.tensor(float(number)))
            loss.backward()
            if not number % 2:
                ranks.report(torch.tensor(float(number)))
    assert ranks.losses() == [0.0, 1.0, 2.0, 3.0]


def losses_of_two_steps(rank: int, world_size: int) -> list[float]:
    model, ranks = small(4)
    for step in range(2):
        for v in ranks.own:
            with ranks.micro_batch():
                model(torch.ones(3)).sum().backward()
                ranks.report(torch.tensor(10.0 * step + v))
    return ranks.losses()


def test_losses_of_several_steps_are_in_the_order_of_steps() -> None:
    assert run_ranks(losses_of_two_steps, 2) == [[0, 1, 2, 3, 10, 11, 12, 13]] * 2


def test_a_micro_batch_without_a_gradient_is_refused() -> None:
    model, ranks = small(2)
    expected = pytest.raises(ddp.UnsupportedConfigurationError, match="there was no backward")
    with expected, ranks.micro_batch():
        model(torch.ones(3))
    for number in (1.0, 3.0):  # the step begins again
        with ranks.micro_batch():
            model(torch.full((3,), number)).sum().backward()
    assert model.module.weight.grad.tolist() == [[2.0, 2.0, 2.0]]


def test_losses_of_one_micro_batch_keep_their_order() -> None:
    model, ranks = small(1)
    with ranks.micro_batch():
        loss = model(torch.ones(3)).sum()
        loss.backward()
        for reported in (torch.tensor(2.0), -7, torch.tensor(1.0)):
            ranks.report(reported)
    with pytest.raises(ValueError, match=r"got loss of shape \(3,\); report loss.mean"):
        ranks.report(torch.ones(3))
    changed = torch.ones(())
    ranks.report(changed)
    changed.zero_()
    assert ranks.losses() == [2.0, -7.0, 1.0, 1.0]


def test_a_state_is_loaded_between_loops_only() -> None:
    model, ranks = small(1)
    state = ranks.state_dict()
    for batch in ranks.micro_batches([torch.ones(3)]):
        model(batch).sum().backward()
        ranks.report(1.0)
        with pytest.raises(RuntimeError, match=r"expected load_state_dict\(\) before the loop"):
            ranks.load_state_dict(state)
    ranks.load_state_dict(state)
    assert (ranks.step, ranks.losses()) == (0, [])


def test_batches_that_end_within_a_step_leave_nothing_of_it() -> None:
    module = Counting()
    model = DistributedDataParallel(module)
    model.register_comm_hook(None, ddp.reduce_scatter_all_gather_hook)
    ranks = ddp.VirtualRanks(model, 2)
    with pytest.raises(ValueError, match="got 1 for the last one"):
        for number, batch in enumerate(ranks.micro_batches([torch.ones(3)] * 3)):
            model(batch).sum().backward()
            ranks.report(float(number))
    assert ranks.losses() == [0.0, 1.0]
    assert module.count == 1
