"""One job of FSDP2: shards inside each node, and gradients in eight bits between the nodes.

    torchrun --standalone --nproc-per-node 4 recipes/minimal_fsdp.py
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 recipes/minimal_fsdp.py

On one machine, the first half of the ranks stands for one node, the other half for another.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from crossover_ddp import CompressedState, Int8, compressed_hook
from crossover_ddp.fsdp import register_comm_hook

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
nodes = max(2, dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"]))
shape = (nodes, dist.get_world_size() // nodes)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("between", "inside"))

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)

torch.manual_seed(0)  # the nodes start with the same parameters
blocks = [nn.Sequential(nn.Linear(n, 256), nn.ReLU()) for n in (64, 256, 256)]
model = nn.Sequential(*blocks, nn.Linear(256, 10)).to(device)
for block in blocks:
    fully_shard(block, mesh=mesh["inside"])
root = fully_shard(model, mesh=mesh["inside"])
state = CompressedState(codec=Int8(), process_group=mesh["between"].get_group())
register_comm_hook(root, state, compressed_hook)  # the added lines
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
