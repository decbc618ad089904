"""What decoupled training must know of another hook's state that preconditions its gradients: K-FAC's."""

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.turns import Turn
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex


class Deferrable(Protocol):
    """A state of another hook whose buckets may come back late; ``KFACState`` is one."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks of the job."""

    @property
    def mutex(self) -> GPUMutex | None:
        """The job's, or None."""

    def defer(self, state: object, flush: Callable[[], None]) -> None:
        """Become part of ``state``; ``flush`` finishes what is under way."""

    def said(self) -> dict[str, object]:
        """Return what all ranks must have in common when training begins or goes on."""

    def enter(self, bucket: dist.GradBucket) -> None:
        """End what a backward pass has left that did not end, if another one begins with ``bucket``."""

    def refuse(self, bucket: dist.GradBucket) -> None:
        """Note that ``bucket`` is not exchanged."""

    def exchange(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,
        *,
        state: object,
        turn: Turn | None,
        hands_back: bool = False,
    ) -> Bucket:
        """Start the exchange of ``bucket``. Raises what makes it impossible."""


def check_deferrable(
    kfac: Deferrable,
    *,
    process_group: dist.ProcessGroup | None,
    mutex: GPUMutex | None,
    codec: object,
    owners: str | None,
) -> None:
    """Refuse what K-FAC cannot be combined with in decoupled training, or what is no ``KFACState``."""
    if not hasattr(kfac, "defer"):
        raise TypeError(f"expected a KFACState, got kfac={type(kfac).__name__}; see DecoupledState")
    if codec is not None or owners is not None:
        raise UnsupportedConfigurationError(
            f"expected codec=None and owners=None with kfac=, got codec={codec!r} and owners={owners!r}: layers have "
            "owners already, whose directions travel; use one of them"
        )
    if kfac.mutex is not mutex:
        raise ValueError(
            f"expected one mutex, got mutex={mutex!r} and a KFACState with mutex={kfac.mutex!r}; pass it to both"
        )
    if (group := resolve_group(kfac.process_group)) is not resolve_group(process_group):
        raise ValueError(
            f"expected one process group, got a KFACState of another, of {group.size()} ranks; pass process_group= to "
            "both states"
        )
