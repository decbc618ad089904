"""A small FSDP2 model in two nodes of two ranks, and its training, by public names only."""

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import debug

import crossover_ddp as ddp
from crossover_ddp.fsdp import register_comm_hook

WIDTH: Final = 7  # odd, so that shards have padding
NAMES: Final = ("between", "inside")
RANKS: Final = 4
# Returns the state and the hook to register, given the process group between nodes.
Make = Callable[[dist.ProcessGroup], tuple[Any, Any]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, values: Tensor) -> Tensor:
        moved: Tensor = self.down(self.up(values).tanh())
        return values + moved


class Network(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        last: Tensor = self.head(values)
        return last


def mesh_of(shape: tuple[int, int] = (2, 2), device: str = "cpu") -> DeviceMesh:
    """Return a mesh of all ranks, without what earlier tests of this process have left in torch.

    A `DTensor` takes results for an equal mesh from a cache, with process groups that have ended.
    """
    for clear in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, clear, lambda: None)()
    modules = [
        each for name, each in sys.modules.items() if name.startswith("torch.distributed.tensor.")
    ]
    for module in modules:
        for each in [*vars(module).values()]:
            if isinstance(each, functools._lru_cache_wrapper):
                each.cache_clear()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return init_device_mesh(device, shape, mesh_dim_names=NAMES)


def sharded(network: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Apply ``fully_shard`` to the blocks and to the whole network."""
    for block in network.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def model_on(mesh: DeviceMesh, make: Make | None = None, width: int = WIDTH, **options: Any) -> Any:
    """Return a model of seed 0 with a hook between nodes; native hybrid sharding without one."""
    torch.manual_seed(0)
    network = Network(width).to(mesh.device_type)
    if make is None:
        return sharded(network, mesh, **options)
    model = sharded(network, mesh["inside"], **options)
    register_comm_hook(model, *make(mesh["between"].get_group()))
    return model


def split(group: dist.ProcessGroup) -> tuple[Any, Any]:
    return group, ddp.reduce_scatter_all_gather_hook


def int8(group: dist.ProcessGroup) -> tuple[Any, Any]:
    return ddp.CompressedState(ddp.Int8(), process_group=group), ddp.compressed_hook


def local_sgd(group: dist.ProcessGroup, sync_every: int = 1, **options: Any) -> tuple[Any, Any]:
    state = ddp.LocalSGDState(sync_every, process_group=group, **options)
    return state, ddp.local_sgd_hook


def batch(rank: int, step: int, width: int = WIDTH) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    parameter = next(model.parameters())
    width = parameter.shape[1]
    values = batch(dist.get_rank(), step, width).to(parameter.device)
    loss: Tensor = model(values).float().square().mean()
    return loss


def crossover(group: dist.ProcessGroup) -> tuple[Any, Any]:
    return ddp.CrossoverState(group), ddp.crossover_hook


WAYS: Final[dict[str, Make]] = {"split": split, "crossover": crossover, "int8": int8}


class Training:
    """Trains a model by AdamW and keeps the losses of all ranks."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        loss = loss_of(self.model, number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().cpu()
        self.losses.append(total.item())

    def run(self, *numbers: int) -> "Training":
        for number in numbers:
            self.step(number)
        return self

    def found(self) -> tuple[list[float], list[list[float]]]:
        """Return this rank's losses and the whole parameters. **Collective** within a node."""
        return self.losses, whole(self.model)


def shards_of(model: nn.Module) -> list[Any]:
    """Return the parameters as `DTensor`, although recomputing in backward may leave them whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [*model.parameters()]


def whole(model: nn.Module) -> list[list[float]]:
    """Return the whole parameters as lists. **Collective** within a node."""
    parameters = shards_of(model)
    return [each.full_tensor().detach().flatten().tolist() for each in parameters]


def finite(values: list[list[float]]) -> bool:
    return all(torch.tensor(each).isfinite().all() for each in values)


def same_on_all_nodes(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Return whether the nodes' shards are equal, bit for bit. **Collective** between nodes."""
    parameters = shards_of(model)
    own = torch.cat([each.to_local().detach().flatten() for each in parameters]).cpu()
    all_of: list[Any] = [None] * mesh["between"].size()
    dist.all_gather_object(all_of, own, group=mesh["between"].get_group())
    return all(torch.equal(own, each) for each in all_of)
