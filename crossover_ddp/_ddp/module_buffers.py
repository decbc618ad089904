"""Sends DDP's buffers behind the gradients instead of before the next forward. Our design.

[Note: buffers behind the gradients]
With ``broadcast_buffers=True`` DDP broadcasts rank 0's buffers when the forward after a
synchronised step begins. All ranks wait for the broadcast, inside the job's turn, while a sibling's
gradients are on the link. Usually the buffers have not changed since the step's last bucket. So
rank 0 sends them behind that bucket. At the point where DDP would broadcast them, rank 0 broadcasts
only one byte, which shows whether the buffers still have the same bits.

* If they do, the other ranks copy in the values that have arrived, which overwrites their own
  changes. Then ``require_forward_param_sync`` is set to False, and DDP broadcasts nothing.
* If they do not (a flag was set between two steps, or a checkpointed segment was computed again),
  DDP broadcasts them, as it would without a hook.

So every forward begins with the same buffers as with plain DDP, and no buffer changes at any other
moment. A second forward before backward, a skipped backward, or an evaluation through DDP finds no
copy, and then DDP broadcasts.

Either all ranks must do this or none. It depends on the model's settings, and on whether the model
was found, which may differ between ranks. So the ranks agree once for each model and state, and at
the same time compare the sizes of the buffers.

Buffers stay with DDP inside of `Join`, where another rank's buffers may count; if user code has
registered a buffer hook; if `crossover_wrapper` wraps another hook, whose collectives any thread
may issue; and on NCCL, where the host must not wait for a byte.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._system import torch_private

from .checks import is_joined, model_of, wants_buffers_broadcast, weakly
from .compiled import OwnHook, uncompiled


class BufferCopy:
    """A copy of one model's buffers on rank 0, which travels to the other ranks."""

    # Blocks until the values have arrived. The exchange that sends them sets it.
    wait: Callable[[], None]
    # The buffers as bytes. On the receiving ranks they are undefined until `wait` has returned.
    flat: torch.Tensor

    def __init__(self, tensors: Sequence[torch.Tensor], *, sends: bool) -> None:
        if sends:
            self.flat = _flat(tensors)
        else:
            size = sum(tensor.nbytes for tensor in tensors)
            self.flat = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have the bits of the copy. The host waits for a device."""
        return torch.equal(_flat(tensors), self.flat)

    def put_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait for the values, and copy them into ``tensors``."""
        self.wait()
        stops = itertools.accumulate(tensor.nbytes for tensor in tensors)
        values = [
            self.flat[stop - tensor.nbytes : stop].view(tensor.dtype).view(tensor.shape)
            for tensor, stop in zip(tensors, stops, strict=True)
        ]
        # Autograd may have saved buffers. As with DDP's broadcast, it must not see a new version.
        with torch.no_grad(), torch_private.preserved_versions(tuple(tensors)):
            torch._foreach_copy_(list(tensors), values)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


class ModuleBuffers:
    """Keeps one model's buffers equal to rank 0's, by a copy behind the gradients or through DDP.

    Args:
        bucket: the last bucket of one of the model's backward passes.
        state: the state that the hook was registered with. It distinguishes models that wrap the
            same module.
        sends: whether this is rank 0.
        byte_device: a device on which the process group can broadcast a byte, if possible one that
            the host need not wait for.
    """

    # Whether the buffers travel behind the last bucket. All ranks must agree on it, see `begin`.
    travel = False

    def __init__(
        self, bucket: dist.GradBucket, state: object, *, sends: bool, byte_device: torch.device
    ) -> None:
        model = model_of(bucket, state=state)
        self._model = weakly(model)
        self._module = weakly(None if model is None else model.module)
        self._ignored: frozenset[str] = frozenset(getattr(model, torch_private.IGNORED_NAMES, ()))
        self._sends = sends
        self._byte_device = byte_device
        # The copy from the latest backward pass, until the forward in which DDP would broadcast.
        self._latest: BufferCopy | None = None

    def nbytes(self, device: torch.device) -> int:
        """Return the total size of the buffers in bytes, or 0 if they must stay with DDP."""
        model = self._model()
        if model is None or not _broadcasts(model):
            return 0
        if not all(hasattr(model, name) for name in torch_private.NEEDED_FOR_BUFFERS):
            return 0
        if torch_private.preserved_versions is None:
            return 0
        tensors = self._tensors()
        for tensor in tensors:
            is_plain = tensor.layout == torch.strided and not tensor.is_inference()
            if not is_plain or tensor.device != device:
                return 0
        return sum(tensor.nbytes for tensor in tensors)

    def begin(self) -> None:
        """Let the buffers travel from now on. Call it after all ranks have agreed."""
        model = self._model()
        if model is not None:
            self.travel = True
            before = OwnHook(uncompiled(self._before_forward))
            model.register_forward_pre_hook(before, prepend=True)

    def copy(self) -> BufferCopy | None:
        """Return a copy of the buffers to send, or None if they stay with DDP this time."""
        model = self._model()
        tensors = self._tensors()
        self._latest = None
        if tensors and model is not None and _broadcasts(model):
            self._latest = BufferCopy(tensors, sends=self._sends)
        return self._latest

    def _before_forward(self, *_: Any) -> None:
        """Replace DDP's broadcast with the copy, if rank 0's buffers still have the same bits."""
        model = self._model()
        if self._latest is None or model is None or not _broadcasts(model):
            return
        if not torch_private.is_broadcast_due(model):
            return
        latest = self._latest
        self._latest = None
        tensors = self._tensors()
        is_old = torch.zeros(1, dtype=torch.uint8, device=self._byte_device)
        if self._sends:
            is_old.fill_(not latest.holds(tensors))
        # A broadcast like DDP's own: if only one rank runs a forward, its broadcast meets the one
        # in the other ranks' next forward, as with plain DDP.
        dist.broadcast(is_old, group=model.process_group, group_src=0)
        if is_old.item():
            return
        if not self._sends:
            latest.put_in(tensors)
        model.require_forward_param_sync = False

    def _tensors(self) -> list[torch.Tensor]:
        """Return the buffers, sorted so that each begins at a multiple of its element size."""
        module = self._module()
        if module is None:
            return []
        # Like DDP, look them up in each step, because a module may have replaced a buffer.
        found = [buffer for name, buffer in module.named_buffers() if name not in self._ignored]
        return sorted(found, key=lambda buffer: -buffer.itemsize)


def _broadcasts(model: DistributedDataParallel) -> bool:
    """Return whether DDP itself would broadcast rank 0's buffers."""
    has_hook = hasattr(model, torch_private.BUFFER_HOOK)
    return wants_buffers_broadcast(model) and not is_joined(model) and not has_hook
