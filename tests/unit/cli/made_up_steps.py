"""Timelines of a made-up job whose compute, buckets and link are known."""

from collections.abc import Sequence
from typing import Any

from crossover_ddp._timeline.merge import RawSpan

STEPS = 20


def span(kind: str, begin_s: float, end_s: float, **detail: Any) -> RawSpan:
    return RawSpan(kind, begin_s, end_s, detail)


def split_rank(
    ready_s: Sequence[float],
    sizes: Sequence[int],
    *,
    compute_s: float,
    alpha_s: float,
    beta_s: float,
    peer_late_s: float = 0.0,
    origin_s: float = 100.0,
    steps: int = STEPS,
    wait_s: float = 0.0,
    first_shape: Sequence[int] | None = None,
    largest_share: float = 0.25,
) -> list[RawSpan]:
    """A rank whose split hook exchanges one bucket after the other; each half takes α + β · size.

    Args:
        ready_s: when each bucket is ready, since the step's begin.
        sizes: bytes of each bucket.
        compute_s: of a step.
        alpha_s: start-up of a half.
        beta_s: seconds per byte of a half.
        peer_late_s: the peer has each bucket so much later: the rank waits for it inside its exchange.
        origin_s: begin of the first step.
        steps: how many.
        wait_s: for the turn, after each exchange.
        first_shape: sizes in the first three steps; default: as later.
        largest_share: of each bucket, that its largest gradient has.
    """
    spans, begin_s = [], origin_s
    for step in range(steps):
        shape = first_shape if first_shape is not None and step < 3 else sizes
        wire_s = 0.0
        for index, size in enumerate(shape):
            at_s = begin_s + (ready_s[index] if len(shape) == len(sizes) else compute_s)
            half_s = alpha_s + beta_s * size
            detail = {
                "bucket": index,
                "bytes": size,
                "largest_bytes": round(size * largest_share),
                "ready_s": at_s,
            }
            detail |= {"device_type": "cpu", "owner": 0}
            start_s = max(wire_s, at_s)
            data_s = max(wire_s, at_s + peer_late_s)
            spans.append(span("reduce_scatter", start_s, data_s + half_s, **detail))
            wire_s = data_s + 2 * half_s
            spans.append(span("all_gather", data_s + half_s, wire_s, **detail))
        end_s = max(begin_s + compute_s, wire_s)
        spans.append(span("compute", begin_s, begin_s + compute_s))
        spans.append(span("exchange", begin_s + compute_s, end_s, device_type="cpu"))
        spans.append(span("wait", end_s, end_s + wait_s))
        begin_s = end_s + wait_s
    return spans


def decoupled_rank(*, compute_s: float, stall_s: float, wire_s: float, steps: int = STEPS) -> list[RawSpan]:
    """A rank with one deferred bucket, whose forward stalls at its begin."""
    spans, begin_s = [], 100.0
    for _ in range(steps):
        hook_s = begin_s + stall_s + compute_s
        detail = {"bucket": 0, "bytes": 1000, "largest_bytes": 1000, "ready_s": hook_s, "device_type": "cpu"}
        spans.append(span("stall", begin_s, begin_s + stall_s, bucket=0))
        spans.append(span("compute", begin_s, hook_s))
        spans.append(span("reduce_scatter", hook_s, hook_s + wire_s / 2, **detail))
        spans.append(span("all_gather", hook_s + wire_s / 2, hook_s + wire_s, **detail))
        begin_s = hook_s
    return spans
