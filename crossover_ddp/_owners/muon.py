"""Take the step of torch's Muon in two halves.

An owner computes the direction of a matrix, and all ranks apply it.

[Note: torch's own arithmetic] Both halves call the functions that ``torch.optim.Muon`` itself
calls, in the same order, so the results are bitwise equal whatever torch computes in them. These
functions are private to torch. So `check_torch` compares the two halves with a whole step, once per
process, and refuses a version of torch in which the results differ.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Muon

from crossover_ddp._ddp import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

# The key of the momentum in the state that torch's Muon keeps for a parameter.
MOMENTUM: Final = "momentum_buffer"

Settings = Mapping[str, Any]


def settings_of(group: Mapping[str, Any]) -> Settings:
    """Return the current settings in a parameter group that affect a direction."""
    return {name: group[name] for name in ("momentum", "nesterov", *_ns_names())}


@functools.cache
def _ns_names() -> tuple[str, ...]:
    """Return the names of the Newton-Schulz settings, which differ between versions of torch."""
    if torch_private.newton_schulz is None or torch_private.adjusted_lr is None:
        raise _unknown_torch("lacks functions that torch.optim.Muon was made of")
    names = list(inspect.signature(torch_private.newton_schulz).parameters)
    return tuple(names[1:])  # the first one is the matrix


def direction_of(
    gradient: Tensor, momentum: Tensor, new_momentum: Tensor, settings: Settings
) -> Tensor:
    """Return the direction of a matrix in bfloat16, as torch's Muon computes it.

    Args:
        gradient: the mean gradient over the ranks, in the matrix's shape and memory order.
        momentum: the momentum before the step. It is not changed, unless it is ``new_momentum``.
        new_momentum: receives the momentum after the step. It may be ``momentum`` itself.
        settings: the result of `settings_of` for the matrix's group.
    """
    torch.lerp(momentum, gradient, 1 - settings["momentum"], out=new_momentum)
    update = new_momentum
    if settings["nesterov"]:
        update = gradient.lerp(new_momentum, settings["momentum"])
    elif update.dtype == torch.bfloat16:
        # Before torch 2.15 Newton-Schulz normalises its argument in place (pytorch#194664).
        update = update.clone()
    assert torch_private.newton_schulz is not None  # or `_ns_names` has raised
    return torch_private.newton_schulz(update, **{name: settings[name] for name in _ns_names()})


def take_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Update ``parameter`` as torch's Muon does, with the group's current settings."""
    # A tensor stays a tensor, as in torch, because it rounds in its own dtype.
    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    assert torch_private.adjusted_lr is not None  # or `check_torch` has raised
    adjusted_lr = torch_private.adjusted_lr(lr, group["adjust_lr_fn"], parameter.shape)
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(direction, alpha=-adjusted_lr)


def newton_schulz_flop(shape: Sequence[int], steps: int = 5) -> int:
    """Return the number of floating-point operations in one Newton-Schulz iteration of a matrix.

    If the matrix is m × n or n × m with m <= n, each step computes X·Xᵀ (2·m²·n), G·G (2·m³) and
    G·X (2·m²·n). Five steps cost 20·m²·n + 10·m³.

    Args:
        shape: the numbers of rows and columns.
        steps: the parameter group's ``ns_steps``.
    """
    small, large = sorted(shape)
    return steps * (4 * small**2 * large + 2 * small**3)


def direction_numel(numel: int, itemsize: int) -> int:
    """Return the number of elements of ``itemsize`` bytes that hold ``numel`` bfloat16 values."""
    return -(-numel * torch.bfloat16.itemsize // itemsize)


def direction_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """View ``flat`` as a direction with the memory order that torch uses, so that rounding agrees.

    Args:
        flat: a flat tensor of at least `direction_numel` elements.
        shape: the shape of the matrix.
    """
    rows, columns = shape
    flat = flat.view(torch.bfloat16)[: rows * columns]
    return flat.view(columns, rows).T if rows > columns else flat.view(rows, columns)


def matrix_view(flat: Tensor, like: Tensor) -> Tensor:
    """View ``flat`` as a matrix with the shape of ``like``, and its strides if it is dense."""
    if not like.is_contiguous() and like.T.is_contiguous():
        return flat.view(like.shape[1], like.shape[0]).T
    return flat.view(like.shape)


@functools.cache
def check_torch() -> None:
    """Refuse a version of torch whose Muon computes a different step than our two halves.

    The check takes about a millisecond and runs once per process.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (3, 5)):
        start, *gradients = (
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            for _ in range(3)
        )
        whole = start.clone().requires_grad_()
        halves = start.clone()
        muon = Muon([whole], lr=0.3, weight_decay=0.2, momentum=0.9)
        momentum = torch.zeros_like(halves)
        new_momentum = torch.zeros_like(halves)
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
            raise _unknown_torch("stores another momentum")


def _unknown_torch(difference: str) -> UnsupportedConfigurationError:
    return UnsupportedConfigurationError(
        "expected a torch.optim.Muon as of torch 2.11 to 2.15, got torch "
        f"{torch.__version__}, which {difference}; use plain DDP, or one of these versions"
    )
