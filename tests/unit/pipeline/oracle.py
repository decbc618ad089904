"""The shortest step of any pipeline plan, by exhaustive search.

It uses the planner's data structures, but none of its code that plans or simulates.

[Note: the search]
It covers every cut of the chain, every choice and order of devices, and every order of actions,
with deliberate waiting. These arguments make it exact:

1. Sequences. Consider the actions and exchanges of any schedule, sorted by the times at which they
   request their transfers. Schedule them again in this sequence, each as early as its inputs and
   its device allow, but none with an earlier request than the previous one. By induction no time
   is later than before. So the best sequence has the shortest step, and waiting needs no separate
   choice: an action waits if it comes after another one in the sequence. Equal request times may
   have any order.
2. Exchanges. An exchange is requested ``lead_s`` before the last backward of its stage ends. The
   lead is at most the time of any backward. So all last backwards have begun by then, and their
   ends are known when the exchange enters the sequence. It promises the latest of these ends. If
   another action delays a backward past this promise, then the exchange is requested again, as
   much later. On the first stage the last backwards request no transfers, and end with the
   exchange.
3. Identical micro-batches. Micro-batches that take the same devices are interchangeable. If one of
   them overtakes another, then exchange their names. So they take each device in order.
4. Dominance. After the same actions, a partial schedule replaces another one if none of its times
   is later: those of devices, ports, arrivals and the last request. A time that is earlier than its
   first possible use counts as that use. After a promise, it only replaces partial schedules with
   the same promise from the same partial schedule, since a later request changes them differently.
5. Bounds. A partial schedule is left out if its lower bound is not below the best step found. A
   device needs its remaining work after its first input, then its last result takes the way back.
   A port needs its remaining load. Each micro-batch takes the rest of its path.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import le
from typing import Final, NamedTuple

from crossover_ddp.pipeline import Cluster, Profile, Stage

# Times that differ by less are equal.
_EQUAL_S: Final = 1e-9
# How many partial schedules of equal length the search for a first solution keeps.
_WIDTHS: Final = (1, 6)
# The entries of `_Label.times_s` before those of devices, ports and arrivals.
_BOUND, _REQUEST, _FIXED = 0, 1, 2


class ProofLimitError(Exception):
    """The search has exceeded the limit of partial schedules."""


class Best(NamedTuple):
    """The shortest step, and the stages that have it."""

    step_s: float
    stages: tuple[Stage, ...]


class _Transfer(NamedTuple):
    """A transfer that occupies ports, given by their numbers, and arrives ``latency_s`` later."""

    wire_s: float = 0.0
    latency_s: float = 0.0
    ports: tuple[int, ...] = ()


class _Exchange(NamedTuple):
    """The gradient exchange of a stage: requested ``lead_s`` before the last backward ends."""

    stage: int
    devices: tuple[int, ...]
    transfer: _Transfer
    lead_s: float

    @property
    def tail_s(self) -> float:
        """The least time from the end of the last backward to the end of the exchange."""
        return self.transfer.wire_s + self.transfer.latency_s - self.lead_s


class _Operation(NamedTuple):
    """A forward or backward of one stage, for all micro-batches that take the same devices."""

    stage: int
    device: int
    is_forward: bool
    seconds: float
    # How many micro-batches take this path.
    micros: int
    # The transfer of the result to the next operation.
    transfer: _Transfer
    # The least time from the end of this operation to the end of the step.
    tail_s: float
    is_first: bool
    is_last: bool


class _Promise(NamedTuple):
    """The device whose last backward ends last in a stage, and its end.

    ``origin`` is the partial schedule before the request of the exchange.
    """

    device: int
    end_s: float
    origin: "_Label | None"


# The exchange has been requested and all backwards of its stage have ended.
_KEPT: Final = _Promise(-1, 0.0, None)
_Counts = tuple[int, ...]
_Promises = tuple[_Promise | None, ...]


class _Label:
    """A partial schedule: the operations so far, the promises of exchanges, and the times.

    ``times_s`` holds a lower bound of the step, the time of the last request, the times at which
    devices and ports are free, and the arrivals of inputs.
    """

    __slots__ = ("counts", "is_dominated", "promises", "times_s")

    def __init__(self, counts: _Counts, promises: _Promises, times_s: list[float]) -> None:
        self.counts = counts
        self.promises = promises
        self.times_s = times_s
        self.is_dominated = False


class _View:
    """The facts about a partial schedule that depend on its operations only.

    Args:
        layout: the layout.
        counts: how many micro-batches each operation has finished.
        is_requested: whether each exchange has been requested.
    """

    def __init__(self, layout: "Layout", counts: _Counts, is_requested: tuple[bool, ...]) -> None:
        self.actions_left: Counter[int] = Counter()
        in_flight: Counter[int] = Counter()
        self.work_s: dict[int, float] = {}
        self.device_tail_s: dict[int, float] = {}
        self.load_s: dict[int, float] = {}
        self.port_tail_s: dict[int, float] = {}
        for place, operation in enumerate(layout.operations):
            device, left = operation.device, operation.micros - counts[place]
            in_flight[device] += counts[place] if operation.is_forward else -counts[place]
            if not left:
                continue
            self.actions_left[device] += left
            self.work_s[device] = self.work_s.get(device, 0.0) + left * operation.seconds
            tail_s = min(self.device_tail_s.get(device, math.inf), operation.tail_s)
            self.device_tail_s[device] = tail_s
            self._add_load(operation.transfer, left, layout.after_s[place])
        for exchange, done in zip(layout.exchanges, is_requested, strict=True):
            if not done:
                self._add_load(exchange.transfer, 1, 0.0)
        self.is_full = {
            device: in_flight[device] >= layout.limits[device] for device in layout.devices
        }
        # For each operation with micro-batches left: its number, and how many inputs have been sent.
        self.open: list[tuple[int, int]] = []
        for place, operation in enumerate(layout.operations):
            if counts[place] < operation.micros:
                sent = operation.micros if operation.is_first else counts[place - 1]
                self.open.append((place, sent - counts[place]))
        self.idle_devices = [each for each in layout.devices if each not in self.actions_left]
        self.idle_ports = [each for each in range(layout.port_count) if each not in self.load_s]
        self.available = [
            place
            for place, sent in self.open
            if sent and not self._is_blocked(layout.operations[place])
        ]

    def _add_load(self, transfer: _Transfer, count: int, after_s: float) -> None:
        tail_s = transfer.latency_s + after_s
        for port in transfer.ports:
            self.load_s[port] = self.load_s.get(port, 0.0) + count * transfer.wire_s
            self.port_tail_s[port] = min(self.port_tail_s.get(port, math.inf), tail_s)

    def _is_blocked(self, operation: _Operation) -> bool:
        return operation.is_forward and self.is_full[operation.device]


class Layout:
    """Stages on devices, and the search for their best sequence of actions.

    Args:
        profile: the costs of the layers.
        cluster: the devices.
        stages: the stages.
        microbatches: the number of micro-batches in a step.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, stages: Sequence[Stage], microbatches: int
    ) -> None:
        self.stages = tuple(stages)
        self.devices = [device for stage in stages for device in stage.devices]
        self._numbers: dict[str, int] = {}
        self._profile, self._cluster = profile, cluster
        self.limits: dict[int, float] = {}
        for stage in stages:
            self.limits |= memory_limits(profile, cluster, stage)
        exchanges = [self._exchange_of(number) for number in range(len(stages))]
        self.exchanges = [each for each in exchanges if each]
        self._exchange_number = {
            exchange.stage: number for number, exchange in enumerate(self.exchanges)
        }
        self.operations: list[_Operation] = []
        # The time from the arrival of each operation's result to the end of the step, at least.
        self.after_s: list[float] = []
        paths = Counter(
            tuple([stage.device(micro) for stage in stages]) for micro in range(microbatches)
        )
        for path, count in paths.items():
            self._add_path(path, count)
        self.port_count = len(self._numbers)
        # Where the entries of devices, ports and arrivals begin in `_Label.times_s`.
        self._ports = _FIXED + len(cluster)
        self._arrivals = self._ports + self.port_count
        self._row = microbatches
        self._views: dict[tuple[_Counts, tuple[bool, ...]], _View] = {}
        self.root = self._settled(self._root())
        self.bound_s = self.root.times_s[_BOUND]

    @property
    def fits(self) -> bool:
        """Whether each device can store its layers and a micro-batch, and all links exist."""
        return min(self.limits.values()) >= 1 and self.bound_s < math.inf

    def best_step_s(self, limit_s: float, budget: list[int], width: int | None = None) -> float:
        """Return the shortest step below ``limit_s``, or ``limit_s`` if there is none.

        Args:
            limit_s: the time to beat.
            budget: its only entry is how many partial schedules may still be extended.
            width: how many partial schedules of equal length to keep. The step is then not always
                the shortest. Default: all.

        On failure: ``ProofLimitError`` if the budget is exhausted.
        """
        bound_s = min(limit_s, self._serial_s + 1.0) - _EQUAL_S
        fronts: dict[tuple[_Counts, _Promises], list[_Label]] = {}
        serial = itertools.count()
        queue: list[tuple[int, float, int, _Label]] = []
        pushed: Counter[int] = Counter()
        best_s = bound_s

        def push(label: _Label) -> None:
            if label.times_s[_BOUND] < best_s and self._is_efficient(fronts, label):
                level = sum(label.counts) + sum(each is not None for each in label.promises)
                heapq.heappush(queue, (level, label.times_s[_BOUND], next(serial), label))

        push(self.root)
        while queue:
            level, label_s, _, label = heapq.heappop(queue)
            if label.is_dominated or label_s >= best_s:
                continue
            pushed[level] += 1
            if width is not None and pushed[level] > width:
                continue
            if all(map(self._is_done, label.counts, self.operations)):
                best_s = label_s
                continue
            budget[0] -= 1
            if budget[0] < 0:
                raise ProofLimitError
            for each in self._extensions(label):
                push(each)
        return best_s if best_s < bound_s else limit_s

    @staticmethod
    def _is_done(count: int, operation: _Operation) -> bool:
        return count == operation.micros

    @staticmethod
    def _is_efficient(fronts: dict[tuple[_Counts, _Promises], list[_Label]], label: _Label) -> bool:
        """Add a label to the front of its operations, unless another one dominates it."""
        times_s = label.times_s
        front = fronts.setdefault((label.counts, label.promises), [])
        for other in front:
            if all(map(le, other.times_s, times_s)):
                return False
        for other in front:
            other.is_dominated = all(map(le, times_s, other.times_s))
        front[:] = [other for other in front if not other.is_dominated]
        front.append(label)
        return True

    # The costs.

    @property
    def _serial_s(self) -> float:
        """The time of one micro-batch after another. It also ends searches without a limit."""
        works = [(operation.micros, operation.transfer) for operation in self.operations]
        works += [(1, exchange.transfer) for exchange in self.exchanges]
        sent_s = sum(count * (each.wire_s + each.latency_s) for count, each in works)
        return sent_s + sum(each.micros * each.seconds for each in self.operations)

    def _transfer(self, stage: int, source: int, target: int) -> _Transfer:
        rate = self._cluster.rate(source, target)
        size_bytes = self._profile.layers[self.stages[stage].stop - 1].activation_bytes
        return _Transfer(
            size_bytes / rate if rate else math.inf,
            self._cluster.latency(source, target),
            self._numbered(self._cluster.ports(source, target)),
        )

    def _numbered(self, ports: Sequence[str]) -> tuple[int, ...]:
        return tuple([self._numbers.setdefault(port, len(self._numbers)) for port in ports])

    def _exchange_of(self, number: int) -> _Exchange | None:
        """Return the ring all-reduce of a stage's gradients, or None if it needs none."""
        start, stop, devices = self.stages[number][:3]
        layers = self._profile.layers[start:stop]
        size_bytes = sum(layer.parameter_bytes for layer in layers)
        if len(devices) == 1 or not size_bytes:
            return None
        busy_s: dict[str, float] = {}
        latency_s = 0.0
        for place, source in enumerate(devices):
            target = devices[(place + 1) % len(devices)]
            rate = self._cluster.rate(source, target)
            share = 2 * (len(devices) - 1) / len(devices)
            for port in self._cluster.ports(source, target):
                busy_s[port] = busy_s.get(port, 0.0) + (share / rate if rate else math.inf)
            one_way_s = self._cluster.latency(source, target)
            latency_s = max(latency_s, 2 * (len(devices) - 1) * one_way_s)
        per_byte_s = max(busy_s.values())
        transfer = _Transfer(size_bytes * per_byte_s, latency_s, self._numbered([*busy_s]))
        return _Exchange(number, devices, transfer, self._lead_s(number, per_byte_s))

    def _lead_s(self, number: int, per_byte_s: float) -> float:
        """Return how long before the end of the last backward the exchange can begin.

        It sends the gradients of the last layers while the slowest replica computes the others.
        """
        start, stop, devices = self.stages[number][:3]
        slowest = min(self._cluster.speed[device] for device in devices)
        computed_s = sent_s = total_s = 0.0
        for layer in reversed(self._profile.layers[start:stop]):
            computed_s += layer.backward_s / slowest
            sent_s = max(sent_s, computed_s) + layer.parameter_bytes * per_byte_s
            total_s += layer.parameter_bytes * per_byte_s
        if math.isinf(total_s):
            return 0.0
        shortest_s = computed_s * slowest / max(self._cluster.speed)
        lead_s = min(max(0.0, total_s - (sent_s - computed_s)), shortest_s)
        return lead_s if lead_s > _EQUAL_S else 0.0

    def _add_path(self, path: Sequence[int], count: int) -> None:
        """Add the operations of the micro-batches that take these devices."""
        numbers = [*range(len(path))]
        found: list[_Operation] = []
        tail_s = after_s = 0.0
        afters_s = []
        # From the last operation to the first, because of the tails.
        for place, stage in reversed([*enumerate([*numbers, *reversed(numbers)])]):
            is_forward = place < len(path)
            transfer = _Transfer()
            if is_forward and stage + 1 < len(path):
                transfer = self._transfer(stage, path[stage], path[stage + 1])
            elif not is_forward and stage:
                transfer = self._transfer(stage - 1, path[stage], path[stage - 1])
            if found:
                tail_s = transfer.wire_s + transfer.latency_s + after_s
            if not is_forward and stage in self._exchange_number:
                exchange = self.exchanges[self._exchange_number[stage]]
                tail_s = max(tail_s, exchange.tail_s)
            start, stop = self.stages[stage][:2]
            layers = self._profile.layers[start:stop]
            cost_s = sum(layer.forward_s if is_forward else layer.backward_s for layer in layers)
            seconds = cost_s / self._cluster.speed[path[stage]]
            is_last = not found
            is_first = not place
            found.append(
                _Operation(
                    stage, path[stage], is_forward, seconds, count, transfer, tail_s, is_first,
                    is_last,
                )
            )  # fmt: skip
            afters_s.append(after_s)
            after_s = seconds + tail_s
        self.operations += reversed(found)
        self.after_s += reversed(afters_s)

    # The search.

    def _root(self) -> _Label:
        size = self._arrivals + self._row * len(self.operations)
        none = (None,) * len(self.exchanges)
        return _Label((0,) * len(self.operations), none, [0.0] * size)

    def _view(self, label: _Label) -> _View:
        key = label.counts, tuple([each is not None for each in label.promises])
        if key not in self._views:
            self._views[key] = _View(self, *key)
        return self._views[key]

    def _extensions(self, label: _Label) -> Iterator[_Label]:
        """Yield the partial schedules with one more action, or with one more exchange."""
        view = self._view(label)
        for place in view.available:
            operation = self.operations[place]
            number = self._exchange_number.get(operation.stage)
            is_last = view.actions_left[operation.device] == 1
            if number is None or not is_last:
                yield self._settled(self._extended(label, place))
            else:
                yield from self._last_backwards(label, place, number)
        for number, promise in enumerate(label.promises):
            if promise is None:
                yield from self._requests(label, number)

    def _end_s(self, label: _Label, place: int) -> float:
        """Return the earliest end of an operation's next micro-batch."""
        operation = self.operations[place]
        arrival_s = label.times_s[self._arrivals + place * self._row + label.counts[place]]
        return max(label.times_s[_FIXED + operation.device], arrival_s) + operation.seconds

    def _last_backwards(self, label: _Label, place: int, number: int) -> Iterator[_Label]:
        """Yield the partial schedules with the last backward of a device that exchanges."""
        view, operation = self._view(label), self.operations[place]
        exchange, promise = self.exchanges[number], label.promises[number]
        if operation.stage == 0:
            return  # it ends with the exchange
        others = [device for device in exchange.devices if device != operation.device]
        is_final = not any(view.actions_left[device] for device in others)
        if promise is None and not is_final:
            yield self._settled(self._extended(label, place))
        elif promise is None and not exchange.lead_s:
            # Both requests have the same time. `_requests` yields the opposite order.
            found = self._exchanging(self._extended(label, place), number)
            yield self._settled(self._with_promise(found, number))
        elif promise is not None:
            end_s = max(self._end_s(label, place), label.times_s[_REQUEST])
            if operation.device == promise.device:
                end_s = max(end_s, promise.end_s)
            if end_s > promise.end_s + _EQUAL_S:
                assert promise.origin is not None
                request_s = end_s - exchange.lead_s
                yield self._requested(promise.origin, number, promise.device, request_s)
                return
            found = self._extended(label, place, end_s)
            yield self._settled(self._with_promise(found, number) if is_final else found)

    def _requests(self, label: _Label, number: int) -> Iterator[_Label]:
        """Yield the partial schedules with a stage's exchange, which all its devices permit."""
        exchange = self.exchanges[number]
        lasts = self._lasts(label, exchange)
        if not lasts:
            return
        end_s = max(self._end_s(label, place) for place in lasts)
        request_s = max(label.times_s[_REQUEST], end_s - exchange.lead_s)
        if exchange.stage:
            for place in lasts:
                device = self.operations[place].device
                yield self._requested(label, number, device, request_s)
            return
        found = self._exchanging(label, number, request_s)
        counts = [count + (place in lasts) for place, count in enumerate(label.counts)]
        times_s = found.times_s
        for place in lasts:
            times_s[self._arrivals + place * self._row + label.counts[place]] = 0.0
        ended = _Label(tuple(counts), label.promises, times_s)
        yield self._settled(self._with_promise(ended, number))

    def _lasts(self, label: _Label, exchange: _Exchange) -> list[int]:
        """Return the operations of a stage's last backwards. Empty if any of them is not ready."""
        view = self._view(label)
        left = [view.actions_left[device] for device in exchange.devices]
        if max(left) > 1:
            return []
        ready = [p for p in view.available if self.operations[p].device in exchange.devices]
        return ready if len(ready) == sum(left) else []

    def _requested(self, label: _Label, number: int, device: int, request_s: float) -> _Label:
        """Return the label after an exchange, with the promise that ``device`` ends last."""
        exchange = self.exchanges[number]
        found = self._exchanging(label, number, request_s)
        promise = _Promise(device, request_s + exchange.lead_s, label)
        return self._settled(self._with_promise(found, number, promise))

    def _with_promise(self, label: _Label, number: int, promise: _Promise = _KEPT) -> _Label:
        promises = [*label.promises]
        promises[number] = promise
        return _Label(label.counts, tuple(promises), label.times_s)

    def _exchanging(self, label: _Label, number: int, request_s: float | None = None) -> _Label:
        """Return the label after an exchange's transfer. Default: requested at the last request."""
        times_s = [*label.times_s]
        if request_s is not None:
            times_s[_REQUEST] = max(times_s[_REQUEST], request_s)
        end_s = self._send(times_s, self.exchanges[number].transfer)
        times_s[_BOUND] = max(times_s[_BOUND], end_s)
        return _Label(label.counts, label.promises, times_s)

    def _send(self, times_s: list[float], transfer: _Transfer) -> float:
        """Add a transfer that is requested at the last request, and return when it arrives."""
        begin_s = times_s[_REQUEST]
        for port in transfer.ports:
            begin_s = max(begin_s, times_s[self._ports + port])
        for port in transfer.ports:
            times_s[self._ports + port] = begin_s + transfer.wire_s
        return begin_s + transfer.wire_s + transfer.latency_s

    def _extended(self, label: _Label, place: int, end_s: float | None = None) -> _Label:
        """Return the label after one more action. Default: it ends as early as possible."""
        operation = self.operations[place]
        if end_s is None:
            end_s = max(self._end_s(label, place), label.times_s[_REQUEST])
        times_s = [*label.times_s]
        micro = label.counts[place]
        times_s[_REQUEST] = end_s
        times_s[_FIXED + operation.device] = end_s
        times_s[self._arrivals + place * self._row + micro] = 0.0
        arrival_s = self._send(times_s, operation.transfer)
        if operation.is_last:
            times_s[_BOUND] = max(times_s[_BOUND], end_s)
        else:
            times_s[self._arrivals + (place + 1) * self._row + micro] = arrival_s
        counts = (*label.counts[:place], micro + 1, *label.counts[place + 1 :])
        return _Label(counts, label.promises, times_s)

    def _settled(self, label: _Label) -> _Label:
        """Raise each time to its first possible use, and the bound; see [Note: the search]."""
        view, times_s = self._view(label), label.times_s
        request_s, bound_s = times_s[_REQUEST], times_s[_BOUND]
        first_s = dict.fromkeys(self.devices, math.inf)
        next_s = 0.0
        for place, sent in view.open:
            operation = self.operations[place]
            device = operation.device
            if operation.is_first:
                ready_s = 0.0
            elif sent:
                ready_s = times_s[self._arrivals + place * self._row + label.counts[place]]
            else:
                ready_s = next_s
            if ready_s < first_s[device] and not (operation.is_forward and view.is_full[device]):
                first_s[device] = ready_s
            end_s = max(ready_s, times_s[_FIXED + device]) + operation.seconds
            transfer = operation.transfer
            next_s = max(request_s, end_s) + transfer.wire_s + transfer.latency_s
        for device, work_s in view.work_s.items():
            free_s = max(times_s[_FIXED + device], first_s[device])
            times_s[_FIXED + device] = free_s
            bound_s = max(bound_s, free_s + work_s + view.device_tail_s[device])
        for place, sent in view.open:
            operation = self.operations[place]
            if operation.is_first or not sent:
                continue
            entry = self._arrivals + place * self._row + label.counts[place]
            earliest_s = request_s - operation.seconds
            end_s = times_s[_FIXED + operation.device]
            earliest_s = max(earliest_s, end_s)
            for each in range(entry, entry + sent):
                times_s[each] = max(times_s[each], earliest_s)
                end_s = max(end_s, times_s[each]) + operation.seconds
            bound_s = max(bound_s, end_s + operation.tail_s)
        for port, load_s in view.load_s.items():
            free_s = max(times_s[self._ports + port], request_s)
            times_s[self._ports + port] = free_s
            bound_s = max(bound_s, free_s + load_s + view.port_tail_s[port])
        for device in view.idle_devices:
            times_s[_FIXED + device] = 0.0
        for port in view.idle_ports:
            times_s[self._ports + port] = 0.0
        times_s[_BOUND] = bound_s
        return label


