"""DDP's buffers, sent behind the gradients instead of at the start of the next forward. Our design.

[Note: buffers behind the gradients]
With ``broadcast_buffers=True`` DDP broadcasts rank 0's buffers when the forward after a synchronised step begins. All
ranks wait for it, inside the job's turn, while a sibling's gradients are on the link. Mostly the buffers have not
changed since the step's last bucket. So they travel behind that bucket. Where DDP would broadcast them, rank 0 sends
one byte instead, which says whether they are still the same, bit for bit:

* If they are, the other ranks copy in the values that have arrived, also over buffers that they have changed
  themselves, and DDP is told that nothing needs to be synchronised (``require_forward_param_sync``).
* If they are not (a flag that was set between two steps, a checkpointed segment that was computed again), DDP
  broadcasts them as ever.

So every forward begins with the buffers that it has with plain DDP, and no buffer changes at any other moment. A
second forward before backward, a skipped backward, or an evaluation through DDP finds no copy, and DDP broadcasts.

All ranks must do this, or none. The model's settings decide, and whether the model was found among all objects; the
latter may differ between ranks. So they agree on it once for each model and state, together with the size.

Left to DDP: `Join`, where another rank's buffers count; a buffer hook of the user's; a hook of somebody else's in
`crossover_wrapper`, whose collectives may be issued by any thread; NCCL, where the host must not wait for a byte.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .checks import is_joined, model_of, wants_buffers_broadcast
from .compiled import OwnHook, uncompiled
from .digests import Digests

_NEEDED = (
    "require_forward_param_sync",
    "parameters_to_ignore",
    "_join_config",
    "_check_sync_bufs_pre_fwd",
)


class BufferCopy:
    """The buffers of one model at one moment, on their way.

    ``flat`` holds them as bytes; on the ranks that do not send once ``wait`` has returned.
    """

    wait: Callable[[], None]

    def __init__(self, tensors: Sequence[torch.Tensor], *, sends: bool) -> None:
        if sends:
            self.flat = _flat(tensors)
        else:
            size = sum(tensor.nbytes for tensor in tensors)
            self.flat = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether these buffers have the bits of the copy. On a device the host waits."""
        return torch.equal(_flat(tensors), self.flat)

    def put_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait for the values and copy them into these buffers."""
        self.wait()
        stops = itertools.accumulate(tensor.nbytes for tensor in tensors)
        values = [
            self.flat[stop - tensor.nbytes : stop].view(tensor.dtype).view(tensor.shape)
            for tensor, stop in zip(tensors, stops, strict=True)
        ]
        # Autograd may have saved buffers, and must not see a new version, as with DDP's own broadcast.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            torch._foreach_copy_(list(tensors), values)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


class ModuleBuffers:
    """Where the buffers of one model come from; rank 0's count.

    Args:
        bucket: the last one of a backward pass of the model.
        state: that the hook was registered with; tells apart models that wrap one module.
        sends: whether this is rank 0.
        byte_device: of a tensor that the model's process group can broadcast without a wait for a device.
    """

    travel = False
    """Whether the buffers travel behind the last bucket, on which all ranks must have agreed; see `begin`."""

    def __init__(
        self, bucket: dist.GradBucket, state: object, *, sends: bool, byte_device: torch.device
    ) -> None:
        model = model_of(bucket, state=state)
        self._model = _weakly(model)
        self._module = _weakly(None if model is None else model.module)
        self._ignored: frozenset[str] = frozenset(getattr(model, "parameters_to_ignore", ()))
        self._sends, self._byte_device = sends, byte_device
        self._latest: BufferCopy | None = None  # until DDP would broadcast

    def nbytes(self, device: torch.device) -> int:
        """Return how many bytes this rank would send or receive; 0 if they must stay with DDP."""
        model, tensors = self._model(), self._tensors()
        if (
            model is None
            or not all(hasattr(model, name) for name in _NEEDED)
            or not _broadcasts(model)
        ):
            return 0
        plain = all(
            t.layout == torch.strided and t.device == device and not t.is_inference()
            for t in tensors
        )
        return sum(tensor.nbytes for tensor in tensors) if plain else 0

    def begin(self) -> None:
        """Let the buffers travel from now on; the ranks have agreed on it."""
        model = self._model()
        if model is not None:
            self.travel = True
            before = OwnHook(uncompiled(self._before_forward))
            model.register_forward_pre_hook(before, prepend=True)

    def copy(self) -> BufferCopy | None:
        """Return them as they are now; None if they stay with DDP this time."""
        model, tensors = self._model(), self._tensors()
        self._latest = None
        if tensors and model is not None and _broadcasts(model):
            self._latest = BufferCopy(tensors, sends=self._sends)
        return self._latest

    def _before_forward(self, *_: Any) -> None:
        """Where DDP would broadcast the buffers: put in those that have travelled, if rank 0 still has the same."""
        model = self._model()
        if (
            self._latest is None
            or model is None
            or not _broadcasts(model)
            or not model._check_sync_bufs_pre_fwd()
        ):
            return
        latest, self._latest = self._latest, None
        tensors = self._tensors()
        is_old = torch.zeros(1, dtype=torch.uint8, device=self._byte_device)
        if self._sends:
            is_old.fill_(not latest.holds(tensors))
        # As DDP's own broadcast, so that a forward of one rank alone meets the same one of the others.
        dist.broadcast(is_old, group=model.process_group, group_src=0)
        if is_old.item():
            return
        if not self._sends:
            latest.put_in(tensors)
        model.require_forward_param_sync = False

    def _tensors(self) -> list[torch.Tensor]:
        """Return the buffers, those of great elements first: each begins at a multiple of its element's size."""
        module = self._module()
        if module is None:
            return []
        # Looked for in each step, as DDP does: a module may have replaced one.
        found = [buffer for name, buffer in module.named_buffers() if name not in self._ignored]
        return sorted(found, key=lambda buffer: -buffer.itemsize)


class BehindBuckets:
    """What of a model travels behind its last bucket; ``buffers`` by the state that its hook was registered with."""

    def __init__(self) -> None:
        self.digests = Digests()
        self.buffers: dict[weakref.ref[Any] | None, ModuleBuffers] = {}


def _broadcasts(model: DistributedDataParallel) -> bool:
    """Whether DDP itself would broadcast rank 0's buffers."""
    return (
        wants_buffers_broadcast(model)
        and not is_joined(model)
        and not hasattr(model, "buffer_hook")
    )


def _weakly(thing: Any) -> Callable[[], Any]:
    return weakref.ref(thing) if thing is not None else lambda: None
