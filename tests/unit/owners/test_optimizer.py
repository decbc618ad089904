"""A step in several parts equals the whole step, and optimizers where it would not are refused."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import timm.optim
import torch
from torch import nn
from torch.optim import Optimizer

from crossover_ddp._owners.optimizer import PartialOptimizer, Update, check_separable
from crossover_ddp.errors import UnsupportedConfigurationError

pytestmark = pytest.mark.torch_version

Make = Callable[[Iterable[Any]], Optimizer]


def torch_optimizer(name: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **options)


TORCH: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    **{
        name: torch_optimizer(name)
        for name in ("Adam", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Adafactor")
    },
    **{
        f"{name} fused": torch_optimizer(name, fused=True)
        for name in ("SGD", "Adam", "AdamW", "Adagrad")
    },
}
TIMM = ("lion", "lars", "adan", "adamp", "sgdp", "nadamw", "rmsproptf", "adopt", "novograd")


def timm_optimizer(name: str) -> Make:
    return lambda parameters: timm.optim.create_optimizer_v2(list(parameters), opt=name, lr=0.01)


OPTIMIZERS = TORCH | {f"timm {name}": timm_optimizer(name) for name in TIMM}


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((3, 4), (4,), (5, 2), (2, 2))
    ]


def gradients_of(step: int) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in parameters_of(100 + step)]


def trained(
    make: Make, parts: Sequence[Sequence[int]] | None = None
) -> tuple[list[nn.Parameter], Optimizer]:
    """Take three steps: whole ones, or each in ``parts``, lists of parameters by number."""
    parameters = parameters_of()
    optimizer = make(parameters)
    partial = PartialOptimizer(optimizer)
    for step in range(3):
        gradients = gradients_of(step)
        if parts is None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        else:
            plan = partial.plan()
            for part in parts:
                partial.apply(plan, [Update(parameters[i], gradients[i]) for i in part])
    return parameters, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_accepted_left_as_it_was_and_its_steps_in_parts_are_the_steps(
    name: str,
) -> None:
    tried = OPTIMIZERS[name](parameters_of())
    before, random = copy.deepcopy(tried.state_dict()), torch.random.get_rng_state()
    check_separable(tried)
    assert str(tried.state_dict()) == str(before)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p.grad is None for group in tried.param_groups for p in group["params"])
    expected, plain = trained(OPTIMIZERS[name])
    got, partial = trained(OPTIMIZERS[name], ((2, 3), (0,), (1,)))
    assert all(map(torch.equal, got, expected))
    assert all(parameter.grad is None for parameter in got)
    (states, groups), (wanted, of_plain) = (each.state_dict().values() for each in (partial, plain))
    torch.testing.assert_close(states, wanted, rtol=0, atol=0)
    assert str(groups) == str(of_plain)


class SumsPerGroup(torch.optim.SGD):
    """Stores in its group a sum over all parameters, without using it."""

    def step(self, closure: Any = None) -> Any:
        for group in [each for each in self.param_groups if each.get("sums", True)]:
            group["total"] = sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)
        return super().step(closure)


class Wrapper(Optimizer):
    """Forwards to another optimizer, as Accelerate's does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.state = inner, inner.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups


class Noisy(torch.optim.SGD):
    """Draws noise for each parameter, as SGLD does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None:
                parameter.add_(torch.randn_like(parameter))
        return super().step(closure)


REFUSED: dict[str, tuple[Make, str]] = {
    "a line search": (lambda p: torch.optim.LBFGS(p), "needs no closure"),
    "sparse gradients": (lambda p: torch.optim.SparseAdam(list(p)), "use another optimizer"),
    "a global norm": (timm_optimizer("lamb"), "depends on the others"),
    "a global norm and small steps": (
        lambda p: timm.optim.Lamb(list(p), lr=1e-5),
        "depends on the others",
    ),
    "a value of the whole group": (lambda p: SumsPerGroup(p, lr=0.1), "param_groups"),
    "a wrapper": (lambda p: Wrapper(TORCH["sgd"](p)), "pass the optimizer that it wraps"),
    "random numbers": (lambda p: Noisy(p, lr=0.1), "randomness"),
    "random decisions": (timm_optimizer("kron"), "randomness"),
}


@pytest.mark.defect("decoupled-8", "decoupled-17", "strangers-31")
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_mixes_parameters_or_draws_for_each_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    optimizer = make(parameters_of())
    refused = pytest.raises(UnsupportedConfigurationError, match=message)
    with refused, torch.compiler.set_stance("force_eager"):
        check_separable(optimizer)
    assert not optimizer.state
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_every_group_is_tried() -> None:
    """Groups may differ in the way they are updated."""
    groups = [{"params": parameters_of(), "sums": number == 3} for number in range(5)]
    with pytest.raises(UnsupportedConfigurationError, match=r"param_groups\[3\]\['total'\]"):
        check_separable(SumsPerGroup(groups, lr=0.1))


def test_an_object_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got optimizer=list"):
        check_separable([])  # type: ignore[arg-type]


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if any(group["params"] for group in self.param_groups):
            raise ArithmeticError("no")


def test_a_failing_step_leaves_groups_and_gradients_as_they_were() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Failing([parameter], lr=1.0)
    groups, partial = optimizer.param_groups, PartialOptimizer(optimizer)
    with pytest.raises(ArithmeticError):
        partial.apply(partial.plan(), [Update(parameter, torch.ones(1))])
    assert optimizer.param_groups is groups
    assert parameter.grad is None
