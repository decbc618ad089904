"""Who owns which layer, which layers are spread, and when A-factors leave. Pure: no tensors, processes or clock.

A and G are the factors of a layer: a_dim × a_dim of its inputs, g_dim × g_dim of its outputs' gradients. Of a factor
of d × d the upper triangle travels, d·(d+1)/2 values. The cost of one half of an exchange of m bytes is α + β·m.
Every decision follows from its arguments alone, so ranks with the same costs come to the same plan. Source: the merge
rule is that of SPD-KFAC (arXiv 2107.06533); the rest is our design.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from crossover_ddp._owners.assignment import assign
from crossover_ddp._planning import Link

Groups = tuple[tuple[int, ...], ...]
"""Consecutive numbers of layers, from 0, cut into what travels together."""

_INDIFFERENCE: Final = 1e-3
# Of one core: what counts is from which size on the cube dominates, some 130 rows.
_CUBIC_S: Final = 2.5e-11
_INVERSION_S: Final = 5e-5
_WIRE_S_PER_BYTE: Final = 8e-9  # of 1 Gbit/s
# Below that, messages and starts of products cost more than what is saved.
_LEAST_SPREAD_NUMEL: Final = 64 * 1024


class LayerCost(NamedTuple):
    """One layer, as far as its costs go, all of them typical ones, so that the same job has the same owners every time.

    ``groups``: how many pairs of factors it has: 1, or the groups of a convolution. ``a_dim``, ``g_dim``: sizes of each
    of them. ``gradient_bytes``: of its weight and bias. ``bucket``: the number of the bucket in which it is expected.
    ``spread``: whether all ranks precondition a part of it.
    """

    name: str
    groups: int
    a_dim: int
    g_dim: int
    gradient_bytes: int
    bucket: int = 0
    spread: bool = False

    @property
    def inverse_s(self) -> float:
        """Seconds to invert all factors of this layer, one after the other."""
        return self.groups * sum(_INVERSION_S + _CUBIC_S * dim**3 for dim in (self.a_dim, self.g_dim))

    def step_s(self, inverse_steps: int) -> float:
        """Return the mean seconds of its owner in a step: the inversion's share, both products, the gradient's way.

        A product is taken to cost as much per multiplication as the inversion does, the wire what is typical. Of a
        layer that is spread only the inversion is its owner's alone.
        """
        if self.spread:
            return self.inverse_s / inverse_steps
        products = self.groups * self.a_dim * self.g_dim * (self.a_dim + self.g_dim)
        wire_s = 2 * self.gradient_bytes * _WIRE_S_PER_BYTE
        return self.inverse_s / inverse_steps + _CUBIC_S * products + wire_s


def loads_s(
    layers: Sequence[LayerCost], owners: Sequence[int], world_size: int, inverse_steps: int
) -> list[float]:
    """Return the seconds of each rank, mean of a step, if these are the layers' ``owners``."""
    found = [0.0] * world_size
    for layer, owner in zip(layers, owners, strict=True):
        found[owner] += layer.step_s(inverse_steps)
    return found


def place(layers: Sequence[LayerCost], world_size: int, inverse_steps: int) -> tuple[int, ...]:
    """Give each layer an owner by its seconds, see `assign`; of equal ones the first by name, then place, comes first.

    Args:
        layers: all that have an owner, in the same order on all ranks.
        world_size: W.
        inverse_steps: steps between two inversions. The rarer they are, the more counts what every step costs.
    """
    return assign(
        [layer.step_s(inverse_steps) for layer in layers],
        world_size,
        buckets=[layer.bucket for layer in layers],
        ties=[(layer.name, number) for number, layer in enumerate(layers)],
    ).owners


def spreads(layer: LayerCost, world_size: int, inverse_steps: int) -> bool:
    """Say whether a layer that has most of its bucket is worth to be spread, see [Note: spread layers] in ``spread``.

    With s <= l its factors' sizes and β the wire's seconds per byte, a step of a layer that goes to its owner and back
    costs, on a ring, 8·s·l·β/W more than an even cut in both halves. Spreading multiplies s·l·(2s + l/W) instead of
    s·l·(s + l) numbers one after the other. New solvers cost their broadcast.

    Args:
        layer: with its costs.
        world_size: W.
        inverse_steps: steps that a solver serves.
    """
    small, large = sorted((layer.a_dim, layer.g_dim))
    numel = small * large
    if layer.groups != 1 or world_size == 1 or numel < _LEAST_SPREAD_NUMEL:
        return False
    wire_s = 8 * numel * _WIRE_S_PER_BYTE / world_size
    product_s = _CUBIC_S * numel * (large - large / world_size - small)
    solver_s = 4 * (small**2 + large**2 / 2) * _WIRE_S_PER_BYTE / inverse_steps
    return wire_s + product_s > solver_s


