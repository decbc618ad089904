"""One rank of the studies of codecs on an emulated cluster; `codecs_lab.py` starts it and tells it what to run."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import _models
from crossover_ddp.codecs import CompressedState, Half, Int8, SIDCo, compressed_hook
from crossover_ddp.comm_hooks import CrossoverState, DecoupledState, crossover_hook, decoupled_hook
from lab.meter import fingerprint
from studies._worker import Order, WorkerJob, measure, say, serve

WARM_UP_STEPS = 4  # PowerSGD begins in the third
CLASSES = 10
BUCKET_CAP_MB = 4.0  # four buckets and more, of which some may travel while others are computed
CODECS: dict[str, Any] = {
    "split": None,
    "half": Half(),
    "int8": Int8(),
    "sidco5": SIDCo(0.05),
    "sidco": SIDCo(0.01),
}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, CLASSES)
    )


def timm(name: str, image_size: int) -> nn.Module:
    return _models.make_model(f"timm:{name}", classes=CLASSES, image_size=image_size)


class OfFullSize:
    """A model as others know it, with batches so small that its gradients take longer than its computation.

    Args:
        make: the model.
        image_size, batch_size: of its inputs.
    """

    def __init__(self, make: Callable[[], nn.Module], image_size: int, batch_size: int) -> None:
        self.make, self.image_size, self.batch_size = make, image_size, batch_size

    def batches(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        shape = (self.batch_size, 3, self.image_size, self.image_size)
        return [
            (
                torch.randn(shape, generator=generator),
                torch.randint(CLASSES, (self.batch_size,), generator=generator),
            )
            for _ in range(4)
        ]


MODELS: Mapping[str, OfFullSize] = {
    "resnet18": OfFullSize(functools.partial(timm, "resnet18", 32), 32, 8),
    "vit_tiny": OfFullSize(functools.partial(timm, "vit_tiny_patch16_224", 32), 32, 8),
    "mlp": OfFullSize(mlp, 32, 16),
}


class CodecRun(WorkerJob):
    """A fresh copy of the job under one hook."""

    model: DistributedDataParallel

    def __init__(self, name: str, way: str, seed: int) -> None:
        if name in MODELS:
            torch.manual_seed(seed)
            network = MODELS[name].make()
            self.batches = itertools.cycle(MODELS[name].batches(dist.get_rank()))
            options: dict[str, Any] = {"bucket_cap_mb": BUCKET_CAP_MB}
        else:
            network, batches, _ = _models.build(name, seed)
            self.batches = batches(dist.get_rank(), dist.get_world_size())
            options = {"bucket_cap_mb": _models.PRESETS[name].bucket_cap_mb}
        if way.startswith("decoupled"):
            options = {**DecoupledState.ddp_options(network), **options}
        if way == "powersgd":  # its collectives are made in callbacks; those of several buckets mix on gloo
            options = {"bucket_cap_mb": 1000.0}
        self.model = DistributedDataParallel(network, **{"gradient_as_bucket_view": True, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self._register(way)

    def _register(self, way: str) -> None:
        hook, _, codec = way.rpartition(" ")
        if way == "powersgd":
            self.state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=True
            )
            self.model.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        elif hook == "crossover":
            self.state = CrossoverState(codec=CODECS[codec])
            self.model.register_comm_hook(self.state, crossover_hook)
        elif hook == "decoupled":
            self.state = DecoupledState(self.optimizer, codec=CODECS[codec], defer="always")
            self.model.register_comm_hook(self.state, decoupled_hook)
        elif way != "ddp":
            self.state = CompressedState(CODECS[codec])
            self.model.register_comm_hook(self.state, compressed_hook)

    def close(self) -> None:
        if isinstance(self.state, CrossoverState | DecoupledState):
            self.state.close()


def run(args: argparse.Namespace, order: Order) -> None:
    job = CodecRun(args.preset, order["way"], args.seed)
    is_crossover = isinstance(job.state, CrossoverState)
    answer: dict[str, Any] = measure(
        job,
        order["steps"],
        warm_up=WARM_UP_STEPS,
        mutex=lambda: job.state.mutex if is_crossover else None,
    )
    if order.get("plan"):
        plan = job.state.plan_codec(tuple(CODECS.values()))
        names = {repr(codec): name for name, codec in CODECS.items()}
        answer["predicted_s"] = {names[repr(codec)]: step_s for codec, _, step_s in plan.options}
        answer["plan"] = names[repr(plan.codec)]
    say(event="done", **answer, digest=fingerprint(job.model))
    job.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=sorted([*MODELS, *_models.PRESETS]), required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    serve({"run": functools.partial(run, args)})


if __name__ == "__main__":
    main()
