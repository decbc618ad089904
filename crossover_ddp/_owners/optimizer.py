"""Intercept an optimizer's methods, and take its step in parts, some parameters at a time.

[Note: one step in several parts] A torch optimizer loops over its ``param_groups`` and skips
parameters without a gradient. So a part of a step is a full call of ``step()`` on groups that hold
only some parameters, with the hyper-parameters that were set when the user called ``step()``. State
that the optimizer keeps per parameter stays in place, and so does its state dict. State that it
keeps per group or for itself, such as a step count, is updated by a dry step: when the user calls
``step()``, the optimizer runs once on groups without parameters. This also counts the step in
groups without a gradient. Parts run on copies of the groups, and changes to these copies are
dropped.

The dry step and the parts run on a shadow: an object of the optimizer's class with the optimizer's
attributes but other groups. So a scheduler never sees the groups of a part that another thread
runs. A function that user code has wrapped around ``step`` expects whole steps, and is bound to the
optimizer itself. If there is one, no step is taken in parts.

A trial on two tiny parameters detects optimizers that mix parameters (through a global norm or a
line search), see `check_separable`.

[Note: state of an optimizer] If user code resets momentum (``optimizer.state.clear()``) or scales
it between two steps, it wants to change the steps that follow. A pending update belongs to the
previous step. So the dictionary in ``optimizer.state`` reports each access by user code, and
pending updates are applied first.

[Note: groups] Code that loops over ``group["params"]`` (GradScaler, clipping, weight clamping, a
Lookahead around the optimizer) reads parameters or gradients. So the list in the group reports each
access. Schedulers read hyper-parameters in every step, and these accesses are not reported.

[Note: changes that no counter sees] A tensor's version counter counts in-place changes, but not
changes made through ``.data``. Three checks of different cost detect such a change:

* Replacing the storage (``p.data = average``) changes the tensor's address.
* `Sample` compares the bits of a few elements of each tensor. Reading them takes microseconds, so
  this is done in every step. An average that is swapped in for an evaluation differs in nearly all
  elements. A clamp that changes only a few elements may be missed.
* `Seal` with ``bits=True`` compares a checksum of all bits. That reads the whole tensor, so it is
  done in the first steps only, or in all steps with ``CROSSOVER_CHECK=1``. Code that writes
  gradients or parameters usually does so in every step.
"""

import contextlib
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._ddp.digests import fingerprint
from crossover_ddp._engine.buckets import is_dense
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

Group = dict[str, Any]

# Modules of torch that wrap Optimizer.step: one adds profiler spans, the other counts steps.
SPANS: Final = "torch.optim.optimizer"
_SCHEDULERS: Final = "torch.optim.lr_scheduler"
_MISSING: Final = object()
_TRIED_STEPS: Final = 2
_TRIED_LR: Final = 0.5
_MARK: Final = "_crossover_ddp_state"  # attribute of an optimizer that is intercepted
_OURS: Final = ("step", "zero_grad", "__getstate__")  # methods that are intercepted
# GradScaler sets these on a fused optimizer for one step.
_SCALER_ATTRIBUTES: Final = ("grad_scale", "found_inf")
_SAMPLED: Final = 8  # number of elements that are sampled in each tensor
# The integer type with as many bytes as an element.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Update(NamedTuple):
    """A parameter and the gradient to apply to it."""

    parameter: torch.Tensor
    gradient: torch.Tensor


class StepPlan(NamedTuple):
    """The optimizer's settings at the time ``step()`` was called."""

    groups: list[Group]  # the hyper-parameters of each group
    group_of: dict[int, int]  # the index of each parameter's group, by the parameter's id
    attributes: dict[str, Any]  # the optimizer's own attributes


