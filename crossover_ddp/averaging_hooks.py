"""Hooks for replicas that do not wait for each other: register one with ``ddp_model.register_comm_hook``.

For links that take longer for a step's gradients than the step computes. Parameters are averaged now and then, while
training goes on. After local SGD (arXiv 1805.09767), DaSGD (arXiv 2006.00441), DiLoCo (arXiv 2311.08105), EASGD
(arXiv 1412.6651) and EA-wild (HPC Asia 2020). What they do on DDP's reducer is our design.

[Note: the way around the reducer] The hook hands each bucket back at once with this rank's own gradients, so DDP never
waits. What is exchanged are parameters and buffers, from a hook before the model's forward: there the training thread
is between two steps, whatever the optimizer did or skipped.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._averaging.centre import ElasticRound, moving_rate_for
from crossover_ddp._averaging.elastic import OwnPaceElastic, TogetherElastic, WildElastic
from crossover_ddp._averaging.late import LateMeans, OuterOptimizer, Schedule
from crossover_ddp._averaging.replica import blocks_of
from crossover_ddp._ddp import checks
from crossover_ddp._ddp.compiled import OwnHook
from crossover_ddp._ddp.groups import compare
from crossover_ddp._engine.exchange import Exchange, answered
from crossover_ddp._engine.journeys import GradientFuture
from crossover_ddp._engine.observe import StepRecord, before_next_step
from crossover_ddp._engine.states import Agreement, HookState
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp._system import environment
from crossover_ddp._tuning.link_probe import recorded_by_all
from crossover_ddp._tuning.model import AveragingPlan, plan_averaging
from crossover_ddp.errors import UnsupportedConfigurationError

from .comm_hooks import crossover
from .gpu_mutex import GPUMutex

__all__ = ["AveragingPlan", "ElasticState", "LocalSGDState", "elastic_hook", "local_sgd_hook"]

logger = logging.getLogger(__name__)

_WITHOUT_DATA: Final = "a rank without data has no forward in which it could average"
_OWN: Final = "crossover_ddp."
_REMEDY: Final = "register the hook of that state, or make another one"


class AveragingState(HookState):
    """A model whose parameters are averaged between steps, by [Note: the clock] in ``_averaging/late.py``."""

    def __init__(
        self,
        rule: LateMeans | TogetherElastic,
        group: dist.ProcessGroup | None,
        mutex: GPUMutex | None,
    ) -> None:
        self.process_group, self.mutex, self.agreement = group, mutex, Agreement()
        self._replica, self._only, self._hooks = rule, checks.OnlyModel(), contextlib.ExitStack()
        self._steps = 0
        self._mean_of: int | None = None
        self._is_told = self._began = self._is_closed = False
        self._failure: Exception | None = None
        self._begin_s: float | None = None  # of a step's compute
        self._records: deque[StepRecord] = deque(maxlen=16)

    def average(self) -> None:
        """Replace every rank's parameters and floating-point buffers by their mean over the ranks.

        What is in flight is applied first. Integer buffers stay each rank's own. Call it at the end of training, or
        before a checkpoint of which training shall go on to the last bit.

        On failure: ``ExchangeError`` when a peer dies or the group's timeout passes; ``UnsupportedConfigurationError``
        if the mean is not finite, or before the first ``backward()``. **Collective**: all ranks, after as many steps.
        """
        if self._is_known("average()"):
            self._take_mean("average()", leave=False)

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        if self._replica.blocks:
            self._catch_up()
            kept = tensors_in([each.state_dict() for each in optimizers])
            # Numbers by themselves count steps.
            beside = [
                each
                for each in kept
                if each.dim() and (each.is_floating_point() or each.is_complex())
            ]
            self._take_mean("checkpoint()", leave=False, beside=beside)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model hold the mean during the block, for evaluation or a checkpoint, and its own values after it.

        Training goes on as if the block had not been there, so `average` and `checkpoint` are refused inside. It takes
        a copy of the parameters. As `average` it fails, and is **collective**.

        Example::

            with state.averaged():
                torch.save(model.module.state_dict(), path)
        """
        if not self._is_known("averaged()"):
            yield
            return
        own = [(block.copy(block.whole), block.rest) for block in self._replica.blocks]
        former, self._block = self._mean_of, "state.averaged()"
        try:
            self._take_mean("averaged()", leave=True)
            yield
        finally:
            self._mean_of, self._block = former, None
            for block, (values, rest) in zip(self._replica.blocks, own, strict=True):
                block.unpack(block.whole, values, rest)

    def plan(self) -> AveragingPlan:
        """Choose ``sync_every``, ``delay`` and ``fragments`` for this model on this link; the same on all ranks.

        From the steps so far and a few probes of the link, five megabytes in all: the shortest interval for which no
        step waits. What longer ones cost in convergence is not in it.

        On failure: ``UnsupportedConfigurationError`` on a GPU, where the host's clock does not tell when kernels run,
        with one rank, and before two steps were made. ``ValueError`` if 4096 steps are too short for one exchange.
        **Collective**: all ranks, between two steps, with nothing else on the wire.
        """
        blocks, group = self._replica.blocks, checks.resolve_group(self.process_group)
        works, link = recorded_by_all(group, self._records)
        size_bytes = sum(block.numel * block.dtype.itemsize for block in blocks)
        return plan_averaging(max(work.compute_s for work in works), size_bytes, link)

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, this rank's exchanges, and "waited_s". Not collective."""
        common = self._told(
            not_deferred="gradients stay on their rank, or are averaged in backward()"
        )
        return {
            **common,
            "steps": self._steps,
            "waited_s": self.meter.exposed_s,
            **self._replica.stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, and what is kept beside the model, by the parameters' names, on the host.

        The same on all ranks, and for any number of ranks. Exchanges in flight are not in it: save inside of `averaged`
        or after `average`, where the parameters contain them. **Collective**: all ranks, between two steps.
        """
        self._catch_up()
        if self._mean_of != self._steps and self._replica.stats().get("in_flight"):
            logger.warning(
                "this state_dict() does not hold the exchanges in flight after step %d: call it inside of "
                "state.averaged(), or after state.average()",
                self._steps,
            )
        with torch.no_grad():
            return {"steps": self._steps, "kept": self._replica.kept() if self._began else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called; on all ranks, before the first ``backward()``. Not collective.

        A rank that has not is refused at the next ``backward()``, on all ranks. Raises ``ValueError`` for the state of
        another model or of other arguments.
        """
        checks.check_keys(state, {"steps", "kept"}, "a state dict with 'steps' and 'kept'")
        if not isinstance(state["steps"], int):
            raise ValueError(
                f"expected a number of steps, got steps={state['steps']!r}; pass what state_dict() returned"
            )
        if self._began:
            raise ValueError(
                f"expected a state that has not trained yet, got one after {self._steps} steps; make a new state and "
                "register it with a new DistributedDataParallel, then load"
            )
        if state["kept"] is not None:
            self._replica.load(state["kept"])
        self._steps = self._replica.acted = state["steps"]
        self.agreement.forget()

    def close(self) -> None:
        """Let the model go; later backward passes average gradients as the split hook does. Call `average` before.

        Not collective, but all ranks must, after as many steps.
        """
        if not self._is_closed:
            self._is_closed = True
            self._hooks.close()
            if self._began:
                self._replica.close()

    def _carry(self, bucket: dist.GradBucket, exchange: Exchange) -> GradientFuture:
        """Answer ``bucket``; raises what makes local steps impossible."""
        if self._is_closed:
            return exchange.carry(bucket, crossover, state=self).future
        exchange.check(bucket)
        self._enter(bucket)
        gradients = bucket.buffer()
        if self._steps >= self._replica.local_from:
            if not self._began:
                self._replica.acted = self._steps
                model = self._only.model()
                if model is not None and checks.wants_buffers_broadcast(model):
                    # They are averaged with the parameters. torch 2.14 has this as a property.
                    model.broadcast_buffers = False
                    self._hooks.callback(self._broadcast_again)
                with torch.no_grad():
                    self._replica.begin()
                self._began = True
                self._hooks.callback(before_next_step(self._only.names, _check_optimizer))
            elif self._replica.acted != self._steps:
                raise UnsupportedConfigurationError(
                    "expected a call of the DDP model before each backward(), got only its forward(): parameters are "
                    "averaged before such a call; write model(inputs), not model.forward(inputs)"
                )
            exchange.meter_of(self).steps += bucket.is_last()
            future = exchange.network(gradients.device).place.future()
            future.set_result(gradients)
        else:
            future = exchange.carry(bucket, crossover, turn=self.mutex, state=self).future
        if bucket.is_last():
            self._steps += 1
            if self._begin_s is not None:
                self._records.append(((0, time.monotonic() - self._begin_s),))
            self._begin_s = None
        return future

    def _adopt(self, bucket: dist.GradBucket) -> None:
        model = checks.needed_model_of(bucket, state=self)
        _check_model(model, self, is_local=self._replica.local_from < math.inf)
        checks.check_forward(model, "parameters are averaged before it")
        checks.check_not_joined(model, _WITHOUT_DATA)
        group = checks.resolve_group(self.process_group)
        self._replica.adopt(blocks_of(model), group, self.mutex, self.meter)
        before = OwnHook(torch.compiler.disable(self._before_forward))
        self._hooks.callback(model.register_forward_pre_hook(before, prepend=True).remove)
        self._hooks.callback(
            model.module.register_state_dict_pre_hook(OwnHook(self._tell_apart)).remove
        )
        logger.info("averaging: %s with %s", type(model.module).__name__, self._replica.settings)

    def said(self, bucket: dist.GradBucket) -> Mapping[str, object]:
        """Return what all ranks must have in common."""
        if self._is_closed:
            return {}
        self._enter(bucket)
        blocks = self._replica.blocks
        named = [
            (each.name, *each.get().shape, block.dtype)
            for block in blocks
            for each in block.entries
        ]
        return {"steps": self._steps, **self._replica.settings, "model": named}

    def _enter(self, bucket: dist.GradBucket) -> None:
        """Make sure that ``bucket`` is of the state's model, and nothing has failed before."""
        if self._failure is not None:
            raise self._failure
        if bucket.parameters()[0] not in self._only.names:  # once for each bucket
            self._only.enter(bucket, self)
        if not self._replica.blocks:
            self._adopt(bucket)

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._is_closed:
            self._catch_up()
            if self._begin_s is None:
                self._begin_s = time.monotonic()

    def _catch_up(self) -> None:
        """Do what is due after the steps so far; raise what has failed before."""
        if self._failure is not None:
            raise self._failure
        if self._began and self._replica.acted < self._steps:
            if (model := self._only.model()) is not None and model._join_config.enable:
                checks.check_not_joined(model, _WITHOUT_DATA)
            with self._noting_failure(), torch.no_grad():
                while self._replica.acted < self._steps:
                    self._replica.acted += 1
                    self._replica.act()
        self._replica.acted = self._steps

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Note a failure: no later step may go on as if nothing had happened."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _is_known(self, call: str) -> bool:
        """Tell whether there is a model; False if nothing differs, since every step was a plain all-reduce."""
        self._check_outside(call)
        self._catch_up()
        if not self._replica.blocks and not environment.is_set(environment.DISABLE):
            raise UnsupportedConfigurationError(
                "expected a model, got a state whose hook was never called; register it, and call backward() before"
            )
        return bool(self._replica.blocks)

    def _take_mean(self, call: str, *, leave: bool, beside: Sequence[torch.Tensor] = ()) -> None:
        """Replace parameters, and what is ``beside``, by their mean; see `Replica.at_rest`. **Collective**."""
        replica = self._replica
        with self._noting_failure(), torch.no_grad():
            if replica.exchange.size > 1:
                # A rank that does not call would take this exchange for its next one.
                steps = {"steps": self._steps} if self._replica.steps_together else {}
                shapes = [(str(each.dtype), tuple(each.shape)) for each in beside]
                compare(replica.group, {"call": call, "state of the optimizers": shapes, **steps})
            with replica.at_rest(leave=leave) if self._began else contextlib.nullcontext():
                replica.take_mean(beside)
            self._mean_of = self._steps

    def _broadcast_again(self) -> None:
        if (model := self._only.model()) is not None:
            model.broadcast_buffers = True

    def _tell_apart(self, *_: Any) -> None:
        """Warn of the first state dict of one rank's own replica, which is what a saver on rank 0 writes."""
        differs = self._began and self._mean_of != self._steps
        if differs and not self._is_told and self._replica.exchange.size > 1:
            self._is_told = True
            logger.warning(
                "this state_dict() is of one rank's replica, which differs from the others' after step %d: call "
                "state.checkpoint() on all ranks before, or enter state.averaged()",
                self._steps,
            )


class LocalSGDState(AveragingState):
    """State of `local_sgd_hook`: each rank trains on its own gradients, and parameters are averaged now and then.

    The training loop stays as it is. ``sync_every`` alone is local SGD, with ``warmup_steps`` post-local SGD. With
    ``delay`` the mean has time to come: after step k + delay parameters get mean - snapshot of step k, so that steps in
    between are kept. ``outer_optimizer`` makes it DiLoCo, with ``fragments`` and ``delay`` streaming DiLoCo.
    ``sync_every=1`` is the split hook itself, and has plain DDP's gradients. A step is a backward pass that reaches the
    hook: one for several under ``no_sync()``, and also if a GradScaler skips the optimizer's on one rank alone.

    Args:
        sync_every: steps from one exchange of an element to the next.
        delay: steps from the snapshot to the correction; less than ``sync_every``. Default 0.
        fragments: equal slices of the flat parameters, which leave at different steps; the memory for snapshots is
            two copies of what is in flight (one with ``delay=0``). Default 1.
        warmup_steps: steps at the beginning whose gradients are averaged as by DDP. Default 0.
        outer_optimizer: makes an optimizer of a list of tensors, such as ``functools.partial(torch.optim.SGD,
            lr=0.7, momentum=0.9, nesterov=True)``. It steps the common parameters by their distance to the mean, each
            owner its part, in float32 also for half precision, and must treat elements by themselves. Default: none.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: with ``delay=0``: give the turn to a sibling while parameters, or gradients in warm-up, travel.

    Floating-point buffers (BatchNorm's statistics) are averaged, too, and never stepped; DDP broadcasts none from the
    first local step until `close`.

    On failure: ``ValueError`` for arguments. ``UnsupportedConfigurationError`` from the first ``backward()`` for models
    that would wait in every step (``find_unused_parameters``, SyncBatchNorm), and on all ranks before a step if
    parameters are not finite. ``ExchangeError`` before a step when a peer has died, in bounded time: restart the job.
    **Collective**: every rank registers the hook, with the same arguments, and makes as many steps.
    ``CROSSOVER_DISABLE=1``, set before, makes it a plain all-reduce.

    Example::

        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        model.register_comm_hook(LocalSGDState(sync_every=8, delay=1, fragments=8), local_sgd_hook)
    """

    def __init__(
        self,
        sync_every: int,
        delay: int = 0,
        fragments: int = 1,
        warmup_steps: int = 0,
        outer_optimizer: OuterOptimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
    ) -> None:
        schedule = Schedule(sync_every, delay, fragments, warmup_steps)
        _check_waits(mutex, "delay=0", f"delay={delay}")
        if outer_optimizer is not None and sync_every == 1:
            raise ValueError(
                "expected sync_every >= 2 with an outer optimizer, got sync_every=1: replicas never differ; drop it"
            )
        super().__init__(LateMeans(schedule, outer_optimizer), process_group, mutex)


def local_sgd_hook(
    state: LocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back with this rank's own gradients; see `LocalSGDState` for what is averaged when.

    Args:
        state: made once per model.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already; in warm-up steps, and with ``sync_every=1``, that of the split hook.

    On failure: nothing leaves the hook; see `LocalSGDState`. **Collective**: DDP calls it on all ranks in the same
    order. Source: see the module.
    """
    return answered(
        state,
        bucket,
        LocalSGDState,
        _REMEDY,
        lambda exchange: state._carry(bucket, exchange),
        compares=False,
    )


class ElasticState(AveragingState):
    """State of `elastic_hook`: each rank trains on its own gradients, tied to a common centre as if by a spring.

    Every ``sync_every`` steps a rank is pulled towards the centre by δ = α(x - c), and the centre towards the rank by
    the same δ. The training loop stays as it is. The modes differ in where the centre is, and in who waits for whom:

    * ``"sync"``: EASGD. All ranks pull in the same step, and wait for each other.
    * ``"async"``: EASGD, where nobody waits. A thread of each rank goes through rounds with those of the others, over
      what each rank has offered last; the pull is applied between two steps when it has come. A slow rank delays
      nobody, and its pulls are not lost.
    * ``"wild"``: ranks of one host pull a centre in shared memory, at the same time and without a lock; hosts pull
      their centres together as in "async". EA-wild.

    The centre is kept in float32 whatever the parameters' dtype, and so are values on the wire. Each rank has its part
    of it; in "wild" each host has one, and each rank its part of the one that hosts pull.

    Args:
        sync_every: steps between two pulls of a rank; more in "async" while the network needs longer.
        mode: see above.
        moving_rate: α. Default: 0.9 / ranks, as EASGD's authors have it; refused from 2 / (ranks + 1) on.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: with mode="sync": give the turn to a sibling while parameters travel.

    On failure: ``ValueError`` for arguments; ``UnsupportedConfigurationError`` from the first ``backward()`` for models
    that would wait in every step (see `LocalSGDState`). ``ExchangeError`` before a step when a peer has died or has
    been silent for the group's timeout: until then the others train on, and nobody trains alone for longer. A rank
    whose parameters are not finite offers nothing, with a warning; in "sync" all ranks raise.
    **Collective**: every rank registers the hook, with the same arguments. In "async" and "wild" ranks may make
    different numbers of steps between two calls of `average`, with which the last steps must end: what to evaluate is
    the ranks' mean. The centre is in `state_dict`.

    Example::

        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        model.register_comm_hook(ElasticState(sync_every=10), elastic_hook)
    """

    def __init__(
        self,
        sync_every: int,
        mode: Literal["sync", "async", "wild"] = "async",
        moving_rate: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
    ) -> None:
        rules = {rule.mode: rule for rule in (TogetherElastic, OwnPaceElastic, WildElastic)}
        if mode not in rules:
            raise ValueError(
                f"expected mode='sync', 'async' or 'wild', got mode={mode!r}; see ElasticState"
            )
        Schedule(sync_every)  # says what is wrong with it
        moving_rate_for(checks.resolve_group(process_group).size(), moving_rate)
        _check_waits(mutex, "mode='sync'", f"mode={mode!r}")
        self.mode = mode
        self._rule = rules[mode](sync_every, moving_rate)
        super().__init__(self._rule, process_group, mutex)

    def rounds(self) -> list[ElasticRound]:
        """Return the rounds (in mode "wild" those of the hosts) as this rank saw them, for a replay. Not collective.

        ``offered``: by rank, after how many steps it offered what went into the round, or None; ``collected``: after
        how many this rank applied its pull.
        """
        return [*self._rule.log]


def elastic_hook(
    state: ElasticState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back with this rank's own gradients; see `ElasticState` for what is exchanged when.

    Args:
        state: made once per model.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already.

    On failure: nothing leaves the hook; see `ElasticState`. **Collective**: DDP calls it on all ranks in the same
    order. Source: EASGD (arXiv 1412.6651) and its authors' code; EA-wild (HPC Asia 2020), by its abstract. Rounds
    without a server, and the centre of a host, are our design.
    """
    return answered(
        state,
        bucket,
        ElasticState,
        _REMEDY,
        lambda exchange: state._carry(bucket, exchange),
        compares=False,
    )


def _check_waits(mutex: GPUMutex | None, wanted: str, got: str) -> None:
    """Refuse a mutex where nobody waits."""
    if mutex is not None and got != wanted:
        raise ValueError(
            f"expected {wanted} with a mutex, got {got}: no step waits for an exchange then, so there is no time to "
            f"give away; leave mutex out, or pass {wanted}"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that brings each parameter from one rank, which has stepped it by its own gradient."""
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise UnsupportedConfigurationError(
            f"expected an optimizer that steps all of this rank's parameters, got {type(optimizer).__name__}: with "
            "local steps each parameter would be stepped by its owner's gradient alone, and the samples of the other "
            "ranks would be lost for it; use the optimizer inside of it for all parameters, or another hook (the "
            "split, crossover and codecs work with it; DecoupledState(owners='layers') divides the state as well)"
        )


def _check_model(model: DistributedDataParallel, state: object, *, is_local: bool) -> None:
    """Refuse a hook inside of another one, and, with local steps, what makes ranks wait for each other in each."""
    for hook, registered in getattr(model, "_comm_hooks", ()):
        if registered is not state or not getattr(hook, "__module__", _OWN).startswith(_OWN):
            raise UnsupportedConfigurationError(
                f"expected this hook registered by itself, got it inside of {getattr(hook, '__qualname__', hook)}: "
                "local steps send no gradients, so a wrapper has nothing to compress and no turn to give away; "
                "register it directly (and pass mutex= for turns)"
            )
    if not is_local:
        return
    if model.find_unused_parameters:
        raise UnsupportedConfigurationError(
            "expected find_unused_parameters=False, got True: DDP would exchange a map of used parameters in every "
            "step; build DistributedDataParallel(..., find_unused_parameters=False) and let every parameter take part"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedConfigurationError(
                f"expected modules without collectives, got SyncBatchNorm {name}, which waits for all ranks in every "
                "step; use BatchNorm, whose statistics are averaged with the parameters"
            )
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        functions = [getattr(hook, "func", hook) for hook in hooks]  # an `OwnHook` is a partial
        if any(
            str(getattr(each, "__module__", "")).startswith("crossover_ddp._kfac")
            for each in functions
        ):
            raise UnsupportedConfigurationError(
                f"expected a model without K-FAC, got a KFACState that watches module '{name}': it preconditions the "
                "mean gradient, which a local step does not have; register kfac_hook instead, or make no KFACState"
            )
