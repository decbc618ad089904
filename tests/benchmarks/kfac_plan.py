"""What `kfac_worker.py` shall do; by itself, since the worker needs nothing of the lab."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A model of equal layers without biases, and the ways to train it, which take turns step by step.

    Args:
        ways: of "ddp", "split", "kfac", "early" (K-FAC, input factors leave during forward) and "local".
        layers, width: of the model.
        samples: of a mini-batch of one rank.
        cap_mb: of DDP's buckets.
        factor_update_steps, inv_update_steps: as for ``KFACState``.
        warm_up: steps that are not counted: buckets are rebuilt, then factors are planned for them.
        steps: that are counted, of each way.
    """

    ways: tuple[str, ...]
    layers: int
    width: int
    samples: int
    cap_mb: float = 4.0
    factor_update_steps: int = 2
    inv_update_steps: int = 3
    warm_up: int = 4
    steps: int = 6
