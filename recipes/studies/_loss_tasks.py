"""Models and data on which losses are compared, all of which follows from a seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import _data
import _models

OUTER: Final = (0.7, 0.9)
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal one.
STUDENT: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


class LossTask(Protocol):
    """A model and its data; all of it follows from a seed."""

    @property
    def rates(self) -> Sequence[float]:
        """Learning rates to choose from."""

    @property
    def batch_size(self) -> int:
        """Samples of a mini-batch of one rank."""

    def build(self) -> nn.Module:
        """Make the model, from weights drawn a moment before."""

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Make its optimizer."""

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets."""

    def test_loss(self, model: nn.Module) -> float:
        """Return the mean loss over the test set."""


class ShiftedDigits:
    """Digits of 8 by 8 pixels, shifted by up to ``reach`` pixels each way, so that few of them come twice."""

    rates = (0.02, 0.05, 0.1, 0.2)
    batch_size = 16
    reach = 2

    def __init__(self) -> None:
        bundled = load_digits()
        parts = train_test_split(
            bundled.images, bundled.target, test_size=0.2, stratify=bundled.target, random_state=0
        )
        self._images, images = (
            torch.from_numpy(each).float().unsqueeze(1).div(8.0).sub(1.0) for each in parts[:2]
        )
        self._labels, self._test_labels = (torch.from_numpy(each).long() for each in parts[2:])
        # Each test image once, a ninth of them with each of nine shifts.
        shifts = [(dy, dx) for dy in (-self.reach, 0, self.reach) for dx in (-self.reach, 0, self.reach)]
        parts = [self._shifted(images[place :: len(shifts)], *shift) for place, shift in enumerate(shifts)]
        labels = self._test_labels
        self._test = torch.cat(parts)
        self._test_labels = torch.cat([labels[place :: len(shifts)] for place in range(len(shifts))])

    def build(self) -> nn.Module:
        """Three convolutions and a linear layer, 15,338 parameters."""

        def stage(before: int, after: int, *rest: nn.Module) -> list[nn.Module]:
            return [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), *rest]

        stages = [*stage(1, 16), *stage(16, 32, nn.MaxPool2d(2)), *stage(32, 32, nn.MaxPool2d(2))]
        return nn.Sequential(*stages, nn.Flatten(), nn.Linear(128, 10))

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._images), (self.batch_size,), generator=generator)
        shifts = torch.randint(-self.reach, self.reach + 1, (2, 2), generator=generator).tolist()
        half = self.batch_size // 2
        parts = [
            self._shifted(self._images[chosen[:half]], *shifts[0]),
            self._shifted(self._images[chosen[half:]], *shifts[1]),
        ]
        return torch.cat(parts), self._labels[chosen]

    def test_loss(self, model: nn.Module) -> float:
        return float(functional.cross_entropy(model(self._test), self._test_labels))

    def _shifted(self, images: Tensor, dy: int, dx: int) -> Tensor:
        padded = functional.pad(images, (self.reach,) * 4, value=-1.0)
        size = images.shape[-1]
        top, left = self.reach + dy, self.reach + dx
        return padded[..., top : top + size, left : left + size]


class SmallGPT:
    """A GPT of one block on Python's help topics."""

    rates = (3e-3, 6e-3, 12e-3)
    batch_size = 8
    context, vocabulary = 32, 1024

    def __init__(self) -> None:
        data = _data.load_text(context=self.context, vocabulary=self.vocabulary)
        self._train, self._test = data.train, data.test

    def build(self) -> nn.Module:
        return _models.TinyGPT(vocabulary=self.vocabulary, context=self.context, dim=48, depth=1, heads=3)

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), rate)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self._train), (self.batch_size,), generator=generator)
        return self._stacked(self._train, chosen.tolist())

    def test_loss(self, model: nn.Module) -> float:
        inputs, targets = self._stacked(self._test, range(min(256, len(self._test))))
        return float(_models.loss_of(model(inputs), targets))

    def _stacked(self, samples: Any, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        pairs = [samples[index] for index in chosen]
        return torch.stack([each for each, _ in pairs]), torch.stack([each for _, each in pairs])


TASKS: Final[Mapping[str, Callable[[], LossTask]]] = {"digits": ShiftedDigits, "gpt": SmallGPT}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return mean and half the width of its 95 % interval, by Student's t."""
    count = len(differences)
    if count < 2:
        return statistics.fmean(differences), math.inf
    quantile = STUDENT[count - 2] if count - 2 < len(STUDENT) else 1.96
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)
