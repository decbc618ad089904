"""Measures an emulated link, by a job that calls `Cluster.measure` of the pipeline planner."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from .jobs import Job
from .nodes import Cluster

_TIMEOUT_S: Final = 120.0
_SCRIPT: Final = """
import json, sys
import torch.distributed as dist
from crossover_ddp.pipeline import Cluster
dist.init_process_group("gloo")
found = Cluster.measure(size_bytes=int(sys.argv[1]))
if dist.get_rank() == 0:
    print(json.dumps([found.bandwidth[0][1], found.latency_s[0][1]]))
dist.destroy_process_group()
"""


def measure(cluster: Cluster, *, duration_s: float = 1.0) -> dict[str, Any]:
    """Measure the link between nodes 0 and 1, one direction at a time.

    Args:
        cluster: shaped, with at least two nodes.
        duration_s: about how long the larger message takes.
    """
    if cluster.rate_mbit is None or cluster.nodes < 2 or cluster.ranks_per_node > 1:
        raise ValueError(
            "expected a shaped cluster of 2 nodes or more with a rank each, got another one"
        )
    size_bytes = int(cluster.rate_mbit * 1e6 / 8 * duration_s)
    timeout_s = _TIMEOUT_S + 16 * duration_s  # the larger message is sent eight times
    with TemporaryDirectory() as out:
        run = cluster.run(
            [Job("link", ["python", "-c", _SCRIPT, str(size_bytes)])], timeout_s, out=out
        )
        bytes_s, latency_s = json.loads(Path(out, "link", "rank0.log").read_text().splitlines()[-1])
    return {
        "rate_mbit": cluster.rate_mbit,
        "mtu": cluster.mtu,
        "goodput_mbit": bytes_s * 8 / 1e6,
        "goodput_per_rate": bytes_s * 8 / 1e6 / cluster.rate_mbit,
        "latency_ms": latency_s * 1e3,
        "dropped_packets": run.dropped,
    }
