"""Moving averages whose own update runs in parts, as the parameters that they follow are updated.

[Note: an average in parts] A moving average is updated after `step()`, when most parameters still
await their update. `Following` takes over its method, and runs the class's own code several times.
At the call, the code sees those parameters that are up to date, and all buffers. Counters and other
attributes change then. Whenever a bucket is updated, the code sees the parameters of that bucket,
and the average's attributes as they were at the call. In between, every read of the average through
a module or a method completes the rest first.

This gives the bits of one update only if the code treats each tensor by itself. That is tried once,
on small tensors of the same types. An average that fails (a norm over all parameters, stochastic
rounding with one generator for all) is updated all at once, and waits for the parameters.
"""

import contextlib
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

from .guards import Guards
from .pending import Pending, as_in_step

logger = logging.getLogger(__name__)

_METHODS: Final = ("update_parameters", "update")
_LIST: Final = "shadow_params"
_MODULES: Final = ("module", "ema")
# The names of the argument that an update reads, if it is passed by name.
_ARGUMENTS: Final = ("model", "parameters")
_TRIED_UPDATES: Final = 3
# The attributes of a module that hold its tensors.
_TENSORS: Final = ("_parameters", "_modules")

# Returns the arguments of a call, given the model or parameters that it is to read.
Arguments = Callable[[object], tuple[tuple[Any, ...], dict[str, Any]]]


class _Pair(NamedTuple):
    """One tensor of the average, and the tensor of the model that it follows."""

    name: str
    mine: torch.Tensor
    theirs: torch.Tensor


class _Part(NamedTuple):
    """The tensors that an update sees, and the names of buffers that are not in state dicts."""

    parameters: Sequence[_Pair]
    buffers: Sequence[_Pair] = ()
    hidden: frozenset[str] = frozenset()


