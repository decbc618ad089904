"""``p.grad`` between backward() and the update, in a job of one rank; see `lazy_gradients`."""

import copy
import functools
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp._decoupled.lazy_gradients import LazyGradient, sum_of_squares
from crossover_ddp._system import torch_private
from tests.unit.decoupled.decoupled_training import Training, assert_same, both, owned

pytestmark = pytest.mark.usefixtures("process_group")
SETTLED = 4  # from this step on steps are deferred and their sums travel now and then


def deferred_pair(**options: Any) -> tuple[Training, Training]:
    """Return a decoupled training with deferred steps, and plain DDP's, before the same step."""
    ours, plain = both(**options)
    for each in (ours, plain):
        # Norms are asked for in each step, so the sums travel in each.
        for _ in range(SETTLED):
            each.backward()
            clip_grad_norm_(each.held, 1e9)
            each.optimizer.step()
            each.drop()
        each.backward()
    return ours, plain


def gradients_of(training: Training) -> list[Any]:
    return [parameter.grad for parameter in training.held]


def is_lazy(training: Training) -> bool:
    """Return whether no code has completed the gradients."""
    return bool(training.state._pending.awaiting_step)


# --- questions that need no values ---------------------------------------------------------------


def test_a_gradient_has_the_plain_ones_shape_and_type_and_no_memory() -> None:
    ours, plain = deferred_pair()
    for found, expected in zip(gradients_of(ours), gradients_of(plain), strict=True):
        assert isinstance(found, LazyGradient)
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        assert found.dtype == expected.dtype
        assert found.device == expected.device
        assert found.nbytes == expected.nbytes
        assert not found.requires_grad
    assert is_lazy(ours)


@pytest.mark.torch_version
@pytest.mark.parametrize("foreach", [True, False])
def test_norms_are_plain_ddps_and_complete_nothing(foreach: bool) -> None:
    ours, plain = deferred_pair()
    norms = [get_total_norm(gradients_of(each), foreach=foreach) for each in (ours, plain)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    norms = [torch.stack([g.norm() for g in gradients_of(each)]) for each in (ours, plain)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    assert is_lazy(ours)


@pytest.mark.torch_version
@pytest.mark.parametrize("net", ["bfloat16", "complex", "double"])
def test_norms_of_other_types(net: str) -> None:
    kinds = {"bfloat16": torch.bfloat16, "complex": torch.complex64, "double": torch.float64}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Parameter(torch.randn(6, 6, dtype=kinds[net]))
            self.second = nn.Parameter(torch.randn(6, 5, dtype=kinds[net]).mT.contiguous().mT)

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(self.first.dtype) @ self.first @ self.second).abs().float()

    ours, plain = deferred_pair(net=Net)
    for p, q in zip(gradients_of(ours), gradients_of(plain), strict=True):
        tolerance = 1e-2 if net == "bfloat16" else 1e-6
        torch.testing.assert_close(p.norm(), q.norm(), rtol=tolerance, atol=0)
    assert is_lazy(ours)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e30])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 70001])
def test_sums_of_squares_of_large_values_do_not_overflow(numel: int, scale: float) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    expected = values.double().square().sum()
    torch.testing.assert_close(sum_of_squares(values), expected, rtol=1e-6, atol=1e-60)


def test_sums_of_squares_do_not_depend_on_the_number_of_threads() -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(float(sum_of_squares(values)))
    torch.set_num_threads(before)
    assert len({*found}) == 1


# --- GradScaler ----------------------------------------------------------------------------------


