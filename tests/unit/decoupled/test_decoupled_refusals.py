"""What decoupled training cannot do is refused, and leaves nothing half done."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import DecoupledState, UnsupportedConfigurationError, decoupled_hook
from crossover_ddp.codecs import Int8
from tests.unit.decoupled.decoupled_training import Training, assert_same, inputs, network, sgd

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


def test_gradients_that_are_no_views_are_refused_where_they_cannot_be_made_views() -> None:
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    model.register_comm_hook(DecoupledState(sgd(model)), decoupled_hook)
    with pytest.raises(UnsupportedConfigurationError, match=r"gradient_as_bucket_view=False and find_unused"):
        model(inputs(0)).sum().backward()


def test_parameters_without_an_optimizer_are_refused_by_name() -> None:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(list(model.parameters())[:4], lr=0.1)
    model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    with pytest.raises(UnsupportedConfigurationError, match=r"got 2 that are not in it \(4.*parameter group"):
        model(inputs(0)).sum().backward()


def test_a_second_model_is_refused() -> None:
    models = [DistributedDataParallel(network(), gradient_as_bucket_view=True) for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    state = DecoupledState(optimizer)
    for model in models:
        model.register_comm_hook(state, decoupled_hook)
    models[0](inputs(0)).sum().backward()
    with pytest.raises(UnsupportedConfigurationError, match="one model for each DecoupledState"):
        models[1](inputs(0)).sum().backward()


def test_strangers_in_the_optimizer_are_refused_when_they_have_gradients() -> None:
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    stranger = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
    model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    (model(inputs(0)).sum() + stranger.sum()).backward()
    with pytest.raises(UnsupportedConfigurationError, match="gradients of 1 other parameters"):
        optimizer.step()


def test_sparse_gradients_are_refused() -> None:
    model = DistributedDataParallel(nn.Embedding(4, 3, sparse=True), gradient_as_bucket_view=True)
    model.register_comm_hook(DecoupledState(sgd(model)), decoupled_hook)
    with pytest.raises(UnsupportedConfigurationError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


def by_hand(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad


INSTEAD: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "another optimizer": lambda held: torch.optim.Adam(held, lr=0.01).step(),
    "a fused one": lambda held: torch.optim.SGD(held, lr=0.1, fused=True).step(),
    "by hand": by_hand,
}
NEXT: dict[str, Callable[[Training], object]] = {
    "forward": lambda training: training.backward(),
    "a look": lambda training: list(training.model.parameters()),
    "evaluation": lambda training: training.model.module(inputs(0)),
}


@pytest.mark.parametrize("next_", NEXT)
@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_step_of_somebody_else_is_refused_unless_gradients_are_whole(
    steps: int, instead: str, next_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instead == "a fused one" and steps > 4:
        monkeypatch.setenv("CROSSOVER_CHECK", "1")  # torch's fused kernels count no version
    training, plain = Training(decoupled=True).run(steps), Training(decoupled=False).run(steps)
    assert training.state is not None
    for each in (training, plain):
        each.backward()
        training.state.flush()
        INSTEAD[instead](each.held)
    assert_same(training, plain)
    training.backward()
    INSTEAD[instead](training.held)
    with pytest.raises(UnsupportedConfigurationError, match=r"another optimizer.*call state\.flush\(\)"):
        NEXT[next_](training)
    training.step()  # nothing is left half done
    training.state.close()


def test_parameters_may_be_written_before_the_own_step() -> None:
    training, plain = Training(decoupled=True), Training(decoupled=False)
    for each in (training, plain):
        for _ in range(6):
            each.backward()
            with torch.no_grad():
                for parameter in each.held:
                    parameter.mul_(0.9)
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert training.is_pending
    assert_same(training, plain)


def test_parameters_may_be_read_and_steps_left_out() -> None:
    training, plain = Training(decoupled=True), Training(decoupled=False)
    for each in (training, plain):
        for step in range(9):
            each.backward()
            if step % 3 != 1:
                each.optimizer.step()
            each.optimizer.zero_grad()
    assert_same(training, plain)


def test_a_codec_does_not_round_the_parameters_that_owners_send(process_group: dist.ProcessGroup) -> None:
    with pytest.raises(
        UnsupportedConfigurationError, match=r"codec=None with owners='layers'.*use one of both"
    ):
        DecoupledState(sgd(network()), owners="layers", codec=Int8())
