"""The base of all hook states: compared settings, statistics, checkpoints. Our design.

[Note: checkpoints] A checkpoint first gathers sharded state, in place: replicas are averaged,
owners' parts of the optimizer state are copied to all ranks, residuals are made equal on all ranks.
Then one rank's dictionary holds the whole job, for any number of ranks. So do the files of a loop
that saves in its own way (``model.state_dict()`` on rank 0 alone), if it first calls
``checkpoint()`` on all ranks. The running job also continues from the gathered state, so that a
resumed job produces bitwise identical results.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._ddp.checks import (
    BoundModel,
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
    """Compares settings across all ranks, at the first bucket and after each load or drain.

    It uses torch's own collectives, so that a rank with ``CROSSOVER_DISABLE=1`` also takes part.
    """

    made = False  # whether the settings have been compared

    def __init__(self) -> None:
        self.disabled = environment.is_set(environment.DISABLE)

    def forget(self) -> None:
        """Forget the comparison, so that the next bucket repeats it."""
        self.made = False

    def make(
        self, group: dist.ProcessGroup, fingerprint: Callable[[], Mapping[str, object]]
    ) -> None:
        """Compare the settings that ``fingerprint()`` returns across ranks. **Collective**.

        With ``CROSSOVER_DISABLE=1`` ``fingerprint`` is not called, and only that variable is
        compared.
        """
        if group.size() > 1:
            compare(
                group,
                {
                    environment.DISABLE: int(self.disabled),
                    **({} if self.disabled else fingerprint()),
                },
            )
        self.made = True


# `HookState.why_not_virtual` of a state with a codec.
CODEC_OF_RANKS: Final = "the residuals of its codec belong to real ranks"


class HookState:
    """Base class of the states of our hooks. It saves and resumes the job.

    Every subclass has a ``mutex`` attribute, which may be None.

    Args:
        process_group: the model's process group; None means the default group.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.
        compare_replicas: whether to compare the ranks' parameters. Default: see `Digests`.

    On failure: ``TypeError`` if ``model`` is not a DDP model.
    """

    # The optimizers that were passed to the constructor, or None.
    optimizer: Optimizers = None
    # Whether the hook sends each gradient to the owner of its parameter.
    packs_by_owner: ClassVar[bool] = False
    # The call whose ``with`` block is active, such as "averaged()". Ranks differ again after the
    # block.
    _block: str | None = None

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        model: DistributedDataParallel | None,
        compare_replicas: bool | None = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel | None):
            raise TypeError(
                f"expected a DistributedDataParallel, got model={type(model).__name__}; pass the "
                "model that the hook is registered on, or leave model= out"
            )
        self.process_group = process_group
        self.compare_replicas = compare_replicas
        self.agreement = Agreement()
        # A hook binds it at the first bucket at the latest.
        self.bound_model = BoundModel(model)

    @functools.cached_property
    def meter(self) -> Meter:
        """The traffic counters of this hook."""
        return Meter()

    def stats(self) -> dict[str, Any]:
        """Return statistics under the keys that docs/troubleshooting.md lists. Not collective."""
        return self._common_stats()

    def _common_stats(self, **more: Any) -> dict[str, Any]:
        return common_stats(self.meter, mutex=self.mutex, **more)  # type: ignore[attr-defined]

    @property
    def why_not_virtual(self) -> str:
        """Why the hook cannot train with `VirtualRanks`, or "" if it can."""
        return "its results depend on the number of ranks"

    @contextlib.contextmanager
    def paused(self: Any) -> Iterator[None]:
        """Give the turn away during the block, for example to evaluate or to save a checkpoint.

        See `GPUMutex.paused`.
        """
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield

    def checkpoint(self, optimizer: Optimizers = None, *, to: int | None = None) -> dict[str, Any]:
        """Gather sharded state, and return everything that the job needs to resume; see `restore`.

        Until the next step, the model and the optimizers are whole on all ranks, so that any code
        can save them. With ``to``, the optimizers are whole on that rank only.

        The call has side effects. It averages the replicas, and any optimizer state that has as
        many numbers as its parameter. The next step's gradients travel without a codec. From
        here on a resumed job produces bitwise identical results. K-FAC with a codec does so only if
        the checkpoint follows ``drain()`` and one more step; otherwise its residuals are lost, with
        a warning.

        Args:
            optimizer: one optimizer of the model, or a sequence of all of them. Pass ``()`` to save
                none. The default is the optimizers that were passed to the state's constructor.
            to: the rank of the group that receives the checkpoint; the other ranks receive an empty
                dictionary. By default all ranks receive it, so that any of them can save it. Each
                then needs memory for the whole optimizer state.

        Returns:
            A dictionary with three keys. "model" holds ``ddp.module.state_dict()``. "optimizer"
            holds the optimizer's state dict, or a list of state dicts for a sequence; plain DDP can
            load them. "hook" holds the state's own `state_dict`. The tensors are the ones that
            training uses, so save or copy them before the next step.

        On failure: ``UnsupportedConfigurationError`` if the hook is not registered, if the state
        does not know the optimizer of a trained parameter, or if the call is inside of
        ``averaged()``; also on all ranks if their arguments differ or an average is not finite.
        ``ValueError`` if the group has no rank ``to``. If only some ranks make the call, they log a
        warning after ten seconds and raise ``ExchangeError`` after the group's timeout; on NCCL,
        torch's watchdog then ends the process.

        **Collective**: call it on all ranks, between two steps.

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
        """Load the model, the optimizers and the state from a `checkpoint`.

        Call it before the first ``backward()``. The checkpoint may come from a job with another
        number of ranks, or from plain DDP.

        Args:
            checkpoint: the dictionary that `checkpoint` returned. If its "hook" is missing or None,
                the state starts afresh.
            optimizer: the same optimizers as for `checkpoint`, with the same default.

        On failure: ``ValueError`` if the dictionary lacks a key or holds another number of
        optimizers; ``UnsupportedConfigurationError`` if the hook is not registered.

        Not collective, but all ranks must call it.

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
        """Return the state's own data, apart from the model and the optimizers.

        The base class has none.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a dictionary that `state_dict` returned."""
        if state:
            raise ValueError(
                f"expected an empty state dict, got keys {sorted(state)}; pass the result of "
                f"state_dict() of a {type(self).__name__}"
            )

    def close(self) -> None:
        """Release the resources that the state holds outside of the model's memory.

        The base class holds none, so later steps work as before. Not collective. Like every state's
        ``close()``, it is safe to call more than once.
        """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the state as None, and log a warning.

        A state belongs to one model in one process, and DDP drops the hook as well.
        """
        logger.warning(
            "a copied or pickled model has no hook, and its %s was replaced by None; make a new state for the "
            "copy, and use checkpoint() and restore() to continue from this one",
            type(self).__name__,
        )
        return type(None), ()

    def _check_outside(self, call: str) -> None:
        """Refuse ``call`` while ``_block`` is active.

        The job would not continue from the values that ``call`` gathers there.
        """
        if self._block is not None:
            raise UnsupportedConfigurationError(
                f"{call} was called inside of {self._block}, where the model holds a mean only until the block ends; "
                "call it before or after the block, on all ranks"
            )

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        """Gather sharded state on rank ``to``, or on all ranks, see [Note: checkpoints]. **Collective**.

        Args:
            optimizers: the optimizers that are saved with the model.
            to: the rank of the group that gathers the state; None means all ranks.
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
    """Return the statistics that all states share, under the keys in docs/troubleshooting.md.

    Args:
        meter: the traffic counters.
        mutex: the job's mutex; None if it takes no turns.
        codec: the codec; None if gradients travel exactly.
        coded: the result of `Compression.stats`; None without a codec.
        not_deferred: the reason why steps are not deferred; None if they are.
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
    """Return `HookState.stats`, but count only the steps of this process.

    In a resumed job, some states include the steps of earlier processes but not their bytes.
    """
    return {**state.stats(), "steps": state.meter.steps}


def format_stats(stats: Mapping[str, Any]) -> str:
    """Format statistics as one line of text.

    Example: "deferred 98 of 100 steps; waited 3.0 ms a step; 12.4 MB a step".
    """
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


def log_summary(meter: Meter, state: object) -> None:
    """Log a hook's statistics, once for each meter.

    Args:
        meter: the meter that has counted the hook's traffic.
        state: the hook's state; a process group or None if the hook has none.
    """
    if meter.is_logged:
        return
    meter.is_logged = True
    name, stats = "split", common_stats(meter)
    if isinstance(state, HookState):
        name, stats = type(state).__name__, process_stats(state)
    logger.info("%s: %s", name, format_stats(stats))


# --- checkpoints --------------------------------------------------------------------------------


def _sequence(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


@contextlib.contextmanager
def _warning_of_missing_ranks() -> Iterator[None]:
    """Warn if the block, which waits for the other ranks, takes more than ten seconds."""
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