@pytest.mark.torch_version
@pytest.mark.parametrize("clips", [None, 1e9, 0.01])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_the_same_steps_and_steps_stay_deferred(
    clips: float | None, fused: bool
) -> None:
    runs = both(make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))
    scales: list[list[float]] = [[], []]
    for training, scale in zip(runs, scales, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step in range(16):
            overflowing = training.held[-1].register_hook(
                functools.partial(torch.mul, math.inf if step in (8, 11) else 1.0)
            )
            scaler.scale(training.loss(step)).backward()
            overflowing.remove()
            if clips is not None:
                scaler.unscale_(training.optimizer)
                clip_grad_norm_(training.model.parameters(), clips)
            scaler.step(training.optimizer)
            scaler.update()
            training.drop()
            scale.append(scaler.get_scale())
    assert scales[0] == scales[1]
    # 14 steps are taken, of which the first two or three are not deferred.
    assert runs[0].state.stats()["steps_deferred"] >= 11
    if clips == 0.01:
        torch.testing.assert_close(runs[0].weights(), runs[1].weights(), rtol=1e-6, atol=1e-7)
    else:
        assert_same(*runs)


# --- operations that are recorded ----------------------------------------------------------------

HALF = torch.tensor(0.5)
RECORDED: dict[str, Callable[[list[Any]], object]] = {
    "mul_": lambda gradients: [g.mul_(0.3) for g in gradients],
    "mul_ by a tensor": lambda gradients: [g.mul_(HALF) for g in gradients],
    "div_": lambda gradients: [g.div_(3) for g in gradients],
    "several": lambda gradients: [g.mul_(0.7).div_(0.9).clamp_(-0.01, 0.01) for g in gradients],
    "one": lambda gradients: gradients[1].mul_(0.1),
    "foreach": lambda gradients: torch._foreach_mul_(gradients, 0.1),
    "foreach by a tensor": lambda gradients: torch._foreach_div_(gradients, HALF),
    "by value": lambda gradients: [g.clamp_(min=-1e-3, max=1e-3) for g in gradients],
}


@pytest.mark.torch_version
@pytest.mark.parametrize("name", [*RECORDED, "clip_grad_value_"])
def test_multiplications_are_applied_with_the_update(name: str) -> None:
    runs = deferred_pair(make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))
    for training in runs:
        if name == "clip_grad_value_":
            clip_grad_value_(training.held, 1e-3)
        else:
            RECORDED[name](gradients_of(training))
    assert is_lazy(runs[0])
    for training in runs:
        training.optimizer.step()
    assert_same(*runs)


def test_norms_after_a_multiplication_are_those_of_the_product() -> None:
    runs = deferred_pair()
    for training in runs:
        torch._foreach_mul_(gradients_of(training), -0.5)
    norms = [get_total_norm(gradients_of(each)) for each in runs]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    assert is_lazy(runs[0])


def test_a_factor_is_written_afterwards() -> None:
    runs = deferred_pair()
    for training in runs:
        factor = torch.tensor(0.25)
        for gradient in gradients_of(training):
            gradient.mul_(factor)
        factor.zero_()
        training.optimizer.step()
    assert_same(*runs)


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_gradients_that_are_read_between_multiplications(when: str) -> None:
    runs = deferred_pair()
    read = []
    for training in runs:
        gradients = gradients_of(training)
        seen = []
        for moment in ("before", "between", "after"):
            if moment == when:
                seen = [gradient.clone() for gradient in gradients]
            if moment != "after":
                for gradient in gradients:
                    gradient.mul_(0.3)
        read.append(seen)
        training.optimizer.step()
    assert all(map(torch.equal, *read))
    assert_same(*runs)


# --- everything else -----------------------------------------------------------------------------

READ: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda g: g * 2 + 1,
    "an element": lambda g: float(g[0]) if g.dim() == 1 else float(g[0, 0]),
    "numpy": lambda g: g.numpy().tolist(),
    "list": lambda g: g.tolist(),
    "copy": lambda g: copy.deepcopy(g).tolist(),
    "clone": lambda g: g.clone().tolist(),
    "data": lambda g: g.data.abs().sum().item(),
    "detach": lambda g: g.detach().sum().item(),
    "view": lambda g: g.view(-1).tolist(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)).tolist(),
    "print": str,
    "format": lambda g: f"{g.flatten()[0]:.3f}",
    "memory": lambda g: g.storage_offset() >= 0 and g.data_ptr() > 0,
    "another norm": lambda g: float(g.norm(1)),
    "rows": lambda g: g.norm(dim=0).tolist(),
    "equal": lambda g: bool((g == g).all()),
    "finite": lambda g: bool(g.isfinite().all()),
    "histogram": lambda g: torch.histc(g, bins=4).tolist(),
    "out": lambda g: torch.add(g, 1, out=torch.empty(g.shape)).tolist(),
    "cat": lambda g: torch.cat([g.flatten(), g.flatten()]).tolist(),
    "to": lambda g: g.to(torch.float64).tolist(),
    "cpu": lambda g: g.cpu().tolist(),
}


def saved(gradient: Any) -> Any:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file, weights_only=True).tolist()


READ["save"] = saved


