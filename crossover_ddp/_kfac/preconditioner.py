"""What this rank has of a K-FAC run: the layers that it owns, their curvatures, and the traffic of factors."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from .capture import FactorCapture
from .curvature import SOLVERS, Curvature
from .factor_traffic import FactorTraffic
from .factors import WeightSharing
from .layers import Layer
from .placement import LayerCost, loads_s
from .settings import Hypers
from .spread import SpreadSolver


@dataclass(eq=False)
class KFACSetup:
    """What a KFACState sets up once: the layers, what they cost, and the arguments that do not change.

    Args:
        model: weakly, since DDP holds the state where no collector sees it.
        layers: of the model.
        costs: of the layers, in the same order.
        hypers: see ``KFACState``.
        group: the ranks of the job.
        solver, pi, sharing, accumulated: see ``KFACState``.
        local: whether factors do not travel.
        keeps_turn: whether making solvers is compute inside the job's turn.
        loss_scale: of this moment.

    Attributes:
        rank, world_size: of this process.
        inverse_steps: how often solvers are made at the beginning.
    """

    model: weakref.ref[nn.Module]
    layers: Sequence[Layer]
    costs: Sequence[LayerCost]
    hypers: Hypers
    group: dist.ProcessGroup
    solver: Literal["inverse", "eigen"]
    pi: bool
    sharing: WeightSharing
    accumulated: Literal["mean", "sum"]
    local: bool
    keeps_turn: bool
    loss_scale: Callable[[], float]

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.group.rank(), self.group.size()
        self.inverse_steps = self.hypers.at(0).inverse_steps


class Preconditioner:
    """Begins with nothing known of the layers; made anew when the owners change.

    Args:
        setup: of the state.
        owners: of each layer.

    Attributes:
        setup, owners: as given.
        curvatures: of the layers that this rank owns, by index.
        spread: the layers that all ranks precondition together, see [Note: spread layers] in `spread`.
        solvers: of these, which all ranks have; none before the first, and after factors that were no numbers.
        capture: of this rank's factors.
        traffic: how they travel.
    """

    def __init__(self, setup: KFACSetup, owners: Sequence[int]) -> None:
        self.setup = setup
        self.owners = tuple(owners)
        self.curvatures: dict[int, Curvature] = {
            index: self._curvature(index) for index, owner in enumerate(owners) if owner == setup.rank
        }
        self.spread = frozenset(index for index, cost in enumerate(setup.costs) if cost.spread)
        self.solvers: dict[int, SpreadSolver] = {}
        self.capture = FactorCapture(
            setup.layers,
            model=setup.model(),
            sharing=setup.sharing,
            accumulated=setup.accumulated,
            loss_scale=setup.loss_scale,
            only=self.curvatures if setup.local else None,
            ranks=1 if setup.local else setup.world_size,
        )
        self.traffic = FactorTraffic(
            setup.layers,
            self.owners,
            curvatures=self.curvatures,
            capture=self.capture,
            group=setup.group,
            local=setup.local,
        )

    def _curvature(self, index: int) -> Curvature:
        setup = self.setup
        return Curvature(
            setup.layers[index].shape,
            solver=SOLVERS[setup.solver],
            pi=setup.pi,
            start="identity" if setup.sharing == "kfac-pytorch" else "batch",
        )

    def keep(self, index: int, solver: SpreadSolver | None) -> None:
        """Keep the solver of a spread layer that all ranks have now."""
        if solver is None:
            self.solvers.pop(index, None)
        else:
            self.solvers[index] = solver

    # --- reports ---------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[str]:
        """Describe each layer, and what each rank has to do."""
        setup = self.setup
        for index, (cost, owner) in enumerate(zip(setup.costs, self.owners, strict=True)):
            curvature = self.curvatures.get(index)
            yield (
                f"{cost.name}: A {cost.a_dim}, G {cost.g_dim}"
                + (f", {cost.groups} groups" if cost.groups > 1 else "")
                + f", rank {owner}, {1e3 * cost.step_s(setup.inverse_steps):.3g} ms"
                + (", spread over all ranks" if index in self.solvers else "")
                + ("" if curvature is None else _trouble(curvature))
            )
        loads = loads_s(setup.costs, self.owners, setup.world_size, setup.inverse_steps)
        for rank, load_s in enumerate(loads):
            yield f"rank {rank} works for {1e3 * load_s:.3g} ms a step"

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps: "factors", "solvers", "buffers"."""
        curvatures = self.curvatures.values()
        others = [solver.nbytes for index, solver in self.solvers.items() if index not in self.curvatures]
        return {
            "factors": sum(curvature.factor_bytes() for curvature in curvatures),
            "solvers": sum(curvature.solver_bytes() for curvature in curvatures) + sum(others),
            "buffers": self.traffic.nbytes,
        }

    def stats(self) -> dict[str, int]:
        """Return what went wrong with this rank's layers."""
        return {
            "strained": sum(curvature.strained for curvature in self.curvatures.values()),
            "dropped": sum(curvature.dropped for curvature in self.curvatures.values()),
        }

    # --- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks' layers. Collective; raises ``ExchangeError`` if late factors are lost."""
        setup = self.setup
        self.traffic.settle()
        own = {
            setup.layers[index].name: curvature.state_dict() for index, curvature in self.curvatures.items()
        }
        gathered: list[dict[str, Any]] = [{}] * setup.world_size
        dist.all_gather_object(gathered, own, group=setup.group)
        states = {name: state for each in gathered for name, state in each.items()}
        return {
            "solver": setup.solver,
            "world_size": setup.world_size,
            "owners": list(self.owners),
            "layers": {layer.name: states[layer.name] for layer in setup.layers},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what belongs to this rank's layers, and the solvers that all ranks have."""
        for index, layer in enumerate(self.setup.layers):
            own = state["layers"][layer.name]
            curvature = self.curvatures.get(index)
            if curvature is not None:
                curvature.load_state_dict(own, layer.weight.device)
            if index in self.spread and own.get("root") is not None:
                if curvature is None:
                    curvature = self._curvature(index)
                    curvature.load_state_dict(own, layer.weight.device)
                self.keep(index, curvature.spread())


def _trouble(curvature: Curvature) -> str:
    counts = {"times damped further": curvature.strained, "batches dropped": curvature.dropped}
    return "".join(f", {count} {what}" for what, count in counts.items() if count)
