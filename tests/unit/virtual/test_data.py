"""Samples of virtual ranks: those of ``DistributedSampler``, on any number of ranks and workers."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from crossover_ddp import VirtualRanks
from crossover_ddp._virtual.data import VirtualSampler
from crossover_ddp._virtual.tree import leaves_of

SEED = 5


@dataclass
class Ranks:
    """The virtual ranks of one rank, without a model."""

    count: int
    own: range
    step: int = 0
    seed: int = SEED


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Samples with noise from all generators."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), random.random(), np.random.random()


class AtOnce(Noisy):
    """Makes the samples of a micro-batch in one call, in an order of its own."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in reversed(indices)]


def with_noise(samples: list[Any]) -> list[Any]:
    """Collate with random numbers."""
    return [*samples, torch.rand(1), random.random()]


def sampler_of(
    dataset: Dataset[Any], count: int, size: int, rank: int, step: int, batch: int, **options: Any
) -> VirtualSampler:
    return VirtualSampler(
        Ranks(count, leaves_of(rank, size, count), step), dataset, batch, **options
    )


def by_step(sampler: VirtualSampler, own: range) -> list[dict[int, tuple[int, list[int]]]]:
    """Return for each step the micro-batch of each virtual rank."""
    drawn = [*sampler]
    assert len(drawn) % len(own) == 0
    steps = [drawn[first : first + len(own)] for first in range(0, len(drawn), len(own))]
    return [dict(zip(own, step, strict=True)) for step in steps]


@given(
    count=st.integers(1, 9),
    samples=st.integers(1, 60),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_samples_are_those_of_as_many_ranks_from_each_step_on(
    count: int,
    samples: int,
    batch: int,
    shuffle: bool,
    drop_last: bool,
    epoch: int,
    data: st.DataObject,
) -> None:
    dataset = Numbers(samples)
    options = {"shuffle": shuffle, "drop_last": drop_last}
    expected: list[list[list[int]]] = []  # by virtual rank and step
    for v in range(count):
        torchs = DistributedSampler(dataset, count, v, seed=SEED, **options)
        torchs.set_epoch(epoch)
        order = [*torchs]
        batches = [order[first : first + batch] for first in range(0, len(order), batch)]
        expected.append([each for each in batches if len(each) == batch or not drop_last])
    steps = len(expected[0])
    if not steps:
        assert sampler_of(dataset, count, 1, 0, 0, batch, **options).steps == 0
        return
    size = data.draw(st.integers(1, count), label="ranks")
    first = data.draw(st.integers(0, steps - 1), label="step")
    for rank in range(size):
        step = epoch * steps + first
        sampler = sampler_of(dataset, count, size, rank, step, batch, **options)
        assert (sampler.steps, sampler.epoch) == (steps, epoch)
        own = leaves_of(rank, size, count)
        assert len(sampler) == steps * len(own)
        found = [{v: indices for v, (_, indices) in each.items()} for each in by_step(sampler, own)]
        assert found == [{v: expected[v][at] for v in own} for at in range(first, steps)]


@given(st.integers(1, 8), st.data())
def test_seeds_belong_to_an_epoch_a_step_and_a_virtual_rank(
    count: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, count))
    seeds = {}
    for epoch in range(2):
        for rank in range(size):
            own = leaves_of(rank, size, count)
            sampler = sampler_of(
                Numbers(count * 12), count, size, rank, epoch * 3, 4, shuffle=True, drop_last=True
            )
            for step, micro_batches in enumerate(by_step(sampler, own)):
                seeds |= {(epoch, step, v): seed for v, (seed, _) in micro_batches.items()}
    assert len({*seeds.values()}) == len(seeds) == 2 * 3 * count
    sampler = sampler_of(Numbers(count * 12), count, 1, 0, 0, 4, shuffle=True, drop_last=True)
    for step, micro_batches in enumerate(by_step(sampler, range(count))):
        for v, (seed, _) in micro_batches.items():
            assert seeds[0, step, v] == seed


