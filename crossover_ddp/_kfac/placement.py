"""Choose the owners of layers, the layers to spread, and the factors that travel as columns.

A layer has two factors: A, a_dim × a_dim, from its inputs, and G, g_dim × g_dim, from the gradients
of its outputs. The upper triangle of a factor travels, which has d·(d+1)/2 values. One half of an
exchange of m bytes costs α + β·m. Every decision depends only on its arguments, so ranks with the
same costs make the same plan. This module is pure: it uses no tensors, processes or clock. It is
our own design.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from crossover_ddp._owners.assignment import assign

# The times on one core. Their ratio matters: the cubic term dominates from about 130 rows on.
_CUBIC_S: Final = 2.5e-11
_INVERSION_S: Final = 5e-5
_WIRE_S_PER_BYTE: Final = 8e-9  # 1 Gbit/s
# For smaller layers, sending messages and launching products costs more than spreading saves.
_LEAST_SPREAD_NUMEL: Final = 64 * 1024


class LayerCost(NamedTuple):
    """The sizes that determine a layer's costs.

    The costs are typical values, not measurements, so a job has the same owners in every run.
    """

    name: str
    # The number of pairs of factors: 1, or the number of groups in a convolution.
    groups: int
    # The size of each A and of each G.
    a_dim: int
    g_dim: int
    # The size of the weight's and the bias's gradients together.
    gradient_bytes: int
    # The index of the bucket in which the layer's gradient is expected.
    bucket: int = 0
    # Whether each rank preconditions a part of the layer.
    spread: bool = False

    @property
    def inverse_s(self) -> float:
        """The time in seconds to invert all factors of this layer, one after the other."""
        return self.groups * sum(
            _INVERSION_S + _CUBIC_S * dim**3 for dim in (self.a_dim, self.g_dim)
        )

    def step_s(self, inverse_steps: int) -> float:
        """Return the mean time in seconds that the layer costs its owner per step.

        A solver serves for ``inverse_steps`` steps, so each step has a share of the inversion. The
        other costs are two products and sending the gradient. The estimate assumes that a
        multiplication in a product takes as long as one in the inversion, and that the wire has a
        typical speed.
        """
        if self.spread:
            # The owner shares everything else with the other ranks.
            return self.inverse_s / inverse_steps
        products = self.groups * self.a_dim * self.g_dim * (self.a_dim + self.g_dim)
        wire_s = 2 * self.gradient_bytes * _WIRE_S_PER_BYTE
        return self.inverse_s / inverse_steps + _CUBIC_S * products + wire_s


def place(layers: Sequence[LayerCost], world_size: int, inverse_steps: int) -> tuple[int, ...]:
    """Return an owner for each layer, so that all ranks take about the same time, see `assign`.

    Layers of equal cost are assigned in the order of their names and then their positions. The
    rarer inversions are, the more the costs that arise in every step matter.
    """
    return assign(
        [layer.step_s(inverse_steps) for layer in layers],
        world_size,
        buckets=[layer.bucket for layer in layers],
        ties=[(layer.name, number) for number, layer in enumerate(layers)],
    ).owners


def spreads(layer: LayerCost, world_size: int, inverse_steps: int) -> bool:
    """Return whether spreading saves time for a layer that dominates its bucket.

    See [Note: spread layers]. Let s <= l be the sizes of the layer's factors, and let
    β be the time in seconds to send one byte. On a ring, the way to the owner and back costs
    8·s·l·β/W more than an even cut in both halves. With spreading, s·l·(2s + l/W) multiplications
    run one after the other, instead of s·l·(s + l). Each new solver has to be broadcast.
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
    """Return the index of each parameter's bucket.

    DDP fills the buckets with the parameters in reverse order. A bucket is full when its size
    reaches or exceeds the cap.
    """
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
    """Return the maximum number of columns that a rank sends in place of a factor's triangle.

    Together, the columns from all W ranks have at most as many numbers as one triangle, d·(d+1)/2.
    With one rank the result is 0, since nothing travels.
    """
    return dim // (2 * world_size) if world_size > 1 else 0
