"""A chain of layers cut in stages: rank 0 measures and plans, all ranks train.

    torchrun --standalone --nproc-per-node 2 recipes/minimal_pipeline.py

Losses are those of the model that is not cut.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from crossover_ddp.pipeline import Cluster, Plan, Profile, Runner, plan_pipeline

MICROBATCHES, MICRO_SIZE = 4, 16

parser = argparse.ArgumentParser()
parser.add_argument("--max-replicas", type=int, default=1)
args = parser.parse_args()

dist.init_process_group("gloo")
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))
order = torch.Generator().manual_seed(0)  # every rank reads the same batches
loader = DataLoader(data, MICROBATCHES * MICRO_SIZE, shuffle=True, drop_last=True, generator=order)

torch.manual_seed(0)
layers = [
    nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Sequential(nn.Linear(512, 128), nn.ReLU()),
    nn.Linear(128, 10),
]
cluster = Cluster.measure()  # latency and bandwidth of each pair of ranks
document: list[Any] = [None]
if dist.get_rank() == 0:
    profile = Profile.measure(layers, images[:MICRO_SIZE])
    plan = plan_pipeline(
        profile, cluster, microbatches=MICROBATCHES, max_replicas=args.max_replicas
    )
    print(plan, flush=True)
    document = [plan.to_json()]
dist.broadcast_object_list(document)

runner = Runner(Plan.from_json(document[0]), layers, nn.functional.cross_entropy)
parameters = list(runner.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
for epoch in range(3):
    for inputs, labels in loader:
        loss = runner.step(inputs, labels)
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    if loss is not None:  # on ranks of the last stage
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
dist.destroy_process_group()
