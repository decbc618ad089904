"""Matrix optimizers as small as they can be, and a model trained with owners, with plain DDP, or with owners' sums."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.conformance.reference import adding
from tests.harness.training import Training, Way

TINY_MB: Final = 0.004
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


def mixture(seed: int = 3, dtype: torch.dtype = torch.float32) -> Mixture:
    torch.manual_seed(seed)
    return Mixture(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Soap(Optimizer):
    """Adam in the eigenbases of both sides' second moments: what SOAP (arXiv 2409.11321) does, without its options.

    It keeps lists and tuples, and a count of steps in the parameter group, on which the learning rate hangs.
    ``in_place``: products are made of the gradient where it lies, so that their bits depend on where that is.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.01, every: int = 2, in_place: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "every": every, "in_place": in_place, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient = gradient if group["in_place"] else gradient.clone()
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["sides"] = [gradient.new_zeros(size, size) for size in gradient.shape]
            state["bases"] = [torch.eye(size, dtype=gradient.dtype) for size in gradient.shape]
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["step"] += 1
        for side, term in zip(state["sides"], (gradient @ gradient.T, gradient.T @ gradient), strict=True):
            side.lerp_(term, 0.1)
        if (int(state["step"]) - 1) % group["every"] == 0:
            eye = [torch.eye(len(side), dtype=side.dtype) for side in state["sides"]]
            state["bases"] = tuple(
                torch.linalg.eigh(side + 1e-4 * one)[1] for side, one in zip(state["sides"], eye, strict=True)
            )
        left, right = state["bases"]
        turned = left.T @ gradient @ right
        state["first"].lerp_(gradient, 0.1)
        state["second"].lerp_(turned.square(), 0.05)
        direction = (left.T @ state["first"] @ right) / (state["second"].sqrt() + 1e-3)
        lr = group["lr"] / (1 + 0.01 * group["steps"])
        parameter.sub_(lr * (left @ direction @ right.T))


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, and the rest."""
    parameters = [*module.parameters()]
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def with_adamw(
    make: Callable[[list[nn.Parameter]], Optimizer],
) -> Callable[[nn.Module], list[Optimizer]]:
    def made(module: nn.Module) -> list[Optimizer]:
        matrices, others = halves(module)
        return [make(matrices), AdamW(others, lr=3e-3)]

    return made


def soap_in_groups(module: nn.Module) -> list[Optimizer]:
    """The second group has one matrix: most ranks own nothing of it."""
    matrices, others = halves(module)
    groups = [{"params": matrices[:-1]}, {"params": matrices[-1:], "lr": 0.02}]
    return [Soap(groups), SGD(others, lr=0.02, momentum=0.9)]


def muon_in_groups(module: Mixture, **settings: Any) -> list[Optimizer]:
    """Muon has two groups with different settings."""
    matrices = module.matrices()
    others = [p for p in module.parameters() if all(p is not each for each in matrices)]
    groups = [
        {"params": matrices[:2], "adjust_lr_fn": "match_rms_adamw"},
        {"params": matrices[2:], "weight_decay": 0.01, "momentum": 0.9},
    ]
    return [Muon(groups, **{"lr": 0.02, **settings}), AdamW(others, lr=3e-3)]


def adan(module: nn.Module) -> list[Optimizer]:
    import timm.optim  # takes a second or two

    return [timm.optim.create_optimizer_v2(module.parameters(), opt="adan", lr=3e-3)]


def timm_muon(module: nn.Module) -> list[Optimizer]:
    """A hybrid: Muon for matrices, AdamW for the rest, in one optimizer."""
    import timm.optim

    return [timm.optim.create_optimizer_v2(module, opt="muon", lr=0.02, weight_decay=0.05)]


MAKE: dict[str, Callable[[Any], list[Optimizer]]] = {
    "soap": with_adamw(Soap),
    "soap in place": with_adamw(functools.partial(Soap, in_place=True)),
    "soap in groups": soap_in_groups,
    "muon in groups": muon_in_groups,
    "muon without nesterov": functools.partial(muon_in_groups, nesterov=False, ns_steps=3),
    "adamw": lambda module: [AdamW(module.parameters(), lr=3e-3)],
    "adan": adan,
    "timm muon": timm_muon,
    "adagrad": lambda module: [torch.optim.Adagrad(module.parameters(), lr=3e-3)],
}


def by_owners(*_: Any) -> tuple[Any, Any]:
    """Plain DDP, whose gradients are added as owners do, by a hook of the tests' own."""
    return adding("tree")


def training_of(
    way: str | Way | None,
    rank: int,
    kind: str = "muon in groups",
    *,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Training:
    """Return a training of the mixture by optimizers of a kind, with a schedule; ``options``: of DDP."""
    return Training(
        way,
        rank,
        module=mixture(seed, dtype),
        optimizers=lambda model: MAKE[kind](model.module),
        schedule=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 100),
        loss=loss_of,
        **{"bucket_cap_mb": TINY_MB, **options},
    )