class PartialOptimizer:
    """Takes an optimizer's step for some parameters at a time.

    Args:
        optimizer: an optimizer that treats each parameter separately, see `check_separable`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # A part of a step runs no step hooks, see `is_watched`, and a scheduler counts whole steps.
        # The first of these two functions still has torch's profiler spans.
        self._spanned_step = stripped(optimizer.step, _SCHEDULERS)
        self._bare_step = stripped(optimizer.step, _SCHEDULERS, SPANS)
        # Whether the step is the one that the class defines, without wrappers from user code.
        self.is_own = self._bare_step is stripped(type(optimizer).step, SPANS)

    def take_whole(self) -> None:
        """Take the whole step without torch's profiler spans and step hooks."""
        self._bare_step(self.optimizer)

    def plan(self) -> StepPlan:
        """Copy the current hyper-parameters, and count the step with a dry step.

        See [Note: one step in several parts].
        """
        setattr(self.optimizer, torch_private.STEP_WAS_CALLED, True)
        groups = self.optimizer.param_groups
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        attributes = {**vars(self.optimizer)}
        for name in _SCALER_ATTRIBUTES:
            if isinstance(attributes.get(name), torch.Tensor):
                attributes[name] = attributes[name].clone()  # the scaler changes its own later
        plan = StepPlan([_hyper_parameters(group) for group in groups], group_of, attributes)
        # Take the dry step, and keep its changes to the groups and to the optimizer itself.
        empty = [{**group, "params": []} for group in groups]
        after = self._run(self._bare_step, empty, plan.attributes)
        for group, counted in zip(groups, empty, strict=True):
            _take_over(counted, group, group)
        _take_over(after, plan.attributes, vars(self.optimizer))
        return plan

    def apply(self, plan: StepPlan, updates: Iterable[Update]) -> None:
        """Update these parameters with the settings in ``plan``. Their ``.grad`` is restored."""
        used: dict[int, Group] = {}
        kept = []
        for parameter, gradient in updates:
            index = plan.group_of[id(parameter)]
            if index not in used:
                used[index] = {"params": [], **_hyper_parameters(plan.groups[index])}
            used[index]["params"].append(parameter)
            kept.append((parameter, parameter.grad, gradient))
        if not kept:
            return
        # A profiler sees a span for each part. Spans cost time, so without a profiler there are
        # none.
        step = self._spanned_step if torch_private.profiler_is_on() else self._bare_step
        try:
            for parameter, _, gradient in kept:
                parameter.grad = gradient
            self._run(step, list(used.values()), plan.attributes)
        finally:
            for parameter, former, _ in kept:
                parameter.grad = former

    def _run(
        self, step: Callable[..., Any], groups: list[Group], attributes: dict[str, Any]
    ) -> dict[str, Any]:
        """Take a step on a shadow with these groups, and return the shadow's attributes."""
        shadow: Optimizer = object.__new__(type(self.optimizer))
        shadow.__dict__.update(attributes, param_groups=groups)
        step(shadow)
        return vars(shadow)


def check_separable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step cannot be taken in parts. The optimizer is not changed."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got optimizer={name}; pass the optimizer object"
        )
    _check_not_wrapping(optimizer, name)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    mixes_parameters = isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam))
    if is_torchs and PartialOptimizer(optimizer).is_own and not mixes_parameters:
        return  # all other optimizers of torch treat each parameter separately
    try:
        whole = _tried(optimizer, in_parts=False)
        parts = _tried(optimizer, in_parts=True)
    except Exception as error:
        raise UnsupportedConfigurationError(
            "expected an optimizer that treats each parameter by itself and needs no closure, got "
            f"{name}, which failed on one parameter at a time ({type(error).__name__}: {error}); "
            "switch off a global norm of its own (max_grad_norm=None), or use another optimizer or "
            "hook"
        ) from error
    difference = _difference(whole, parts)
    if difference is not None:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that treats each parameter by itself, got {name}, {difference}"
        )


