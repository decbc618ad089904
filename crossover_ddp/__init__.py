"""PyTorch DDP communication hooks that make the network time of distributed training useful."""

from crossover_ddp.codecs import CompressedState, Half, Int8, SIDCo, Threshold, compressed_hook
from crossover_ddp.comm_hooks import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.errors import (
    CrossoverError,
    ExchangeError,
    SegmentError,
    TurnError,
    UnsupportedConfigurationError,
)
from crossover_ddp.gpu_mutex import GPUMutex
from crossover_ddp.kfac_hooks import KFACState, kfac_hook

__all__ = [
    "CompressedState",
    "CrossoverError",
    "CrossoverState",
    "DecoupledState",
    "ExchangeError",
    "GPUMutex",
    "Half",
    "Int8",
    "KFACState",
    "SIDCo",
    "SegmentError",
    "Threshold",
    "TurnError",
    "UnsupportedConfigurationError",
    "compressed_hook",
    "crossover_hook",
    "crossover_wrapper",
    "decoupled_hook",
    "kfac_hook",
    "reduce_scatter_all_gather_hook",
]
