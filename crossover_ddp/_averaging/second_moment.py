"""Corrects the second moment of an Adam that steps with the gradients of one rank.

[Note: second moment] Adam divides by the root of v, a running mean of squared gradients. In local
steps a rank's gradient comes from a batch W times smaller than that of W ranks together. Its noise
is squared as well, so v is up to W times as large as with plain DDP, and steps are up to √W times
too small. Averaging v over the ranks does not change that. So v takes r·g² here instead of g², where
r is the expected ratio of a mean gradient's square to that of a rank:

    r = 1/W + (1 − 1/W)·s,    s = ⟨g, m⟩ / |g|²

The share s of signal in |g|² is estimated by the first moment m before the step, without its bias:
the noise of g is independent of it. Both sums are smoothed over about fifty steps. If all ranks have
the same batch, s and r become 1. Nothing is exchanged. Our design.

Before a step, v is reduced by (1 − β2)/β2·(1 − r)·g². The optimizer's own update then leaves
β2·v + (1 − β2)·r·g², which is not negative. A parameter's first update does not depend on v's scale,
so v is multiplied by 1/W after it.

[Note: closures] A closure that is passed to ``step()``, as Lightning does, computes the gradients. So
it is called before v is reduced, and the optimizer gets its result instead: with the gradients of the
step before, v could become negative.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from crossover_ddp._ddp.shards import own_part
from crossover_ddp.errors import UnsupportedConfigurationError

_MOMENT: Final = "exp_avg_sq"
_SMOOTHING: Final = 0.98
# The optimizers whose second moments are being corrected.
_corrected: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class SecondMoment:
    """Hooks on optimizers that correct their second moments; see [Note: second moment].

    Optimizers without a second moment, such as SGD, stay as they are.

    Args:
        optimizers: the optimizers.
        ranks: returns W if the gradients of the step are this rank's own, and 1 otherwise.

    Raises ``UnsupportedConfigurationError`` for ``amsgrad=True``, for a β2 of 0, and for an optimizer
    that another object corrects. A step raises it for an optimizer
    other than Adam and AdamW that has a second moment.
    """

    def __init__(self, optimizers: Sequence[Optimizer], ranks: Callable[[], int]) -> None:
        optimizers = list(dict.fromkeys(optimizers))
        # All are checked before the first one is changed.
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                _check(optimizer, group)
            if optimizer in _corrected:
                raise UnsupportedConfigurationError(
                    f"expected an optimizer of no other LocalSGDState, got {type(optimizer).__name__} "
                    "a second time: its second moment would be corrected twice; close the other "
                    "state first"
                )
        self._ranks = ranks
        self._numbers = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        # For each optimizer, its smoothed sums ⟨g, m⟩ and |g|²; None before its first correction.
        self._sums: list[Tensor | None] = [None] * len(optimizers)
        # Parameters whose second moment begins with the step under way.
        self._new: list[Tensor] = []
        self.hooks = contextlib.ExitStack()
        for optimizer in optimizers:
            _corrected.add(optimizer)
            self.hooks.callback(_corrected.discard, optimizer)
            for handle in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            ):
                self.hooks.callback(handle.remove)

    def ratio(self) -> float:
        """Return r of all gradients: 1 if they are the ranks' mean, or before the first estimate."""
        known = [sums for sums in self._sums if sums is not None]
        return self._ratio_of(torch.stack(known).sum(0)) if known else 1.0

    def _ratio_of(self, sums: Tensor) -> float:
        ranks = self._ranks()
        dot, square = sums
        share = float((dot / square).clamp(0, 1)) if square > 0 else 1.0
        return 1 / ranks + (1 - 1 / ranks) * share

    @property
    def state(self) -> list[list[float] | None]:
        """The smoothed sums of each optimizer, for a checkpoint."""
        return [None if sums is None else sums.tolist() for sums in self._sums]

    @state.setter
    def state(self, state: Sequence[list[float] | None]) -> None:
        if len(state) != len(self._sums):
            raise ValueError(
                f"expected the second moments of {len(self._sums)} optimizers, as passed to "
                f"LocalSGDState, got those of {len(state)}; pass the same optimizers"
            )
        self._sums = [
            None if sums is None else torch.tensor(sums, dtype=torch.float64) for sums in state
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Correct the moments. Return the arguments of ``step()`` without a closure to call."""
        given = {"closure": args[1]} if len(args) > 1 else kwargs
        closure = given.get("closure")
        if closure is None:
            self._correct(optimizer)
            return None
        with torch.enable_grad():
            loss = closure()  # see [Note: closures]
        self._correct(optimizer)
        return args[:1], {**kwargs, "closure": lambda: loss}

    @torch.no_grad()
    def _correct(self, optimizer: Optimizer) -> None:
        ranks = self._ranks()
        self._new = []
        found: list[tuple[Tensor, Tensor, float]] = []
        sums = []
        for group in optimizer.param_groups if ranks > 1 else ():
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if parameter.grad is None:
                    continue
                _check(optimizer, group)
                # A GradScaler may have skipped a parameter's first steps.
                if _MOMENT not in state or float(state["step"]) == 0:
                    self._new.append(parameter)
                    continue
                gradient = _gradient(optimizer, group, parameter)
                if gradient is None:  # a fused optimizer will skip the step
                    return
                beta1, beta2 = map(float, group["betas"])
                unbiased = 1 - beta1 ** float(state["step"])
                dot = (gradient * _real(state["exp_avg"])).sum(dtype=torch.float64) / unbiased
                square = gradient.square().sum(dtype=torch.float64)
                sums.append(torch.stack([-dot if group["maximize"] else dot, square]).cpu())
                found.append((_real(state[_MOMENT]), gradient, beta2))
        if not found:
            return
        number = self._numbers[id(optimizer)]
        total = torch.stack(sums).sum(0)
        former = self._sums[number]
        if former is not None:
            total = former.lerp(total, 1 - _SMOOTHING)
        if not bool(total.isfinite().all()):
            return  # the step is about to write NaN
        self._sums[number] = total
        ratio = self._ratio_of(total)
        for moment, gradient, beta2 in found:
            moment.addcmul_(gradient, gradient, value=-(1 - beta2) / beta2 * (1 - ratio))

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for parameter in self._new:
            moment = optimizer.state.get(parameter, {}).get(_MOMENT)
            if moment is not None:
                moment.mul_(1 / self._ranks())
        self._new = []


def _check(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Refuse a parameter group whose second moment has rules of its own."""
    is_adam = isinstance(optimizer, (Adam, AdamW))
    if is_adam and group["amsgrad"]:
        raise UnsupportedConfigurationError(
            "expected amsgrad=False for LocalSGDState(optimizer=...), got amsgrad=True: the largest "
            "second moment so far cannot be corrected; leave amsgrad or optimizer= out"
        )
    if is_adam and float(group["betas"][1]) == 0:
        raise UnsupportedConfigurationError(
            "expected betas[1] > 0 for LocalSGDState(optimizer=...), got 0: the second moment is no "
            "running mean then, and cannot be corrected beforehand; leave optimizer= out"
        )
    has_moment = any(_MOMENT in optimizer.state.get(each, {}) for each in group["params"])
    if has_moment and not is_adam:
        raise UnsupportedConfigurationError(
            "expected Adam or AdamW, or an optimizer without a second moment, got "
            f"{type(optimizer).__name__}: how it uses exp_avg_sq is not known; leave optimizer= out"
        )


def _gradient(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the gradient that Adam will square; None if it will skip the step."""
    gradient = parameter.grad
    assert gradient is not None
    # A GradScaler leaves the division to a fused optimizer, and sets these attributes for its step.
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and bool(found_inf):
        return None
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        gradient = gradient / scale
    if group["weight_decay"] and not _is_decoupled(optimizer, group):
        sign = -1 if group["maximize"] else 1
        gradient = gradient.add(parameter, alpha=sign * group["weight_decay"])
    return _real(gradient)


def _real(values: Tensor) -> Tensor:
    """Return a view of values as Adam squares them: the parts of a complex number by themselves.

    For a `DTensor`, the part on this rank is viewed.
    """
    own = own_part(values)
    return torch.view_as_real(own) if own.is_complex() else own


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether weight decay does not go through the moments."""
    return isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