def _check_not_wrapping(optimizer: Optimizer, name: str) -> None:
    """Refuse an optimizer that wraps another one."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if not inner and "param_groups" in vars(optimizer):
        return
    wrapped = f" ({type(inner[0]).__name__})" if inner else ""
    remedy = f"pass the optimizer that it wraps{wrapped}, and continue to call the wrapper's step()"
    if name == "ZeroRedundancyOptimizer":
        remedy = (
            f"give all parameters to the one inside{wrapped}, and use OwnerState, which divides "
            "its state"
        )
    raise UnsupportedConfigurationError(
        f"expected an optimizer with param_groups of its own, got {name}, which wraps another; "
        f"{remedy}"
    )


def _difference(whole: Optimizer, parts: Optimizer) -> str | None:
    """Compare two copies of an optimizer after their trials.

    Return the first difference with its remedy, or None if they agree.
    """
    for index, group in enumerate(whole.param_groups):
        counted = parts.param_groups[index]
        for key in sorted({*group, *counted} - {"params"}):
            if not _same(group.get(key), counted.get(key)):
                return (
                    f"whose param_groups[{index}][{key!r}] becomes {group.get(key)!r} in a step "
                    f"and {counted.get(key)!r} in one without gradients; use another optimizer or "
                    "hook"
                )
    for one, other in zip(_parameters(whole), _parameters(parts), strict=True):
        if not _same(one, other):
            return (
                "whose update of one parameter depends on the others (a global norm, randomness); "
                "switch that off or use another hook"
            )
    return None


def _take_over(after: dict[str, Any], before: dict[str, Any], target: dict[str, Any]) -> None:
    """Copy the attributes that a step has changed to ``target``, except parameters and groups."""
    for key, value in after.items():
        if key not in ("params", "param_groups") and before.get(key, _MISSING) is not value:
            target[key] = value


def stripped(step: Callable[..., Any], *modules: str) -> Callable[..., Any]:
    """Return ``step`` without the wrappers that the given modules of torch have put around it."""
    function: Any = getattr(step, "__func__", step)
    # Wrappers are recognized by their code, since functools.wraps copies names and attributes.
    while getattr(getattr(function, "__code__", None), "co_name", None) == "wrapper":
        if function.__globals__.get("__name__") not in modules:
            break
        function = function.__wrapped__
    return cast(Callable[..., Any], function)


def _tried(optimizer: Optimizer, *, in_parts: bool) -> Optimizer:
    """Take some steps with a copy of ``optimizer`` on tiny parameters, and return the copy.

    Parts are taken in the reverse of the optimizer's order. So an optimizer that draws random
    numbers for each parameter gives a different result in parts.
    """
    groups = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        stand_ins = []
        for place, parameter in enumerate((trained[0], trained[-1]) if trained else ()):
            small = parameter.new_empty((2,) * parameter.dim())
            stand_ins.append(_ramp(small, 0.5 + place).requires_grad_())
        groups.append((group, stand_ins))
    copy = copy_on(optimizer, groups)
    for group in copy.param_groups:
        # A small learning rate would hide differences in rounding.
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].fill_(_TRIED_LR)
        elif isinstance(group.get("lr"), float):
            group["lr"] = _TRIED_LR
    tiny = _parameters(copy)
    partial = PartialOptimizer(copy)
    with torch.random.fork_rng():
        for step in range(_TRIED_STEPS):
            gradients = [_ramp(p, 0.1 + 3.0 * place + step) for place, p in enumerate(tiny)]
            if in_parts:
                plan = partial.plan()
                for parameter, gradient in reversed([*zip(tiny, gradients, strict=True)]):
                    partial.apply(plan, [Update(parameter, gradient)])
            else:
                for parameter, gradient in zip(tiny, gradients, strict=True):
                    parameter.grad = gradient
                partial.take_whole()
    return copy


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copy_on(optimizer: Optimizer, groups: Iterable[tuple[Group, list[torch.Tensor]]]) -> Optimizer:
    """Return a copy of ``optimizer`` that has no state and updates other parameters.

    Args:
        optimizer: the optimizer to copy.
        groups: pairs of a parameter group of ``optimizer`` and the parameters that replace its own.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    for name in _OURS:
        copy.__dict__.pop(name, None)
    for name in torch_private.STEP_HOOKS:
        setattr(copy, name, OrderedDict())
    copy.state = defaultdict(dict)
    copy.param_groups = [
        {**_hyper_parameters(group), "params": parameters} for group, parameters in groups
    ]
    return copy


def _ramp(like: torch.Tensor, start: float) -> torch.Tensor:
    """Return ``start``, ``start`` + 1, … in a tensor like ``like``.

    The norm exceeds any usual clipping limit.
    """
    steps = torch.arange(like.numel(), dtype=torch.float32, device=like.device)
    return (steps + start).to(like.dtype).reshape(like.shape)


def _hyper_parameters(group: Group) -> Group:
    # Tensors are cloned: a learning rate may be a tensor that a scheduler changes in place.
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)
    return a is b or bool(a == b)


class GuardedList(list[torch.Tensor]):
    """A group's list of parameters that calls ``look`` before user code reads it.

    Copies are plain lists.
    """

    def __init__(self, parameters: list[torch.Tensor], look: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._look = uncompiled(look)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._look()
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.Tensor]:
        self._look()
        return super().__reversed__()

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return self.copy() + other

    def __radd__(self, other: Any) -> Any:
        # list.__add__ would read the parameters without ``__iter__``.
        return other + self.copy()

    def copy(self) -> list[torch.Tensor]:
        """Return a plain list."""
        return [*self]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, ([*self],)


