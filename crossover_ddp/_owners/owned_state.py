"""Keep optimizer state on the owners only: drop it elsewhere, and gather it before it is saved."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.serialization import default_restore_location

from crossover_ddp._ddp.checks import check_rank, resolve_group
from crossover_ddp._ddp.groups import gather_objects, let_collectives_go
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.states import HookState
from crossover_ddp.errors import UnsupportedConfigurationError

_EXCHANGED_BYTES: Final = 64 * 2**20
"""The number of bytes that a rank packs for one exchange.

A rank needs memory for this many bytes from every rank.
"""


class OwnedState:
    """The optimizer state of parameters that have owners. Each rank keeps only its own part.

    Args:
        optimizers: the optimizers that update the parameters.
        owner_of: maps the id of each parameter that has an owner to the owner's rank.
        rank: this rank.
        loaded: called after a state dict has been loaded into one of the optimizers.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        owner_of: Mapping[int, int],
        rank: int,
        loaded: Callable[[], None] = nothing,
    ) -> None:
        # Parameters that have owners, in the same order on all ranks.
        self._parameters = [
            (optimizer, parameter, owner_of[id(parameter)])
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in owner_of
        ]
        self._rank = rank
        self._on_load = loaded
        # Whether this rank has the state of all parameters, other ranks' parameters included.
        self.is_whole = True
        self._remove_foreign()
        # Hooks on the optimizers' state dicts. Closing the stack removes them.
        self.hooks = ExitStack()
        for each in optimizers:
            before_save = each.register_state_dict_pre_hook(lambda _: self.check_whole())
            after_load = each.register_load_state_dict_post_hook(lambda _: self._adopt())
            self.hooks.callback(before_save.remove)
            self.hooks.callback(after_load.remove)

    def stepped(self) -> None:
        """Drop the state that `consolidate` gathered. Call this after a step if `is_whole`."""
        self.is_whole = all(owner == self._rank for _, _, owner in self._parameters)
        self._remove_foreign()

    def _adopt(self) -> None:
        """Take over the state that was loaded into an optimizer."""
        self.is_whole = True
        self._remove_foreign()
        self._on_load()

    def _remove_foreign(self) -> None:
        """Remove the state of other ranks' parameters."""
        for optimizer, parameter, owner in self._parameters:
            if owner != self._rank and optimizer.state.pop(parameter, None):
                self.is_whole = False

    def only_makes_state(self, optimizer: Optimizer) -> bool:
        """Return whether the next step only creates the optimizer's state.

        That is a step of an optimizer without state, in which all gradients are zero. Torch's
        distributed checkpoints take such a step to create the state.
        """
        gradients = [each.grad for owning, each, _ in self._parameters if owning is optimizer]
        zeros = [not gradient.any() for gradient in gradients if gradient is not None]
        return not optimizer.state and bool(zeros) and all(zeros)

    def check_whole(self) -> None:
        """Refuse to save the state if this rank has only a part of it."""
        if not self.is_whole:
            raise UnsupportedConfigurationError(
                "this rank has the optimizer's state of its own parameters only, and state_dict() "
                "or state.close() needs all of it; call state.checkpoint() on all ranks after the "
                "last step, and then state_dict() on the ranks that have the state"
            )

    @property
    def nbytes(self) -> int:
        """The number of bytes that the optimizers keep on this rank for parameters with owners."""
        states = [optimizer.state.get(each, {}) for optimizer, each, _ in self._parameters]
        return sum(tensor.nbytes for tensor in tensors_in(states))

    @torch.no_grad()
    def consolidate(self, group: dist.ProcessGroup, to: int | None) -> None:
        """Gather the state of all parameters on rank ``to``, or on all ranks if it is None.

        The number of exchanges depends on how many bytes an owner has, not on the number of
        parameters: in each exchange, a rank packs states until they exceed `_EXCHANGED_BYTES`.

        **Collective**: all ranks, between two steps.
        """
        check_rank(to, group)
        if group.size() == 1 or not self._parameters:
            return
        keeps = to in (None, self._rank)
        unsent = [
            place for place, (*_, owner) in enumerate(self._parameters) if owner == self._rank
        ]
        is_complete = False
        while not is_complete:
            packed, unsent = self._pack(unsent)
            received = gather_objects(group, (packed, bool(unsent)))
            is_complete = not any(has_more for _, has_more in received)
            for rank, (states, _) in enumerate(received):
                if keeps and rank != self._rank:
                    self._unpack(states)
        self.is_whole = self.is_whole or keeps
        let_collectives_go(group)  # these may be a job's last

    def _pack(self, places: Sequence[int]) -> tuple[dict[int, bytes], list[int]]:
        """Serialize the states of these parameters, in order, until they fill one exchange.

        The last state may exceed `_EXCHANGED_BYTES`. Parameters without state are skipped.

        Returns:
            The serialized states by place, and the places that are left for the next exchange.
        """
        packed: dict[int, bytes] = {}
        nbytes = 0
        for count, place in enumerate(places):
            if nbytes >= _EXCHANGED_BYTES:
                return packed, [*places[count:]]
            optimizer, parameter, _ = self._parameters[place]
            state = optimizer.state.get(parameter)
            if state:
                packed[place] = _saved(state)
                nbytes += len(packed[place])
        return packed, []

    def _unpack(self, packed: Mapping[int, bytes]) -> None:
        for place, saved in packed.items():
            optimizer, parameter, _ = self._parameters[place]
            optimizer.state[parameter] = _loaded(saved, parameter.device)


class Owning(HookState):
    """A hook state that may leave each parameter's optimizer state to its owner alone."""

    packs_by_owner = True
    # None if every rank keeps all of the optimizer state.
    _owned_state: OwnedState | None = None

    def consolidate(self, to: int | None = None) -> None:
        """Gather the owners' optimizer state, which then stays complete until the next step.

        This does nothing if every rank keeps all of the state anyway.

        Args:
            to: the rank in the group that keeps the complete state. Default: all ranks keep it.

        On failure: ``ValueError`` if there is no such rank; ``ExchangeError`` if a peer has died.

        **Collective**: all ranks, between two steps.
        """
        self._finish()
        if self._owned_state is not None:
            self._owned_state.consolidate(resolve_group(self.process_group), to)

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        self.consolidate(to)

    def _finish(self) -> None:
        """Complete pending updates. Subclasses that defer updates override this."""


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _loaded(saved: bytes, device: torch.device) -> Any:
    """Return the state that was saved. Tensors that were on a device are put on ``device``."""

    def restored(storage: Any, location: str) -> Any:
        return default_restore_location(storage, location if location == "cpu" else str(device))

    # An optimizer may keep objects of any kind. The bytes come from a rank of this job.
    return torch.load(io.BytesIO(saved), restored, weights_only=False)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested mappings, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name, None) for field in fields(value)])
