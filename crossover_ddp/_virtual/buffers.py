"""The model's buffers, such as BatchNorm's statistics, during the micro-batches of a step.

With DDP all ranks begin a step with rank 0's buffers. So here each virtual rank begins with the
buffers that the step began with, and those of virtual rank 0 are kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crossover_ddp._system import torch_private


class StepBuffers:
    """The buffers of a module during a step. Each rank has several micro-batches.

    Args:
        module: the module inside DDP.
        has_first: whether this rank has virtual rank 0.
    """

    def __init__(self, module: nn.Module, *, has_first: bool) -> None:
        self._module = module
        self._has_first = has_first
        self._begun: Sequence[Tensor] | None = None
        self._kept: Sequence[Tensor] | None = None
        self._awaits_forward = False

    def begin(self, *, is_first: bool) -> None:
        """Begin a micro-batch. ``is_first``: it is the step's first one on this rank."""
        self._awaits_forward = True
        if is_first:
            self._begun = self._kept = None

    def before_forward(self) -> None:
        """Give a micro-batch the buffers that the step began with.

        DDP has broadcast rank 0's by then, if the step is about to begin.
        """
        if not self._awaits_forward:
            return
        self._awaits_forward = False
        if self._begun is None:
            self._begun = self._copies()
        else:
            self._write(self._begun)

    def end(self, *, is_first: bool) -> None:
        """End a micro-batch. Virtual rank 0's buffers are kept for the end of the step."""
        self._awaits_forward = False
        if is_first and self._has_first:
            self._kept = self._copies()

    def end_step(self) -> None:
        """Put virtual rank 0's buffers in place, before DDP or a hook sends them to all ranks."""
        if self._kept is not None:
            self._write(self._kept)
        self._begun = self._kept = None

    def _copies(self) -> Sequence[Tensor]:
        return [buffer.detach().clone() for buffer in self._module.buffers()]

    def _write(self, values: Sequence[Tensor]) -> None:
        buffers = list(self._module.buffers())
        # Autograd may have saved buffers. As with DDP's broadcast, it must not see a new version.
        with torch.no_grad(), torch_private.preserved_versions(tuple(buffers)):
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
