"""Checks the bucket, the model and the process group that DDP gives to a hook.

A configuration that cannot work is refused with an error that gives the reason and the remedy.

[Note: finding the model]
A bucket has no reference to its model, and DDP passes nothing about the model to a hook. But every
object refers to its class. So if Python's garbage collector is asked for the referrers of
`DistributedDataParallel` and its subclasses, it returns all models. The search takes some tens of
milliseconds for a million objects. It runs once for each model, which `_known_models` remembers. It
does not run for a model that user code has passed to a state.

The collector may return objects that another thread is still building, and CPython's
``tuple(generator)`` raises `SystemError` if another thread holds a reference to its unfinished
tuple. The search can only meet tuples *of these classes*. It drops even those before any other
thread runs, because one call of C code both asks the collector and filters its answer.
"""

import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

from .groups import ranks_of_model

logger = logging.getLogger(__name__)

PYTHON_REDUCER: Final = (
    "expected a bucket of DDP's C++ reducer, got a (gradient, parameter) tuple; "
    "set torch._dynamo.config.optimize_ddp to another value than 'python_reducer'"
)
HIDDEN: Final = (
    "cannot find the DDP model that owns these gradients: gc.freeze() was called before the first "
    "backward(), which hides the model from Python's garbage collector; call gc.freeze() after the "
    "first backward(), or pass model= to the state"
)
CAPTURED: Final = (
    "expected backward outside of a CUDA graph, got a hook that is called while a graph is "
    "captured: a replay calls no hook, so it would exchange nothing and take no turn; capture "
    "forward and backward of the model's parts instead (torch.cuda.make_graphed_callables before "
    "DDP, or torch.compile(mode='reduce-overhead'))"
)

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``process_group``, or the default group for None. Raises if the group is unusable."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise UnsupportedConfigurationError(
            "expected an initialized default process group, got process_group=None; "
            "call torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedConfigurationError(
            "expected a process group that this process belongs to, got "
            f"process_group={group!r}; pass the group that DDP was given"
        )
    return group


def check_keys(
    given: Mapping[str, Any],
    needed: set[str],
    expected: str,
    remedy: str = "pass what state_dict() returned",
    *,
    has_more: bool = False,
) -> None:
    """Raise ``ValueError`` if a needed key is missing.

    Also raise if there are extra keys and ``has_more`` is false. ``expected`` and ``remedy`` are
    parts of the error message.
    """
    if {*given} != needed and not (has_more and needed <= {*given}):
        raise ValueError(f"expected {expected}, got keys {sorted(given)}; {remedy}")


def check_rank(to: int | None, group: dist.ProcessGroup) -> None:
    """Raise ``ValueError`` if ``to`` is neither None nor a rank of ``group``."""
    if to is not None and not 0 <= to < group.size():
        raise ValueError(
            f"expected 0 <= to < {group.size()}, got to={to}; pass a rank of the group, or None"
        )


def check_turn(ranks: Sequence[int] | None, process_group: dist.ProcessGroup) -> None:
    """Refuse a mutex whose ranks are not the ranks of the process group.

    Otherwise another process that takes turns with the mutex would wait for ours.

    Args:
        ranks: the mutex's ranks in the default group. It is empty if the mutex belongs to this
            process alone, and None if any process group will do.
        process_group: the model's process group.
    """
    if ranks is None:
        return
    own = ranks_of_model(process_group)
    theirs = sorted(ranks)
    if own != theirs and (theirs or len(own) > 1):
        raise UnsupportedConfigurationError(
            f"expected a mutex of the ranks {own}, which train this model, got one of "
            f"{theirs or 'this process alone'}: a turn belongs to all its ranks; leave mutex= out, "
            "or make it with GPUMutex(process_group=…) of the model's group"
        )


def flat_gradients(bucket: dist.GradBucket) -> torch.Tensor:
    """Return the bucket's flat buffer. Raises if the hooks cannot exchange its layout or dtype."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise UnsupportedConfigurationError(
            f"expected dense gradients, got bucket {bucket.index()} with layout={buffer.layout}; "
            "build the embedding with sparse=False"
        )
    if buffer.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UnsupportedConfigurationError(
            f"expected gradients of {known}, got bucket {bucket.index()} with "
            f"dtype={buffer.dtype}; convert the parameters"
        )
    return buffer


def wants_buffers_broadcast(model: DistributedDataParallel) -> bool:
    """Return whether user code has asked DDP to broadcast rank 0's buffers before each forward."""
    wanted = getattr(model, torch_private.FORWARD_SYNC_BUFFERS, None)
    return bool(model.broadcast_buffers if wanted is None else wanted)


