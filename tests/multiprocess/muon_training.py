"""A small model trained by Muon and AdamW, with our hook, with plain DDP, or by hand with the owners' sums."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon

from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness.oracles import tree_sum

TINY_MB = 0.004
VOCABULARY, WIDTH = 11, 12


class Mixture(nn.Module):
    """Tall, wide, square and transposed matrices, and parameters that Muon does not take."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.wide = nn.Linear(2 * WIDTH + 5, WIDTH)
        self.tall = nn.Linear(WIDTH, 2 * WIDTH + 5)
        self.square = nn.Linear(WIDTH, WIDTH, bias=False)
        self.turned = nn.Parameter(torch.randn(3 * WIDTH, WIDTH).mul_(0.2).T)
        self.back = nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.is_short = False
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.is_short:  # uses none of Muon's matrices
            return self.head(self.norm(x))  # type: ignore[no-any-return]
        x = x + self.wide(torch.tanh(self.tall(self.norm(x))))
        x = x + self.square(torch.tanh(x))
        x = x + self.back(torch.relu(x @ self.turned))
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def matrices(self) -> list[nn.Parameter]:
        return [self.wide.weight, self.tall.weight, self.square.weight, self.turned, self.back.weight]


def optimizers(module: Mixture, **settings: Any) -> tuple[Muon, AdamW]:
    """Muon has two groups with different settings."""
    matrices = module.matrices()
    others = [p for p in module.parameters() if all(p is not each for each in matrices)]
    groups = [
        {"params": matrices[:2], "adjust_lr_fn": "match_rms_adamw"},
        {"params": matrices[2:], "weight_decay": 0.01, "momentum": 0.9},
    ]
    return Muon(groups, **{"lr": 0.02, **settings}), AdamW(others, lr=3e-3)


def mixture(seed: int = 3, dtype: torch.dtype = torch.float32) -> Mixture:
    torch.manual_seed(seed)
    return Mixture(dtype)


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (4, 7), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model with both optimizers and their schedulers; ``hook``: with ours."""

    def __init__(
        self, module: Mixture, *, hook: bool, options: dict[str, Any] | None = None, **settings: Any
    ):
        scale = settings.pop("loss_scale", 1.0)
        self.module = module
        self.model = DistributedDataParallel(module, **{"bucket_cap_mb": TINY_MB, **(options or {})})
        self.muon, self.adamw = optimizers(module, **settings)
        self.schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(each, 400) for each in (self.muon, self.adamw)
        ]
        self.state: MuonState | None = None
        if hook:
            self.state = MuonState(self.muon, loss_scale=scale)
            self.model.register_comm_hook(self.state, muon_hook)

    def step(self, tokens: Tensor) -> None:
        loss_of(self.model, tokens).backward()
        self.update()

    def update(self) -> None:
        self.muon.step()
        self.adamw.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]


class ByOwners:
    """torch's Muon fed the sums as the owners make them, without our package."""

    def __init__(self, module: Mixture, **settings: Any) -> None:
        self.module = copy.deepcopy(module)
        self.muon, self.adamw = optimizers(self.module, **settings)
        self.schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(each, 400) for each in (self.muon, self.adamw)
        ]

    def backward(self, tokens: Tensor, others: list[Tensor | None]) -> None:
        """Sum the matrices' gradients by hand; ``others``: the gradients of the other parameters, by parameter."""
        loss_of(self.module, tokens).backward()
        world_size = dist.get_world_size()
        for parameter in self._in_groups():
            assert parameter.grad is not None
            mine = parameter.grad.contiguous() / world_size
            everyone = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(everyone, mine)
            parameter.grad.copy_(tree_sum(everyone))
        matrices = {id(each) for each in self.module.matrices()}
        for parameter, gradient in zip(self.module.parameters(), others, strict=True):
            if id(parameter) not in matrices:
                parameter.grad = gradient

    def _in_groups(self) -> Iterator[Tensor]:
        for group in self.muon.param_groups:
            yield from group["params"]

    def update(self) -> None:
        self.muon.step()
        self.adamw.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
