"""Checks of what DDP hands to a hook: what cannot work is refused with an error that says why.

[Note: finding the model]
A bucket does not know its model, and DDP tells a hook nothing of itself. But every object refers to its class, so
Python's collector, asked who refers to `DistributedDataParallel` or a class below it, returns all models. That takes
some tens of milliseconds for a million objects, and is done once for each model: `_known_models` remembers it.

Whoever asks the collector may get what another thread is just making, and CPython's ``tuple(generator)`` raises
`SystemError` if somebody else has its unfinished tuple in hand. Only a tuple *of these classes* could be met here, and
even that is dropped before any other thread runs: asking and sorting out are one call of C code.
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

from crossover_ddp.errors import UnsupportedConfigurationError

logger = logging.getLogger(__name__)

PYTHON_REDUCER: Final = (
    "expected a bucket of DDP's C++ reducer, got a (gradient, parameter) tuple; "
    "set torch._dynamo.config.optimize_ddp to another value than 'python_reducer'"
)
HIDDEN: Final = (
    "expected the DDP model of these gradients among all objects that Python's collector knows, got none; "
    "call gc.freeze() after the first backward(), not before"
)
CAPTURED: Final = (
    "expected backward outside of a CUDA graph, got a hook that is called while a graph is captured: a replay would "
    "exchange nothing and take no turn, for no hook runs then; capture forward and backward of the model's parts "
    "instead (torch.cuda.make_graphed_callables before DDP, or torch.compile(mode='reduce-overhead'))"
)

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``process_group``, or the default group for None, or say why it cannot be used."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise UnsupportedConfigurationError(
            "expected an initialized default process group, got process_group=None; "
            "call torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UnsupportedConfigurationError(
            f"expected a process group that this process belongs to, got process_group={group!r}; "
            "pass the group that DDP was given"
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
    """Refuse another dictionary than one with the keys ``needed``; it may have others, too, if it ``has_more``."""
    if {*given} != needed and not (has_more and needed <= {*given}):
        raise ValueError(f"expected {expected}, got keys {sorted(given)}; {remedy}")


def check_rank(to: int | None, group: dist.ProcessGroup) -> None:
    """Refuse a rank that ``group`` does not have."""
    if to is not None and not 0 <= to < group.size():
        raise ValueError(
            f"expected 0 <= to < {group.size()}, got to={to}; pass a rank of the group, or None"
        )


def check_turn(ranks: Sequence[int] | None, process_group: dist.ProcessGroup) -> None:
    """Raise unless a mutex's ranks (None: any) are those of the group: whoever else takes its turns waits for ours.

    They are ranks of the default group, none for a mutex of this process alone.
    """
    if ranks is None:
        return
    own, theirs = sorted(dist.get_process_group_ranks(process_group)), sorted(ranks)
    if own != theirs and (theirs or len(own) > 1):
        raise UnsupportedConfigurationError(
            f"expected a mutex of the ranks {own}, which train this model, got one of "
            f"{theirs or 'this process alone'}: a turn belongs to all its ranks; leave mutex= out, or make it with "
            "GPUMutex(process_group=…) of the model's group"
        )


def flat_gradients(bucket: dist.GradBucket) -> torch.Tensor:
    """Return the bucket's flat dense buffer, or say why there is none."""
    buffer = bucket.buffer()
    if buffer.layout != torch.strided:
        raise UnsupportedConfigurationError(
            f"expected dense gradients, got bucket {bucket.index()} with layout={buffer.layout}; "
            "build the embedding with sparse=False"
        )
    if buffer.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UnsupportedConfigurationError(
            f"expected gradients of {known}, got bucket {bucket.index()} with dtype={buffer.dtype}; "
            "convert the parameters"
        )
    return buffer


def wants_buffers_broadcast(model: DistributedDataParallel) -> bool:
    """Tell whether the model was told to broadcast rank 0's buffers before a forward."""
    wanted = getattr(model, "forward_sync_buffers", None)  # torch 2.14
    return bool(model.broadcast_buffers if wanted is None else wanted)


def check_copyable(model: DistributedDataParallel) -> None:
    """Refuse a model whose gradients can neither stay in DDP's buckets nor be copied out of them later."""
    named = named_parameters_of(model.module)
    reason = "complex parameters" if any(p is not None and p.is_complex() for _, p in named) else ""
    if model.find_unused_parameters or reason:
        raise UnsupportedConfigurationError(
            "expected gradients that are views of DDP's buckets, got gradient_as_bucket_view=False and "
            f"{reason or 'find_unused_parameters=True'}; build the model with "
            "DistributedDataParallel(..., gradient_as_bucket_view=True)"
        )


def is_joined(model: DistributedDataParallel) -> bool:
    """Tell whether a model is inside of Join."""
    config = getattr(model, "_join_config", None)
    return config is not None and config.enable


