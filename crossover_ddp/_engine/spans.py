"""What a timeline is told: which job this is, and when each half of a journey began and ended."""

import logging
import os
import secrets
import time
import weakref
from typing import Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from crossover_ddp._system import environment
from crossover_ddp._system.device import default_device, sibling_name
from crossover_ddp._timeline.record import Detail, Timeline

from .links import Layout, Link, LinkAround

_log = logging.getLogger(__name__)

_JOB_KEY: Final = "crossover-timeline-job"
_of_group: "weakref.WeakKeyDictionary[dist.ProcessGroup, Timeline]" = weakref.WeakKeyDictionary()


class TracedLink(LinkAround):
    """A link around a link that tells a timeline when its halves began and ended, and ``whose`` they are."""

    def __init__(self, link: Link, timeline: Timeline, **whose: Detail) -> None:
        super().__init__(link)
        self._timeline, self._whose = timeline, whose

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        begin_s = time.monotonic()
        own = await super().reduce_scatter(flat, layout)
        self._tell("reduce_scatter", begin_s, flat)
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        begin_s = time.monotonic()
        await super().all_gather(flat, layout)
        self._tell("all_gather", begin_s, flat)

    def _tell(self, kind: str, begin_s: float, flat: Tensor) -> None:
        # `nbytes` of a view may be that of its storage.
        self._timeline.span(
            kind, begin_s, time.monotonic(), bytes=flat.numel() * flat.itemsize, **self._whose
        )


def timeline_of(process_group: dist.ProcessGroup) -> Timeline | None:
    """Return the timeline of this process as a rank of its job, if ``CROSSOVER_TIMELINE`` asks for one."""
    if not (directory := os.environ.get(environment.TIMELINE)):
        return None
    if process_group not in _of_group:
        job = dist.group.WORLD or process_group
        _of_group[process_group] = Timeline(
            directory, rank=job.rank(), device=sibling_name(default_device()), job=_job_name(job)
        )
    return _of_group[process_group]


def _job_name(process_group: dist.ProcessGroup) -> str | None:
    """Return a name that no other job has, which the first rank to come chooses; waits for no other rank.

    None where the store cannot do that; the job is then called after its directory.
    """
    try:
        store = _get_process_group_store(process_group)
        name: bytes = store.compare_set(_JOB_KEY, "", secrets.token_hex(4))
    except (RuntimeError, KeyError, NotImplementedError) as error:
        _log.warning("the timeline does not know its job, so it is called after its directory: %s", error)
        return None
    return name.decode()
