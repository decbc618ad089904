"""Hooks for replicas that train on their own gradients and are averaged at intervals.

Register a hook with ``ddp_model.register_comm_hook``.

These hooks are for links on which a step's gradients take longer to exchange than the step takes to
compute. Parameters are averaged while training continues. The methods follow local SGD (arXiv
1805.09767), DaSGD (arXiv 2006.00441), DiLoCo (arXiv 2311.08105), EASGD (arXiv 1412.6651) and
EA-wild (HPC Asia 2020). The use of DDP's reducer is our design.

The module begins with its two journeys, the coroutines that carry parameters: `average` for local
SGD, and `pull` for elastic averaging. The states and their hooks follow.

[Note: around the reducer] The hook returns each bucket at once, with this rank's own gradients, so
DDP never waits. Parameters and buffers are exchanged instead, in a hook before the model's forward.
At that point the training thread is between two steps, whether the optimizer stepped or not.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import functools
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
from torch.optim import Optimizer

from crossover_ddp._averaging.centre import CentrePart, ElasticRound, moving_rate_for
from crossover_ddp._averaging.elastic import (
    AsyncElasticReplica,
    ElasticReplica,
    SyncElasticReplica,
    WildElasticReplica,
)
from crossover_ddp._averaging.increments import Increments
from crossover_ddp._averaging.local_sgd import (
    LocalSGDReplica,
    OuterOptimizer,
    OuterRate,
    Schedule,
    constant,
)
from crossover_ddp._averaging.replica import OwnerStep, Replica, blocks_of
from crossover_ddp._averaging.second_moment import SecondMoment
from crossover_ddp._compression.codec import CodecChoice, codecs_of, in_words
from crossover_ddp._compression.coded_vector import CodedVector
from crossover_ddp._compression.planning import cost_of
from crossover_ddp._ddp import checks
from crossover_ddp._ddp.compiled import OwnHook
from crossover_ddp._ddp.groups import compare, gather_objects
from crossover_ddp._ddp.shards import own_part
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.journeys import GradientFuture
from crossover_ddp._engine.links import Layout, Link, parts
from crossover_ddp._engine.observe import StepRecord, before_next_step
from crossover_ddp._engine.states import HookState
from crossover_ddp._owners.owned_state import tensors_in
from crossover_ddp._system import environment
from crossover_ddp._tuning.link_probe import recorded_by_all
from crossover_ddp._tuning.model import AveragingPlan, plan_averaging
from crossover_ddp.errors import UnsupportedConfigurationError

from .comm_hooks import crossover
from .gpu_mutex import GPUMutex

__all__ = ["AveragingPlan", "ElasticState", "LocalSGDState", "elastic_hook", "local_sgd_hook"]

logger = logging.getLogger(__name__)

_WITHOUT_DATA: Final = "a rank without data runs no forward, so it could not average"
_OWN: Final = "crossover_ddp."
_REMEDY: Final = "register the hook of that state, or make another one"


async def average(
    values: torch.Tensor,
    layout: Layout,
    owner_step: OwnerStep | None,
    snapshot: torch.Tensor | None,
    increments: Increments | None,
    link: Link,
) -> None:
    """Replace a copy of the parameters, or their increments, with the mean over the ranks.

    With ``snapshot``, replace it with the difference between the mean and the snapshot.

    Between two steps the training thread copies a slice of the parameters to ``values`` and begins
    this coroutine. Between two steps it also waits for the end, checks that the result is finite,
    and writes it to the parameters: at once, or ``delay`` steps later. In the steps in between, the
    replica trains on while the slice travels.

    If a peer dies or the timeout passes, the ``await`` under way raises. That ends all exchange of
    the process group. No parameter has been written, and the error is raised before the next step.

    Args:
        values: the flat copy.
        layout: the length of each rank's part.
        owner_step: the outer step of this rank's part, if there is one; see [Note: outer steps] in
            ``_averaging/local_sgd.py``.
        snapshot: the values that were sent, if training continues meanwhile; otherwise None.
        increments: with a codec, the increments that ``values`` hold; see [Note: increments] in
            ``_averaging/increments.py``. Otherwise None.
        link: the link that connects the ranks. With a codec it carries coded messages.
    """
    # Each rank sends every other rank its part. Afterwards this rank's part is the mean.
    own = await link.reduce_scatter(values, layout)
    if owner_step is not None:
        # An optimizer's step may take long, so it runs where it delays no other slice's reduction.
        await link.compute()
        owner_step(own)
    await link.all_gather(values, layout)
    if increments is not None:
        # All ranks have received the same values, and add them to the same common parameters.
        increments.land(values)
    if snapshot is not None:
        # The parameters have changed since then. The difference will be added to them, see
        # [Note: delta rule] in `_averaging/local_sgd.py`.
        values.sub_(snapshot)


async def pull(centre: CentrePart, values: torch.Tensor, pulls: Sequence[bool], link: Link) -> None:
    """Replace a copy of parameters with this rank's update, -δ, and move the centre by δ.

    See [Note: elastic pull] in ``_averaging/centre.py``. In mode "sync" the training thread begins
    this coroutine between two steps, on all ranks, and waits for it. In the other modes a thread of
    each rank runs it in rounds, see [Note: rounds], and the training thread applies the update
    between two later steps.

    If a peer dies or the timeout passes, the ``await`` under way raises. That ends all exchange of
    the process group, and the error is raised before the next step. If an owner receives a
    parameter that is not finite, its part of the centre stays as it is, and the updates are NaN.

    Args:
        centre: this rank's part of the centre.
        values: this rank's parameters as a flat copy if it pulls, otherwise an empty tensor.
        pulls: for each rank, whether it pulls.
        link: the link that connects the ranks.
    """
    is_pulling = pulls[link.rank]
    layout = centre.layout if is_pulling else [0] * link.size
    incoming_layout = [len(centre.own) * each for each in pulls]
    incoming = centre.own.new_empty(sum(incoming_layout))
    # A rank that pulls sends each rank the parameters that belong to its part of the centre.
    await link.all_to_all(values, layout, incoming, incoming_layout)
    # all_to_all leaves the part that a rank sends to itself undefined.
    parts(incoming, incoming_layout)[link.rank].copy_(parts(values, layout)[link.rank])
    # Adding may take long, so it runs where it delays no other journey.
    await link.compute()
    former = centre.move(incoming.view(sum(pulls), len(centre.own)))
    del incoming  # frees memory before the whole centre is allocated
    whole = former.new_empty(sum(layout))
    if is_pulling:
        parts(whole, layout)[link.rank].copy_(former)
    # The ranks that pull receive the whole centre as it was before.
    if all(pulls):
        await link.all_gather(whole, layout)
    else:
        await link.all_to_all(former.repeat(sum(pulls)), incoming_layout, whole, layout)
    values.sub_(whole).mul_(-centre.rate)


class AveragingState(HookState):
    """Base class of states that average a model's replicas between steps.

    [Note: the clock] in ``_averaging/local_sgd.py`` explains how steps are counted.
    """

    # The codec of increments, as the user passed it.
    codec: CodecChoice | None = None

    def __init__(
        self,
        replica: Replica,
        group: dist.ProcessGroup | None,
        mutex: GPUMutex | None,
        model: DistributedDataParallel | None,
    ) -> None:
        super().__init__(group, model)
        self.mutex = mutex
        self._replica = replica
        # Removes this state's hooks from the model.
        self._cleanup = contextlib.ExitStack()
        # Backward passes that have reached the hook.
        self._steps = 0
        # The step after which the model last received the mean. It holds the mean until it steps.
        self._mean_step: int | None = None
        self._has_warned = False
        # Whether the replica's `begin` was called; the first local step calls it.
        self._has_begun = False
        self._is_closed = False
        # Corrects the optimizer's second moment in local steps, if one was given.
        self._second_moment: SecondMoment | None = None
        # The first error that an exchange raised. Every later step raises it again.
        self._failure: Exception | None = None
        # The time at which this step's computation began.
        self._step_begin_s: float | None = None
        # How long recent steps computed, for `plan`.
        self._records: deque[StepRecord] = deque(maxlen=16)

    def average(self) -> None:
        """Replace every rank's parameters and floating-point buffers by their mean over the ranks.

        Pending exchanges are applied first. Each rank keeps its own integer buffers. Call it at the
        end of training, or before a checkpoint from which training must continue bit for bit. It
        does nothing before the first ``backward()``, when ranks are equal.

        On failure: ``ExchangeError`` when a peer dies or the group's timeout passes;
        ``UnsupportedConfigurationError`` if the mean is not finite. **Collective**: all ranks call
        it, after the same number of steps.
        """
        if self._has_model("average()"):
            self._take_mean("average()", leave=False)

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        if self._replica.blocks:
            self._catch_up()
            beside = [
                own_part(tensor)
                for tensor in tensors_in([_without_counts(each) for each in optimizers])
                if tensor.is_floating_point() or tensor.is_complex()
            ]
            self._take_mean("checkpoint()", leave=False, beside=beside)
            self._share_step_counts(optimizers)
        common = self._common_moment()
        if self._second_moment is not None and common is not None:  # as in a resumed job
            self._second_moment.state = common

    def _share_step_counts(self, optimizers: Sequence[Any]) -> None:
        """Raise the step counts to the largest of any rank: a GradScaler may skip on one alone."""
        found = [
            state["step"]
            for each in optimizers
            for state in each.state_dict().get("state", {}).values()
            if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor)
        ]
        group = checks.resolve_group(self.process_group)
        counts = gather_objects(group, [float(count) for count in found])
        for count, largest in zip(found, map(max, zip(*counts, strict=True)), strict=True):
            count.fill_(largest)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model hold the mean inside the block, and its own values again afterwards.

        Use it for evaluation or for a checkpoint. Training continues as if the block had not been
        there, so `average` and `checkpoint` are refused inside it. The block copies the parameters.
        It fails like `average`, and is **collective** like `average`.

        Example::

            with state.averaged():
                torch.save(model.module.state_dict(), path)
        """
        if not self._has_model("averaged()"):
            yield
            return
        own = [(block.copy(block.whole), block.rounded_off) for block in self._replica.blocks]
        former_mean_step = self._mean_step
        self._block = "state.averaged()"
        try:
            self._take_mean("averaged()", leave=True)
            yield
        finally:
            self._mean_step = former_mean_step
            self._block = None
            for block, (values, rounded_off) in zip(self._replica.blocks, own, strict=True):
                block.unpack(block.whole, values, rounded_off)

    def plan(self) -> AveragingPlan:
        """Choose ``sync_every``, ``delay`` and ``fragments`` for this model on this link.

        The plan is the same on all ranks. It is based on the steps timed so far and on a few probes
        of the link, five megabytes in all, and picks the shortest interval at which no step has to
        wait for an exchange with this state's codec. Convergence is not taken into account; longer
        intervals hurt it. The plan's ``pays`` is False if gradients in four bits, which keep ranks
        equal, are predicted to be about as fast. Exchanges in flight are waited for.

        On failure: ``UnsupportedConfigurationError`` if there is only one rank, if fewer than two
        steps have run, if the model is on a GPU, because the host's clock cannot time kernels, or
        before the first exchange with a codec that is not one of ours, because its rate is not
        known yet.
        ``ValueError`` if an exchange would not end even within 4096 steps. **Collective**: all
        ranks call it between two steps, with no other traffic on the link.
        """
        self._replica.wait()  # other traffic would distort the probes
        blocks = self._replica.blocks
        group = checks.resolve_group(self.process_group)
        works, link = recorded_by_all(group, self._records)
        size_bytes = sum(block.numel * block.dtype.itemsize for block in blocks)
        compute_s = max(work.compute_s for work in works)
        rate = None
        if self.codec is not None:
            coded = self._replica.stats()["coded"]
            # Buffers and parameters with one dimension are not coded.
            is_known = coded["sent_bytes"] > 0
            own_rate = coded["rate"] if is_known else cost_of(self.codec, group.size()).rate
            rate = max(gather_objects(group, own_rate))  # ranks own parts of different content
        return plan_averaging(compute_s, size_bytes, link, rate=rate)

    def stats(self) -> dict[str, Any]:
        """Return the common statistics, this rank's exchanges and "waited_s". Not collective."""
        own = self._replica.stats()
        common = self._common_stats(
            codec=self.codec,
            coded=own.pop("coded", None),
            not_deferred="gradients stay on their rank, or are averaged in backward()",
        )
        return {
            **common,
            "steps": self._steps,
            "waited_s": self.meter.exposed_s,
            **own,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the averaging state by the parameters' names.

        The tensors are on the host. The state is the same on all ranks, and any number of ranks can
        load it. It does not contain pending exchanges: save it inside `averaged` or after
        `average`, when the parameters contain them. **Collective**: all ranks call it, between two
        steps.
        """
        self._catch_up()
        if self._mean_step != self._steps and self._replica.stats().get("in_flight"):
            logger.warning(
                "this state_dict() does not hold the exchanges in flight after step %d: call it "
                "inside of state.averaged(), or after state.average()",
                self._steps,
            )
        with torch.no_grad():
            kept = self._replica.state_dict() if self._has_begun else self._replica.loaded
        return {"steps": self._steps, "kept": kept, "second_moment": self._common_moment()}

    def _common_moment(self) -> list[list[float] | None] | None:
        """Return the mean of the ranks' sums for the second moment. **Collective**."""
        if self._second_moment is None:
            return None
        if not self._has_begun:  # it was loaded, and is the same on all ranks
            return self._second_moment.state
        group = checks.resolve_group(self.process_group)
        found = []
        for of_ranks in zip(*gather_objects(group, self._second_moment.state), strict=True):
            known = [sums for sums in of_ranks if sums is not None]
            # The mean of equal numbers must be that number, to the last bit.
            mean = [
                column[0] if len({*column}) == 1 else sum(column) / len(column)
                for column in zip(*known, strict=True)
            ]
            found.append(mean or None)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state_dict`. Call this before the first ``backward()``.

        Not collective, but all ranks must call it: otherwise the next ``backward()`` raises on all
        ranks. Raises ``ValueError`` if the state was saved with another model, another number of
        fragments of an outer optimizer, or with one where this state has none. Other arguments may
        differ.
        """
        moment = state.get("second_moment")  # version 0.1 had none
        own = {key: value for key, value in state.items() if key != "second_moment"}
        checks.check_keys(own, {"steps", "kept"}, "a state dict with 'steps' and 'kept'")
        if not isinstance(state["steps"], int):
            raise ValueError(
                f"expected a number of steps, got steps={state['steps']!r}; pass the result of "
                "state_dict()"
            )
        if self._has_begun:
            raise ValueError(
                f"this state has trained for {self._steps} steps already; make a new state, "
                "register it with a new DistributedDataParallel, and load then"
            )
        if self._second_moment is not None and moment is not None:
            self._second_moment.state = moment
        if state["kept"] is not None:
            self._replica.load_state_dict(state["kept"])
        self._steps = state["steps"]
        self._replica.acted = self._steps
        self.agreement.forget()

    def close(self) -> None:
        """Stop averaging. Later backward passes average gradients as the split hook does.

        Call `checkpoint` with the optimizers first. After `average` alone their momenta still
        differ, so replicas drift apart. Not collective, but all ranks must call it after the same
        number of steps.
        """
        if not self._is_closed:
            self._is_closed = True
            self._cleanup.close()
            if self._has_begun:
                self._replica.close()

    def _send(self, bucket: dist.GradBucket, exchange: Exchange) -> GradientFuture:
        """Return the bucket's Future. Raise an error if the bucket is refused."""
        if self._is_closed:
            return exchange.send(bucket, crossover, state=self).future
        exchange.checks.check(bucket)
        if self._block is not None:
            raise UnsupportedConfigurationError(
                f"expected no backward() of the DDP model inside of {self._block}, got one: the "
                "model gets its former parameters back, so the step would be lost; train outside"
            )
        self._enter(bucket)
        if self._steps >= self._replica.local_from:
            if not self._has_begun:
                self._begin_local_steps()
            elif self._replica.acted != self._steps:
                raise UnsupportedConfigurationError(
                    "this backward() follows no call of the DDP model, only one of its forward(): "
                    "parameters are averaged before such a call; write model(inputs), not "
                    "model.forward(inputs)"
                )
            # The bucket stays on this rank, so the exchange neither carries nor counts it.
            gradients = bucket.buffer()
            exchange.meter_of(self).steps += bucket.is_last()
            future = exchange.networks[gradients.device].place.future()
            future.set_result(gradients)
        else:
            future = exchange.send(bucket, crossover, turn=self.mutex, state=self).future
        if bucket.is_last():
            self._steps += 1
            if self._step_begin_s is not None:
                compute_s = time.monotonic() - self._step_begin_s
                self._records.append(((0, compute_s),))
            self._step_begin_s = None
        return future

    def _begin_local_steps(self) -> None:
        """Prepare for the first step that uses only this rank's gradients."""
        self._replica.acted = self._steps
        model = self.bound_model.model()
        if model is not None and checks.wants_buffers_broadcast(model):
            # Buffers are averaged with the parameters. In torch 2.14 this is a property.
            model.broadcast_buffers = False
            self._cleanup.callback(self._restore_broadcast)
        with torch.no_grad():
            self._replica.begin()
        self._replica.loaded = None
        self._has_begun = True
        self._cleanup.callback(before_next_step(self.bound_model.names, _check_optimizer))

    def _adopt(self, model: DistributedDataParallel) -> None:
        """Check the model, and install this state's hooks on it."""
        _check_model(model, self, is_local=self._replica.local_from < math.inf)
        checks.check_forward(model, "parameters are averaged before it")
        checks.check_not_joined(model, _WITHOUT_DATA)
        group = checks.resolve_group(self.process_group)
        self._replica.adopt(blocks_of(model), group, self.mutex, self.meter, average)
        before_forward = OwnHook(torch.compiler.disable(self._before_forward))
        handle = model.register_forward_pre_hook(before_forward, prepend=True)
        self._cleanup.callback(handle.remove)
        before_state_dict = OwnHook(self._warn_of_one_replica)
        handle = checks.network_of(model).register_state_dict_pre_hook(before_state_dict)
        self._cleanup.callback(handle.remove)
        logger.info("averaging: %s with %s", type(model.module).__name__, self._replica.settings)

    def fingerprint(self, bucket: dist.GradBucket) -> Mapping[str, object]:
        """Return the settings that all ranks must have in common."""
        if self._is_closed:
            return {}
        self._enter(bucket)
        tensors = [
            (entry.name, *entry.get().shape, block.dtype)
            for block in self._replica.blocks
            for entry in block.entries
        ]
        corrects = self._second_moment is not None
        settings = {**self._replica.settings, "corrects the second moment": corrects}
        return {"steps": self._steps, **settings, "model": tensors}

    def _enter(self, bucket: dist.GradBucket) -> None:
        """Check that ``bucket`` is from this state's model. Raise the error of an earlier step."""
        if self._failure is not None:
            raise self._failure
        if bucket.parameters()[0] not in self.bound_model.names:  # once per bucket
            model = self.bound_model.bind(bucket, self)
            if not self._replica.blocks:
                self._adopt(checks.needed(model))

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._is_closed:
            self._catch_up()
            if self._step_begin_s is None:
                self._step_begin_s = time.monotonic()

    def _catch_up(self) -> None:
        """Run the exchanges that are due. Raise the error of an earlier step."""
        if self._failure is not None:
            raise self._failure
        if self._has_begun and self._replica.acted < self._steps:
            model = self.bound_model.model()
            if model is not None and model._join_config.enable:
                checks.check_not_joined(model, _WITHOUT_DATA)
            with self._recording_failure(), torch.no_grad():
                while self._replica.acted < self._steps:
                    self._replica.acted += 1
                    self._replica.act()
        self._replica.acted = self._steps

    @contextlib.contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """Record an error that the block raises, so that every later step raises it again."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _has_model(self, call: str) -> bool:
        """Return whether there is a model to average.

        There is none before the first ``backward()``, when replicas do not differ yet. And with
        ``CROSSOVER_DISABLE=1`` every step is a plain all-reduce.
        """
        self._check_outside(call)
        self._catch_up()
        if not self._replica.blocks and not environment.is_set(environment.DISABLE):
            # Usual before an evaluation at step 0, but not at the end of training.
            level = logging.WARNING if call == "average()" else logging.INFO
            logger.log(
                level,
                "%s has nothing to do, since the hook has not been called yet: register it if the "
                "model has trained already",
                call,
            )
        return bool(self._replica.blocks)

    def _take_mean(self, call: str, *, leave: bool, beside: Sequence[torch.Tensor] = ()) -> None:
        """Replace the parameters and the tensors in ``beside`` by their mean. **Collective**.

        Args:
            call: the name of the public method, which must be the same on all ranks.
            leave: whether pending results stay pending; see `Replica.at_rest`.
            beside: other tensors to average.
        """
        replica = self._replica
        with self._recording_failure(), torch.no_grad():
            if replica.exchange.size > 1:
                # Without this, a rank that does not call would pair this exchange with its next
                # one.
                steps = {"steps": self._steps} if replica.steps_together else {}
                shapes = [(str(each.dtype), tuple(each.shape)) for each in beside]
                settings = {"call": call, **steps, "state of the optimizers": shapes}
                remedy = (
                    f"call {call} on all ranks after the same number of backward passes, and after "
                    "each optimizer's first step"
                )
                compare(replica.group, settings, remedy)
            with replica.at_rest(leave=leave) if self._has_begun else contextlib.nullcontext():
                replica.take_mean(beside)
            self._mean_step = self._steps

    def _restore_broadcast(self) -> None:
        model = self.bound_model.model()
        if model is not None:
            model.broadcast_buffers = True

    def _warn_of_one_replica(self, *_: Any) -> None:
        """Warn once if a state dict is one rank's own replica, which rank 0 might save for all."""
        differs = self._has_begun and self._mean_step != self._steps
        if differs and not self._has_warned and self._replica.exchange.size > 1:
            self._has_warned = True
            logger.warning(
                "this state_dict() is of one rank's replica, which differs from the others' after "
                "step %d: call state.checkpoint() on all ranks before, or enter state.averaged()",
                self._steps,
            )


class LocalSGDState(AveragingState):
    """State of `local_sgd_hook`: each rank trains on its own gradients, and replicas are averaged.

    The training loop stays as it is. With ``sync_every`` alone this is local SGD; with
    ``warmup_steps`` it is post-local SGD. ``delay`` gives the mean time to arrive: after step k +
    ``delay``, the parameters are corrected by the difference between the mean and the snapshot of
    step k, so that the steps in between are kept. With ``outer_optimizer`` it is DiLoCo; with
    ``fragments`` and ``delay`` as well, it is streaming DiLoCo. With ``sync_every=1`` and no delay
    it works like the split hook, with plain DDP's gradients.

    A step is a backward pass that reaches the hook. Several passes under ``no_sync()`` are part of
    one step. A step counts even if a GradScaler skips the optimizer's step on one rank alone.

    Floating-point buffers, such as BatchNorm's statistics, are averaged as well, without an outer
    step. DDP broadcasts no buffers from the first local step until `close`.

    Args:
        sync_every: the number of steps from one exchange of an element to the next.
        delay: the number of steps from a snapshot to its correction, at most ``sync_every``.
            Default 0.
        fragments: the number of equal slices into which the flat parameters are cut. The slices
            are sent after different steps. Snapshots take the memory of two copies of the slices in
            flight (one copy with ``delay=0``). Default 1.
        warmup_steps: the number of steps at the beginning in which gradients are averaged as DDP
            does. Default 0.
        outer_optimizer: a function that creates an optimizer for a list of tensors, such as
            ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``. The
            optimizer steps the common parameters by their distance to the mean. Each owner steps
            its own part, in float32 even for half precision. The optimizer must treat each element
            by itself. Default: no outer optimizer.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        outer_lr: the outer learning rate, or a function of the number of steps that returns it. It
            must be the same on all ranks, which compare it for the first outer step. Default: the
            outer optimizer's own ``lr``.
        codec: a codec such as ``Int4()``, or a pair for the two halves of an exchange. Ranks then
            send the change of their parameters since the last exchange, with error feedback in
            both halves. Parameters with one dimension, and buffers, are not coded. Parameters
            must be float32. It takes the memory of two more copies of the parameters (the common
            parameters and the residuals), and of a rank's part. Default: parameters travel.
        optimizer: the optimizer of the parameters, or several. In local steps the second moment of
            an Adam or AdamW is corrected for the noise of a rank's own batch, which is W times
            smaller with W ranks; see [Note: second moment] in ``_averaging/second_moment.py``.
            Optimizers without a second moment stay as they are. Default: no correction.
        mutex: the mutex for taking turns. The turn is released to a sibling job while parameters
            travel, or gradients in warm-up. It needs ``delay=0``. Default: no turns.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    On failure: the constructor raises ``ValueError`` for wrong arguments, ``TypeError`` for objects
    of other types, and ``UnsupportedConfigurationError`` for an ``optimizer`` that cannot be
    corrected (``amsgrad=True``, a β2 of 0, or one of another state). The first ``backward()`` raises
    ``UnsupportedConfigurationError`` for models that would wait in every step
    (``find_unused_parameters``, SyncBatchNorm), and with a codec for parameters in another dtype
    than float32. If parameters are not finite, all ranks raise
    ``UnsupportedConfigurationError`` before a step. When a peer has died, ``ExchangeError`` is
    raised before a step, in bounded time: restart the job.

    **Collective**: every rank registers the hook with the same arguments and makes the same number
    of steps. If ``CROSSOVER_DISABLE=1`` is set before that, the hook is a plain all-reduce.

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
        outer_lr: float | OuterRate | None = None,
        codec: CodecChoice | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        mutex: GPUMutex | None = None,
        model: DistributedDataParallel | None = None,
    ) -> None:
        schedule = Schedule(sync_every, delay, fragments, warmup_steps)
        if codec is not None and not schedule.is_local:
            raise ValueError(
                "expected delay=1 with sync_every=1 and a codec, got delay=0: every step averages "
                "all gradients then, and no parameters; pass delay=1, or use CompressedState"
            )
        _check_waits(mutex, "delay=0", f"delay={delay}")
        if outer_optimizer is not None and not schedule.is_local:
            raise ValueError(
                "expected sync_every >= 2 with an outer optimizer, got sync_every=1: replicas "
                "never differ then; leave outer_optimizer out"
            )
        if outer_lr is not None and outer_optimizer is None:
            raise ValueError(
                "expected an outer optimizer with outer_lr, got none: there is no outer step to take; "
                "pass outer_optimizer, or leave outer_lr out"
            )
        if not (outer_lr is None or callable(outer_lr)):
            outer_lr = constant(float(outer_lr))
        make_codec = None
        if codec is not None:
            has_work = outer_optimizer is not None
            make_codec = functools.partial(CodedVector, codecs_of(codec), has_work=has_work)
        replica = LocalSGDReplica(schedule, outer_optimizer, outer_lr, in_words(codec), make_codec)
        super().__init__(replica, process_group, mutex, model)
        self.codec = codec
        self.optimizer = optimizer
        if optimizer is not None and not environment.is_set(environment.DISABLE):
            given = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
            if not all(isinstance(each, Optimizer) for each in given):
                raise TypeError(
                    f"expected an optimizer or several, got optimizer={optimizer!r}; pass the object "
                    "whose step() your loop calls"
                )
            self._second_moment = SecondMoment(given, self._ranks_apart)
            self._cleanup.enter_context(self._second_moment.hooks)

    def scaled_max_norm(self, max_norm: float) -> float:
        """Return the bound with which to clip this step's gradients, instead of ``max_norm``.

        The norm of a rank's own gradient is about 1/√r of the mean gradient's, because it has more
        noise, so the same bound would clip more of it. In local steps this returns max_norm / √r,
        with r as estimated for the second moment; in warm-up, and before the first estimate,
        ``max_norm``. The bounds of ranks may differ slightly. Not collective.

        Raises ``UnsupportedConfigurationError`` without ``optimizer``, which the estimate needs.

        Example::

            clip_grad_norm_(model.parameters(), state.scaled_max_norm(1.0))
        """
        if environment.is_set(environment.DISABLE):
            return max_norm
        if self._second_moment is None:
            raise UnsupportedConfigurationError(
                "expected LocalSGDState(optimizer=...), got none: gradient noise is estimated from "
                "the first moments of Adam or AdamW; pass the optimizer, or choose a bound yourself"
            )
        return max_norm / math.sqrt(self._second_moment.ratio())

    def _ranks_apart(self) -> int:
        """Return the number of ranks if the last gradients were this rank's own; otherwise 1."""
        is_local = self._has_begun and not self._is_closed
        return self._replica.exchange.size if is_local else 1


def local_sgd_hook(
    state: LocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket with this rank's own gradients. `LocalSGDState` describes the exchanges.

    Args:
        state: the model's state; create one per model.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that is already complete. In warm-up steps, and with ``sync_every=1``, it is the
        split hook's Future.

    On failure: the hook itself raises nothing; see `LocalSGDState`. **Collective**: DDP calls it on
    all ranks in the same order. Source: see the module's docstring.
    """
    return run_hook(
        state,
        bucket,
        LocalSGDState,
        _REMEDY,
        lambda exchange: state._send(bucket, exchange),
        compares=False,
    )


class ElasticState(AveragingState):
    """State of `elastic_hook`: ranks train on their own gradients, tied to a common centre.

    Every ``sync_every`` steps a rank is pulled towards the centre by δ = α(x - c), as if by a
    spring. The centre is pulled towards the rank by the same δ. The training loop stays as it is.
    The modes differ in where the centre is and in which ranks wait:

    * ``"sync"``: EASGD. All ranks pull in the same step, and wait for each other.
    * ``"async"``: EASGD in which no rank waits. Each rank has a thread that runs rounds with the
      other ranks' threads, using the parameters that each rank offered last. A pull is applied
      between two steps once it has arrived. A slow rank delays no other rank, and its pulls are not
      lost.
    * ``"wild"``: EA-wild. The ranks on one host pull a centre in shared memory, at the same time
      and without a lock. The hosts pull their centres together as in "async".

    The centre and the values on the wire are float32, whatever the parameters' dtype. Each rank
    owns a part of the centre. In "wild" each host also has a centre of its own, and each rank owns
    a part of the centre that the hosts share.

    Args:
        sync_every: the number of steps between two pulls of a rank. In "async" there are more steps
            between pulls while the network is slower.
        mode: one of the modes above. Default "async".
        moving_rate: α, which must be less than 2 / (ranks + 1). Default: 0.9 / ranks, the value
            that EASGD's authors use.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        mutex: the mutex for taking turns. The turn is released to a sibling job while parameters
            travel. It needs mode="sync". Default: no turns.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    On failure: the constructor raises ``ValueError`` for wrong arguments. The first ``backward()``
    raises ``UnsupportedConfigurationError`` for models that would wait in every step (see
    `LocalSGDState`). ``ExchangeError`` is raised before a step when a peer has died or has been
    silent for the group's timeout. Until then the other ranks train on, but no rank trains alone
    for longer. A rank whose parameters are not finite offers nothing and logs a warning; in "sync"
    all ranks raise an error.

    **Collective**: every rank registers the hook with the same arguments. In "async" and "wild",
    ranks may make different numbers of steps between two calls of `average`. Training must end with
    such a call, because the model to evaluate is the mean over the ranks. `state_dict` contains the
    centre.

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
        model: DistributedDataParallel | None = None,
    ) -> None:
        modes = (SyncElasticReplica, AsyncElasticReplica, WildElasticReplica)
        replicas = {replica.mode: replica for replica in modes}
        if mode not in replicas:
            raise ValueError(
                f"expected mode='sync', 'async' or 'wild', got mode={mode!r}; see ElasticState"
            )
        Schedule(sync_every)  # checks it
        moving_rate_for(checks.resolve_group(process_group).size(), moving_rate)
        _check_waits(mutex, "mode='sync'", f"mode={mode!r}")
        self.mode = mode
        self._elastic: ElasticReplica = replicas[mode](sync_every, moving_rate, pull)
        super().__init__(self._elastic, process_group, mutex, model)

    def rounds(self) -> list[ElasticRound]:
        """Return the rounds as this rank saw them, for a replay. Not collective.

        In mode "wild" they are the hosts' rounds. ``offered`` holds, for each rank, the number of
        steps after which the rank made its offer for this round, or None if it made none.
        ``collected`` is the number of steps after which this rank applied its pull, or None if it
        has not applied it yet.
        """
        return [*self._elastic.log]


def elastic_hook(
    state: ElasticState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return the bucket with this rank's own gradients. `ElasticState` describes the exchanges.

    Args:
        state: the model's state; create one per model.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that is already complete.

    On failure: the hook itself raises nothing; see `ElasticState`. **Collective**: DDP calls it on
    all ranks in the same order. Sources: EASGD (arXiv 1412.6651) and its authors' code, and the
    abstract of EA-wild (HPC Asia 2020). Rounds without a server and a centre for each host are our
    design.
    """
    return run_hook(
        state,
        bucket,
        ElasticState,
        _REMEDY,
        lambda exchange: state._send(bucket, exchange),
        compares=False,
    )


def _without_counts(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's state for each parameter without the step counts."""
    states = optimizer.state_dict()
    by_parameter = states.get("state", states).values()
    return [
        {name: value for name, value in state.items() if name != "step"}
        for state in by_parameter
        if isinstance(state, dict)
    ]


def _check_waits(mutex: GPUMutex | None, wanted: str, got: str) -> None:
    """Refuse a mutex in a configuration where no step waits for an exchange."""
    if mutex is not None and got != wanted:
        raise ValueError(
            f"expected {wanted} with a mutex, got {got}: no step waits for an exchange then, so "
            f"there is no time to give away; leave mutex out, or pass {wanted}"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps each parameter on one rank, with only that rank's gradient."""
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise UnsupportedConfigurationError(
            "expected an optimizer that steps all of this rank's parameters, got "
            f"{type(optimizer).__name__}: with local steps each parameter would be stepped by its "
            "owner's gradient alone, and the samples of the other ranks would be lost for it; use "
            "the optimizer inside of it for all parameters, or another hook (the split, crossover "
            "and codecs work with it; OwnerState divides the state as well)"
        )


def _check_model(model: DistributedDataParallel, state: object, *, is_local: bool) -> None:
    """Refuse a hook inside another hook, and models that do not suit local steps."""
    for hook, registered in getattr(model, "_comm_hooks", ()):
        if registered is not state or not getattr(hook, "__module__", _OWN).startswith(_OWN):
            raise UnsupportedConfigurationError(
                "expected this hook registered by itself, got it inside of "
                f"{getattr(hook, '__qualname__', hook)}: local steps send no gradients, so a "
                "wrapper has nothing to compress and no turn to give away; register it directly "
                "(and pass mutex= for turns)"
            )
    if is_local:
        _check_local(model)


def _check_local(model: DistributedDataParallel) -> None:
    """Refuse models whose ranks would wait for each other in every step."""
    if model.find_unused_parameters:
        raise UnsupportedConfigurationError(
            "expected find_unused_parameters=False, got True: DDP would exchange a map of used "
            "parameters in every step; build DistributedDataParallel(..., "
            "find_unused_parameters=False) and let every parameter take part"
        )
    for name, module in checks.network_of(model).named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedConfigurationError(
                f"expected modules without collectives, got SyncBatchNorm {name}, which waits for "
                "all ranks in every step; use BatchNorm, whose statistics are averaged with the "
                "parameters"
            )
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(_is_of_kfac(hook) for hook in hooks):
            raise UnsupportedConfigurationError(
                f"expected a model without K-FAC, got a KFACState that watches module '{name}': it "
                "preconditions the mean gradient, which a local step does not have; register "
                "kfac_hook instead, or make no KFACState"
            )


def _is_of_kfac(hook: object) -> bool:
    function = getattr(hook, "func", hook)  # an `OwnHook` is a partial
    return str(getattr(function, "__module__", "")).startswith("crossover_ddp._kfac")
