"""Play a step: events over devices and network cards. Pure.

A device computes one action at a time, a card sends and receives one transfer at a time ([Note: network cards] in
`cluster.py`), first asked, first served; what has begun is not interrupted. What a device computes next is either
given, or chosen from what is ready under limits of the micro-batches in flight.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .model import (
    BACKWARD,
    EXCHANGE,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Hop,
    Orders,
    StagedChain,
)

_URGENCY: Final = {BACKWARD: 0.0, INPUT_GRADIENT: 0.0, FORWARD: 1.0, WEIGHT_GRADIENT: 2.0}


class StepSpan(NamedTuple):
    """What one device did: it computed an action, or sent its result (``sends``), or exchanged a stage's gradients."""

    device: int
    sends: bool
    begin_s: float
    end_s: float
    action: Action


@dataclass(frozen=True)
class SimulatedStep:
    """The course of a step.

    Args:
        step_s: from the first action to the end of the last action or exchange.
        orders: what each device computed, in order.
        spans: everything that happened.
        peak_bytes: for each device the most that it held.
    """

    step_s: float
    orders: Orders
    spans: tuple[StepSpan, ...]
    peak_bytes: Mapping[int, float]

    def fits(self, memory_bytes: Sequence[float]) -> bool:
        """Return whether no device held more than its memory."""
        return all(peak <= memory_bytes[device] for device, peak in self.peak_bytes.items())


def simulate(chain: StagedChain, orders: Orders) -> SimulatedStep:
    """Play the given orders, in which each action stands once, on its own device, and the devices can go on."""
    numbers = {
        action: float(number)
        for actions in orders.values()
        for number, action in enumerate(actions)
    }
    step = _Play(chain, [chain.microbatches] * len(chain.stages), numbers, given=True).run()
    assert step is not None, "devices wait for each other for ever"
    return step


def list_schedule(
    chain: StagedChain, limits: Sequence[int], priority: Mapping[Action, float] | None = None
) -> SimulatedStep | None:
    """Play a step in which an idle device takes what is ready.

    Args:
        chain: what is to be computed.
        limits: for each stage the micro-batches in flight on each of its devices.
        priority: what is smaller is taken first; default backward before forward before weights' gradients.

    Returns None if the limits let nothing go on.
    """
    return _Play(chain, limits, priority).run()


