"""Samples of virtual ranks: the same ones, with the same augmentation, on any number of ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from .seeds import mixed, seeded

Batch = tuple[int, list[int]]
"""The seed of a micro-batch, and the indices of its samples."""


class Steps(Protocol):
    """The attributes of `VirtualRanks` that a sampler reads."""

    count: int
    seed: int
    step: int

    @property
    def own(self) -> range: ...


class VirtualSampler(Sampler[Batch]):
    """Yields a rank's micro-batches: for each step, those of its virtual ranks in ascending order.

    A virtual rank has the samples that ``DistributedSampler(dataset, V, v)`` gives to rank ``v``.
    The epoch follows from the number of steps that have been made, so that a resumed job continues
    within an epoch.

    Args:
        ranks: the virtual ranks.
        dataset: a dataset with a length.
        batch_size: the number of samples in a micro-batch.
        shuffle: whether to shuffle the samples in each epoch.
        drop_last: whether to drop the last samples if they do not fill a micro-batch of each virtual
            rank. Otherwise some samples are repeated, as by ``DistributedSampler``, and the last
            micro-batches are smaller.
    """

    def __init__(
        self,
        ranks: Steps,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self._ranks = ranks
        self._batch_size = batch_size
        self._samplers: list[DistributedSampler[Any]] = [
            DistributedSampler(dataset, ranks.count, v, shuffle, ranks.seed, drop_last)
            for v in ranks.own
        ]
        samples = len(self._samplers[0])
        # The number of steps in an epoch.
        self.steps = samples // batch_size if drop_last else -(-samples // batch_size)

    def __len__(self) -> int:
        return self.steps * len(self._samplers)

    @property
    def epoch(self) -> int:
        """The number of complete epochs so far."""
        return self._ranks.step // self.steps

    def __iter__(self) -> Iterator[Batch]:
        epoch, first = divmod(self._ranks.step, self.steps)
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
        orders = [[*sampler] for sampler in self._samplers]
        for step in range(first, self.steps):
            begin = step * self._batch_size
            for v, order in zip(self._ranks.own, orders, strict=True):
                seed = mixed(self._ranks.seed, "samples", epoch, step, v)
                yield seed, order[begin : begin + self._batch_size]


class SeededDataset(Dataset[Any]):
    """Makes whole micro-batches of a dataset, with random numbers that depend on their seed alone.

    So augmentation is the same in any worker process.

    Args:
        dataset: the user's dataset.
        collate: a function that makes a micro-batch of a list of samples. It may use random numbers
            as well.
    """

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, batch: Batch) -> Any:
        seed, indices = batch
        with seeded(seed):
            return self._collate(self._samples(indices))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)
        if at_once is not None:
            return list(at_once(indices))
        return [self.dataset[index] for index in indices]


def as_made(batch: Any) -> Any:
    """Return a micro-batch of `SeededDataset` as it is: the ``collate_fn`` of its loader."""
    return batch
