"""Simulates a step by the events on its devices and network cards. Pure.

A device computes one action at a time. A card sends one transfer and receives one transfer at a
time ([Note: network cards] in `cluster.py`), in the order of requests. Actions and transfers are
not interrupted. A device's next action is either given, or chosen from the ready actions within
limits on the micro-batches in flight.
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
    ROUNDED,
    WEIGHT_GRADIENT,
    Action,
    Hop,
    Orders,
    StagedChain,
)

_URGENCY: Final = {BACKWARD: 0.0, INPUT_GRADIENT: 0.0, FORWARD: 1.0, WEIGHT_GRADIENT: 2.0}


class StepSpan(NamedTuple):
    """A period in which a device was busy.

    It computed an action, sent the result of an action, or exchanged the gradients of a stage.
    """

    device: int
    # Whether the device sent or exchanged. Otherwise it computed.
    sends: bool
    begin_s: float
    end_s: float
    action: Action


@dataclass(frozen=True)
class SimulatedStep:
    """The result of simulating a step.

    Args:
        step_s: the time in seconds from the first action to the end of the last action or exchange.
        orders: the actions that each device computed, in order.
        spans: the spans of all actions, transfers and exchanges.
        peak_bytes: the peak memory of each device.
    """

    step_s: float
    orders: Orders
    spans: tuple[StepSpan, ...]
    peak_bytes: Mapping[int, float]

    def fits(self, memory_bytes: Sequence[float]) -> bool:
        """Return whether every device stayed within its memory."""
        return all(
            peak <= memory_bytes[device] * ROUNDED for device, peak in self.peak_bytes.items()
        )


def simulate(chain: StagedChain, orders: Orders) -> SimulatedStep:
    """Simulate a step with the given orders.

    Each action must occur exactly once, on its own device, and the orders must not deadlock.
    """
    step = try_simulate(chain, orders)
    assert step is not None, "the orders deadlock: devices wait for each other"
    return step


def try_simulate(chain: StagedChain, orders: Orders) -> SimulatedStep | None:
    """Simulate a step with the given orders. Return None if they deadlock."""
    numbers = {
        action: float(number)
        for actions in orders.values()
        for number, action in enumerate(actions)
    }
    return _Simulation(chain, [chain.microbatches] * len(chain.stages), numbers, given=True).run()


def list_schedule(
    chain: StagedChain, limits: Sequence[int], priority: Mapping[Action, float] | None = None
) -> SimulatedStep | None:
    """Simulate a step in which an idle device takes a ready action immediately.

    Args:
        chain: the stages and their costs.
        limits: for each stage, how many micro-batches may be in flight on each of its devices.
        priority: a number for each action. A device takes the ready action with the smallest one.
            By default, backwards come before forwards, and forwards before weight gradients.

    Returns None if the limits cause a deadlock.
    """
    return _Simulation(chain, limits, priority).run()


class _Simulation:
    """The simulation of one step. Its clock begins at 0.

    Tasks are identified by their index in ``chain.tasks``. With ``given``, the priorities are the
    positions in each device's order, and a device waits for the action at its next position.
    """

    def __init__(
        self,
        chain: StagedChain,
        limits: Sequence[int],
        priority: Mapping[Action, float] | None,
        *,
        given: bool = False,
    ) -> None:
        self._chain = chain
        self._given = given
        self._tasks = chain.tasks
        # Tasks that have not finished.
        self._unfinished = len(self._tasks)
        # For each task: how many of the results that it needs are still missing.
        self._needs = [task.needs for task in self._tasks]
        # For each task: the key by which devices choose. The smallest key wins.
        actions = [task.action for task in self._tasks]
        urgency = [_URGENCY[each.kind] if priority is None else priority[each] for each in actions]
        self._keys = [(urgency[place], each.micro, place) for place, each in enumerate(actions)]
        # For each task: it begins only while fewer micro-batches than this are in flight.
        self._limits = [
            limits[each.stage] if each.kind == FORWARD else math.inf for each in actions
        ]
        # By device: the keys of its ready tasks.
        self._ready: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        self._busy: set[int] = set()
        # Devices that have something new to choose from.
        self._woken: set[int] = set()
        # Devices that wake at the same time choose in the order of their stages, so that a step does
        # not depend on their numbers.
        self._turn_of: dict[int, int] = {}
        for stage in chain.stages:
            for device in stage.devices:
                self._turn_of.setdefault(device, len(self._turn_of))
        # By slot: the number of micro-batches in flight.
        self._in_flight = [0] * (len(chain.stages) * len(chain.cluster))
        # By device: bytes of memory in use.
        self._held: dict[int, float] = defaultdict(float, chain.state_bytes)
        # By device: its memory. With given orders the caller checks the peak instead.
        self._memory_bytes = chain.cluster.memory_bytes
        self._checks_memory = not given and min(self._memory_bytes) < math.inf
        self._peaks = dict(self._held)
        self._now_s = 0.0
        # A heap of events: the time, a serial number, a function and its argument.
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._serial = 0
        # By port: when its last transfer ends.
        self._free_s: dict[str, float] = defaultdict(float)
        # By stage: the number of micro-batches whose last action has not begun.
        self._unbegun = [chain.microbatches] * len(chain.stages)
        # By stage: the number of micro-batches whose last action has not ended.
        self._unended = [chain.microbatches] * len(chain.stages)
        # By stage: when the gradient exchange may begin.
        self._exchange_s = [0.0] * len(chain.stages)
        self._orders: dict[int, list[Action]] = {
            device: [] for stage in chain.stages for device in stage.devices
        }
        self._spans: list[StepSpan] = []

    def run(self) -> SimulatedStep | None:
        """Run the simulation. Return the step, or None if the devices deadlock."""
        for place in range(self._chain.microbatches):  # the forwards of the first stage
            self._arrive(place)
        self._wake()
        events = self._events
        while events:
            now_s = events[0][0]
            self._now_s = now_s
            # Handle all events of this time first, so that a device chooses among all ready tasks.
            while events and events[0][0] == now_s:
                _, _, event, number = heapq.heappop(events)
                event(number)
            self._wake()
        if self._unfinished:
            return None
        return SimulatedStep(self._now_s, self._orders, tuple(self._spans), self._peaks)

    def _at(self, time_s: float, event: Callable[[int], None], number: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, event, number))

    # --- compute ----------------------------------------------------------------------------------

    def _arrive(self, place: int) -> None:
        """Note that one of the results the task needs has arrived."""
        self._needs[place] -= 1
        if not self._needs[place]:
            device = self._tasks[place].device
            self._ready[device].append(self._keys[place])
            self._woken.add(device)

    def _wake(self) -> None:
        """Let each idle device that was woken choose a task."""
        # Local variables, because this is the innermost loop of planning.
        tasks = self._tasks
        in_flight = self._in_flight
        limits = self._limits
        for device in sorted(self._woken - self._busy, key=self._turn_of.__getitem__):
            ready = self._ready[device]
            allowed = [key for key in ready if in_flight[tasks[key[2]].slot] < limits[key[2]]]
            if self._checks_memory:
                allowed = [key for key in allowed if self._has_room(key[2])]
            if allowed:
                key = min(allowed)
                if not self._given or key[0] == len(self._orders[device]):
                    ready.remove(key)
                    self._begin(key[2])
        self._woken.clear()

    def _has_room(self, place: int) -> bool:
        action, device, *_ = self._tasks[place]
        if action.kind != FORWARD:
            return True
        needed_bytes = self._held[device] + self._chain.stored_bytes[action.stage]
        return needed_bytes <= self._memory_bytes[device] * ROUNDED

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
        self._unfinished -= 1
        self._busy.discard(device)
        self._woken.add(device)
        if then is not None:
            self._arrive(then)
        else:
            self._in_flight[slot] -= 1
            self._held[device] -= self._chain.stored_bytes[action.stage]
            self._unended[action.stage] -= 1
            if not self._unended[action.stage]:
                self._exchange_tied(action.stage)
        if target is not None:
            if hop is None:
                self._arrive(target)
            else:
                self._at(self._transmitted_s(hop, (device,), action), self._arrive, target)

    # --- network ----------------------------------------------------------------------------------

    def _note_exchange(self, stage: int, end_s: float) -> None:
        """Schedule a stage's exchange once its last actions have begun on all replicas."""
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
        self._at(end_s, self._finish_exchange, stage)

    def _exchange_tied(self, ended: int) -> None:
        """Exchange the gradients of tied parameters when the second of their stages has ended."""
        for tied in self._chain.tied_exchanges:
            if tied is None or ended not in tied.stages:
                continue
            if any(self._unended[stage] for stage in tied.stages):
                continue
            devices = [self._chain.stages[stage].devices[0] for stage in tied.stages]
            end_s = self._transmitted_s(tied.hop, devices, Action(ended, EXCHANGE, 0))
            self._at(end_s, self._finish_exchange, ended)

    def _finish_exchange(self, stage: int) -> None:
        """Do nothing. No action waits for an exchange, but the step ends only after it."""

    def _transmitted_s(self, hop: Hop, devices: Sequence[int], action: Action) -> float:
        """Record a transfer, and return when its last byte arrives.

        Ports serve transfers in the order of requests.
        """
        wire_s, latency_s, ports = hop
        begin_s = max(self._now_s, *[self._free_s[port] for port in ports])
        end_s = begin_s + wire_s
        for port in ports:
            self._free_s[port] = end_s
        for device in devices:
            self._spans.append(StepSpan(device, True, begin_s, end_s, action))
        return end_s + latency_s
