"""Chooses owners of layers, spread layers, and factors that travel as columns.

A and G are the factors of a layer: a_dim × a_dim of its inputs, g_dim × g_dim of its outputs'
gradients. The upper triangle of a factor travels, d·(d+1)/2 values. One half of an exchange of m
bytes costs α + β·m. Every decision follows from its arguments alone, so ranks with the same costs
make the same plan. Pure: no tensors, processes or clock. Our design.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from crossover_ddp._owners.assignment import assign

# The time of one core. Their ratio matters: the cubic term dominates from some 130 rows on.
_CUBIC_S: Final = 2.5e-11
_INVERSION_S: Final = 5e-5
_WIRE_S_PER_BYTE: Final = 8e-9  # 1 Gbit/s
# For smaller layers, messages and starts of products cost more than spreading saves.
_LEAST_SPREAD_NUMEL: Final = 64 * 1024


class LayerCost(NamedTuple):
    """The sizes of one layer that decide its costs.

    The costs are typical ones, not measured: so the same job has the same owners in each run.
    """

    name: str
    # How many pairs of factors it has: 1, or the groups of a convolution.
    groups: int
    # The size of each A and of each G.
    a_dim: int
    g_dim: int
    # The weight's and the bias's.
    gradient_bytes: int
    # The index of the bucket in which its gradient is expected.
    bucket: int = 0
    # Whether all ranks precondition a part of it.
    spread: bool = False

    @property
    def inverse_s(self) -> float:
        """Seconds to invert all factors of this layer, one after the other."""
        return self.groups * sum(
            _INVERSION_S + _CUBIC_S * dim**3 for dim in (self.a_dim, self.g_dim)
        )

    def step_s(self, inverse_steps: int) -> float:
        """Return its owner's mean seconds in a step, if a solver serves ``inverse_steps``.

        They are the inversion's share, both products, and the gradient on the wire. A
        multiplication in a product is assumed to cost as much as one in the inversion, and the wire
        to be typical.
        """
        if self.spread:
            # The owner shares everything else with the other ranks.
            return self.inverse_s / inverse_steps
        products = self.groups * self.a_dim * self.g_dim * (self.a_dim + self.g_dim)
        wire_s = 2 * self.gradient_bytes * _WIRE_S_PER_BYTE
        return self.inverse_s / inverse_steps + _CUBIC_S * products + wire_s


def place(layers: Sequence[LayerCost], world_size: int, inverse_steps: int) -> tuple[int, ...]:
    """Return an owner for each layer, so that all ranks take about the same time, see `assign`.

    Layers of equal cost are assigned in the order of their names, then of their positions. The
    rarer inversions are, the more the costs of every step count.
    """
    return assign(
        [layer.step_s(inverse_steps) for layer in layers],
        world_size,
        buckets=[layer.bucket for layer in layers],
        ties=[(layer.name, number) for number, layer in enumerate(layers)],
    ).owners


def spreads(layer: LayerCost, world_size: int, inverse_steps: int) -> bool:
    """Return whether spreading saves time, for a layer that dominates its bucket.

    See [Note: spread layers] in ``spread``. Let s <= l be the sizes of the layer's factors and β
    the wire's seconds per byte. On a ring the way to the owner and back costs 8·s·l·β/W more than
    an even cut in both halves. Spreading does s·l·(2s + l/W) multiplications one after the other
    instead of s·l·(s + l). New solvers cost their broadcast.
    """
    small = min(layer.a_dim, layer.g_dim)
    large = max(layer.a_dim, layer.g_dim)
    numel = small * large
    if layer.groups != 1 or world_size == 1 or numel < _LEAST_SPREAD_NUMEL:
        return False
    wire_s = 8 * numel * _WIRE_S_PER_BYTE / world_size
    product_s = _CUBIC_S * numel * (large - large / world_size - small)
    solver_s = 4 * (small**2 + large**2 / 2) * _WIRE_S_PER_BYTE / inverse_steps
    return wire_s + product_s > solver_s


def expected_buckets(sizes_bytes: Sequence[int], cap_bytes: int, first_cap_bytes: int) -> list[int]:
    """Return each parameter's bucket. DDP fills them in reverse order, up to the cap or beyond."""
    found = []
    bucket = 0
    filled = 0
    for size in reversed(sizes_bytes):
        found.append(bucket)
        filled += size
        if filled >= (cap_bytes if bucket else first_cap_bytes):
            bucket += 1
            filled = 0
    return found[::-1]


def most_columns(dim: int, world_size: int) -> int:
    """Return up to how many columns of a factor a rank sends instead of the triangle.

    The columns of W ranks come together at the owner: at most as many numbers as the d·(d+1)/2 of
    one triangle. 0 with one rank, where nothing travels.
    """
    return dim // (2 * world_size) if world_size > 1 else 0
