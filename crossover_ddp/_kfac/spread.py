"""Preconditions a dominant layer on all ranks: each rank has some rows of its gradient.

[Note: spread layers] A layer that fills most of a bucket would travel to its owner and back as a
whole. With two ranks that takes twice the time of an even cut, and one rank multiplies while the
others wait. All ranks can multiply a part of the layer if they have its solver. With the inverse of
the smaller factor written as TᵀT, the direction is, up to transposition,

    V = Tᵀ U,   U = (T ∇) A⁻¹,

and a row of U needs only the same row of T ∇. So every rank sends T times its own gradient. Each
rank receives the sum over ranks of its rows and multiplies it by the larger inverse. All rows are
gathered, and every rank multiplies them by Tᵀ. The KL clip sums V · ∇ = U · (T ∇), which is a sum
over rows as well. Our design.

The owner makes the solver. In the step in which it is new the layer travels as a whole, and the
owner sends the solver to all ranks. That pays if a solver serves for some steps: see
`placement.spreads`. All ranks use the owner's T, so that their summands belong to one sum. Each
rank computes the last product itself: ranks that round it differently would drift apart, so layers
are spread only if all ranks round a test product alike, see `rounding`.
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
    """Return the smaller and the larger of both factors' sizes, for a layer without groups."""
    return min(shape.g_dim, shape.a_dim), max(shape.g_dim, shape.a_dim)


@lru_cache(maxsize=256)
def rows_of(shape: LayerShape, world_size: int) -> tuple[Span, ...]:
    """Return each rank's rows of T ∇.

    They depend on the arguments only, so that a resumed run rounds as before.
    """
    return spans_of(equal_lengths(sides(shape)[0], world_size))


def spread_numel(shape: LayerShape) -> int:
    """Return the number of elements that `SpreadSolver.pack` writes."""
    small, large = sides(shape)
    return 1 + small**2 + triangle_numel(1, large)


@dataclass(frozen=True)
class SpreadSolver:
    """The solver of a spread layer as all ranks have it, see [Note: spread layers]."""

    # The layer's shape. It has no groups.
    shape: LayerShape
    # T, [s, s].
    root: Tensor
    # The larger factor's inverse, [l, l].
    right: Tensor

    @classmethod
    def of(
        cls, a_inverse: Tensor, g_inverse: Tensor, shape: LayerShape, root: Tensor | None = None
    ) -> "SpreadSolver":
        """Make it of the owner's inverses, and of T if a checkpoint has it."""
        small = g_inverse[0]
        large = a_inverse[0]
        if _transposed(shape):
            small, large = large, small
        return cls(shape, _root(small) if root is None else root, large)

    def pack(self, out: Tensor) -> None:
        """Write it to ``out``, `spread_numel` elements. The first is 1, see `unpack`."""
        numel = self.root.numel()
        out[0] = 1.0
        out[1 : 1 + numel].copy_(self.root.flatten())
        pack_triangle(self.right.unsqueeze(0), out[1 + numel :])

    @classmethod
    def unpack(cls, packed: Tensor, shape: LayerShape) -> "SpreadSolver | None":
        """Read the result of `pack`. None if the owner had no solver and sent zeros.

        The host waits for a device here.
        """
        if not bool(packed[0]):
            return None
        small, large = sides(shape)
        root = packed[1 : 1 + small**2].view(small, small).clone()
        return cls(shape, root, unpack_triangle(packed[1 + small**2 :], 1, large)[0])

    def before(self, matrix: Tensor, rows: Span, out: Tensor) -> None:
        """Write these rows of T ∇, for a gradient [g, a], to ``out``, [rows, l]."""
        oriented = matrix.mT if _transposed(self.shape) else matrix
        gradient = oriented.to(self.root.dtype)
        root = self.root[rows.start : rows.stop]
        if out.dtype != root.dtype:
            out.copy_(root @ gradient)
        else:
            torch.mm(root, gradient, out=out)

    def after(self, rows: Sequence[Tensor]) -> Tensor:
        """Return V, [g, a], from all rows of U in their order."""
        # `cat` copies them, see [Note: copies before products] in `factors`.
        direction = self.root.mT @ torch.cat([each.to(self.root.dtype) for each in rows])
        return direction.mT if _transposed(self.shape) else direction

    @property
    def nbytes(self) -> int:
        return self.root.nbytes + self.right.nbytes


def rounding(shapes: Sequence[LayerShape], device: torch.device) -> str:
    """Return a digest of test products of these layers' sizes, to compare the rounding of ranks."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    for small, large in sorted({sides(shape) for shape in shapes}):
        root = torch.randn(small, small, generator=generator, dtype=torch.float32).to(device)
        made = torch.randn(small, large, generator=generator, dtype=torch.float32).to(device)
        digest.update((root.mT @ made).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _transposed(shape: LayerShape) -> bool:
    """Return whether the smaller factor is that of the inputs."""
    return shape.g_dim > shape.a_dim


def _root(inverse: Tensor) -> Tensor:
    """Return T with TᵀT = ``inverse``."""
    triangle, info = torch.linalg.cholesky_ex(inverse)
    if not bool(info):
        upper: Tensor = triangle.mT.contiguous()
        return upper
    # Rounding has made it indefinite, or nearly so: set negative eigenvalues to zero.
    values, vectors = torch.linalg.eigh(inverse.double())
    root: Tensor = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT
    return root.to(inverse.dtype).contiguous()