def expected_buckets(sizes_bytes: Sequence[int], cap_bytes: int, first_cap_bytes: int) -> list[int]:
    """Return the number of each parameter's bucket, the last parameters first, as DDP fills them.

    Args:
        sizes_bytes: of the parameters that are trained, in the model's order.
        cap_bytes: a bucket is full when it has as much, or more.
        first_cap_bytes: the same of the first bucket.
    """
    found, bucket, filled = [], 0, 0
    for size in reversed(sizes_bytes):
        found.append(bucket)
        filled += size
        if filled >= (cap_bytes if bucket else first_cap_bytes):
            bucket, filled = bucket + 1, 0
    return found[::-1]


def columns_that_travel(count: int, dim: int, world_size: int) -> int:
    """Return how many columns of a factor each rank sends in the place of its triangle; 0 for the triangle.

    The columns of W ranks lie side by side in the buffer that is summed: W·count·d numbers against d·(d+1)/2.

    Args:
        count: the greatest number of columns that a rank has; 0 if it is not known.
        dim: d.
        world_size: W. Alone nothing travels.
    """
    return count if world_size > 1 and world_size * count < (dim + 1) / 2 else 0


def merge(ready_s: Sequence[float], sizes_bytes: Sequence[int], link: Link) -> Groups:
    """Cut layers into groups that travel together, by the merge rule of SPD-KFAC (arXiv 2107.06533).

    A layer that is ready before the group ahead of it would have got past its start-up α joins that group, which
    then begins later: s = max(end of the last group, ready time of its last layer).

    Never later than one message per layer, and never later than twice the best grouping: it is done by
    r_n + α + β·(all bytes), and no grouping is done before max(r_n + α, α + β·(all bytes)). Two is nearly reached
    where many layers come a little less than α apart: all of them wait for the last. `merge_best` has no such case.

    Args:
        ready_s: of each layer, in order; one that is ready before its predecessor waits for it.
        sizes_bytes: of each layer.
        link: of one message.

    Raises:
        ValueError: if there are not as many sizes as times.
    """
    ready_s = _in_order(ready_s, sizes_bytes)
    groups: list[tuple[int, ...]] = []
    first, free_s = 0, 0.0
    for layer in range(1, len(ready_s)):
        start_s = max(free_s, ready_s[layer - 1])
        if ready_s[layer] >= start_s + link.alpha_s:
            groups.append(tuple(range(first, layer)))
            free_s = start_s + link.half_s(sum(sizes_bytes[first:layer]))
            first = layer
    return (*groups, tuple(range(first, len(ready_s)))) if ready_s else ()


def merge_best(ready_s: Sequence[float], sizes_bytes: Sequence[int], link: Link) -> Groups:
    """Cut layers into the consecutive groups whose last is done first; of equal ones, into fewer.

    Exact: the groups up to a layer had best end as early as they can, whatever follows. Time grows with the square of
    the number of layers. Our design; arguments and errors as of `merge`.
    """
    ready_s = _in_order(ready_s, sizes_bytes)
    bytes_before = [0, *accumulate(sizes_bytes)]
    done: list[tuple[float, int]] = [(0.0, 0)]
    cuts = [0]
    for stop, last_s in enumerate(ready_s, start=1):
        ends = (
            (
                max(done[start][0], last_s) + link.half_s(bytes_before[stop] - bytes_before[start]),
                done[start][1] + 1,
                start,
            )
            for start in range(stop)
        )
        end_s, count, start = min(ends)
        done.append((end_s, count))
        cuts.append(start)
    groups: list[tuple[int, ...]] = []
    stop = len(ready_s)
    while stop:
        groups.append(tuple(range(cuts[stop], stop)))
        stop = cuts[stop]
    return tuple(reversed(groups))


def _in_order(ready_s: Sequence[float], sizes_bytes: Sequence[int]) -> list[float]:
    if len(ready_s) != len(sizes_bytes):
        raise ValueError(
            f"expected a size for each ready time, got {len(ready_s)} times and {len(sizes_bytes)} sizes; "
            "pass both of each layer"
        )
    return list(accumulate(ready_s, max))


class EarlyFactor(NamedTuple):
    """A layer's A-factor, in the order of forward.

    ``ready_s``: seconds from the begin of forward until it is computed. ``size_bytes``: of its triangle.
    ``bucket``: number of the bucket that holds the layer's gradient.
    """

    ready_s: float
    size_bytes: int
    bucket: int


class FactorBucket(NamedTuple):
    """A bucket on a factor step, in the order of backward.

    ``ready_s``: seconds from the begin of backward until its last gradient and G-factor are there.
    ``gradient_bytes``, ``g_bytes``: of its gradients, of its G-triangles. ``inverse_s``: what its busiest owner
    needs to invert and precondition.
    """

    ready_s: float
    gradient_bytes: int
    g_bytes: int
    inverse_s: float


