"""Three small problems on scikit-learn's digits, the optimizers to compare on them, and the loop that trains.

A convolutional net and a vision transformer classify; an autoencoder squeezes the image through twelve numbers, with
nine layers of tanh in a row: the problem on which second-order methods were shown first (Hinton and Salakhutdinov,
2006; Martens, 2010). All of it is deterministic: weights and the order of images follow from a seed.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import _models
from _job import join_ranks, leave_the_job
from crossover_ddp.kfac_hooks import KFACState, kfac_hook

SIZES: Final = (64, 128, 64, 32, 12, 32, 64, 128, 64)
TEST_SHARE: Final = 0.2
MOMENTUM: Final = 0.9
PEER: Final = "kfac-pytorch"
BROKEN: Final = 1e6  # a training with gradients like these has broken down

Step = Callable[[], None]


@dataclass(frozen=True)
class Problem:
    """What to train, on which images.

    Args:
        name: as on the command line.
        build: makes the model, from weights drawn a moment before.
        loss_of: of outputs and targets; a mean over samples, as K-FAC needs it.
        train: inputs and targets.
        test: the same, of images that are not trained on.
        batch_size: per rank; None divides the whole training set among the ranks.
    """

    name: str
    build: Callable[[], nn.Module]
    loss_of: Callable[[Tensor, Tensor], Tensor]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch_size: int | None = 32

    def steps_per_epoch(self, world_size: int) -> int:
        return 1 if self.batch_size is None else len(self.train[0]) // (self.batch_size * world_size)


@dataclass(frozen=True)
class Choice:
    """An optimizer and its hyper-parameters: ``Choice("adam", {"lr": 0.01})``."""

    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "options": dict(self.options)}


def make_problem(name: str, *, batch_size: int | None = None) -> Problem:
    """Return ``cnn``, ``vit`` or ``autoencoder``; ``batch_size`` per rank instead of the usual one."""
    if name == "autoencoder":
        images = torch.cat([_digits()[0][0], _digits()[1][0]]).add(1.0).div(2.0).flatten(1)
        pair = (images, images)
        return Problem(name, make_autoencoder, reconstruction_loss, pair, pair, batch_size)
    builders: dict[str, Callable[[], nn.Module]] = {"cnn": make_cnn, "vit": VisionTransformer}
    if name not in builders:
        raise ValueError(f"expected name to be one of autoencoder, cnn, vit, got {name=}")
    train, test = _digits()
    return Problem(name, builders[name], functional.cross_entropy, train, test, batch_size or 32)


@lru_cache(maxsize=1)
def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Load training and test set: a fixed split, each digit with the same share in both."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundled = load_digits()
    parts = train_test_split(
        bundled.images, bundled.target, test_size=TEST_SHARE, stratify=bundled.target, random_state=0
    )
    images, test_images, labels, test_labels = (torch.from_numpy(part) for part in parts)
    return (_scaled(images), labels.long()), (_scaled(test_images), test_labels.long())


def _scaled(images: Tensor) -> Tensor:
    return images.float().unsqueeze(1).div(8.0).sub(1.0)


def make_autoencoder() -> nn.Module:
    """Linear layers with tanh between them, but none at the code in the middle nor at the end (logits)."""
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise(SIZES), start=1):
        layers.append(nn.Linear(before, after))
        if after != min(SIZES) and index < len(SIZES) - 1:
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)


def reconstruction_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the pixels, in nats per image."""
    return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(outputs)


def make_cnn() -> nn.Module:
    """Three convolutions and a linear layer, 15,338 parameters."""

    def stage(before: int, after: int, *, pool: bool) -> list[nn.Module]:
        layers: list[nn.Module] = [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)] if pool else layers

    stages = [*stage(1, 16, pool=False), *stage(16, 32, pool=True), *stage(32, 32, pool=True)]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(128, 10))


