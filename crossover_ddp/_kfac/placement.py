"""Who owns which layer, which layers are spread, what travels as columns. Pure: no tensors, processes or clock.

A and G are the factors of a layer: a_dim × a_dim of its inputs, g_dim × g_dim of its outputs' gradients. Of a factor
of d × d the upper triangle travels, d·(d+1)/2 values. The cost of one half of an exchange of m bytes is α + β·m.
Every decision follows from its arguments alone, so ranks with the same costs come to the same plan. Our design.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from crossover_ddp._owners.assignment import assign

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
        return self.groups * sum(
            _INVERSION_S + _CUBIC_S * dim**3 for dim in (self.a_dim, self.g_dim)
        )

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


def place(layers: Sequence[LayerCost], world_size: int, inverse_steps: int) -> tuple[int, ...]:
    """Give each layer an owner by its seconds, see `assign`; of equal ones the first by name, then place, comes first.

    The rarer inversions are, the more counts what every step costs.
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
    """Return each parameter's bucket, as DDP fills them: the last parameters first, until one has its cap, or more."""
    found, bucket, filled = [], 0, 0
    for size in reversed(sizes_bytes):
        found.append(bucket)
        filled += size
        if filled >= (cap_bytes if bucket else first_cap_bytes):
            bucket, filled = bucket + 1, 0
    return found[::-1]


def most_columns(dim: int, world_size: int) -> int:
    """Return up to how many columns of a factor a rank sends in the place of its triangle; 0: none.

    The columns of W ranks come together at the owner, which multiplies them: never more numbers than the d·(d+1)/2 of a
    triangle. Alone nothing travels.
    """
    return dim // (2 * world_size) if world_size > 1 else 0
