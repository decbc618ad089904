"""The data of the recipes: real, bundled with a dependency, the same on every machine.

Digits are scikit-learn's (1,797 scans of handwritten digits). The text is the language reference
that is part of Python as ``pydoc``'s help topics. ``ImageFolder`` reads a directory of your own.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

Batch = tuple[torch.Tensor, torch.Tensor]

GPT = "gpt"
TEST_EVERY = 5  # every fifth digit is a test image: the split never depends on a seed
TEXT_TEST_SHARE = 0.1  # the end of the text is held out


class Samples(Protocol):
    """The interface of the data sets. Random augmentation depends on ``epoch``."""

    epoch: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor | int]: ...


class Data(NamedTuple):
    """A training set, a test set, and the number of classes or words."""

    train: Samples
    test: Samples
    classes: int


class Digits:
    """Scanned digits of 8 by 8 pixels, enlarged to the input size of the model."""

    def __init__(self, *, train: bool, image_size: int, channels: int) -> None:
        from sklearn.datasets import load_digits

        bundled = load_digits()
        is_test = torch.arange(len(bundled.target)) % TEST_EVERY == 0
        chosen = ~is_test if train else is_test
        self.images = torch.from_numpy(bundled.images).float()[chosen].div_(8.0).sub_(1.0)
        self.labels = torch.from_numpy(bundled.target).long()[chosen]
        self.image_size = image_size
        self.channels = channels
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        # Enlarged one by one: 1,797 images of 224 by 224 would take a gigabyte.
        image = functional.interpolate(
            self.images[index][None, None],
            size=self.image_size,
            mode="bilinear",
            align_corners=False,
        )
        return image[0].expand(self.channels, -1, -1), self.labels[index]


class Folder:
    """``ImageFolder`` whose random crops depend only on seed, epoch and image.

    They do not depend on the number of loader workers, or on a resume in the middle of an epoch.
    """

    def __init__(
        self, root: Path, *, train: bool, image_size: int, channels: int, seed: int
    ) -> None:
        from torchvision import datasets, transforms

        if not root.is_dir():
            raise ValueError(
                "expected a directory DATA_DIR/train and DATA_DIR/val with one folder per class, "
                f"got {root}; pass their parent as --data-dir"
            )
        size = [
            transforms.RandomResizedCrop(image_size, antialias=True),
            transforms.RandomHorizontalFlip(),
        ]
        if not train:
            size = [
                transforms.Resize(image_size, antialias=True),
                transforms.CenterCrop(image_size),
            ]
        spread = (0.5,) * channels
        self.folder = datasets.ImageFolder(
            root,
            transforms.Compose(
                [
                    *([transforms.Grayscale()] if channels == 1 else []),
                    *size,
                    transforms.ToTensor(),
                    transforms.Normalize(spread, spread),
                ]
            ),
        )
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.seed * 10_007 + self.epoch) * len(self) + index)
            image, label = self.folder[index]
        return image, label


class Text:
    """Next-word prediction over Python's help topics, cut into windows of ``context`` words."""

    def __init__(self, *, train: bool, context: int, vocabulary: int) -> None:
        tokens = _tokens(vocabulary)
        held_out = int(len(tokens) * TEXT_TEST_SHARE)
        self.tokens = tokens[:-held_out] if train else tokens[-held_out:]
        self.context = context
        self.epoch = 0

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Batch:
        begin = index * self.context
        window = self.tokens[begin : begin + self.context + 1]
        return window[:-1], window[1:]


@functools.cache
def _tokens(vocabulary: int) -> torch.Tensor:
    """Number the words by their frequency. Number 0 stands for all rare words."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    words = re.findall(r"\w+|[^\w\s]|\n|  +", text)
    # Words of equal frequency are sorted alphabetically, so that the order is always the same.
    ranked = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    numbers = {word: number for number, (word, _) in enumerate(ranked[: vocabulary - 1], start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def load_data(sizes: Any, directory: Path | None = None, seed: int = 0) -> Data:
    """Load the data for a model.

    Args:
        sizes: a preset, or train.py's arguments.
        directory: directory of images, in ``train`` and ``val`` with one folder for each class.
            Default: Python's help topics for the GPT, scikit-learn's digits for all other models.
        seed: seed of the random crops. Default 0.
    """
    parts = (True, False)
    train: Any
    test: Any
    if sizes.model == GPT:
        text = {"context": sizes.context, "vocabulary": sizes.vocabulary}
        train, test = (Text(train=part, **text) for part in parts)
        return Data(train, test, sizes.vocabulary)
    size = {"image_size": sizes.image_size, "channels": sizes.channels}
    if directory is None:
        train, test = (Digits(train=part, **size) for part in parts)
        return Data(train, test, 10)
    train, test = (
        Folder(directory / ("train" if part else "val"), train=part, seed=seed, **size)
        for part in parts
    )
    if train.folder.classes != test.folder.classes:
        raise ValueError(
            f"expected the same classes in train and val, got train={train.folder.classes}, "
            f"val={test.folder.classes}; complete the folders under {directory}"
        )
    return Data(train, test, len(train.folder.classes))


def sampler_of(samples: Samples, seed: int = 0) -> DistributedSampler[Any]:
    """Return a sampler that gives all ranks equally many samples."""
    # `samples` is a Dataset by its methods, not by inheritance.
    return DistributedSampler(samples, seed=seed, drop_last=True)  # type: ignore[arg-type]


def epoch_batches(
    samples: Samples,
    sampler: DistributedSampler[Any],
    *,
    epoch: int,
    batch_size: int,
    skip: int = 0,
    workers: int = 0,
    pin: bool = False,
) -> Iterator[Batch]:
    """Iterate over this rank's batches of one epoch, from batch number ``skip`` on.

    A resumed run slices the order of the epoch, so that it does not load the samples that it skips.
    """
    samples.epoch = epoch
    sampler.set_epoch(epoch)
    order = list(sampler)[skip * batch_size :]
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]  # a Dataset by its methods, not by inheritance
        batch_size,
        sampler=order,
        drop_last=True,
        num_workers=workers,
        pin_memory=pin,
    )
    return iter(loader)


def test_batches(samples: Samples, *, batch_size: int) -> Iterator[Batch]:
    """Iterate over this rank's part of the test set.

    A ``DistributedSampler`` would pad it and so count some samples twice. Without padding, ranks
    may differ by one batch.
    """
    share = range(dist.get_rank(), len(samples), dist.get_world_size())
    loader: DataLoader[Any] = DataLoader(
        samples,  # type: ignore[arg-type]  # a Dataset by its methods, not by inheritance
        batch_size,
        sampler=share,
    )
    return iter(loader)
