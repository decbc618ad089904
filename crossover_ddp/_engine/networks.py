"""The networks of one process group, which create the links of its journeys."""

import functools
import weakref
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp.errors import ExchangeError

from .device import Device, Native, Staged
from .journeys import Place, living
from .levels import Levels, TwoLevels, levels_of
from .links import Alone, Gloo

Network = Alone | Gloo | TwoLevels

DESTROYED: Final = (
    "the process group that the hook was registered with was destroyed; wrap the module in "
    "DistributedDataParallel again, with a group that exists, and register the hook with a new "
    "state"
)


class Networks(dict[torch.device, Network]):
    """The networks of a process group, by the device of the tensors that travel.

    ``networks[device]`` creates the network when it is first used. All ranks must do that at the
    same point. It raises ``ExchangeError`` if the group was destroyed before. The group is held by
    a weak reference.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = weakref.ref(group)
        config = str(dist.get_backend_config(group))
        self._backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)

    def __missing__(self, device: torch.device) -> Network:
        if (group := self._group()) is None:
            raise ExchangeError(DESTROYED)
        network = self[device] = self._made(group, device)
        return network

    def _made(self, group: dist.ProcessGroup, device: torch.device) -> Network:
        is_alone = group.size() == 1
        by_messages = self.sends_messages(device)
        place = Place()
        if device.type == "cuda":
            place = Device(device, by_host=by_messages and not is_alone)
        if is_alone:
            return Alone(place)
        levels = self._levels  # before the network, since this may raise
        network: Native | Gloo
        if not by_messages:
            network = Native(group, place)
        elif isinstance(place, Device):
            network = Staged(group, place)
        else:
            network = Gloo(group, place)
        # NCCL may split a new group from the default one, in which all of its ranks take part.
        if levels is None or not (by_messages or group.size() == dist.get_world_size()):
            return network
        return TwoLevels(network, levels)

    @functools.cached_property
    def _levels(self) -> Levels | None:
        """The levels of the group. **Collective** when first read."""
        return levels_of(living(self._group))

    def sends_messages(self, device: torch.device) -> bool:
        """Return whether tensors on ``device`` travel as gloo messages.

        Otherwise they travel by a backend's own collectives.
        """
        return self._backends.get(device.type) == "gloo"

    @property
    def ranks_inside(self) -> int:
        """The number of ranks on this node if exchanges have two levels, otherwise 1."""
        networks = [each for each in self.values() if isinstance(each, TwoLevels)]
        return len(networks[0].levels.inside) if networks else 1

    def interrupt(self) -> None:
        """Close all connections, so that peers fail as well."""
        for network in list(self.values()):
            network.interrupt()

    def close(self, timeout_s: float) -> bool:
        """Stop all threads after their queued work, and return whether they ended in time.

        It is safe to call it more than once. ``timeout_s`` holds for each thread.
        """
        return all([network.close(timeout_s) for network in list(self.values())])
