"""Guards that apply a parameter's pending update before the parameter is read.

[Note: no stale read] Parameters are read in two ways: by the forward of the module that has them,
and by code that asks a module for them (``module.weight``, ``parameters()``, ``state_dict()``, an
exponential moving average, tied weights in another module's forward). A forward pre-hook notices
the first kind, even if a module keeps its own references (``nn.LSTM``). A dictionary that replaces
``module._parameters`` notices the second. Guards are up only while something is pending; see [Note:
compiled code and guards].

[Note: unseen reads] A module may keep another module's parameter outside ``_parameters``. Its
forward then bypasses the guards when it reads the parameter. So a parameter counts as guarded only
once a forward has read it through a guard. Until then, it is updated before every forward.

[Note: compiled code and guards] Dynamo traces Python hooks and dictionaries, and recompiles when
they change. So it must not see any of ours while compiled code runs. Before compiled code is
entered, and outside its graph, the parameters that it reads are updated and their guards are taken
down. All our functions that traced code may call are disabled for dynamo.
"""

import contextlib
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from types import CodeType, FrameType
from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from crossover_ddp._ddp.compiled import OwnHook, Region, uncompiled
from crossover_ddp.errors import UnsupportedConfigurationError

Entry = nn.Parameter | None
# More than there are between a guard's callback and ``zero_grad``, in any version of torch.
_FRAMES_TO_ZERO_GRAD: Final = 16
_ZERO_GRAD: Final = {
    inspect.unwrap(each.zero_grad).__code__ for each in (nn.Module, torch.optim.Optimizer)
}
Reads = Callable[[Iterable[torch.Tensor | None]], None]


class GuardedParameters(dict[str, Entry]):
    """A module's parameter dictionary, which applies pending updates before each read.

    A copy is a plain dictionary.
    """

    def __init__(
        self, entries: dict[str, Entry], is_fresh: Callable[[Entry], bool], reads: Reads
    ) -> None:
        super().__init__(entries)
        self._is_fresh = is_fresh
        self._reads = reads

    def __getitem__(self, name: str) -> Entry:
        entry = dict.__getitem__(self, name)
        # Avoid calling `reads`: it is disabled for dynamo, and that costs as much as a small layer.
        if not self._is_fresh(entry):
            self._reads((entry,))
        return entry

    # Without this override ``dict(self)`` and ``{**self}`` would bypass ``__getitem__``.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Like ``dict.get``."""
        return self[name] if name in self else default  # noqa: SIM401  # it would call itself

    def items(self) -> ItemsView[str, Entry]:  # type: ignore[override]  # a private view
        """Like ``dict.items``."""
        self._reads(super().values())
        return super().items()

    def values(self) -> ValuesView[Entry]:  # type: ignore[override]  # the same
        """Like ``dict.values``."""
        self._reads(super().values())
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        """Like ``dict.pop``."""
        if name in self:
            self._reads((super().__getitem__(name),))
        return super().pop(name, *default)

    def copy(self) -> dict[str, Entry]:
        """Return a copy as a plain dictionary."""
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class _Guard:
    """The guard of one module, which replaces its parameter dictionary and hooks its forward.

    Args:
        module: the module to guard.
        hook: the hook for its forward; None if the module is compiled.
    """

    __slots__ = ("call", "count", "guarded", "hook", "module", "plain")

    def __init__(self, module: nn.Module, hook: OwnHook | None) -> None:
        self.module = module
        self.hook = hook
        # The module's own dictionary, and the one that replaces it while the guard is up.
        self.plain: dict[str, Entry] = module._parameters
        self.guarded: GuardedParameters | None = None
        # The module's number of parameters and compiled code at the last scan; see `is_as_before`.
        self.count = len(self.plain)
        self.call = compiled_call(module)

    @property
    def is_as_before(self) -> bool:
        """Whether the module's number of parameters and its compiled code are unchanged."""
        variables = vars(self.module)
        return (
            len(variables["_parameters"]) == self.count
            and variables.get("_compiled_call_impl") is self.call
        )

    def up(self, is_fresh: Callable[[Entry], bool], reads: Reads, key: int) -> None:
        """Raise the guard, and register its hook under ``key``."""
        variables = vars(self.module)
        self.plain = variables["_parameters"]
        self.guarded = variables["_parameters"] = GuardedParameters(self.plain, is_fresh, reads)
        if self.hook is not None:
            hooks = variables["_forward_pre_hooks"]
            hooks[key] = self.hook
            hooks.move_to_end(key, last=False)

    def down(self, key: int) -> None:
        """Take the guard down, but keep any changes to the module's parameters."""
        if self.guarded is None:
            return
        variables = vars(self.module)
        guarded = self.guarded
        self.guarded = None
        if self.hook is not None:
            variables["_forward_pre_hooks"].pop(key, None)
        if variables["_parameters"] is not guarded:
            return
        now = [(name, id(parameter)) for name, parameter in dict.items(guarded)]
        if now != [(name, id(parameter)) for name, parameter in self.plain.items()]:
            # Write only if it differs, because a thread that saves may be iterating over it.
            self.plain.clear()
            self.plain.update(dict.items(guarded))
        variables["_parameters"] = self.plain


