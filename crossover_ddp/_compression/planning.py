"""Choose a codec from recorded steps, a measured link, and what codecs cost."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._tuning.link_probe import recorded_by_all
from crossover_ddp._tuning.model import EXACT, CodecCost, weakest_codec
from crossover_ddp.errors import UnsupportedConfigurationError

from .codec import Codec, CodecChoice, Half, Int8, PerPair, SIDCo, Threshold, Whole, codecs_of

AnyCodec = CodecChoice | None

CANDIDATES: Final[tuple[AnyCodec, ...]] = (None, Half(), Int8(), SIDCo(0.05), SIDCo(0.01))
_NUMEL: Final = 1 << 20
# Of processor time for each byte of float32, encoding and decoding, copies included: docs/measurements.md, "Codecs".
_SECONDS: Final[Mapping[type, tuple[float, float]]] = {
    Whole: (0.2e-9, 0.1e-9),
    Half: (0.45e-9, 0.15e-9),
    Int8: (0.69e-9, 0.08e-9),
    SIDCo: (1.2e-9, 0.1e-9),
    Threshold: (1.2e-9, 0.1e-9),
}


@dataclass(frozen=True)
class CodecPlan:
    """Which codec to take, and what steps are expected to take.

    Args:
        codec: the choice; None: none.
        step_s: predicted seconds per step with it.
        compute_s: of these the computation, encoding and decoding included.
        options: each candidate with its rate and its predicted seconds per step.
    """

    codec: AnyCodec
    step_s: float
    compute_s: float
    options: tuple[tuple[AnyCodec, float, float], ...]


def plan_from(
    group: dist.ProcessGroup, present: AnyCodec, candidates: Sequence[AnyCodec]
) -> CodecPlan:
    """Return rank 0's plan on all ranks, from steps that were recorded with ``present``. **Collective**."""
    if any(isinstance(each, tuple) and isinstance(each[0], PerPair) for each in candidates):
        raise ValueError(
            "expected candidates that suit all pairs of ranks, got a PerPair among them; pass its codecs, and make the "
            "table by hand where links differ"
        )
    bare_cost, *costs = [cost_of(codec, group.size()) for codec in (present, *candidates)]
    works, link = recorded_by_all(group, Exchange.of(group).steps.records.steps)
    bare = works[0].encoded(-bare_cost.hook_s)
    place, predicted = weakest_codec(bare, link, costs)
    total = sum(bucket.size_bytes for bucket in bare.buckets)
    compute_s = bare.compute_s + (costs[place].hook_s + costs[place].worker_s) * total
    options = tuple(zip(candidates, [cost.rate for cost in costs], predicted, strict=True))
    return CodecPlan(candidates[place], predicted[place], compute_s, options)


def cost_of(codec: AnyCodec, world_size: int) -> CodecCost:
    """Return what ``codec`` costs a rank: it encodes what is not its own, and its own part of the mean again."""
    if codec is None or world_size < 2:
        return EXACT
    push, pull = codecs_of(codec)
    there = zip(*[_half_of(push.between(0, peer)) for peer in range(1, world_size)], strict=True)
    push_rate, push_encode_s, push_decode_s = (statistics.mean(each) for each in there)
    pull_rate, pull_encode_s, pull_decode_s = _half_of(pull)
    others = 1 - 1 / world_size
    worker_s = others * push_decode_s + pull_encode_s / world_size + pull_decode_s
    return CodecCost((push_rate + pull_rate) / 2, others * push_encode_s, worker_s)


def _half_of(codec: Codec) -> tuple[float, float, float]:
    """Return the bytes of a message over those of float32, and the seconds of encoding and decoding a byte of it."""
    if (seconds := _SECONDS.get(type(codec))) is None:
        raise UnsupportedConfigurationError(
            f"expected codecs of crossover_ddp.codecs to plan with, got {codec!r}, whose processor time is not known; "
            "train some steps with it and with others, and compare them"
        )
    return codec.nbytes(_NUMEL) / (4 * _NUMEL), *seconds