def memory_limits(profile: Profile, cluster: Cluster, stage: Stage) -> dict[int, float]:
    """Return how many micro-batches each device of a stage can store. Negative: not its layers."""
    layers = profile.layers[stage.start : stage.stop]
    state_bytes = sum(4 * layer.parameter_bytes + layer.frozen_bytes for layer in layers)
    stored_bytes = sum(layer.stored_bytes for layer in layers)
    limits: dict[int, float] = {}
    for device in stage.devices:
        room_bytes = cluster.memory_bytes[device] - state_bytes
        if stored_bytes and room_bytes < math.inf:
            limits[device] = math.floor(room_bytes / stored_bytes)
        else:
            limits[device] = math.inf if room_bytes >= 0 else -1.0
    return limits


def all_stages(
    layers: int, devices: int, microbatches: int, max_replicas: int
) -> Iterator[tuple[Stage, ...]]:
    """Yield all cuts of a chain on all choices and orders of devices.

    If all numbers of replicas divide M, then a rotation of all stages' replicas only changes the
    names of the micro-batches. So one of the rotations suffices.
    """
    most = min(max_replicas, microbatches)
    for used in range(1, devices + 1):
        for order in itertools.permutations(range(devices), used):
            for runs in _runs(order, min(layers, used), most):
                if _is_rotated(runs, microbatches):
                    continue
                for cuts in itertools.combinations(range(1, layers), len(runs) - 1):
                    edges = itertools.pairwise([0, *cuts, layers])
                    yield tuple([Stage(*each, run) for each, run in zip(edges, runs, strict=True)])


