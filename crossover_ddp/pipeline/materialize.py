"""Gives layers that were built on the meta device memory and initial values, on one rank's device.

[Note: reset order] Modules are reset from the last to the first, children before their parent. A
parent can thus change the values of its children, as in a constructor. The values of a shared
parameter are those of the first module that has it, as if a later one had been tied to it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from crossover_ddp.errors import UnsupportedConfigurationError

from .chain import LayerChain


def materialized(
    layers: Sequence[nn.Module], device: torch.device | str, recomputed: Collection[int] = ()
) -> LayerChain:
    """Move layers to a device, and initialize those on the meta device there.

    A module with parameters or buffers on the meta device gets empty ones on the device. Its
    ``reset_parameters()`` then sets their values. Layers with values keep them. Shared parameters
    stay shared.

    Args:
        layers: the layers. They are changed in place.
        device: the device.
        recomputed: the places of the layers that keep only their input for backward.

    Returns the layers as a chain.

    On failure: `UnsupportedConfigurationError` if a module on the meta device has no
    ``reset_parameters()``; see `check_resets`.
    """
    check_resets(layers)
    chain = LayerChain(*layers, recomputed=recomputed)
    unset = [module for module in chain.modules() if _is_unset(module)]
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in unset:
        for name, tensor in _own_tensors(module):
            if tensor.is_meta:
                if tensor not in made:
                    made[tensor] = _empty_like(tensor, device)
                setattr(module, name, made[tensor])
    for module in reversed(unset):  # [Note: reset order]
        reset: Any = module.reset_parameters
        reset()
    return chain.to(device)


def check_resets(layers: Iterable[nn.Module]) -> None:
    """Check that all modules on the meta device can be initialized.

    On failure: `UnsupportedConfigurationError` with the names of the modules that cannot.
    """
    missing = [
        f"{name} ({type(module).__name__})"
        for name, module in nn.Sequential(*layers).named_modules()
        if _is_unset(module) and not callable(getattr(module, "reset_parameters", None))
    ]
    if missing:
        raise UnsupportedConfigurationError(
            "expected modules on the meta device to have reset_parameters(), got none of "
            f"{', '.join(missing)}; write one that sets all their parameters and buffers, or build "
            "these layers on the CPU"
        )


def _is_unset(module: nn.Module) -> bool:
    return any(tensor.is_meta for _, tensor in _own_tensors(module))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's parameters and buffers by name, without those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _empty_like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
