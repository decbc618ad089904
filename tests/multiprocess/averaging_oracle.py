"""Averaged replicas twice: as ranks of DDP with a hook, and as copies of one model in one process.

Copies run the algorithms of the averaging hooks, without ranks or a network. Tests compare the
hooks with them, mostly to the last bit. So losses that are measured on copies hold for ranks.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from crossover_ddp.averaging_hooks import ElasticState, elastic_hook, local_sgd_hook
from tests.harness.oracles import tree_sum
from tests.harness.training import Training

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=1e-4
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
# (rank, step) of infinite losses: before, at and between exchanges, twice in a row, and never on
# both ranks in one step. The scale is a power of two, so that scaling rounds nothing.
OVERFLOWS = frozenset({(1, 3), (1, 4), (0, 7), (1, 9)})
SCALE = 2.0**10


def network() -> nn.Module:
    """Return a network with BatchNorm. The ranks' parts of its flat vector differ in length."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(80, 13),
        nn.Tanh(),
        nn.Linear(13, 7),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(6, 1, 6, 6, generator=generator)
    return nn.functional.cross_entropy(
        model(images), torch.randint(0, 7, (6,), generator=generator)
    )


class Trainer(Training):
    def __init__(
        self,
        rank: int,
        state: Any,
        optimizer: str = "momentum",
        *,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        hook = elastic_hook if isinstance(state, ElasticState) else local_sgd_hook
        super().__init__(
            lambda *_: (state, hook),
            rank,
            module=model or network(),
            optimizers=lambda made: [MAKERS[optimizer](made.parameters())],
            loss=loss_of,
            **{"broadcast_buffers": False, "bucket_cap_mb": 0.002, **options},
        )

    def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """Train with a GradScaler, which skips the step if the loss overflows on this rank."""
        loss = self.loss()
        if (self.rank, self.steps) in OVERFLOWS:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.drop()
        self.steps += 1

    @property
    def values(self) -> torch.Tensor:
        return flat(self.model.module)

    def end(self) -> torch.Tensor:
        """Close the state; return the model's values before that."""
        values = self.values
        self.close()
        return values


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)


