"""Every hook of the package on a small model, by public names only."""

import contextlib
import copy
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
# Of a model under DDP, its optimizers and a mutex: the state and the hook to register.
Way = Callable[[DistributedDataParallel, Sequence[Optimizer], Any], tuple[Any, Any]]
# Of a model, a rank and the number of a step: the loss on a batch of its own.
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def muon_and_sgd(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=0.1), SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1)]


def optimizers_of(way: Any, model: nn.Module) -> list[Optimizer]:
    """Return SGD with momentum, or what Muon's way needs."""
    return muon_and_sgd(model) if way == "muon" else [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def decoupled(**options: Any) -> Way:
    """Defer every step that can be deferred, unless ``options`` of the state say otherwise."""

    def made(
        model: DistributedDataParallel, optimizers: Sequence[Optimizer], mutex: Any
    ) -> tuple[Any, Any]:
        trained = optimizers if options.get("owners") else optimizers[0]
        given = {"defer": "always", "mutex": mutex, **options}
        return ddp.DecoupledState(
            trained, getattr(model, "process_group", None), **given
        ), ddp.decoupled_hook

    return made


WAYS: Final[dict[str, Way]] = {
    "split": lambda model, opts, mutex: (None, ddp.reduce_scatter_all_gather_hook),
    "crossover": lambda model, opts, mutex: (ddp.CrossoverState(mutex=mutex), ddp.crossover_hook),
    "wrapped": lambda *given: (WAYS["crossover"](*given)[0], ddp.crossover_wrapper(allreduce_hook)),
    "int8": lambda model, opts, mutex: (
        ddp.CompressedState(ddp.Int8(), mutex=mutex),
        ddp.compressed_hook,
    ),
    "decoupled": decoupled(),
    "owned": decoupled(owners="layers", defer="auto"),
    "kfac": lambda model, opts, mutex: (ddp.KFACState(model, opts[0], mutex=mutex), ddp.kfac_hook),
    "muon": lambda model, opts, mutex: (ddp.MuonState(opts[0], mutex=mutex), ddp.muon_hook),  # type: ignore[arg-type]
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
    """Return a user's hook that lets backward end at once, and puts ``hook``'s Futures into ``journeys``."""

    def hurried(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        journey = hook(state, bucket)
        if journeys is not None:
            journeys.append(journey)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hurried


def noted(note: Callable[[dist.GradBucket, torch.futures.Future[torch.Tensor]], Any]) -> Any:
    """Return what makes of a hook one that tells of each bucket and the Future that it is answered with."""

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
    """Counts its steps in its groups, as some optimizers do, and hangs the learning rate on the count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class Training:
    """A small model under DDP with one of the package's hooks.

    Args:
        way: the name of one of WAYS, or another; None: plain DDP.
        mutex: of the state, if it takes one.
        optimizers: makes them; default SGD with momentum, and Muon for its own way.
        schedule: makes a scheduler for each of them.
        device: "cuda" is the rank's own, which becomes the current one.
        loss: default the mean square on `batch`.
        around: makes the registered hook of the package's.
        options: of DDP.
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
        self.rank, self.steps = rank, 0
        self._loss = loss or (lambda model, *place: model(batch(*place).to(device)).square().mean())
        module = (
            mlp(WIDTH, WIDTH, WIDTH, WIDTH, seed=3, tanh_last=True) if module is None else module
        )
        self.model = wrap(module.to(device), **(DDP_OPTIONS | options))
        self.held = list(self.model.parameters())  # as a script may hold them, past all guards
        self.optimizers = optimizers(self.model) if optimizers else optimizers_of(way, self.model)
        self.schedulers = (
            [schedule(each) for each in self.optimizers] if schedule is not None else []
        )
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
            parts |= {f"{name} {place}": each for place, each in enumerate(getattr(self, name))}
        return parts | ({"state": self.state} if hasattr(self.state, "load_state_dict") else {})

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
    """Train a model of ``dtype`` where torch's default is another one; return the losses, and the last weights' sum."""

    def loss(model: nn.Module, *place: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * place[0] + place[1])
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
