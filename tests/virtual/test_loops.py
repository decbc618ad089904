"""Loops that plain DDP trains correctly: one hash on any number of ranks."""

from collections.abc import Callable
from typing import Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness import run_ranks

from . import jobs
from .jobs import SHAPES, Job, Running, mlp


def zero_grad_first(running: Running, inputs: Tensor, targets: Tensor) -> None:
    for optimizer in running.optimizers:
        optimizer.zero_grad()
    running.backward(inputs, targets)


def zero_grad_between(running: Running, inputs: Tensor, targets: Tensor) -> None:
    loss = F.cross_entropy(running.model(inputs), targets)
    for optimizer in running.optimizers:
        optimizer.zero_grad(set_to_none=False)
    loss.backward()
    running.ranks.report(loss)


def teacher_first(running: Running, inputs: Tensor, targets: Tensor) -> None:
    """Evaluate the model itself, which reads BatchNorm's statistics, and learn from that."""
    running.model.eval()
    with torch.no_grad():
        goal = running.model(inputs).softmax(1)
    running.model.train()
    loss = F.cross_entropy(running.model(inputs), goal)
    loss.backward()
    running.ranks.report(loss)


def forward_after(running: Running, inputs: Tensor, targets: Tensor) -> None:
    """Change BatchNorm's statistics when backward has ended."""
    running.backward(inputs, targets)
    with torch.no_grad():
        running.model(inputs + 1)


class Cached(nn.Module):
    """A network with a table that grows with the length of its inputs, like rotary embeddings."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("table", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if len(self.table) < inputs.shape[1]:
            self.register_buffer("table", torch.linspace(1, 2, inputs.shape[1]))
        scaled: Tensor = self.inner(inputs * self.table)
        return scaled


Body = Callable[[Running, Tensor, Tensor], None]
BODIES: Final[dict[str, tuple[Body, Job]]] = {
    "zero_grad first": (zero_grad_first, Job("mlp")),
    "zero_grad first, decoupled": (zero_grad_first, Job("mlp", hook="decoupled")),
    "zero_grad first, owners": (zero_grad_first, Job("mlp", hook="owners")),
    "zero_grad between": (zero_grad_between, Job("mlp")),
    "teacher first": (teacher_first, Job("cnn")),
    "forward after": (forward_after, Job("cnn")),
}


def hash_of_loop(rank: int, world_size: int, name: str) -> str:
    torch.set_num_threads(1)
    body, job = BODIES[name]
    running = Running(job)
    while running.ranks.step < 4:
        for inputs, targets in running.ranks.micro_batches(running.loader):
            body(running, inputs, targets)
            if running.ranks.is_step_end:
                running.step()
                if running.ranks.step == 4:
                    break
    found = running.hash()
    running.close()
    return found


@pytest.mark.parametrize("name", BODIES)
def test_loops_have_one_hash(name: str) -> None:
    found = {size: {*run_ranks(hash_of_loop, size, args=(name,))} for size in (1, 2, 4)}
    assert len(set.union(*found.values())) == 1, found


def hash_with_cache(rank: int, world_size: int) -> str:
    torch.set_num_threads(1)
    with mock.patch.dict(jobs.MODELS, cached=Cached), mock.patch.dict(SHAPES, cached=SHAPES["mlp"]):
        running = Running(Job("cached", steps=3)).run()
    found = running.hash()
    running.close()
    return found


def test_a_buffer_that_forward_replaces_has_one_hash() -> None:
    found = [run_ranks(hash_with_cache, size)[0] for size in (1, 4)]
    assert found[0] == found[1]


def hash_after_exception(rank: int, world_size: int, job: Job) -> str:
    """Raise between forward and backward of the last micro-batch of a step, and continue."""
    torch.set_num_threads(1)
    running = Running(job).run(1)
    with pytest.raises(KeyError):
        for inputs, _ in running.ranks.micro_batches(running.loader):
            outputs = running.model(inputs)
            if running.ranks.is_step_end:
                raise KeyError("ours")
            outputs.sum().backward()
    found = running.run(3).hash()
    running.close()
    return found


def hash_without_exception(rank: int, world_size: int, job: Job) -> str:
    torch.set_num_threads(1)
    running = Running(job).run(3)
    found = running.hash()
    running.close()
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_that_raised_between_forward_and_backward_begins_again(size: int) -> None:
    job = Job("cnn", count=4)
    expected = run_ranks(hash_without_exception, 1, args=(job,))[0]
    assert {*run_ranks(hash_after_exception, size, args=(job,))} == {expected}
