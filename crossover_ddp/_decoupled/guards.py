"""A read of a parameter whose update is pending applies the update first.

[Note: no stale read] Parameters are read in two ways: by the forward of the module that has them, and by anybody
who asks a module for them (``module.weight``, ``parameters()``, ``state_dict()``, an exponential moving average,
tied weights in another module's forward). A forward pre-hook sees the first, also where a module keeps references
of its own (``nn.LSTM``); a dictionary in the place of ``module._parameters`` sees the second. Guards are up only
while something is pending, see [Note: compiled code and guards].

[Note: reads that nobody sees] A module may keep another one's parameter outside of ``_parameters``. Forward then reads
it past the guards. So a parameter counts as guarded only when a forward has read it through a guard; one that has
not is brought up to date before any forward.

[Note: compiled code and guards] Dynamo traces Python hooks and dictionaries and compiles anew when what they look
at has changed. So nothing of ours may be in sight while compiled code runs: what it reads is brought up to date, and
the guards are taken away, before it is entered, from outside of the graph. All functions of ours that may be called
from traced code are disabled for dynamo.
"""

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from types import CodeType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp.errors import UnsupportedConfigurationError

Entry = nn.Parameter | None
Reads = Callable[[Iterable[torch.Tensor | None]], None]


class GuardedParameters(dict[str, Entry]):
    """The parameters of one module, up to date whenever they are read. Copies of it are plain dictionaries."""

    def __init__(
        self, entries: dict[str, Entry], is_fresh: Callable[[Entry], bool], reads: Reads
    ) -> None:
        super().__init__(entries)
        self._is_fresh, self._reads = is_fresh, reads

    def __getitem__(self, name: str) -> Entry:
        entry = dict.__getitem__(self, name)
        if not self._is_fresh(
            entry
        ):  # `reads` keeps dynamo out, which costs as much as a small layer
            self._reads((entry,))
        return entry

    # Overriding it keeps ``dict(self)`` and ``{**self}`` from reading around ``__getitem__``.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """As ``dict.get``."""
        return self[name] if name in self else default  # noqa: SIM401  # that would be this very method

    def items(self) -> ItemsView[str, Entry]:  # type: ignore[override]  # the view is of a private class
        """As ``dict.items``."""
        self._reads(super().values())
        return super().items()

    def values(self) -> ValuesView[Entry]:  # type: ignore[override]  # the same
        """As ``dict.values``."""
        self._reads(super().values())
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        """As ``dict.pop``."""
        if name in self:
            self._reads((super().__getitem__(name),))
        return super().pop(name, *default)

    def copy(self) -> dict[str, Entry]:
        """Make a plain dictionary."""
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class _Guard:
    """The guard of one module: a dictionary in the place of its parameters, and a hook unless it is compiled."""

    __slots__ = ("call", "count", "guarded", "hook", "module", "plain")

    def __init__(self, module: nn.Module, hook: OwnHook | None) -> None:
        self.module, self.hook = module, hook
        self.plain: dict[str, Entry] = module._parameters
        self.guarded: GuardedParameters | None = None
        self.count = len(self.plain)
        self.call = compiled_call(module)

    @property
    def is_as_before(self) -> bool:
        """Whether the module has the parameters, and runs the code, that it had."""
        variables = vars(self.module)
        return (
            len(variables["_parameters"]) == self.count
            and variables.get("_compiled_call_impl") is self.call
        )

    def up(self, is_fresh: Callable[[Entry], bool], reads: Reads, key: int) -> None:
        variables = vars(self.module)
        self.plain = variables["_parameters"]
        self.guarded = variables["_parameters"] = GuardedParameters(self.plain, is_fresh, reads)
        if self.hook is not None:
            hooks = variables["_forward_pre_hooks"]
            hooks[key] = self.hook
            hooks.move_to_end(key, last=False)

    def down(self, key: int) -> None:
        if self.guarded is None:
            return
        variables, guarded, self.guarded = vars(self.module), self.guarded, None
        if self.hook is not None:
            variables["_forward_pre_hooks"].pop(key, None)
        if variables["_parameters"] is not guarded:
            return
        if [(n, id(p)) for n, p in dict.items(guarded)] != [
            (n, id(p)) for n, p in self.plain.items()
        ]:
            # Only then: a thread that saves may be going through it.
            self.plain.clear()
            self.plain.update(dict.items(guarded))
        variables["_parameters"] = self.plain