def check_not_joined(model: DistributedDataParallel, why: str) -> None:
    """Refuse Join, in whose shadow passes a rank neither steps nor runs forward; ``why`` that is needed."""
    if is_joined(model):
        raise UnsupportedConfigurationError(
            f"expected as many steps on all ranks, got a model inside of Join: {why}; give all ranks as many batches "
            "(DistributedSampler does)"
        )


def check_forward(model: DistributedDataParallel, why: str) -> None:
    """Refuse a model whose own forward nobody calls; ``why`` that is needed."""
    if isinstance(model.module, torch.nn.ParameterList):
        raise UnsupportedConfigurationError(
            f"expected DistributedDataParallel, got replicate(), which never calls forward of the DDP model inside: "
            f"{why}; wrap the model in DistributedDataParallel"
        )


def check_optimized(model: DistributedDataParallel, optimizers: Sequence[Any]) -> None:
    """Refuse to leave out optimizers of parameters that are trained."""
    groups = [group for each in optimizers for group in each.param_groups]
    known = {
        id(p) for group in groups for p in list.__iter__(group["params"])
    }  # past the guards of groups
    trained = [p for _, p in named_parameters_of(model.module) if p is not None and p.requires_grad]
    unknown = [p for p in trained if id(p) not in known]
    if unknown:
        names = names_of(unknown, model.module)
        raise UnsupportedConfigurationError(
            f"expected the optimizers of all trained parameters, got none of {len(unknown)} of them ({names}); pass "
            "optimizer=, all of the model's, or optimizer=() to leave them out"
        )


def check_exchanged_group(model: DistributedDataParallel, process_group: dist.ProcessGroup) -> None:
    """Refuse a model whose process group was replaced by one of other ranks than the hook's."""
    got, hooks = _ranks(model), dist.get_process_group_ranks(process_group)
    if sorted(got) != sorted(hooks):
        raise UnsupportedConfigurationError(
            f"expected the process group with which the hook was registered, of ranks {hooks}, got a model whose group "
            f"is now of ranks {got} (DDP._update_process_group): the hook's states, and what ranks owe each other, "
            "belong to the former one; wrap the module in DistributedDataParallel again, with the new group and a new "
            "state"
        )


def check_group(
    bucket: dist.GradBucket, process_group: dist.ProcessGroup
) -> DistributedDataParallel | None:
    """Refuse a hook whose process group has other ranks than that of the DDP model behind ``bucket``.

    Otherwise it would silently average over the wrong ranks. Returns the model, or None if ``gc.freeze()`` has hidden
    it.
    """
    got = dist.get_process_group_ranks(process_group)
    models: list[DistributedDataParallel] = []
    for look in _PLACES:
        models = _holders(bucket, look())
        for model in models:
            if sorted(_ranks(model)) == sorted(got):
                return model
    if not models:
        _tell_hidden()
        return None
    raise UnsupportedConfigurationError(
        f"expected the process group that DDP was given, of ranks {_ranks(models[-1])}, got a process_group of "
        f"ranks {got}; pass process_group=model.process_group to the hook's state"
    )


def _ranks(model: DistributedDataParallel) -> list[int]:
    """Return the ranks of a model's group; none if the group is destroyed, as after an elastic restart."""
    try:
        return dist.get_process_group_ranks(model.process_group)
    except (KeyError, ValueError, RuntimeError):
        return []


@functools.cache
def _tell_hidden() -> None:
    logger.warning(
        "the hook's process group is not compared with the model's, which is not among the objects that Python's "
        "collector knows; call gc.freeze() after the first backward(), not before"
    )


def unknown_to_ddp(model: DistributedDataParallel) -> list[str]:
    """Return the names of parameters that require gradients, but did not when the model was wrapped."""
    if not hasattr(model.reducer, "_get_zeros_like_grad_buckets"):
        return []
    known = {
        id(each)
        for bucket in model.reducer._get_zeros_like_grad_buckets()
        for each in bucket.parameters()
    }
    ignored = getattr(model, "parameters_to_ignore", ())
    return [
        name
        for name, each in named_parameters_of(model.module)
        if each is not None and each.requires_grad and id(each) not in known and name not in ignored
    ]


# --- the model: see [Note: finding the model] ----------------------------------------------------------------------


def model_of(bucket: dist.GradBucket, *, state: object = None) -> DistributedDataParallel | None:
    """Return the DDP model whose gradients ``bucket`` holds; None if ``gc.freeze()`` has hidden it.

    ``state``: that the model's hook was registered with, or that its wrappers pass on as ``hook_state``, as far as is
    known. It tells models apart that wrap one module, such as an old one that is not collected yet.
    """
    found: DistributedDataParallel | None = None
    for look in _PLACES:
        for model in _holders(bucket, look()):
            if state is None or _is_hooked(model, state):
                return model
            found = model
    return found