class _Flat(nn.Module):
    """A module of one level with tensors under their full names, as an average's code sees it."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        hidden: Iterable[str],
    ) -> None:
        super().__init__()
        # Written past `register_parameter`, which allows no dots in names.
        vars(self)["_parameters"].update(parameters)
        vars(self)["_buffers"].update(buffers)
        self._non_persistent_buffers_set = {*hidden}


@dataclass(eq=False, slots=True)
class _Call:
    """A call of the average's update that is not complete.

    Attributes:
        arguments: makes the call's arguments.
        average: a copy of the average's attributes at the call.
        waiting: the pairs whose parameter is not up to date, by the parameter's id.
    """

    arguments: Arguments
    average: object
    waiting: dict[int, list[_Pair]]


class Following:
    """Updates an average in parts; see [Note: an average in parts].

    Made by `DeferredState.follow`.

    Args:
        average: the average.
        pending: the pending updates of the model that it follows.

    On failure: raises ``TypeError`` if ``average`` is of an unknown kind.
    """

    def __init__(self, average: Any, pending: Pending) -> None:
        self.average = average
        self._pending = pending
        self._class: type[Any] = type(average)
        if isinstance(getattr(self._class, "following", None), Following):
            raise UnsupportedConfigurationError(
                f"expected an average that no state follows, got average={self._class.__name__}, "
                "which one does; call remove() of its handle first"
            )
        method = next((n for n in _METHODS if callable(getattr(self._class, n, None))), None)
        holder = _holder_of(average)
        if method is None or holder is None:
            raise TypeError(
                "expected a moving average with update(model) or update_parameters(model) and one "
                "copy of the model in .module (timm's ModelEmaV3, AveragedModel), or with a list "
                f"shadow_params (torch_ema), got average={self._class.__name__}; use on_update()"
            )
        self.method = method
        # The attribute with the average's module or list.
        self._holder = holder
        # The incomplete calls, in their order.
        self._calls: list[_Call] = []
        # Whether the update gives the same bits in parts. None until it has been tried.
        self._is_separable: bool | None = None
        module = average if isinstance(average, nn.Module) else vars(average).get(holder)
        self._guards: Guards | None = None
        if isinstance(module, nn.Module):
            self._guards = Guards(
                module,
                is_fresh=lambda _: not self._calls,
                reads=self.complete,
                before=lambda: None,
            )
        self._listener = RemovableHandle(pending.listeners)
        pending.listeners[self._listener.id] = self._parameters_updated
        average.__class__ = _followed_class(self, self._class)

    def remove(self) -> None:
        """Complete the average's updates, and leave it to itself. It may be called again."""
        self.complete()
        self._listener.remove()
        if self._guards is not None:
            self._guards.close()
        self._calls = []
        if getattr(type(self.average), "following", None) is self:
            self.average.__class__ = self._class

    def complete(self, *_: object) -> None:
        """Apply all pending updates, to the parameters and then to the average."""
        self._pending.state_is_read()

    # --- the call --------------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Update the average as far as parameters are up to date. This replaces its own method.

        Returns:
            The result of the average's own method.
        """
        update = getattr(self._class, self.method)
        pending = self._pending
        with pending.lock:
            late = {id(p) for each in pending.unread for p in each.updated}
            if not late:
                return update(self.average, *args, **kwargs)
            source, arguments = _taken_apart(args, kwargs)
            with pending.unwatched():
                if self._holder == _LIST and source is not None:
                    source = [*cast(Iterable[torch.Tensor], source)]  # it may be an iterator
                    args, kwargs = arguments(source)
                whole = self._paired_with(source)
                if whole is not None and self._is_separable is None:
                    self._is_separable = self._try(whole, source, arguments)
            if whole is None or not self._is_separable:
                self.complete()
                return update(self.average, *args, **kwargs)
            waiting: dict[int, list[_Pair]] = {}
            fresh: list[_Pair] = []
            for pair in whole.parameters:
                if id(pair.theirs) in late:
                    waiting.setdefault(id(pair.theirs), []).append(pair)
                else:
                    fresh.append(pair)
            call = _Call(arguments, _copied(self.average, self._class), waiting)
            # Some code that takes lists of tensors raises if they are empty.
            part = whole._replace(parameters=fresh or [_scratch(whole.parameters[0], 1)])
            shown = self._showing(self.average, part)
            # Before the code runs, because it may read parameters, which updates them.
            self._calls.append(call)
            result = self._run(shown, arguments, part)
            shown_only = {self._holder, *_TENSORS}
            kept = {name: v for name, v in vars(shown).items() if name not in shown_only}
            vars(self.average).update(kept)
            self._note_calls()
            return result

    def _paired_with(self, source: object) -> _Part | None:
        """Pair the average's tensors with those of ``source``; None if they do not correspond."""
        if self._holder == _LIST:
            mine = vars(self.average)[_LIST]
            theirs = self._referenced() if source is None else cast(list[torch.Tensor], source)
            pairs = _paired(dict(enumerate(mine)), dict(enumerate(theirs)))
            return _Part(pairs) if pairs else None
        if not isinstance(source, nn.Module):
            return None
        own = _flattened(self._module)
        found = _flattened(source)
        pairs = _paired(own._parameters, found._parameters)
        buffers = _paired(torch_private.own_buffers(own), torch_private.own_buffers(found))
        if not pairs or buffers is None:
            return None
        return _Part(pairs, buffers, frozenset(own._non_persistent_buffers_set))

    @property
    def _module(self) -> nn.Module:
        """The average's copy of the model."""
        if isinstance(self.average, nn.Module):
            return cast(nn.Module, torch_private.submodules_of(self.average)[self._holder])
        return cast(nn.Module, vars(self.average)[self._holder])

    def _referenced(self) -> list[torch.Tensor]:
        """Return the parameters that the average itself refers to; none if they are not found."""
        for value in vars(self.average).values():
            if isinstance(value, list) and len(value) == len(vars(self.average)[_LIST]):
                found = [each() if isinstance(each, weakref.ref) else each for each in value]
                if all([isinstance(each, nn.Parameter) for each in found]):
                    return cast(list[torch.Tensor], found)
        return []

    # --- a part ----------------------------------------------------------------------------------

    def _parameters_updated(self, new: Sequence[torch.Tensor]) -> None:
        """Continue the calls that await ``new`` parameters, in their order."""
        for call in [*self._calls]:
            pairs = [pair for p in new for pair in call.waiting.pop(id(p), ())]
            if pairs:
                with as_in_step(new[0].device.type):
                    # Each part gets its own copy: it may count the update.
                    average = _copied(call.average, self._class)
                    part = _Part(pairs)
                    self._run(self._showing(average, part), call.arguments, part)
        self._note_calls()

    def _note_calls(self) -> None:
        """Forget complete calls, and guard the average while there are others."""
        self._calls = [call for call in self._calls if call.waiting]
        if self._guards is not None:
            if self._calls:
                self._guards.up()
            else:
                self._guards.down()

    def _showing(self, average: object, part: _Part) -> object:
        """Return an object of the average's own class that has only some of its tensors."""
        shown = object.__new__(self._class)
        attributes = vars(shown)
        attributes.update(vars(average))
        if self._holder == _LIST:
            attributes[_LIST] = [pair.mine for pair in part.parameters]
            return shown
        flat = _Flat(
            {each.name: each.mine for each in part.parameters},
            {each.name: each.mine for each in part.buffers},
            part.hidden,
        )
        if isinstance(shown, nn.Module):
            attributes["_parameters"] = {}
            attributes["_modules"] = {self._holder: flat}
        else:
            attributes[self._holder] = flat
        return shown

    def _run(self, shown: object, arguments: Arguments, part: _Part) -> Any:
        """Run the average's own update on ``shown``, with the same part of the model."""
        source: object = [pair.theirs for pair in part.parameters]
        if self._holder != _LIST:
            source = _Flat(
                {each.name: each.theirs for each in part.parameters},
                {each.name: each.theirs for each in part.buffers},
                part.hidden,
            )
        args, kwargs = arguments(source)
        return getattr(self._class, self.method)(shown, *args, **kwargs)

    # --- the trial -------------------------------------------------------------------------------

    def _try(self, whole: _Part, source: object, arguments: Arguments) -> bool:
        """Return whether the update gives the same bits in parts; report it if it does not."""
        is_separable = self._shows_all(source) and self._gives_same_bits(whole, arguments)
        if not is_separable:
            logger.info(
                "%s is not updated in parts, and waits for the network: its update treats tensors "
                "together or draws random numbers, or state dicts hold other values as well",
                self._class.__name__,
            )
        return is_separable

    def _shows_all(self, source: object) -> bool:
        """Return whether the state dicts hold the tensors of the modules, and nothing else."""
        if self._holder == _LIST:
            return True
        return all(
            [
                {*module.state_dict()} == {*_flattened(module).state_dict()}
                for module in (self._module, cast(nn.Module, source))
            ]
        )

    def _gives_same_bits(self, whole: _Part, arguments: Arguments) -> bool:
        """Compare updates of small tensors, all at once and in parts. The average is unchanged."""
        kinds = {
            (pair.mine.dtype, pair.mine.device, pair.theirs.dtype, pair.theirs.device): pair
            for pair in whole.parameters
            if pair.theirs.is_floating_point() or pair.theirs.is_complex()
        }

        def updated(*lengths: int) -> list[torch.Tensor]:
            part = _Part([_scratch(pair, n) for n in lengths for pair in kinds.values()])
            shown = self._showing(_copied(self.average, self._class), part)
            for _ in range(_TRIED_UPDATES):
                self._run(shown, arguments, part)
                for pair in part.parameters:
                    pair.theirs.mul_(-0.7)
            return [pair.mine for pair in part.parameters]

        with _generators_kept(self.average) as has_drawn, torch.no_grad():
            try:
                at_once = updated(2, 3)
                in_parts = updated(2) + updated(3)
            except Exception:
                logger.debug("an update in parts raised", exc_info=True)
                return False
            return not has_drawn() and all(map(torch.equal, at_once, in_parts))


