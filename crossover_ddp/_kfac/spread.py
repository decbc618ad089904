"""Preconditioning a dominant layer on all ranks: its gradient is cut by rows, as plain SGD would cut it.

[Note: spread layers] A layer that has most of a bucket would go to its owner whole and come back whole: with two ranks
twice the time of an even cut, and one rank multiplies while the others wait. All ranks can multiply a part of it if
they have its solver. With the inverse of the smaller factor written as TᵀT, the step is, up to transposition,

    V = Tᵀ U,   U = (T ∇) A⁻¹,

and a row of U needs only that row of T ∇. So every rank sends T times its own gradient; the sum over the ranks of a
rank's rows is multiplied by the larger inverse there; all rows are gathered, and every rank multiplies them by Tᵀ. What
the KL clip adds up, V · ∇ = U · (T ∇), is a sum over rows, too. Our design.

The owner makes the solver, and sends it to all in the step in which it is new, in which the layer travels whole. That
is worth it if solvers serve for some steps: see `placement.spreads`. T is the owner's on all ranks, so that they
send summands of one sum. The last product is every rank's own: ranks that round it differently would drift
apart, so layers are spread only if all ranks round a trial alike, see `rounding`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from crossover_ddp._ddp.layout import Span, equal_lengths, spans_of

from .factors import pack_triangle, triangle_numel, unpack_triangle
from .layers import LayerShape


def sides(shape: LayerShape) -> tuple[int, int]:
    """Return the smaller and the larger of both factors' sizes; of a layer without groups."""
    return min(shape.g_dim, shape.a_dim), max(shape.g_dim, shape.a_dim)


@lru_cache(maxsize=256)
def rows_of(shape: LayerShape, world_size: int) -> tuple[Span, ...]:
    """Return each rank's rows of T ∇. They depend on nothing else, so that a resumed run rounds as before."""
    return spans_of(equal_lengths(sides(shape)[0], world_size))


def spread_numel(shape: LayerShape) -> int:
    """Return the elements that a solver takes on its way to all ranks."""
    small, large = sides(shape)
    return 1 + small**2 + triangle_numel(1, large)


@dataclass(frozen=True)
class SpreadSolver:
    """The solver of a spread layer as all ranks have it; see [Note: spread layers].

    Args:
        shape: of the layer, which has no groups.
        root: T, [s, s].
        right: the larger factor's inverse, [l, l].
    """

    shape: LayerShape
    root: Tensor
    right: Tensor

    @classmethod
    def of(
        cls, a_inverse: Tensor, g_inverse: Tensor, shape: LayerShape, root: Tensor | None = None
    ) -> "SpreadSolver":
        """Make it of the owner's inverses; ``root`` if it is known from a checkpoint."""
        pair = g_inverse[0], a_inverse[0]
        small, large = pair[::-1] if _transposed(shape) else pair
        return cls(shape, _root(small) if root is None else root, large)

    def pack(self, out: Tensor) -> None:
        """Write it as `spread_numel` elements; see `unpack`."""
        numel = self.root.numel()
        out[0] = 1.0
        out[1 : 1 + numel].copy_(self.root.flatten())
        pack_triangle(self.right.unsqueeze(0), out[1 + numel :])

    @classmethod
    def unpack(cls, packed: Tensor, shape: LayerShape) -> "SpreadSolver | None":
        """Read it again; None if the owner had none (zeros). On a GPU the host waits here."""
        if not bool(packed[0]):
            return None
        small, large = sides(shape)
        root = packed[1 : 1 + small**2].view(small, small).clone()
        return cls(shape, root, unpack_triangle(packed[1 + small**2 :], 1, large)[0])

    def before(self, matrix: Tensor, rows: Span, out: Tensor) -> None:
        """Write these rows of T ∇, for a gradient [g, a], to ``out``, [rows, l]."""
        gradient = (matrix.mT if _transposed(self.shape) else matrix).to(self.root.dtype)
        root = self.root[rows.start : rows.stop]
        if out.dtype != root.dtype:
            out.copy_(root @ gradient)
        else:
            torch.mm(root, gradient, out=out)

    def after(self, rows: Sequence[Tensor]) -> Tensor:
        """Return V, [g, a], of all rows of U in their order."""
        # A copy of the pieces, see [Note: copies before products] in `factors`.
        direction = self.root.mT @ torch.cat([each.to(self.root.dtype) for each in rows])
        return direction.mT if _transposed(self.shape) else direction

    @property
    def nbytes(self) -> int:
        return self.root.nbytes + self.right.nbytes


def rounding(shapes: Sequence[LayerShape], device: torch.device) -> str:
    """Return a short name of how this rank rounds the last products of these layers; equal if they are."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    for small, large in sorted({sides(shape) for shape in shapes}):
        root = torch.randn(small, small, generator=generator, dtype=torch.float32).to(device)
        made = torch.randn(small, large, generator=generator, dtype=torch.float32).to(device)
        digest.update((root.mT @ made).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _transposed(shape: LayerShape) -> bool:
    """Whether the smaller factor is that of the inputs."""
    return shape.g_dim > shape.a_dim


def _root(inverse: Tensor) -> Tensor:
    """Return T with TᵀT = ``inverse``."""
    triangle, info = torch.linalg.cholesky_ex(inverse)
    if not bool(info):
        upper: Tensor = triangle.mT.contiguous()
        return upper
    # Rounding has left it without a root, or nearly so: drop what is below zero.
    values, vectors = torch.linalg.eigh(inverse.double())
    root: Tensor = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT
    return root.to(inverse.dtype).contiguous()
