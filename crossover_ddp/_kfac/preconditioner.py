"""What this rank has of a K-FAC run: the layers that it owns, their curvatures, and the traffic of factors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from crossover_ddp._ddp.checks import resolve_group

from .capture import FactorCapture
from .columns import LayerShape
from .curvature import Curvature
from .factor_sums import ColumnRoom
from .factor_traffic import FactorTraffic
from .factors import SOLVERS
from .placement import loads_s, most_columns
from .setup import KFACSetup
from .spread import SpreadLayers


class Preconditioner:
    """Begins with nothing known of the layers; made anew when the owners change.

    Args:
        setup: of the state.
        owners: of each layer.

    Attributes:
        setup, owners: as given.
        curvatures: of the layers that this rank owns, by index.
        spread: of the layers that all ranks precondition together.
        capture: of this rank's factors.
        traffic: how they travel.
    """

    def __init__(self, setup: KFACSetup, owners: Sequence[int]) -> None:
        self.setup = setup
        self.owners = tuple(owners)
        self.curvatures: dict[int, Curvature] = {
            index: self._curvature(index) for index, owner in enumerate(owners) if owner == setup.rank
        }
        self.spread = SpreadLayers([index for index, cost in enumerate(setup.costs) if cost.spread])
        self.capture = FactorCapture(
            setup.layers,
            model=setup.model(),
            sharing=setup.sharing,
            accumulated=setup.accumulated,
            loss_scale=setup.loss_scale,
            only=self.curvatures if setup.local else None,
            rooms=None if setup.local else [self._room(layer.shape) for layer in setup.layers],
        )
        self.traffic = FactorTraffic(
            setup.layers,
            self.owners,
            curvatures=self.curvatures,
            capture=self.capture,
            process_group=setup.process_group,
            local=setup.local,
        )

    def _room(self, shape: LayerShape) -> ColumnRoom:
        """Return how many columns this rank sends of each factor."""
        ranks = self.setup.world_size
        return ColumnRoom(most_columns(shape.a_dim, ranks), most_columns(shape.g_dim, ranks))

    def _curvature(self, index: int) -> Curvature:
        setup = self.setup
        return Curvature(
            setup.layers[index].shape,
            solver=SOLVERS[setup.solver],
            pi=setup.pi,
            start="identity" if setup.sharing == "kfac-pytorch" else "batch",
        )

    def close(self) -> None:
        """Take the hooks off the model's modules."""
        self.capture.close()

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
                + (", spread over all ranks" if index in self.spread.solvers else "")
                + ("" if curvature is None else _trouble(curvature))
            )
        for rank, load_s in enumerate(
            loads_s(setup.costs, self.owners, setup.world_size, setup.inverse_steps)
        ):
            yield f"rank {rank} works for {1e3 * load_s:.3g} ms a step"

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps: "factors", "solvers", "buffers"."""
        curvatures = self.curvatures.values()
        others = [each for index, each in self.spread.solvers.items() if index not in self.curvatures]
        return {
            "factors": sum(curvature.factor_bytes() for curvature in curvatures),
            "solvers": sum(curvature.solver_bytes() for curvature in curvatures)
            + sum(solver.nbytes for solver in others),
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
        dist.all_gather_object(gathered, own, group=resolve_group(setup.process_group))
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
            if self.setup.costs[index].spread and own.get("root") is not None:
                if curvature is None:
                    curvature = self._curvature(index)
                    curvature.load_state_dict(own, layer.weight.device)
                if (solver := curvature.spread()) is not None:
                    self.spread.solvers[index] = solver


def _trouble(curvature: Curvature) -> str:
    found = [
        f"{count} {what}"
        for count, what in (
            (curvature.strained, "times damped further"),
            (curvature.dropped, "batches dropped"),
        )
        if count
    ]
    return "".join(f", {text}" for text in found)
