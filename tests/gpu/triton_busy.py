"""The busy kernel in Triton. It has its own module, since it cannot be imported without Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def _now_ns():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _busy(marks, duration_ns):  # type: ignore[no-untyped-def]
    begin = _now_ns()
    now = begin
    while now - begin < duration_ns:
        now = _now_ns()
    tl.store(marks, begin)
    tl.store(marks + 1, now)


def busy(marks: torch.Tensor, duration_ns: int) -> None:
    """See ``kernels.Busy``."""
    _busy[(1,)](marks, duration_ns, num_warps=1)
