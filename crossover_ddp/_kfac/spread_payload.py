"""The part of a bucket's payload that belongs to spread layers, see [Note: spread layers] in `spread`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .columns import LayerShape
from .curvature import Curvature
from .factors import gradient_matrix, split_gradient
from .round_plan import BucketLayer, RoundPlan
from .spread import SpreadSolver, rows_of, sides, spread_numel


class SpreadPayload:
    """Packs the rows of spread layers, multiplies this rank's, and brings all ranks' back.

    Args:
        plan: of the step.
        curvatures: of the layers that this rank owns.
        solvers: of spread layers, which all ranks have; new ones replace them when they arrive.
    """

    def __init__(
        self, plan: RoundPlan, curvatures: Mapping[int, Curvature], solvers: dict[int, SpreadSolver]
    ) -> None:
        self._plan = plan
        self._curvatures = curvatures
        self._solvers = solvers

    def rows_numel(self, shape: LayerShape) -> tuple[int, ...]:
        """Return the elements of each rank's rows."""
        return tuple([span.numel * sides(shape)[1] for span in rows_of(shape, self._plan.world_size)])

    def pack(self, layer: BucketLayer, spread: SpreadSolver, there: Tensor, starts: Sequence[int]) -> None:
        """Write each rank's rows of T ∇ to where they begin in ``there``."""
        matrix = gradient_matrix(layer.shape, layer.weight, layer.bias)[0]
        # It runs inside of backward(), which may have been called under autocast.
        with torch.autocast(matrix.device.type, enabled=False):
            for rank, rows in enumerate(rows_of(layer.shape, self._plan.world_size)):
                spread.before(matrix, rows, self._rows(layer, there, rank, starts[rank]))

    def multiply(
        self, layer: BucketLayer, spread: SpreadSolver, part: Tensor, back: Tensor, offset: int
    ) -> Tensor | None:
        """Write this rank's rows to its part of what goes back; return their share of the KL clip's sum, if any."""
        source, target = (self._rows(layer, flat, self._plan.rank, offset) for flat in (part, back))
        # See [Note: copies before products] in `factors`.
        turned = source.to(spread.right.dtype, copy=True)
        made = spread.rows(rows_of(layer.shape, self._plan.world_size)[self._plan.rank].start, turned)
        target.copy_(made)
        clips = self._plan.kl_clip is not None
        return (made * turned).sum(dtype=torch.float64) * layer.lr**2 if clips else None

    def bring_back(
        self,
        layer: BucketLayer,
        spread: SpreadSolver,
        back: Tensor,
        starts: Sequence[int],
        scale: Tensor | None,
    ) -> None:
        """Make the direction of all ranks' rows, times ``scale``, and write it to DDP's bucket."""
        with torch.autocast(back.device.type, enabled=False):
            rows = [self._rows(layer, back, rank, start) for rank, start in enumerate(starts)]
            direction = spread.after(rows)
        if scale is not None:
            direction *= scale
        split_gradient(layer.shape, direction.unsqueeze(0), layer.weight, layer.bias)

    def send_solver(self, layer: BucketLayer, out: Tensor) -> None:
        """Write the owner's solver to the beginning of ``out``; zeros where it has none."""
        packed = out[: spread_numel(layer.shape, solver=self._plan.solver)]
        spread = self._curvatures[layer.index].spread()
        if spread is None:
            packed.zero_()
        else:
            spread.pack(packed)

    def take_solver(self, layer: BucketLayer, packed: Tensor) -> None:
        """Keep the solver that all ranks have now; on a GPU the host waits here, once for each new solver."""
        if layer.index in self._curvatures:
            solver = self._curvatures[layer.index].spread()
        else:
            numel = spread_numel(layer.shape, solver=self._plan.solver)
            solver = SpreadSolver.unpack(packed[:numel], layer.shape, solver=self._plan.solver)
        if solver is None:
            self._solvers.pop(layer.index, None)
        else:
            self._solvers[layer.index] = solver

    def _rows(self, layer: BucketLayer, flat: Tensor, rank: int, start: int) -> Tensor:
        """Return the view of a rank's rows, [rows, l], which begin at ``start`` of ``flat``."""
        rows = rows_of(layer.shape, self._plan.world_size)[rank].numel
        width = sides(layer.shape)[1]
        return flat[start : start + rows * width].view(rows, width)
