"""The second moment of a local Adam against an independent computation, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp._averaging.second_moment import SecondMoment

RANKS, STEPS = 4, 40
FORMS: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}, {"fused": True}]


def gradients_of(step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a common signal plus noise; zeros beside large values, as of an embedding."""
    generator = torch.Generator().manual_seed(step)
    signal = torch.linspace(-1, 1, 90, dtype=dtype)
    noise = torch.randn(90, generator=generator, dtype=dtype)
    used = torch.rand(90, generator=generator) < 0.5
    return [(signal + 2 * noise)[:30], ((signal + noise) * used)[30:]]


def optimizer_of(
    make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype, **options: Any
) -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in (30, 60)]
    return make(parameters, lr=1e-2, **options), parameters


class Expected:
    """The rule of [Note: second moment], in float64 and without an optimizer."""

    def __init__(self, numels: list[int], weight_decay: float, beta2: float = 0.99) -> None:
        self.moments = [torch.zeros(n, dtype=torch.float64) for n in numels]
        self.firsts = [torch.zeros(n, dtype=torch.float64) for n in numels]
        self.sums: tuple[float, float] | None = None
        self.weight_decay, self.beta2 = weight_decay, beta2
        self.ratio = 1 / RANKS
        self.step = 0

    def take(self, gradients: list[Tensor], parameters: list[Tensor]) -> None:
        wide = [
            g.double() + self.weight_decay * p.detach().double()
            for g, p in zip(gradients, parameters, strict=True)
        ]
        if self.step:
            unbiased = 1 - 0.9**self.step
            dot = sum(float(g @ m) / unbiased for g, m in zip(wide, self.firsts, strict=True))
            square = sum(float(g @ g) for g in wide)
            if self.sums is not None:
                dot = 0.98 * self.sums[0] + 0.02 * dot
                square = 0.98 * self.sums[1] + 0.02 * square
            self.sums = dot, square
            share = min(1.0, max(0.0, dot / square))
            self.ratio = 1 / RANKS + (1 - 1 / RANKS) * share
        self.step += 1
        for gradient, first, moment in zip(wide, self.firsts, self.moments, strict=True):
            first.lerp_(gradient, 0.1)
            moment.mul_(self.beta2).add_((1 - self.beta2) * self.ratio * gradient.square())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", ["adamw", "adam with weight decay", "maximize"])
def test_second_moments_equal_an_independent_computation(
    form: dict[str, Any], dtype: torch.dtype, tolerance: float, kind: str
) -> None:
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    maximize = kind == "maximize"
    decay = 0.1 if kind == "adam with weight decay" else 0.0
    options = {"weight_decay": 0.1 if kind == "adamw" else decay, "maximize": maximize}
    optimizer, parameters = optimizer_of(make, dtype, betas=(0.9, 0.99), **options, **form)
    SecondMoment([optimizer], lambda: RANKS)
    expected = Expected([30, 60], decay)
    for step in range(STEPS):
        gradients = gradients_of(step, dtype)
        expected.take(gradients, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = -gradient if maximize else gradient.clone()
        optimizer.step()
        for parameter, moment in zip(parameters, expected.moments, strict=True):
            found = optimizer.state[parameter]["exp_avg_sq"]
            assert found.min() >= 0
            torch.testing.assert_close(found.double(), moment, rtol=tolerance, atol=0)
    assert 0.3 < expected.ratio < 0.9, "both the noise and the signal count"


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_without_noise_or_with_one_rank_an_optimizer_steps_as_without_the_rule(ranks: int) -> None:
    """The first update does not depend on the second moment's scale, which then lags a little."""
    trained = []
    for corrects in (False, True):
        optimizer, parameters = optimizer_of(torch.optim.AdamW, torch.float64, betas=(0.9, 0.9))
        if corrects:
            SecondMoment([optimizer], lambda: ranks)
        for _ in range(100):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        trained.append([optimizer.state[each]["exp_avg_sq"] for each in parameters])
    for plain, corrected in zip(*trained, strict=True):
        torch.testing.assert_close(corrected, plain, rtol=1e-12 if ranks == 1 else 1e-3, atol=0)


def test_a_step_that_a_scaler_skips_changes_nothing() -> None:
    optimizer, parameters = optimizer_of(torch.optim.AdamW, torch.float32, fused=True)
    plain, others = optimizer_of(torch.optim.AdamW, torch.float32, fused=True)
    rules = [SecondMoment([each], lambda: RANKS) for each in (optimizer, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        gradients = gradients_of(step, torch.float32)
        scaler.scale(torch.ones(()))  # makes the scale
        for parameter, other, gradient in zip(parameters, others, gradients, strict=True):
            parameter.grad = gradient * scaler.get_scale()
            other.grad = gradient.clone()
            if step == 3:
                parameter.grad[0] = torch.inf
        before = [optimizer.state[each]["exp_avg_sq"].clone() for each in parameters if step]
        sums = rules[0].state
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            found = [optimizer.state[each]["exp_avg_sq"] for each in parameters]
            assert all(map(torch.equal, found, before))
            assert rules[0].state == sums
        else:
            plain.step()
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-6)


def test_a_parameter_group_that_is_added_later_is_corrected_too() -> None:
    optimizer, parameters = optimizer_of(torch.optim.AdamW, torch.float64)
    SecondMoment([optimizer], lambda: RANKS)
    late = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [late]})
            late.grad = torch.full_like(late, 2.0)
        for parameter, gradient in zip(parameters, gradients_of(step, torch.float64), strict=True):
            parameter.grad = gradient
        optimizer.step()
        if step == 1:
            moment = optimizer.state[late]["exp_avg_sq"]
            torch.testing.assert_close(moment, torch.full_like(moment, 0.001 * 4 / RANKS))