def check_copyable(model: DistributedDataParallel) -> None:
    """Refuse a model whose gradients can neither stay in DDP's buckets nor be copied out later."""
    reason = ""
    for _, parameter in named_parameters_of(model.module):
        if parameter is not None and parameter.is_complex():
            reason = "complex parameters"
    if model.find_unused_parameters or reason:
        raise UnsupportedConfigurationError(
            "expected gradients that are views of DDP's buckets, got gradient_as_bucket_view=False "
            f"and {reason or 'find_unused_parameters=True'}; build the model with "
            "DistributedDataParallel(..., gradient_as_bucket_view=True)"
        )


def is_joined(model: DistributedDataParallel) -> bool:
    """Return whether ``model`` is inside of a Join context."""
    config = getattr(model, torch_private.JOIN_CONFIG, None)
    return config is not None and config.enable


def check_not_joined(model: DistributedDataParallel, why: str) -> None:
    """Refuse a model inside of Join, where a rank without data runs neither forward nor step().

    The error message gives ``why`` as the reason.
    """
    if is_joined(model):
        raise UnsupportedConfigurationError(
            f"expected as many steps on all ranks, got a model inside of Join: {why}; give all "
            "ranks as many batches (DistributedSampler does)"
        )


def check_forward(model: DistributedDataParallel, why: str) -> None:
    """Refuse a model whose own forward is never called.

    The error message gives ``why`` as the reason.
    """
    if isinstance(model.module, torch.nn.ParameterList):
        raise UnsupportedConfigurationError(
            "expected DistributedDataParallel, got replicate(), which never calls forward of the "
            f"DDP model inside: {why}; wrap the model in DistributedDataParallel"
        )


def check_optimized(model: DistributedDataParallel, optimizers: Sequence[Any]) -> None:
    """Refuse ``optimizers`` that leave out a trained parameter of the model."""
    known = set[int]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # The list's own iterator bypasses the guards on a decoupled model's groups.
            known.update(id(parameter) for parameter in list.__iter__(group["params"]))
    trained = [p for _, p in named_parameters_of(model.module) if p is not None and p.requires_grad]
    unknown = [p for p in trained if id(optimized(p)) not in known]
    if unknown:
        names = names_of(unknown, model.module)
        raise UnsupportedConfigurationError(
            f"expected the optimizers of all trained parameters, got none of {len(unknown)} of "
            f"them ({names}); pass optimizer=, all of the model's, or optimizer=() to leave them "
            "out"
        )


