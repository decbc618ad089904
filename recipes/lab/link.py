"""Measure an emulated link: goodput, and how long a small message takes.

``measure(cluster)`` runs link_end.py on nodes 0 and 1, which send each other a bulk of data at the same
time, as the two halves of an all-reduce do; beside it, on a connection of its own, one byte goes back and forth.
"""

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from .cluster import Cluster
from .network import LabError

_END: Final = Path(__file__).resolve().with_name("link_end.py")
_TIMEOUT_S: Final = 30.0


def measure(cluster: Cluster, *, duration_s: float = 3.0) -> dict[str, Any]:
    """Measure the link between nodes 0 and 1, in both directions at once.

    Args:
        cluster: shaped, with at least two nodes.
        duration_s: about how long the bulk transfer takes.
    """
    if cluster.network is None or cluster.rate_mbit is None or cluster.nodes < 2:
        raise ValueError("expected a shaped cluster of at least 2 nodes, got one without links")
    payload_bytes = int(cluster.rate_mbit * 1e6 / 8 * duration_s)
    dropped, wire_bytes = cluster.dropped(), cluster.sent_bytes()[0]
    ends = _run_ends(cluster, payload_bytes, timeout_s=_TIMEOUT_S + 4 * duration_s)
    goodput_mbit = min(end["goodput_mbit"] for end in ends)
    return {
        "rate_mbit": cluster.rate_mbit,
        "mtu": cluster.mtu,
        "payload_bytes": payload_bytes,
        "goodput_mbit": goodput_mbit,
        "goodput_per_rate": goodput_mbit / cluster.rate_mbit,
        "wire_bytes_per_payload_byte": (cluster.sent_bytes()[0] - wire_bytes) / payload_bytes,
        "round_trip_idle_ms": ends[0]["idle_ms"],
        "round_trip_loaded_ms": ends[0]["loaded_ms"],
        "dropped_packets": cluster.dropped() - dropped,
    }


def _run_ends(cluster: Cluster, payload_bytes: int, *, timeout_s: float) -> list[dict[str, Any]]:
    ports = f"{cluster.port()},{cluster.port()}"
    processes = []
    for node in range(2):
        command = ["python", str(_END), str(node), ports, str(payload_bytes)]
        environment = cluster.environment(node)
        processes.append(cluster.popen(node, command, environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        cluster.end(*processes)
    if any(process.returncode for process in processes):
        raise LabError("expected both ends of the link to measure it, got one that failed; see above")
    return [json.loads(output) for output in outputs]
