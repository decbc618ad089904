"""Helpers for process groups: their end, a job's name, and comparisons between ranks."""

import contextlib
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch.distributed as dist

from crossover_ddp._system.torch_private import process_group_store
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .leaving import leave_together

Value = TypeVar("Value")

_log = logging.getLogger(__name__)

_JOB_KEY: Final = "crossover-timeline-job"
_LET_GO_S: Final = 0.1
_LONGEST: Final = 300  # the number of characters that an error shows of one rank's value


def on_destruction(
    process_group: dist.ProcessGroup, end: Callable[[], Any], *, at_exit: bool = True
) -> Callable[[], object]:
    """Have ``end`` called once: in ``destroy_process_group``, or at exit if ``at_exit`` is true.

    A group object that a DDP model has used is never collected (torch 2.15), so a finalizer for the
    group itself would not run. But torch's registry has the only handle to the group's store, and
    drops it when the group is destroyed. The ranks of a default group leave together after ``end``,
    see [Note: the life before] in `leaving`.

    Returns:
        A function that cancels the call.
    """
    with contextlib.suppress(KeyError, TypeError, ValueError):
        # This must be registered first, since the finalizers of a store run in reverse order.
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            leave_together(process_group)
        finalizer = weakref.finalize(process_group_store(process_group), end)
        finalizer.atexit = at_exit
        return finalizer.detach
    return lambda: None


_ranks_of_models: "weakref.WeakKeyDictionary[dist.ProcessGroup, Sequence[int]]" = (
    weakref.WeakKeyDictionary()
)


def ranks_of_model(process_group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that train a model whose gradients ``process_group`` averages, sorted.

    They are ranks in the default group. With DDP they are the ranks of ``process_group``. With
    FSDP2 there are more, since each process group has only the ranks with the same shard.
    """
    known = _ranks_of_models.get(process_group)
    return sorted(dist.get_process_group_ranks(process_group) if known is None else known)


def set_ranks_of_model(process_group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Let `ranks_of_model` return ``ranks`` for this process group."""
    _ranks_of_models[process_group] = ranks


def let_collectives_go(process_group: dist.ProcessGroup) -> None:
    """Wait until gloo has released the group's last collectives, because the process may end now.

    gloo's threads release a collective shortly after it has ended. If the process exits earlier,
    they abort it (https://github.com/pytorch/pytorch/pull/179291). gloo does not report the
    release, so the wait has a fixed length. Other backends need no wait.
    """
    if "gloo" in dist.get_backend(process_group):
        time.sleep(_LET_GO_S)


def job_name(process_group: dist.ProcessGroup) -> str | None:
    """Return a name that no other job has. The first rank that asks for it chooses it.

    The call waits for no other rank. It returns None if the store does not support this; the
    timeline then names the job after its directory.
    """
    try:
        store = process_group_store(process_group)
        name: bytes = store.compare_set(_JOB_KEY, "", secrets.token_hex(4))
    except (RuntimeError, KeyError, NotImplementedError) as error:
        _log.warning(
            "the timeline does not know its job, so it is called after its directory: %s", error
        )
        return None
    return name.decode()


def compare(
    group: dist.ProcessGroup,
    settings: Mapping[str, object],
    remedy: str = "pass the same everywhere, and call load_state_dict on all ranks or on none",
) -> None:
    """Compare settings across the ranks of ``group``. Each must have the same ``repr`` on all.

    Args:
        group: the ranks.
        settings: the settings, by name.
        remedy: the end of the error message.

    On failure: ``UnsupportedConfigurationError`` on all ranks if a setting differs;
    ``ExchangeError`` if a peer is gone.

    **Collective**.
    """
    by_rank = gather_objects(group, {name: repr(value) for name, value in settings.items()})
    for name in settings:
        values = [each.get(name, "nothing") for each in by_rank]
        if len({*values}) > 1:
            listed = ", ".join(f"{rank}: {value[:_LONGEST]}" for rank, value in enumerate(values))
            raise UnsupportedConfigurationError(
                f"expected the same {name} on all ranks, got {name} by rank {{{listed}}}; {remedy}"
            )


def gather_objects(group: dist.ProcessGroup, value: Value) -> list[Value]:
    """Return a list with the ``value`` of each rank of ``group``, in rank order. **Collective**.

    On failure: ``ExchangeError`` if a peer is gone.
    """
    by_rank: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(by_rank, value, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {group.rank()} of {group.size()}: comparing with the other ranks failed: "
            f"{error}; either one is gone, or average(), averaged(), checkpoint(), "
            "load_state_dict() or drain() was not called on all of them: restart the job"
        ) from error
    return by_rank
