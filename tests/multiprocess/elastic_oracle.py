"""Elastic averaging as copies in one process: together, and replayed from the rounds that ranks have logged."""

from collections.abc import Sequence

import torch
from torch import nn

from crossover_ddp._averaging.rounds import ElasticRound
from tests.multiprocess.averaging_oracle import Copies, flat, mean_of, write


class Spring:
    """The centre."""

    def __init__(self, start: torch.Tensor, world_size: int, rate: float) -> None:
        self.centre = start.clone()
        self.world_size = world_size
        self.rate = rate

    def pull(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return what each rank that pulls adds to its values; None stands for one that does not."""
        given = [torch.zeros_like(self.centre) if each is None else each for each in values]
        pulling = sum(each is not None for each in values)
        former = self.centre.clone()
        moved = mean_of(given).mul(self.world_size).sub(former, alpha=pulling)
        self.centre.add_(moved, alpha=self.rate)
        return [None if each is None else (each - former) * -self.rate for each in values]


def first_centre(world_size: int) -> torch.Tensor:
    """The parameters of the beginning; buffers have seen the first batch of their owner, which is the last rank."""
    copies = Copies(world_size, "sgd")
    start = copies.snapshots()[0]
    trainable = sum(parameter.numel() for parameter in copies.models[0].parameters())
    assert len(start) - trainable <= len(start) // world_size
    copies.gradients()
    start[trainable:] = copies.snapshots()[-1][trainable:]
    return start


def together_oracle(
    world_size: int, optimizer: str, steps: int, sync_every: int, rate: float
) -> list[torch.Tensor]:
    copies = Copies(world_size, optimizer)
    spring = Spring(first_centre(world_size), world_size, rate)
    for _ in range(steps):
        if copies.steps and copies.steps % sync_every == 0:
            values = copies.snapshots()
            pulls = spring.pull(values)
            copies.write([each + pull for each, pull in zip(values, pulls, strict=True) if pull is not None])
        copies.step()
    return copies.snapshots()


class Replay:
    """All ranks' steps and rounds once more, in the order of the rounds.

    Args:
        logs: of each rank.
    """

    def __init__(self, optimizer: str, logs: Sequence[Sequence[ElasticRound]], rate: float) -> None:
        self.copies = Copies(len(logs), optimizer)
        self.spring = Spring(first_centre(len(logs)), len(logs), rate)
        self.logs = logs
        self.done = [0] * len(logs)
        self.pulls: list[dict[int, torch.Tensor]] = [{} for _ in logs]

    def run(self, steps: Sequence[int]) -> list[torch.Tensor]:
        for place, record in enumerate(self.logs[0]):
            assert all(log[place].offered == record.offered for log in self.logs), (
                "ranks disagree about a round"
            )
            values = [
                None if offered is None else self.at(rank, offered)
                for rank, offered in enumerate(record.offered)
            ]
            for rank, pull in enumerate(self.spring.pull(values)):
                collected = self.logs[rank][place].collected
                if pull is not None and collected is not None:
                    self.pulls[rank][collected] = pull
        return [self.at(rank, count) for rank, count in enumerate(steps)]

    def at(self, rank: int, steps: int) -> torch.Tensor:
        """Return the values of a rank between two steps, when it has collected."""
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
        images, labels = next(self.copies.batches[rank])
        nn.functional.cross_entropy(self.copies.models[rank](images), labels).backward()
        self.copies.optimizers[rank].step()
        self.copies.optimizers[rank].zero_grad()
        self.done[rank] += 1
