"""Orders of the actions of a step: the known ones, and a search by list scheduling. Pure.

GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), its interleaved form (arXiv 2104.04473) and an order
with split backward after zero bubble (arXiv 2401.10241) serve as baselines. The search is our design: the list
scheduler of `simulate` under many limits of micro-batches in flight and 1F1B, which may let a device wait, then random
changes of limits and priorities.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Final

from .model import BACKWARD, FORWARD, Action, Orders, StagedChain
from .simulate import SimulatedStep, StepSpan, list_schedule, simulate

_DONE: Final = 1 + 1e-9
_SEED: Final = 0


def gpipe(chain: StagedChain) -> Orders:
    """Return the order of all forwards, then all backwards."""
    return _alternating(chain, [chain.microbatches] * len(chain.stages))


def one_forward_one_backward(chain: StagedChain) -> Orders:
    """Return 1F1B: as many forwards ahead as there are stages behind, then one backward for each forward."""
    return _alternating(chain, range(len(chain.stages))[::-1])


def _alternating(chain: StagedChain, ahead: Sequence[int]) -> Orders:
    orders = {}
    for stage, (_, _, devices) in enumerate(chain.stages):
        for place, device in enumerate(devices):
            micros = range(place, chain.microbatches, len(devices))
            kinds = _one_by_one(
                [(stage, FORWARD)] * len(micros), [(stage, BACKWARD)] * len(micros), ahead[stage]
            )
            orders[device] = _numbered(kinds, {stage: micros})
    return orders


def _one_by_one(
    forward: Sequence[tuple[int, str]], backward: Sequence[tuple[int, str]], ahead: int
) -> list[tuple[int, str]]:
    """Take some forwards, then one backward after each forward, then the backwards that are left."""
    pairs = list(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *itertools.chain.from_iterable(pairs), *backward[len(pairs) :]]


def interleaved(chain: StagedChain, devices: int) -> Orders | None:
    """Return interleaved 1F1B for stages that go round ``devices`` several times; None unless they divide M."""
    chunks, micros = len(chain.stages) // devices, chain.microbatches
    if micros % devices:
        return None
    # For each chunk as many micro-batches in a row as there are devices.
    turns = [number // devices % chunks for number in range(micros * chunks)]
    orders = {}
    for place in range(devices):
        forward = [(chunk * devices + place, FORWARD) for chunk in turns]
        backward = [((chunks - 1 - chunk) * devices + place, BACKWARD) for chunk in turns]
        mixed = _one_by_one(forward, backward, 2 * (devices - place - 1) + (chunks - 1) * devices)
        numbers = {chunk * devices + place: range(micros) for chunk in range(chunks)}
        orders[chain.device(place, 0)] = _numbered(mixed, numbers)
    return orders


def _numbered(
    kinds: Sequence[tuple[int, str]], micros: Mapping[int, Sequence[int]]
) -> list[Action]:
    """Give each stage's actions of one kind its micro-batches in turn."""
    left = {(stage, kind): iter(micros[stage]) for stage, kind in kinds}
    return [Action(stage, kind, next(left[stage, kind])) for stage, kind in kinds]


def depths(chain: StagedChain) -> list[int]:
    """Return the micro-batches that each stage's devices must have in flight to keep all stages behind it busy."""
    counts = [len(stage.devices) for stage in chain.stages]
    return [max(len(counts) - k, -(-sum(counts[k:]) // counts[k])) for k in range(len(counts))]


def best_order(chain: StagedChain, *, tries: int = 0) -> SimulatedStep | None:
    """Return the fastest order found that fits in memory; None if not even one micro-batch fits.

    ``tries``: random changes of limits and priorities to try after the regular orders.
    """
    room = [chain.limit(stage) for stage in range(len(chain.stages))]
    if not all(room):
        return None
    bound_s = chain.lower_bound_s() * _DONE
    found: list[tuple[float, int, SimulatedStep, list[int]]] = []

    def is_shortest(limits: list[int], priority: Mapping[Action, float] | None) -> bool:
        step = list_schedule(chain, limits, priority)
        if step is not None:
            found.append((step.step_s, len(found), step, limits))
        return step is not None and step.step_s <= bound_s

    for extra, factor in ((0, 1), (1, 1), (0, 2), (chain.microbatches, 1))[: 4 if tries else 2]:
        limits = [
            min(factor * depth + extra, most)
            for depth, most in zip(depths(chain), room, strict=True)
        ]
        if is_shortest(limits, None):
            return found[-1][2]
    # With different numbers of replicas devices may wait for each other for ever in 1F1B.
    if tries and not chain.split and len({len(stage.devices) for stage in chain.stages}) == 1:
        step = simulate(chain, one_forward_one_backward(chain))
        if step.fits(chain.cluster.memory_bytes):
            found.append((step.step_s, len(found), step, depths(chain)))
    dice = random.Random(_SEED)
    for number in range(tries):
        _, _, step, limits = min(found) if number >= len(found) else sorted(found)[number]
        if number >= len(found) or number % 3 == 0:
            stage = dice.randrange(len(room))
            limits = [*limits]
            limits[stage] = min(room[stage], max(1, limits[stage] + dice.choice((-1, 1))))
        noise_s = dice.choice((0.0, 0.01, 0.05)) * step.step_s
        computed = [span for span in step.spans if not span.sends]
        if is_shortest(
            limits, {span.action: span.begin_s + noise_s * dice.random() for span in computed}
        ):
            return found[-1][2]
    return min(found)[2]


def bands(spans: Sequence[StepSpan]) -> dict[int, list[list[Action]]]:
    """Cut a step at common times, and return for each device its actions in each band.

    A band ends when a device would begin its second action in it. An action needs only such as have begun before it,
    hence of the same or an earlier band: what a rank waits for inside one band never waits for a later one.
    """
    computes = sorted((span for span in spans if not span.sends), key=lambda span: span.begin_s)
    found: dict[int, list[list[Action]]] = {span.device: [[]] for span in computes}
    for _, group in itertools.groupby(computes, key=lambda span: span.begin_s):
        together = list(group)
        if any(found[span.device][-1] for span in together):
            for each in found.values():
                each.append([])
        for span in together:
            found[span.device][-1].append(span.action)
    return found
