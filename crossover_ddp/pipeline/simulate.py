"""Play a step: events over devices and network cards. Pure.

A device computes one action at a time, a card sends and receives one transfer at a time ([Note: network cards] in
`cluster.py`), first ready, first served; what has begun is not interrupted. What a device computes next is either
given, or chosen from what is ready under limits of the micro-batches in flight.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .model import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Hop, Orders, StagedChain

COMPUTE: Final = "compute"
TRANSFER: Final = "transfer"
EXCHANGE: Final = "exchange"
_URGENCY: Final = {BACKWARD: 0.0, INPUT_GRADIENT: 0.0, FORWARD: 1.0, WEIGHT_GRADIENT: 2.0}


class StepSpan(NamedTuple):
    """What one device did: ``label`` is an action such as ``0F3``, or the stage whose gradients are exchanged."""

    device: int
    kind: str
    begin_s: float
    end_s: float
    label: str


@dataclass(frozen=True)
class SimulatedStep:
    """The course of a step.

    Args:
        step_s: from the first action to the end of the last action or exchange.
        orders: what each device computed, in order.
        spans: everything that happened, in the order of its beginning.
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
    step = _Play(chain, (), orders=orders).run()
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
    return _Play(chain, limits, priority=priority).run()


class _Passage(NamedTuple):
    """A transfer or an exchange that waits for its ports."""

    hop: Hop
    done: Callable[[float, float], None]
    """Called with begin and end on the wire, when the last byte has arrived."""


