"""Which optimizers a state may be made with."""

from collections.abc import Sequence
from typing import Any, cast

from torch.optim import Optimizer

from crossover_ddp.errors import UnsupportedConfigurationError

from .interception import check_not_intercepted
from .partial_optimizer import check_separable


class _Groups:
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]


def as_one(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return what has the groups of all optimizers, and nothing else of one."""
    return cast(Optimizer, _Groups(optimizers))


def checked_optimizers(
    optimizer: Optimizer | Sequence[Optimizer], owners: str | None
) -> tuple[Optimizer, ...]:
    """Return the optimizers; refuse those that do not treat parameters one by one, or have a state already."""
    if owners not in (None, "layers"):
        raise ValueError(f"expected owners=None or 'layers', got owners={owners!r}; see DecoupledState")
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not optimizers:
        raise ValueError("expected at least one optimizer, got optimizer=(); pass those of the model")
    for each in optimizers:
        check_separable(each)
        check_not_intercepted(each)
    if owners is None and len(optimizers) > 1:
        raise UnsupportedConfigurationError(
            f"expected one optimizer with owners=None, got {len(optimizers)}; pass owners='layers', or one optimizer "
            "with several parameter groups"
        )
    return optimizers
