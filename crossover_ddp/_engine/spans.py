"""What a timeline is told: which job this is, and when each half of a journey, or all of it, began and ended."""

import os
import time
import weakref
from collections.abc import Awaitable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from crossover_ddp._ddp.groups import job_name
from crossover_ddp._system import environment
from crossover_ddp._system.device import default_device, sibling_name
from crossover_ddp._timeline.record import Detail, Timeline

from .links import Layout, Link, LinkAround

Made = TypeVar("Made")

_of_group: "weakref.WeakKeyDictionary[dist.ProcessGroup, Timeline]" = weakref.WeakKeyDictionary()


class TracedLink(LinkAround):
    """A link around a link that tells a timeline when its collectives began and ended, and ``whose`` they are."""

    def __init__(self, link: Link, timeline: Timeline, **whose: Detail) -> None:
        super().__init__(link)
        self._timeline, self._whose = timeline, whose

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        return await self._told("reduce_scatter", super().reduce_scatter(flat, layout), flat)

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        await self._told("all_gather", super().all_gather(flat, layout), flat)

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        await self._told(
            "all_reduce", self._link.all_reduce(flat, layout), flat
        )  # as ranks without a timeline do

    async def _told(self, kind: str, half: Awaitable[Made], flat: Tensor) -> Made:
        begin_s = time.monotonic()
        made = await half
        self._timeline.span(kind, begin_s, time.monotonic(), bytes=flat.nbytes, **self._whose)
        return made


def timeline_of(process_group: dist.ProcessGroup) -> Timeline | None:
    """Return the timeline of this process as a rank of its job, if ``CROSSOVER_TIMELINE`` asks for one."""
    if not (directory := os.environ.get(environment.TIMELINE)):
        return None
    if process_group not in _of_group:
        job = dist.group.WORLD or process_group
        _of_group[process_group] = Timeline(
            directory, rank=job.rank(), device=sibling_name(default_device()), job=job_name(job)
        )
    return _of_group[process_group]
