"""``muon.step()`` and its relatives: torch's own, with the directions that came from the owners.

[Note: torch's step goes on] The step's hooks are torch's public ones. Before the step the matrices that have a
direction lose their gradient, so that torch's own step leaves them alone; after it they are updated by the direction
and get their gradient of zeros back. Schedulers, closures, a GradScaler and further hooks work as ever.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from crossover_ddp._exchange.muon_direction import DirectionSettings, take_step
from crossover_ddp.errors import UnsupportedConfigurationError

from .momentum import OwnedMomentum
from .payload import MuonRound

_MARK: Final = "_crossover_ddp_muon"


def check_optimizer(muon: object) -> None:
    """Refuse what is not torch's Muon, whose step is known, or has a state already."""
    if not isinstance(muon, Muon):
        raise TypeError(
            f"expected a torch.optim.Muon, got muon={type(muon).__name__}; give the matrices to torch.optim.Muon and "
            "the other parameters to another optimizer, which needs no state"
        )
    own = [
        cls.__name__ for cls in type(muon).__mro__[: type(muon).__mro__.index(Muon)] if "step" in vars(cls)
    ]
    if own:
        raise TypeError(
            f"expected torch.optim.Muon's own step, got muon={type(muon).__name__}, of which {own[0]} has another; "
            "pass a torch.optim.Muon"
        )
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    if any(parameter.is_complex() for parameter in parameters):
        raise UnsupportedConfigurationError(
            "expected real matrices, got complex ones, which torch.optim.Muon does not support; give them to another "
            "optimizer"
        )
    if getattr(muon, _MARK, False):
        raise UnsupportedConfigurationError(
            "expected a Muon without a MuonState, got one that has another already; make a Muon for each model, or "
            "close() the other state"
        )


class Stepping:
    """Lets the step of a Muon use directions.

    Args:
        muon: the optimizer.
        matrices: the parameters with an owner.
        momentum: of those that this rank owns.
        take: returns the backward pass whose directions wait for a step, once.
    """

    def __init__(
        self,
        muon: Muon,
        matrices: Sequence[Tensor],
        momentum: OwnedMomentum,
        take: Callable[[], MuonRound | None],
    ) -> None:
        self._muon = muon
        self._matrices = matrices
        self._index_of = {id(matrix): index for index, matrix in enumerate(matrices)}
        self._momentum = momentum
        self._take = take
        self._round: MuonRound | None = None
        self._gradients: dict[int, Tensor] = {}
        self._stack = contextlib.ExitStack()
        self._attach()

    def settings(self) -> list[DirectionSettings]:
        """Return those of each matrix at this moment."""
        by_group = [(DirectionSettings.of(group), group["params"]) for group in self._muon.param_groups]
        found = {id(matrix): settings for settings, matrices in by_group for matrix in matrices}
        return [found[id(matrix)] for matrix in self._matrices]

    def close(self) -> None:
        """Give the optimizer back as it was."""
        self._stack.close()

    def _attach(self) -> None:
        muon = self._muon
        setattr(muon, _MARK, True)
        self._stack.callback(vars(muon).pop, _MARK, None)
        hooks = (
            muon.register_step_pre_hook(self._before_step),
            muon.register_step_post_hook(self._after_step),
            muon.register_state_dict_pre_hook(self._before_state_dict),
            muon.register_load_state_dict_post_hook(self._after_load),
        )
        for hook in hooks:
            self._stack.callback(hook.remove)
        original = muon.zero_grad

        @functools.wraps(original)
        def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
            self._take()
            original(set_to_none)

        ours = vars(muon)["zero_grad"] = types.MethodType(zero_grad, muon)
        self._stack.callback(self._restore_zero_grad, ours)

    def _restore_zero_grad(self, ours: object) -> None:
        if vars(self._muon).get("zero_grad") is ours:
            del vars(self._muon)["zero_grad"]

    # --- torch's hooks ---------------------------------------------------------------------------------------

    def _before_step(
        self, muon: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._hide_gradients()
            return None

        def closure_and_hide() -> Any:
            loss = closure()
            self._hide_gradients()
            return loss

        return (args[0], closure_and_hide), {}

    def _hide_gradients(self) -> None:
        for index, gradient in self._gradients.items():  # a step of torch's has failed half-way
            self._matrices[index].grad = gradient
        self._gradients.clear()
        present = [index for index, matrix in enumerate(self._matrices) if matrix.grad is not None]
        self._round = self._take()
        if present:
            self._check(present)
        for index in present:
            matrix = self._matrices[index]
            if matrix.grad is not None:
                self._gradients[index] = matrix.grad
            matrix.grad = None

    def _check(self, present: Sequence[int]) -> None:
        directions = {} if self._round is None else self._round.directions
        missing = [index for index in present if index not in directions]
        if missing:
            raise UnsupportedConfigurationError(
                f"expected a backward() with muon_hook between two steps, got {len(missing)} matrices with a gradient "
                f"of which no direction has come, the first of shape {tuple(self._matrices[missing[0]].shape)}; call "
                "muon.step() once after each exchange, outside of no_sync(), with all of Muon's matrices in the model"
            )
        assert self._round is not None
        if list(self._round.plan.settings) != self.settings():
            raise UnsupportedConfigurationError(
                "expected momentum, nesterov and the settings of Newton-Schulz as they were in backward(), where the "
                "owners computed with them, got others in muon.step(); change them before backward()"
            )

    @torch.no_grad()
    def _after_step(self, muon: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ended, self._round = self._round, None
        hidden, self._gradients = self._gradients, {}
        if ended is None:
            return
        for group in muon.param_groups:
            for matrix in group["params"]:
                index = self._index_of.get(id(matrix))
                if index in hidden:
                    take_step(matrix, ended.directions[index], group)
        for index, gradient in hidden.items():
            self._matrices[index].grad = gradient
        self._momentum.commit(hidden)

    def _before_state_dict(self, muon: Optimizer) -> None:
        if not self._momentum.is_whole:
            raise UnsupportedConfigurationError(
                "expected state.consolidate() on all ranks before muon.state_dict(), got the momentum of this rank's "
                "own matrices only; call it after the last step, and state_dict() where it was consolidated to"
            )

    def _after_load(self, muon: Optimizer) -> None:
        self._take()
        self._momentum.adopt()
