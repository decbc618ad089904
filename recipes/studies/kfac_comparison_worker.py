"""One rank of the comparison with kfac-pytorch; `kfac_comparison.py` starts it and tells it what to run."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import _data
import _models
from crossover_ddp.comm_hooks import DecoupledState, decoupled_hook
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from studies._worker import Order, WorkerJob, measure, say, serve

BATCH_SIZE = 16  # per rank
IMAGE_SIZE = 64
LR = 0.01
DAMPING = 0.001
SHARED: dict[str, Any] = {"factor_decay": 0.95, "kl_clip": 0.001}
WARM_UP_STEPS = 3  # DDP rebuilds its buckets, and the first factors and solvers are made


def make_cnn(classes: int) -> nn.Module:
    """Two convolutions and two linear layers on images of 8 pixels; nearly all of the bytes are in one layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 70, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1120, 155),
        nn.ReLU(),
        nn.Linear(155, classes),
    )


def build(name: str) -> tuple[nn.Module, Iterator[Any]]:
    """Return a network and this rank's endless batches, the same in every run."""
    image_size = 8 if name == "cnn" else IMAGE_SIZE
    data = _data.load_digits(image_size=image_size, channels=1)
    torch.manual_seed(0)
    if name == "cnn":
        network = make_cnn(data.classes)
    else:
        network = _models.make(replace(_models.PRESETS[name], image_size=image_size), data.classes)
    return network, batches(data)


def batches(data: _data.Data) -> Iterator[Any]:
    # At most one epoch's images are held: the comparison is of what follows.
    samples = [data.train[index] for index in range(dist.get_rank(), 640, dist.get_world_size())]
    inputs = torch.stack([image for image, _ in samples])
    labels = torch.tensor([int(label) for _, label in samples])
    for start in itertools.cycle(range(0, len(samples) - BATCH_SIZE + 1, BATCH_SIZE)):
        yield inputs[start : start + BATCH_SIZE], labels[start : start + BATCH_SIZE]


def peer(path: Path) -> Any:
    """Import the package from its checkout, which is not installed and looks for its own version."""
    sys.path.insert(0, str(path))
    version = importlib.metadata.version
    known = {"kfac-pytorch": "checkout"}
    with mock.patch.object(importlib.metadata, "version", lambda name: known.get(name) or version(name)):
        return importlib.import_module("kfac.preconditioner").KFACPreconditioner


class ComparisonRun(WorkerJob):
    """A fresh copy of the job, trained one way."""

    kfac: KFACState | None = None

    def __init__(self, name: str, way: str, periods: tuple[int, int], path: Path, bucket_mb: float) -> None:
        network, self.batches = build(name)
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": bucket_mb}
        if way == "decoupled":  # what is deferred must come in pieces
            options = DecoupledState.ddp_options(network)
        self.model = DistributedDataParallel(network, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        factor_steps, inverse_steps = periods
        shared = {**SHARED, "factor_update_steps": factor_steps, "inv_update_steps": inverse_steps}
        if way == "kfac-pytorch":
            # Its best ways as measured: one owner where factors come in every step, else every rank.
            fraction = 1.0 if inverse_steps > 1 else 1.0 / dist.get_world_size()
            self.precondition = peer(path)(  # type: ignore[method-assign]
                self.model,
                lr=LR,
                damping=DAMPING,
                compute_method="inverse",
                grad_worker_fraction=fraction,
                symmetry_aware=True,
                **shared,
            ).step
        elif way != "sgd":
            # It adds the damping to each factor, we add the square root.
            self.kfac = self.state = KFACState(
                self.model,
                self.optimizer,
                damping=DAMPING**2,
                weight_sharing="kfac-pytorch",
                pi=False,
                **shared,
            )
            if way == "decoupled":
                self.state = DecoupledState(self.optimizer, kfac=self.kfac)
                self.model.register_comm_hook(self.state, decoupled_hook)
            else:
                self.model.register_comm_hook(self.kfac, kfac_hook)

    def close(self) -> None:
        super().close()
        if self.kfac is not None:
            self.kfac.close()


def run(args: argparse.Namespace, order: Order) -> None:
    # A whole number of periods is measured, wherever it begins.
    job = ComparisonRun(args.model, order["way"], tuple(order["periods"]), args.peer, args.bucket_mb)
    say(event="done", **measure(job, order["steps"], warm_up=WARM_UP_STEPS))
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    serve({"run": functools.partial(run, parser.parse_args())})


if __name__ == "__main__":
    main()
