"""Gives layers that were built on the meta device memory and initial values, on one rank's device.

[Note: reset order] Modules are reset from the last to the first, children before their parent. A
parent can thus change the values of its children, as in a constructor. The values of a shared
parameter are those of the first module that has it, as if a later one had been tied to it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from crossover_ddp.errors import UnsupportedConfigurationError


def materialize(module: nn.Module, device: torch.device | str) -> dict[torch.Tensor, torch.Tensor]:
    """Move a module to a device, and initialize its tensors that are on the meta device.

    A submodule with parameters or buffers on the meta device gets empty ones on the device. Its
    ``reset_parameters()`` then sets their values. Other tensors keep their values. Shared
    parameters stay shared.

    Args:
        module: the module. It is changed in place.
        device: the device.

    Returns the new tensors by the tensors on the meta device that they replace.

    On failure: `UnsupportedConfigurationError` if a submodule on the meta device has no
    ``reset_parameters()``; see `check_resets`.
    """
    check_resets([*module.children()])
    unset = [each for each in module.modules() if _is_unset(each)]
    made: dict[torch.Tensor, torch.Tensor] = {}
    for each in unset:
        # Module.to_empty would replace a shared parameter by several.
        for name, tensor in _own_tensors(each):
            if tensor.is_meta:
                if tensor not in made:
                    made[tensor] = _empty_like(tensor, device)
                setattr(each, name, made[tensor])
    module.to(device)
    for each in reversed(unset):  # [Note: reset order]
        reset: Any = each.reset_parameters
        reset()
    return made


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
