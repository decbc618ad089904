"""The base of all hook states: compared settings, statistics, checkpoints. Our design.

[Note: checkpoints] A checkpoint first gathers sharded state, in place: replicas are averaged, owners' parts of the
optimizer state are copied to all ranks, residuals are made equal on all ranks. Then one rank's dictionary holds the
whole job, for any number of ranks. So do the files of a loop that saves in its own way (``model.state_dict()`` on
rank 0 alone), if it calls ``checkpoint()`` on all ranks before. The running job continues from the gathered state as
well, so that a resumed job produces bitwise identical results.
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
    """Compares the settings of all ranks, at the first bucket and after each load or drain.

    It uses torch's own collectives, so that a rank with ``CROSSOVER_DISABLE=1`` takes part as well.
    """

    made = False  # whether the settings have been compared

    def __init__(self) -> None:
        self.disabled = environment.is_set(environment.DISABLE)

    def forget(self) -> None:
        """Compare again at the next bucket."""
        self.made = False

    def make(
        self, group: dist.ProcessGroup, fingerprint: Callable[[], Mapping[str, object]]
    ) -> None:
        """Compare what ``fingerprint()`` returns; it is not called with ``CROSSOVER_DISABLE=1``. **Collective**."""
        if group.size() > 1:
            compare(
                group,
                {
                    environment.DISABLE: int(self.disabled),
                    **({} if self.disabled else fingerprint()),
                },
            )
        self.made = True


class HookState:
    """The state of one of our hooks, whose job can be saved and resumed. It has a ``mutex``, which may be None."""

    process_group: dist.ProcessGroup | None
    agreement: Agreement
    # The optimizers that the state was made with; None: it knows none.
    optimizer: Optimizers = None
    # The call, such as "averaged()", whose block is entered. At its end ranks differ again.
    _block: str | None = None

    @functools.cached_property
    def meter(self) -> Meter:
        """Traffic counters."""
        return Meter()

    def stats(self) -> dict[str, Any]:
        """Return statistics, by the keys of docs/troubleshooting.md. Not collective."""
        return self._common_stats()

    def _common_stats(self, **more: Any) -> dict[str, Any]:
        return common_stats(self.meter, mutex=self.mutex, **more)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def paused(self: Any) -> Iterator[None]:
        """Give the turn away during the block: evaluation, a checkpoint; see `GPUMutex.paused`."""
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield

    def checkpoint(self, optimizer: Optimizers = None, *, to: int | None = None) -> dict[str, Any]:
        """Gather sharded state, and return all that the job needs to resume; see `restore`.

        Until the next step model and optimizers are whole on all ranks (the optimizers on rank ``to``
        only), so that any code can save them. Side effects: replicas are averaged, and so is optimizer
        state that has as many numbers as its parameter; the step after the checkpoint travels without a
        codec. From here on a resumed job produces bitwise identical results. (K-FAC with a codec: only
        after ``drain()`` and a step; else its residuals are lost, with a warning.)

        Args:
            optimizer: the optimizers of the model, one or a sequence. Default: those that the state was made with;
                ``()``: none.
            to: the rank of the group that receives the checkpoint; the others receive an empty dictionary. Default:
                all ranks receive it, so that any can save it, and each needs memory for the whole optimizer state.

        Returns:
            "model": ``ddp.module.state_dict()``; "optimizer": the optimizer's state dict, or a list of them for a
            sequence, as plain DDP loads them; "hook": the state's `state_dict`. The tensors are those of the training:
            save or copy them before the next step.

        On failure: ``UnsupportedConfigurationError`` if the hook is not registered, if the state does not know the
        optimizer of a trained parameter, inside of ``averaged()``, and on all ranks if their arguments differ or an
        average is not finite. ``ValueError`` if there is no rank ``to``. If only some ranks call it, they log a warning
        after ten seconds and raise ``ExchangeError`` after the group's timeout; on NCCL torch's watchdog ends the
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
            with _warning_of_missing_ranks():
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
        """Load model, optimizers and state from a `checkpoint`, before the first ``backward()``.

        The checkpoint may be of another number of ranks, or of plain DDP.

        Args:
            checkpoint: its "hook" may be missing or None. Then the state starts afresh.
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
        """Return the state's own data, beside model and optimizers. This one has none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        if state:
            raise ValueError(
                f"expected an empty state dict, got keys {sorted(state)}; pass the result of "
                f"state_dict() of a {type(self).__name__}"
            )

    def close(self) -> None:
        """Release resources outside of the model's memory. This state has none, and later steps are as before.

        Not collective. May be called twice, as ``close()`` of every state.
        """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as None: a state belongs to one model in one process, and DDP drops the hook as well."""
        logger.warning(
            "a copied or pickled model has no hook, and its %s was replaced by None; make a new state for the "
            "copy, and use checkpoint() and restore() to continue from this one",
            type(self).__name__,
        )
        return type(None), ()

    def _check_outside(self, call: str) -> None:
        """Refuse ``call`` inside of ``_block``: the job would not continue from the values that it gathers."""
        if self._block is not None:
            raise UnsupportedConfigurationError(
                f"{call} was called inside of {self._block}, where the model holds a mean only until the block ends; "
                "call it before or after the block, on all ranks"
            )

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        """Gather sharded state on rank ``to``, or on all ranks, see [Note: checkpoints]. **Collective**.

        Args:
            optimizers: those that are saved with the model.
            to: a rank of the group; None: all.
        """

    def _kept_by_hook(self) -> dict[str, Any]:
        """Return the state's own part of a checkpoint. **Collective**."""
        return self.state_dict()


