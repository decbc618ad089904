"""Per-step figures about a hook, for TensorBoard, Weights & Biases and similar tools."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.states import HookState, common_stats, process_stats

__all__ = ["metrics_of"]

_MS = 1e3


def metrics_of(state: object = None) -> Callable[[], dict[str, float]]:
    """Return a function that reports this rank's figures since its previous call.

    That function returns a dictionary with these keys:

    * ``steps``: the number of steps.
    * ``bytes_per_step``: the bytes that this rank sent.
    * ``exposed_ms_per_step``: the communication time that the training thread waited for. It is
      left out where NCCL carries the tensors.
    * ``hidden_ms_per_step``: the communication time that was hidden behind compute. It is left out
      where NCCL carries the tensors.
    * ``deferred``: the fraction of the steps that were deferred, from 0 to 1.
    * ``turns_per_step``: the turns that the job took.
    * ``rate``: the bytes sent since the state was created, divided by the bytes that an exact
      exchange would have sent. It is 1.0 without a codec.

    The figures are computed from the totals in ``state.stats()``, which docs/troubleshooting.md
    explains.

    Args:
        state: the state that the hook was registered with. `reduce_scatter_all_gather_hook` has no
            state: pass the process group or None that it was registered with.

    Returns:
        A function without arguments. It returns an empty dictionary if there was no step since its
        previous call. It sends nothing and does not block.

    Raises ``TypeError`` for a state that belongs to another package's hook.

    Not collective.

    Example::

        read = metrics_of(state)
        writer.add_scalars("crossover", read(), step)  # or wandb.log(read(), step=step)
    """
    if not isinstance(state, HookState | dist.ProcessGroup | None):
        raise TypeError(
            f"expected a state of crossover_ddp, a process group or None, got "
            f"state={type(state).__name__}; pass the state that the hook was registered with"
        )

    def totals() -> dict[str, Any]:
        return (
            process_stats(state)
            if isinstance(state, HookState)
            else common_stats(Exchange.of(state).meter)
        )

    last = totals()

    def read() -> dict[str, float]:
        nonlocal last
        before = last
        last = totals()
        steps = last["steps"] - before["steps"]
        if not steps:
            return {}

        def per_step(name: str, unit: float = 1.0) -> float:
            return float(unit * (last[name] - before[name]) / steps)

        found = {"steps": float(steps), "bytes_per_step": per_step("bytes_sent")}
        if last["exposed_s"] is not None and before["exposed_s"] is not None:
            found["exposed_ms_per_step"] = per_step("exposed_s", _MS)
            found["hidden_ms_per_step"] = per_step("hidden_s", _MS)
        found["deferred"] = per_step("steps_deferred")
        return {**found, "turns_per_step": per_step("turns"), "rate": float(last["rate"])}

    return read