class VisionTransformer(nn.Module):
    """Attention between patches of 2 by 2 pixels; the mean of them is classified."""

    def __init__(self, *, dim: int = 48, depth: int = 3, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.position = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.blocks = nn.Sequential(*(_models.Block(dim, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).mT + self.position
        logits: Tensor = self.head(self.norm(self.blocks(hidden)).mean(1))
        return logits


class Training:
    """One model in training: step by step, the same on every run with the same seed.

    Args:
        problem: what to train.
        choice: how.
        seed: of weights and of the order of images.

    **Collective**: all ranks make it and call `step`.
    """

    def __init__(self, problem: Problem, choice: Choice, seed: int) -> None:
        self.problem = problem
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(problem.build(), gradient_as_bucket_view=True)
        self.optimizer, self._precondition, self.state = _prepare(choice, self.model)
        self.steps = 0
        self._seed = seed
        self._order = torch.empty(0, dtype=torch.int64)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.steps_per_epoch = problem.steps_per_epoch(self._world_size)

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    def step(self) -> Tensor:
        """Do one step and return this rank's loss before it; ``FloatingPointError`` if kfac-pytorch cannot go on."""
        inputs, targets = (tensor[self._next_images()] for tensor in self.problem.train)
        self.steps += 1
        loss = self.problem.loss_of(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self._precondition()
        self.optimizer.step()
        return loss.detach()

    def _next_images(self) -> Tensor:
        count = len(self.problem.train[0])
        if self.problem.batch_size is None:
            # Equal shares, so that the mean of the ranks' means is the mean over images.
            return torch.arange(self._rank, count - count % self._world_size, self._world_size)
        epoch, index = divmod(self.steps, self.steps_per_epoch)
        if index == 0:
            generator = torch.Generator().manual_seed(self._seed * 10_007 + epoch)
            self._order = torch.randperm(count, generator=generator)
        size = self.problem.batch_size
        start = (index * self._world_size + self._rank) * size
        return self._order[start : start + size]

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of test images that are classified right, the same on all ranks. Not collective."""
        self.model.module.eval()
        inputs, labels = self.problem.test
        right = self.model.module(inputs).argmax(-1) == labels
        self.model.module.train()
        return float(right.float().mean())

    def close(self) -> None:
        """Take K-FAC's hooks off the model. Not collective."""
        if self.state is not None:
            self.state.close()


def _prepare(
    choice: Choice, model: DistributedDataParallel
) -> tuple[torch.optim.Optimizer, Step, KFACState | None]:
    """Make the optimizer; the step between backward and update; and K-FAC's state."""
    options = dict(choice.options)
    lr, parameters = options.pop("lr"), model.parameters()
    if choice.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if choice.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr, **options), _nothing, None
    if choice.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=MOMENTUM, **options), _nothing, None
    optimizer = torch.optim.SGD(parameters, lr, momentum=MOMENTUM)
    if choice.optimizer == PEER:
        return optimizer, _peer(model, lr, options), None
    state = KFACState(model, optimizer, **options)
    model.register_comm_hook(state, kfac_hook)
    return optimizer, _nothing, state


def _nothing() -> None:
    """Between backward and update."""


def _peer(model: nn.Module, lr: float, options: dict[str, Any]) -> Step:
    """Precondition with the public package of that name, if it is installed."""
    make = import_module("kfac.preconditioner").KFACPreconditioner
    if options.get("kl_clip", 0.001) is None:
        options["kl_clip"] = lambda step: None  # it refuses None itself, against its documentation
    return partial(_peer_step, model, make(model, lr=lr, **options))


def _peer_step(model: nn.Module, preconditioner: Any) -> None:
    # It would raise on the rank that decomposes the factor, and let the others wait for it.
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    if not all(bool((gradient.abs() < BROKEN).all()) for gradient in gradients):
        raise FloatingPointError(f"expected gradients below {BROKEN:g}, got larger ones or none at all")
    preconditioner.step()


def mean_over_ranks(values: Tensor) -> list[float]:
    """Return the means, the same on all ranks. **Collective**."""
    total = values.detach().clone().reshape(-1)
    dist.all_reduce(total)
    means: list[float] = total.div_(dist.get_world_size()).tolist()
    return means


@contextlib.contextmanager
def one_job() -> Iterator[None]:
    """Join the ranks that torchrun has started, or be a job of one; leave them at the end."""
    torch.set_num_threads(1)
    join_ranks("gloo")
    try:
        yield
    finally:
        leave_the_job()


class WireMeter:
    """Bytes that this rank sends.

    Counted by the interface named in ``GLOO_SOCKET_IFNAME`` if it is a real one, as in the emulated cluster.
    Otherwise computed, without headers: a rank sends (W − 1)/W of a buffer for a reduce-scatter and as much for an
    all-gather. Gradients take both ways, K-FAC's factors the first only, as triangles: an upper limit, since the hook
    sends columns instead where a mini-batch has few of them. A job of one rank is taken for one of two.
    """

    def __init__(self, interfaces: Path = Path("/sys/class/net")) -> None:
        name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        counter = interfaces / name / "statistics" / "tx_bytes"
        self._counter = counter if name != "lo" and counter.exists() else None

    @property
    def source(self) -> str:
        return "computed" if self._counter is None else f"counted by {self._counter.parent.parent.name}"

    def read(self) -> int:
        """Return what the interface has sent until now; 0 where there is none."""
        return 0 if self._counter is None else int(self._counter.read_text())

    def of_step(self, before: int, training: Training, options: Mapping[str, Any]) -> float:
        """Return the bytes of the step that has just ended; ``before`` was read before it."""
        if self._counter is not None:
            return self.read() - before
        every = options.get("factor_update_steps", 1)
        with_factors = training.state is not None and (training.steps - 1) % every == 0
        return computed_bytes(training.model.module, dist.get_world_size(), with_factors=with_factors)


def computed_bytes(model: nn.Module, world_size: int, *, with_factors: bool) -> float:
    """Return what a rank sends in a step: gradients there and back, factors there."""
    gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    factors = 4 * sum(map(_factors_numel, model.modules())) if with_factors else 0
    ranks = max(2, world_size)
    return (2 * gradients + factors) * (ranks - 1) / ranks


def _factors_numel(module: nn.Module) -> int:
    """Numbers in both packed triangles of a layer's factors, and one count for each."""
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return 0
    a_dim = math.prod(module.weight.shape[1:]) + (module.bias is not None)
    g_dim = module.weight.shape[0]
    return a_dim * (a_dim + 1) // 2 + g_dim * (g_dim + 1) // 2 + 2
