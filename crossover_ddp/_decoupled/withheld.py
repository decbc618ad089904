"""What stands in the place of a gradient that only its owner has: not a number, and no result of any arithmetic.

[Note: gradients that are withheld] Whatever looks at such a gradient must not take it for the mean. So it is NaN, a
signalling one: arithmetic makes an ordinary NaN of it, so that a change of it shows in its bits, even one that counts
no version, as those by GradScaler and through ``.data`` do not. Copies keep the bits.
"""

from typing import Final, NamedTuple

import torch


class _BitPattern(NamedTuple):
    bits: torch.dtype
    value: int


_MARKS: Final = {
    torch.float16: _BitPattern(torch.int16, 0x7D00),
    torch.bfloat16: _BitPattern(torch.int16, 0x7FA0),
    torch.float32: _BitPattern(torch.int32, 0x7FA00000),
    torch.float64: _BitPattern(torch.int64, 0x7FF4000000000000),
}


def withhold(gradient: torch.Tensor) -> None:
    """Mark what owners alone have; counts no version."""
    mark = _MARKS[gradient.dtype]
    gradient.data.view(mark.bits).fill_(mark.value)


def is_computed_with(gradient: torch.Tensor) -> bool:
    """Tell whether somebody has changed a withheld gradient by arithmetic; dropping or zeroing it is none."""
    mark = _MARKS[gradient.dtype]
    return bool((gradient.isnan() & (gradient.view(mark.bits) != mark.value)).any())
