"""What the owner of a layer keeps of it: the running factors, and the solver made of them.

Only the owner has them, so that their memory, and the work of making solvers, is divided by the number of ranks.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from .columns import LayerShape
from .factors import BatchFactor, DampedInverse, Solver, is_finite, multiplied, update_running
from .spread import SpreadSolver

Start = Literal["batch", "identity"]


class Curvature:
    """The second-order state of one layer on its owner.

    Args:
        shape: of the layer.
        solver: how the factors are inverted.
        pi: whether the damping is shared out between both factors by their traces.
        start: whether the running mean begins with the first batch or with the identity.

    Attributes:
        solver: what preconditions; None before the first.
        strained: how many times a factor had to be damped further before it could be inverted.
    """

    def __init__(self, shape: LayerShape, *, solver: type[Solver], pi: bool, start: Start) -> None:
        self._shape = shape
        self._solver_type = solver
        self._pi = pi
        self._start: Start = start
        self._a: Tensor | None = None
        self._g: Tensor | None = None
        self.solver: Solver | None = None
        self._spread: SpreadSolver | None = None
        self._dropped: Tensor | int = 0
        self.strained = 0

    @property
    def dropped(self) -> int:
        """How many batches had factors that were not finite, or none at all; they changed nothing."""
        return int(self._dropped)

    def add(self, a: BatchFactor, g: BatchFactor, decay: float) -> None:
        """Take the factors of one batch into the running means, unless one of them is not finite."""
        usable = is_finite(a) & is_finite(g)
        self._dropped = self._dropped + ~usable
        if self._a is None or self._g is None or not usable.is_cuda:
            if not bool(usable):
                return
        else:
            # The host must not wait for the device: the old mean is its own mean with itself.
            a = torch.where(usable, multiplied(a), self._a)
            g = torch.where(usable, multiplied(g), self._g)
        self._a = update_running(self._a, a, decay, start=self._start)
        self._g = update_running(self._g, g, decay, start=self._start)

    @property
    def lacks_solver(self) -> bool:
        """Whether there are factors and, as the first ones were not finite or came late, no solver of them."""
        return self.solver is None and self._a is not None

    def invert(self, damping: float) -> None:
        """Make a new solver of the running factors; the former one serves on if they are not finite."""
        if self._a is None or self._g is None:
            return
        solver = self._solver_type.compute(self._a, self._g, damping, pi=self._pi)
        if solver is not None:
            self.strained += solver.strained
            self.solver, self._spread = solver, None

    def spread(self) -> SpreadSolver | None:
        """Return the solver as all ranks get it if the layer is spread; None if there is none yet, or another kind."""
        if self._spread is None and isinstance(self.solver, DampedInverse):
            self._spread = SpreadSolver.of(self.solver, self._shape)
        return self._spread

    def factor_bytes(self) -> int:
        """Memory of the running factors."""
        return sum(factor.nbytes for factor in (self._a, self._g) if factor is not None)

    def solver_bytes(self) -> int:
        """Memory of what the solver keeps."""
        tensors = [] if self.solver is None else list(self.solver.tensors().values())
        if self._spread is not None:
            tensors.append(self._spread.root)
        return sum(tensor.nbytes for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors on the host, and the counts."""
        solver = self.solver.tensors() if self.solver is not None else None
        return {
            "a": None if self._a is None else self._a.cpu(),
            "g": None if self._g is None else self._g.cpu(),
            "solver": None if solver is None else {name: tensor.cpu() for name, tensor in solver.items()},
            "root": None if self._spread is None else self._spread.root.cpu(),
            "strained": self.strained,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take back what :meth:`state_dict` gave. Raises ``ValueError`` if it is of another layer's shape."""
        dims = (self._shape.a_dim, self._shape.g_dim)
        for factor, dim in zip((state["a"], state["g"]), dims, strict=True):
            expected = (self._shape.groups, dim, dim)
            if factor is not None and tuple(factor.shape) != expected:
                raise ValueError(
                    f"expected a factor of shape {expected}, got {tuple(factor.shape)}; "
                    "load the state of the same model"
                )
        self._a, self._g = (
            None if factor is None else factor.to(device, copy=True) for factor in (state["a"], state["g"])
        )
        self.solver, self._spread = None, None
        if state["solver"] is not None:
            tensors = {name: tensor.to(device, copy=True) for name, tensor in state["solver"].items()}
            self.solver = self._solver_type.from_tensors(tensors)
            root = state.get("root")  # as all ranks had it, if the layer was spread
            if root is not None and isinstance(self.solver, DampedInverse):
                self._spread = SpreadSolver.of(self.solver, self._shape, root.to(device, copy=True))
        self.strained, self._dropped = state["strained"], state["dropped"]
