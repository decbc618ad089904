"""What the ``stats()`` of every state tells, and the line of the log after the first hundred steps.

[Note: stats] All states have these keys, of this rank since the state was made:

* ``steps``: backward passes; of averaging those before a checkpoint, too.
* ``steps_deferred``: those whose updates came later than ``optimizer.step()``; ``not_deferred_because``: None while
  steps are deferred, else why not.
* ``bytes_sent``: by this rank to others, as the links have sent it: gradients and what travels in their place, factors,
  buffers, averages; not what a wrapped hook sends, nor what ranks compare. Plain DDP's: 2 (W - 1)/W of the gradients.
* ``exposed_s``: seconds in which training waited: from the step's last bucket until all were back, or, where backward
  does not wait, in whatever needs one. ``hidden_s``: further seconds in which anything was under way, owners' work
  included. Without the wait for a turn, which the mutex counts. None where NCCL carries tensors: the host does not see
  when its kernels run.
* ``codec``: None, or what `CompressedState.stats` tells, and the codec's ``name``; ``rate``: bytes sent of coded steps
  over an exact exchange's, 1.0 without a codec.
* ``turns``: that the job has taken; ``no_turns_because``: None while it takes turns with siblings, else why not.
"""

from collections.abc import Mapping
from typing import Any, Final

from .journeys import Meter

TOLD_AFTER: Final = 100
"""Steps before the line of the log."""
IN_BACKWARD: Final = "gradients are whole when backward() ends"


def told(
    meter: Meter,
    *,
    mutex: Any = None,
    codec: object = None,
    coded: Mapping[str, Any] | None = None,
    not_deferred: str | None = IN_BACKWARD,
) -> dict[str, Any]:
    """Return what all states tell, see [Note: stats].

    Args:
        meter: of the state.
        mutex: its `GPUMutex`.
        codec: that is in use, or None.
        coded: with a codec, what `Compression.stats` returns.
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
    """Return why a job takes no turns with siblings, if it does not; ``turns``: of its mutex, if it has one."""
    if not turns:
        return "no mutex: none was given, or the job has not joined yet"
    if turns["disabled_because"]:
        return str(turns["disabled_because"])
    if turns["turns_pay"] is False:
        return "the trial has found that siblings are faster side by side"
    return None if turns["siblings"] else "no sibling is on the device"


def line(stats: Mapping[str, Any]) -> str:
    """Return what a hook did in a line, such as "deferred 98 of 100 steps; waited 3.0 ms a step; 12.4 MB a step"."""
    steps, said = stats["steps"] or 1, []
    if "deferred" in stats:
        because = stats["not_deferred_because"]
        said.append(
            f"deferred {stats['steps_deferred']} of {steps} steps" + (f" ({because})" if because else "")
        )
    exchanges = stats.get("exchanges", stats.get("pulls"))
    if exchanges is not None:
        said.append(f"{exchanges} exchanges of parameters")
    if stats["codec"] is not None:
        said.append(f"{stats['codec']['name']} sent {stats['rate']:.3g} of the exact bytes")
    if "siblings" in stats or stats["turns"]:
        because = stats["no_turns_because"]
        said.append(f"took {stats['turns']} turns" + (f" ({because})" if because else ""))
    if stats["exposed_s"] is not None:
        said.append(f"waited {1e3 * stats['exposed_s'] / steps:.1f} ms a step")
    return "; ".join([*said, f"{stats['bytes_sent'] / steps / 1e6:.3g} MB a step"])
