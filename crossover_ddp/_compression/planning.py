"""Choose a codec from recorded steps, a measured link, and what codecs cost on this machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from crossover_ddp._engine.step_records import StepRecord
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.link_probe import measure_link, measure_pairs
from crossover_ddp._planning import (
    BucketTimes,
    CodecCost,
    Link,
    Predict,
    Workload,
    all_reduce_step_s,
    pair_codecs,
    weakest_codec,
)
from crossover_ddp.errors import UnsupportedConfigurationError

from .choice import CodecChoice, PerPair, codecs_of
from .codec import Codec
from .costs import measure_codec
from .half import Half
from .int8 import Int8
from .sidco import SIDCo

AnyCodec = CodecChoice | None

CANDIDATES: Final[tuple[AnyCodec, ...]] = (None, Half(), Int8(), SIDCo(0.05), SIDCo(0.01))


@dataclass(frozen=True)
class CodecPlan:
    """Which codec to take, and what steps are expected to take.

    Args:
        codec: the choice; None: none. Where links differ, a `PerPair` that spares fast ones, and the choice for all.
        step_s: predicted seconds per step with the choice for all pairs.
        compute_s: of these the computation, encoding and decoding included.
        options: each candidate with its rate and its predicted seconds per step.
    """

    codec: AnyCodec
    step_s: float
    compute_s: float
    options: tuple[tuple[AnyCodec, float, float], ...]


def workload_of_records(records: Sequence[StepRecord]) -> Workload | None:
    """Return the medians of recorded steps; None without any."""
    if not records:
        return None
    buckets = [
        BucketTimes(size_bytes, statistics.median(each.buckets[place][1] for each in records), 0.0)
        for place, (size_bytes, _) in enumerate(records[-1].buckets)
    ]
    # No record tells the end of forward: all is "backward", whose buckets are ready at their moments.
    return Workload(0.0, max(bucket.ready_s for bucket in buckets), tuple(buckets))


def plan_of_group(group: dist.ProcessGroup, present: AnyCodec, candidates: Sequence[AnyCodec]) -> CodecPlan:
    """Return rank 0's plan for the steps that ``group`` has exchanged; see `plan_from`. **Collective**."""
    work = workload_of_records(Exchange.of(group).engine.records.last())
    return plan_from(work, group, present=present, candidates=candidates)


def plan_from(
    work: Workload | None,
    group: dist.ProcessGroup,
    *,
    present: AnyCodec = None,
    candidates: Sequence[AnyCodec] = CANDIDATES,
    predict: Predict = all_reduce_step_s,
) -> CodecPlan:
    """Return rank 0's plan on all ranks.

    Args:
        work: recorded with ``present``.
        group: whose link is measured.
        present: the codec of the recorded steps, whose encoding is taken away again.
        candidates: the weakest first.
        predict: of the steps.

    **Collective**: all ranks, between two steps.
    """
    recorded: list[Any] = [None] * group.size()
    dist.all_gather_object(recorded, work is not None, group=group)
    if work is None or not all(recorded):
        raise UnsupportedConfigurationError(
            f"expected recorded steps on all ranks, got {recorded}; train some ten steps before, with buckets that "
            "stay as they are"
        )
    if group.size() == 1:
        raise UnsupportedConfigurationError("expected at least two ranks to plan for, got 1; pass codec=None")
    if any(isinstance(each, tuple) and isinstance(each[0], PerPair) for each in candidates):
        raise ValueError(
            "expected candidates that suit all pairs of ranks, got a PerPair among them; pass its codecs: tables are "
            "made where links differ"
        )
    link = measure_link(group)
    costs = [measure_codec(codec, group.size()) for codec in candidates]
    bare = _without(work, measure_codec(present, group.size()))
    place, predicted = weakest_codec(bare, link, costs, predict)
    total = sum(bucket.size_bytes for bucket in work.buckets)
    compute_s = bare.compute_s + (costs[place].hook_s + costs[place].worker_s) * total
    rates = [cost.rate for cost in costs]
    pushed = [_push_rate(codec, cost, group.size()) for codec, cost in zip(candidates, costs, strict=True)]
    choice: list[Any] = [(place, predicted, rates, pushed, compute_s, link)]
    dist.broadcast_object_list(choice, group=group, group_src=0)
    place, predicted, rates, pushed, compute_s, link = choice[0]
    options = tuple([*zip(candidates, rates, predicted, strict=True)])
    return CodecPlan(_by_pair(group, link, candidates, pushed, place), predicted[place], compute_s, options)


def _by_pair(
    group: dist.ProcessGroup,
    link: Link,
    candidates: Sequence[AnyCodec],
    rates: Sequence[float],
    chosen: int,
) -> AnyCodec:
    """Return the chosen codec, with weaker ones for the pairs of ranks whose link is faster. **Collective**."""
    codec, routes = candidates[chosen], Exchange.of(group).routes
    if codec is None or group.size() == 2 or not all(map(routes.is_on_ring, routes.sides)):
        return codec
    pushes = [_push_of(each) for each in candidates]
    places = pair_codecs(rates, chosen, measure_pairs(group), link)
    pairs = PerPair(tuple([tuple([pushes[place] for place in row]) for row in places]))
    return codec if all(each == pushes[chosen] for each in pairs.all()) else (pairs, codecs_of(codec).pull)


def _push_rate(codec: AnyCodec, cost: CodecCost, world_size: int) -> float:
    """Return the bytes of a message to an owner over those of float32."""
    return measure_codec(_push_of(codec), world_size).rate if isinstance(codec, tuple) else cost.rate


def _push_of(codec: AnyCodec) -> Codec | None:
    push = codec[0] if isinstance(codec, tuple) else codec
    assert not isinstance(push, PerPair)  # refused before
    return push


def _without(work: Workload, cost: CodecCost) -> Workload:
    """Take away what encoding has added to the compute."""
    filled, buckets = 0, []
    for bucket in work.buckets:
        filled += bucket.size_bytes
        buckets.append(bucket._replace(ready_s=max(0.0, bucket.ready_s - cost.hook_s * filled)))
    return Workload(work.forward_s, max(0.0, work.backward_s - cost.hook_s * filled), tuple(buckets))
