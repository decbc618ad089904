"""Hooks for replicas that do not wait for each other: register one with ``ddp_model.register_comm_hook``.

For links that take longer for a step's gradients than the step computes. Parameters are averaged now and then, and
the exchange runs while training goes on. After local SGD (arXiv 1805.09767), DaSGD (arXiv 2006.00441), DiLoCo
(arXiv 2311.08105), EASGD (arXiv 1412.6651) and EA-wild (HPC Asia 2020). What they do on DDP's reducer is our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

from crossover_ddp._averaging.elastic import ElasticState, elastic_hook
from crossover_ddp._averaging.local_sgd import LocalSGDState, local_sgd_hook
from crossover_ddp._tuning.model import AveragingPlan

__all__ = ["AveragingPlan", "ElasticState", "LocalSGDState", "elastic_hook", "local_sgd_hook"]
