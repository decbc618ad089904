"""An ordinary optimizer whose calls we take, and whose step is taken in parts: some parameters now and others later.

[Note: one step in several parts] A torch optimizer goes through its ``param_groups`` and skips what has no
gradient. So a part of a step is a whole call of ``step()`` on groups that hold only some parameters, with the
hyper-parameters of the moment when the user called ``step()``. What the optimizer keeps per parameter stays where
it is, and so does its state dict. What it keeps per group, or of itself (a count of steps), is written by a dry step:
at ``step()`` the optimizer runs once on groups without parameters, so that groups are counted that have no gradient,
too. Parts run on copies of the groups, whose writes are dropped.

Both run on a shadow: an object of the optimizer's class with its attributes and other groups. So a thread that brings
parameters up to date shows no part's groups to a scheduler. Somebody else's function around ``step`` expects whole
steps, and is bound to the optimizer itself: where one is, none is taken in parts.

Optimizers that mix parameters (a global norm, a line search) are found by trying two tiny ones, see `check_separable`.

[Note: state of an optimizer] Momentum that is restarted (``optimizer.state.clear()``) or scaled between two steps is
meant for the steps after that. A pending update belongs to the step before. So the dictionary in ``optimizer.state``
reports each access by user code, and what is pending is applied first.

[Note: groups] Code that goes through ``group["params"]`` (GradScaler, clipping, weight clamping, a Lookahead around the
optimizer) reads parameters or gradients. The list in the group reports it; hyper-parameters are read as ever, by
schedulers in every step.

[Note: changes that no counter sees] A tensor counts its in-place changes, but a change through ``.data`` is not
counted. Three cheaper or dearer checks find such a change:

* An exchange of storages (``p.data = average``) moves the tensor's memory.
* `Sample` compares the bits of a few elements of each tensor. Reading them costs microseconds, so it is done in every
  step. An average that is swapped in for an evaluation differs in nearly all elements. A clamp that changes a few
  elements may go unnoticed.
* `Seal` with ``bits=True`` compares a checksum of all bits. That reads the whole tensor, so only the first steps do it,
  and all of them with ``CROSSOVER_CHECK=1``. Code that writes gradients or parameters mostly does so in every step.
"""

import contextlib
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._ddp.contents import is_dense
from crossover_ddp._ddp.digests import fingerprint
from crossover_ddp._engine.journeys import nothing
from crossover_ddp.errors import UnsupportedConfigurationError

Group = dict[str, Any]

SPANS: Final = "torch.optim.optimizer"
_SCHEDULERS: Final = "torch.optim.lr_scheduler"
_MISSING: Final = object()
_TRIED_STEPS: Final = 2
_MARK: Final = "_crossover_ddp_state"
_OURS: Final = ("step", "zero_grad", "__getstate__")
_SAMPLED: Final = 8
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Update(NamedTuple):
    """One parameter and the gradient that is to be applied to it."""

    parameter: torch.Tensor
    gradient: torch.Tensor


class StepPlan(NamedTuple):
    """What ``step()`` would have used when it was called: hyper-parameters, whose they are, and its attributes."""

    groups: list[Group]
    group_of: dict[int, int]
    attributes: dict[str, Any]


