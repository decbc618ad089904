"""Precondition a dominant layer on all ranks. Each rank computes some rows of its gradient.

[Note: spread layers] Without spreading, a layer that fills most of a bucket travels to its owner
and back as a whole. With two ranks that takes twice as long as an even cut, and one rank multiplies
while the others wait. If all ranks have the layer's solver, each can multiply a part of the layer.
With the inverse of the smaller factor written as TᵀT, the direction is, up to transposition,

    V = Tᵀ U,   U = (T ∇) A⁻¹,

and a row of U depends only on the same row of T ∇. So every rank sends T times its own gradient.
Each rank receives its rows, summed over the ranks, and multiplies them by the larger inverse. Then
all rows are gathered, and every rank multiplies them by Tᵀ. The KL clip sums V · ∇ = U · (T ∇),
which is also a sum over rows. This is our own design.

The owner computes the solver. In the step in which the solver is new, the layer travels as a whole,
and the owner sends the solver to all ranks. This pays off if a solver serves for several steps, see
`placement.spreads`. All ranks use the owner's T, so that their terms belong to the same sum. Each
rank computes the last product itself. Ranks that round it differently would drift apart, so layers
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
    """Return the smaller and the larger of the two factors' sizes, for a layer without groups."""
    return min(shape.g_dim, shape.a_dim), max(shape.g_dim, shape.a_dim)


@lru_cache(maxsize=256)
def rows_of(shape: LayerShape, world_size: int) -> tuple[Span, ...]:
    """Return the rows of T ∇ that belong to each rank.

    They depend only on the arguments, so a resumed run rounds in the same way.
    """
    return spans_of(equal_lengths(sides(shape)[0], world_size))


def spread_numel(shape: LayerShape) -> int:
    """Return the number of elements that `SpreadSolver.pack` writes."""
    small, large = sides(shape)
    return 1 + small**2 + triangle_numel(1, large)


@dataclass(frozen=True)
class SpreadSolver:
    """The solver that all ranks have for a spread layer, see [Note: spread layers]."""

    # The layer's shape. It has no groups.
    shape: LayerShape
    # T, of shape [s, s].
    root: Tensor
    # The larger factor's inverse, of shape [l, l].
    right: Tensor

    @classmethod
    def of(
        cls, a_inverse: Tensor, g_inverse: Tensor, shape: LayerShape, root: Tensor | None = None
    ) -> "SpreadSolver":
        """Create the solver from the owner's inverses. ``root`` is T if a checkpoint has it."""
        small = g_inverse[0]
        large = a_inverse[0]
        if _transposed(shape):
            small, large = large, small
        return cls(shape, _root(small) if root is None else root, large)

    def pack(self, out: Tensor) -> None:
        """Write the solver to ``out``, which has `spread_numel` elements.

        The first element is 1, so that `unpack` can tell a solver from zeros.
        """
        numel = self.root.numel()
        out[0] = 1.0
        out[1 : 1 + numel].copy_(self.root.flatten())
        pack_triangle(self.right.unsqueeze(0), out[1 + numel :])

    @classmethod
    def unpack(cls, packed: Tensor, shape: LayerShape) -> "SpreadSolver | None":
        """Read the output of `pack`. Return None if the owner had no solver and sent zeros.

        If the tensor is on a device, the host waits for it here.
        """
        if not bool(packed[0]):
            return None
        small, large = sides(shape)
        root = packed[1 : 1 + small**2].view(small, small).clone()
        return cls(shape, root, unpack_triangle(packed[1 + small**2 :], 1, large)[0])

    def before(self, matrix: Tensor, rows: Span, out: Tensor) -> None:
        """Write some rows of T ∇ to ``out``.

        Args:
            matrix: the gradient ∇, of shape [g, a].
            rows: the rows to compute.
            out: the tensor to write to, of shape [rows, l].
        """
        oriented = matrix.mT if _transposed(self.shape) else matrix
        gradient = oriented.to(self.root.dtype)
        root = self.root[rows.start : rows.stop]
        if out.dtype != root.dtype:
            out.copy_(root @ gradient)
        else:
            torch.mm(root, gradient, out=out)

    def after(self, rows: Sequence[Tensor]) -> Tensor:
        """Return V, of shape [g, a], from all rows of U in order."""
        # `cat` copies the rows, see [Note: copies before products] in `factors`.
        direction = self.root.mT @ torch.cat([each.to(self.root.dtype) for each in rows])
        return direction.mT if _transposed(self.shape) else direction

    @property
    def nbytes(self) -> int:
        return self.root.nbytes + self.right.nbytes


def rounding(shapes: Sequence[LayerShape], device: torch.device) -> str:
    """Return a digest of test products with these layers' sizes, to compare the ranks' rounding."""
    generator = torch.Generator().manual_seed(0)
    digest = hashlib.sha256()
    for small, large in sorted({sides(shape) for shape in shapes}):
        root = torch.randn(small, small, generator=generator, dtype=torch.float32).to(device)
        made = torch.randn(small, large, generator=generator, dtype=torch.float32).to(device)
        digest.update((root.mT @ made).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _transposed(shape: LayerShape) -> bool:
    """Return whether the inputs' factor is the smaller one."""
    return shape.g_dim > shape.a_dim


def _root(inverse: Tensor) -> Tensor:
    """Return a matrix T with TᵀT = ``inverse``."""
    triangle, info = torch.linalg.cholesky_ex(inverse)
    if not bool(info):
        upper: Tensor = triangle.mT.contiguous()
        return upper
    # Rounding has made the inverse indefinite, or nearly so: set negative eigenvalues to zero.
    values, vectors = torch.linalg.eigh(inverse.double())
    root: Tensor = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mT
    return root.to(inverse.dtype).contiguous()
