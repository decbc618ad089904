"""Chooses a codec from recorded steps, the measured link, and the codecs' processor time."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._tuning.link_probe import recorded_by_all
from crossover_ddp._tuning.model import EXACT, CodecCost, weakest_codec
from crossover_ddp.errors import UnsupportedConfigurationError

from .codec import Codec, CodecChoice, Half, Int4, Int8, PerPair, SIDCo, Threshold, Whole, codecs_of
from .coded_link import suits_one_hop
from .kernels import kernel_of
from .low_rank import PowerSGD

AnyCodec = CodecChoice | PowerSGD | None

CANDIDATES: Final[tuple[AnyCodec, ...]] = (None, Half(), Int8(), SIDCo(0.05), SIDCo(0.01))
_NUMEL: Final = 1 << 20
# Processor time to encode and to decode, in seconds per byte of float32, including copies.
# Measured: docs/measurements.md, "Codecs on one core a rank".
_FUSED_SECONDS: Final[Mapping[type, tuple[float, float]]] = {
    Half: (0.31e-9, 0.17e-9),
    Int8: (0.29e-9, 0.16e-9),
    Int4: (0.32e-9, 0.16e-9),
}
_SECONDS: Final[Mapping[type, tuple[float, float]]] = {
    Whole: (0.2e-9, 0.1e-9),
    Half: (0.66e-9, 0.32e-9),
    Int8: (1.1e-9, 0.35e-9),
    Int4: (1.2e-9, 0.30e-9),
    SIDCo: (1.5e-9, 0.25e-9),
    Threshold: (1.5e-9, 0.25e-9),
}


@dataclass(frozen=True)
class CodecPlan:
    """The chosen codec, and the predicted step time.

    Args:
        codec: the chosen codec; None means no codec.
        step_s: the predicted time per step with that codec, in seconds.
        compute_s: the part of ``step_s`` that is computation, including encoding and decoding.
        options: for each candidate, the codec, its rate and its predicted seconds per step.
    """

    codec: AnyCodec
    step_s: float
    compute_s: float
    options: tuple[tuple[AnyCodec, float, float], ...]


def plan_from(
    group: dist.ProcessGroup, present: AnyCodec, candidates: Sequence[AnyCodec]
) -> CodecPlan:
    """Plan from the steps recorded with the codec ``present``. **Collective**.

    All ranks return rank 0's plan.
    """
    if any(isinstance(each, tuple) and isinstance(each[0], PerPair) for each in candidates):
        raise ValueError(
            "expected candidates that suit all pairs of ranks, got a PerPair among them; pass its "
            "codecs, and make the table by hand where links differ"
        )
    exchange = Exchange.of(group)
    ranks_inside = exchange.networks.ranks_inside
    present_cost = cost_of(present, group.size(), ranks_inside)
    costs = [cost_of(codec, group.size(), ranks_inside) for codec in candidates]
    works, link = recorded_by_all(group, exchange.steps.records.steps)
    # The recorded steps, less the time that the present codec takes.
    bare = works[0].encoded(-present_cost.hook_s)
    choice, predicted = weakest_codec(bare, link, costs)
    total = sum(bucket.size_bytes for bucket in bare.buckets)
    compute_s = bare.compute_s + (costs[choice].hook_s + costs[choice].worker_s) * total
    options = tuple(zip(candidates, [cost.rate for cost in costs], predicted, strict=True))
    return CodecPlan(candidates[choice], predicted[choice], compute_s, options)


def cost_of(codec: AnyCodec, world_size: int, ranks_inside: int = 1) -> CodecCost:
    """Return what ``codec`` costs one rank.

    A rank encodes its messages to the other owners, decodes the messages that it receives, encodes
    its part of the mean, and decodes the whole mean. In one hop it encodes its gradients, and
    decodes both ranks' messages. With two levels it does so for its column alone, on other threads.

    Args:
        codec: the codec.
        world_size: the number of ranks.
        ranks_inside: the number of ranks on a node if the exchange has two levels, otherwise 1.
    """
    if isinstance(codec, PowerSGD):
        raise UnsupportedConfigurationError(
            f"expected codecs whose rate does not depend on the model to plan with, got {codec!r}; "
            "train some steps with it and with others, and compare them"
        )
    if codec is None or world_size < 2:
        return EXACT
    if ranks_inside > 1 and len(codecs_of(codec)[0].codecs) == 1:  # otherwise all pairs exchange
        flat = cost_of(codec, world_size // ranks_inside)
        return CodecCost(flat.rate, 0.0, (flat.hook_s + flat.worker_s) / ranks_inside)
    push, pull = codecs_of(codec)
    to_peers = [_half_of(push.between(0, peer)) for peer in range(1, world_size)]
    push_rate, push_encode_s, push_decode_s = map(statistics.mean, zip(*to_peers, strict=True))
    if suits_one_hop((push, pull), world_size):
        return CodecCost(push_rate, push_encode_s, 2 * push_decode_s)
    pull_rate, pull_encode_s, pull_decode_s = _half_of(pull)
    others = 1 - 1 / world_size
    worker_s = others * push_decode_s + pull_encode_s / world_size + pull_decode_s
    return CodecCost((push_rate + pull_rate) / 2, others * push_encode_s, worker_s)


def _half_of(codec: Codec) -> tuple[float, float, float]:
    """Return a codec's rate, and its encoding and decoding times in seconds per float32 byte."""
    table = _SECONDS if kernel_of(codec) is None else _FUSED_SECONDS
    seconds = table.get(type(codec))
    if seconds is None:
        raise UnsupportedConfigurationError(
            f"expected codecs of crossover_ddp.codecs to plan with, got {codec!r}, whose processor "
            "time is not known; train some steps with it and with others, and compare them"
        )
    return rate_of(codec), *seconds


def rate_of(codec: Codec) -> float:
    """Return the bytes of a long message divided by those of its values in float32. Pure."""
    return codec.nbytes(_NUMEL) / (4 * _NUMEL)