class PartialOptimizer:
    """Apply the step of ``optimizer``, which treats each parameter by itself, to some parameters at a time.

    ``is_own``: whether its step is that of its class, but for what torch itself puts around it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # With torch's spans for a profiler, and without: a part of a step has no step hooks, see `is_watched`, and a
        # scheduler counts whole steps.
        self._spanned_step = stripped(optimizer.step, _SCHEDULERS)
        self._bare_step = stripped(optimizer.step, _SCHEDULERS, SPANS)
        self.is_own = self._bare_step is stripped(type(optimizer).step, SPANS)

    def take_whole(self) -> None:
        """Take the step as it is, without torch's spans and hooks."""
        self._bare_step(self.optimizer)

    def plan(self) -> StepPlan:
        """Note the hyper-parameters of this moment, and count the step, see [Note: one step in several parts]."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler wants to see
        groups = self.optimizer.param_groups
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        plan = StepPlan(
            [_hyper_parameters(group) for group in groups], group_of, {**vars(self.optimizer)}
        )
        # What a step changes in groups, and of the optimizer itself.
        empty = [{**group, "params": []} for group in groups]
        after = self._run(self._bare_step, empty, plan.attributes)
        for group, counted in zip(groups, empty, strict=True):
            _take_over(counted, group, group)
        _take_over(after, plan.attributes, vars(self.optimizer))
        return plan

    def apply(self, plan: StepPlan, updates: Iterable[Update]) -> None:
        """Update these parameters as ``plan`` says; their ``.grad`` is left as it was."""
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
        # A profiler gets its span for each part, at a cost that is not paid where there is none.
        step = self._spanned_step if torch.autograd._profiler_enabled() else self._bare_step
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
        """Take a step with other groups; return the attributes that the optimizer has then."""
        shadow: Optimizer = object.__new__(type(self.optimizer))
        shadow.__dict__.update(attributes, param_groups=groups)
        step(shadow)
        return vars(shadow)


def check_separable(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step is not the sum of its parts; its own state is not touched."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, got optimizer={name}; pass the optimizer object"
        )
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if inner or "param_groups" not in vars(optimizer):
        wrapped = f" ({type(inner[0]).__name__})" if inner else ""
        remedy = (
            f"pass the optimizer that it wraps{wrapped}, and go on to call the wrapper's step()"
        )
        if name == "ZeroRedundancyOptimizer":
            remedy = f"give all parameters to the one inside{wrapped}, and use owners='layers', which divides its state"
        raise UnsupportedConfigurationError(
            f"expected an optimizer with param_groups of its own, got {name}, which wraps another; {remedy}"
        )
    # All of torch's own treat each parameter by itself, but two.
    is_torchs = (
        type(optimizer).__module__.startswith("torch.optim.") and PartialOptimizer(optimizer).is_own
    )
    if is_torchs and not isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        return
    try:
        whole, parts = _tried(optimizer, in_parts=False), _tried(optimizer, in_parts=True)
    except Exception as error:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that treats each parameter by itself and needs no closure, got {name}, "
            f"which failed on one parameter at a time ({type(error).__name__}: {error}); use another optimizer or hook"
        ) from error
    found = [
        f"whose param_groups[{index}][{key!r}] becomes {group.get(key)!r} in a step and {counted.get(key)!r} in one "
        "without gradients; use another optimizer or hook"
        for index, (group, counted) in enumerate(
            zip(whole.param_groups, parts.param_groups, strict=True)
        )
        for key in sorted(({*group} | {*counted}) - {"params"})
        if not _same(group.get(key), counted.get(key))
    ]
    if not all(_same(a, b) for a, b in zip(_parameters(whole), _parameters(parts), strict=True)):
        found.append(
            "whose update of one parameter depends on the others (a global norm, randomness); switch that off or use "
            "another hook"
        )
    if found:
        raise UnsupportedConfigurationError(
            f"expected an optimizer that treats each parameter by itself, got {name}, {found[0]}"
        )


def _take_over(after: dict[str, Any], before: dict[str, Any], target: dict[str, Any]) -> None:
    """Write into ``target`` what a step has changed in other keys than those of parameters."""
    for key, value in after.items():
        if key not in ("params", "param_groups") and before.get(key, _MISSING) is not value:
            target[key] = value


def stripped(step: Callable[..., Any], *modules: str) -> Callable[..., Any]:
    """Strip from ``step`` what these modules of torch put around it."""
    function: Any = getattr(step, "__func__", step)
    # By its code: functools.wraps copies names and marks.
    while getattr(getattr(function, "__code__", None), "co_name", None) == "wrapper":
        if function.__globals__.get("__name__") not in modules:
            break
        function = function.__wrapped__
    return cast(Callable[..., Any], function)


def _tried(optimizer: Optimizer, *, in_parts: bool) -> Optimizer:
    """Take some steps with a copy of ``optimizer`` on tiny parameters; return it.

    Parts come in the order opposite to that of a step: what is drawn for each parameter then shows.
    """
    groups = []
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        tiny = [p.new_empty((2,) * p.dim()) for p in (trained[0], trained[-1])] if trained else []
        groups.append(
            (group, [_ramp(p, 0.5 + place).requires_grad_() for place, p in enumerate(tiny)])
        )
    copy = copy_on(optimizer, groups)
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
    """Return a copy of ``optimizer`` without state, for each of some of its groups with other parameters."""
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(vars(optimizer))
    for name in _OURS:
        copy.__dict__.pop(name, None)
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    copy.state = defaultdict(dict)
    copy.param_groups = [
        {**_hyper_parameters(group), "params": parameters} for group, parameters in groups
    ]
    return copy


def _ramp(like: torch.Tensor, start: float) -> torch.Tensor:
    """Return numbers from ``start`` on, one more each, of the shape and type of ``like``: beyond any limit of norms."""
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


class GuardedList(list[torch.Tensor]):
    """The parameters of a group; says when somebody goes through them. Copies of it are plain lists."""

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

    def __radd__(self, other: Any) -> Any:  # list.__add__ would read around ``__iter__``
        return other + self.copy()

    def copy(self) -> list[torch.Tensor]:
        """Make a plain list."""
        return [*self]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return list, ([*self],)


def _reported(name: str) -> Any:
    """Return the method of that name of a dictionary's, which first calls ``look``."""
    original = getattr(defaultdict, name)

    @functools.wraps(original)
    def method(self: "GuardedState", *args: Any, **kwargs: Any) -> Any:
        self.look()
        return original(self, *args, **kwargs)

    return method


