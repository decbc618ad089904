"""Every hook of the package on a small model, by public names only."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Muon, Optimizer

import crossover_ddp as ddp
from tests.harness.networks import mlp

WIDTH: Final = 6
STEPS: Final = 5
# Returns the state and the hook to register, given a model under DDP, its optimizers and a mutex.
Way = Callable[[DistributedDataParallel, Sequence[Optimizer], Any], tuple[Any, Any]]
# Returns the loss on the batch of a step, given a model, a rank and the number of the step.
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def muon_and_sgd(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=0.1), SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)]


def optimizers_of(way: Any, model: nn.Module) -> list[Optimizer]:
    """Return SGD with momentum; for the way "muon" Muon for matrices and SGD for the others."""
    if way == "muon":
        return muon_and_sgd(model)
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def decoupled(**options: Any) -> Way:
    """Return a way that defers every step that can be deferred, unless ``options`` change that.

    ``options`` are those of `DecoupledState`.
    """

    def made(
        model: DistributedDataParallel, optimizers: Sequence[Optimizer], mutex: Any
    ) -> tuple[Any, Any]:
        group = getattr(model, "process_group", None)
        settings = {"defer": "always", "mutex": mutex, **options}
        return ddp.DecoupledState(optimizers[0], group, **settings), ddp.decoupled_hook

    return made


def owned(
    model: DistributedDataParallel, optimizers: Sequence[Optimizer], mutex: Any
) -> tuple[Any, Any]:
    group = getattr(model, "process_group", None)
    return ddp.OwnerState(optimizers, group, mutex=mutex), ddp.owner_hook


WAYS: Final[dict[str, Way]] = {
    "split": lambda model, opts, mutex: (None, ddp.reduce_scatter_all_gather_hook),
    "crossover": lambda model, opts, mutex: (ddp.CrossoverState(mutex=mutex), ddp.crossover_hook),
    "wrapped": lambda *given: (WAYS["crossover"](*given)[0], ddp.crossover_wrapper(allreduce_hook)),
    "int8": lambda model, opts, mutex: (
        ddp.CompressedState(ddp.Int8(), mutex=mutex),
        ddp.compressed_hook,
    ),
    "decoupled": decoupled(),
    "owned": owned,
    "kfac": lambda model, opts, mutex: (ddp.KFACState(model, opts[0], mutex=mutex), ddp.kfac_hook),
    "muon": lambda model, opts, mutex: (
        ddp.MuonState(opts[0], mutex=mutex),  # type: ignore[arg-type]
        ddp.muon_hook,
    ),
    "averaged": lambda model, opts, mutex: (ddp.LocalSGDState(2, mutex=mutex), ddp.local_sgd_hook),
    "elastic": lambda model, opts, mutex: (ddp.ElasticState(sync_every=2), ddp.elastic_hook),
}
DDP_OPTIONS: Final = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}


def hooked(
    module: nn.Module, hook: Any, state: Any = None, **options: Any
) -> DistributedDataParallel:
    """Return the module under DDP, in buckets of about one parameter, with a hook."""
    model = DistributedDataParallel(module, **(DDP_OPTIONS | options))
    model.register_comm_hook(state, hook)
    return model


def waited_for_by_nobody(
    hook: Any, journeys: list[torch.futures.Future[torch.Tensor]] | None = None
) -> Any:
    """Return a user's hook around ``hook`` that answers at once, so that backward does not wait.

    The Futures of ``hook`` are appended to ``journeys``.
    """

    def hurried(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        journey = hook(state, bucket)
        if journeys is not None:
            journeys.append(journey)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hurried


def noted(note: Callable[[dist.GradBucket, torch.futures.Future[torch.Tensor]], Any]) -> Any:
    """Return a decorator of hooks that calls ``note`` with each bucket and the hook's Future."""

    def around(hook: Any) -> Any:
        def noting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
            note(bucket, future)
            return future

        return noting

    return around


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


class CountsPerGroup(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do. The count sets the learning rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


def _mean_square(device: str, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step).to(device)).square().mean()  # type: ignore[no-any-return]


