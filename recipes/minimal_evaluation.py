"""A training, and beside it a process that evaluates its snapshots while gradients travel.

torchrun --standalone --nproc-per-node 2 recipes/minimal_evaluation.py train &
python recipes/minimal_evaluation.py evaluate
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from crossover_ddp import CrossoverState, GPUMutex, crossover_hook

parser = argparse.ArgumentParser()
parser.add_argument("role", choices=["train", "evaluate"])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--snapshots", type=Path, default=Path("snapshots"))
args = parser.parse_args()
args.snapshots.mkdir(exist_ok=True)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels, tested = torch.tensor(digits.target), torch.arange(len(images)) % 5 == 0
torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
).to(device)  # fmt: skip


def train() -> None:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    data = TensorDataset(images[~tested], labels[~tested])
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, seed=0)
    model, state = DistributedDataParallel(network), CrossoverState()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.register_comm_hook(state, crossover_hook)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=32, sampler=sampler, drop_last=True):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
            torch.save(network.state_dict(), args.snapshots / "part")
            (args.snapshots / "part").rename(args.snapshots / f"{epoch}.pt")
    dist.destroy_process_group()


def evaluate() -> None:
    mutex = GPUMutex()
    for epoch in range(args.epochs):
        until, path = time.monotonic() + 600, args.snapshots / f"{epoch}.pt"
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        network.eval().load_state_dict(torch.load(path, map_location=device))
        right = torch.zeros((), device=device)
        for x, y in zip(images[tested].split(60), labels[tested].split(60), strict=True):
            with mutex, torch.inference_mode():  # a turn for each batch
                right += (network(x.to(device)).argmax(1) == y.to(device)).sum()
        print(f"epoch {epoch}: {right.item():.0f} of {tested.sum()} right", flush=True)
    print(mutex.stats())
    mutex.close()


{"train": train, "evaluate": evaluate}[args.role]()
