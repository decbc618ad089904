"""Gives a DDP model other buckets, or takes its hook away, between two steps. Our own design.

[Note: refit] DDP fixes the sizes of its buckets when a model is wrapped, and accepts one hook, once.
Both belong to the reducer, a C++ object that the constructor of DDP makes, and that unpickling makes
again. A refit does as unpickling: it makes another reducer for the same parameters.

* It is not collective, but all ranks must do it between the same two backward passes: the ranks'
  buckets must be alike in each pass. So whether it is done depends on facts that ranks have in
  common alone.
* Gradients stay. With bucket views, the new reducer copies them to its own buckets, and ``p.grad``
  is a view of these. So a refit may also fall between the micro-batches of a step.
* The new reducer begins like that of a new model. DDP rebuilds its buckets after one backward pass,
  with ``static_graph`` after two, unless it looks for unused parameters.
* Without a hook, the model is plain DDP. The pair of hook and state stays in the model's list, so
  that the state still finds its model, and that a later refit can register the hook again.
* DDP's logging data start again, and the rate at which user code had them sampled is lost.
"""

import dataclasses
import logging
import weakref
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._system import torch_private

from .checks import is_joined

logger = logging.getLogger(__name__)

_MIB: Final = 2**20
_OTHER_BUCKETS: Final = 5


class BucketSizes(NamedTuple):
    """The sizes of a model's buckets.

    Args:
        nbytes: the size of a bucket in bytes. A bucket is full once it has at least as many.
        small_first: whether the first bucket that backward fills is full at 1 MiB already, as by
            default in DDP. In a model that looks for unused parameters it is the last one.
    """

    nbytes: int
    small_first: bool = False


def small_buckets(gradients_bytes: int) -> BucketSizes:
    """Return sizes for exchanges beside computation: a small first bucket, at most five others.

    A bucket travels while backward computes the next one, and a deferred update waits for its
    bucket alone. So there must be several. Each costs processor time, so none is full below 1 MiB.

    Args:
        gradients_bytes: the size of all gradients.
    """
    return BucketSizes(max(_MIB, -(-gradients_bytes // _OTHER_BUCKETS)), small_first=True)


class Refitter:
    """Makes the reducer of one model again, see [Note: refit]. The model is held weakly.

    Create it while the model still has the buckets and the hook that user code gave it.

    Args:
        model: the model. Its hook is registered.
        known: the ids of the parameters that DDP's buckets have held, which are all after a whole
            backward pass.
    """

    # The sizes of the present buckets; None for the user's own.
    sizes: BucketSizes | None = None
    # Whether the model's reducer calls the hook.
    is_hooked = True

    def __init__(self, model: DistributedDataParallel, known: Collection[int]) -> None:
        self._model = weakref.ref(model)
        self._known = known
        names = (*torch_private.BUCKET_SETTINGS, torch_private.BUCKET_CONFIG)
        self._own = {name: getattr(model, name) for name in names if hasattr(model, name)}

    def why_not(self) -> str | None:
        """Return why the model must keep its buckets, the same on all ranks; None if it need not.

        It may be called in a hook.
        """
        model: Any = self._model()
        if model is None:
            return "the model has gone"
        missing = [each for each in torch_private.NEEDED_TO_REFIT if not hasattr(model, each)]
        config = self._own.get(torch_private.BUCKET_CONFIG)
        fields = torch_private.BUCKET_CONFIG_FIELDS
        if config is not None and {each.name for each in dataclasses.fields(config)} != fields:
            missing.append(torch_private.BUCKET_CONFIG)
        if missing:
            return f"this version of torch lacks DDP's {', '.join(missing)}"
        if is_joined(model):
            return "inside of Join, a rank without data runs no forward"
        if model.mixed_precision is not None:
            return "DDP's own mixed precision has a hook of its own"
        if getattr(model, torch_private.USES_PYTHON_REDUCER):
            return "torch's Python reducer has no buckets"
        if getattr(model, torch_private.DELAYED_PARAMETERS):
            return "delay_all_reduce_named_params has a buffer of its own"
        if len(getattr(model, torch_private.COMM_HOOKS)) != 1:
            return "the model has no hook, or several"
        trained, _ = getattr(model, torch_private.PARAMETERS_FOR_REDUCER)()
        if any(hasattr(each, torch_private.IN_BACKWARD_OPTIMIZERS) for each in trained):
            return "optimizers step inside of backward"
        if {*map(id, trained)} != {*self._known}:
            return "parameters were frozen or unfrozen after the model was wrapped"
        return None

    def refit(self, sizes: BucketSizes | None, *, hooked: bool = True) -> bool:
        """Make a reducer with buckets of other sizes. The model then behaves like a new one.

        Call it outside of backward, before DDP's forward, with no exchange under way: code that
        still writes to a gradient would write to the former bucket.

        Args:
            sizes: the sizes of the buckets; None for the user's own.
            hooked: whether to register the model's hook; otherwise the model is plain DDP.

        Returns:
            Whether the model has the buckets and the hook that were asked for. Otherwise nothing
            has changed: `why_not` has a reason, or the last backward has raised before its end.

        On failure: if torch raises, the model keeps its reducer.
        """
        if (sizes, hooked) == (self.sizes, self.is_hooked):
            return True
        model: Any = self._model()
        if self.why_not() is not None or not _is_finalized(model):
            return False
        former = {name: getattr(model, name) for name in (*self._own, "reducer", "logger")}
        vars(model).update(self._own if sizes is None else self._settings(sizes))
        try:
            parameters, are_sparse = getattr(model, torch_private.PARAMETERS_FOR_REDUCER)()
            names = getattr(model, torch_private.NAMES_FOR_REDUCER)(parameters)
            make = getattr(model, torch_private.MAKE_REDUCER)
            make(parameters, are_sparse, names, model.static_graph)
        except BaseException:
            vars(model).update(former)
            raise
        torch_private.remove_reducer_hooks(former["reducer"])
        setattr(model, torch_private.HAS_REBUILT, False)
        if model.static_graph:
            setattr(model, torch_private.STATIC_GRAPH_RECORDED, False)
            torch_private.set_static_graph(model.reducer)
            torch_private.set_static_graph(model.logger)
        if hooked:
            hook, state = getattr(model, torch_private.COMM_HOOKS).pop()
            model.register_comm_hook(state, hook)
        self.sizes = sizes
        self.is_hooked = hooked
        logger.info("new buckets: sizes=%s, hooked=%s", sizes, hooked)
        return True

    def _settings(self, sizes: BucketSizes) -> dict[str, Any]:
        """Return the attributes of DDP that stand for ``sizes``."""
        values: list[Any] = [sizes.nbytes, [], sizes.small_first]
        settings = dict(zip(torch_private.BUCKET_SETTINGS, values, strict=True))
        if (config := self._own.get(torch_private.BUCKET_CONFIG)) is not None:
            settings[torch_private.BUCKET_CONFIG] = dataclasses.replace(
                config,
                bucket_bytes_cap=sizes.nbytes,
                per_bucket_bytes_caps=(),
                first_bucket_bytes_cap=_MIB if sizes.small_first else sizes.nbytes,
            )
        return settings


def _is_finalized(model: Any) -> bool:
    """Return whether the reducer has finished its last backward pass. After an error it has not."""
    try:
        getattr(model, torch_private.CHECK_FINALIZED)()
    except RuntimeError:
        return False
    return True
