"""One job whose gradients travel in eight bits.

    torchrun --standalone --nproc-per-node 2 recipes/minimal_compressed.py

Each rank keeps the rounding errors of its messages and adds them to its next gradient.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from crossover_ddp import CompressedState, Int8, compressed_hook

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
network.to(device)
model = DistributedDataParallel(network)
state = CompressedState(codec=Int8())
model.register_comm_hook(state, compressed_hook)  # the added lines
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
if dist.get_rank() == 0:
    print(f"rate {state.stats()['rate']:.3f}")
dist.destroy_process_group()
