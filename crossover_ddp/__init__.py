"""PyTorch DDP communication hooks that make the network time of distributed training useful."""

from .errors import (
    CrossoverError,
    ExchangeError,
    SegmentError,
    TurnError,
    UnsupportedConfigurationError,
)

__all__ = [
    "CrossoverError",
    "ExchangeError",
    "SegmentError",
    "TurnError",
    "UnsupportedConfigurationError",
]