def _runs(
    order: Sequence[int], max_stages: int, max_replicas: int
) -> Iterator[list[tuple[int, ...]]]:
    for count in range(1, max_stages + 1):
        for cuts in itertools.combinations(range(1, len(order)), count - 1):
            places = itertools.pairwise([0, *cuts, len(order)])
            runs = [tuple(order[slice(*place)]) for place in places]
            if max(map(len, runs)) <= max_replicas:
                yield runs


def _is_rotated(runs: Sequence[tuple[int, ...]], microbatches: int) -> bool:
    if any(microbatches % len(run) for run in runs):
        return False
    replicated = [run for run in runs if len(run) > 1]
    return bool(replicated) and replicated[0][0] != min(replicated[0])


def best_plan(
    profile: Profile,
    cluster: Cluster,
    microbatches: int,
    *,
    max_replicas: int,
    proof_limit: int,
) -> Best | None:
    """Find the plan with the shortest step of all plans. Return None if no plan fits in memory.

    See [Note: the search].

    Args:
        profile: the costs of the layers, without times of each device, shared or tied tensors.
        cluster: the devices.
        microbatches: the number of micro-batches in a step, M.
        max_replicas: the greatest number of devices per stage. It is at most M.
        proof_limit: how many partial schedules to extend at most.

    On failure: ``ProofLimitError`` beyond the limit, ``ValueError`` for costs that it ignores.
    """
    _check(profile)
    layouts = [
        layout
        for stages in all_stages(len(profile), len(cluster), microbatches, max_replicas)
        if (layout := Layout(profile, cluster, stages, microbatches)).fits
    ]
    layouts.sort(key=lambda layout: layout.bound_s)
    best: Best | None = None
    budget = [proof_limit]
    for width in (*_WIDTHS, None):
        for layout in layouts:
            limit_s = best.step_s if best else math.inf
            if layout.bound_s >= limit_s - _EQUAL_S:
                break
            step_s = layout.best_step_s(limit_s, budget, width)
            if step_s < limit_s:
                best = Best(step_s, layout.stages)
    return best


def best_step_s(
    profile: Profile,
    cluster: Cluster,
    microbatches: int,
    *,
    max_replicas: int,
    proof_limit: int,
) -> float | None:
    """Return the shortest step of all plans, or None if no plan fits in memory; see `best_plan`."""
    limits = {"max_replicas": max_replicas, "proof_limit": proof_limit}
    best = best_plan(profile, cluster, microbatches, **limits)
    return best.step_s if best else None


def _check(profile: Profile) -> None:
    shared = sum(layer.shared_bytes for layer in profile.layers)
    if profile.times_s or profile.tied or shared:
        raise ValueError(
            f"expected no times of devices, tied or shared tensors, got tied={profile.tied}; "
            "leave them out"
        )
