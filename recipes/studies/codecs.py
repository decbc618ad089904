"""What codecs cost on one core, and how training with them converges on digits and on a small GPT.

    python recipes/studies/codecs.py
    torchrun --standalone --nproc-per-node 2 recipes/studies/codecs.py --convergence --seeds 5

Without torchrun: CPU time of each codec, in ms per MiB of float32, for a message of one matrix, beside torch.topk. With
it: best accuracy on a tenth of the digits, which nobody trains on, and the steps until it first reaches 97 %, evaluated
every ten steps; of the GPT the test loss at the end. "forgetful" is without error feedback. With ``--gradients``: what
SIDCo sends over its target, on made-up gradients and on those of a training, and its CPU time over that of torch.topk.
With ``--buckets``: CPU time of all that a bucket goes through but the wire.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._compression.costs import measure_codec
from crossover_ddp.codecs import (
    Codec,
    CompressedState,
    Encoded,
    Half,
    Int8,
    SIDCo,
    Threshold,
    compressed_hook,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

import _models
from studies._loss_tasks import SmallGPT, interval


@dataclass(frozen=True)
class Forgetful:
    """Another codec that keeps nothing: what its messages do not hold is lost."""

    codec: Codec

    def room(self, lengths: Sequence[int], wanted: int | None = None) -> int:
        return self.codec.room(lengths, wanted)

    def encode(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        message: torch.Tensor,
        residual: torch.Tensor,
        memory: object = None,
    ) -> Encoded:
        encoded = self.codec.encode(values, lengths, message, residual, memory)
        residual.zero_()
        return encoded

    def add_decoded(self, message: torch.Tensor, lengths: Sequence[int], out: torch.Tensor) -> None:
        self.codec.add_decoded(message, lengths, out)


CODECS: dict[str, Codec | None] = {
    "none": None,
    "Int8()": Int8(),
    "SIDCo(0.01)": SIDCo(0.01),
    "Threshold(0.01)": Threshold(0.01),
    "forgetful SIDCo": Forgetful(SIDCo(0.01)),
}
MIB = 1 << 20
BATCH = 32
GOAL = 0.97
GPT = "gpt"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--convergence", action="store_true", help="train, in the ranks that torchrun starts")
    parser.add_argument("--buckets", action="store_true", help="CPU time of all that buckets go through")
    parser.add_argument("--gradients", action="store_true", help="what SIDCo sends over its target")
    parser.add_argument("--model", nargs="+", choices=sorted([*MODELS, GPT]), default=sorted([*MODELS, GPT]))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds [5]")
    parser.add_argument("--steps", type=int, default=600, help="of each training [600]")
    parser.add_argument("--mib", type=int, default=4, help="size of the gradient for CPU times [4]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.convergence:
        dist.init_process_group("gloo")
        converge([MODELS[name] for name in args.model if name != GPT], args.seeds, args.steps)
        if GPT in args.model:
            converge_gpt(args.seeds, args.steps)
        dist.destroy_process_group()
    elif args.buckets:
        print_buckets()
    elif args.gradients:
        print_achieved()
    else:
        print_costs(args.mib)


# --- CPU -----------------------------------------------------------------------------------------------------


def print_costs(mib: int) -> None:
    torch.manual_seed(0)
    numel = mib * MIB // 4
    values = torch.distributions.Laplace(0.0, 1.0).sample((numel,))
    print(f"{'codec':18}{'encode':>8}{'decode':>8}   ms of CPU per MiB")
    for codec in (Int8(), Half(), SIDCo(0.01), Threshold(0.01)):
        encode, decode = costs(codec, values)
        print(f"{codec!r:40.40}{encode / mib:8.3f}{decode / mib:8.3f}")
    top = cpu_ms(lambda: torch.topk(values.abs(), numel // 100))
    print(f"{'torch.topk of 1 %':40}{top / mib:8.3f}")


def print_buckets() -> None:
    """Print the CPU time of all that a bucket goes through but the wire: the fastest of five rounds."""
    print(f"{'codec':18}{'ranks':>6}{'MiB':>5}{'hook':>8}{'workers':>9}   ms of CPU per MiB")
    for codec in (Int8(), Half(), SIDCo(0.01), Threshold(0.01)):
        for ranks, mib in ((2, 25), (2, 4), (2, 2), (4, 25)):
            cost = measure_codec(codec, ranks, mib * MIB // 4)
            hook, workers = (1e3 * MIB * each for each in (cost.hook_s, cost.worker_s))
            print(f"{type(codec).__name__:18}{ranks:6}{mib:5}{hook:8.3f}{workers:9.3f}", flush=True)


def costs(codec: Codec, values: torch.Tensor) -> tuple[float, float]:
    """Return the milliseconds of an encoding with a memory of former ones, and of a decoding."""
    lengths = [values.numel()]
    message = torch.zeros(codec.room(lengths) + 16, dtype=torch.uint8)
    residual, out = torch.empty_like(values), torch.zeros_like(values)
    memory = codec.encode(values, lengths, message, residual).memory
    encode = cpu_ms(lambda: codec.encode(values, lengths, message, residual, memory))
    return encode, cpu_ms(lambda: codec.add_decoded(message, lengths, out))


def cpu_ms(work: Callable[[], object], repeats: int = 15) -> float:
    """Return the median of this thread's CPU time."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        times.append(1e3 * (time.thread_time() - begin))
    return statistics.median(times)


