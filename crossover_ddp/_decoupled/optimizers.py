"""Which optimizers a state may be made with."""

from collections.abc import Sequence

from torch.optim import Optimizer

from crossover_ddp._owners.interception import check_not_intercepted
from crossover_ddp.errors import UnsupportedConfigurationError

from .partial_optimizer import check_separable


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
