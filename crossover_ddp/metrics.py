"""What a hook does, step by step, for TensorBoard, Weights & Biases and their like."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.states import HookState, counted, told

__all__ = ["metrics_of"]

_MS = 1e3


def metrics_of(state: object = None) -> Callable[[], dict[str, float]]:
    """Return a function that tells what a hook has done since it was called last: numbers by name, of this rank.

    * ``steps``: since then.
    * ``bytes_per_step``, ``exposed_ms_per_step``, ``hidden_ms_per_step``: sent, waited for, and hidden; the two times
      are left out where NCCL carries tensors.
    * ``deferred``: part of the steps, from 0 to 1.
    * ``turns_per_step``.
    * ``rate``: bytes over an exact exchange's since the state was made, 1.0 without a codec.

    What ``state.stats()`` tells of them is in docs/troubleshooting.md.

    Args:
        state: that the hook was registered with; for `reduce_scatter_all_gather_hook`, which has none, the process
            group or None, as it was registered.

    Returns:
        A function without arguments; with no step since the last call it returns nothing. It sends nothing and waits
        for nobody.

    Raises ``TypeError`` for the state of somebody else's hook.

    Not collective.

    Example::

        read = metrics_of(state)
        writer.add_scalars("crossover", read(), step)  # or wandb.log(read(), step=step)
    """
    if not isinstance(state, HookState | dist.ProcessGroup | None):
        raise TypeError(
            f"expected a state of crossover_ddp, a process group or None, got state={type(state).__name__}; pass what "
            "the hook was registered with"
        )

    def now() -> dict[str, Any]:
        return counted(state) if isinstance(state, HookState) else told(Exchange.of(state).meter)

    before = now()

    def read() -> dict[str, float]:
        nonlocal before
        former, before = before, now()
        steps = before["steps"] - former["steps"]
        if not steps:
            return {}

        def per_step(name: str, unit: float = 1.0) -> float:
            return float(unit * (before[name] - former[name]) / steps)

        found = {"steps": float(steps), "bytes_per_step": per_step("bytes_sent")}
        if before["exposed_s"] is not None and former["exposed_s"] is not None:
            found["exposed_ms_per_step"] = per_step("exposed_s", _MS)
            found["hidden_ms_per_step"] = per_step("hidden_s", _MS)
        found["deferred"] = per_step("steps_deferred")
        return {**found, "turns_per_step": per_step("turns"), "rate": float(before["rate"])}

    return read
