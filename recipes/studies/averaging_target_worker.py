"""One rank of the study of time to target, trained one way after another; `averaging_target.py` starts it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional

import _models
from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.comm_hooks import DecoupledState
from lab.meter import Reading, pinned_core
from studies._loss_tasks import OUTER, ShiftedDigits
from studies._worker import Order, heard, say, serve
from studies.averaging_worker import AVERAGING_STATES, AveragingRun

POWER_RANK = 2
POWER_START = 10  # steps before PowerSGD compresses: the least that torch's state takes is 2


class MLPTask(ShiftedDigits):
    """Three linear layers, 301,066 parameters, on digits shifted at random."""

    batch_size = 32

    def build(self) -> nn.Module:
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(nn.Flatten(), *layers)


class ResNetTask(ShiftedDigits):
    """A narrow ResNet-18 on the same digits, twice as wide and high."""

    batch_size = 32

    def build(self) -> nn.Module:
        network = _models.make_model(
            "timm:resnet18", classes=10, channels=1, image_size=16, options={"channels": (8, 16, 24, 32)}
        )
        network.maxpool = nn.Identity()
        return network

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, labels = super().batch(generator)
        return functional.interpolate(images, scale_factor=2.0), labels

    def test_loss(self, model: nn.Module) -> float:
        return float(
            functional.cross_entropy(
                model(functional.interpolate(self._test, scale_factor=2.0)), self._test_labels
            )
        )


TASKS = {"mlp": MLPTask, "resnet": ResNetTask}


class TargetRun(AveragingRun):
    """The ways of `averaging_worker`, PowerSGD and DiLoCo.

    Args:
        task: what to train.
        order: of `AveragingRun`, ``rate`` and ``seed``.
    """

    def __init__(self, task: ShiftedDigits, order: Order) -> None:
        self._task = task
        torch.manual_seed(order["seed"])
        network = task.build()
        # Gradients of accumulated batches are added up: their mean takes the learning rate of one batch.
        batches_per_step = order["sync_every"] if order["way"] == "accumulation" else 1
        super().__init__(network, self._drawn(order["seed"]), order["rate"] / batches_per_step, order)

    def _drawn(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed * 1009 + dist.get_rank())
        while True:
            yield self._task.batch(generator)

    def _hook(self, way: str, every: int, order: Order) -> None:
        if way == "powersgd":
            self.model.register_comm_hook(PowerSGDState(None, POWER_RANK, POWER_START), powerSGD_hook)
        elif way == "diloco":
            outer = functools.partial(torch.optim.SGD, lr=OUTER[0], momentum=OUTER[1], nesterov=True)
            self.state = LocalSGDState(2 * every, 1, 2 * every, outer_optimizer=outer)
            self.model.register_comm_hook(self.state, local_sgd_hook)
        else:
            super()._hook(way, every, order)

    @torch.no_grad()
    def test_loss(self) -> float:
        """Return rank 0's test loss, of the mean of all ranks where they differ. **Collective**."""
        if isinstance(self.state, DecoupledState):
            self.state.flush()
        with self.state.averaged() if isinstance(self.state, AVERAGING_STATES) else contextlib.nullcontext():
            loss = torch.zeros(1, dtype=torch.float64)
            if dist.get_rank() == 0:
                network = self.model.module.eval()
                loss += self._task.test_loss(network)
                network.train()
        dist.broadcast(loss, 0)
        return float(loss)


def run(order: Order) -> None:
    """Train, and judge every so many steps; the clock stands still while the model is judged."""
    job = TargetRun(TASKS[order["task"]](), order)
    every = order["judge_every"]
    own_steps = every // order.get("slow_share", 1) if job._slow_s else every
    losses: list[float] = []
    times_s: list[float] = []
    spent = {"core_busy_s": 0.0, "wire_bytes": 0.0}
    dist.barrier()
    say(event="ready")
    heard()
    for _ in range(order["steps"] // every):
        dist.barrier()
        before, begin_s = Reading.now(pinned_core()), time.monotonic()
        for _ in range(own_steps):
            job.step()
        times_s.append(time.monotonic() - begin_s)
        after = Reading.now(pinned_core()).since(before)
        spent = {name: total + (after[name] or 0.0) for name, total in spent.items()}
        losses.append(job.test_loss())
        if losses[-1] <= order.get("target", 0.0):
            break
    made = len(losses) * own_steps
    say(event="done", losses=losses, times_s=times_s, **{name: total / made for name, total in spent.items()})
    job.close()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    serve({"run": run})


if __name__ == "__main__":
    main()