def print_achieved() -> None:
    """Print what SIDCo sends over its target: with error feedback, the mean of steps 11 to 60."""
    print(f"{'gradients':12}{'rate':>8}{'achieved/target':>17}{'CPU of topk':>13}")
    for name, gradients in {**made_up(), "recorded": recorded()}.items():
        top = cpu_ms(lambda gradients=gradients: torch.topk(gradients[0].abs(), gradients[0].numel() // 100))  # type: ignore[misc]
        for rate in (0.1, 0.01, 0.001):
            sent, spent = achieved(SIDCo(rate), gradients)
            print(f"{name:12}{rate:8}{sent / rate:17.3f}{spent / top:13.3f}")


def made_up() -> dict[str, list[torch.Tensor]]:
    """Return sixty gradients of each kind; a scale for each of 64 layers in the mixture."""
    torch.manual_seed(0)
    scales = torch.randn(64).mul(2).exp().repeat_interleave(1 << 14)
    numel = len(scales)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: torch.randn(numel),
        "Laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample((numel,)),
        "Student t3": lambda: torch.distributions.StudentT(3.0).sample((numel,)),
        "mixture": lambda: torch.randn(numel) * scales,
    }
    return {name: [make() for _ in range(60)] for name, make in makers.items()}


def recorded() -> list[torch.Tensor]:
    """Return the flat gradients of sixty steps of the CNN."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    torch.manual_seed(0)
    model, found = cnn(), []
    optimizer = OPTIMIZERS["SGD"](model)
    for _ in range(60):
        picked = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[picked]), torch.tensor(digits.target)[picked]).backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None and p.dim() > 1])
        )
        optimizer.step()
    return found


def achieved(codec: Codec, gradients: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the part of the elements that is wanted, and the milliseconds of an encoding."""
    residual, memory, wanted, lengths = torch.zeros_like(gradients[0]), None, [], [gradients[0].numel()]
    message = torch.zeros(codec.room(lengths) + 16, dtype=torch.uint8)
    spent = []
    for gradient in gradients:
        values = gradient + residual
        begin = time.thread_time()
        encoded = codec.encode(values, lengths, message, residual, memory)
        spent.append(1e3 * (time.thread_time() - begin))
        memory = encoded.memory
        wanted.append(encoded.wanted / values.numel())
    return statistics.mean(wanted[10:]), statistics.median(spent[10:])


# --- convergence ---------------------------------------------------------------------------------------------


def vit() -> nn.Module:
    size: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 3, "num_heads": 4}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **size)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "vit": vit}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def converge(models: Sequence[Callable[[], nn.Module]], seeds: int, steps: int) -> None:
    if dist.get_rank() == 0:
        print(f"{'model':6}{'optimizer':10}{'codec':17}{'accuracy':>9}{'steps to 97 %':>15}{'rate':>8}")
    for make in models:
        for optimizer in OPTIMIZERS:
            for name, codec in CODECS.items():
                runs = [train(make, optimizer, codec, seed, steps) for seed in range(seeds)]
                accuracy, first, rate = (statistics.mean(each) for each in zip(*runs, strict=True))
                if dist.get_rank() == 0:
                    print(
                        f"{make.__name__:6}{optimizer:10}{name:17}{100 * accuracy:8.2f}%{first:15.0f}{rate:8.4f}",
                        flush=True,
                    )