def floats(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that are averaged, in the order of the flat vector."""
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in floats(model)])


def write(model: nn.Module, values: torch.Tensor) -> None:
    tensors = floats(model)
    for tensor, piece in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def mean_of(values: Sequence[Any]) -> torch.Tensor:
    """Average as the owners of equal parts do: divide, then add."""
    return tree_sum([value / len(values) for value in values])


class Copies:
    """One copy of the model for each rank, all with the same values.

    Args:
        models: the copies.
        optimizers: of the copies.
        gradients: computes the gradients of one copy on its next batch.
        skips: (rank, step) of steps that the optimizer skips, as with a GradScaler.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: Callable[[int], None],
        skips: Collection[tuple[int, int]] = (),
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.gradients = gradients
        self.steps = 0
        self._skips = skips

    def step(self, *, together: bool = False) -> None:
        """Train one step, each copy on its own gradients, or together on their mean."""
        for rank in range(len(self.models)):
            self.gradients(rank)
        if together:
            for copies in zip(*[model.parameters() for model in self.models], strict=True):
                mean = mean_of([parameter.grad for parameter in copies])
                for parameter in copies:
                    parameter.grad.copy_(mean)
        for rank in range(len(self.models)):
            self.update(rank, self.steps)
        self.steps += 1

    def update(self, rank: int, number: int) -> None:
        """Run the ``number``-th step of a copy's optimizer."""
        if (rank, number) not in self._skips:
            self.optimizers[rank].step()
        self.optimizers[rank].zero_grad()

    @torch.no_grad()
    def snapshots(self) -> list[torch.Tensor]:
        return [flat(model) for model in self.models]

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        for model, each in zip(self.models, values, strict=True):
            write(model, each)


class DelayedWalk:
    """The steps of a model with `LocalSGDState`, on copies.

    Args:
        copies: the model.
        sync_every: as for `LocalSGDState`, and so are the next three.
        delay: see there.
        fragments: see there.
        warmup_steps: see there.
        outer: learning rate and Nesterov momentum of the outer optimizer, if there is one.
        increments: whether ranks send increments, as with a codec; here they travel exactly.
    """

    def __init__(
        self,
        copies: Copies,
        *,
        sync_every: int,
        delay: int = 0,
        fragments: int = 1,
        warmup_steps: int = 0,
        outer: tuple[float, float] | None = None,
        increments: bool = False,
    ) -> None:
        self.copies = copies
        self._increments = increments
        # Made in the first local step.
        self._common: torch.Tensor | None = None
        self.anchor = copies.snapshots()[0].clone()
        self.velocity = torch.zeros_like(self.anchor)
        self._every = sync_every
        self._is_local = sync_every > 1 or delay > 0
        self._delay = delay
        self._fragments = fragments
        self._warmup = warmup_steps
        self._outer = outer
        self._trainable = sum(p.numel() for p in copies.models[0].parameters())
        self._acted = copies.steps
        # By fragment: its slice, the snapshots, their mean.
        self._pending: dict[int, tuple[slice, list[torch.Tensor], torch.Tensor]] = {}

    def step(self) -> None:
        local = self.copies.steps - self._warmup
        if local == 0:
            self.anchor = self.copies.snapshots()[0].clone()
        self._exchange()
        if local >= 0 and self._common is None:
            self._set_common(self.copies.snapshots()[0])
        self.copies.step(together=local < 0 or not self._is_local)

    def _set_common(self, values: torch.Tensor) -> None:
        self._common = values.clone()
        self._common[self._trainable :] = 0  # buffers travel as they are

    def average(self) -> None:
        """Make all copies equal, after pending exchanges are applied."""
        self._exchange()
        for fragment in list(self._pending):
            self._apply(*self._pending.pop(fragment))
        mean = mean_of(self.copies.snapshots())
        self.copies.write([mean] * len(self.copies.models))
        if self._common is not None and self._outer is None:
            self._set_common(mean)

    def _exchange(self) -> None:
        """Run the exchanges that are due after the steps so far."""
        local = self.copies.steps - self._warmup
        if self._acted == self.copies.steps or not self._is_local:
            return
        self._acted = self.copies.steps
        for fragment in range(self._fragments):
            offset = fragment * self._every // self._fragments
            is_due = (local - self._delay - offset) % self._every == 0
            if is_due and fragment in self._pending:
                self._apply(*self._pending.pop(fragment))
            if local > 0 and (local - offset) % self._every == 0:
                self._send(fragment)

    def _send(self, fragment: int) -> None:
        numel = len(self.anchor)
        start = numel * fragment // self._fragments
        place = slice(start, numel * (fragment + 1) // self._fragments)
        sent = [values[place] for values in self.copies.snapshots()]
        if self._increments:
            common = self._common[place]
            sent = [values - common for values in sent]
            mean = sum(sent[1:], sent[0]) / len(sent)  # in rank order, and undivided
            if self._outer is not None:
                trainable = max(0, self._trainable - place.start)
                former = self.anchor[place].clone()
                result = self._outer_step(place, mean, *self._outer, base=0.0)
                mean[:trainable] = (result - former)[:trainable]
            trainable = max(0, self._trainable - place.start)
            common[:trainable] += mean[:trainable]
            self._pending[fragment] = place, sent, mean
            if not self._delay:
                self._apply(*self._pending.pop(fragment))
            return
        mean = mean_of(sent)
        if self._outer is not None:
            mean = self._outer_step(place, mean, *self._outer)
        if self._delay:
            self._pending[fragment] = place, sent, mean
            return
        values = self.copies.snapshots()
        for each in values:
            each[place] = mean
        self.copies.write(values)

    def _apply(self, place: slice, sent: Sequence[torch.Tensor], mean: torch.Tensor) -> None:
        values = self.copies.snapshots()
        for each, own in zip(values, sent, strict=True):
            each[place] += mean - own
        self.copies.write(values)

    def _outer_step(
        self,
        place: slice,
        mean: torch.Tensor,
        rate: float,
        momentum: float,
        base: float | None = None,
    ) -> torch.Tensor:
        """Return Nesterov's step of the anchor, see [Note: outer steps]; of buffers the mean.

        Progress is the mean's distance from the anchor, or from ``base``.
        """
        trainable = max(0, self._trainable - place.start)
        result = mean.clone()
        own = self.anchor[place][:trainable]
        velocity = self.velocity[place][:trainable]
        delta = (own if base is None else base) - mean[:trainable]
        velocity.mul_(momentum).add_(delta)
        step = delta.add(velocity, alpha=momentum) if momentum else delta
        result[:trainable] = own.add_(step, alpha=-rate)
        return result


class Spring:
    """The centre of elastic averaging, pulled by several copies at once with the rate α."""

    def __init__(self, start: torch.Tensor, rate: float) -> None:
        self.centre = start.clone()
        self.rate = rate

    def pull(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the update of each rank; None for a rank that does not pull."""
        given = [each for each in values if each is not None]
        former = self.centre.clone()
        moved = tree_sum(given).sub(former, alpha=len(given))
        self.centre.add_(moved, alpha=self.rate)
        return [None if each is None else (each - former) * -self.rate for each in values]


def copies_of(
    world_size: int, optimizer: str, skips: Collection[tuple[int, int]] = (), *, first: int = 0
) -> Copies:
    models = [network() for _ in range(world_size)]
    steps = [itertools.count(first) for _ in models]

    def gradients(rank: int) -> None:
        loss_of(models[rank], rank, next(steps[rank])).backward()

    copies = Copies(
        models, [MAKERS[optimizer](model.parameters()) for model in models], gradients, skips
    )
    copies.steps = first
    return copies


class Replay:
    """Runs all ranks' steps and rounds of elastic averaging again, in the order of the rounds.

    Args:
        optimizer: of the ranks.
        logs: by rank, its rounds.
        rate: α.
        skips: as for `Copies`.
    """

    def __init__(
        self,
        optimizer: str,
        logs: Sequence[Sequence[Any]],
        rate: float,
        skips: Collection[tuple[int, int]] = (),
    ) -> None:
        self.copies = copies_of(len(logs), optimizer, skips)
        first = copies_of(len(logs), "sgd")
        first.gradients(0)
        # The centre begins as rank 0's replica after its first forward, which changed its buffers.
        self.spring = Spring(first.snapshots()[0], rate)
        self.logs = logs
        self.done = [0] * len(logs)
        self.pulls: list[dict[int, torch.Tensor]] = [{} for _ in logs]
        # By rank, its values after its last step, before it applied any further pull.
        self.trained = self.copies.snapshots()

    def run(self, steps: Sequence[int]) -> list[torch.Tensor]:
        for place, record in enumerate(self.logs[0]):
            assert all(log[place].offered == record.offered for log in self.logs), (
                "ranks disagree on a round"
            )
            offered = enumerate(record.offered)
            values = [None if steps is None else self.at(rank, steps) for rank, steps in offered]
            for rank, pull in enumerate(self.spring.pull(values)):
                collected = self.logs[rank][place].collected
                if pull is not None and collected is not None:
                    self.pulls[rank][collected] = pull
        return [self.at(rank, count) for rank, count in enumerate(steps)]

    def at(self, rank: int, steps: int) -> torch.Tensor:
        """Return the values of a rank after ``steps`` steps, when it has applied its pull."""
        while True:
            self.collect(rank)
            if self.done[rank] == steps:
                return flat(self.copies.models[rank])
            self.train(rank)

    @torch.no_grad()
    def collect(self, rank: int) -> None:
        pull = self.pulls[rank].pop(self.done[rank], None)
        if pull is not None:
            model = self.copies.models[rank]
            write(model, flat(model) + pull)

    def train(self, rank: int) -> None:
        self.copies.gradients(rank)
        self.copies.update(rank, self.done[rank])
        self.done[rank] += 1
        self.trained[rank] = flat(self.copies.models[rank])
