"""One line that tries itself: exact or coded, deferred or not, whichever is fastest here.

Which hook pays depends on the model, the link and the processor. `AutoState` trains with several of
them in turn, for ten steps where nothing can be gained, and mostly for 40 to 135. Then it keeps
the one that was fastest on the slowest rank. These *arms* are:

- "whole": backward waits for the exchange, as in plain DDP;
- "whole, small buckets": so that more of the exchange takes place during backward;
- "deferred": gradients are gathered, and parameters updated, in the next forward, as with
  `DecoupledState`;
- "whole, Half()", "whole, Int8()": backward waits for coded messages, as with `CompressedState`;
- "deferred, Half()", "deferred, Int8()": both;
- "whole, PowerSGD()": backward waits for two small all-reduces.

Only "whole" has the user's own buckets. All others have a small bucket and five larger ones: DDP's
reducer is made again between two steps. If one of the first two wins, the model continues without
any hook, which is plain DDP.

With ``losses="same"`` only the first three are tried, which give the losses of plain DDP. So losses
do not depend on the choice. With ``losses="rounded"`` all but the last are tried, and with
``losses="any"`` all eight. The part of a gradient that an arm has not sent yet is sent by the next
one, so changing arms loses nothing. For the rules of the race, see [Note: race] in
`_decoupled/race.py`. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from crossover_ddp._compression.codec import Codec, Half, Int8, in_words
from crossover_ddp._compression.compression import Compression
from crossover_ddp._compression.low_rank import PowerSGD
from crossover_ddp._compression.planning import rate_of
from crossover_ddp._ddp.checks import resolve_group
from crossover_ddp._ddp.refit import small_buckets
from crossover_ddp._decoupled.race import DEFERRED, WHOLE, Arm, Race
from crossover_ddp._engine.exchange import Exchange, run_hook

from .decoupled_hooks import DecoupledState
from .gpu_mutex import GPUMutex

__all__ = ["AutoState", "auto_hook"]


def _coded(arm: Arm, codec: Codec) -> Arm:
    name = f"{arm.name}, {type(codec).__name__}()"
    return arm._replace(name=name, codec=codec, rate=rate_of(codec))


_WHOLE: Final = WHOLE._replace(is_refitted=True)
_DEFERRED: Final = DEFERRED._replace(is_refitted=True)
_EXACT: Final = WHOLE, _WHOLE._replace(name="whole, small buckets"), _DEFERRED
_ROUNDED: Final = (
    *_EXACT,
    *(_coded(arm, codec) for codec in (Half(), Int8()) for arm in (_WHOLE, _DEFERRED)),
)
# The rate depends on the model. This one is so low that the race rules out nothing by it.
_LOW_RANK: Final = _WHOLE._replace(name="whole, PowerSGD()", codec=PowerSGD(), rate=1e-3)
_ARMS: Final[Mapping[str, tuple[Arm, ...]]] = {
    "same": _EXACT,
    "rounded": _ROUNDED,
    "any": (*_ROUNDED, _LOW_RANK),
}
"""The arms of each promise, the weakest first."""


class AutoState(DecoupledState):
    """State of `auto_hook`: several ways to exchange gradients race, and the fastest one is kept.

    The training loop stays as it is. For the first 10 to 95 steps, or up to 155 with
    ``losses="rounded"`` and 170 with ``losses="any"``, blocks of steps are trained with each arm.
    Then all ranks keep the weakest arm within 2 % of the fastest: the one that changes the training
    least. Rank 0 writes one line about it to stderr. If steps later become a fifth slower for
    hundreds of steps, the arms race again.

    Parameters and gradients may be read under the rules of `DecoupledState`.

    Args:
        optimizer: any torch optimizer that treats each parameter by itself. It must hold all
            parameters of the model.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        losses: with "same" the losses are those of plain DDP: with one or two ranks bit for bit,
            with more up to the order of additions. With "rounded" gradients may also be coded, with
            error feedback. Parameters are then still equal on all ranks, bit for bit. But the clock
            chooses when which codec is used, so two runs differ. With "any" the loss may also be
            clearly higher at the same number of steps, since `PowerSGD` sends the largest parts of a
            gradient first and the rest much later, see docs/codecs.md. Default "same".
        arms: the names of the arms that race, from those of ``losses``, such as
            ``("whole", "deferred")``. A single one, such as ``("deferred, Half()",)``, is used from
            the start, so that runs can be repeated. Default: all arms of ``losses``.
        loss_scale: only with "rounded" and "any": the factor by which the loss is multiplied before
            ``backward()``, or a function that returns it, such as ``scaler.get_scale``. Default 1.
        mutex: the mutex for taking turns, like that of `DecoupledState`. Default: no turns.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    On failure: ``ValueError`` for other values of ``losses`` and ``arms``, and otherwise like
    `DecoupledState`. With "rounded" and "any" the first ``backward()`` raises
    ``UnsupportedConfigurationError`` for float64 gradients.

    **Collective**: all ranks create the state with the same arguments and register the hook.
    ``CROSSOVER_DISABLE=1`` turns it into a plain all-reduce.

    Example::

        model.register_comm_hook(AutoState(optimizer), auto_hook)
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        losses: Literal["same", "rounded", "any"] = "same",
        arms: Sequence[str] | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        mutex: GPUMutex | None = None,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
    ) -> None:
        racing = _arms_of(losses, arms)
        super().__init__(
            optimizer,
            process_group,
            mutex=mutex,
            defer="always",
            compare_replicas=compare_replicas,
            model=model,
        )
        if any(arm.codec is not None for arm in racing):
            self._compression = Compression(None, loss_scale, self)
        # Whether the buckets that were asked for last are refitted, and whether the model was to be
        # plain DDP.
        self._fitted = False, False
        self._race: Race = Race(racing, self.meter, self._use, self._report)

    def _use(self, arm: Arm) -> None:
        self.codec = arm.codec
        if self._compression is not None:
            self._compression.use(arm.codec, one_hop=not arm.defers)

    def _report(self, verdict: str) -> None:
        """Write the verdict where it is seen even if ``logging`` is not configured."""
        if resolve_group(self.process_group).rank() == 0:
            sys.stderr.write(f"crossover_ddp: {verdict}\n")

    @property
    def why_not_virtual(self) -> str:
        """See `HookState.why_not_virtual`."""
        return "it changes buckets and hooks, by the clock"

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that all ranks must have in common."""
        arms = [(arm.name, in_words(arm.codec)) for arm in self._race.arms]
        return {"state": type(self).__name__, "arms": arms, "chosen arm": self.chosen}

    # --- the hook ------------------------------------------------------------------------------

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        future = super()._take(exchange, bucket)
        if bucket.is_last() and (self._race.has_begun or self._race.is_over):
            self._fit(self._race.arm)
        return future

    def _fit(self, arm: Arm) -> None:
        """Give the model the buckets that suit ``arm`` in its next forward, if they differ."""
        is_plain = arm == self._race.chosen and not arm.defers and arm.codec is None
        is_plain = is_plain and self.mutex is None
        if is_plain and self._compression is not None and not self._compression.is_drained:
            return  # the next step takes the residuals along
        if self._fitted == (arm.is_refitted, is_plain):
            return
        self._fitted = arm.is_refitted, is_plain
        sizes = None  # the user's own
        if arm.is_refitted:
            trained = [p for p in self._pending.parameters() if p.requires_grad]
            sizes = small_buckets(sum(p.nbytes for p in trained))
        self._pending.refit(sizes, hooked=not is_plain)

    # --- for users -----------------------------------------------------------------------------

    @property
    def chosen(self) -> str | None:
        """The name of the arm that the last race chose; None before its verdict.

        It is the same on all ranks.
        """
        return None if self._race.chosen is None else self._race.chosen.name

    @property
    def figures(self) -> dict[str, float]:
        """The measurements of the last race, in seconds per step; empty before its verdict.

        It holds the time of each arm that was run, by name. "C" is the computation, "N" the time
        for which backward waited, and "M" the time during which messages were under way, all three
        with "whole" on the slowest rank. C, N and M are missing if they are not known, as on NCCL,
        where the host does not see when messages arrive.
        """
        return dict(self._race.figures)

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen arm under "arm", and the residuals under "codec"; see `DecoupledState`.

        A job that resumes from it does not race again.
        """
        return {**super().state_dict(), "arm": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the choice and the residuals; see `DecoupledState.load_state_dict`.

        The choice is left out if ``arms`` does not contain it.
        """
        super().load_state_dict(state)
        for arm in self._race.arms:
            if arm.name == state.get("arm"):
                self._race.choose(arm)


def _arms_of(losses: str, names: Sequence[str] | None) -> tuple[Arm, ...]:
    """Return the arms with these names, the weakest first. Refuse names that ``losses`` lacks."""
    if losses not in _ARMS:
        raise ValueError(
            f"expected losses='same', 'rounded' or 'any', got losses={losses!r}; see AutoState"
        )
    arms = _ARMS[losses]
    if names is None:
        return arms
    known = [arm.name for arm in arms]
    if isinstance(names, str) or not names or not {*names} <= {*known}:
        raise ValueError(
            f"expected some of {known} with losses={losses!r}, got arms={names!r}; pass a sequence "
            "of these names, or losses='rounded' or 'any' for arms with codecs"
        )
    return tuple(arm for arm in arms if arm.name in names)


def auto_hook(state: AutoState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start to average the bucket in the way of the arm whose turn it is; see `AutoState`.

    Args:
        state: the model's state; create one per model and optimizer.
        bucket: the bucket that DDP passes.

    Returns:
        A Future of the mean. In a step that is deferred, it is already complete.

    On failure: the hook itself raises nothing; see `AutoState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: our design; see the
    module's docstring.
    """

    def refused() -> None:
        if isinstance(state, AutoState):
            state._pending.refuse()

    return run_hook(
        state,
        bucket,
        AutoState,
        "pass AutoState(optimizer), or register the hook of that state",
        lambda exchange: state._take(exchange, bucket),
        refused=refused,
    )
