"""What a timeline is told: which job this is, and when each half of a journey began and ended."""

import logging
import os
import secrets
import threading
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
_lock = threading.Lock()


class TracedLink(LinkAround):
    """A link around a link that tells a timeline when its halves began and ended, and ``details`` of what travels."""

    def __init__(self, link: Link, timeline: Timeline, **details: Detail) -> None:
        super().__init__(link)
        given: dict[str, Detail] = {"bucket": -1, "largest_bytes": 0, "owner": 0}
        self._timeline, self._details = timeline, {**given, "ready_s": time.monotonic(), **details}

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        begin_s = time.monotonic()
        own = await super().reduce_scatter(flat, layout)
        self._tell("reduce_scatter", begin_s, flat)
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        begin_s = time.monotonic()
        await super().all_gather(flat, layout)
        self._tell("all_gather", begin_s, flat)

    async def compute(self) -> None:
        """Tell that an owner works on what comes back."""
        self._details["owner"] = 1
        await super().compute()

    def _tell(self, kind: str, begin_s: float, flat: Tensor) -> None:
        # `nbytes` of a view may be that of its storage.
        said = {"bytes": flat.numel() * flat.itemsize, "device_type": flat.device.type, **self._details}
        if (sent := self._link.sent_bytes(kind, flat)) is not None:
            said["sent_bytes"], said["exact_bytes"] = sent
        self._timeline.span(kind, begin_s, time.monotonic(), **said)


def timeline_of(process_group: dist.ProcessGroup) -> Timeline | None:
    """Return the timeline of this process as a rank of its job, if ``CROSSOVER_TIMELINE`` asks for one."""
    if not (directory := os.environ.get(environment.TIMELINE)):
        return None
    with _lock:
        if process_group not in _of_group:
            job = dist.group.WORLD if dist.is_initialized() else None
            job = process_group if job is None else job
            _of_group[process_group] = Timeline(
                directory, rank=job.rank(), device=sibling_name(default_device()), job=_job_name(job)
            )
        return _of_group[process_group]


def _job_name(process_group: dist.ProcessGroup) -> str | None:
    """Agree with the other ranks on a name that no other job has: the first one to come chooses.

    Waits for no other rank. None where the store cannot do that; the job is then called after its directory.
    """
    try:
        store = _get_process_group_store(process_group)
        name: bytes = store.compare_set(_JOB_KEY, "", secrets.token_hex(4))
    except (RuntimeError, KeyError, NotImplementedError) as error:
        _log.warning("the timeline does not know its job, so it is called after its directory: %s", error)
        return None
    return name.decode()