class Training:
    """A small model under DDP with one of the package's hooks.

    Args:
        way: the name of one of WAYS, or a `Way`; None is plain DDP.
        rank: this process's rank, which chooses its batches.
        mutex: given to the state, if it takes one.
        module: the module to train; default an `mlp` of three layers.
        device: where to train. "cuda" is the rank's own device, which becomes the current one.
        optimizers: makes the optimizers; default `optimizers_of`.
        schedule: makes a scheduler for each optimizer.
        loss: returns the loss of a step; default the mean square of the outputs on `batch`.
        around: decorates the hook before it is registered.
        wrap: wraps the module; default DDP.
        options: passed to ``wrap``.
    """

    def __init__(
        self,
        way: str | Way | None,
        rank: int = 0,
        *,
        mutex: Any = None,
        module: nn.Module | None = None,
        device: str = "cpu",
        optimizers: Callable[[nn.Module], list[Optimizer]] | None = None,
        schedule: Callable[[Optimizer], Any] | None = None,
        loss: Loss | None = None,
        around: Callable[[Any], Any] = lambda hook: hook,
        wrap: Callable[..., Any] = DistributedDataParallel,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        self.rank = rank
        self.steps = 0  # made so far
        self._loss = loss or functools.partial(_mean_square, device)
        if module is None:
            module = mlp(WIDTH, WIDTH, WIDTH, WIDTH, seed=3, tanh_last=True)
        self.model = wrap(module.to(device), **(DDP_OPTIONS | options))
        # A script may hold its parameters like this: the read guards do not see their use.
        self.held = list(self.model.parameters())
        self.optimizers = optimizers(self.model) if optimizers else optimizers_of(way, self.model)
        self.schedulers = [] if schedule is None else [schedule(each) for each in self.optimizers]
        self.state: Any = None
        if way is not None:
            made = WAYS[way] if isinstance(way, str) else way
            self.state, hook = made(self.model, self.optimizers, mutex)
            self.model.register_comm_hook(self.state, around(hook))

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]

    @property
    def is_pending(self) -> bool:
        return bool(self.state is not None and self.state.stats()["deferred"])

    @property
    def values(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector([each.detach() for each in self.model.parameters()])

    def loss(self, step: int | None = None) -> torch.Tensor:
        """Return the loss on the batch of a step, by default the next one."""
        return self._loss(self.model, self.rank, self.steps if step is None else step)

    def backward(self, step: int | None = None) -> float:
        loss = self.loss(step)
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        self.steps += 1

    def drop(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> float:
        loss = self.backward()
        self.update()
        return loss

    def run(self, steps: int = STEPS) -> "Training":
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.module.state_dict().values()]

    def save(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return copy.deepcopy({**parts, "steps": self.steps})

    def load(self, saved: dict[str, Any]) -> "Training":
        for name, part in self._parts().items():
            if name in saved:
                part.load_state_dict(copy.deepcopy(saved[name]))
        self.steps = saved["steps"]
        return self

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model.module}
        for name in ("optimizers", "schedulers"):
            parts |= {f"{name} {index}": each for index, each in enumerate(getattr(self, name))}
        if hasattr(self.state, "load_state_dict"):
            parts["state"] = self.state
        return parts

    def close(self) -> None:
        """Close the state. Collective."""
        if hasattr(self.state, "consolidate") and self.state.owners is not None:
            self.state.consolidate()
        if hasattr(self.state, "close"):
            self.state.close()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def losses_of(
    way: str | Way, rank: int, dtype: torch.dtype, default: torch.dtype, steps: int = STEPS
) -> list[float]:
    """Train a model of ``dtype`` while torch's default dtype is ``default``.

    Return the losses, followed by the sum of the final weights.
    """

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(4, WIDTH, generator=generator, dtype=torch.float32)
        return model(inputs.to(dtype)).square().mean()  # type: ignore[no-any-return]

    module = mlp(WIDTH, WIDTH, WIDTH, WIDTH, seed=3, tanh_last=True).to(dtype)
    with default_dtype(default):
        training = Training(way, rank, module=module, loss=loss)
        losses = [training.step() for _ in range(steps)]
        training.close()
    return [*losses, float(training.values.double().sum())]


def same(one: Training, other: Training) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))
