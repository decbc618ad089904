"""PyTorch DDP communication hooks that make the network time of distributed training useful."""

from crossover_ddp.averaging_hooks import (
    AveragingPlan,
    ElasticState,
    LocalSGDState,
    elastic_hook,
    local_sgd_hook,
)
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
from crossover_ddp.muon_hooks import MuonState, muon_hook

__all__ = [
    "AveragingPlan",
    "CompressedState",
    "CrossoverError",
    "CrossoverState",
    "DecoupledState",
    "ElasticState",
    "ExchangeError",
    "GPUMutex",
    "Half",
    "Int8",
    "KFACState",
    "LocalSGDState",
    "MuonState",
    "SIDCo",
    "SegmentError",
    "Threshold",
    "TurnError",
    "UnsupportedConfigurationError",
    "compressed_hook",
    "crossover_hook",
    "crossover_wrapper",
    "decoupled_hook",
    "elastic_hook",
    "kfac_hook",
    "local_sgd_hook",
    "muon_hook",
    "reduce_scatter_all_gather_hook",
]
