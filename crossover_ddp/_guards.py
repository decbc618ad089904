"""Whoever reads a parameter whose update is still to come makes it come first.

[Note: no stale read] Parameters are read in two ways: by the forward of the module that has them, and by anybody
who asks a module for them (``module.weight``, ``parameters()``, ``state_dict()``, an exponential moving average,
tied weights in another module's forward). A forward pre-hook sees the first, also where a module keeps references
of its own (``nn.LSTM``); a dictionary in the place of ``module._parameters`` sees the second. What nobody
can see is a tensor that somebody got before and reads directly.
"""

import contextlib
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any, Generic, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

Entry = nn.Parameter | None
Pending = TypeVar("Pending")


class Watch(Generic[Pending]):
    """The parameters that must not be read as they are, and what to do about it.

    ``stale`` says by the parameter's id what is pending for it.

    Args:
        update: do what is pending; whatever is up to date then leaves ``stale``.
    """

    def __init__(self, update: Callable[[Pending], None]) -> None:
        self.stale: dict[int, Pending] = {}
        self.order: dict[int, int] = {}
        self.recording = False
        self._update = update

    def reads(self, parameters: Iterable[Entry]) -> None:
        """Somebody is about to read these parameters."""
        for parameter in parameters:
            if parameter is not None:
                if self.recording:
                    self.order.setdefault(id(parameter), len(self.order))
                if id(parameter) in self.stale:
                    self._update(self.stale[id(parameter)])

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """See what the module's forward reads through references of its own."""
        parameters = module._parameters
        if (self.stale or self.recording) and isinstance(parameters, GuardedParameters):
            self.reads(parameters.unguarded())


class GuardedParameters(dict[str, Entry]):
    """The parameters of one module, up to date whenever they are read. Copies of it are plain dictionaries."""

    def __init__(self, entries: dict[str, Entry], watch: Watch[Any]) -> None:
        super().__init__(entries)
        self._watch = watch

    def unguarded(self) -> ValuesView[Entry]:
        """Return the parameters as they are."""
        return super().values()

    def __getitem__(self, name: str) -> Entry:
        entry = dict.__getitem__(self, name)
        watch = self._watch
        if id(entry) in watch.stale or watch.recording:
            watch.reads((entry,))
        return entry

    # Overriding it keeps ``dict(self)`` and ``{**self}`` from reading around ``__getitem__``.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """As ``dict.get``."""
        return self[name] if name in self else default  # noqa: SIM401  # that would be this very method

    def items(self) -> ItemsView[str, Entry]:  # type: ignore[override]  # the view is of a private class
        """As ``dict.items``."""
        self._watch.reads(super().values())
        return super().items()

    def values(self) -> ValuesView[Entry]:  # type: ignore[override]  # the same
        """As ``dict.values``."""
        self._watch.reads(super().values())
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        """As ``dict.pop``."""
        if name in self:
            self._watch.reads((super().__getitem__(name),))
        return super().pop(name, *default)

    def copy(self) -> dict[str, Entry]:
        """Make a plain dictionary."""
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class OwnHook:
    """A hook of a module, for this module only: a copy gets one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, ()


def guard(network: nn.Module, watch: Watch[Any]) -> contextlib.ExitStack:
    """Guard all parameters of ``network``; close what is returned to end it."""
    stack = contextlib.ExitStack()
    before_forward = OwnHook(watch.before_forward)
    for module in network.modules():
        if module._parameters:
            stack.callback(_unguard, module)
            module.__dict__["_parameters"] = GuardedParameters(dict(module._parameters), watch)
            handle: RemovableHandle = module.register_forward_pre_hook(before_forward, prepend=True)
            stack.callback(handle.remove)
    return stack


def _unguard(module: nn.Module) -> None:
    module.__dict__["_parameters"] = dict(module._parameters)
