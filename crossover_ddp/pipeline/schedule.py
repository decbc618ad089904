"""Orders for the actions of a step: the known ones, and a search by list scheduling. Pure.

The baselines are GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), its
interleaved form (arXiv 2104.04473), and an order with a split backward that follows zero bubble
(arXiv 2401.10241). The search is our design. First it tries the list scheduler of `simulate` under
several limits on the micro-batches in flight. Then it tries 1F1B, in which a device may wait
although an action is ready. Finally it tries random changes of limits and priorities.
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
    """Return the order that runs all forwards, then all backwards."""
    return _alternating(chain, [chain.microbatches] * len(chain.stages))


def one_forward_one_backward(chain: StagedChain) -> Orders:
    """Return the 1F1B order.

    A stage first computes one forward for each later stage. Then it alternates between forward and
    backward.
    """
    return _alternating(chain, range(len(chain.stages))[::-1])


def _alternating(chain: StagedChain, ahead: Sequence[int]) -> Orders:
    orders = {}
    for stage, (_, _, devices, _) in enumerate(chain.stages):
        for device in devices:
            micros = [m for m in range(chain.microbatches) if chain.device(stage, m) == device]
            kinds = _one_by_one(
                [(stage, FORWARD)] * len(micros), [(stage, BACKWARD)] * len(micros), ahead[stage]
            )
            orders[device] = _numbered(kinds, {stage: micros})
    return orders


def _one_by_one(
    forward: Sequence[tuple[int, str]], backward: Sequence[tuple[int, str]], ahead: int
) -> list[tuple[int, str]]:
    """Return ``ahead`` forwards, then forwards and backwards in turn, then the other backwards."""
    pairs = list(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *itertools.chain.from_iterable(pairs), *backward[len(pairs) :]]


def interleaved(chain: StagedChain, devices: int) -> Orders | None:
    """Return the interleaved 1F1B order, in which each device has several stages.

    Stage k is on device k modulo ``devices``. Return None unless ``devices`` divides M.
    """
    chunks = len(chain.stages) // devices
    micros = chain.microbatches
    if micros % devices:
        return None
    # A device computes `devices` micro-batches of a chunk in a row.
    sequence = [number // devices % chunks for number in range(micros * chunks)]
    orders = {}
    for place in range(devices):
        forward = [(chunk * devices + place, FORWARD) for chunk in sequence]
        backward = [((chunks - 1 - chunk) * devices + place, BACKWARD) for chunk in sequence]
        mixed = _one_by_one(forward, backward, 2 * (devices - place - 1) + (chunks - 1) * devices)
        numbers = {chunk * devices + place: range(micros) for chunk in range(chunks)}
        orders[chain.device(place, 0)] = _numbered(mixed, numbers)
    return orders


def _numbered(
    kinds: Sequence[tuple[int, str]], micros: Mapping[int, Sequence[int]]
) -> list[Action]:
    """Create the actions. Within each kind, a stage's micro-batches are assigned in order."""
    unused = {(stage, kind): iter(micros[stage]) for stage, kind in kinds}
    return [Action(stage, kind, next(unused[stage, kind])) for stage, kind in kinds]


def depths(chain: StagedChain) -> list[int]:
    """Return how many micro-batches each stage needs in flight to keep all later stages busy."""
    counts = [len(stage.devices) for stage in chain.stages]
    return [max(len(counts) - k, -(-sum(counts[k:]) // counts[k])) for k in range(len(counts))]


def best_order(chain: StagedChain, *, tries: int = 0) -> SimulatedStep | None:
    """Return the fastest order found that fits in memory.

    Return None if a stage has no room even for a single micro-batch. After the regular orders,
    try ``tries`` random changes of limits and priorities.
    """
    if not chain.fits():
        return None
    room = [
        max(chain.room(number, device) for device in stage.devices)
        for number, stage in enumerate(chain.stages)
    ]
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
    known = _known_order(chain) if tries else None
    if known is not None:
        step = simulate(chain, known)
        if step.fits(chain.cluster.memory_bytes):
            found.append((step.step_s, len(found), step, depths(chain)))
    if not found:
        # Stages of one device take each other's memory. With one micro-batch each, all have room.
        is_shortest([1] * len(room), None)
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


def _known_order(chain: StagedChain) -> Orders | None:
    """Return 1F1B, or its interleaved form for looped stages. None if neither is defined."""
    if chain.split:
        return None
    used = [device for stage in chain.stages for device in stage.devices]
    if len(set(used)) == len(used):
        # 1F1B may deadlock if stages have different numbers of replicas.
        equal = len({len(stage.devices) for stage in chain.stages}) == 1
        patterns = any(stage.pattern for stage in chain.stages)
        return one_forward_one_backward(chain) if equal and not patterns else None
    count = len(set(used))
    is_looped = len(used) == len(chain.stages) and used == (used[:count] * len(used))[: len(used)]
    return interleaved(chain, count) if is_looped and not len(used) % count else None


def bands(spans: Sequence[StepSpan]) -> dict[int, list[list[Action]]]:
    """Cut a step into bands at common times, and return the actions of each device by band.

    A band ends when a device would begin its second action in it. An action needs only actions that
    began earlier. Those are in the same band or an earlier one, so a rank never waits for a later
    band.
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
