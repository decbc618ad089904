"""Muon: each matrix is orthogonalised once, on its owner, at 0.75 of SGD's bytes.

    torchrun --standalone --nproc-per-node 2 recipes/minimal_muon.py

Losses are those of plain DDP with torch.optim.Muon: compare with CROSSOVER_DISABLE=1.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from crossover_ddp import MuonState, muon_hook, muon_parameters

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", type=Path)
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

digits = load_digits()
data = TensorDataset(
    torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

torch.manual_seed(0)
network = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
).to(device)
# Muon is for hidden matrices; biases, embeddings and the head go to another optimizer.
matrices, others = muon_parameters(network)
muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)
optimizers: list[torch.optim.Optimizer] = [muon, adamw]
model = DistributedDataParallel(network)
state = MuonState(muon)
model.register_comm_hook(state, muon_hook)  # the added lines

for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
saved = state.checkpoint(optimizers, to=0)  # on all ranks; rank 0 gets a dictionary for torch.save
if dist.get_rank() == 0:
    print(state)
    if args.checkpoint is not None:
        torch.save(saved, args.checkpoint)
dist.destroy_process_group()
