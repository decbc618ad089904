"""Play a step: events over devices and network cards. Pure.

A device computes one action at a time, a card sends and receives one transfer at a time ([Note: network cards] in
`cluster.py`), first asked, first served; what has begun is not interrupted. What a device computes next is either
given, or chosen from what is ready under limits of the micro-batches in flight.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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


def begins_s(spans: Sequence[StepSpan]) -> dict[Action, float]:
    """Return when each action's compute began."""
    return {span.action: span.begin_s for span in spans if not span.sends}


def simulate(chain: StagedChain, orders: Orders) -> SimulatedStep:
    """Play the given orders.

    On failure: ``ValueError`` if they do not hold each action once, on its device, or wait for each other for ever.
    """
    placed = sorted((action, device) for device, actions in orders.items() for action in actions)
    expected = sorted((action, chain.device(action.stage, action.micro)) for action in chain.actions())
    if placed != expected:
        wrong = sorted(set(placed) ^ set(expected))[:3]
        raise ValueError(
            f"expected each action once, on its own device, got differences such as {wrong}; make the orders of the "
            "plan's own stages"
        )
    step = _Play(chain, given=orders).run()
    if step is None:
        raise ValueError(
            "expected orders that can run, got devices that wait for each other for ever; let each micro-batch's "
            "forward come before its backward on all devices"
        )
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
    return _Play(chain, limits=limits, priority=priority).run()


class _Play:
    """One step being played; times on one clock that begins at 0."""

    def __init__(
        self,
        chain: StagedChain,
        *,
        limits: Sequence[int] = (),
        given: Orders | None = None,
        priority: Mapping[Action, float] | None = None,
    ) -> None:
        self._chain, self._limits, self._given, self._priority = chain, limits, given, priority
        self._arrived: dict[Action, int] = defaultdict(int)
        self._ready: dict[int, list[Action]] = defaultdict(list)
        self._left = len(chain.stages) * len(chain.kinds) * chain.microbatches
        self._busy: set[int] = set()
        self._woken: set[int] = set()
        self._in_flight: dict[tuple[int, int], int] = defaultdict(int)
        self._held: dict[int, float] = defaultdict(float)
        for stage, state_bytes in zip(chain.stages, chain.state_bytes, strict=True):
            for device in stage.devices:
                self._held[device] += state_bytes
        self._peaks = dict(self._held)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._free_s: dict[str, float] = defaultdict(float)
        # For each stage the micro-batches whose last action has not begun, and when the exchange may begin.
        self._unbegun = [chain.microbatches] * len(chain.stages)
        self._exchange_s = [0.0] * len(chain.stages)
        self._orders: dict[int, list[Action]] = {d: [] for stage in chain.stages for d in stage.devices}
        self._spans: list[StepSpan] = []

    def run(self) -> SimulatedStep | None:
        """Return the step, or None if it came to a halt."""
        for micro in range(self._chain.microbatches):
            self._arrive(Action(0, FORWARD, micro))
        self._wake()
        while self._events:
            self._now_s = self._events[0][0]
            # Whoever chooses sees all that is ready at this time.
            while self._events and self._events[0][0] == self._now_s:
                _, _, event, arguments = heapq.heappop(self._events)
                event(*arguments)
            self._wake()
        if self._left:
            return None
        return SimulatedStep(self._now_s, self._orders, tuple(self._spans), self._peaks)

    def _at(self, time_s: float, event: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, event, arguments))

    # --- compute -------------------------------------------------------------------------------------------

    def _arrive(self, action: Action) -> None:
        """Note that one thing which the action needs is there."""
        stage, kind, micro = action
        self._arrived[action] += 1
        # Backward needs the stage's own forward and, but for the last stage, the gradient of its output.
        needs_two = kind in (BACKWARD, INPUT_GRADIENT) and stage + 1 < len(self._chain.stages)
        if self._arrived[action] == 1 + needs_two:
            device = self._chain.device(stage, micro)
            self._ready[device].append(action)
            self._woken.add(device)

    def _wake(self) -> None:
        for device in sorted(self._woken - self._busy):
            action = self._chosen(device)
            if action is not None:
                self._begin(device, action)
        self._woken.clear()

    def _chosen(self, device: int) -> Action | None:
        ready = self._ready[device]
        if self._given is not None:
            order, done = self._given[device], len(self._orders[device])
            return order[done] if done < len(order) and order[done] in ready else None
        allowed = [
            (self._priority[action] if self._priority else _URGENCY[action.kind], action.micro, action)
            for action in ready
            if action.kind != FORWARD or self._in_flight[action.stage, device] < self._limits[action.stage]
        ]
        return min(allowed)[2] if allowed else None

    def _begin(self, device: int, action: Action) -> None:
        stage, kind, micro = action
        end_s = self._now_s + self._chain.seconds(stage, kind, micro)
        self._ready[device].remove(action)
        self._busy.add(device)
        self._orders[device].append(action)
        self._spans.append(StepSpan(device, False, self._now_s, end_s, action))
        if kind == FORWARD:
            self._in_flight[stage, device] += 1
            self._held[device] += self._chain.stored_bytes[stage]
            self._peaks[device] = max(self._peaks[device], self._held[device])
        elif kind == self._chain.kinds[-1]:
            self._note_exchange(stage, end_s)
        self._at(end_s, self._finish, device, action)

    def _finish(self, device: int, action: Action) -> None:
        stage, kind, micro = action
        chain = self._chain
        self._left -= 1
        self._busy.discard(device)
        self._woken.add(device)
        if kind == FORWARD:
            self._arrive(Action(stage, chain.kinds[1], micro))
            if stage + 1 < len(chain.stages):
                self._send(device, action, chain.hop(stage, micro, back=False), stage + 1)
        elif kind == chain.kinds[1]:
            if chain.split:
                self._arrive(Action(stage, WEIGHT_GRADIENT, micro))
            if stage:
                self._send(device, action, chain.hop(stage - 1, micro, back=True), stage - 1)
        if kind == chain.kinds[-1]:
            self._in_flight[stage, device] -= 1
            self._held[device] -= chain.stored_bytes[stage]

    # --- network -------------------------------------------------------------------------------------------

    def _send(self, device: int, action: Action, hop: Hop | None, stage: int) -> None:
        needed_by = action._replace(stage=stage)
        if hop is None:
            self._arrive(needed_by)
        else:
            self._at(self._transmitted_s(hop, (device,), action), self._arrive, needed_by)

    def _note_exchange(self, stage: int, end_s: float) -> None:
        """Let the stage's exchange begin when its last action has, on all replicas, come far enough."""
        exchange = self._chain.exchanges[stage]
        self._unbegun[stage] -= 1
        if exchange is not None:
            self._exchange_s[stage] = max(self._exchange_s[stage], end_s - exchange[1])
            if not self._unbegun[stage]:
                self._at(max(self._now_s, self._exchange_s[stage]), self._exchange, stage, exchange[0])

    def _exchange(self, stage: int, hop: Hop) -> None:
        action = Action(stage, EXCHANGE, 0)
        self._at(self._transmitted_s(hop, self._chain.stages[stage].devices, action), lambda: None)

    def _transmitted_s(self, hop: Hop, devices: Sequence[int], action: Action) -> float:
        """Return when the last byte will have arrived; the ports serve first what was asked before."""
        begin_s = max(self._now_s, *(self._free_s[port] for port in hop.ports))
        end_s = begin_s + hop.wire_s
        self._free_s.update(dict.fromkeys(hop.ports, end_s))
        self._spans += [StepSpan(device, True, begin_s, end_s, action) for device in devices]
        return end_s + hop.latency_s
