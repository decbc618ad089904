"""The passes of the codecs over a tile, fused in C.

[Note: kernels] On a CPU a codec's plain form, in `codec.py`, makes about ten passes over a tile, and
each of them is an operation of torch. `kernels.c` needs two, and takes about a quarter of the time to
encode and half of it to decode. Its bits are those of the plain form. So ranks may differ in whether
they use it, and a test compares both. The machine's C compiler makes it when a bucket is first
encoded, in half a second. The result is kept in the user's cache directory. Without a compiler, and
for all other codecs, dtypes and devices, the plain form is used.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .codec import Codec, Half, Int4, Int8

logger = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("kernels.c")
# Contraction to fused operations could change bits.
_FLAGS: Final = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
_COMPILE_TIMEOUT_S: Final = 60
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


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled kernels; None, and a line in the log, if they cannot be compiled."""
    try:
        library = _compiled()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or ""
        logger.info("codecs use their plain form, which is slower: %s %s", error, output.strip())
        return None
    address, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    runs = address, count
    library.encode.argtypes = [flag, *[address] * 3, *runs, count, count, flag]
    library.decode.argtypes = [flag, *[address] * 2, *runs, count, count, flag, ctypes.c_float]
    library.encode.restype = library.decode.restype = None
    return library


def _compiled() -> ctypes.CDLL:
    """Load the kernels from the cache, or compile them."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *_FLAGS]
    # A home directory may be shared by machines with different processors.
    parts = [_SOURCE.read_text(), *command, platform.machine(), _processor()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "crossover_ddp"
    kept = cache / f"codecs-{name}.so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(os.fspath(kept))
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=cache))
        except OSError:  # the cache cannot be written
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        made = Path(directory, kept.name)
        subprocess.run(
            [*command, "-o", made, _SOURCE],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        library = ctypes.CDLL(os.fspath(made))
        if made.parent.parent == cache:
            made.replace(kept)  # other ranks may do so at the same time
        return library


def _processor() -> str:
    """Return the features of the processor, for which the kernels are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
