"""K-FAC's arguments: hyper-parameters that may change with the step, and what is refused."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ._capture import Layer
from .errors import UnsupportedConfigurationError

Hyper = float | Callable[[int], float]


class HyperNow(NamedTuple):
    """The hyper-parameters in one step, and what is due in it."""

    damping: float
    decay: float
    kl_clip: float | None
    takes_factors: bool
    inverts: bool


class Hypers(NamedTuple):
    """The hyper-parameters, each a number or a function of the step."""

    damping: Hyper
    factor_decay: Hyper
    kl_clip: Hyper | None
    factor_update_steps: int | Callable[[int], int]
    inv_update_steps: int | Callable[[int], int]

    def at(self, step: int) -> HyperNow:
        """Return their values in ``step``; raise ``ValueError`` for one that makes no sense."""
        damping, decay, kl_clip, every, inverts_every = (
            value(step) if callable(value) else value for value in self
        )
        for name, period in (("factor_update_steps", every), ("inv_update_steps", inverts_every)):
            if not isinstance(period, int) or period < 1:
                raise ValueError(
                    f"expected a whole number of steps, 1 or more, got {name}={period!r}; 1 means every step"
                )
        assert damping is not None and decay is not None and every is not None and inverts_every is not None
        if not damping > 0:
            raise ValueError(f"expected damping > 0, got damping={damping}; 0.001 is usual")
        if not 0 <= decay < 1:
            raise ValueError(f"expected 0 <= factor_decay < 1, got factor_decay={decay}; 0.95 is usual")
        if kl_clip is not None and not kl_clip > 0:
            raise ValueError(f"expected kl_clip > 0, got kl_clip={kl_clip}; pass None for no clip")
        return HyperNow(damping, decay, kl_clip, step % int(every) == 0, step % int(inverts_every) == 0)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {name}={value!r}")


def check_parameters(layers: Sequence[Layer], model: nn.Module) -> None:
    """Refuse models that are not whole on one device, and parameters whose range is too small."""
    sharded = [name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")]
    if sharded:
        raise UnsupportedConfigurationError(
            f"expected whole parameters, got {sharded[0]} sharded over ranks (DTensor); K-FAC works with data "
            "parallelism only: use DistributedDataParallel without tensor or model parallelism"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedConfigurationError(
            f"expected a model on one device, got parameters on {sorted(map(str, devices))}; K-FAC works with data "
            "parallelism only: keep each replica on one device"
        )
    for layer in layers:
        if layer.weight.dtype == torch.float16:
            raise UnsupportedConfigurationError(
                f"expected parameters of float32, float64 or bfloat16, got {layer.name}.weight of float16, whose range "
                "is too small for preconditioned gradients; keep the parameters in float32 and use autocast, or skip it"
            )


def check_together(*, kl_clip: object, optimizer: object, inversion: str, mutex: object) -> None:
    """Raise ``ValueError`` for arguments of which one needs, or excludes, the other."""
    if kl_clip is not None and optimizer is None:
        raise ValueError(
            "expected the optimizer, whose learning rates enter the KL clip, got optimizer=None; pass it, or "
            "kl_clip=None"
        )
    if inversion == "background" and mutex is not None:
        raise ValueError(
            "expected inversion='at_once' with a mutex, got inversion='background'; solvers made in the "
            "background would compute outside of the turn"
        )
