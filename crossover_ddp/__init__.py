"""PyTorch DDP communication hooks that put the network time of distributed training to use."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossover_ddp.auto_hooks import AutoState, auto_hook
    from crossover_ddp.averaging_hooks import (
        AveragingPlan,
        ElasticState,
        LocalSGDState,
        elastic_hook,
        local_sgd_hook,
    )
    from crossover_ddp.codecs import (
        Codec,
        CodecPlan,
        CompressedState,
        Half,
        Int4,
        Int8,
        Lossless,
        PowerSGD,
        SIDCo,
        Threshold,
        compressed_hook,
    )
    from crossover_ddp.comm_hooks import (
        CrossoverState,
        crossover_hook,
        crossover_wrapper,
        reduce_scatter_all_gather_hook,
    )
    from crossover_ddp.decoupled_hooks import (
        DecoupledKFACState,
        DecoupledState,
        compiled,
        decoupled_hook,
    )
    from crossover_ddp.errors import (
        CrossoverError,
        ExchangeError,
        ReplicasDifferError,
        SegmentError,
        TurnError,
        UnsupportedConfigurationError,
    )
    from crossover_ddp.gpu_mutex import GPUMutex
    from crossover_ddp.kfac_hooks import KFACState, kfac_hook
    from crossover_ddp.metrics import metrics_of
    from crossover_ddp.muon_hooks import MuonState, muon_hook, muon_parameters
    from crossover_ddp.owner_hooks import OwnerState, owner_hook
    from crossover_ddp.virtual_ranks import VirtualRanks

__version__ = "0.2.0"

__all__ = [
    "AutoState",
    "AveragingPlan",
    "Codec",
    "CodecPlan",
    "CompressedState",
    "CrossoverError",
    "CrossoverState",
    "DecoupledKFACState",
    "DecoupledState",
    "ElasticState",
    "ExchangeError",
    "GPUMutex",
    "Half",
    "Int4",
    "Int8",
    "KFACState",
    "LocalSGDState",
    "Lossless",
    "MuonState",
    "OwnerState",
    "PowerSGD",
    "ReplicasDifferError",
    "SIDCo",
    "SegmentError",
    "Threshold",
    "TurnError",
    "UnsupportedConfigurationError",
    "VirtualRanks",
    "auto_hook",
    "compiled",
    "compressed_hook",
    "crossover_hook",
    "crossover_wrapper",
    "decoupled_hook",
    "elastic_hook",
    "kfac_hook",
    "local_sgd_hook",
    "metrics_of",
    "muon_hook",
    "muon_parameters",
    "owner_hook",
    "reduce_scatter_all_gather_hook",
]

_MODULES = (
    "auto_hooks",
    "averaging_hooks",
    "codecs",
    "comm_hooks",
    "decoupled_hooks",
    "errors",
    "gpu_mutex",
    "kfac_hooks",
    "metrics",
    "muon_hooks",
    "owner_hooks",
    "virtual_ranks",
)

if not TYPE_CHECKING:

    def __getattr__(name):
        """Import the public modules on the first use of a name: importing torch takes seconds."""
        if name not in (*__all__, *_MODULES):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for module in [importlib.import_module(f"{__name__}.{each}") for each in _MODULES]:
            globals().update(
                {each: getattr(module, each) for each in __all__ if hasattr(module, each)}
            )
        return globals()[name]
