"""Small jobs with virtual ranks, by public names only, and a hash of all that a job computes."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils.data import Dataset

import crossover_ddp as ddp

CLASSES: Final = 8
LENGTH: Final = 12  # tokens in a sample for the GPT
SEED: Final = 3


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, CLASSES)
    )


def cnn() -> nn.Module:
    """Return a network with BatchNorm, whose buffers depend on the micro-batches."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.GELU(),
        nn.Linear(24, 24),
        nn.GELU(),
        nn.Linear(24, CLASSES),
    )


class GPT(nn.Module):
    """A transformer of two blocks, with dropout."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CLASSES, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, "gelu", batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x).transpose(1, 2)
        return logits


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {"mlp": mlp, "cnn": cnn, "gpt": GPT}
SHAPES: Final = {"mlp": (20,), "cnn": (3, 8, 8)}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random noise, which must not depend on the number of ranks."""

    def __init__(self, kind: str, count: int, noise: float = 0.1) -> None:
        self._noise = noise
        made = torch.Generator().manual_seed(7)
        self._is_text = kind == "gpt"
        if self._is_text:
            text = torch.randint(0, CLASSES, (count, LENGTH + 1), generator=made)
            self._inputs, self._targets = text[:, :-1], text[:, 1:]
        else:
            self._inputs = torch.randn(count, *SHAPES[kind], generator=made)
            self._targets = torch.randint(0, CLASSES, (count,), generator=made)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._inputs[index]
        has_noise = self._noise and not self._is_text
        return (x + self._noise * torch.randn(x.shape) if has_noise else x), self._targets[index]


def optimizers_of(kind: str, module: nn.Module) -> list[Optimizer]:
    if kind == "sgd":
        return [SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)]
    if kind == "adamw":
        return [AdamW(module.parameters(), lr=2e-3)]
    matrices, others = ddp.muon_parameters(module)
    return [Muon(matrices, lr=0.02), AdamW(others, lr=2e-3)]


def hook_of(kind: str, optimizers: Sequence[Optimizer]) -> tuple[Any, Any]:
    if kind == "split":
        return None, ddp.reduce_scatter_all_gather_hook
    if kind == "crossover":
        return ddp.CrossoverState(), ddp.crossover_hook
    if kind == "decoupled":
        return ddp.DecoupledState(optimizers[0], defer="always"), ddp.decoupled_hook
    if kind == "owners":
        return ddp.OwnerState(optimizers), ddp.owner_hook
    assert kind == "muon", kind
    return ddp.MuonState(optimizers[0]), ddp.muon_hook  # type: ignore[arg-type]


@dataclass
class Job:
    """A job, which can be run on any number of ranks."""

    model: str = "cnn"
    optimizer: str = "adamw"
    count: int = 8
    hook: str = "split"
    steps: int = 6
    samples: int = 40  # for each virtual rank: epochs of 5 steps
    noise: float = 0.1  # of each sample; 0: a sample needs no random numbers
    clips: str = ""  # "torch" or "state"
    autocast: torch.dtype | None = None
    scale: float = 0.0  # of a GradScaler; 0: none
    zeroes: bool = False  # whether zero_grad writes zeros
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    loader: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of DDP


