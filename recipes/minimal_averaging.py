"""One job whose ranks do not wait for the network: parameters are averaged later, in background.

    torchrun --standalone --nproc-per-node 2 recipes/minimal_averaging.py
    torchrun --standalone --nproc-per-node 2 recipes/minimal_averaging.py --elastic

For links on which an exchange takes longer than the compute of a step. Losses differ from those of
plain DDP: see docs/averaging.md.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from crossover_ddp import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook

parser = argparse.ArgumentParser()
parser.add_argument(
    "--elastic", action="store_true", help="ranks at their own pace, tied to a centre"
)
args = parser.parse_args()

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
model = DistributedDataParallel(network, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state: ElasticState | LocalSGDState  # the added lines
if args.elastic:
    state = ElasticState(sync_every=4)
    model.register_comm_hook(state, elastic_hook)
else:
    state = LocalSGDState(sync_every=4, delay=1, fragments=4)
    model.register_comm_hook(state, local_sgd_hook)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)
state.average()  # one model again, before it is saved or evaluated
state.close()
dist.destroy_process_group()
