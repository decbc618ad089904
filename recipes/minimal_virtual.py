"""Eight virtual ranks: one loss curve on any number of ranks, also when resumed on another number.

    torchrun --standalone --nproc-per-node 4 recipes/minimal_virtual.py --checkpoint run.pt --epochs 1
    torchrun --standalone --nproc-per-node 2 recipes/minimal_virtual.py --checkpoint run.pt --epochs 3

The second command resumes on two ranks. Its losses and its hash are those of all three epochs on four.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from crossover_ddp import VirtualRanks, reduce_scatter_all_gather_hook

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which the next line needs on a GPU
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)  # torchrun does not set it for a single rank

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip
model = DistributedDataParallel(network.to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.register_comm_hook(None, reduce_scatter_all_gather_hook)
ranks = VirtualRanks(model, 8, seed=0)
loader = ranks.loader(data, batch_size=8)  # of one virtual rank
if args.checkpoint is not None and args.checkpoint.exists():
    saved = torch.load(args.checkpoint, map_location=device)
    network.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    ranks.load_state_dict(saved["ranks"])

for epoch in range(loader.batch_sampler.epoch, args.epochs):  # type: ignore[union-attr]
    for inputs, labels in ranks.micro_batches(loader):
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        ranks.report(loss)
        if ranks.is_step_end:
            optimizer.step()
            optimizer.zero_grad()
    losses = ranks.losses()  # on all ranks
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f}", flush=True)
        if args.checkpoint is not None:
            saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(
                {**saved, "ranks": ranks.state_dict()}, part := Path(f"{args.checkpoint}.part")
            )
            part.replace(args.checkpoint)  # a job that is killed leaves a whole checkpoint behind
if dist.get_rank() == 0:
    weights = b"".join(each.cpu().numpy().tobytes() for each in network.state_dict().values())
    print(f"hash {hashlib.sha256(weights).hexdigest()[:16]}")
dist.destroy_process_group()