def check_exchanged_group(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    """Refuse a model whose new process group has other ranks than the hook's process group."""
    got = _ranks(model)
    expected = dist.get_process_group_ranks(process_group)
    if sorted(got) != sorted(expected):
        raise UnsupportedConfigurationError(
            f"expected the process group with which the hook was registered, of ranks {expected}, "
            f"got a model whose group is now of ranks {got} (DDP._update_process_group): states "
            "and unfinished exchanges belong to the former group; wrap the module in "
            "DistributedDataParallel again, with the new group and a new state"
        )


def check_group(
    bucket: dist.GradBucket, process_group: dist.ProcessGroup
) -> DistributedDataParallel | None:
    """Return the DDP model that owns ``bucket``, or None if ``gc.freeze()`` has hidden it.

    Raises if the model's process group has other ranks than ``process_group``, which is the hook's.
    Such a hook would average over the wrong ranks without an error.
    """
    expected = dist.get_process_group_ranks(process_group)
    models: list[DistributedDataParallel] = []
    for search in _SEARCHES:
        models = _holders(bucket, search())
        for model in models:
            if sorted(_ranks(model)) == sorted(expected):
                return model
    if not models:
        _warn_hidden()
        return None
    raise UnsupportedConfigurationError(
        f"expected the process group that DDP was given, of ranks {_ranks(models[-1])}, got a "
        f"process_group of ranks {expected}; pass process_group=model.process_group to the hook's "
        "state"
    )


def _ranks(model: DistributedDataParallel) -> list[int]:
    """Return the ranks of a model's process group.

    The list is empty if the group was destroyed, for example after an elastic restart.
    """
    try:
        return dist.get_process_group_ranks(model.process_group)
    except (KeyError, ValueError, RuntimeError):
        return []


@functools.cache
def _warn_hidden() -> None:
    logger.warning(
        "the hook's process group is not compared with the model's, which is hidden from Python's "
        "garbage collector; call gc.freeze() after the first backward(), not before"
    )


def unknown_to_ddp(model: DistributedDataParallel) -> list[str]:
    """Return the names of trained parameters that were still frozen when the model was wrapped."""
    list_buckets = getattr(model.reducer, torch_private.ZERO_BUCKETS, None)
    if list_buckets is None:
        return []
    known = {id(each) for bucket in list_buckets() for each in bucket.parameters()}
    ignored = getattr(model, torch_private.IGNORED_NAMES, ())
    unknown = []
    for name, parameter in named_parameters_of(model.module):
        if parameter is None or not parameter.requires_grad:
            continue
        if id(parameter) not in known and name not in ignored:
            unknown.append(name)
    return unknown


# --- the model: see [Note: finding the model] ---


def model_of(bucket: dist.GradBucket, *, state: object = None) -> DistributedDataParallel | None:
    """Return the DDP model that owns ``bucket``, or None if ``gc.freeze()`` has hidden it.

    Several models may wrap the same module, for example if training has started again and the old
    model is not yet collected. ``state`` then distinguishes them. It is the state that the model's
    hook was registered with, or the ``hook_state`` inside of a hook wrapper's state. It may also be
    any state that is bound to the model, see `BoundModel`.
    """
    found: DistributedDataParallel | None = None
    for search in _SEARCHES:
        for model in _holders(bucket, search()):
            if state is None or _is_hooked(model, state):
                return model
            found = model
    return found


def needed(model: DistributedDataParallel | None) -> DistributedDataParallel:
    """Return ``model``. Raises if it is None because ``gc.freeze()`` has hidden it."""
    if model is None:
        raise UnsupportedConfigurationError(HIDDEN)
    return model


def registered_model(state: object) -> DistributedDataParallel:
    """Return the DDP model whose hook was registered with ``state``, or to which it is bound.

    It raises if there is no such model, if ``gc.freeze()`` has hidden it, or if the model's own
    forward is never called.
    """
    found = (model for search in _SEARCHES for model in search() if _is_hooked(model, state))
    model = next(found, None)
    if model is None:
        raise UnsupportedConfigurationError(
            f"no DDP model has a hook with this {type(state).__name__}; call "
            "model.register_comm_hook(state, hook) first, and gc.freeze() only after the first "
            "backward()"
        )
    check_forward(model, "its parameters have no names")
    return model


class BoundModel:
    """The only DDP model that a hook's state serves. It is held weakly.

    The state is bound to the model that user code has passed, or else to the model that owns the
    first bucket. Once that model is collected, the state can be bound to another one. If user code
    has passed a model, the other one must have the same network.

    Args:
        model: the DDP model, if user code has passed it. Then no search is needed, see
            [Note: finding the model]. Default: found at the first bucket.
        network: the module that must have the parameters of every bucket. Default: the module
            inside of ``model``; without ``model``, any module will do.
    """

    def __init__(
        self, model: DistributedDataParallel | None = None, network: torch.nn.Module | None = None
    ) -> None:
        # The name of each parameter. It is "" if gc.freeze() has hidden the model. There are none
        # before the first bucket.
        self.names: Any = WeakTensorKeyDictionary()
        # Returns the model. It returns None if the model is not known yet, is hidden or has gone.
        self.model: Callable[[], DistributedDataParallel | None] = lambda: None
        # Returns the network that user code has passed. It is None if user code has passed none.
        self._network = None if network is None else weakref.ref(network)
        if model is not None:
            self.give(model)

    def give(self, model: DistributedDataParallel) -> None:
        """Bind the state to ``model`` in advance."""
        self.model = weakref.ref(model)
        if self._network is None:
            self._network = weakref.ref(model.module)
        remember(model)

    def bind(self, bucket: dist.GradBucket, state: object) -> DistributedDataParallel | None:
        """Bind ``state`` to the model that owns ``bucket``, and return the model.

        Returns None if ``gc.freeze()`` has hidden the model. Raises
        ``UnsupportedConfigurationError`` if the bucket is another model's.
        """
        name = self.names.get(bucket.parameters()[0])
        # If there is a name without a model, the model has gone.
        if name is None or (name and self.model() is None):
            self._enter(bucket, state)
        return self.model()

    def _enter(self, bucket: dist.GradBucket, state: object) -> None:
        """Bind ``state`` to the model of a bucket whose parameters or model are not known yet."""
        parameters = bucket.parameters()
        is_given = self._network is not None
        model = self.model() if is_given else None
        if model is None:
            model = model_of(bucket, state=state)
        network = getattr(model, "module", None) if self._network is None else self._network()
        if self._is_another(model):
            # The former model may be garbage that only waits for a collection.
            gc.collect()
        found = [] if network is None else [*named_parameters_of(network)]
        # A parameter of several modules has the first of its names.
        names = {parameter: name for name, parameter in reversed(found) if parameter is not None}
        is_foreign = is_given and not names.keys() >= {*parameters}
        if is_foreign or self._is_another(model):
            kind = type(state).__name__
            raise UnsupportedConfigurationError(
                f"expected one model for each {kind}, got a bucket of another model; make a {kind} "
                "for each, and register its hook on the model that it was given, if any"
            )
        self.names.update({**dict.fromkeys(parameters, ""), **names})
        if model is not None:
            self.model = weakref.ref(model)

    def _is_another(self, model: DistributedDataParallel | None) -> bool:
        return model is not None and self.model() not in (None, model)


def _holders(
    bucket: dist.GradBucket, models: Iterable[DistributedDataParallel]
) -> list[DistributedDataParallel]:
    """Return the models that have the bucket's parameters, and remember these models."""
    parameter = bucket.parameters()[0]
    found = []
    for model in models:
        # If a constructor or a copy of the model has failed half-way, the model has no network.
        network = vars(model).get(torch_private.SUBMODULES, {}).get("module")
        if network is None:
            continue
        if any(parameter is other for _, other in named_parameters_of(network)):
            found.append(model)
    _known_models.update(found)
    return found


def _is_hooked(model: DistributedDataParallel, state: object) -> bool:
    bound = getattr(state, "bound_model", None)
    if bound is not None and bound.model() is model:
        return True
    for _, registered in getattr(model, torch_private.COMM_HOOKS, ()):
        each = registered
        while each is not None and each is not state:
            each = getattr(each, "hook_state", None)
        if each is state:
            return True
    return False


_known_models: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


def remember(model: DistributedDataParallel) -> None:
    """Let searches find ``model``, which may be a `ShardedModel`."""
    _known_models.add(model)


def _remembered_models() -> list[DistributedDataParallel]:
    return list(_known_models)


def _all_models() -> list[DistributedDataParallel]:
    classes: list[type] = [DistributedDataParallel]
    for each in classes:
        classes += type.__subclasses__(each)
    referrers = itertools.chain.from_iterable(itertools.starmap(gc.get_referrers, [classes]))
    collects = gc.isenabled()
    # The lists that are created below could trigger a collection, whose finalizers let other
    # threads run.
    gc.disable()
    try:
        # Only C code runs until the list exists, and nothing else is left afterwards.
        return list(_of_types(frozenset(classes), *itertools.tee(referrers)))
    finally:
        if collects:
            gc.enable()


def _of_types(types: frozenset[type], objects: Iterator[Any], same: Iterator[Any]) -> Iterator[Any]:
    """Select the objects that have one of ``types``.

    `isinstance` would run the ``__class__`` property of lazy objects.
    """
    return itertools.compress(objects, map(types.__contains__, map(type, same)))


# The searches for a model, cheapest first.
_SEARCHES: tuple[Callable[[], list[DistributedDataParallel]], ...] = (
    _remembered_models,
    _all_models,
)


def network_of(model: DistributedDataParallel) -> torch.nn.Module:
    """Return the module whose forward the model runs, with all its submodules and buffers.

    With FSDP2 ``model.module`` has the parameters of this rank only, see `ShardedModel`.
    """
    network: torch.nn.Module = getattr(model, "network", model.module)
    return network


def optimized(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that optimizers step, for a parameter in a bucket.

    With FSDP2 it is a `DTensor`, of which the bucket's parameter is the part on this rank.
    """
    return getattr(parameter, "optimized_as", parameter)


def weakly(thing: Any) -> Callable[[], Any]:
    """Return a weak reference to ``thing``, or a function that returns None if it is None."""
    return weakref.ref(thing) if thing is not None else lambda: None


def named_parameters_of(network: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the names and parameters of ``network``, without triggering pending updates.

    A decoupled model has such updates.
    """
    for prefix, module in network.named_modules():
        own = torch_private.own_parameters(module)
        # A scripted module has no dictionary here, and no guards.
        items = dict.items(own) if isinstance(own, dict) else own.items()
        for name, parameter in items:
            yield f"{prefix}.{name}" if prefix else name, parameter


def names_of(parameters: list[torch.Tensor], network: torch.nn.Module) -> str:
    """Return the names that the first few ``parameters`` have in ``network``, for a message."""
    names = {id(p): name for name, p in named_parameters_of(network)}
    known = [names[id(p)] for p in parameters if id(p) in names]
    if not known:
        return "not of the model either"
    return ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")