@pytest.mark.torch_version
@pytest.mark.parametrize("name", READ)
def test_any_other_use_reads_the_mean(name: str) -> None:
    ours, plain = deferred_pair()
    found, expected = ([READ[name](g) for g in gradients_of(each)] for each in (ours, plain))
    if isinstance(found[0], Tensor):
        assert all(map(torch.equal, found, expected))
    elif name != "another norm":
        assert found == expected
    else:
        assert found == pytest.approx(expected)
    assert not is_lazy(ours)
    for training in (ours, plain):
        training.optimizer.step()
    assert_same(ours, plain)


VIEWS = pytest.mark.parametrize("view", [True, False])


@VIEWS
def test_gradients_taken_once_are_those_of_each_later_step(view: bool) -> None:
    runs = both(ddp={"gradient_as_bucket_view": view})
    for training in runs:
        gradients: list[Any] = []
        for step in range(8):
            training.backward(step)
            if step in (0, SETTLED):  # DDP may replace them when it rebuilds its buckets
                gradients = gradients_of(training)
            for gradient in gradients:
                gradient.mul_(0.5)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
    assert_same(*runs)


@VIEWS
def test_writing_to_gradients_taken_before_backward_is_refused(view: bool) -> None:
    training = Training(decoupled=True, ddp={"gradient_as_bucket_view": view})
    for step in range(2 * SETTLED):
        loss = training.loss(step)
        before = gradients_of(training)
        loss.backward()
        if step < 2 * SETTLED - 1:
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
    before[0].mul_(0.5)
    with pytest.raises(UnsupportedConfigurationError, match=r"taken from p\.grad before backward"):
        training.optimizer.step()


@VIEWS
def test_data_of_gradients_may_be_assigned(view: bool) -> None:
    runs = both(ddp={"gradient_as_bucket_view": view})
    for training in runs:
        for step in range(8):
            training.backward(step)
            for parameter in training.held:
                parameter.grad.data /= 2
                if step % 3 == 1 and not view:
                    parameter.grad.data = parameter.grad.data * 3
            training.update()
    assert_same(*runs)


@VIEWS
@pytest.mark.parametrize("moment", ["before forward", "behind forward"])
def test_gradients_that_are_kept_beyond_zero_grad_hold_the_mean(moment: str, view: bool) -> None:
    runs = both(ddp={"gradient_as_bucket_view": view})
    read = []
    for training in runs:
        found = []
        for step in range(8):
            training.backward(step)
            kept = gradients_of(training)
            training.update()
            if moment == "behind forward":
                training.loss(step)
            found += [gradient.clone() for gradient in kept]
            found += [gradient.norm() for gradient in kept]
        read.append(found)
    torch.testing.assert_close(*read)
    assert_same(*runs)


@pytest.mark.torch_version
def test_code_that_reads_the_address_is_told_to_flush() -> None:
    """As a C++ extension does, past Python's own methods."""
    ours, _ = deferred_pair()
    with pytest.raises(RuntimeError, match=r"call state\.flush\(\) before that line"):
        torch_private.version_of(gradients_of(ours)[0])
        torch._C.TensorBase.data_ptr(gradients_of(ours)[0])


# --- owners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_torchs_clipping_by_another_norm_is_refused_for_owners(norm: float) -> None:
    training = owned().run(SETTLED)
    training.backward()
    with pytest.raises(UnsupportedConfigurationError, match=r"use state\.clip_grad_norm_"):
        clip_grad_norm_(training.held, 1.0, norm)
    plain = Training(decoupled=False).run(SETTLED)
    plain.backward()
    norms = training.state.clip_grad_norm_(0.01, norm), clip_grad_norm_(plain.held, 0.01, norm)
    torch.testing.assert_close(*norms)
    for each in (training, plain):
        each.optimizer.step()
    torch.testing.assert_close(training.weights(), plain.weights())


def test_factors_computed_from_withheld_gradients_are_refused() -> None:
    training = owned().run(SETTLED)
    training.backward()
    total = functools.reduce(torch.add, [g.square().sum() for g in gradients_of(training)])
    for gradient in gradients_of(training):
        gradient.mul_(torch.clamp(1.0 / total.sqrt(), max=1.0))
    with pytest.raises(UnsupportedConfigurationError, match="a norm of one's own"):
        training.optimizer.step()


def test_steps_that_a_scaler_skips_do_not_warn_with_owners(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = owned().run(SETTLED)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(6):
        scaler.scale(training.loss() * math.inf).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.drop()
    assert "skipped" not in caplog.text
