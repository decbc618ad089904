"""Orders for the actions of a step: the known ones, and a search by list scheduling. Pure.

The baselines are GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), its
interleaved form (arXiv 2104.04473), and an order with a split backward that follows zero bubble
(arXiv 2401.10241). The search is our design. First it tries the list scheduler of `simulate` under
several limits on the micro-batches in flight. Then it tries 1F1B, in which a device may wait
although an action is ready. Then it tries random changes of limits and priorities. Finally it
exchanges neighbours in the best order.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Final

from .model import BACKWARD, FORWARD, Action, Orders, StagedChain
from .simulate import SimulatedStep, StepSpan, list_schedule, simulate, try_simulate

_DONE: Final = 1 + 1e-9
_SEED: Final = 0
_TEMPERATURE: Final = 0.02
"""Changes that lengthen the step by this ratio are kept with a probability of 1/e."""
_RETURNS: Final = 0.05
"""The probability that the search returns to the best order after a change."""


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

    Return None if a stage has no room even for a single micro-batch. After the regular orders, try
    ``tries`` random changes of limits and priorities, and as many of the order itself.
    """
    if not chain.fits():
        return None
    search = _OrderSearch(chain)
    search.try_regular(thoroughly=tries > 0)
    search.try_priorities(tries)
    search.try_exchanges(tries)
    return min(search.found)[2]


class _OrderSearch:
    """The search for the best order. It ends when an order meets the chain's lower bound."""

    def __init__(self, chain: StagedChain) -> None:
        self._chain = chain
        self._bound_s = chain.lower_bound_s() * _DONE
        self._dice = random.Random(_SEED)
        # How many micro-batches of each stage fit in the largest of its devices.
        self._room = [
            max(chain.room(number, device) for device in stage.devices)
            for number, stage in enumerate(chain.stages)
        ]
        # Step times, with numbers so that equal ones are not compared further, and limits.
        self.found: list[tuple[float, int, SimulatedStep, list[int]]] = []

    def try_regular(self, *, thoroughly: bool) -> None:
        """Try the list scheduler under several limits, and the known orders."""
        variants = ((0, 1), (1, 1), (0, 2), (self._chain.microbatches, 1))
        for extra, factor in variants if thoroughly else variants[:2]:
            limits = [
                min(factor * depth + extra, most)
                for depth, most in zip(depths(self._chain), self._room, strict=True)
            ]
            self._schedule(limits, None)
        known = _known_order(self._chain) if thoroughly else None
        if known is not None:
            self._add(simulate(self._chain, known), depths(self._chain))
        if not self.found:
            # Stages of one device take each other's memory. With one micro-batch, all have room.
            self._schedule([1] * len(self._room), None)

    def try_priorities(self, tries: int) -> None:
        """Try the list scheduler with start times of earlier steps as priorities, varied a little."""
        dice = self._dice
        for number in range(tries):
            if self._is_done():
                return
            is_new = number < len(self.found)
            _, _, step, limits = sorted(self.found)[number] if is_new else min(self.found)
            if not is_new or number % 3 == 0:
                stage = dice.randrange(len(self._room))
                limits = [*limits]
                more = limits[stage] + dice.choice((-1, 1))
                limits[stage] = min(self._room[stage], max(1, more))
            noise_s = dice.choice((0.0, 0.01, 0.05)) * step.step_s
            computed = [span for span in step.spans if not span.sends]
            priority = {span.action: span.begin_s + noise_s * dice.random() for span in computed}
            self._schedule(limits, self._in_order(priority))

    def try_exchanges(self, tries: int) -> None:
        """Exchange neighbours in the best order, by simulated annealing.

        A device of such an order may wait for an action although another one is ready.
        """
        dice = self._dice
        best_s, _, current, limits = min(self.found)
        for _ in range(tries):
            if self._is_done():
                return
            orders = {device: [*actions] for device, actions in current.orders.items()}
            for _ in range(dice.choice((1, 1, 2, 3))):
                _swap_two(orders[dice.choice([*orders])], dice)
            step = try_simulate(self._chain, orders)
            if step is None or not step.fits(self._chain.cluster.memory_bytes):
                continue
            if step.step_s < best_s:
                self._add(step, limits)
                best_s = step.step_s
            worse = step.step_s / current.step_s - 1
            if worse <= 0 or dice.random() < math.exp(-worse / _TEMPERATURE):
                current = step
            if dice.random() < _RETURNS:
                current = min(self.found)[2]

    def _is_done(self) -> bool:
        return min(self.found)[0] <= self._bound_s

    def _schedule(self, limits: list[int], priority: Mapping[Action, float] | None) -> None:
        if self.found and self._is_done():
            return
        step = list_schedule(self._chain, limits, priority)
        if step is not None:
            self._add(step, limits)

    def _add(self, step: SimulatedStep, limits: list[int]) -> None:
        if step.fits(self._chain.cluster.memory_bytes):
            self.found.append((step.step_s, len(self.found), step, limits))

    def _in_order(self, priority: Mapping[Action, float]) -> Mapping[Action, float]:
        """Let each stage compute its micro-batches in order.

        Without replicas, micro-batches can be exchanged, and torch's runtime needs them in order on
        the last stage.
        """
        if any(len(stage.devices) > 1 for stage in self._chain.stages):
            return priority
        found: dict[Action, float] = {}
        for _, group in itertools.groupby(sorted(priority), key=lambda action: action[:2]):
            actions = [*group]
            found.update(zip(actions, sorted(priority[each] for each in actions), strict=True))
        return found


def _swap_two(actions: list[Action], dice: random.Random) -> None:
    """Exchange two neighbours in the order, at random: of different stages or kinds."""
    places = [
        place
        for place, (one, two) in enumerate(itertools.pairwise(actions))
        if one[:2] != two[:2] and (one.stage, one.micro) != (two.stage, two.micro)
    ]
    if places:
        place = dice.choice(places)
        actions[place], actions[place + 1] = actions[place + 1], actions[place]


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