def loader_of(ranks: Ranks, dataset: Dataset[Any], batch: int, **options: Any) -> DataLoader[Any]:
    """Return the loader of virtual ranks. It needs no model, whose threads a worker would not have."""
    return VirtualRanks.loader(ranks, dataset, batch, **options)


def alone(count: int) -> Ranks:
    return Ranks(count, range(count))


def drawn(loader: DataLoader[Any]) -> list[str]:
    """Return an epoch as text, in which floats have all of their digits."""

    def exact(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return thing.tolist()
        return [*map(exact, thing)] if isinstance(thing, list | tuple) else thing

    return [repr(exact(batch)) for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # with few cores
@pytest.mark.parametrize("kind", [Noisy, AtOnce])
@pytest.mark.parametrize("collate", [None, with_noise])
def test_workers_make_the_same_samples(kind: type[Noisy], collate: Any) -> None:
    ranks = alone(3)

    def epoch(workers: int) -> list[str]:
        return drawn(loader_of(ranks, kind(30), 2, num_workers=workers, collate_fn=collate))

    inline = epoch(0)
    assert len({*inline}) == len(inline) == 15
    torch.rand(7)  # it must not matter
    for workers in (1, 3):
        assert epoch(workers) == inline, workers


def test_samples_made_at_once_keep_their_order() -> None:
    ranks = alone(3)
    numbers = [batch[0].tolist() for batch in loader_of(ranks, AtOnce(30), 2)]
    assert numbers == [batch.tolist()[::-1] for batch in loader_of(ranks, Numbers(30), 2)]


def test_a_loader_begins_at_the_step_of_the_job() -> None:
    ranks = alone(3)
    loader = loader_of(ranks, Noisy(30), 2)
    first = drawn(loader)
    ranks.step = 5
    second = drawn(loader)
    assert second != first
    for step in range(10):
        ranks.step = step
        rest = (first if step < 5 else second)[step % 5 * 3 :]
        assert drawn(loader) == rest, step
        assert drawn(loader_of(ranks, Noisy(30), 2, num_workers=1)) == rest, step


def test_smaller_last_micro_batches_are_kept_on_request() -> None:
    ranks = alone(3)
    lengths = [len(batch) for batch in loader_of(ranks, Numbers(13), 2, drop_last=False)]
    assert lengths == [2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert [len(batch) for batch in loader_of(ranks, Numbers(13), 2)] == [2] * 6


def test_samples_are_in_order_without_shuffling() -> None:
    ranks = alone(2)
    batches = [batch.tolist() for batch in loader_of(ranks, Numbers(8), 2, shuffle=False)]
    assert batches == [[0, 2], [1, 3], [4, 6], [5, 7]]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


def test_datasets_without_a_length_are_refused() -> None:
    ranks = alone(2)
    with pytest.raises(TypeError, match=r"got an IterableDataset.*samples of ranks\.own"):
        loader_of(ranks, Endless(), 2)


def test_datasets_without_a_step_are_refused() -> None:
    ranks = alone(3)
    message = "at least one step of 3 micro-batches of 4, got a dataset of 11; pass a smaller"
    with pytest.raises(ValueError, match=message):
        loader_of(ranks, Numbers(11), 4)
    with pytest.raises(ValueError, match="got a dataset of 0"):
        loader_of(ranks, Numbers(0), 4, drop_last=False)
    assert len([*loader_of(ranks, Numbers(12), 4)]) == 3
    assert len([*loader_of(ranks, Numbers(11), 4, drop_last=False)]) == 3


@pytest.mark.parametrize(
    ("batch", "options", "words"), [(2, {"in_order": False}, "in_order=False"), (0, {}, "got 0")]
)
def test_options_that_mix_samples_are_refused(
    batch: int, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        loader_of(alone(2), Numbers(8), batch, **options)