class Running:
    """A job on the ranks of the default process group.

    Args:
        job: the job.
        hook: a hook without a state to register instead of the job's; None: no hook.
    """

    def __init__(self, job: Job, *, hook: Any = "the job's") -> None:
        self.job = job
        self.device = torch.device(job.device)
        if job.device == "cuda":
            self.device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        torch.manual_seed(1)
        self.module = MODELS[job.model]().to(self.device, job.dtype)
        self.optimizers = optimizers_of(job.optimizer, self.module)
        options = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True, **job.options}
        self.model = DistributedDataParallel(self.module, **options)
        self.state: Any = None
        if hook == "the job's":
            self.state, hook = hook_of(job.hook, self.optimizers)
        if hook is not None:
            self.model.register_comm_hook(self.state, hook)
        self.ranks = ddp.VirtualRanks(self.model, job.count, seed=SEED)
        dataset = Augmented(job.model, job.samples * job.count, job.noise)
        self.loader = self.ranks.loader(dataset, 8, **job.loader)
        self.scaler = torch.amp.GradScaler(
            job.device, init_scale=job.scale or 1.0, growth_interval=3, enabled=bool(job.scale)
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(
        self, until: int | None = None, within: Callable[["Running"], None] = lambda running: None
    ) -> "Running":
        """Train until that number of steps. ``within`` is called after each backward."""
        last = self.job.steps if until is None else until
        while self.ranks.step < last:
            for inputs, targets in self.ranks.micro_batches(self.loader):
                self.backward(inputs.to(self.device), targets.to(self.device))
                within(self)
                if self.ranks.is_step_end:
                    self.step()
                    if self.ranks.step == last:
                        break
        return self

    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        job = self.job
        if inputs.is_floating_point():
            inputs = inputs.to(job.dtype)
        with torch.autocast(job.device, job.autocast, enabled=job.autocast is not None):
            loss = F.cross_entropy(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.ranks.report(loss)

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer) if self.job.clips else None
        if self.job.clips == "torch":
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
            self.norms.append(float(norm))
        elif self.job.clips == "state":
            self.norms.append(float(self.state.clip_grad_norm_(0.5)))
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        if self.job.scale:
            self.scaler.update()
            self.norms.append(self.scaler.get_scale())
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.job.zeroes)
        self.losses += self.ranks.losses()

    def checkpoint(self) -> dict[str, Any]:
        """Return all that the job needs to resume. **Collective**."""
        if self.state is None:
            saved = {
                "model": self.module.state_dict(),
                "optimizer": [each.state_dict() for each in self.optimizers],
            }
        else:
            saved = dict(self.state.checkpoint(self.optimizers))
        more = {"losses": self.losses, "norms": self.norms, "scaler": self.scaler.state_dict()}
        return {**saved, "ranks": self.ranks.state_dict(), **more}

    def restore(self, saved: Mapping[str, Any]) -> "Running":
        if self.state is None:
            self.module.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
                optimizer.load_state_dict(state)
        else:
            names = ("ranks", "losses", "norms", "scaler")
            kept = {name: value for name, value in saved.items() if name not in names}
            self.state.restore(kept, self.optimizers)
        self.ranks.load_state_dict(saved["ranks"])
        self.losses, self.norms = [*saved["losses"]], [*saved["norms"]]
        if self.job.scale:
            self.scaler.load_state_dict(saved["scaler"])
        return self

    def hash(self) -> str:
        """Return a hash of parameters, buffers, optimizer state and all losses. **Collective**.

        All ranks return the same. The buffers are rank 0's: others' are replaced by these when the
        next forward begins, as always with DDP.
        """
        saved = self.checkpoint()
        parts = {name: saved[name] for name in ("model", "optimizer", "losses", "norms")}
        hashes: list[Any] = [None] * dist.get_world_size()
        on_all_ranks = hash_of([*self.module.parameters()], saved["optimizer"], self.losses)
        dist.all_gather_object(hashes, (on_all_ranks, hash_of(parts)))
        assert len({of_rank for of_rank, _ in hashes}) == 1, "ranks differ"
        return str(hashes[0][1])

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def hash_of(*things: Any) -> str:
    """Return a hash of nested tensors and numbers."""
    digest = hashlib.sha256()

    def feed(thing: Any) -> None:
        if isinstance(thing, Tensor):
            digest.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
            flat = thing.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(thing, Mapping):
            for key in sorted(thing, key=str):
                digest.update(str(key).encode())
                feed(thing[key])
        elif isinstance(thing, Sequence) and not isinstance(thing, str):
            for each in thing:
                feed(each)
        else:
            digest.update(repr(thing).encode())

    feed(things)
    return digest.hexdigest()[:16]


def hash_of_job(rank: int, world_size: int, job: Job) -> str:
    """Run a job in the ranks of `run_ranks`, and return its hash."""
    torch.set_num_threads(1)
    running = Running(job).run()
    found = running.hash()
    running.close()
    return found
