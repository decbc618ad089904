"""Has user code written a tensor since it was noted? Our design.

[Note: changes that no counter sees] A tensor counts its in-place changes, but a change through ``.data`` is not
counted. Three cheaper or dearer checks find such a change:

* An exchange of storages (``p.data = average``) moves the tensor's memory.
* `Sample` compares the bits of a few elements of each tensor. Reading them costs microseconds, so it is done in every
  step. An average that is swapped in for an evaluation differs in nearly all elements. A clamp that changes a few
  elements may go unnoticed.
* `Seal` with ``bits=True`` compares a checksum of all bits. That reads the whole tensor, so only the first steps do it,
  and all of them with ``CROSSOVER_CHECK=1``. Code that writes gradients or parameters mostly does so in every step.
"""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from .contents import is_dense
from .digests import fingerprint

_SAMPLED: Final = 8
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seal:
    """Tensors as they are now: their version counters, and where they begin in memory.

    Args:
        tensors: that only this package may write from now on.
        bits: also note a checksum of their bits, see [Note: changes that no counter sees].
    """

    def __init__(self, tensors: Iterable[Tensor], *, bits: bool = False) -> None:
        self._noted = [(each, each._version, each.data_ptr(), fingerprint(each) if bits else None) for each in tensors]

    @property
    def is_broken(self) -> bool:
        """Whether one of the tensors was written since."""
        for tensor, version, begin, _ in self._noted:
            if tensor._version != version or tensor.data_ptr() != begin:
                return True
        return any(
            [bits is not None and not torch.equal(fingerprint(tensor), bits) for tensor, _, _, bits in self._noted]
        )


class Sample:
    """The bits of a few elements of each tensor, see [Note: changes that no counter sees].

    On a device, `differs` makes the host wait.

    Args:
        tensors: of one device.
        views: of the elements that are looked at, by the tensor's id; filled here, so that later samples are cheaper.
    """

    def __init__(self, tensors: Iterable[Tensor], views: dict[int, Tensor]) -> None:
        self._views = [found for each in tensors for found in _sampled(each, views)]
        self._noted = self._read()

    def differs(self) -> bool:
        """Tell whether one of the elements has other bits than it had."""
        return any([not torch.equal(now, then) for now, then in zip(self._read(), self._noted, strict=True)])

    def _read(self) -> list[Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for view in self._views:
            by_dtype.setdefault(view.dtype, []).append(view)
        return [torch.cat(each) for each in by_dtype.values()]


def _sampled(tensor: Tensor, views: dict[int, Tensor]) -> list[Tensor]:
    """Return a view of some elements, spread over the tensor, as integers; none of a tensor that has gaps."""
    known = views.get(id(tensor))
    if known is not None and known.data_ptr() == tensor.data_ptr():
        return [known]
    if tensor.layout != torch.strided or not tensor.numel() or not is_dense(tensor) or type(tensor.data) is not Tensor:
        return []
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    count = min(_SAMPLED, values.numel())
    spread = values.as_strided((count,), (values.numel() // count,), values.storage_offset())
    views[id(tensor)] = spread.view(_BITS[spread.itemsize])
    return [views[id(tensor)]]
