"""The model's buffers, such as BatchNorm's statistics, during the micro-batches of a step.

With DDP all ranks begin a step with rank 0's buffers. So here each virtual rank begins with the
buffers that the step began with, and those of virtual rank 0 are kept.

[Note: buffers that forward reads] Running statistics of BatchNorm are not read in training. Other
buffers may be, such as the vectors of spectral norm. DDP broadcasts them between two forwards of a
micro-batch, which virtual ranks on one rank cannot do. And without ``broadcast_buffers`` each
virtual rank would need its own. Both are refused if forward changes such a buffer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError


class StepBuffers:
    """The buffers of a module during a step.

    Args:
        module: the module inside DDP.
        is_broadcast: whether DDP broadcasts rank 0's buffers.
        has_first: whether this rank has virtual rank 0.
        is_shared: whether this rank has several virtual ranks.
    """

    def __init__(
        self, module: nn.Module, *, is_broadcast: bool, has_first: bool, is_shared: bool
    ) -> None:
        self._module = module
        self._is_broadcast = is_broadcast
        self._has_first = has_first
        self._is_shared = is_shared
        self._begun: Sequence[Tensor] = ()
        self._kept: Sequence[Tensor] = ()
        self._awaits_forward = False

    def are_needed(self) -> bool:
        """Return whether `before_forward` must be called."""
        return any(self._is_shared or is_read for _, is_read in self._buffers())

    def begin(self, *, is_first: bool) -> None:
        """Begin a micro-batch. ``is_first``: it is the step's first one on this rank."""
        self._awaits_forward = True
        if is_first:
            self._begun = self._kept = ()

    def before_forward(self) -> None:
        """Give a micro-batch the buffers that the step began with.

        DDP has broadcast rank 0's by then, if the step is about to begin.
        """
        if not self._awaits_forward:
            self._check_unchanged(
                "one forward in each micro-batch, got a second one: DDP gives it the buffers of "
                "rank 0's first one, which differ on each number of ranks; call the model once"
            )
        elif self._begun:
            self._write(self._begun)
        else:
            self._begun = self._copies()
        self._awaits_forward = False

    def end(self, *, is_first: bool) -> None:
        """End a micro-batch. Virtual rank 0's buffers are kept for the end of the step."""
        self._awaits_forward = False
        self._check_broadcast()
        if is_first and self._has_first and self._is_shared:
            self._kept = self._copies()

    def end_step(self) -> None:
        """Put virtual rank 0's buffers in place, before DDP or a hook sends them to all ranks."""
        self._check_broadcast()
        if self._kept:
            self._write(self._kept)
        self._begun = self._kept = ()

    def abandon_step(self) -> None:
        """Put the buffers in place that the step began with, since it will begin again."""
        if self._begun:
            self._write(self._begun)
        self._begun = self._kept = ()
        self._awaits_forward = False

    def _check_broadcast(self) -> None:
        if not self._is_broadcast:
            self._check_unchanged(
                "broadcast_buffers=True, got False: each rank would keep its own; pass "
                "DistributedDataParallel(..., broadcast_buffers=True)"
            )

    def _check_unchanged(self, expected: str) -> None:
        """See [Note: buffers that forward reads]."""
        buffers = self._buffers()
        for (name, is_read), buffer, begun in zip(
            buffers, self._module.buffers(), self._begun, strict=False
        ):
            if is_read and not torch.equal(buffer, begun):
                raise UnsupportedConfigurationError(
                    f"forward changes the buffer {name!r}, so VirtualRanks expected {expected}"
                )

    def _buffers(self) -> list[tuple[str, bool]]:
        """Return the name of each buffer, and whether forward may read it in training."""
        norms = {
            id(buffer)
            for module in self._module.modules()
            if isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
        }
        return [(name, id(buffer) not in norms) for name, buffer in self._module.named_buffers()]

    def _copies(self) -> Sequence[Tensor]:
        return [buffer.detach().clone() for buffer in self._module.buffers()]

    def _write(self, values: Sequence[Tensor]) -> None:
        buffers = list(self._module.buffers())
        # Autograd may have saved buffers. As with DDP's broadcast, it must not see a new version.
        with torch.no_grad(), torch_private.preserved_versions(tuple(buffers)):
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
