"""State of optimizers that only owners keep: taken out elsewhere, never saved in part, brought together to be saved."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.serialization import default_restore_location

from crossover_ddp._ddp.checks import check_rank, resolve_group
from crossover_ddp._ddp.groups import let_collectives_go
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.states import HookState
from crossover_ddp.errors import UnsupportedConfigurationError


class Kept:
    """What some optimizers keep of parameters that have owners: each rank has that of its own ones.

    ``owner_of``: rank by the id of each parameter that has an owner. ``loaded``: called when a state was loaded into
    one of the optimizers. ``hooks``: on the optimizers' state dicts; close it to end them.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        owner_of: Mapping[int, int],
        rank: int,
        loaded: Callable[[], None] = nothing,
    ) -> None:
        self._places = [
            (optimizer, parameter, owner_of[id(parameter)])
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in owner_of
        ]
        self._rank = rank
        self._loaded = loaded
        self.is_whole = True
        """Whether this rank has the state of all parameters that have one."""
        self._take_out()
        self.hooks = ExitStack()
        for each in optimizers:
            self.hooks.callback(
                each.register_state_dict_pre_hook(lambda _: self.check_whole()).remove
            )
            self.hooks.callback(
                each.register_load_state_dict_post_hook(lambda _: self._adopt()).remove
            )

    def stepped(self) -> None:
        """Note that owners have updated their state, if it was whole; what was consolidated before is old."""
        self.is_whole = all(owner == self._rank for _, _, owner in self._places)
        self._take_out()

    def _adopt(self) -> None:
        self.is_whole = True
        self._take_out()
        self._loaded()

    def _take_out(self) -> None:
        for optimizer, parameter, owner in self._places:
            if owner != self._rank and optimizer.state.pop(parameter, None):
                self.is_whole = False

    def only_makes_state(self, optimizer: Optimizer) -> bool:
        """Tell whether a step is the first one and changes nothing, as torch's distributed checkpoints take it."""
        gradients = [parameter.grad for each, parameter, _ in self._places if each is optimizer]
        zeros = [not gradient.any() for gradient in gradients if gradient is not None]
        return not optimizer.state and bool(zeros) and all(zeros)

    def check_whole(self) -> None:
        """Refuse to hand out a part of the state."""
        if not self.is_whole:
            raise UnsupportedConfigurationError(
                "expected state.consolidate() or checkpoint() on all ranks before the optimizer's state_dict() "
                "and state.close(), got the state of this rank's own parameters only; call it after the last step, and "
                "state_dict() on the ranks that have it then"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that the optimizers keep on this rank."""
        kept = [optimizer.state.get(parameter, {}) for optimizer, parameter, _ in self._places]
        return sum(tensor.nbytes for tensor in tensors_in(kept))

    @torch.no_grad()
    def consolidate(self, group: dist.ProcessGroup, to: int | None) -> None:
        """Send each parameter's state from its owner to all; rank ``to`` keeps it, or all for None.

        **Collective**: all ranks, between two steps.
        """
        check_rank(to, group)
        if group.size() == 1 or not self._places:
            return
        keeps = to in (None, self._rank)
        for optimizer, parameter, owner in self._places:
            travelling: list[bytes | None] = [None]
            if owner == self._rank and (state := optimizer.state.get(parameter)):
                file = io.BytesIO()
                torch.save(state, file)
                travelling = [file.getvalue()]
            dist.broadcast_object_list(travelling, group=group, group_src=owner)
            if owner != self._rank and keeps and travelling[0] is not None:
                optimizer.state[parameter] = _loaded(travelling[0], parameter.device)
        self.is_whole = self.is_whole or keeps
        let_collectives_go(group)  # these may be a job's last


class Owning(HookState):
    """A state with an ``optimizer``, or several, of which owners may keep what belongs to their parameters."""

    _kept: Kept | None = None

    def consolidate(self, to: int | None = None) -> None:
        """Bring what owners keep into the optimizers' state, where it stays until the next step.

        Where each rank keeps all of it, nothing is to be done.

        Args:
            to: the rank of the group that keeps all of it; None: all ranks do.

        On failure: ``ValueError`` if there is no such rank; what torch's collectives raise when a peer has died.

        **Collective**: all ranks, between two steps.
        """
        self._finish()
        if self._kept is not None:
            self._kept.consolidate(resolve_group(self.process_group), to)

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        self.consolidate(to)

    def _finish(self) -> None:
        """Finish what is under way."""


def _loaded(saved: bytes, device: torch.device) -> Any:
    """Return what was saved; what was on another rank's device comes to ``device``."""
    return torch.load(
        io.BytesIO(saved),
        lambda storage, place: default_restore_location(
            storage, place if place == "cpu" else str(device)
        ),
        weights_only=False,  # an optimizer may keep anything; it comes from a rank of this job
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in mappings, lists, tuples and dataclasses of whatever somebody likes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)])
