"""The model's buffers, such as BatchNorm's statistics, during the micro-batches of a step.

With DDP all ranks begin a step with rank 0's buffers. So here each virtual rank begins with the
buffers that the step began with, and those of virtual rank 0 are kept.

[Note: buffers that forward reads] Running statistics of BatchNorm are not read in training. Other
buffers may be, such as the vectors of spectral norm. DDP broadcasts them between two forwards of a
micro-batch, which virtual ranks on one rank cannot do. And without ``broadcast_buffers`` each
virtual rank would need its own. Both are refused if forward changes such a buffer.
"""

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

# Modules with running statistics.
NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class _Kept(NamedTuple):
    """One buffer of a module, and a copy of its values."""

    module: nn.Module
    name: str
    buffer: Tensor
    values: Tensor

    @property
    def is_changed(self) -> bool:
        now = self.module._buffers.get(self.name)
        return now is None or now.shape != self.values.shape or not torch.equal(now, self.values)

    @property
    def is_read(self) -> bool:
        """Whether forward may read it; see [Note: buffers that forward reads]."""
        return not (isinstance(self.module, NORMS) and self.module.training)


class _Phase(Enum):
    BEGUN = auto()  # a micro-batch awaits its first forward
    FORWARD = auto()  # its first forward has begun
    OVER = auto()  # the step's last backward has run


class StepBuffers:
    """The buffers of a module during a step.

    Args:
        module: the module inside DDP.
        is_broadcast: whether DDP broadcasts rank 0's buffers.
        has_first: whether this rank has virtual rank 0, and others.
    """

    def __init__(self, module: nn.Module, *, is_broadcast: bool, has_first: bool) -> None:
        self._module = module
        self._is_broadcast = is_broadcast
        self._has_first = has_first
        self._begun: Sequence[_Kept] = ()
        self._first: Sequence[_Kept] = ()  # virtual rank 0's
        self._phase = _Phase.BEGUN

    def begin(self, *, is_first: bool) -> None:
        """Begin a micro-batch. ``is_first``: it is the step's first one on this rank."""
        self._phase = _Phase.BEGUN
        if is_first:
            self._begun = self._first = ()

    def before_forward(self) -> None:
        """Give a micro-batch the buffers that the step began with.

        DDP has broadcast rank 0's by then, if the step is about to begin.
        """
        if self._phase is _Phase.OVER:
            return
        if self._phase is _Phase.FORWARD:
            self._check_unchanged(
                "one forward in each micro-batch, got a second one: DDP gives it the buffers of "
                "rank 0's first one, which differ on each number of ranks; call the model once"
            )
        elif self._begun:
            _write(self._begun)
        else:
            self._begun = self._copies()
        self._phase = _Phase.FORWARD

    def after_forward(self) -> None:
        """Keep the buffers that `end_step` wrote, if a forward follows the step's last backward."""
        if self._phase is _Phase.OVER and self._module.training:
            _write(self._first)

    def end(self, *, is_first: bool) -> None:
        """End a micro-batch. Virtual rank 0's buffers are kept for the end of the step."""
        if self._phase is _Phase.OVER:
            return
        self._check_broadcast()
        if is_first and self._has_first:
            self._first = self._copies()

    def end_step(self) -> None:
        """Put virtual rank 0's buffers in place, before DDP or a hook sends them to all ranks."""
        self._check_broadcast()
        _write(self._first)
        self._phase = _Phase.OVER

    def abandon_step(self) -> None:
        """Put the buffers in place that the step began with, since it will begin again."""
        if self._phase is not _Phase.OVER:
            _write(self._begun)
        self._begun = self._first = ()

    def _check_broadcast(self) -> None:
        if not self._is_broadcast:
            self._check_unchanged(
                "broadcast_buffers=True, got False: each rank would keep its own; pass "
                "DistributedDataParallel(..., broadcast_buffers=True)"
            )

    def _check_unchanged(self, expected: str) -> None:
        """See [Note: buffers that forward reads]."""
        for kept in self._begun:
            if kept.is_read and kept.is_changed:
                raise UnsupportedConfigurationError(
                    f"forward changes the buffer {kept.name!r} of a {type(kept.module).__name__}, so "
                    f"VirtualRanks expected {expected}"
                )

    def _copies(self) -> Sequence[_Kept]:
        return [
            _Kept(module, name, buffer, buffer.detach().clone())
            for module, name, buffer in _buffers_of(self._module)
        ]


def _buffers_of(root: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


def _write(values: Sequence[_Kept]) -> None:
    buffers = [kept.buffer for kept in values]
    # Autograd may have saved buffers. As with DDP's broadcast, it must not see a new version.
    with torch.no_grad(), torch_private.preserved_versions(tuple(buffers)):
        for kept in values:
            kept.buffer.copy_(kept.values)
            kept.module._buffers[kept.name] = kept.buffer  # forward may have registered another one
