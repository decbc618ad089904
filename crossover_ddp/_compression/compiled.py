"""Loads the functions of ``kernels.c``, and compiles them first if need be.

See [Note: kernels] in `kernels.py`.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from crossover_ddp._system.machine import c_compiler

logger = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("kernels.c")
# Contraction to fused operations could change bits.
_FLAGS: Final = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
_COMPILE_TIMEOUT_S: Final = 60


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
    library.to_planes.argtypes = library.add_planes.argtypes = [address, address, count]
    for function in (library.encode, library.decode, library.to_planes, library.add_planes):
        function.restype = None
    return library


def to_planes(values: Tensor, planes: Tensor) -> bool:
    """Divide integers into planes of bytes, see `lossless.py`. Return False if no kernel can.

    Args:
        values: flat integers, of which only those of four bytes have a kernel.
        planes: receives the bytes.
    """
    library = load()
    if library is None or values.dtype != torch.int32:
        return False
    library.to_planes(values.data_ptr(), planes.data_ptr(), values.numel())
    return True


def add_planes(planes: Tensor, values: Tensor) -> bool:
    """Add the integers in planes of bytes to ``values``; the inverse of `to_planes`."""
    library = load()
    if library is None or values.dtype != torch.int32:
        return False
    library.add_planes(planes.data_ptr(), values.data_ptr(), values.numel())
    return True


def _compiled() -> ctypes.CDLL:
    """Load the kernels from the cache, or compile them."""
    command = [*c_compiler(), *_FLAGS]
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
