"""FSDP2's shards as the model of a hook, for `checks` to find where there is no DDP.

[Note: shards as a model] Between nodes the shards of FSDP2 are a model of data parallelism by
themselves: its parameters are the shards on this rank, and its process group has the ranks with the
same shards. Its buckets are the gradients that FSDP2 has already averaged inside the node. So hooks
need to know nothing of FSDP2.
"""

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossover_ddp._system import torch_private

from . import checks

# The name of the parameter that a step's last bucket holds.
TAIL: Final = "(the end of the step)"


class Shards(nn.Module):
    """The shards on this rank, as parameters with the names that the whole model gives them.

    Each shard has FSDP2's padding, which makes it equally large on all ranks of a node.

    Args:
        network: the model, to which FSDP2 was applied.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network = [network]  # in a list, so that it is no submodule
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        # FSDP2's parameter groups, in the order of the modules.
        self.groups = torch_private.fsdp_groups(network)
        # For each group the shards, in the order in which they follow each other in its gradients.
        self._of_group: list[list[nn.Parameter]] = []
        for group in self.groups:
            shards = []
            for whole, memory in torch_private.fsdp_shards(group):
                shard = nn.Parameter(memory.detach(), requires_grad=whole.requires_grad)
                shards.append(shard)
                torch_private.own_parameters(self)[names[id(whole)]] = shard
            self._of_group.append(shards)
        self.refresh()

    def refresh(self) -> None:
        """Follow parameters that were moved, loaded by assignment, frozen or unfrozen."""
        for group, shards in zip(self.groups, self._of_group, strict=True):
            found = torch_private.fsdp_shards(group)
            for place, (whole, memory) in enumerate(found):
                shard = shards[place]
                if shard.is_meta and not memory.is_meta:
                    shard = shards[place] = self._replaced(shard, memory)
                shard.__dict__["optimized_as"] = whole
                shard.requires_grad_(whole.requires_grad)
                if shard.data_ptr() != memory.data_ptr():
                    shard.data = memory

    def _replaced(self, old: nn.Parameter, memory: Tensor) -> nn.Parameter:
        """Return a parameter in place of one on the meta device, which can get no memory."""
        new = nn.Parameter(memory.detach(), requires_grad=old.requires_grad)
        own = torch_private.own_parameters(self)
        [name] = [name for name, each in own.items() if each is old]
        own[name] = new
        return new

    def meshes(self) -> list[Any]:
        """Return the device meshes of the shards, each once."""
        whole: Any = [checks.optimized(shard) for shards in self._of_group for shard in shards]
        return [*dict.fromkeys(each.device_mesh for each in whole)]

    def trained(self, number: int) -> list[nn.Parameter]:
        """Return the shards of a group that are trained, by the group's index in ``groups``."""
        return [shard for shard in self._of_group[number] if shard.requires_grad]

    def add_placeholder(self, name: str, numel: int, device: torch.device) -> nn.Parameter:
        """Return a parameter that is not trained, and takes no memory, for a bucket of its own."""
        zeros = torch.zeros((), device=device).expand(numel)
        placeholder = nn.Parameter(zeros, requires_grad=False)
        torch_private.own_parameters(self)[name] = placeholder
        return placeholder

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._network[0].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._network[0].load_state_dict(*args, **kwargs)


class ShardedModel:
    """Has the attributes of a DDP model that hooks use, see [Note: shards as a model].

    Args:
        network: the model, to which FSDP2 was applied.
        process_group: the ranks with the same shards.
        state: the state that a hook is registered with.
        hook: the hook.
        around: a function that wraps a hook before the model's forward.
    """

    find_unused_parameters = False
    # FSDP2 leaves each rank its own buffers.
    broadcast_buffers = False
    reducer = None

    def __init__(
        self,
        network: nn.Module,
        process_group: dist.ProcessGroup,
        state: object,
        hook: Callable[..., Any],
        around: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        self.network = network
        self.module = Shards(network)
        self.process_group = process_group
        setattr(self, torch_private.SUBMODULES, {"module": self.module})
        setattr(self, torch_private.COMM_HOOKS, [(hook, state)])
        setattr(self, torch_private.JOIN_CONFIG, types.SimpleNamespace(enable=False))
        self._around = around

    def register_forward_pre_hook(self, hook: Callable[..., None], *, prepend: bool = False) -> Any:
        """Have ``hook`` called before the model's forward, and before FSDP2 gathers parameters."""
        return self.network.register_forward_pre_hook(self._around(hook), prepend=prepend)


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a `DTensor` that is on this rank, or ``tensor`` itself if it is whole."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def divided(model: object, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return flat values of a model's parameters for a checkpoint.

    For shards they become parts of a `DTensor` like the parameter, so that
    ``torch.distributed.checkpoint`` saves all parts, and can load them on another number of ranks.
    All trained parameters are included, since it loads only into tensors that are already there.
    """
    if not isinstance(model, ShardedModel):
        return dict(values)
    found = {}
    for name, shard in model.module.named_parameters():
        if not shard.requires_grad:
            continue
        whole: Any = checks.optimized(shard)
        own = whole.to_local()
        value = values.get(name)
        part = torch.zeros(own.shape) if value is None else value[: own.numel()].view(own.shape)
        found[name] = type(whole.data).from_local(
            part.to(own.device),
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    return found


def flat_part(value: Tensor) -> Tensor:
    """Return this rank's part of a value from `divided`, flat and with FSDP2's padding."""
    own = own_part(value.detach()).flatten()
    mesh = getattr(value, "device_mesh", None)
    if mesh is None or not value.placements[0].is_shard(0):  # type: ignore[attr-defined]
        return own  # FSDP2 divides other dimensions only where no padding is needed
    rows = -(-value.shape[0] // mesh.size())
    return nn.functional.pad(own, (0, rows * math.prod(value.shape[1:]) - own.numel()))