def _reported(name: str) -> Any:
    """Return the dictionary method called ``name``, wrapped so that it calls ``look`` first."""
    original = getattr(defaultdict, name)

    @functools.wraps(original)
    def method(self: "GuardedState", *args: Any, **kwargs: Any) -> Any:
        self.look()
        return original(self, *args, **kwargs)

    return method


class GuardedState(defaultdict[torch.Tensor, dict[str, Any]]):
    """An optimizer's state dictionary that calls ``look`` before each access by user code.

    Copies are plain dictionaries.
    """

    def __init__(
        self, entries: Mapping[torch.Tensor, dict[str, Any]], look: Callable[[], None]
    ) -> None:
        super().__init__(dict, entries)
        self.look = uncompiled(look)

    __getitem__ = _reported("__getitem__")
    __setitem__ = _reported("__setitem__")
    __delitem__ = _reported("__delitem__")
    __iter__ = _reported("__iter__")
    __reversed__ = _reported("__reversed__")
    __eq__ = _reported("__eq__")
    __or__ = _reported("__or__")
    __ror__ = _reported("__ror__")
    __ior__ = _reported("__ior__")
    get = _reported("get")
    items = _reported("items")
    keys = _reported("keys")
    values = _reported("values")
    pop = _reported("pop")
    popitem = _reported("popitem")
    setdefault = _reported("setdefault")
    update = _reported("update")
    clear = _reported("clear")

    def copy(self) -> Any:
        """Return a plain dictionary."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.items()))


def check_not_intercepted(optimizer: Optimizer) -> None:
    """Refuse an optimizer that another state already intercepts."""
    if getattr(optimizer, _MARK, None) is not None:
        raise UnsupportedConfigurationError(
            "expected an optimizer without a DecoupledState, OwnerState or MuonState, got one that "
            "has another already; make one optimizer for each model, or close() the other state"
        )


def is_watched(optimizer: Optimizer) -> bool:
    """Return whether user code has registered hooks that expect a whole step."""
    found: list[Any] = []
    for name in torch_private.GLOBAL_STEP_HOOKS:
        found += getattr(torch_private.optimizer_module, name, {}).values()
    for name in torch_private.STEP_HOOKS:
        found += getattr(optimizer, name, {}).values()
    return not all([isinstance(hook, OwnHook) for hook in found])


def check_unhooked(optimizer: Optimizer) -> None:
    """Refuse step hooks on an optimizer whose parameters have owners."""
    if is_watched(optimizer):
        raise UnsupportedConfigurationError(
            "expected no step hooks where parameters have owners, got some "
            "(register_step_pre_hook, register_step_post_hook, a profiler's): parameters are not "
            "updated when torch calls them; remove them and act after step(), or use "
            "DecoupledState"
        )


def intercept(
    optimizer: Optimizer,
    *,
    on_step: Callable[[Callable[[], Any]], Any],
    on_zero_grad: Callable[[], None],
    on_look: Callable[[], None] | None = None,
    on_state: Callable[[], None] | None = None,
    flush: Callable[[], None] = nothing,
    unwatched: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> contextlib.ExitStack:
    """Override the optimizer's methods on the instance. Closing the returned stack restores them.

    Args:
        optimizer: an optimizer that is not intercepted yet.
        on_step: called in place of ``step``, with the original method as its argument. A closure
            has run by then.
        on_zero_grad: called after ``zero_grad``.
        on_look: called before user code reads the lists of parameters in the groups. Default: the
            lists are not guarded.
        on_state: called before user code reads or writes ``optimizer.state``, see
            [Note: state of an optimizer]. Default: the state is not guarded.
        flush: called when user code needs parameters and state to be up to date.
        unwatched: a context that is entered while this thread loops over parameters without reading
            their values.
    """
    stack = contextlib.ExitStack()
    own = {name: vars(optimizer).get(name) for name in _OURS}
    original_step = optimizer.step
    original_zero_grad = optimizer.zero_grad
    original_getstate = optimizer.__getstate__

    @functools.wraps(original_step)
    @uncompiled
    def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return on_step(original_step)
        # As in torch's optimizers, the closure runs once, before the step reads gradients.
        with torch.enable_grad():
            loss = closure()
        on_step(original_step)
        return loss

    @functools.wraps(original_zero_grad)
    @uncompiled
    def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            flush()
        with unwatched():
            original_zero_grad(set_to_none)
        on_zero_grad()

    def getstate() -> Any:
        """Flush first: copying and pickling read momentum before they read the groups."""
        flush()
        return original_getstate()

    # Bound methods, since learning-rate schedulers wrap ``optimizer.step.__func__``.
    ours: dict[str, Any] = {
        "step": types.MethodType(step, optimizer),
        "zero_grad": types.MethodType(zero_grad, optimizer),
        "__getstate__": getstate,
    }
    vars(optimizer).update(ours)
    setattr(optimizer, _MARK, True)

    @stack.callback
    def restore() -> None:
        for group in optimizer.param_groups:
            if type(group["params"]) is GuardedList:
                group["params"] = [*list.__iter__(group["params"])]
        if type(optimizer.state) is GuardedState:
            optimizer.state = optimizer.state.copy()
        for name, value in own.items():
            # A scheduler may have wrapped our method since. Then our method stays, and forwards.
            if vars(optimizer).get(name) is ours[name]:
                del vars(optimizer)[name]
                vars(optimizer).update({} if value is None else {name: value})
        delattr(optimizer, _MARK)

    if on_look is not None:
        guard_groups(optimizer, on_look)
    if on_state is not None:
        guard_state(optimizer, on_state)
    for register in (
        optimizer.register_state_dict_pre_hook,
        optimizer.register_load_state_dict_pre_hook,
    ):
        stack.callback(register(lambda *_: flush()).remove)
    return stack


def guard_groups(optimizer: Optimizer, look: Callable[[], None]) -> None:
    """Guard the lists of parameters in all groups. Call this again when there may be new groups."""
    for group in optimizer.param_groups:
        if type(group["params"]) is not GuardedList:
            group["params"] = GuardedList(group["params"], look)


def guard_state(optimizer: Optimizer, look: Callable[[], None]) -> None:
    """Guard the optimizer's state. Call this again when the state may have been replaced."""
    if type(optimizer.state) is not GuardedState:
        optimizer.state = GuardedState(optimizer.state, look)