class GuardedState(defaultdict[torch.Tensor, dict[str, Any]]):
    """The state of an optimizer; reports each access by user code. Copies of it are plain dictionaries."""

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
        """Make a plain dictionary."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.items()))


def check_not_intercepted(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has a state already."""
    if getattr(optimizer, _MARK, None) is not None:
        raise UnsupportedConfigurationError(
            "expected an optimizer without a DecoupledState or MuonState, got one that has another already; make one "
            "optimizer for each model, or close() the other state"
        )


def is_watched(optimizer: Optimizer) -> bool:
    """Tell whether user code has registered hooks that expect a whole step."""
    found: list[Any] = []
    for when in ("pre", "post"):
        found += getattr(optimizer_module, f"_global_optimizer_{when}_hooks", {}).values()
        found += getattr(optimizer, f"_optimizer_step_{when}_hooks", {}).values()
    return not all([isinstance(hook, OwnHook) for hook in found])


def check_unhooked(optimizer: Optimizer) -> None:
    """Refuse hooks of a step that owners take."""
    if is_watched(optimizer):
        raise UnsupportedConfigurationError(
            "expected no step hooks where parameters have owners, got some (register_step_pre_hook, "
            "register_step_post_hook, a profiler's): parameters are not updated when torch calls them; remove them "
            "and act after step(), or use a DecoupledState with owners=None"
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
    """Have ours called in the place of the optimizer's own methods; close what is returned to end it.

    Args:
        optimizer: without a state of ours.
        on_step: called in the place of ``step`` with the original one, after a closure.
        on_zero_grad: called after ``zero_grad``.
        on_look: called before user code goes through the parameters in the groups.
        on_state: called before user code reads or writes ``optimizer.state``, see [Note: state of an optimizer].
        flush: called before somebody needs everything up to date.
        unwatched: entered where this thread goes through parameters without reading values.
    """
    stack = contextlib.ExitStack()
    own = {name: vars(optimizer).get(name) for name in _OURS}
    original_step, original_zero_grad = optimizer.step, optimizer.zero_grad
    original_getstate = optimizer.__getstate__

    @functools.wraps(original_step)
    @uncompiled
    def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return on_step(original_step)
        with torch.enable_grad():  # as torch's optimizers do: once, before they look at gradients
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
        """A copy or a pickle takes momentum before it goes through the groups."""
        flush()
        return original_getstate()

    # Methods, since learning-rate schedulers wrap ``optimizer.step.__func__``.
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
            # A scheduler may have wrapped ours meanwhile; ours hands everything on by now.
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
    """Guard the lists of parameters in all groups; there may be new groups."""
    for group in optimizer.param_groups:
        if type(group["params"]) is not GuardedList:
            group["params"] = GuardedList(group["params"], look)


def guard_state(optimizer: Optimizer, look: Callable[[], None]) -> None:
    """Guard the optimizer's state; it may have been replaced since the last call."""
    if type(optimizer.state) is not GuardedState:
        optimizer.state = GuardedState(optimizer.state, look)


# --- tensors that user code is not to write ------------------------------------------------------------------------


class Seal:
    """Tensors as they are now: their version counters, and where they begin in memory.

    Args:
        tensors: that only this package may write from now on.
        bits: also note a checksum of their bits, see [Note: changes that no counter sees].
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, bits: bool = False) -> None:
        self._noted = [
            (each, each._version, each.data_ptr(), fingerprint(each) if bits else None)
            for each in tensors
        ]

    @property
    def is_broken(self) -> bool:
        """Whether one of the tensors was written since."""
        for tensor, version, begin, _ in self._noted:
            if tensor._version != version or tensor.data_ptr() != begin:
                return True
        return any(
            [
                bits is not None and not torch.equal(fingerprint(tensor), bits)
                for tensor, _, _, bits in self._noted
            ]
        )


class Sample:
    """The bits of a few elements of each tensor, see [Note: changes that no counter sees].

    On a device, `differs` makes the host wait.

    Args:
        tensors: of one device.
        views: of the elements that are looked at, by the tensor's id; filled here, so that later samples are cheaper.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], views: dict[int, torch.Tensor]) -> None:
        self._views = [found for each in tensors for found in _sampled(each, views)]
        self._noted = self._read()

    def differs(self) -> bool:
        """Tell whether one of the elements has other bits than it had."""
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
    """Return a view of some elements, spread over the tensor, as integers; none of a tensor that has gaps."""
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