class _Play:
    """One step being played; times on one clock that begins at 0."""

    def __init__(
        self,
        chain: StagedChain,
        limits: Sequence[int],
        *,
        orders: Orders | None = None,
        priority: Mapping[Action, float] | None = None,
    ) -> None:
        self._chain, self._limits, self._priority = chain, limits, priority
        self._last_kind = chain.kinds[-1]
        self._given = (
            None if orders is None else {d: list(reversed(actions)) for d, actions in orders.items()}
        )
        self._forwards: dict[int, list[tuple[float, int, Action]]] = defaultdict(list)
        self._others: dict[int, list[tuple[float, int, Action]]] = defaultdict(list)
        self._ready: set[Action] = set()
        self._missing = {action: self._needs(action) for action in chain.actions()}
        self._left = len(self._missing)
        self._busy: set[int] = set()
        self._woken: set[int] = set()
        self._in_flight: dict[tuple[int, int], int] = defaultdict(int)
        self._held: dict[int, float] = defaultdict(float)
        for stage, state_bytes in zip(chain.stages, chain.state_bytes, strict=True):
            for device in stage.devices:
                self._held[device] += state_bytes
        self._peaks = dict(self._held)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._now_s = self._end_s = 0.0
        self._taken: set[str] = set()
        self._queues: dict[str, dict[int, _Passage]] = defaultdict(dict)
        # For each stage the micro-batches whose last action has not begun, and when the exchange may begin.
        self._unbegun = [chain.microbatches] * len(chain.stages)
        self._exchange_s = [0.0] * len(chain.stages)
        self._orders: dict[int, list[Action]] = {d: [] for stage in chain.stages for d in stage.devices}
        self._spans: list[StepSpan] = []

    def run(self) -> SimulatedStep | None:
        """Return the step, or None if it came to a halt."""
        for micro in range(self._chain.microbatches):
            self._make_ready(Action(0, FORWARD, micro))
        self._wake()
        while self._events:
            self._now_s = self._events[0][0]
            # Whoever chooses sees all that is ready at this time.
            while self._events and self._events[0][0] == self._now_s:
                heapq.heappop(self._events)[2]()
            self._wake()
        if self._left:
            return None
        spans = tuple(sorted(self._spans, key=lambda span: (span.begin_s, span.device, span.label)))
        return SimulatedStep(self._end_s, self._orders, spans, self._peaks)

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_s, self._serial, event))

    # --- compute -------------------------------------------------------------------------------------------

    def _needs(self, action: Action) -> int:
        """Return how many others must be done first: the neighbouring stage's, and the same stage's before it."""
        if action.kind == FORWARD:
            return int(action.stage > 0)
        return 1 if action.kind == WEIGHT_GRADIENT else 1 + (action.stage < len(self._chain.stages) - 1)

    def _arrive(self, action: Action) -> None:
        self._missing[action] -= 1
        if not self._missing[action]:
            self._make_ready(action)

    def _make_ready(self, action: Action) -> None:
        stage, kind, micro = action
        device = self._chain.device(stage, micro)
        if self._given is not None:
            self._ready.add(action)
        else:
            queue = (self._forwards if kind == FORWARD else self._others)[device]
            urgency = self._priority[action] if self._priority else _URGENCY[kind]
            heapq.heappush(queue, (urgency, micro, action))
        self._woken.add(device)

    def _wake(self) -> None:
        for device in sorted(self._woken - self._busy):
            action = self._choose(device)
            if action is not None:
                self._begin(device, action)
        self._woken.clear()

    def _choose(self, device: int) -> Action | None:
        if self._given is not None:
            queue = self._given[device]
            return queue.pop() if queue and queue[-1] in self._ready else None
        forwards, others = self._forwards[device], self._others[device]
        if forwards and not (others and others[0] < forwards[0]):
            stage = forwards[0][2].stage
            if self._in_flight[stage, device] < self._limits[stage]:
                return heapq.heappop(forwards)[2]
        return heapq.heappop(others)[2] if others else None

    def _begin(self, device: int, action: Action) -> None:
        stage, kind, micro = action
        end_s = self._now_s + self._chain.seconds(stage, kind, micro)
        self._busy.add(device)
        self._orders[device].append(action)
        self._spans.append(StepSpan(device, COMPUTE, self._now_s, end_s, str(action)))
        if kind == FORWARD:
            self._in_flight[stage, device] += 1
            self._held[device] += self._chain.stored_bytes[stage]
            self._peaks[device] = max(self._peaks[device], self._held[device])
        elif kind == self._last_kind:
            self._note_exchange(stage, end_s)
        self._at(end_s, lambda: self._finish(device, action))

    def _finish(self, device: int, action: Action) -> None:
        stage, kind, micro = action
        self._left -= 1
        self._end_s = self._now_s
        self._busy.discard(device)
        self._woken.add(device)
        if kind == FORWARD:
            self._arrive(Action(stage, self._chain.kinds[1], micro))
            if stage + 1 < len(self._chain.stages):
                self._send(action, Action(stage + 1, FORWARD, micro))
        elif kind == self._chain.kinds[1]:
            if self._chain.split:
                self._arrive(Action(stage, WEIGHT_GRADIENT, micro))
            if stage:
                self._send(action, Action(stage - 1, kind, micro))
        if kind == self._last_kind:
            self._in_flight[stage, device] -= 1
            self._held[device] -= self._chain.stored_bytes[stage]

    # --- network -------------------------------------------------------------------------------------------

    def _send(self, action: Action, needed_by: Action) -> None:
        back = needed_by.stage < action.stage
        hop = self._chain.hop(min(action.stage, needed_by.stage), action.micro, back=back)
        if hop is None:
            self._arrive(needed_by)
            return
        device = self._chain.device(action.stage, action.micro)

        def done(begin_s: float, end_s: float) -> None:
            self._spans.append(StepSpan(device, TRANSFER, begin_s, end_s, str(action)))
            self._arrive(needed_by)

        self._request(_Passage(hop, done))

    def _note_exchange(self, stage: int, end_s: float) -> None:
        """Let the stage's exchange begin when its last action has, on all replicas, come far enough."""
        exchange = self._chain.exchanges[stage]
        self._unbegun[stage] -= 1
        if exchange is None:
            return
        hop, lead_s = exchange
        self._exchange_s[stage] = max(self._exchange_s[stage], end_s - lead_s)

        def done(begin_s: float, end_s: float) -> None:
            self._end_s = max(self._end_s, self._now_s)
            for device in self._chain.stages[stage].devices:
                self._spans.append(StepSpan(device, EXCHANGE, begin_s, end_s, str(stage)))

        if not self._unbegun[stage]:
            begin_s = max(self._now_s, self._exchange_s[stage])
            self._at(begin_s, lambda: self._request(_Passage(hop, done)))

    def _request(self, transfer: _Passage) -> None:
        self._serial += 1
        for port in transfer.hop.ports:
            self._queues[port][self._serial] = transfer
        self._transmit(self._serial, transfer)

    def _transmit(self, serial: int, transfer: _Passage) -> None:
        """Begin if all its ports are free."""
        hop = transfer.hop
        if not self._taken.isdisjoint(hop.ports):
            return
        begin_s = self._now_s
        self._taken.update(hop.ports)
        for port in hop.ports:
            del self._queues[port][serial]

        def free() -> None:
            self._taken.difference_update(hop.ports)
            waiting = {number: each for port in hop.ports for number, each in self._queues[port].items()}
            for number in sorted(waiting):
                self._transmit(number, waiting[number])

        end_s = begin_s + hop.wire_s
        self._at(end_s, free)
        self._at(end_s + hop.latency_s, lambda: transfer.done(begin_s, end_s))
