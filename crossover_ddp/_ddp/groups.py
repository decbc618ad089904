"""Process groups: their end, the end of their collectives, a job's name, comparisons of ranks."""

import contextlib
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch.distributed as dist

from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .leaving import leave_together
from .torch_private import process_group_store

Value = TypeVar("Value")

_log = logging.getLogger(__name__)

_JOB_KEY: Final = "crossover-timeline-job"
_LET_GO_S: Final = 0.1
_LONGEST: Final = 300  # characters of one rank's value in an error


def on_destruction(
    process_group: dist.ProcessGroup, end: Callable[[], Any], *, at_exit: bool = True
) -> Callable[[], object]:
    """Call ``end`` in ``destroy_process_group``, or at exit if ``at_exit``.

    A group object that a DDP model has used is never collected (torch 2.15), so a finalizer of the
    group itself would not run. But torch's registry holds the only handle of the group's store, and
    drops it when the group is destroyed. The ranks of a default group leave together after ``end``,
    see [Note: the life before] in `leaving`.

    Returns:
        A function that cancels the call.
    """
    with contextlib.suppress(KeyError, TypeError, ValueError):
        # Registered first, since the finalizers of one store run in reverse order.
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            leave_together(process_group)
        finalizer = weakref.finalize(process_group_store(process_group), end)
        finalizer.atexit = at_exit
        return finalizer.detach
    return lambda: None


def let_collectives_go(process_group: dist.ProcessGroup) -> None:
    """Wait a moment after collectives of a group, because the process may end now.

    gloo's threads release a collective shortly after it has ended. They abort a process that exits
    before (https://github.com/pytorch/pytorch/pull/179291). gloo does not report the release, hence
    a fixed wait. Other backends need none.
    """
    if "gloo" in dist.get_backend(process_group):
        time.sleep(_LET_GO_S)


def job_name(process_group: dist.ProcessGroup) -> str | None:
    """Return a name that no other job has, chosen by the first rank that asks for it.

    Waits for no other rank. None where the store cannot do that; a timeline's job is then called
    after its directory.
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


def compare(group: dist.ProcessGroup, settings: Mapping[str, object]) -> None:
    """Raise on all ranks of ``group`` unless each setting has the same ``repr`` on all of them.

    On failure: ``UnsupportedConfigurationError`` on all ranks. ``ExchangeError`` if a peer is gone.

    **Collective**.
    """
    by_rank = gather_objects(group, {name: repr(value) for name, value in settings.items()})
    for name in settings:
        values = [each.get(name, "nothing") for each in by_rank]
        if len({*values}) > 1:
            listed = ", ".join(f"{rank}: {value[:_LONGEST]}" for rank, value in enumerate(values))
            raise UnsupportedConfigurationError(
                f"expected the same {name} on all ranks, got {name} by rank {{{listed}}}; pass the "
                "same everywhere, and call load_state_dict on all ranks or on none"
            )


def gather_objects(group: dist.ProcessGroup, value: Value) -> list[Value]:
    """Return the ``value`` of each rank of ``group``, by rank. **Collective**.

    On failure: ``ExchangeError`` if a peer is gone.
    """
    by_rank: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(by_rank, value, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {group.rank()} of {group.size()}: comparing with the other ranks failed: "
            f"{error}; either one is gone, or checkpoint(), load_state_dict() or drain() was not "
            "called on all of them: restart the job"
        ) from error
    return by_rank
