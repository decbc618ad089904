"""Which way a tensor travels: over gloo's messages, by a backend's own collectives, or not at all."""

import itertools
import time
import weakref
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import check_group, flat_gradients, largest_bytes
from crossover_ddp._engine.turns import Turn, check_turn
from crossover_ddp._system.worker import Worker

from .collectives import NativeHalves, Ring
from .direct_way import DirectWay
from .gathers import GatherOrder
from .layout import Layout
from .native_way import NativeWay
from .ring_way import RingWay
from .staging import Side
from .step import Step
from .transfer import Sharded, Transfer
from .ways import AloneWay, Way

# NCCL is much slower on shares that begin elsewhere (pytorch#195450, nccl#413).
_NATIVE_ALIGNMENT_BYTES: Final = 128


class Routes:
    """Makes transfers, numbered in one order on all ranks, and says which way they travel.

    Args:
        process_group: whose backends decide.
        ring, order: of its messages.
        reducer, gatherer: threads, see [Note: two workers].
        stepper: thread, see [Note: long steps].
        records: whether a timeline wants to know all of a bucket.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        ring: Ring,
        order: GatherOrder,
        reducer: Worker,
        gatherer: Worker,
        stepper: Worker,
        *,
        records: bool,
    ) -> None:
        self._group = weakref.ref(process_group)
        self._records = records
        self._checked: Any = WeakTensorKeyDictionary()  # a parameter of each bucket
        self._are_new = False
        self._sequence = itertools.count()
        self.world_size = process_group.size()
        self.backends = _backends(process_group)
        self.sides: dict[torch.device, Side] = {}
        self.ring = RingWay(ring, order, reducer, gatherer, stepper)
        self.direct = DirectWay(ring, order, reducer, gatherer, stepper)
        self.native = NativeWay(NativeHalves(process_group), gatherer)
        self.alone = AloneWay(gatherer)

    def way(self, device: torch.device) -> Way:
        """Return how tensors on ``device`` travel."""
        if self.world_size == 1:
            return self.alone
        return self.ring if self.is_on_ring(device) else self.native

    def is_on_ring(self, device: torch.device) -> bool:
        """Tell whether ranks exchange messages, not collectives, for tensors on ``device``."""
        return self.backends.get(device.type) == "gloo"

    def side(self, device: torch.device) -> Side:
        """Return what this process has on ``device``."""
        side = self.sides.get(device)
        if side is None:
            side = self.sides[device] = Side(device)
        return side

    def trim(self) -> None:
        """After a step whose buckets were new, give back what only former ones needed.

        DDP's first bucket is as large as the model, and torch keeps pinned memory for ever.
        """
        if self._are_new:
            self._are_new = False
            for side in self.sides.values():
                if side.copier is not None:
                    side.copier.trim()

    def equal_layout(self, tensor: torch.Tensor) -> Layout:
        """Cut ``tensor`` equally, as its way likes it."""
        multiple = 1 if self.is_on_ring(tensor.device) else max(1, _NATIVE_ALIGNMENT_BYTES // tensor.itemsize)
        return Layout.equal(tensor.numel(), self.world_size, multiple=multiple)

    def of_bucket(self, bucket: dist.GradBucket, step: Step, turn: Turn | None) -> Transfer:
        """Return the transfer of DDP's bucket; raise what makes it impossible."""
        tensor = flat_gradients(bucket)
        self._check_group(bucket)
        check_turn(turn, self._group())
        step.last_hook_s = time.monotonic()
        step.ready.append((tensor.nbytes, step.last_hook_s))
        return Transfer(
            index=bucket.index(),
            tensor=tensor,
            layout=self.equal_layout(tensor),
            sequence=next(self._sequence),
            step=step,
            last=bucket.is_last(),
            side=self.side(tensor.device),
            turn=turn,
            ready_s=step.last_hook_s,
            largest_bytes=largest_bytes(bucket) if self._records else 0,
        )

    def of_tensor(self, sharded: Sharded, step: Step) -> Transfer:
        """Return the transfer of something else than a bucket."""
        return Transfer(
            index=-1,
            tensor=sharded.tensor,
            layout=sharded.layout,
            sequence=next(self._sequence),
            step=step,
            last=False,
            side=self.side(sharded.tensor.device),
        )

    def _check_group(self, bucket: dist.GradBucket) -> None:
        parameter, group = bucket.parameters()[0], self._group()
        if parameter not in self._checked and group is not None:
            check_group(bucket, group)
            self._checked[parameter] = True
            self._are_new = True


def _backends(process_group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the backend by device type."""
    config = dist.get_backend_config(process_group)
    return dict(pair.split(":", 1) for pair in str(config).split(",") if ":" in pair)