# --- kinds of averages ---------------------------------------------------------------------------


def _holder_of(average: object) -> str | None:
    """Return the attribute that has the averaged tensors; None if the average is of another kind.

    Its module must be the only one, because other parameters would not be updated.
    """
    attributes = getattr(average, "__dict__", {})
    if isinstance(average, nn.Module):
        known = [*torch_private.submodules_of(average)] == [
            "module"
        ] and not torch_private.own_parameters(average)
        return "module" if known else None
    if isinstance(attributes.get(_LIST), list):
        return _LIST
    return next((n for n in _MODULES if isinstance(attributes.get(n), nn.Module)), None)


def _followed_class(following: Following, own: type[Any]) -> type[Any]:
    """Return a class for one average, whose update and reads ``following`` takes over.

    The class of the average is changed rather than its attributes, so that a copy or a pickle of it
    is an ordinary average.
    """

    def update(average: Any, *args: Any, **kwargs: Any) -> Any:
        if average is following.average:  # not a copy of it
            return following.update(*args, **kwargs)
        return getattr(own, following.method)(average, *args, **kwargs)

    def reduced(average: Any, protocol: Any) -> Any:
        following.complete()
        result: Any = own.__reduce_ex__(average, protocol)  # type: ignore[call-arg]  # unbound
        if isinstance(result, str):
            return result
        arguments = tuple(own if each is type(average) else each for each in result[1])
        # With `copyreg.__newobj__`, pickle would compare the class with the average's.
        made_by = own.__new__ if result[0].__name__ == "__newobj__" else result[0]
        return (made_by, arguments, *result[2:])

    def completing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def complete(average: Any, *args: Any, **kwargs: Any) -> Any:
            following.complete()
            return method(average, *args, **kwargs)

        return complete

    def get(average: Any) -> Any:
        return vars(average)[_LIST]

    def replace(average: Any, value: Any) -> None:
        vars(average)[_LIST] = value

    members: dict[str, Any] = {}
    if not issubclass(own, nn.Module):
        # Such an average reads parameters through references of its own, past all guards.
        for name in dir(own):
            method = inspect.getattr_static(own, name)
            if not name.startswith("_") and isinstance(method, types.FunctionType):
                members[name] = completing(method)
    if _LIST in vars(following.average):
        members[_LIST] = property(completing(get), completing(replace))
    members |= {
        following.method: functools.wraps(getattr(own, following.method))(update),
        "__reduce_ex__": reduced,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "following": following,
    }
    return type(own.__name__, (own,), members)