def train(
    make: Callable[[], nn.Module], optimizer: str, codec: Codec | None, seed: int, steps: int
) -> tuple[float, float, float]:
    """Return the best accuracy, the steps to 97 % (all if it never comes), and the rate of bytes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out, own = order[:180], order[180:]
    torch.manual_seed(seed)
    model = DistributedDataParallel(make())
    state = CompressedState(codec)
    model.register_comm_hook(state, compressed_hook)
    update, picks = OPTIMIZERS[optimizer](model), torch.Generator().manual_seed(seed)
    best, first = 0.0, steps
    for step in range(1, steps + 1):
        drawn = torch.randint(len(own), (dist.get_world_size(), BATCH), generator=picks)[dist.get_rank()]
        picked = own[drawn]
        update.zero_grad()
        nn.functional.cross_entropy(model(images[picked]), labels[picked]).backward()
        update.step()
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                guesses = model.module(images[held_out]).argmax(1)
            model.train()
            accuracy = float(guesses.eq(labels[held_out]).float().mean())
            best = max(best, accuracy)
            first = min(first, step) if accuracy >= GOAL else first
    return best, float(first), state.stats().get("rate", 1.0)


GPT_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=6e-3),
}


def converge_gpt(seeds: int, steps: int) -> None:
    """Print test losses of the small GPT, and by how much they exceed those without a codec from the same seeds."""
    task = SmallGPT()
    for optimizer in GPT_OPTIMIZERS:
        exact: list[float] = []
        for name, codec in CODECS.items():
            runs = [train_gpt(task, optimizer, codec, seed, steps) for seed in range(seeds)]
            losses = [loss for loss, _ in runs]
            exact = exact or losses
            mean, half = interval([loss / own - 1 for loss, own in zip(losses, exact, strict=True)])
            if dist.get_rank() == 0:
                print(
                    f"{GPT:6}{optimizer:10}{name:17} test loss {statistics.mean(losses):6.3f}, over none's "
                    f"{100 * mean:+.2f} % ± {100 * half:.2f} %, rate {runs[0][1]:.4f}",
                    flush=True,
                )


def train_gpt(
    task: SmallGPT, optimizer: str, codec: Codec | None, seed: int, steps: int
) -> tuple[float, float]:
    """Return the test loss after the last step, and the rate of bytes."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.build())
    state = CompressedState(codec)
    model.register_comm_hook(state, compressed_hook)
    update = GPT_OPTIMIZERS[optimizer](model)
    batches = torch.Generator().manual_seed(seed * 1009 + dist.get_rank())
    for _ in range(steps):
        inputs, targets = task.batch(batches)
        update.zero_grad()
        _models.loss_of(model(inputs), targets).backward()
        update.step()
    with torch.no_grad():
        return task.test_loss(model.module), state.stats().get("rate", 1.0)


if __name__ == "__main__":
    main()