@dataclass(frozen=True)
class FactorStep:
    """One step of one rank on which factors travel.

    Args:
        forward_s: seconds of forward's compute, A-factors included.
        backward_s: seconds of backward's compute, G-factors included.
        factors: in the order of forward.
        buckets: in the order of backward.
    """

    forward_s: float
    backward_s: float
    factors: tuple[EarlyFactor, ...]
    buckets: tuple[FactorBucket, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            if not 0 <= factor.bucket < len(self.buckets):
                raise ValueError(
                    f"expected a bucket from 0 to {len(self.buckets) - 1}, got bucket={factor.bucket}; "
                    "number buckets in the order of backward"
                )

    def a_bytes(self, bucket: int) -> int:
        """Return the bytes of the A-factors that belong to a bucket."""
        return sum(factor.size_bytes for factor in self.factors if factor.bucket == bucket)


@dataclass(frozen=True)
class FactorPlan:
    """When A-factors travel.

    Args:
        early: groups that leave during forward, by layer in its order; none: all ride in the gradients' buckets.
        predicted_s: seconds of a factor step with this plan.
        in_buckets_s: seconds if all A-factors ride in the buckets.
        early_s: seconds if all leave during forward, in the best groups that were tried.
    """

    early: Groups
    predicted_s: float
    in_buckets_s: float
    early_s: float


def choose_early(step: FactorStep, link: Link) -> FactorPlan:
    """Choose whether A-factors ride in the gradients' buckets or leave during forward.

    Early ones are grouped by `merge` and by `merge_best`, and the better of both is taken. Buckets win unless leaving
    early saves more than a thousandth, since each early group is one more message.

    Args:
        step: as recorded; the same on all ranks.
        link: of one half of an exchange.
    """
    early = decided(step, link, early=True)
    if early.early_s < early.in_buckets_s * (1 - _INDIFFERENCE):
        return early
    return decided(step, link, early=False)


def decided(step: FactorStep, link: Link, *, early: bool) -> FactorPlan:
    """Plan as the caller decided, whichever is better; both predictions are those of `choose_early`."""
    in_buckets_s = factor_step_s(step, link)
    ready_s = [factor.ready_s for factor in step.factors]
    sizes = [factor.size_bytes for factor in step.factors]
    found = [
        (factor_step_s(step, link, groups), groups)
        for groups in (merge(ready_s, sizes, link), merge_best(ready_s, sizes, link))
    ]
    early_s, groups = min(found, key=lambda each: each[0])
    if early:
        return FactorPlan(groups, early_s, in_buckets_s, early_s)
    return FactorPlan((), in_buckets_s, in_buckets_s, early_s)


class _Reduce(NamedTuple):
    """A reduce-scatter that will be ready; ``bucket`` is None for a group of early factors."""

    ready_s: float
    size_bytes: int
    bucket: FactorBucket | None


def factor_step_s(step: FactorStep, link: Link, early: Groups = ()) -> float:
    """Return the seconds of a factor step, from the begin of forward until the last bucket is gathered.

    The wire is one queue that is never idle while something is ready: reduce-scatters first, in the order in which
    they become ready, then gathers. A bucket's owner inverts when the bucket is reduced, one bucket after the other,
    beside backward's compute; then its gather is ready.

    Args:
        step: the compute and the bytes.
        link: of one half of an exchange.
        early: groups of A-factors that leave during forward; none: all ride in the buckets.
    """
    reduces = _reduces(step, early)
    gathers: list[tuple[float, int]] = []
    wire_s = owner_s = 0.0
    while reduces or gathers:
        ready_s = [task.ready_s for task in reduces[:1]] + [task[0] for task in gathers[:1]]
        wire_s = max(wire_s, min(ready_s))
        if reduces and reduces[0].ready_s <= wire_s:
            task = reduces.pop(0)
            wire_s += link.half_s(task.size_bytes)
            if task.bucket is not None:
                owner_s = max(owner_s, wire_s) + task.bucket.inverse_s
                gathers.append((owner_s, task.bucket.gradient_bytes))
        else:
            wire_s += link.half_s(gathers.pop(0)[1])
    return max(wire_s, step.forward_s + step.backward_s)


def _reduces(step: FactorStep, early: Groups) -> list[_Reduce]:
    """List the reduce-scatters in the order of the wire."""
    found = [
        _Reduce(
            max(step.factors[layer].ready_s for layer in group),
            sum(step.factors[layer].size_bytes for layer in group),
            None,
        )
        for group in early
    ]
    for number, bucket in enumerate(step.buckets):
        size = bucket.gradient_bytes + bucket.g_bytes + (0 if early else step.a_bytes(number))
        found.append(_Reduce(step.forward_s + bucket.ready_s, size, bucket))
    return sorted(found, key=lambda task: task.ready_s)
