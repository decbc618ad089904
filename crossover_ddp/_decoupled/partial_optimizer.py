"""An ordinary optimizer that updates some parameters now and others later, as if in one step.

[Note: one step in several parts] A torch optimizer goes through its ``param_groups`` and skips what has no
gradient. So a part of a step is a whole call of ``step()`` on groups that hold only some parameters, with the
hyper-parameters of the moment when the user called ``step()``. What the optimizer keeps per parameter stays where
it is, and so does its state dict. What it keeps per group (a step count) must come out the same for every
part and is then written back once. Optimizers that mix parameters (a global norm, a line search) are found by
trying two tiny ones, see `check_separable`.
"""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from crossover_ddp.errors import UnsupportedConfigurationError

Group = dict[str, Any]

_OWN_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_WRAPPING_MODULES: Final = ("torch.optim.optimizer", "torch.optim.lr_scheduler")
_MISSING: Final = object()
_PROBE_GROUPS: Final = 3
_PROBE_STEPS: Final = 2


class Update(NamedTuple):
    """One parameter and the gradient that is to be applied to it."""

    parameter: torch.Tensor
    gradient: torch.Tensor


class StepPlan(NamedTuple):
    """What ``step()`` would have used when it was called: hyper-parameters, and whose they are."""

    groups: list[Group]
    group_of: dict[int, int]
    written: list[Group]


class PartialOptimizer:
    """Apply an optimizer's step to some parameters at a time.

    Args:
        optimizer: any torch optimizer that treats each parameter by itself.
        step: its own ``step``; default ``optimizer.step``.

    On failure: raises ``UnsupportedConfigurationError`` for optimizers whose parts do not add up to a step.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any] | None = None) -> None:
        self.optimizer = optimizer
        self.step = step or optimizer.step
        self._bare_step = _bare(self.step, optimizer)

    def runs(self, step: Callable[..., Any]) -> bool:
        """Tell whether its step is this method of a class, but for what torch itself puts around it."""
        bare = _bare(types.MethodType(step, self.optimizer), self.optimizer)
        return getattr(self._bare_step, "__func__", None) is getattr(bare, "__func__", bare)

    def plan(self) -> StepPlan:
        """Note the hyper-parameters of this moment."""
        groups = self.optimizer.param_groups
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        return StepPlan([_hyper_parameters(group) for group in groups], group_of, [{} for _ in groups])

    def is_watched(self) -> bool:
        """Tell whether somebody has registered hooks that expect a whole step."""
        hooks = [getattr(optimizer_module, name, None) for name in _GLOBAL_HOOKS]
        hooks += [getattr(self.optimizer, name, None) for name in _OWN_HOOKS]
        return any(hooks)

    def apply(self, plan: StepPlan, updates: Iterable[Update]) -> None:
        """Update these parameters as ``plan`` says; their ``.grad`` is left as it was."""
        used: dict[int, Group] = {}
        kept = []
        for parameter, gradient in updates:
            index = plan.group_of[id(parameter)]
            if index not in used:
                used[index] = {"params": [], **plan.groups[index]}
            used[index]["params"].append(parameter)
            kept.append((parameter, parameter.grad, gradient))
        if not kept:
            return
        whole = self.optimizer.param_groups
        self.optimizer.param_groups = list(used.values())
        try:
            for parameter, _, gradient in kept:
                parameter.grad = gradient
            # A profiler gets its span for each part, at a cost that is not paid where there is none.
            (self.step if torch.autograd._profiler_enabled() else self._bare_step)()
        finally:
            self.optimizer.param_groups = whole
            for parameter, former, _ in kept:
                parameter.grad = former
        for index, group in used.items():
            self._write_back(plan, index, group)

    def _write_back(self, plan: StepPlan, index: int, used: Group) -> None:
        """Keep what the optimizer has changed in a group, once for all the parts of a step."""
        before = plan.groups[index]
        for key, value in used.items():
            former = before.get(key, _MISSING)
            if former is value or key == "params" or (former is not _MISSING and _same(former, value)):
                continue
            written = plan.written[index]
            if key in written and not _same(written[key], value):
                raise UnsupportedConfigurationError(
                    f"expected an optimizer that treats each parameter by itself, got {_name(self.optimizer)}, whose "
                    f"param_groups[{index}][{key!r}] became {written[key]!r} and {value!r} in parts of one step; "
                    "use another optimizer or hook"
                )
            written[key] = self.optimizer.param_groups[index][key] = value


def check_separable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step is not the sum of its parts; its own state is not touched."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got optimizer={type(optimizer).__name__}; pass the optimizer object"
        )
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner or "param_groups" not in vars(optimizer):
        wrapped = f" ({_name(inner[0])})" if inner else ""
        raise UnsupportedConfigurationError(
            f"expected an optimizer with param_groups of its own, got {_name(optimizer)}, which wraps another; "
            f"pass the optimizer that it wraps{wrapped}, and go on to call the wrapper's step()"
        )
    try:
        whole, parts = _tried_both_ways(optimizer)
    except Exception as error:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that treats each parameter by itself and needs no closure, got {_name(optimizer)}, "
            f"which failed on one parameter at a time ({type(error).__name__}: {error}); use another optimizer or hook"
        ) from error
    if not all(_same(a, b) for a, b in zip(whole, parts, strict=True)):
        raise UnsupportedConfigurationError(
            f"expected an optimizer that treats each parameter by itself, got {_name(optimizer)}, whose update of one "
            "parameter depends on the others (a global norm, randomness); switch that off or use another hook"
        )


def _bare(step: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """Strip from ``step`` what torch itself puts around it for profilers, step hooks and schedulers.

    A part of a step has no step hooks, see `PartialOptimizer.is_watched`, and a scheduler counts whole steps.
    """
    function: Any = getattr(step, "__func__", step)
    bare = function
    while _is_wrapper_of_torch(bare):
        bare = bare.__wrapped__
    return step if bare is function else types.MethodType(bare, optimizer)


def _is_wrapper_of_torch(function: Any) -> bool:
    # By its code: functools.wraps copies names and marks.
    code, module = getattr(function, "__code__", None), getattr(function, "__globals__", {}).get("__name__")
    return code is not None and code.co_name == "wrapper" and module in _WRAPPING_MODULES


def _tried_both_ways(optimizer: Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what becomes of tiny parameters in whole steps, and in parts.

    Most optimizers make their state in the first step. Some make it in the constructor, as Adagrad does before torch
    2.14: their copy begins with the likes of what they have.
    """
    try:
        return _tried(optimizer, in_parts=False), _tried(optimizer, in_parts=True)
    except Exception:
        if not optimizer.state:
            raise
    return (
        _tried(optimizer, in_parts=False, with_state=True),
        _tried(optimizer, in_parts=True, with_state=True),
    )


