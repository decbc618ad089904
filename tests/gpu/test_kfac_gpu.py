"""K-FAC on a GPU: preconditioned gradients are those of an independent float64 computation on the CPU.

Over gloo two ranks share the one GPU; NCCL takes one rank per GPU, so with one rank the native way is forced. Nothing
here waits for the device between backward and reading the gradients, so that what is not ordered is seen.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import KFACState, kfac_hook
from tests.gpu.test_hooks_gpu import DETERMINISTIC, TIMEOUT_S, reproducible
from tests.gpu.test_hooks_gpu import Plan as HookPlan
from tests.harness import Job, run_jobs
from tests.multiprocess.kfac_oracle import Oracle, RankRun, Settings
from tests.multiprocess.test_kfac import relative_error

pytestmark = pytest.mark.gpu

LR = 0.05
BATCH = 16
BUCKET_CAP_MB = 0.2
RELATIVE = 1e-3
GRADIENT_SCALE = 256.0
STEPS = 4


class Plan(NamedTuple):
    """One run of a few steps."""

    settings: Settings
    amp: bool = False
    scaled: bool = False
    views: bool = True
    force_native: bool = False
    device: str = "cuda"


def network() -> nn.Sequential:
    """Triangles of several blocks (513 and 289 rows), a grouped convolution, and what passes through."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=4, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 96),
        nn.Tanh(),
        nn.Linear(96, 10),
    )


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply without TF32, which keeps ten bits of each factor."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def batch(rank: int, step: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return inputs.to(device), torch.randint(0, 10, (BATCH,), generator=generator).to(device)


