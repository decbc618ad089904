"""Elastic averaging as copies in one process, replayed from the rounds that ranks have logged."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from tests.multiprocess.averaging_oracle import copies_of
from tests.multiprocess.replicas import Spring, flat, write


class Replay:
    """All ranks' steps and rounds once more, in the order of the rounds; ``logs``: of each rank."""

    def __init__(
        self, optimizer: str, logs: Sequence[Sequence[Any]], rate: float, skips: Collection[tuple[int, int]] = ()
    ) -> None:
        self.copies = copies_of(len(logs), optimizer, skips)
        first = copies_of(len(logs), "sgd")
        first.gradients(0)
        # Rank 0's replica in the first backward pass, whose buffers have seen its first batch.
        self.spring = Spring(first.snapshots()[0], rate)
        self.logs = logs
        self.done = [0] * len(logs)
        self.pulls: list[dict[int, torch.Tensor]] = [{} for _ in logs]
        self.trained = self.copies.snapshots()
        """Of each rank, after its last step and before it collected anything more."""

    def run(self, steps: Sequence[int]) -> list[torch.Tensor]:
        for place, record in enumerate(self.logs[0]):
            assert all(log[place].offered == record.offered for log in self.logs), "of a round ranks disagree"
            offered = enumerate(record.offered)
            values = [None if steps is None else self.at(rank, steps) for rank, steps in offered]
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
        self.copies.gradients(rank)
        self.copies.update(rank, self.done[rank])
        self.done[rank] += 1
        self.trained[rank] = flat(self.copies.models[rank])
