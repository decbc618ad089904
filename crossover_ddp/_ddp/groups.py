"""Process groups: when one or its collectives have ended, a name for its job, what its ranks tell each other."""

import contextlib
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .leaving import leave_together

Said = TypeVar("Said")

_log = logging.getLogger(__name__)

_JOB_KEY: Final = "crossover-timeline-job"
_LET_GO_S: Final = 0.1
_LONGEST: Final = 300  # characters of what a rank has said, in errors


def on_destruction(
    process_group: dist.ProcessGroup, end: Callable[[], Any], *, at_exit: bool = True
) -> Callable[[], object]:
    """Call ``end`` in ``destroy_process_group``, or else at exit if ``at_exit``; return what takes that back.

    A group object that a DDP model has used is never collected (torch 2.15), so its end cannot be seen. But
    torch's registry holds the only handle of the group's store, and drops it when the group is destroyed. The ranks of
    a default group leave together behind that, see [Note: the life before] in `leaving`.
    """
    with contextlib.suppress(KeyError, TypeError, ValueError):
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            leave_together(process_group)  # first: of one store's finalizers the first comes last
        finalizer = weakref.finalize(_get_process_group_store(process_group), end)
        finalizer.atexit = at_exit
        return finalizer.detach
    return lambda: None


def let_collectives_go(process_group: dist.ProcessGroup) -> None:
    """Wait a moment after collectives of a group: the process may end now.

    gloo's threads let go of a collective a moment after it, and abort a process that ends by then
    (https://github.com/pytorch/pytorch/pull/179291). Nothing tells when they have; other backends need no wait.
    """
    if "gloo" in dist.get_backend(process_group):
        time.sleep(_LET_GO_S)


def job_name(process_group: dist.ProcessGroup) -> str | None:
    """Return a name that no other job has, which the first rank to come chooses; waits for no other rank.

    None where the store cannot do that; a timeline's job is then called after its directory.
    """
    try:
        store = _get_process_group_store(process_group)
        name: bytes = store.compare_set(_JOB_KEY, "", secrets.token_hex(4))
    except (RuntimeError, KeyError, NotImplementedError) as error:
        _log.warning(
            "the timeline does not know its job, so it is called after its directory: %s", error
        )
        return None
    return name.decode()


def compare(group: dist.ProcessGroup, said: Mapping[str, object]) -> None:
    """Raise on all ranks of ``group`` unless the values of each name have the same ``repr``. **Collective**.

    On failure: ``UnsupportedConfigurationError`` on all ranks. ``ExchangeError`` if a peer is gone.
    """
    everyone = told_by_all(group, {name: repr(value) for name, value in said.items()})
    for name in said:
        values = [each.get(name, "nothing") for each in everyone]
        if len({*values}) > 1:
            by_rank = ", ".join(f"{rank}: {value[:_LONGEST]}" for rank, value in enumerate(values))
            raise UnsupportedConfigurationError(
                f"expected the same {name} on all ranks, got {name} by rank {{{by_rank}}}; pass the same everywhere, "
                "and call load_state_dict on all ranks or on none"
            )


def told_by_all(group: dist.ProcessGroup, said: Said) -> list[Said]:
    """Return by rank what the ranks of ``group`` say; ``ExchangeError`` if one is gone. **Collective**."""
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, said, group=group)
    except RuntimeError as error:
        raise ExchangeError(
            f"rank {group.rank()} of {group.size()}: comparing with the other ranks failed: {error}; either one is "
            "gone, or checkpoint(), load_state_dict() or drain() was not called on all of them: restart the job"
        ) from error
    return everyone
