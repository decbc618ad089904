"""One job with `AutoState`: loops with torchvision's and nanoGPT's order of calls.

The loops are our own. Only lines that docs/loops.md quotes are those projects'. See
loops_worker.py.
"""

import argparse
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.harness import documents
from tests.recipes.loops_common import STEPS, WIDTH, Job, Run, batches, shown, watched

EPOCHS = 3

TORCHVISION = """
def main(args, model):
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    model_without_ddp = model.module
    if args.model_ema:
        model_ema = utils.ExponentialMovingAverage(model_without_ddp, device=device, decay=1.0 - alpha)
    training(model, model_ema)
    return locals().get("state")

used = main(args, model)
"""


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model: nn.Module, decay: float, device: str) -> None:
        def average(mean: torch.Tensor, new: torch.Tensor, _: Any) -> torch.Tensor:
            return decay * mean + (1 - decay) * new

        super().__init__(model, device, average, use_buffers=True)


def torchvision(job: Job, diff: str, clip: float | None = None) -> Run:
    """Train with ``--amp --model-ema``, and with ``--clip-grad-norm`` if `clip` is given."""
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def train_one_epoch(model: nn.Module, average: Any, epoch: int) -> None:
        model.train()
        for step, (inputs,) in enumerate(batches(8)):
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                loss = job.loss(model(inputs + dist.get_rank()))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            if step % 2 == 0:
                average.update_parameters(model)
                if epoch < 1:  # as in warm-up
                    average.n_averaged.fill_(0)

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> torch.Tensor:
        output = model.eval()(torch.ones(2, WIDTH))
        dist.all_reduce(metric := output.mean())
        return metric

    def training(model: nn.Module, average: Any) -> None:
        parts: dict[str, Any] = {
            "model": net,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "average": average,
            "scaler": scaler,
        }
        path, first = job.directory / "checkpoint.pth", 0
        if job.resume:
            saved = torch.load(path)
            first = saved.pop("epoch") + 1
            for name, values in saved.items():
                parts[name].load_state_dict(values)
        for epoch in range(first, EPOCHS):
            train_one_epoch(model, average, epoch)
            scheduler.step()
            evaluate(model)
            job.losses += [evaluate(average).item()] if epoch == EPOCHS - 1 else []
            saved = {name: each.state_dict() for name, each in parts.items()}
            if dist.get_rank() == 0:
                torch.save({**saved, "epoch": epoch}, path)
        run.weights += [each.clone() for each in average.parameters()]

    names = {
        "args": argparse.Namespace(distributed=True, model_ema=True),
        "model": net,
        "optimizer": optimizer,
        "utils": SimpleNamespace(ExponentialMovingAverage=ExponentialMovingAverage),
        "device": "cpu",
        "alpha": 0.1,
        "training": training,
        "torch": torch,
    }
    source = documents.patched(TORCHVISION, diff).replace(", device_ids=[args.gpu]", "")
    with watched(net) as run:
        shown(source, names)
    run.state = names["used"]
    return run


NANOGPT = """
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
if init_from == 'resume':
    optimizer.load_state_dict(checkpoint['optimizer'])
if compile:
    model = torch.compile(model) # requires PyTorch 2.0
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module
for iter_num in range(first, 12):
    for param_group in optimizer.param_groups:
        lr = rate(iter_num)
        param_group['lr'] = lr
    if iter_num % eval_interval == 0 and master_process:
        estimate_loss(model)
        if iter_num > 0:
            save(iter_num, {
                    'model': raw_model.state_dict(),
                    'optimizer': optimizer.state_dict(),
            })
    accumulate(model, scaler)
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""


class Words(nn.Module):
    """Predicts the next of 16 words. The embedding is the head, as nanoGPT's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(16, WIDTH)
        self.hidden = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inside = self.embedding(words[:, :-1])
        logits = self.head(inside + self.hidden(inside))
        return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self, decay: float, rate: float, betas: Any, _: str) -> Any:
        """Return AdamW with nanoGPT's groups: only tensors of two or more dimensions decay."""
        groups = [
            {
                "params": [p for p in self.parameters() if (p.dim() >= 2) == decays],
                "weight_decay": by,
            }
            for decays, by in ((True, decay), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas)


def nanogpt(job: Job, source: str, *, compile: bool = False, clip: float = 0.0) -> Run:
    """Train with a loop like ``NANOGPT``."""
    net = Words()
    path, first = job.directory / "ckpt.pt", 0
    checkpoint: dict[str, Any] = torch.load(path) if job.resume else {}
    if job.resume:
        net.load_state_dict(checkpoint["model"])
        first = checkpoint["iter_num"]

    def accumulate(model: DistributedDataParallel, scaler: Any) -> None:
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            torch.manual_seed(100 * names["iter_num"] + 10 * micro_step + dist.get_rank())
            loss = model(torch.randint(16, (2, 5))) / 2
            scaler.scale(job.note(loss) if micro_step else loss).backward()

    @torch.no_grad()
    def estimate_loss(model: nn.Module) -> None:
        model.eval()(torch.zeros(2, 5, dtype=torch.long))
        model.train()

    def save(iter_num: int, saved: dict[str, Any]) -> None:
        torch.save({**saved, "iter_num": iter_num}, path)

    names: dict[str, Any] = {
        "model": net,
        "weight_decay": 0.1,
        "learning_rate": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "device_type": "cpu",
        "init_from": "resume" if job.resume else "scratch",
        "checkpoint": checkpoint,
        "compile": compile,
        "ddp": True,
        # The compiler wants buckets of at least 1 MiB.
        "DDP": partial(DistributedDataParallel, bucket_cap_mb=1 if compile else 0.0005),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "grad_clip": clip,
        "eval_interval": STEPS,
        "master_process": dist.get_rank() == 0,
        "first": first,
        "rate": lambda step: 0.01 / (1 + step),
        "accumulate": accumulate,
        "estimate_loss": estimate_loss,
        "save": save,
        "torch": torch,
    }
    with watched(net) as run:
        shown(source.replace(", device_ids=[ddp_local_rank]", ""), names)
    run.state = names.get("state")
    if "muon" in names:
        assert _decays(names.get("adamw") or names["optimizer"]) == [(1, 0.1), (2, 0.0)]
        assert _decays(names["muon"]) == [(2, 0.1)]
    return run


def _decays(optimizer: torch.optim.Optimizer) -> list[tuple[int, float]]:
    """Return the number of parameters and the weight decay of each group."""
    return [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]


def without_hook(source: str) -> str:
    """Return a loop with Muon as it trains by plain DDP. It clips the same parameters."""
    lines = r"    if iter_num % eval_interval == 0:\n        saved = .*\n| +(state = |model.register_comm).*\n"
    hookless = re.sub(rf"^({lines})", "", source, flags=re.M)
    return hookless.replace(
        "saved['optimizer']", "[muon.state_dict(), optimizer.state_dict()]"
    ).replace("clip_grad_norm_(model.parameters(), ", "clip_grad_norm_(others, ")


def with_adamw(source: str) -> str:
    """Return a loop whose ``optimizer`` is named ``adamw``."""
    return re.sub(r"(?<!')\boptimizer\b", "adamw", source)