# --- tensors that user code must not write ---


class Seal:
    """A snapshot of version counters and addresses that detects writes by user code.

    Args:
        tensors: the tensors that user code must not write from now on.
        bits: whether to take a checksum of their bits too, see
            [Note: changes that no counter sees].
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, bits: bool = False) -> None:
        self._noted = []
        for each in tensors:
            checksum = fingerprint(each) if bits else None
            self._noted.append((each, torch_private.version_of(each), each.data_ptr(), checksum))

    @property
    def is_broken(self) -> bool:
        """Whether any of the tensors has been written since the snapshot."""
        for tensor, version, begin, _ in self._noted:
            if torch_private.version_of(tensor) != version or tensor.data_ptr() != begin:
                return True
        return any(
            [
                bits is not None and not torch.equal(fingerprint(tensor), bits)
                for tensor, _, _, bits in self._noted
            ]
        )


class Sample:
    """A snapshot of a few elements of each tensor, see [Note: changes that no counter sees].

    If the tensors are on a device, `differs` makes the host wait for it.

    Args:
        tensors: the tensors to sample, all on the same device.
        views: a cache of views of the sampled elements, by the tensor's id. It is filled here and
            makes later samples cheaper.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], views: dict[int, torch.Tensor]) -> None:
        self._views = [found for each in tensors for found in _sampled(each, views)]
        self._noted = self._read()

    def differs(self) -> bool:
        """Return whether any sampled element has changed."""
        return any(
            [
                not torch.equal(now, then)
                for now, then in zip(self._read(), self._noted, strict=True)
            ]
        )

    def _read(self) -> list[torch.Tensor]:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for view in self._views:
            by_dtype.setdefault(view.dtype, []).append(view)
        return [torch.cat(each) for each in by_dtype.values()]


def _sampled(tensor: torch.Tensor, views: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return a list with one integer view of a few elements, spread over the tensor.

    The list is empty if the tensor cannot be sampled because it is empty, not dense, or not a plain
    strided tensor.
    """
    known = views.get(id(tensor))
    if known is not None and known.data_ptr() == tensor.data_ptr():
        return [known]
    if (
        tensor.layout != torch.strided
        or not tensor.numel()
        or not is_dense(tensor)
        or type(tensor.data) is not torch.Tensor
    ):
        return []
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    count = min(_SAMPLED, values.numel())
    spread = values.as_strided((count,), (values.numel() // count,), values.storage_offset())
    views[id(tensor)] = spread.view(_BITS[spread.itemsize])
    return [views[id(tensor)]]
