"""The passes of the codecs over their values, fused in C.

[Note: kernels] On a CPU a codec's plain form, in `codec.py`, makes about ten passes over a tile, and
each of them is an operation of torch. `kernels.c` needs two, and takes about a quarter of the time to
encode and half of it to decode. Its bits are those of the plain form. So ranks may differ in whether
they use it, and a test compares both. The machine's C compiler makes it when a bucket is first
encoded, in half a second. The result is kept in the user's cache directory. Without a compiler, and
for all other codecs, dtypes and devices, the plain form is used.
"""

import ctypes
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .codec import Codec, Half, Int4, Int8
from .compiled import load

_INT8, _INT4, _BFLOAT16 = range(3)
# A kernel encodes this many values of half precision together, so that they fit into a core's cache.
_HALF_BLOCK: Final = 4096


class _Run(ctypes.Structure):
    """``run_t`` of `kernels.c`."""

    _fields_ = tuple([(name, ctypes.c_int64) for name in ("at", "slot", "numel", "padded")])


class Runs:
    """The coded runs of a tile in some memory.

    Args:
        runs: for each run, where it begins in the memory and in the tile, its number of values, and
            that number with padding.
    """

    def __init__(self, runs: Iterable[tuple[int, int, int, int]]) -> None:
        found = [_Run(*run) for run in runs]
        self._memory = (_Run * len(found))(*found)
        self.arguments = ctypes.addressof(self._memory), len(found)


class Kernel(NamedTuple):
    """The fused passes of one codec.

    The memory of values and the residual must be contiguous and float32, on a CPU.
    """

    library: Any
    kind: int
    block: int

    def encode(
        self, values: Tensor, runs: Runs, residual: Tensor, message: Tensor, keeps_unused: bool
    ) -> None:
        """Encode the sum of values and residual, and write the error to the residual.

        Args:
            values: the memory that holds ``runs``.
            runs: the places of the runs in ``values``.
            residual: the residual of the tile's coded values.
            message: the codec's bytes.
            keeps_unused: whether a run of zeros keeps its residual, and is sent as zeros.
        """
        self.library.encode(
            self.kind,
            values.data_ptr(),
            residual.data_ptr(),
            message.data_ptr(),
            *runs.arguments,
            self.block,
            residual.numel(),
            keeps_unused,
        )

    def decode(
        self, message: Tensor, out: Tensor, runs: Runs, numel: int, adds: bool, divisor: float
    ) -> None:
        """Write the decoded values to ``runs`` of ``out``, or add them to its values.

        Args:
            message: the codec's bytes.
            out: the memory that holds ``runs``.
            runs: the places of the runs in ``out``.
            numel: the number of the tile's coded values, with padding.
            adds: whether to add the values.
            divisor: divides the results.
        """
        self.library.decode(
            self.kind,
            out.data_ptr(),
            message.data_ptr(),
            *runs.arguments,
            self.block,
            numel,
            adds,
            divisor,
        )


def kernel_of(codec: Codec) -> Kernel | None:
    """Return the fused passes of ``codec``; None if it has none, or there is no compiler."""
    kinds = {Int8: _INT8, Int4: _INT4, Half: _BFLOAT16}
    kind = kinds.get(type(codec))
    if kind is None or (isinstance(codec, Half) and codec.dtype != torch.bfloat16):
        return None
    library = load()
    if library is None:
        return None
    return Kernel(library, kind, getattr(codec, "block", _HALF_BLOCK))
