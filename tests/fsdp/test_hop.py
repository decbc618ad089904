"""When the hop sends gradients and waits for them, compared with FSDP2's own hybrid sharding."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import crossover_ddp as ddp
from crossover_ddp.fsdp import register_comm_hook
from tests.fsdp import small
from tests.fsdp.small import Training
from tests.harness import in_ranks

STEPS = 3


class NotingFuture(torch.futures.Future[Any]):
    """Has the result of another Future, and notes when it is waited for."""

    def __init__(self, future: torch.futures.Future[Any], note: Callable[[], None]) -> None:
        super().__init__()
        self._future = future
        self._note = note

    def wait(self) -> Any:
        self._note()
        return self._future.wait()


def noting(order: list[tuple[str, int]]) -> Any:
    """Return a function that makes a hook, which notes each bucket and each wait for one."""

    def make(group: dist.ProcessGroup) -> tuple[Any, Any]:
        @functools.wraps(ddp.reduce_scatter_all_gather_hook)  # other hooks block
        def hook(group: dist.ProcessGroup, bucket: Any) -> Any:
            index = bucket.index()
            order.append(("sent", index))
            future = ddp.reduce_scatter_all_gather_hook(group, bucket)
            return NotingFuture(future, lambda: order.append(("waited", index)))

        return group, hook

    return make


@in_ranks(4)
def test_backward_waits_for_the_groups_at_its_end_and_the_last_bucket_closes_the_step(
    rank: int,
) -> None:
    order: list[tuple[str, int]] = []
    mesh = small.mesh_of()
    training = Training(small.model_on(mesh, noting(order))).run(*range(STEPS))
    sent = [("sent", number) for number in (3, 2, 1, 0, 4)]
    waited = [("waited", number) for number in (3, 2, 1, 0, 4)]
    # The outermost module's own group may come last or first.
    for step in range(STEPS):
        found = order[10 * step : 10 * step + 10]
        assert sorted(found[:5]) == sorted(sent)
        assert found[4] == ("sent", 4)
        assert sorted(found[5:]) == sorted(waited)
        assert found[9] == ("waited", 4)
    assert training.found() == Training(small.model_on(mesh)).run(*range(STEPS)).found()


@in_ranks(4)
def test_a_step_without_averaging_sends_nothing_and_its_gradients_are_averaged_later(
    rank: int,
) -> None:
    order: list[tuple[str, int]] = []
    mesh = small.mesh_of()
    found = []
    for make in (None, noting(order)):
        training = Training(small.model_on(mesh, make))
        for step in range(STEPS):
            training.model.set_requires_all_reduce(False)
            for part in (1, 2):
                small.loss_of(training.model, 10 * part + step).backward()
            assert len(order) == (10 * step if make is not None else 0)
            training.model.set_requires_all_reduce(True)
            training.step(step)
        found.append(training.found())
    assert found[0] == found[1]


@in_ranks(4)
def test_an_optimizer_inside_of_backward_gets_the_average(rank: int) -> None:
    mesh = small.mesh_of()
    found = []
    for make in (None, small.split):
        model = small.model_on(mesh, make)
        for parameter in model.parameters():
            sgd = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(
                lambda _, sgd=sgd: (sgd.step(), sgd.zero_grad())
            )
        for step in range(STEPS):
            small.loss_of(model, step).backward()
        assert small.same_on_all_nodes(model, mesh)
        found.append(small.whole(model))
    assert found[0] == found[1]


# Whether FSDP2 must sum, and its divisor. An average inside the node is one by two.
DIVISORS = [(True, 3.0), (False, 2.0), (True, None)]


@pytest.mark.parametrize(("sums", "divisor"), DIVISORS)
@in_ranks(4)
def test_a_users_divisor_has_the_effect_that_it_has_in_native_sharding(
    rank: int, sums: bool, divisor: float | None
) -> None:
    mesh = small.mesh_of()
    found = []
    for make in (None, small.split):
        model = small.model_on(mesh, make)
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(sums)
            if divisor is not None:
                module.set_gradient_divide_factor(divisor)
        small.loss_of(model, 0).backward()
        found.append([each.grad.full_tensor().flatten().tolist() for each in model.parameters()])
    assert found[0] == found[1]


class Reused(small.Network):
    """Its second block is used twice, and recomputed in a nested backward pass each time."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.blocks[0](values)
        for number in (1, 2, 1):
            values = checkpoint(self.blocks[number], values, use_reentrant=True)  # type: ignore[assignment]
        last: torch.Tensor = self.head(values)
        return last


@pytest.mark.parametrize("make", [small.split, small.int8])
@in_ranks(4)
def test_the_gradients_of_a_module_that_is_used_twice_travel_together(rank: int, make: Any) -> None:
    mesh = small.mesh_of()
    order: list[tuple[str, int]] = []

    def trained(make: Any) -> Training:
        torch.manual_seed(0)
        model = small.sharded(Reused(), mesh if make is None else mesh["inside"])
        if make is not None:
            register_comm_hook(model, *make(mesh["between"].get_group()))
        return Training(model).run(*range(STEPS))

    assert trained(noting(order)).found() == trained(None).found()
    of_block = [what for what, number in order if number == 2]
    assert of_block == ["sent", "waited"] * STEPS
    assert small.same_on_all_nodes(trained(make).model, mesh)


@in_ranks(4)
def test_a_forward_uses_averages_although_parameters_were_gathered_before(rank: int) -> None:
    """Before forward, unshard(async_op=True) begins to gather the former parameters."""
    mesh = small.mesh_of()
    found = []
    for gathers in (False, True):
        training = Training(small.model_on(mesh, functools.partial(small.local_sgd, sync_every=2)))
        for step in range(2 * STEPS):
            if gathers:
                training.model.unshard(async_op=True)
                for block in training.model.blocks:
                    block.unshard(async_op=True)
            training.step(step)
        found.append(training.losses)
    assert found[0] == found[1]


@in_ranks(4)
def test_evaluation_between_steps_changes_nothing_with_averaged_parameters(rank: int) -> None:
    """It leaves the outermost module gathered, and then the shards are averaged."""
    mesh = small.mesh_of()
    found = []
    for evaluates in (False, True):
        model = small.model_on(mesh, functools.partial(small.local_sgd, sync_every=2))
        training = Training(model)
        for step in range(2 * STEPS):
            training.step(step)
            if evaluates:
                model.eval()
                with torch.no_grad():
                    small.loss_of(model, 100 + step)
                model.train()
        found.append(training.losses)
    assert found[0] == found[1]
