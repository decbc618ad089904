"""torch's Muon in two halves, what an owner computes of a matrix and what all ranks do with it; how directions travel.

[Note: torch's own arithmetic] Both halves call the functions that ``torch.optim.Muon`` is made of, in its order, so
that results are equal to the last bit whatever torch does in them. They are private to torch: `check_torch` compares
both halves with a whole step, once a process, and refuses a torch in which they are not the same.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim import _muon as torch_muon

from crossover_ddp.errors import UnsupportedConfigurationError

MOMENTUM: Final = "momentum_buffer"
"""Key of the momentum in what torch's Muon keeps of a parameter."""

Settings = Mapping[str, Any]


def settings_of(group: Mapping[str, Any]) -> Settings:
    """Return what of a parameter group enters a direction, at this moment."""
    return {name: group[name] for name in ("momentum", "nesterov", *_ns_names())}


@functools.cache
def _ns_names() -> tuple[str, ...]:
    """Name the settings of torch's Newton-Schulz, which differ between versions of torch."""
    try:
        names = list(inspect.signature(torch_muon._zeropower_via_newtonschulz).parameters)
    except AttributeError:
        raise _unknown_torch("has no torch.optim._muon._zeropower_via_newtonschulz") from None
    return tuple(names[1:])


def direction_of(
    gradient: Tensor, momentum: Tensor, new_momentum: Tensor, settings: Settings
) -> Tensor:
    """Return the direction of a matrix, bfloat16, as torch's Muon computes it.

    Args:
        gradient: mean over the ranks, of the matrix's shape and order in memory.
        momentum: before the step; not changed.
        new_momentum: filled with the momentum after the step; may be ``momentum`` itself.
        settings: of the matrix's group.
    """
    torch.lerp(momentum, gradient, 1 - settings["momentum"], out=new_momentum)
    update = (
        gradient.lerp(new_momentum, settings["momentum"]) if settings["nesterov"] else new_momentum
    )
    if update is new_momentum and update.dtype == torch.bfloat16:
        update = (
            update.clone()
        )  # torch before 2.15 normalises its argument in place (pytorch#194664)
    return torch_muon._zeropower_via_newtonschulz(
        update, **{name: settings[name] for name in _ns_names()}
    )


def take_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Update ``parameter`` as torch's Muon does, with the group's learning rate and weight decay of this moment."""
    # A tensor stays one, as in torch: it rounds in its own type.
    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    adjusted_lr = torch_muon._adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(direction, alpha=-adjusted_lr)


def newton_schulz_flop(shape: Sequence[int], steps: int = 5) -> int:
    """Return the floating-point operations of one Newton-Schulz of a matrix.

    With m <= n its sides, a step multiplies X·Xᵀ (2·m²·n), G·G (2·m³) and G·X (2·m²·n); five steps cost
    20·m²·n + 10·m³.

    Args:
        shape: rows and columns.
        steps: ``ns_steps`` of the parameter group.
    """
    small, large = sorted(shape)
    return steps * (4 * small**2 * large + 2 * small**3)


def direction_numel(numel: int, itemsize: int) -> int:
    """Return how many elements, of ``itemsize`` bytes, a direction of ``numel`` numbers takes; the last one in part."""
    return -(-numel * torch.bfloat16.itemsize // itemsize)


def direction_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """Return the direction in ``flat`` in the order in memory that torch's has, so that sums take the same way.

    Args:
        flat: as many elements as `direction_numel` says, or more.
        shape: of the matrix.
    """
    rows, columns = shape
    flat = flat.view(torch.bfloat16)[: rows * columns]
    return flat.view(columns, rows).T if rows > columns else flat.view(rows, columns)


def matrix_view(flat: Tensor, like: Tensor) -> Tensor:
    """Return the gradient in ``flat`` as a matrix of the shape of ``like`` and, unless that has gaps, its strides."""
    if not like.is_contiguous() and like.T.is_contiguous():
        return flat.view(like.shape[1], like.shape[0]).T
    return flat.view(like.shape)


@functools.cache
def check_torch() -> None:
    """Refuse a torch whose Muon is not made of our two halves. Takes about a millisecond, once a process."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (3, 5)):
        start, *gradients = (
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            for _ in range(3)
        )
        whole, halves = start.clone().requires_grad_(), start.clone()
        muon = Muon([whole], lr=0.3, weight_decay=0.2, momentum=0.9)
        momentum, new_momentum = torch.zeros_like(halves), torch.zeros_like(halves)
        group = muon.param_groups[0]
        for gradient in gradients:
            whole.grad = gradient.clone()
            muon.step()
            with torch.no_grad():
                direction = direction_of(gradient, momentum, new_momentum, group)
                take_step(halves, direction, group)
            momentum, new_momentum = new_momentum, momentum
        if direction.dtype != torch.bfloat16 or not torch.equal(whole, halves):
            raise _unknown_torch("computes another step than its parts do")
        if not torch.equal(momentum, muon.state[whole][MOMENTUM]):
            raise _unknown_torch("keeps another momentum")


def _unknown_torch(what: str) -> UnsupportedConfigurationError:
    return UnsupportedConfigurationError(
        f"expected a torch.optim.Muon as of torch 2.11 to 2.15, got torch {torch.__version__}, which {what}; "
        "use plain DDP, or one of these versions"
    )
