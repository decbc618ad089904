"""Random numbers that depend on a seed, a step and a virtual rank, and on nothing else."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

# Generators of NumPy that no block uses. Blocks may be nested.
_spare: list[Any] = []


def mixed(*parts: int | str) -> int:
    """Return 63 bits that are a hash of ``parts``."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators during the block, and then let them continue as before.

    These are the default generators of torch, on the CPU and on the current CUDA device, of Python,
    and of NumPy if the program has imported it.
    """
    # torch.manual_seed and torch.cuda.is_available() take 0.1 ms each, and so do get_state() and
    # set_state() of NumPy: there the block gets another generator.
    has_cuda = torch.cuda.is_initialized()
    numpy = sys.modules.get("numpy")
    former = torch.get_rng_state()
    former_cuda = torch.cuda.get_rng_state() if has_cuda else None
    former_python = random.getstate()
    former_numpy = None if numpy is None else numpy.random.get_bit_generator()
    own_numpy = None
    torch.default_generator.manual_seed(seed)
    if has_cuda:
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        own_numpy = _spare.pop() if _spare else numpy.random.MT19937()
        numpy.random.set_bit_generator(own_numpy)
        numpy.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(former)
        if former_cuda is not None:
            torch.cuda.set_rng_state(former_cuda)
        random.setstate(former_python)
        if numpy is not None:
            numpy.random.set_bit_generator(former_numpy)
            _spare.append(own_numpy)