def needed_model_of(bucket: dist.GradBucket, *, state: object) -> DistributedDataParallel:
    """Return the DDP model of a hook that needs it, see `model_of`; raises if ``gc.freeze()`` has hidden it."""
    model = model_of(bucket, state=state)
    if model is None:
        raise UnsupportedConfigurationError(HIDDEN)
    return model


def registered_model(state: object) -> DistributedDataParallel:
    """Return the DDP model whose hook has ``state``; raises if there is none, or if ``gc.freeze()`` has hidden it."""
    found = (model for look in _PLACES for model in look() if _is_hooked(model, state))
    if (model := next(found, None)) is None:
        raise UnsupportedConfigurationError(
            f"expected a DDP model whose hook has this {type(state).__name__}, got none; call "
            "model.register_comm_hook(state, hook) before, and gc.freeze() after the first backward()"
        )
    check_forward(model, "its parameters have no names")
    return model


class OnlyModel:
    """The one DDP model that a hook's state serves; what the state keeps is of this model's buckets."""

    def __init__(self) -> None:
        self.names: Any = WeakTensorKeyDictionary()
        """By parameter; "" as long as ``gc.freeze()`` hides the model."""
        self.model: Callable[[], DistributedDataParallel | None] = lambda: None

    def enter(self, bucket: dist.GradBucket, state: object) -> DistributedDataParallel | None:
        """Return the model behind ``bucket`` if the state has not seen it before; refuse a second one."""
        parameters = bucket.parameters()
        if parameters[0] in self.names:
            return None
        model = model_of(bucket, state=state)
        if self._is_another(model):
            gc.collect()  # the former one may wait for nothing else
        if self._is_another(model):
            raise UnsupportedConfigurationError(
                f"expected one model for each state, got a second one with the same {type(state).__name__}; make a "
                "state for each model"
            )
        for parameter in parameters:
            self.names[parameter] = ""
        if model is not None:
            self.model = weakref.ref(model)
            for name, parameter in model.module.named_parameters():
                self.names[parameter] = name
        return model

    def _is_another(self, model: DistributedDataParallel | None) -> bool:
        return model is not None and self.model() not in (None, model)


def _holders(
    bucket: dist.GradBucket, models: Iterable[DistributedDataParallel]
) -> list[DistributedDataParallel]:
    """Return those of ``models`` that have the bucket's parameters, and remember them."""
    parameter = bucket.parameters()[0]
    # No network: a constructor or a copy that has failed half-way.
    networks = ((model, vars(model).get("_modules", {}).get("module")) for model in models)
    found = [
        model
        for model, network in networks
        if network is not None
        and any(parameter is other for _, other in named_parameters_of(network))
    ]
    _known_models.update(found)
    return found


def _is_hooked(model: DistributedDataParallel, state: object) -> bool:
    for _, registered in getattr(model, "_comm_hooks", ()):
        each = registered
        while each is not None and each is not state:
            each = getattr(each, "hook_state", None)
        if each is state:
            return True
    return False


_known_models: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


def _all_models() -> list[DistributedDataParallel]:
    classes: list[type] = [DistributedDataParallel]
    for each in classes:
        classes += type.__subclasses__(each)
    everybody = itertools.chain.from_iterable(itertools.starmap(gc.get_referrers, [classes]))
    collects = gc.isenabled()
    gc.disable()  # or the lists that are made here set off a collection, and its finalizers let other threads run
    try:
        # Nothing but C until the list is made, and nothing but the list is left of it afterwards.
        return list(_of_types(frozenset(classes), *itertools.tee(everybody)))
    finally:
        if collects:
            gc.enable()


def _of_types(types: frozenset[type], objects: Iterator[Any], same: Iterator[Any]) -> Iterator[Any]:
    """Select by type, not with isinstance: that would run the ``__class__`` property of lazy objects."""
    return itertools.compress(objects, map(types.__contains__, map(type, same)))


_PLACES: tuple[Callable[[], list[DistributedDataParallel]], ...] = (
    lambda: list(_known_models),
    _all_models,
)


def named_parameters_of(network: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the parameters as they are: looking at a model must not make a decoupled one update itself."""
    for prefix, module in network.named_modules():
        own = module._parameters
        # Not a dictionary: of a scripted module, which has no guards.
        for name, parameter in dict.items(own) if isinstance(own, dict) else own.items():
            yield f"{prefix}.{name}" if prefix else name, parameter


def names_of(parameters: list[torch.Tensor], network: torch.nn.Module) -> str:
    """Name the first few of ``parameters`` as ``network`` does, for a message."""
    names = {id(p): name for name, p in named_parameters_of(network)}
    known = [names[id(p)] for p in parameters if id(p) in names]
    return (
        ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")
        if known
        else "not of the model either"
    )
