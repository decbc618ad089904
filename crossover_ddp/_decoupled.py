"""Decoupled training: gradients are gathered, and parameters updated, while the next forward runs.

After DeAR (arXiv 2302.12445): reduce-scatter during backward, all-gather during the next forward. Our design: the
order of the gathers, updates by the user's own optimizer, and that nobody reads a parameter before its update.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import dataclasses
import functools
import inspect
import logging
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ._ddp_checks import Bucket, check_not_capturing, flat_gradients, model_of, names_of, resolve_group
from ._exchange import Exchange
from ._guards import OwnHook, Watch, guard
from ._journey import Turn
from ._link_probe import measure_link
from ._partial_optimizer import PartialOptimizer, check_separable
from ._planning import BucketPlan, plan_buckets
from ._shares import CHANGED, Share, gradient_norm
from ._step_times import StepTimes
from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex, turns_disabled

logger = logging.getLogger(__name__)

_EARLY_READS_TO_WARN: Final = 3
_MARK: Final = "_crossover_ddp_decoupled"
_SCALES: Final = "_step_supports_amp_scaling"


class DecoupledState:
    """State of `decoupled_hook`: lets gradients arrive, and ``optimizer.step()`` take effect, in the next forward.

    The training loop stays as it is. ``optimizer.step()`` returns at once; each parameter is updated by the
    optimizer's own code, with the hyper-parameters of that moment, just before it is read for the
    first time: by a module's forward, ``state_dict()``, ``parameters()`` or ``module.weight``. Losses and
    parameters are those of plain DDP, to the last bit with one or two ranks, and up to the order of
    additions with more.

    What nobody can see is a tensor taken earlier (``p = model.weight``) and read directly after ``step()``, and
    ``p.grad`` between ``backward()`` and the next forward, which holds the mean only in parts. Call `flush` before.

    Args:
        optimizer: any torch optimizer that treats each parameter by itself, with all parameters of the model.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: take turns with sibling jobs: the turn is given away when backward's compute is done, and taken before
            the next forward's. Default: no turns.

    On failure: combinations that cannot work raise ``UnsupportedConfigurationError``, here or from the first
    ``backward()`` or ``step()``. When a peer dies, whoever waits for its gradients gets ``ExchangeError``, in bounded
    time.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` makes it a plain all-reduce.

    Example::

        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
    ) -> None:
        check_separable(optimizer)
        if getattr(optimizer, _MARK, None) is not None:
            raise UnsupportedConfigurationError(
                "expected an optimizer without a DecoupledState, got one that has another already; "
                "make one optimizer for each model, or close() the other state"
            )
        self.process_group = process_group
        self.optimizer = optimizer
        self.mutex = mutex
        self._turn: Turn | None = mutex
        self._partial = PartialOptimizer(optimizer)
        self._engine: Exchange | None = None
        self._model: Callable[[], DistributedDataParallel | None] = _no_model
        self._known: set[int] = set()
        self._watch: Watch[Share] = Watch(self._bring_up_to_date)
        self._stale = self._watch.stale
        self._loaded_order: list[str] = []
        self._round: list[Share] = []
        self._round_is_open = False
        self._round_is_broken = False
        self._last_index = -1
        self._rounds = 0
        self._shape: tuple[object, ...] = ()
        self._settled = False
        self._in_forward = False
        self._early_reads = 0
        self._times = StepTimes()
        self._scales = vars(optimizer).get(_SCALES)
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(self._end_custody)
        self._closed = False
        self._intercept()

    # --- for users -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Finish what is under way: parameters and gradients are those of plain DDP afterwards. Not collective.

        Between ``backward()`` and ``step()`` it makes ``p.grad`` whole, for whoever wants to read or change
        gradients; after ``step()`` it applies the update.
        """
        self._update_all()
        self._make_round_whole()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_``; call it before ``step()``.

        Each rank looks at its own parts only; two numbers per rank are exchanged. The gradients are scaled when
        they are applied. If some rank has called `flush` since ``backward()``, all do, and each clips by itself.

        Args:
            max_norm: greatest norm that is left.
            norm_type: p of the p-norm; may be infinity.
            error_if_nonfinite: raise ``RuntimeError`` if the norm is infinite or not a number.

        Returns:
            The norm before clipping, the same on all ranks.

        **Collective**: all ranks of the job.
        """
        self._check_round()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        group = resolve_group(self.process_group)
        norm = gradient_norm(self._round, float(norm_type), group, parameters[0].device)
        if norm is None:
            self._make_round_whole()
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"expected a finite norm of the gradients, got norm={norm.item()} for norm_type={norm_type}; "
                "look for the step that blew up, or pass error_if_nonfinite=False"
            )
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for share in self._round:
            share.clip(factor)
        return norm

    def plan_buckets(self, *, per_bucket: bool = False) -> BucketPlan:
        """Choose the size of DDP's buckets for this model on this link, from the steps so far and a few probes.

        Train some ten steps with small buckets first (``bucket_cap_mb`` of a fiftieth of the model: no plan can cut
        finer), then make a new ``DistributedDataParallel(model, **plan.ddp_options(), ...)`` of the same model.

        Args:
            per_bucket: let each bucket have a size of its own (``bucket_cap_mb_list``, torch 2.15). The model
                expects a little more of that; in measurements it was not better (docs/measurements.md).

        Returns:
            Rank 0's choice, the same on all ranks: sizes of buckets, and the predicted seconds per step.

        On failure: raises ``UnsupportedConfigurationError`` on a GPU, where the host's clock does not tell when kernels
        run, and, on all ranks, as long as some rank has recorded no step whose updates all came in forward.

        **Collective**: all ranks of the job, between two steps.
        """
        self.flush()
        group = resolve_group(self.process_group)
        model = self._model()
        device = torch.device("cpu") if model is None else next(model.module.parameters()).device
        workload = self._times.workload()
        if device.type != "cpu":
            raise UnsupportedConfigurationError(
                f"expected CPU devices to plan for, got device={device}; choose bucket_cap_mb by hand: "
                "a sixteenth of the model is a good start"
            )
        if per_bucket and "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
            raise UnsupportedConfigurationError(
                f"expected a DDP that knows bucket_cap_mb_list, got torch {torch.__version__}; leave out per_bucket"
            )
        recorded: list[Any] = [None] * group.size()
        dist.all_gather_object(recorded, workload is not None, group=group)
        if workload is None or not all(recorded):
            raise UnsupportedConfigurationError(
                f"expected deferred steps recorded on all ranks, got {recorded}; train some ten steps before, without "
                "reading parameters between step() and forward, or choose bucket_cap_mb by hand: a sixteenth of the "
                "model is a good start"
            )
        link = measure_link(group)
        if torch.get_num_threads() == 1:  # else torch's own threads would be counted
            link = dataclasses.replace(link, cpu_s=self._times.cpu_s())
        choice: list[Any] = [plan_buckets(workload, link, per_bucket=per_bucket)]
        dist.broadcast_object_list(choice, group=group, group_src=0)
        return cast(BucketPlan, choice[0])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Give the turn away during the block: evaluation, a checkpoint; see `GPUMutex.paused`."""
        with self.mutex.paused() if self.mutex is not None else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job may take over: the order in which forward needs the parameters.

        Updates under way are applied first, so that model and optimizer may be saved right after.
        """
        self.flush()
        model = self._model()
        names = {id(p): name for name, p in model.module.named_parameters()} if model is not None else {}
        order = sorted(self._watch.order, key=lambda key: self._watch.order[key])
        return {"forward_order": [names[key] for key in order if key in names]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; optional, since the first forward tells the same."""
        unknown = set(state) - {"forward_order"}
        if unknown or not isinstance(state.get("forward_order"), list):
            raise ValueError(
                f"expected a state dict with the list 'forward_order', got keys {sorted(state)}; "
                "pass what state_dict() returned"
            )
        self._loaded_order = list(state["forward_order"])
        model = self._model()
        if model is not None:
            self._take_order(model)

    def close(self) -> None:
        """Finish what is under way and let the optimizer and the model go; later steps are those of the split hook.

        Not collective.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        finally:
            self._round_is_open = self._round_is_broken = False
            self._hooks.close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Stay behind when the model is copied or pickled, as its hook does: it acts for one optimizer only."""
        logger.warning(
            "a copied model trains without its DecoupledState; register a new one with its optimizer"
        )
        return _Nothing, ()

    # --- the hook --------------------------------------------------------------------------------------------

    def exchange(
        self, process_group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``; for `decoupled_hook`. Raises what makes it impossible."""
        engine = self._engine = Exchange.of(process_group)
        if self._closed:
            return engine.submit(bucket)
        if isinstance(bucket, dist.GradBucket):
            # DDP goes through its buckets in order; the backward before may have ended at any of them.
            begins = not self._round_is_open or bucket.index() <= self._last_index
            self._last_index, self._round_is_open = bucket.index(), not bucket.is_last()
            if begins:
                self._begin_round()
        parameters = self._checked_parameters(bucket)
        urgency = self._urgency(bucket.index(), parameters)
        buffer = bucket.buffer()
        future, deferred = engine.defer(bucket, turn=self._turn, urgency=urgency)
        if deferred is None:
            self.break_round()
        else:
            self._round.append(Share(deferred, parameters, buffer, urgency, place=len(self._round)))
            self._times.ready(buffer.numel() * buffer.element_size())
        if bucket.is_last():
            self._end_round()
        return future

    def break_round(self) -> None:
        """Note that a bucket was refused; for `decoupled_hook`. ``step()`` is refused until the next backward."""
        self._round_is_broken = True

    def _urgency(self, index: int, parameters: list[torch.Tensor]) -> int:
        """Return when forward first reads one of the bucket's parameters; the last bucket comes first at first."""
        order = self._watch.order
        if not order:
            return -index
        return min([order.get(id(p), len(order)) for p in parameters])

    def _begin_round(self) -> None:
        self._round_is_broken = False
        self._round = []
        # Only where no forward came between, as when Join answers for a rank that is through with its inputs.
        self._update_all()
        # GradScaler would change half-averaged gradients, unseen: unscaling counts no version. An optimizer that
        # scales by itself is told the scale instead, and `_on_step` refuses it.
        setattr(self.optimizer, _SCALES, True)

    def _end_round(self) -> None:
        """Learn whether DDP's buckets stay as they are: only then may their gathers wait for forward."""
        shape = tuple([(share.deferred.tensor.numel(), *map(id, share.parameters)) for share in self._round])
        self._rounds += 1
        model = self._model()
        rebuilt_after = 2 if model is not None and model.static_graph else 1
        self._settled = shape == self._shape and self._rounds > rebuilt_after
        self._times.backward_ends()
        if shape != self._shape:
            self._times.forget()
        self._shape = shape

    def _checked_parameters(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the bucket's parameters; look at each once in its life."""
        flat_gradients(bucket)
        assert isinstance(bucket, dist.GradBucket)
        parameters = bucket.parameters()
        if self._known.issuperset(map(id, parameters)):
            return parameters
        new = [p for p in parameters if id(p) not in self._known]
        model = model_of(bucket)
        known = self._model()
        if model is None:
            raise UnsupportedConfigurationError(
                "expected the DDP model of these gradients among all objects that Python's collector knows, got none; "
                "call gc.freeze() after the first backward(), not before"
            )
        if known is not None and model is not known:
            raise UnsupportedConfigurationError(
                "expected one model for each DecoupledState, got a second one; make a state and an optimizer for it"
            )
        if known is None:
            self._adopt(model)
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        foreign = [p for p in new if id(p) not in owned]
        if foreign:
            raise UnsupportedConfigurationError(
                f"expected all parameters of the model in the optimizer, got {len(foreign)} that are not in it "
                f"({names_of(foreign, model)}); add them as a parameter group, or freeze them before the model is "
                "wrapped (requires_grad=False)"
            )
        self._known.update(id(p) for p in new)
        return parameters

    def _adopt(self, model: DistributedDataParallel) -> None:
        if not model.gradient_as_bucket_view:
            raise UnsupportedConfigurationError(
                "expected gradients that are views of DDP's buckets, got gradient_as_bucket_view=False; "
                "build the model with DistributedDataParallel(..., gradient_as_bucket_view=True)"
            )
        self._model = weakref.ref(model)
        self._hooks.push(guard(model.module, self._watch))
        before = model.register_forward_pre_hook(OwnHook(self._before_forward), prepend=True)
        after = model.register_forward_hook(OwnHook(self._after_forward))
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        self._take_order(model)
        logger.info("decoupled: %s with %s", type(model.module).__name__, type(self.optimizer).__name__)

    def _take_order(self, model: DistributedDataParallel) -> None:
        parameters = dict(model.module.named_parameters())
        self._watch.order.update(
            (id(parameters[name]), place)
            for place, name in enumerate(self._loaded_order)
            if name in parameters
        )
        self._loaded_order = []

    # --- around forward --------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        self._in_forward = True
        if not self._settled:
            self.flush()
        if torch.is_grad_enabled():
            self._watch.recording = self._settled and not self._watch.order
            if self._turn is not None:
                self._take_turn(self._turn)
        if self._engine is not None:
            self._engine.begin_compute()
        self._times.forward_begins()

    def _take_turn(self, turn: Turn) -> None:
        """Take the turn when there is something to compute: the first parameters' gradients have come."""
        first = min(self._stale.values(), key=lambda share: share.urgency, default=None)
        if first is not None:
            first.deferred.wait()
        since_s = time.monotonic()
        turn.acquire()
        if self._engine is not None:
            self._engine.waited(since_s)

    def _after_forward(self, *_: Any) -> None:
        """Leave nothing open that backward would write into."""
        self._watch.recording = False
        self.flush()
        self._times.forward_ends()
        self._in_forward = False

    def _bring_up_to_date(self, share: Share) -> None:
        if not self._in_forward:
            self._note_early_read()
        self._update(share)

    def _note_early_read(self) -> None:
        self._early_reads += 1
        if self._early_reads == _EARLY_READS_TO_WARN:
            logger.warning(
                "parameters are read between optimizer.step() and the next forward (a moving average, "
                "model.zero_grad() instead of optimizer.zero_grad(), ...): correct, but updates wait for the network"
            )

    # --- updates ---------------------------------------------------------------------------------------------

    def _update_all(self) -> None:
        for share in sorted(set(self._stale.values()), key=lambda each: each.urgency):
            self._update(share)

    def _update(self, share: Share) -> None:
        """Wait for one bucket and apply the optimizer to its parameters."""
        begin_s = time.monotonic()
        share.deferred.wait()
        waited_s = time.monotonic()
        share.check_gradients()
        share.check_parameters()
        with torch.no_grad():
            share.scale()
            assert share.plan is not None
            self._partial.apply(share.plan, share.updates)
        for parameter in share.parameters:
            self._stale.pop(id(parameter), None)
        self._times.updated(share.place, begin_s, waited_s)

    def _make_round_whole(self) -> None:
        for share in self._round:
            share.deferred.wait()
        # Not before all are: whoever catches the error may let the next backward write into any of the buckets.
        for share in self._round:
            share.check_gradients()
            share.scale()
        if not self._round_is_open:
            self._end_custody()

    def _end_custody(self) -> None:
        """Let the round go: its gradients are whole, or noted by ``step()``."""
        self._round = []
        if self._scales is None:
            vars(self.optimizer).pop(_SCALES, None)
        else:
            setattr(self.optimizer, _SCALES, self._scales)

    # --- the optimizer ---------------------------------------------------------------------------------------

    def _intercept(self) -> None:
        """Put our ``step`` and ``zero_grad`` in the place of the optimizer's."""
        optimizer = self.optimizer
        own = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
        original_zero_grad = optimizer.zero_grad

        @functools.wraps(optimizer.step)
        def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._on_step(closure)

        @functools.wraps(optimizer.zero_grad)
        def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
            if not set_to_none:
                self.flush()
            original_zero_grad(set_to_none)

        # Methods, since learning-rate schedulers wrap ``optimizer.step.__func__``.
        ours = {
            "step": types.MethodType(step, optimizer),
            "zero_grad": types.MethodType(zero_grad, optimizer),
        }
        vars(optimizer).update(ours)
        setattr(optimizer, _MARK, True)
        self._hooks.callback(_restore, optimizer, ours, own)
        for register in (
            optimizer.register_state_dict_pre_hook,
            optimizer.register_load_state_dict_pre_hook,
        ):
            self._hooks.callback(register(lambda *_: self.flush()).remove)

    def _on_step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return self._step()
        with torch.enable_grad():  # as torch's optimizers do: once, before they look at gradients
            loss = closure()
        self._step()
        return loss

    def _step(self) -> Any:
        self._update_all()
        self._check_round()
        if not self._round:
            return self._partial.step()
        if any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            raise UnsupportedConfigurationError(CHANGED)
        if self._must_step_at_once():
            self._make_round_whole()
            return self._partial.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler wants to see
        plan = self._partial.plan()
        for share in self._round:
            share.take_step(plan)
            for parameter in share.parameters:
                self._stale[id(parameter)] = share
        self._end_custody()
        return None

    def _must_step_at_once(self) -> bool:
        """Whether DDP may still rebuild its buckets, or somebody wants to see the parameters after this step."""
        return not self._settled or self._partial.is_watched()

    def _check_round(self) -> None:
        """Collect the step's gradients; refuse what would not give the result of plain DDP."""
        if self._round_is_open or self._round_is_broken:
            raise UnsupportedConfigurationError(
                "expected a whole backward() before step() and clip_grad_norm_(), got one that ended with an "
                "exception; call them after the next backward()"
            )
        if not self._round:
            return
        for share in self._round:
            share.collect()
        strangers = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and id(p) not in self._known
        ]
        if strangers:
            raise UnsupportedConfigurationError(
                f"expected an optimizer of one DDP model, got gradients of {len(strangers)} other parameters in it; "
                "give them an optimizer of their own"
            )


class _Nothing:
    """What a copied model has in the place of the state."""


def decoupled_hook(state: DecoupledState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start to average the bucket, and let backward go on; see `DecoupledState`.

    The bucket is reduce-scattered during backward and gathered when the wire is free, at the latest in the next
    forward. ``p.grad`` holds the mean from then on, or after `DecoupledState.flush`.

    Args:
        state: made once per model and optimizer.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already.

    On failure: nothing leaves the hook; see `DecoupledState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: after DeAR (arXiv 2302.12445); see the module.

    Example::

        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    """
    group = cast(dist.ProcessGroup, state.process_group)
    if turns_disabled():
        return allreduce_hook(group, bucket)
    try:
        check_not_capturing(bucket)
        return state.exchange(resolve_group(group), bucket)
    except Exception as error:  # whatever it is, it must not leave the hook
        state.break_round()
        return Exchange.refuse(bucket, error)


def _no_model() -> None:
    return None


def _restore(optimizer: Optimizer, ours: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        # A scheduler may have wrapped ours meanwhile; ours hands everything on by now.
        if vars(optimizer).get(name) is not ours[name]:
            continue
        if value is None:
            vars(optimizer).pop(name, None)
        else:
            vars(optimizer)[name] = value
    vars(optimizer).pop(_MARK, None)
