"""DDP's buffers, sent behind the gradients instead of at the start of the next forward. Our design.

[Note: buffers behind the gradients]
With ``broadcast_buffers=True`` DDP broadcasts rank 0's buffers when the forward after a synchronised step begins. All
ranks wait for it, inside the job's turn, while a sibling's gradients are on the link. What is broadcast has been known
since the forward before. So rank 0's buffers travel behind the step's last reduce-scatter and are copied in on the
other ranks when DDP is through with this backward pass, or, where gradients arrive later, when the next forward begins,
somebody reads parameters, or a step ends that leaves no update pending.
Then DDP is told that nothing needs to be synchronised before that forward (``require_forward_param_sync``). If
anything comes between, such as a second forward before backward or a skipped backward, DDP sets that flag again and
broadcasts as ever, so nothing has to be foreseen.

Different from plain DDP: between two steps the other ranks have rank 0's buffers already, and what is changed on rank 0
alone after the step's last bucket (by hand, or by a checkpointed segment without parameters) travels one step later,
and a buffer that another rank has changed by then stays as it is there.

All ranks must do this, or none. The model's settings decide, and whether the model was found among all objects; the
latter may differ between ranks. So they agree on it once for each model and state, together with the size.

Left to DDP: `Join`, where another rank's buffers count; a buffer hook of the user's; a hook of somebody else's in
`crossover_wrapper`, whose collectives may be issued by any thread.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .checks import is_joined, model_of, wants_buffers_broadcast
from .digests import Digests

_NEEDED = ("require_forward_param_sync", "parameters_to_ignore", "_join_config")


class BufferCopy:
    """The buffers of one model at one moment, on their way.

    ``flat`` holds them as bytes; on the ranks that do not send once ``wait`` has returned.
    """

    wait: Callable[[], None]

    def __init__(
        self, tensors: list[torch.Tensor], model: Callable[[], DistributedDataParallel | None], *, sends: bool
    ) -> None:
        self._tensors, self._model, self._sends = tensors, model, sends
        if sends:
            self.flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
        else:
            size = sum(tensor.nbytes for tensor in tensors)
            self.flat = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        self._versions: list[int] | None = None

    def claim(self) -> None:
        """Let the next forward begin without a broadcast, if there would be one; call it when backward has ended."""
        model = self._model()
        if model is not None and model.require_forward_param_sync:
            model.require_forward_param_sync = False
            self._versions = [tensor._version for tensor in self._tensors]

    def unpack(self) -> None:
        """Wait for the values and copy them in, once, but not where somebody has changed a buffer since `claim`."""
        versions, self._versions = self._versions, None
        if versions is None:
            return
        self.wait()
        stops = itertools.accumulate(tensor.nbytes for tensor in self._tensors)
        values = {
            tensor: self.flat[stop - tensor.nbytes : stop].view(tensor.dtype).view(tensor.shape)
            for tensor, stop, version in zip(self._tensors, stops, versions, strict=True)
            if tensor._version == version and not self._sends
        }
        if not values:
            return
        # Autograd may have saved buffers, and must not see a new version, as with DDP's own broadcast.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((*values,)):
            torch._foreach_copy_([*values], [*values.values()])

    def claim_and_unpack(self) -> None:
        """Do both, at the end of backward."""
        self.claim()
        self.unpack()


class ModuleBuffers:
    """Where the buffers of one model come from; rank 0's count.

    Args:
        bucket: the last one of a backward pass of the model.
        state: that the hook was registered with; tells apart models that wrap one module.

    ``travel``: whether all ranks have as many bytes, which they must have agreed on.
    """

    travel = False

    def __init__(self, bucket: dist.GradBucket, state: object) -> None:
        model = model_of(bucket, state=state)
        self._model = _weakly(model)
        self._module = _weakly(None if model is None else model.module)
        self._ignored: frozenset[str] = frozenset(getattr(model, "parameters_to_ignore", ()))

    def nbytes(self, device: torch.device) -> int:
        """Return how many bytes this rank would send or receive; 0 if they must stay with DDP."""
        model, tensors = self._model(), self._tensors()
        if model is None or not all(hasattr(model, name) for name in _NEEDED) or not _broadcasts(model):
            return 0
        plain = all(t.layout == torch.strided and t.device == device and not t.is_inference() for t in tensors)
        return sum(tensor.nbytes for tensor in tensors) if plain else 0

    def copy(self, *, sends: bool) -> BufferCopy | None:
        """Return them as they are now; None if they stay with DDP this time."""
        model, tensors = self._model(), self._tensors()
        if not tensors or (model is not None and not _broadcasts(model)):
            return None
        return BufferCopy(tensors, self._model, sends=sends)

    def _tensors(self) -> list[torch.Tensor]:
        """Return the buffers, those of great elements first: each begins at a multiple of its element's size."""
        module = self._module()
        if module is None:
            return []
        # Looked for anew, as DDP does: a module may have replaced one.
        found = [buffer for name, buffer in module.named_buffers() if name not in self._ignored]
        return sorted(found, key=lambda buffer: -buffer.itemsize)


class BehindBuckets:
    """What of a model travels behind its last bucket; ``buffers`` by the state that its hook was registered with."""

    def __init__(self) -> None:
        self.digests = Digests()
        self.buffers: dict[weakref.ref[Any] | None, ModuleBuffers] = {}


def _broadcasts(model: DistributedDataParallel) -> bool:
    """Whether DDP itself would broadcast rank 0's buffers."""
    return wants_buffers_broadcast(model) and not is_joined(model) and not hasattr(model, "buffer_hook")


def _weakly(thing: Any) -> Callable[[], Any]:
    return weakref.ref(thing) if thing is not None else lambda: None