# --- statistics ---------------------------------------------------------------------------------


def common_stats(
    meter: Meter,
    *,
    mutex: Any = None,
    codec: object = None,
    coded: Mapping[str, Any] | None = None,
    not_deferred: str | None = "gradients are whole when backward() ends",
) -> dict[str, Any]:
    """Return the statistics that all states have, by the keys of docs/troubleshooting.md.

    Args:
        meter: traffic counters.
        mutex: None: no turns.
        codec: None: gradients travel exactly.
        coded: `Compression.stats`, with a codec.
        not_deferred: why steps are not deferred; None: they are.
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


def process_stats(state: HookState) -> dict[str, Any]:
    """Return `HookState.stats` with the steps of this process alone.

    In a resumed job some states count the steps of earlier processes as well, but not their bytes.
    """
    return {**state.stats(), "steps": state.meter.steps}


def format_stats(stats: Mapping[str, Any]) -> str:
    """Format statistics, such as "deferred 98 of 100 steps; waited 3.0 ms a step; 12.4 MB a step"."""
    steps = stats["steps"] or 1
    parts = []

    def why(key: str) -> str:
        return f" ({stats[key]})" if stats[key] else ""

    if "deferred" in stats:
        parts.append(
            f"deferred {stats['steps_deferred']} of {steps} steps{why('not_deferred_because')}"
        )
    if (exchanges := stats.get("exchanges", stats.get("pulls"))) is not None:
        parts.append(f"{exchanges} exchanges of parameters")
    if stats["codec"] is not None:
        parts.append(f"{stats['codec']['name']} sent {stats['rate']:.3g} of the exact bytes")
    if "siblings" in stats or stats["turns"]:
        parts.append(f"took {stats['turns']} turns{why('no_turns_because')}")
    if stats["exposed_s"] is not None:
        parts.append(f"waited {1e3 * stats['exposed_s'] / steps:.1f} ms a step")
    return "; ".join([*parts, f"{stats['bytes_sent'] / steps / 1e6:.3g} MB a step"])


# --- checkpoints --------------------------------------------------------------------------------


def _sequence(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


@contextlib.contextmanager
def _warning_of_missing_ranks() -> Iterator[None]:
    """Warn if the other ranks do not call within ten seconds."""
    text = (
        "checkpoint() has waited %g seconds for the other ranks: call it on all ranks, not inside of "
        "`if rank == 0:`; with to=0 rank 0 alone receives the checkpoint"
    )
    warning = threading.Timer(_PATIENCE_S, logger.warning, [text, _PATIENCE_S])
    warning.daemon = True
    warning.start()
    try:
        yield
    finally:
        warning.cancel()
        warning.join()
