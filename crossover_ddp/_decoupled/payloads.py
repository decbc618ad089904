"""What travels in the place of buckets in decoupled training, made by another wing: K-FAC."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch.distributed as dist

from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._exchange.transfer import Payload
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex


class Payloads(Protocol):
    """Makes the payload of each bucket."""

    def payload(self, bucket: dist.GradBucket) -> Payload:
        """Return what travels in the bucket's place. On the hook's thread, in the order of buckets."""

    def end(self, wait: Callable[[], None] | None = None) -> Mapping[int, Collection[int]]:
        """Note that the step's last bucket was handed out, or refused.

        Args:
            wait: blocks until it has come back; None if backward does.

        Returns:
            By the number of a bucket, those of later ones whose payloads it needs, too.
        """


class Deferrable(Protocol):
    """A state of another hook whose payloads may come back late; ``KFACState`` is one."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks of the job."""

    @property
    def mutex(self) -> GPUMutex | None:
        """The job's, or None."""

    def defer(self, state: object, flush: Callable[[], None]) -> Payloads:
        """Become part of ``state``; ``flush`` finishes what is under way."""


def check_group(kfac: Deferrable, group: dist.ProcessGroup) -> None:
    """Refuse a state of other ranks."""
    own = resolve_group(kfac.process_group)
    if own is not group:
        raise ValueError(
            f"expected one process group, got a KFACState of another, of {own.size()} ranks; pass process_group= to "
            "both states"
        )


def check_deferrable(
    kfac: Deferrable,
    *,
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