def model_and_state(
    plan: Plan, scaler: torch.amp.GradScaler
) -> tuple[DistributedDataParallel, KFACState, torch.optim.SGD]:
    model = DistributedDataParallel(
        network().to(plan.device), bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=plan.views
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    state = KFACState(
        model,
        optimizer,
        loss_scale=scaler.get_scale if plan.scaled else 1.0,
        **vars(plan.settings),
    )
    model.register_comm_hook(state, kfac_hook)
    return model, state, optimizer


def autocast(plan: Plan) -> torch.autocast:
    return torch.autocast(plan.device, torch.bfloat16, enabled=plan.amp)


class Spectral(Oracle):
    """The same for larger layers: no matrix of a layer's whole Fisher block, but its eigenvalues in float64."""

    def _solve(self, matrix: Tensor, a: Tensor, g: Tensor) -> Tensor:
        if self.settings.solver != "eigen":
            return super()._solve(matrix, a, g)
        (a_values, a_vectors), (g_values, g_vectors) = torch.linalg.eigh(a), torch.linalg.eigh(g)
        rotated = g_vectors.mT @ matrix @ a_vectors
        rotated /= g_values.unsqueeze(-1) * a_values.unsqueeze(-2) + self.settings.damping
        return g_vectors @ rotated @ a_vectors.mT


def expected(oracle: Oracle, model: nn.Module, plan: Plan, step: int, world_size: int) -> dict[str, Tensor]:
    """Return the gradients of this step.

    Without autocast all is computed in float64 on the CPU. With it, inputs and output gradients are recorded on the
    device, where half precision rounded them, and the rest is computed in float64.
    """
    runs = []
    for rank in range(world_size):
        replica = copy.deepcopy(model)
        if plan.amp:
            replica.register_forward_hook(lambda module, args, output: output.float())
            replica.forward = autocast(plan)(replica.forward)  # type: ignore[method-assign]
            run = RankRun(replica, *batch(rank, step, plan.device))
            run.calls = {
                name: [(x.double().cpu(), g.double().cpu()) for x, g in calls]
                for name, calls in run.calls.items()
            }
            run.gradients = {name: gradient.double().cpu() for name, gradient in run.gradients.items()}
        else:
            inputs, targets = batch(rank, step, "cpu")
            run = RankRun(replica.cpu().double(), inputs.double(), targets)
        runs.append(run)
    return oracle.step_of_runs(runs)


def errors(rank: int, world_size: int, plan: Plan) -> list[float]:
    """Train some steps; return the greatest relative error of a layer's gradient in each."""
    if plan.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with reproducible(HookPlan(force_native=plan.force_native)), full_float32():
        return list(_errors(rank, world_size, plan))


def _errors(rank: int, world_size: int, plan: Plan) -> Iterator[float]:
    scaler = torch.amp.GradScaler(plan.device, init_scale=GRADIENT_SCALE, enabled=plan.scaled)
    model, state, optimizer = model_and_state(plan, scaler)
    oracle = Spectral(plan.settings, LR, state.owners)
    for step in range(STEPS):
        wanted = expected(oracle, model.module, plan, step, world_size)
        optimizer.zero_grad()
        inputs, targets = batch(rank, step, plan.device)
        with autocast(plan):
            output = model(inputs)
        loss = nn.functional.cross_entropy(output.float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found = {name: parameter.grad.cpu() for name, parameter in model.module.named_parameters()}  # type: ignore[union-attr]
        yield error_of(found, wanted)
        scaler.step(optimizer)
        scaler.update()
    assert state.stats() == {"strained": 0, "dropped": 0}
    assert (oracle.least_scale < 1) == (plan.settings.kl_clip is not None), "the clip is to be seen at work"
    state.close()


def error_of(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return `relative_error` of gradients by name."""
    holder = nn.Module()
    for name, gradient in found.items():
        owner = holder
        *path, last = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(gradient))
        owner.get_parameter(last).grad = gradient
    return relative_error(holder, wanted)


def check(plan: Plan, *, world_size: int = 2, backend: str = "gloo") -> None:
    job = Job(errors, world_size, args=(plan,), backend=backend, environment=DETERMINISTIC)
    [found] = run_jobs([job], timeout_s=TIMEOUT_S)
    for rank, of_rank in enumerate(found):
        assert len(of_rank) == STEPS
        assert max(of_rank) < RELATIVE, (rank, of_rank)


SETTINGS = {
    "inverse": Settings(),
    "eigen": Settings(solver="eigen"),
    "no clip": Settings(kl_clip=None),
    "seldom": Settings(inv_update_steps=2),
    "local": Settings(factors="local"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_over_gloo_are_those_of_the_cpu(name: str) -> None:
    check(Plan(SETTINGS[name]))


def test_gradients_that_are_no_views_of_their_buckets() -> None:
    check(Plan(Settings(), views=False))


@pytest.mark.parametrize("force_native", [False, True], ids=["shortcut", "native"])
@pytest.mark.parametrize("name", ["inverse", "eigen"])
def test_gradients_with_one_rank_on_nccl_are_those_of_the_cpu(name: str, force_native: bool) -> None:
    check(Plan(SETTINGS[name], force_native=force_native), world_size=1, backend="nccl")


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ["inverse", "eigen"])
def test_gradients_over_nccl_are_those_of_the_cpu(name: str) -> None:
    check(Plan(SETTINGS[name]), backend="nccl")


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_autocast_leaves_factors_and_directions_in_float32(solver: str) -> None:
    check(Plan(Settings(solver=solver), amp=True))


def test_autocast_on_nccl() -> None:
    check(Plan(Settings(), amp=True, force_native=True), world_size=1, backend="nccl")


def test_a_grad_scaler_changes_nothing() -> None:
    check(Plan(Settings(), scaled=True))


def resumed(rank: int, world_size: int, plan: Plan) -> float:
    """Return the greatest relative difference between going on and resuming."""
    if plan.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with reproducible(HookPlan()), full_float32():
        trainings = [model_and_state(plan, torch.amp.GradScaler(plan.device)) for _ in range(2)]
        (model, state, _), (other, again, _) = trainings
        for step in range(3):
            backward(model, rank, step, plan)
        saved = state.state_dict()
        tensors = [each for layer in saved["layers"].values() for each in (layer["a"], layer["g"])]
        assert all(each.device.type == "cpu" for each in tensors)
        again.load_state_dict(saved)
        gone_on, taken_up = (backward(each, rank, 3, plan) for each in (model, other))
        state.close()
        again.close()
        return error_of(taken_up, {name: gradient.double() for name, gradient in gone_on.items()})


def backward(model: DistributedDataParallel, rank: int, step: int, plan: Plan) -> dict[str, Tensor]:
    model.zero_grad()
    inputs, targets = batch(rank, step, plan.device)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return {name: parameter.grad.cpu() for name, parameter in model.module.named_parameters()}  # type: ignore[union-attr]


def test_a_checkpoint_lies_on_the_host_and_is_taken_up() -> None:
    job = Job(resumed, 2, args=(Plan(Settings()),), environment=DETERMINISTIC)
    [found] = run_jobs([job], timeout_s=TIMEOUT_S)
    assert max(found) < 1e-5
