"""Measure an emulated link: goodput, and how long a small message takes.

``measure(cluster)`` runs link_end.py as a job, whose ranks 0 and 1 send each other a bulk of data at the same
time, as the two halves of an all-reduce do; beside it, on a connection of its own, one byte goes back and forth.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from .jobs import Job
from .nodes import Cluster

_END: Final = Path(__file__).resolve().with_name("link_end.py")
_TIMEOUT_S: Final = 30.0


def measure(cluster: Cluster, *, duration_s: float = 3.0) -> dict[str, Any]:
    """Measure the link between nodes 0 and 1, in both directions at once.

    Args:
        cluster: shaped, with at least two nodes.
        duration_s: about how long the bulk transfer takes.
    """
    if cluster.rate_mbit is None or cluster.nodes < 2 or cluster.ranks_per_node > 1:
        raise ValueError("expected a shaped cluster of 2 nodes or more with a rank each, got another one")
    payload_bytes = int(cluster.rate_mbit * 1e6 / 8 * duration_s)
    with TemporaryDirectory() as out:
        job = Job("link", ["python", str(_END), str(payload_bytes)])
        run = cluster.run([job], _TIMEOUT_S + 4 * duration_s, out=out)
        ends = [json.loads(Path(out, "link", f"rank{rank}.log").read_text()) for rank in range(2)]
    goodput_mbit = min(end["goodput_mbit"] for end in ends)
    return {
        "rate_mbit": cluster.rate_mbit,
        "mtu": cluster.mtu,
        "payload_bytes": payload_bytes,
        "goodput_mbit": goodput_mbit,
        "goodput_per_rate": goodput_mbit / cluster.rate_mbit,
        "wire_bytes_per_payload_byte": run.sent_bytes[0] / payload_bytes,
        "round_trip_idle_ms": ends[0]["idle_ms"],
        "round_trip_loaded_ms": ends[0]["loaded_ms"],
        "dropped_packets": run.dropped,
    }