class Guards:
    """The guards of all parameters of ``network``, which are either all up or all down.

    Args:
        network: the module that DDP wraps.
        is_fresh: a function that returns whether a parameter may be read without calling ``reads``.
        reads: a function to call with parameters before they are read; it applies their pending
            updates.
        before: a function to call before the forward of each guarded module.

    On failure: raises ``UnsupportedConfigurationError`` for modules that cannot be guarded.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        is_fresh: Callable[[Entry], bool],
        reads: Reads,
        before: Callable[[], None],
    ) -> None:
        self.are_up = False
        self.network = network
        self._is_fresh = is_fresh
        self._reads = reads
        self._before = before
        self._uncompiled_reads = uncompiled(reads)
        self._hook = OwnHook(uncompiled(self.before_forward))
        # The hooks' key, which is unique in the process.
        self.key = RemovableHandle(OrderedDict()).id
        self._guards: list[_Guard] = []
        # The compiled modules.
        self.regions: list[Region] = []
        # Undoes the changes to them.
        self._regions = contextlib.ExitStack()
        self._scan()

    def up(self) -> None:
        """Raise all guards."""
        if self.are_up:
            return
        ids = [*map(id, self.network.modules())]  # 0.5 µs each
        if ids != self._ids or not all([guard.is_as_before for guard in self._guards]):
            self._scan()
        self.are_up = True
        for guard in self._guards:
            guard.up(self._is_fresh, self._uncompiled_reads, self.key)

    def down(self) -> None:
        """Take all guards down, so that the network is as it was."""
        if self.are_up:
            self.are_up = False
            for guard in self._guards:
                guard.down(self.key)

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        """Report that the module's parameters are read: forward may use its own references."""
        self._before()
        self._reads([*dict.values(module._parameters)])

    def close(self) -> None:
        """Take all guards down, and undo the changes to compiled modules."""
        self.down()
        self._regions.close()

    def _scan(self) -> None:
        """Find all modules again, since some may be new or newly compiled."""
        self._regions.close()
        self.regions = []
        modules = [*self.network.named_modules()]
        self._ids = [id(module) for _, module in modules]
        scripted = [
            name or "the model" for name, m in modules if isinstance(m, torch.jit.ScriptModule)
        ]
        if scripted:
            raise UnsupportedConfigurationError(
                "expected modules whose parameters are read in Python, got "
                f"{scripted[0]} made by torch.jit; train the module that it was made of and script "
                "it afterwards, or use crossover_hook"
            )
        entries = [*compiled_modules(self.network)]
        inside = {id(module) for entry in entries for module in entry.modules()}
        self._guards = [
            _Guard(module, None if id(module) in inside else self._hook)
            for _, module in modules
            if module is self.network or module._parameters
        ]
        by_module = {id(guard.module): guard for guard in self._guards}
        for entry in entries:
            self._watch(entry, [by_module[id(m)] for m in entry.modules() if id(m) in by_module])
        for guard in self._guards:
            guard.call = compiled_call(guard.module)

    def _watch(self, entry: nn.Module, guards: list[_Guard]) -> None:
        """Make each call of ``entry``, a compiled module, first update all its parameters.

        The call then takes their guards down. If the module runs in pieces that report their
        parameters, these are updated piece by piece; see [Note: pieces] in `_ddp/compiled.py`.
        """

        def parameters() -> list[torch.Tensor]:
            entries = [each for guard in guards for each in guard.plain.values()]
            return [each for each in entries if each is not None]

        region = Region(parameters, self._reads)
        self.regions.append(region)

        @uncompiled
        def update_and_unguard() -> None:
            has_pending = self.are_up and region.is_in_pieces
            if has_pending:
                self._before()
            if self.are_up:
                for guard in guards:
                    if not has_pending:
                        self.before_forward(guard.module)
                    guard.down(self.key)
            region.enter(has_pending=has_pending)

        leave_region = uncompiled(region.leave)

        def enter(*_: Any) -> None:
            # Inside a larger graph, that graph's entry has already done this.
            if not torch.compiler.is_compiling():
                update_and_unguard()

        def leave(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                leave_region()

        if (call := compiled_call(entry)) is None:
            for handle in (
                entry.register_forward_pre_hook(OwnHook(enter), prepend=True),
                entry.register_forward_hook(OwnHook(leave)),
            ):
                self._regions.callback(handle.remove)
            return

        def entered(*args: Any, **kwargs: Any) -> Any:
            enter()
            result = call(*args, **kwargs)
            leave()
            return result

        def restore() -> None:
            if variables.get("_compiled_call_impl") is entered:
                variables["_compiled_call_impl"] = call

        variables = vars(entry)
        variables["_compiled_call_impl"] = entered
        self._regions.callback(restore)


def drops_gradients() -> bool:
    """Return whether ``zero_grad()`` of a model or an optimizer is among the nearest callers.

    It lists all parameters, but reads none of their values. Hugging Face's Trainer calls the
    model's, and Fabric that of an optimizer of its own with the same parameter groups.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_ZERO_GRAD):
        if frame is None:
            return False
        if frame.f_code in _ZERO_GRAD:
            return bool(frame.f_locals.get("set_to_none"))
        frame = frame.f_back
    return False


# --- compiled code -----------------------------------------------------------------------------


def called_by_compiled_code() -> bool:
    """Return whether compiled code is among the callers, so that dynamo may trace what follows."""
    # Code that is disabled for dynamo, such as ours, is also called from a frame of dynamo's.
    disabling = _code_that_disables()
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if (
            frame.f_globals.get("__name__", "").startswith("torch._dynamo.")
            and frame.f_code is not disabling
        ):
            return True
    return False


@functools.cache
def _code_that_disables() -> CodeType:
    return uncompiled(lambda: sys._getframe(1).f_code)()


def compiled_modules(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules in ``network`` that run compiled code or a CUDA graph."""
    seen: set[nn.Module] = set()
    waiting = [network]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if is_compiled(module):
            yield module
        else:
            waiting.extend(reversed([*module.children()]))


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` is replaced by compiled code or a CUDA graph.

    A CUDA graph calls no hooks.
    """
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or compiled_call(module) is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        or getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"
    )


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the callable that ``module.compile()`` created, if any."""
    return cast(Callable[..., Any] | None, vars(module).get("_compiled_call_impl"))
