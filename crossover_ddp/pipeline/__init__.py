"""Pipeline planning: finds stages, their devices, and the order of all actions for a cluster.

    profile = Profile.measure(layers, sample)
    plan = plan_pipeline(profile, Cluster.load("cluster.json"), microbatches=16)
    Runner(plan, layers, loss_fn).step(x, y)

The problem is the one that SPP states (arXiv 2204.10562, abstract). The solution is our own
design. See docs/pipeline.md.
"""

from .cluster import DeviceCluster as Cluster
from .model import Action, Stage
from .plan import Plan
from .planning import plan_pipeline
from .profile import LayerProfile, Profile
from .run import PipelineRunner as Runner

__all__ = [
    "Action",
    "Cluster",
    "LayerProfile",
    "Plan",
    "Profile",
    "Runner",
    "Stage",
    "plan_pipeline",
]