class Guards:
    """Guards of all parameters of ``network``, up or down.

    Args:
        network: of the model.
        is_fresh: tells whether nothing is to be done before a parameter is read.
        reads: called with parameters that somebody is about to read; whatever is pending for them is done then.
        before: called before the forward of any guarded module.

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
        self._is_fresh, self._reads, self._before = is_fresh, reads, before
        self._uncompiled_reads = uncompiled(reads)
        self._hook = OwnHook(uncompiled(self.before_forward))
        self.key = RemovableHandle(OrderedDict()).id  # of a hook, unique in the process
        self._guards: list[_Guard] = []
        self._regions = contextlib.ExitStack()
        self._scan()

    def up(self) -> None:
        """See every read from now on."""
        if self.are_up:
            return
        ids = [*map(id, self.network.modules())]  # 0.5 µs each
        if ids != self._ids or not all([guard.is_as_before for guard in self._guards]):
            self._scan()
        self.are_up = True
        for guard in self._guards:
            guard.up(self._is_fresh, self._uncompiled_reads, self.key)

    def down(self) -> None:
        """Leave the network as it was."""
        if self.are_up:
            self.are_up = False
            for guard in self._guards:
                guard.down(self.key)

    def before_forward(self, module: nn.Module, *_: Any) -> None:
        """See what the module's forward reads through references of its own."""
        self._before()
        self._reads([*dict.values(module._parameters)])

    def close(self) -> None:
        """Let the network go."""
        self.down()
        self._regions.close()

    def _scan(self) -> None:
        """Look at all modules: there may be new ones, or some may have been compiled since."""
        self._regions.close()
        modules = [*self.network.named_modules()]
        self._ids = [id(module) for _, module in modules]
        scripted = [
            name or "the model" for name, m in modules if isinstance(m, torch.jit.ScriptModule)
        ]
        if scripted:
            raise UnsupportedConfigurationError(
                f"expected modules whose parameters are read in Python, got {scripted[0]} made by torch.jit; train the "
                "module that it was made of and script it afterwards, or use crossover_hook"
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
        """Have all in ``entry``, which is compiled as a whole, brought up to date when it is entered."""

        @uncompiled
        def bring_up_to_date() -> None:
            if self.are_up:
                for guard in guards:
                    self.before_forward(guard.module)
                    guard.down(self.key)

        def enter(*_: Any) -> None:
            # Inside of a larger graph the entry of that graph has done this already.
            if not torch.compiler.is_compiling():
                bring_up_to_date()

        if (call := compiled_call(entry)) is None:
            self._regions.callback(
                entry.register_forward_pre_hook(OwnHook(enter), prepend=True).remove
            )
            return

        def entered(*args: Any, **kwargs: Any) -> Any:
            enter()
            return call(*args, **kwargs)

        def restore() -> None:
            if variables.get("_compiled_call_impl") is entered:
                variables["_compiled_call_impl"] = call

        variables = vars(entry)
        variables["_compiled_call_impl"] = entered
        self._regions.callback(restore)


# --- compiled code -----------------------------------------------------------------------------------


def called_by_compiled_code() -> bool:
    """Tell whether some caller was called by torch.compile, so that what the caller calls next may be compiled."""
    # Code that keeps dynamo out, as ours does, is in dynamo's modules too.
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
    """Yield the outermost modules of ``network`` that run compiled code or a CUDA graph when they are called."""
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
    """Tell whether ``module``, as a whole, is replaced by compiled code or a CUDA graph, which asks nothing of it."""
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or compiled_call(module) is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        or getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"
    )


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what ``module.compile()`` has made."""
    return cast(Callable[..., Any] | None, vars(module).get("_compiled_call_impl"))