def _tried(optimizer: Optimizer, *, in_parts: bool, with_state: bool = False) -> list[torch.Tensor]:
    """Take some steps with a copy of ``optimizer`` on tiny parameters; return what becomes of them."""
    copy = copy_on(
        optimizer, [(group, tiny_like(group["params"])) for group in optimizer.param_groups[:_PROBE_GROUPS]]
    )
    tiny = [parameter for group in copy.param_groups for parameter in group["params"]]
    if with_state:
        originals = [p for group in optimizer.param_groups[:_PROBE_GROUPS] for p in _chosen(group["params"])]
        for original, stand_in in zip(originals, tiny, strict=True):
            entries = optimizer.state.get(original, {})
            copy.state[stand_in] = {
                key: _tiny_entry(value, original, stand_in) for key, value in entries.items()
            }
    partial = PartialOptimizer(copy)
    with torch.random.fork_rng():
        for step in range(_PROBE_STEPS):
            gradients = [ramp(p, 0.1 + 3.0 * place + step) for place, p in enumerate(tiny)]
            updates = [
                Update(parameter, gradient) for parameter, gradient in zip(tiny, gradients, strict=True)
            ]
            plan = partial.plan()
            for part in [[update] for update in updates] if in_parts else [updates]:
                partial.apply(plan, part)
    return [parameter.detach() for parameter in tiny]


def copy_on(optimizer: Optimizer, groups: Iterable[tuple[Group, list[torch.Tensor]]]) -> Optimizer:
    """Return a copy of ``optimizer`` without state, for each of some of its groups with other parameters."""
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    for name in ("step", "zero_grad"):
        copy.__dict__.pop(name, None)
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    copy.state = defaultdict(dict)
    copy.param_groups = [{**_hyper_parameters(group), "params": parameters} for group, parameters in groups]
    return copy


def tiny_like(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make stand-ins, two elements wide, for two of these parameters."""
    stand_ins = (torch.empty((2,) * p.dim(), dtype=p.dtype, device=p.device) for p in _chosen(parameters))
    return [ramp(p, 0.5 + place).requires_grad_() for place, p in enumerate(stand_ins)]


def _chosen(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters[0], parameters[-1]] if parameters else []


def _tiny_entry(value: Any, original: torch.Tensor, stand_in: torch.Tensor) -> Any:
    """Make the like of what an optimizer keeps for ``original``, for its stand-in."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != original.shape or not value.numel():
        return value.clone()
    return torch.full(stand_in.shape, value.flatten()[0].item(), dtype=value.dtype, device=value.device)


def ramp(like: torch.Tensor, start: float) -> torch.Tensor:
    """Return numbers from ``start`` on, one more each, of the shape and type of ``like``."""
    steps = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    return (steps + start).to(like.dtype).reshape(like.shape)


def _hyper_parameters(group: Group) -> Group:
    # A learning rate may be a tensor that a scheduler changes in place.
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
    return a is b or bool(a == b)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
