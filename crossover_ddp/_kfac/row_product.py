"""Preconditioning row by row: while the gradient is still on its way, and while what is done is leaving.

[Note: rows as they come] A solver computes V = L · m(∇ · R), see ``Solver``. A row of ∇ · R needs only that row of ∇,
so the owner of a large layer multiplies what has arrived while the link brings the rest. A row of V needs only that
row of L, so what is done leaves while the rest is multiplied. Blocks of rows are cut by the layer's shape, never by
what happens to have arrived, so that sums are rounded alike in every run.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from .columns import LayerShape
from .factors import Solver

# Smaller products than these read R so often that it shows: 32 rows of 1,120 cost a tenth more than all 155 at once.
_BLOCK_ROWS: Final = 32
_BLOCK_NUMEL: Final = 32 * 1024
# Below that a layer's product takes less time than handing its parts from thread to thread.
_LEAST_NUMEL: Final = 64 * 1024


def goes_by_rows(shape: LayerShape) -> bool:
    """Whether the gradient of such a layer is multiplied as it comes."""
    return shape.groups == 1 and shape.g_dim > block_rows(shape) and shape.g_dim * shape.a_dim >= _LEAST_NUMEL


def block_rows(shape: LayerShape) -> int:
    """Return how many rows are multiplied at a time."""
    return max(_BLOCK_ROWS, -(-_BLOCK_NUMEL // shape.a_dim))


class RowProduct:
    """V of one layer without groups.

    Args:
        shape: of the layer.
        solver: of the layer.
        weight: gradient of the weight, rows first, contiguous; need not have arrived yet.
        bias: gradient of the bias, [g], behind the weight.
    """

    def __init__(self, shape: LayerShape, solver: Solver, weight: Tensor, bias: Tensor | None) -> None:
        self._solver = solver
        self._rows = weight.view(shape.g_dim, -1)
        self._bias = bias
        self._blocks = _blocks(shape)
        self._product = solver.right.new_empty(shape.g_dim, shape.a_dim)
        self._done = 0

    def advance(self, numel: int) -> None:
        """Multiply all blocks that lie in the first ``numel`` elements of the weight's gradient."""
        width = self._rows.shape[1]
        right = self._solver.right[0, :width]
        for rows in self._blocks[self._done :]:
            if rows.stop * width > numel:
                return
            # A copy: a product may be rounded otherwise where its operands lie otherwise in memory, and where these
            # lie depends on the buckets, which a resumed run has anew.
            torch.mm(self._rows[rows].to(right.dtype, copy=True), right, out=self._product[rows])
            self._done += 1

    def results(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of V with their place, [rows, a] each; all has arrived, the bias too."""
        self.advance(self._rows.numel())
        if self._bias is not None:
            self._product.addr_(self._bias.to(self._product.dtype), self._solver.right[0, -1])
        middle = self._solver.middle(self._product.unsqueeze(0))[0]
        for rows in self._blocks:
            yield rows, self._solver.left[0, rows] @ middle


def _blocks(shape: LayerShape) -> list[slice]:
    count = block_rows(shape)
    return [slice(start, min(start + count, shape.g_dim)) for start in range(0, shape.g_dim, count)]
