"""What the states of all hooks have in common: ranks agree on arguments, steps are counted, jobs are saved. Our design.

[Note: checkpoints] A checkpoint first brings together, in place, what ranks keep apart: replicas are averaged, owners'
parts of an optimizer's state come to all, residuals become the same on all ranks. Then one rank's dictionary is the
job's, for any number of ranks, and so are the files of a loop that saves in its own way (``model.state_dict()``, on
rank 0 alone), if it calls ``checkpoint()`` on all ranks before. The job itself goes on from what was brought together:
so a resumed one walks with it, to the last bit.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import (
    check_keys,
    check_optimized,
    check_rank,
    registered_model,
    resolve_group,
)
from crossover_ddp._ddp.groups import compare, let_collectives_go
from crossover_ddp._system import environment
from crossover_ddp.errors import UnsupportedConfigurationError

from .observe import Meter

logger = logging.getLogger(__name__)

Optimizers = Optimizer | Sequence[Optimizer] | None

_PATIENCE_S: Final = 10.0


class Agreement:
    """A comparison of what the ranks of a process group say, at the first bucket and after each load or drain.

    torch's own collective carries it, so that a rank with ``CROSSOVER_DISABLE=1`` takes part, too.
    """

    made = False

    def __init__(self) -> None:
        self.disabled = environment.is_set(environment.DISABLE)

    def forget(self) -> None:
        """Compare again at the next bucket."""
        self.made = False

    def make(self, group: dist.ProcessGroup, said: Callable[[], Mapping[str, object]]) -> None:
        """`compare` what ``said`` returns, which is not called with ``CROSSOVER_DISABLE=1``. **Collective**."""
        if group.size() > 1:
            compare(
                group,
                {environment.DISABLE: int(self.disabled), **({} if self.disabled else said())},
            )
        self.made = True


class HookState:
    """A state of one of our hooks, whose job can be saved and resumed; with ``mutex``, which may be None.

    ``optimizer``: what the state was made with; None if it knows none. ``_block``: at whose end ranks differ again.
    """

    process_group: dist.ProcessGroup | None
    agreement: Agreement
    optimizer: Optimizers = None
    _block: str | None = None

    @functools.cached_property
    def meter(self) -> Meter:
        """What the engine has counted."""
        return Meter()

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, see docs/troubleshooting.md. Not collective."""
        return self._told()

    def _told(self, **said: Any) -> dict[str, Any]:
        return told(self.meter, mutex=self.mutex, **said)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def paused(self: Any) -> Iterator[None]:
        """Give the turn away during the block: evaluation, a checkpoint; see `GPUMutex.paused`."""
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield

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
        optimizer the state does not know, inside of ``averaged()``, or on all ranks if they call with other arguments
        or what is averaged is not finite. ``ValueError`` if there is no rank ``to``. Some ranks alone are warned after
        ten seconds, and refused by ``ExchangeError`` after the group's timeout; on NCCL torch's watchdog ends the
        process then.

        **Collective**: all ranks, between two steps.

        Example::

            saved = state.checkpoint(optimizer, to=0)  # on all ranks
            if rank == 0:
                torch.save(saved, path)
        """
        self._check_outside("checkpoint()")
        group, given = (
            resolve_group(self.process_group),
            self.optimizer if optimizer is None else optimizer,
        )
        model, optimizers = registered_model(self), _sequence(given)
        if optimizer is None:
            check_optimized(model, optimizers)
        check_rank(to, group)
        if group.size() > 1:
            with _telling_who_waits():
                compare(
                    group,
                    {"call": "checkpoint()", "to": to, "number of optimizers": len(optimizers)},
                )
        self._bring_together(optimizers, to)
        kept = self._kept_by_hook()
        if group.size() > 1:
            let_collectives_go(group)  # these may be a job's last
        if to not in (None, group.rank()):
            return {}
        states = [each.state_dict() for each in optimizers]
        saved = states if given is optimizers or given is None else states[0]
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
        given = self.optimizer if optimizer is None else optimizer
        model, optimizers = registered_model(self), _sequence(given)
        check_keys(
            checkpoint,
            {"model", "optimizer"},
            "a dictionary with the keys 'model', 'optimizer' and 'hook'",
            "pass what checkpoint() returned, on rank to= if it was called with that",
            has_more=True,
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

    def close(self) -> None:
        """End what the state holds outside of the model's memory: nothing; later steps go on as before.

        Not collective; may be called twice, as that of every state.
        """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Stay behind when a model is copied or pickled, as its hook does: it acts for one model, in one process."""
        logger.warning(
            "a copied or pickled model has no hook, and None in the place of its %s: make a new state for it; to go on "
            "where this one is, use checkpoint() and restore()",
            type(self).__name__,
        )
        return type(None), ()

    def _check_outside(self, call: str) -> None:
        """Refuse ``call`` inside of ``_block``: the job would not go on from the values that it brings together."""
        if self._block is not None:
            text = "where the model holds a mean that the block's end takes away; call it before or after, on all ranks"
            raise UnsupportedConfigurationError(
                f"expected {call} outside of {self._block}, got it inside, {text}"
            )

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        """Make whole what ranks keep apart, for rank ``to`` or for all, see [Note: checkpoints]. **Collective**.

        ``optimizers``: that are saved with the model.
        """

    def _kept_by_hook(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the state itself. **Collective**."""
        return self.state_dict()


# --- what is told ---


def told(
    meter: Meter,
    *,
    mutex: Any = None,
    codec: object = None,
    coded: Mapping[str, Any] | None = None,
    not_deferred: str | None = "gradients are whole when backward() ends",
) -> dict[str, Any]:
    """Return what all states tell, by the keys of docs/troubleshooting.md.

    ``coded``: with a codec, what `Compression.stats` returns. ``not_deferred``: why steps are not; None: they are.
    """
    turns = {} if mutex is None else mutex.stats()
    hidden_s = max(0.0, meter.under_way_s - meter.exposed_s)
    return {
        "steps": meter.steps,
        "steps_deferred": 0,
        "not_deferred_because": not_deferred,
        "bytes_sent": meter.bytes_sent,
        "exposed_s": meter.exposed_s if meter.is_timed else None,
        "hidden_s": hidden_s if meter.is_timed else None,
        "codec": None if coded is None else {**coded, "name": repr(codec)},
        "rate": 1.0 if coded is None else coded["rate"],
        "turns": turns.get("turns", 0),
        "no_turns_because": _without_turns(turns),
    }


def _without_turns(turns: Mapping[str, Any]) -> str | None:
    if not turns:
        return "no mutex: none was given, or the job has not joined yet"
    if turns["disabled_because"]:
        return str(turns["disabled_because"])
    if turns["turns_pay"] is False:
        return "the trial has found that siblings are faster side by side"
    return None if turns["siblings"] else "no sibling is on the device"


def counted(state: HookState) -> dict[str, Any]:
    """Return what a state tells of this process: of a resumed job some states count earlier steps, but no bytes."""
    return {**state.stats(), "steps": state.meter.steps}


def line(stats: Mapping[str, Any]) -> str:
    """Return what a hook did in a line, such as "deferred 98 of 100 steps; waited 3.0 ms a step; 12.4 MB a step"."""
    steps, said = stats["steps"] or 1, []

    def why(key: str) -> str:
        return f" ({stats[key]})" if stats[key] else ""

    if "deferred" in stats:
        said.append(
            f"deferred {stats['steps_deferred']} of {steps} steps{why('not_deferred_because')}"
        )
    if (exchanges := stats.get("exchanges", stats.get("pulls"))) is not None:
        said.append(f"{exchanges} exchanges of parameters")
    if stats["codec"] is not None:
        said.append(f"{stats['codec']['name']} sent {stats['rate']:.3g} of the exact bytes")
    if "siblings" in stats or stats["turns"]:
        said.append(f"took {stats['turns']} turns{why('no_turns_because')}")
    if stats["exposed_s"] is not None:
        said.append(f"waited {1e3 * stats['exposed_s'] / steps:.1f} ms a step")
    return "; ".join([*said, f"{stats['bytes_sent'] / steps / 1e6:.3g} MB a step"])


# --- checkpoints ---


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else () if value is None else (value,)


@contextlib.contextmanager
def _telling_who_waits() -> Iterator[None]:
    """Warn a rank that waits for the others for long."""
    text = (
        "checkpoint() has waited for other ranks for %g seconds, and needs them: call it on all ranks, not inside of "
        "`if rank == 0:`; to=0 gives it to one"
    )
    told = threading.Timer(_PATIENCE_S, logger.warning, [text, _PATIENCE_S])
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()
        told.join()
