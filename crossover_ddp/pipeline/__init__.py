"""Pipeline planning: finds stages, their devices, and the order of all actions for a cluster.

    profile = Profile.measure(layers, sample)
    cluster = Cluster.load("cluster.json")
    plan = plan_pipeline(profile, cluster, microbatches=16, runtime="torch")
    stages = plan.build_stages(layers, device)
    plan.schedule(stages, loss_fn).step(x, target=y)

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