def test_optimizers_without_a_second_moment_keep_their_bits() -> None:
    trained = []
    for corrects in (False, True):
        optimizer, parameters = optimizer_of(torch.optim.SGD, torch.float32, momentum=0.9)
        if corrects:
            SecondMoment([optimizer], lambda: RANKS)
        for step in range(5):
            gradients = gradients_of(step, torch.float32)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        trained.append(torch.cat([each.detach() for each in parameters]))
    assert torch.equal(*trained)


def test_moments_with_rules_of_their_own_are_refused() -> None:
    optimizer, _ = optimizer_of(torch.optim.AdamW, torch.float32, amsgrad=True)
    with pytest.raises(UnsupportedConfigurationError, match="amsgrad"):
        SecondMoment([optimizer], lambda: RANKS)
    optimizer, parameters = optimizer_of(torch.optim.NAdam, torch.float32)
    SecondMoment([optimizer], lambda: RANKS)
    with pytest.raises(UnsupportedConfigurationError, match="got NAdam"):
        for step in range(2):
            gradients = gradients_of(step, torch.float32)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()


@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_closure_computes_the_gradients_before_the_moments_are_corrected(
    by_keyword: bool,
) -> None:
    """The gradients of the step before are a thousand times larger."""
    trained = []
    for has_closure in (False, True):
        optimizer, parameters = optimizer_of(torch.optim.AdamW, torch.float32)
        SecondMoment([optimizer], lambda: RANKS)
        calls = 0

        def closure(step: int, parameters: list[torch.nn.Parameter] = parameters) -> Tensor:
            nonlocal calls
            calls += 1
            assert torch.is_grad_enabled()
            for parameter, gradient in zip(
                parameters, gradients_of(step, torch.float32), strict=True
            ):
                parameter.grad = gradient * 1000.0 ** (1 - step % 2)
            return torch.tensor(float(step))

        for step in range(6):
            if not has_closure:
                closure(step)
                optimizer.step()
            elif by_keyword:
                assert optimizer.step(closure=lambda step=step: closure(step)) == step
            else:
                assert optimizer.step(lambda step=step: closure(step)) == step
        assert calls == 6
        trained.append(torch.cat([each.detach() for each in parameters]))
    assert trained[0].isfinite().all()
    assert torch.equal(*trained)


def test_a_first_step_that_a_scaler_skips_is_not_the_first_update() -> None:
    optimizer, (parameter, _) = optimizer_of(torch.optim.AdamW, torch.float32, fused=True)
    SecondMoment([optimizer], lambda: RANKS)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # makes the scale
    for value in (torch.inf, 8.0):
        parameter.grad = torch.full_like(parameter, value)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    moment = optimizer.state[parameter]["exp_avg_sq"]
    expected = 0.001 * (8.0 / scale) ** 2 / RANKS
    torch.testing.assert_close(moment, torch.full_like(moment, expected))


def test_the_parts_of_a_complex_parameter_are_corrected_each() -> None:
    moments = []
    for is_complex in (True, False):
        whole = torch.ones(6, dtype=torch.complex64) if is_complex else torch.ones(6, 2)
        parameter = torch.nn.Parameter(whole)
        optimizer = torch.optim.AdamW([parameter], foreach=False)
        SecondMoment([optimizer], lambda: RANKS)
        for step in range(3):
            gradient = gradients_of(step, torch.float32)[0][:12].view(6, 2)
            parameter.grad = torch.view_as_complex(gradient) if is_complex else gradient
            optimizer.step()
        moment = optimizer.state[parameter]["exp_avg_sq"]
        moments.append(torch.view_as_real(moment) if is_complex else moment)
    torch.testing.assert_close(*moments)


def test_an_optimizer_is_corrected_once_at_a_time() -> None:
    """Twice the correction makes the second moment negative."""
    optimizer, _ = optimizer_of(torch.optim.AdamW, torch.float32)
    first = SecondMoment([optimizer], lambda: RANKS)
    with pytest.raises(UnsupportedConfigurationError, match="AdamW a second time"):
        SecondMoment([optimizer], lambda: RANKS)
    first.hooks.close()
    SecondMoment([optimizer, optimizer], lambda: RANKS).hooks.close()
    # A refused list leaves nothing behind on its other optimizers.
    refused, _ = optimizer_of(torch.optim.AdamW, torch.float32, amsgrad=True)
    with pytest.raises(UnsupportedConfigurationError, match="amsgrad=False"):
        SecondMoment([optimizer, refused], lambda: RANKS)
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(UnsupportedConfigurationError, match=r"expected betas\[1\] > 0"):
        SecondMoment(
            [optimizer_of(torch.optim.Adam, torch.float32, betas=(0.9, 0.0))[0]], lambda: RANKS
        )


def test_each_optimizer_has_its_own_share_of_signal() -> None:
    """As if each of them were corrected by a state of its own."""

    def train(together: bool) -> list[Tensor]:
        pairs = [optimizer_of(torch.optim.AdamW, torch.float64) for _ in range(2)]
        optimizers = [optimizer for optimizer, _ in pairs]
        groups = [optimizers] if together else [[each] for each in optimizers]
        moments = [SecondMoment(group, lambda: RANKS) for group in groups]
        for step in range(STEPS):
            for noise, (optimizer, parameters) in enumerate(pairs):
                gradients = gradients_of(step, torch.float64)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient + noise * gradient.flip(0) * (-1) ** step
                optimizer.step()
        for each in moments:
            each.hooks.close()
        return [parameter.detach() for _, parameters in pairs for parameter in parameters]

    for one, other in zip(train(True), train(False), strict=True):
        assert torch.equal(one, other)
