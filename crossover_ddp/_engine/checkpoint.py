"""Checkpoints of any hook's job, which plain DDP can load. Our design.

[Note: checkpoints] A checkpoint first brings together, in place, what ranks keep apart: replicas are averaged, owners'
parts of an optimizer's state come to all, residuals become the same on all ranks. Then one rank's dictionary is the
job's, for any number of ranks, and so are the files of a loop that saves in its own way (``model.state_dict()``, on
rank 0 alone), if it calls ``checkpoint()`` on all ranks before. The job itself goes on from what was brought together:
so a resumed one walks with it, to the last bit.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import (
    check_forward,
    named_parameters_of,
    names_of,
    registered_model,
    resolve_group,
)
from crossover_ddp.errors import UnsupportedConfigurationError

from .buckets import Agreement, Pausable, compare
from .exchange import let_collectives_go

logger = logging.getLogger(__name__)

Optimizers = Optimizer | Sequence[Optimizer] | None

_PATIENCE_S: Final = 10.0


class Checkpointed(Pausable):
    """A state whose job can be saved and resumed.

    ``optimizer``: what the state was made with; None if it knows none.
    """

    process_group: dist.ProcessGroup | None
    agreement: Agreement
    optimizer: Optimizers = None

    def checkpoint(self, optimizer: Optimizers = None, *, to: int | None = None) -> dict[str, Any]:
        """Bring together what ranks keep apart, and return what the job needs to go on; see `restore`.

        Until the next step model and optimizers are whole on all ranks (the optimizers on rank ``to`` only), whoever
        saves them. What it changes: replicas are averaged, with the optimizers' state of as many numbers as a
        parameter has; the step after it travels without a codec. A resumed job walks with this one from here on, to the
        last bit. (K-FAC with a codec: only after ``drain()`` and a step; else its residuals are lost, with a warning.)

        Args:
            optimizer: those of the model, one or a sequence. Default: what the state was made with; ``()``: none.
            to: the rank of the group that is given the checkpoint, the others an empty dictionary. Default: all ranks
                are, so that any can save it, and each has memory for all of the optimizers' state.

        Returns:
            "model": ``ddp.module.state_dict()``; "optimizer": the optimizer's state dict, or a list of them for a
            sequence, as plain DDP loads them; "hook": what `state_dict` returns. Tensors are those that are trained:
            save or copy them before the next step.

        On failure: ``UnsupportedConfigurationError`` if the hook is not registered, if parameters are trained whose
        optimizer the state does not know, or on all ranks if they call with other arguments. ``ValueError`` if there is
        no rank ``to``. Some ranks alone are warned after ten seconds, and refused by ``ExchangeError`` after the
        group's timeout; on NCCL torch's watchdog ends the process then.

        **Collective**: all ranks, between two steps.

        Example::

            saved = state.checkpoint(optimizer, to=0)  # on all ranks
            if rank == 0:
                torch.save(saved, path)
        """
        group = resolve_group(self.process_group)
        model, optimizers = _model_of(self), _sequence(self.optimizer if optimizer is None else optimizer)
        if optimizer is None:
            _check_known(model, optimizers)
        check_rank(to, group)
        if group.size() > 1:
            with _telling_who_waits():
                compare(group, {"call": "checkpoint()", "to": to, "number of optimizers": len(optimizers)})
        self._bring_together(optimizers, to)
        kept = self._kept_by_hook()
        if group.size() > 1:
            let_collectives_go(group)  # these may be a job's last
        if to not in (None, group.rank()):
            return {}
        states = [each.state_dict() for each in optimizers]
        is_one = not _is_sequence(self.optimizer if optimizer is None else optimizer)
        saved = states[0] if is_one and states else states
        return {"model": model.module.state_dict(), "optimizer": saved, "hook": kept}

    def restore(self, checkpoint: Mapping[str, Any], optimizer: Optimizers = None) -> None:
        """Load model, optimizers and state from what `checkpoint` returned, before the first ``backward()``.

        Also from a checkpoint of plain DDP or of another number of ranks.

        Args:
            checkpoint: "hook" may be missing, or None: then the state begins anew.
            optimizer: as for `checkpoint`.

        On failure: ``ValueError`` for another dictionary, or another number of optimizers;
        ``UnsupportedConfigurationError`` if the hook is not registered.

        Not collective, but all ranks must.

        Example::

            model.register_comm_hook(state, hook)
            state.restore(torch.load(path), optimizer)
        """
        model, optimizers = _model_of(self), _sequence(self.optimizer if optimizer is None else optimizer)
        if not {"model", "optimizer"} <= {*checkpoint}:
            raise ValueError(
                f"expected a dictionary with the keys 'model', 'optimizer' and 'hook', got keys {sorted(checkpoint)}; "
                "pass what checkpoint() returned, on rank to= if it was called with that"
            )
        states = _sequence(checkpoint["optimizer"])
        if len(states) != len(optimizers):
            raise ValueError(
                f"expected as many optimizers as checkpoint() was called with, {len(states)}, got {len(optimizers)}; "
                "pass optimizer= as there"
            )
        model.module.load_state_dict(checkpoint["model"])
        for each, state in zip(optimizers, states, strict=True):
            each.load_state_dict(state)
        if checkpoint.get("hook") is not None:
            self.load_state_dict(checkpoint["hook"])
        self.agreement.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what the state keeps beside model and optimizers: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        if state:
            raise ValueError(
                f"expected an empty state dict, got keys {sorted(state)}; pass what state_dict() of a "
                f"{type(self).__name__} returned"
            )

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        """Make whole what ranks keep apart, see [Note: checkpoints]. **Collective**.

        Args:
            optimizers: that are saved with the model.
            to: the rank that needs it; None: all.
        """

    def _kept_by_hook(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the state itself. **Collective**."""
        return self.state_dict()


def check_rank(to: int | None, group: dist.ProcessGroup) -> None:
    """Refuse a rank that ``group`` does not have."""
    if to is not None and not 0 <= to < group.size():
        raise ValueError(f"expected 0 <= to < {group.size()}, got to={to}; pass a rank of the group, or None")


def _is_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _sequence(value: Any) -> Sequence[Any]:
    """Return one or several, or None, as a sequence."""
    return value if _is_sequence(value) else () if value is None else (value,)


def _model_of(state: Checkpointed) -> DistributedDataParallel:
    model = registered_model(state)
    check_forward(model, "its parameters have no names")
    return model


def _check_known(model: DistributedDataParallel, optimizers: Sequence[Any]) -> None:
    """Refuse to leave out optimizers of which the state knows nothing."""
    groups = [group for each in optimizers for group in each.param_groups]
    known = {id(p) for group in groups for p in list.__iter__(group["params"])}  # past the guards of groups
    trained = [p for _, p in named_parameters_of(model.module) if p is not None and p.requires_grad]
    unknown = [p for p in trained if id(p) not in known]
    if unknown:
        names = names_of(unknown, model)
        raise UnsupportedConfigurationError(
            f"expected the optimizers of all trained parameters, got none of {len(unknown)} of them ({names}); pass "
            "optimizer=, all of the model's, or optimizer=() to leave them out"
        )


@contextlib.contextmanager
def _telling_who_waits() -> Iterator[None]:
    """Warn a rank that waits for the others for long."""
    told = threading.Timer(
        _PATIENCE_S,
        logger.warning,
        [
            "checkpoint() has waited for other ranks for %g seconds, and needs them: call it on all ranks, not inside "
            "of `if rank == 0:`; to=0 gives it to one",
            _PATIENCE_S,
        ],
    )
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()
        told.join()