class _Play:
    """One step being played; times on one clock that begins at 0, tasks by their places in ``chain.tasks``.

    With ``given`` the priorities are the numbers in each device's order, which waits for the next one.
    """

    def __init__(
        self,
        chain: StagedChain,
        limits: Sequence[int],
        priority: Mapping[Action, float] | None,
        *,
        given: bool = False,
    ) -> None:
        self._chain, self._given, self._tasks = chain, given, chain.tasks
        self._left = len(self._tasks)
        self._needs = [task.needs for task in self._tasks]
        actions = [task.action for task in self._tasks]
        urgency = [_URGENCY[each.kind] if priority is None else priority[each] for each in actions]
        # What is smallest is taken first.
        self._keys = [(urgency[place], each.micro, place) for place, each in enumerate(actions)]
        self._limits = [
            limits[each.stage] if each.kind == FORWARD else math.inf for each in actions
        ]
        self._ready: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        self._busy: set[int] = set()
        self._woken: set[int] = set()
        self._in_flight = [0] * (len(chain.stages) * len(chain.cluster))
        self._held: dict[int, float] = defaultdict(float)
        for stage, state_bytes in zip(chain.stages, chain.state_bytes, strict=True):
            for device in stage.devices:
                self._held[device] += state_bytes
        self._peaks = dict(self._held)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._serial = 0
        self._free_s: dict[str, float] = defaultdict(float)
        # For each stage the micro-batches whose last action has not begun, and when the exchange may begin.
        self._unbegun = [chain.microbatches] * len(chain.stages)
        self._exchange_s = [0.0] * len(chain.stages)
        self._orders: dict[int, list[Action]] = {
            d: [] for stage in chain.stages for d in stage.devices
        }
        self._spans: list[StepSpan] = []

    def run(self) -> SimulatedStep | None:
        """Return the step, or None if it came to a halt."""
        for place in range(self._chain.microbatches):  # the first stage's forwards
            self._arrive(place)
        self._wake()
        events = self._events
        while events:
            self._now_s = now_s = events[0][0]
            # Whoever chooses sees all that is ready at this time.
            while events and events[0][0] == now_s:
                _, _, event, number = heapq.heappop(events)
                event(number)
            self._wake()
        if self._left:
            return None
        return SimulatedStep(self._now_s, self._orders, tuple(self._spans), self._peaks)

    def _at(self, time_s: float, event: Callable[[int], None], number: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, event, number))

    # --- compute -------------------------------------------------------------------------------------------

    def _arrive(self, place: int) -> None:
        """Note that one thing which the action needs is there."""
        self._needs[place] -= 1
        if not self._needs[place]:
            device = self._tasks[place].device
            self._ready[device].append(self._keys[place])
            self._woken.add(device)

    def _wake(self) -> None:
        for device in sorted(self._woken - self._busy):
            ready, tasks, in_flight, limits = (
                self._ready[device],
                self._tasks,
                self._in_flight,
                self._limits,
            )
            allowed = [key for key in ready if in_flight[tasks[key[2]].slot] < limits[key[2]]]
            if allowed:
                key = min(allowed)
                if not self._given or key[0] == len(self._orders[device]):
                    ready.remove(key)
                    self._begin(key[2])
        self._woken.clear()

    def _begin(self, place: int) -> None:
        action, device, slot, seconds, *_ = self._tasks[place]
        end_s = self._now_s + seconds
        self._busy.add(device)
        self._orders[device].append(action)
        self._spans.append(StepSpan(device, False, self._now_s, end_s, action))
        if action.kind == FORWARD:
            self._in_flight[slot] += 1
            self._held[device] += self._chain.stored_bytes[action.stage]
            self._peaks[device] = max(self._peaks[device], self._held[device])
        elif action.kind == self._chain.kinds[-1]:
            self._note_exchange(action.stage, end_s)
        self._at(end_s, self._finish, place)

    def _finish(self, place: int) -> None:
        action, device, slot, _, _, then, target, hop = self._tasks[place]
        self._left -= 1
        self._busy.discard(device)
        self._woken.add(device)
        if then is not None:
            self._arrive(then)
        else:
            self._in_flight[slot] -= 1
            self._held[device] -= self._chain.stored_bytes[action.stage]
        if target is not None:
            if hop is None:
                self._arrive(target)
            else:
                self._at(self._transmitted_s(hop, (device,), action), self._arrive, target)

    # --- network -------------------------------------------------------------------------------------------

    def _note_exchange(self, stage: int, end_s: float) -> None:
        """Let the stage's exchange begin when its last action has, on all replicas, come far enough."""
        exchange = self._chain.exchanges[stage]
        self._unbegun[stage] -= 1
        if exchange is not None:
            self._exchange_s[stage] = max(self._exchange_s[stage], end_s - exchange[1])
            if not self._unbegun[stage]:
                self._at(max(self._now_s, self._exchange_s[stage]), self._exchange, stage)

    def _exchange(self, stage: int) -> None:
        exchange = self._chain.exchanges[stage]
        assert exchange is not None
        action = Action(stage, EXCHANGE, 0)
        end_s = self._transmitted_s(exchange[0], self._chain.stages[stage].devices, action)
        self._at(end_s, lambda _: None, stage)

    def _transmitted_s(self, hop: Hop, devices: Sequence[int], action: Action) -> float:
        """Return when the last byte will have arrived; the ports serve first what was asked before."""
        wire_s, latency_s, ports = hop
        begin_s = max(self._now_s, *[self._free_s[port] for port in ports])
        end_s = begin_s + wire_s
        for port in ports:
            self._free_s[port] = end_s
        for device in devices:
            self._spans.append(StepSpan(device, True, begin_s, end_s, action))
        return end_s + latency_s
