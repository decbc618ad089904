"""A planned pipeline on torch's own runtime: gloo on CPUs, or NCCL on GPUs.

    torchrun --standalone --nproc-per-node 2 recipes/minimal_torch_pipeline.py

Losses are those of the model that is not cut, and of `minimal_pipeline.py`.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from crossover_ddp.pipeline import Cluster, Plan, Profile, plan_pipeline

MICROBATCHES, MICRO_SIZE = 4, 16

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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
group: Any = dist.new_group(backend="gloo")
cluster = Cluster.measure(group)  # latency and bandwidth of each pair of ranks
document: list[Any] = [None]
if dist.get_rank() == 0:
    profile = Profile.measure(layers, images[:MICRO_SIZE])
    plan = plan_pipeline(profile, cluster, microbatches=MICROBATCHES, max_replicas=1, split=True)
    print(plan, flush=True)
    document = [plan.to_json()]
dist.broadcast_object_list(document)

plan = Plan.from_json(document[0])
stages = plan.build_stages(layers, device)
if stages:  # a rank may have none
    schedule = plan.schedule(stages, nn.functional.cross_entropy)
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
    for epoch in range(3):
        for inputs, labels in loader:
            losses: list[torch.Tensor] = []
            first = [inputs.to(device)] if stages[0].is_first else []
            schedule.step(*first, target=labels.to(device), losses=losses)
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()
        if losses:  # on the rank of the last stage
            print(f"epoch {epoch}: loss {float(sum(losses)) / len(losses):.6f}", flush=True)
dist.destroy_process_group()
