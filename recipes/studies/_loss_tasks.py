"""A model and its data, all of which follows from a seed."""

from __future__ import annotations

from typing import Final

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

OUTER: Final = (0.7, 0.9)


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