# --- tensors and attributes ----------------------------------------------------------------------


def _taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, Arguments]:
    """Return the model that an update reads, None by default, and a function to replace it."""
    if args:
        return args[0], lambda source: ((source, *args[1:]), kwargs)
    name = next((each for each in _ARGUMENTS if each in kwargs), None)
    if name is None:
        return None, lambda source: ((source,), kwargs)
    return kwargs[name], lambda source: ((), {**kwargs, name: source})


def _flattened(module: nn.Module) -> _Flat:
    """Return a module's tensors under their full names, without triggering pending updates."""
    parameters = dict[str, torch.Tensor]()
    buffers = dict[str, torch.Tensor]()
    hidden = set[str]()
    for prefix, each in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for name, parameter in dict.items(each._parameters):  # past the guards
            if parameter is not None:
                parameters[start + name] = parameter
        for name, buffer in torch_private.own_buffers(each).items():
            if buffer is not None:
                buffers[start + name] = buffer
        hidden.update([start + name for name in each._non_persistent_buffers_set])
    return _Flat(parameters, buffers, hidden)


def _paired(mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> list[_Pair] | None:
    """Pair tensors by their order; None if there are not as many, or a name or a shape differs."""
    if len(mine) != len(theirs):
        return None
    pairs = []
    for (name, tensor), (other, their_tensor) in zip(mine.items(), theirs.items(), strict=True):
        is_same = name == other or _bare(name) == _bare(other)
        if not is_same or tensor.shape != their_tensor.shape:
            return None
        pairs.append(_Pair(str(name), tensor, their_tensor))
    return pairs


def _bare(name: str) -> str:
    """Return a tensor's name without the prefixes of DDP and of compiled modules."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _copied(average: object, own: type[Any]) -> object:
    """Return an object with the attributes of ``average`` and its own counters."""
    copied = object.__new__(own)
    for name, value in vars(average).items():
        vars(copied)[name] = value if name in _TENSORS else _own_counters(value)
    return copied


def _own_counters(value: Any) -> Any:
    """Return a copy of counters, that is, of tensors of one element. Dictionaries are copied."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.clone()
    if isinstance(value, dict):
        return {key: _own_counters(each) for key, each in value.items()}
    return value


def _scratch(pair: _Pair, length: int) -> _Pair:
    """Return a pair of small tensors of the same types as ``pair``."""
    values = torch.linspace(0.1, 2.3, length)
    mine = values.to(pair.mine.device, pair.mine.dtype)
    theirs = values.flip(0).to(pair.theirs.device, pair.theirs.dtype) - 1
    return _Pair(f"scratch {length} {mine.dtype} {theirs.dtype}", mine, theirs)


@contextlib.contextmanager
def _generators_kept(average: object) -> Iterator[Callable[[], bool]]:
    """Restore random generators afterwards; yield a function that returns whether any was used."""
    own = [each for each in vars(average).values() if isinstance(each, torch.Generator)]
    generators = [torch.default_generator, *own]
    states = [each.get_state() for each in generators]

    def has_drawn() -> bool:
        now = [each.get_state() for each in generators]
        return not all(map(torch.equal, states, now))

    try:
        yield has_drawn
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
