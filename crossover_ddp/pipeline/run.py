"""Runs a plan: each rank computes the actions of its stages in the plan's order.

[Note: gradients leave early]
The gradient of a stage's input is sent from a hook on that leaf, not after ``backward()``. A stage
with replicas is a DDP model, whose backward ends only after its gradient exchange. The previous
stage need not wait for that exchange.

[Note: no replica waits for another within a step]
Through the previous stages, the last forward of a replica may depend on a message that another
replica sends only after its own last backward. So no forward and no backward may wait for the other
replicas. Two collectives could make them wait. The exchange would ask the replicas about buffers.
Here it does not, since each replica keeps its own. DDP would rebuild its buckets in the forward
after the first backward. The runner does that at the end of the step instead.

[Note: bands and turns]
With a mutex, a step is cut into bands (`schedule.bands`). Each band is one turn of the job. Inside
a band, a rank waits only for messages from the same or an earlier band of its own job. All devices
see the same order of turns, so the turns of these bands have begun on every device. Inside a turn,
a rank therefore never waits for another job, and turns stay free of deadlocks. A rank without
actions in a band releases the turn at once, so that a sibling can compute.

[Note: out of step]
Two jobs with the same plan that begin together would have their bubbles at the same times. So a job
skips some turns before its first step. It derives how many from its job number, which is random and
the same on all its ranks. Our design.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.groups import compare
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex

from .model import BACKWARD, FORWARD, Action
from .plan import Plan

# Each replica keeps its own buffers. Torch 2.14 renamed the argument, and warns about the old name.
_ARGUMENTS: Final = inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS: Final[dict[str, Any]] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}
_POSTED_AHEAD: Final = 4
"""How many receives to post before they are needed.

Gloo sends only to a posted receive.
"""


def _summing_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum the gradients of the replicas.

    Each replica has only the part of the gradient from its own micro-batches.
    """
    # The hook takes the mean. Multiplying by the number of replicas first makes it a sum.
    bucket.buffer().mul_(process_group.size())
    return reduce_scatter_all_gather_hook(process_group, bucket)


class PipelineRunner:
    """Train the layers according to a plan. Public as ``crossover_ddp.pipeline.Runner``.

    After `step`, each parameter of this rank's stages has the gradient of the mean loss over the
    whole batch. It equals the gradient of the uncut model, up to the order of additions.
    Rank i is device i of the plan's cluster.

    Args:
        plan: the plan. It must be the same on all ranks, and have no split backward.
        layers: the whole chain, on the CPU, with the same values on all ranks. This rank keeps only
            its stages.
        loss_fn: called as ``loss_fn(output, target)``. It must return the mean over the
            micro-batch.
        mutex: the mutex for taking turns with sibling jobs. Each band of a step is one turn
            (`BandTurns`). Default None: no turns.

    On failure: ``ValueError`` if the plan has a split backward or is for other layers or ranks, and
    if stages share parameters. `UnsupportedConfigurationError` for a backend other than gloo, for
    layers that are not on the CPU, and if ranks have different plans. So plan on one rank, save the
    plan, and load it on all ranks. If a peer dies, or the default group's timeout passes, `step`
    raises torch's error; restart the job.

    **Collective**: all ranks of the default process group must create the runner and call `step`.
    This includes ranks without a stage.

    Example::

        runner = Runner(plan, layers, nn.functional.cross_entropy)
        # A rank may have no stage, and an optimizer needs a parameter.
        optimizer = torch.optim.SGD([*runner.parameters()] or [torch.zeros(1)], lr=0.1)
        loss = runner.step(x, y)
        optimizer.step()
    """

    def __init__(
        self,
        plan: Plan,
        layers: Sequence[nn.Module],
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        mutex: GPUMutex | None = None,
    ) -> None:
        _check(plan, layers)
        self.plan = plan
        self.mutex = mutex
        self._loss_fn = loss_fn
        self._rank = dist.get_rank()
        self._last = len(plan.stages) - 1
        # A rank without a stage takes part in the turns of all bands.
        bands = plan.bands()
        self._bands = bands.get(self._rank) or [[] for _ in next(iter(bands.values()))]
        self._turns = None if mutex is None else BandTurns(mutex, len(self._bands))
        # This rank's stages by number, without DDP's wrapper.
        self.modules: dict[int, nn.Module] = {}
        # The same, with the wrapper where a stage has replicas.
        self._models: dict[int, nn.Module] = {}
        self._replicated: list[DistributedDataParallel] = []
        # The replicas of this rank's last stage.
        self._last_group: dist.ProcessGroup | None = None
        for number, stage in enumerate(plan.stages):
            # Every rank creates every group, in the order of stages.
            made = dist.new_group(list(stage.devices)) if len(stage.devices) > 1 else None
            # Outside the group, torch returns a constant that is not a process group.
            group = made if isinstance(made, dist.ProcessGroup) else None
            if self._rank not in stage.devices:
                continue
            module = nn.Sequential(*layers[stage.start : stage.stop])
            self.modules[number] = module
            self._models[number] = module
            self._last_group = group
            if group is not None and any(p.requires_grad for p in module.parameters()):
                model = DistributedDataParallel(module, process_group=group, **_OWN_BUFFERS)
                model.register_comm_hook(group, _summing_hook)
                Exchange.of(group).leaves_buffers_to_ddp = True
                self._models[number] = model
                self._replicated.append(model)
        # The last backward of each stage on this rank. Replicas exchange gradients in it.
        self._final = {
            action.stage: action
            for action in plan.orders.get(self._rank, ())
            if action.kind == BACKWARD
        }

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for an optimizer."""
        for module in self.modules.values():
            yield from module.parameters()

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        """Run forward and backward on a batch. Gradients accumulate, as with ``backward()``.

        Args:
            x: the whole batch. The size of its first dimension must be a multiple of M. Only ranks
                of the first stage use it.
            y: the targets of the whole batch. Only ranks of the last stage use them.

        Returns the mean loss on ranks of the last stage, and None on others. **Collective.**
        """
        inputs = _micros("x", x, self.plan.microbatches)
        targets = _micros("y", y, self.plan.microbatches)
        run = _StepRun(self, inputs, targets)
        for model in self._replicated:
            for parameter in model.parameters():
                # Each replica keeps a part of the earlier gradient. `_summing_hook` sums the parts.
                if parameter.grad is not None:
                    parameter.grad.div_(model.process_group.size())
        for number, band in enumerate(self._bands):
            with contextlib.nullcontext() if self._turns is None else self._turns.band(number):
                for action in band:
                    run.compute(action)
        run.finish()
        for model in self._replicated:  # [Note: no replica waits for another within a step]
            if model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True
        if self._last not in self.modules:
            return None
        loss = torch.stack(run.losses).sum()
        if self._last_group is not None:
            dist.all_reduce(loss, group=self._last_group)
        return loss


def _check(plan: Plan, layers: Sequence[nn.Module]) -> None:
    if plan.split:
        raise ValueError(
            "expected a plan with whole backwards, which DDP needs, got split=True; plan with "
            "split=False, or give plan.csv() to torch's schedules"
        )
    if len(layers) != len(plan.layers):
        raise ValueError(
            f"expected the {len(plan.layers)} layers of the plan, got {len(layers)}; "
            "give the chain that was profiled"
        )
    if (group := dist.group.WORLD) is None or "gloo" not in dist.get_backend():
        raise UnsupportedConfigurationError(
            "expected a default process group on gloo, got none or another backend; call "
            "torch.distributed.init_process_group('gloo') first"
        )
    if any(p.device.type != "cpu" for layer in layers for p in layer.parameters()):
        raise UnsupportedConfigurationError(
            "expected layers on the CPU, got parameters on another device; gloo sends only tensors "
            "of the CPU from rank to rank"
        )
    if group.size() != len(plan.devices):
        raise ValueError(
            f"expected a rank for each of the plan's {len(plan.devices)} devices, "
            f"got {group.size()} ranks; start as many, or plan for them"
        )
    stages: dict[nn.Parameter, int] = {}
    for place, stage in enumerate(plan.stages):
        for parameter in nn.ModuleList(layers[stage.start : stage.stop]).parameters():
            if stages.setdefault(parameter, place) != place:
                raise ValueError(
                    "expected parameters of one stage each, got one of stages "
                    f"{stages[parameter]} and {place}; untie the layers' parameters, or make one "
                    "layer of all that share them"
                )
    compare(group, {"plan": plan.to_json()})


def _micros(name: str, batch: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    if len(batch) % count or not len(batch):
        raise ValueError(
            f"expected a batch that can be divided into {count} micro-batches, "
            f"got len({name})={len(batch)}; drop the last batch"
        )
    return batch.chunk(count)


class BandTurns:
    """Take one turn for each band of a step. All ranks of the job must make the same calls.

    Args:
        mutex: the job's mutex.
        count: the number of bands in a step.
    """

    def __init__(self, mutex: GPUMutex, count: int) -> None:
        self._mutex = mutex
        self._count = count
        # Turns to skip before the first step. Job numbers are odd, so the last bit is dropped.
        self._skipped = (mutex.job >> 1) % count

    @contextlib.contextmanager
    def band(self, number: int) -> Iterator[None]:
        """Hold the turn of a band while the body runs. Band numbers begin at 0."""
        for _ in range(self._skipped):  # [Note: out of step]
            self._mutex.acquire()
            self._mutex.release()
        self._skipped = 0
        self._mutex.acquire()
        try:
            yield
        finally:
            self._mutex.release()
        if number + 1 < self._count:
            self._mutex.request()


class _StepRun:
    """One step on one rank: its results, and the messages in flight."""

    def __init__(
        self,
        runner: PipelineRunner,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self._runner = runner
        self._plan = runner.plan
        self._inputs = inputs
        self._targets = targets
        # The output and input of each forward, by stage and micro-batch.
        self._computed: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # A message is the result of an action. The action serves as its name.
        # Messages between two stages on this rank.
        self._local: dict[Action, torch.Tensor] = {}
        # Posted receives: the buffer, and the handle to wait for.
        self._posted: dict[Action, tuple[torch.Tensor, Any]] = {}
        # Sends under way. The tensors are kept until they have been sent.
        self._sending: list[tuple[torch.Tensor, Any]] = []
        self._sent: set[Action] = set()
        # Losses of this rank's micro-batches on the last stage, each divided by M.
        self.losses: list[torch.Tensor] = []
        actions = self._plan.orders.get(runner._rank, ())
        needs = [(need, action) for action in actions if (need := self._needed(action))]
        # Messages from other ranks whose receive is not posted yet, in the order of their use.
        self._awaited = deque(
            need for need, action in needs if self._device(need) != self._device(action)
        )
        self._post()

    def compute(self, action: Action) -> None:
        if action.kind == FORWARD:
            self._forward(action)
        else:
            self._backward(action)

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        for _, work in self._sending:
            work.wait()

    # --- compute ----------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, _, micro = action
        needed = self._needed(action)
        leaf = self._inputs[micro] if needed is None else self._receive(needed)
        if needed is not None and leaf.is_floating_point():
            leaf.requires_grad_()

            def send(tensor: torch.Tensor) -> None:  # [Note: gradients leave early]
                assert tensor.grad is not None
                self._send(Action(stage, BACKWARD, micro), stage - 1, tensor.grad)

            leaf.register_post_accumulate_grad_hook(send)
        model = self._runner._models[stage]
        with _unsynchronized(model):
            # Copy a leaf: the first layer may work in place, which autograd forbids on leaves.
            output = model(leaf.clone() if leaf.requires_grad else leaf)
        if stage == self._runner._last:
            output = self._runner._loss_fn(output, self._targets[micro]) / self._plan.microbatches
            self.losses.append(output.detach())
        else:
            self._check_output(stage, output)
            self._send(action, stage + 1, output.detach())
        self._computed[stage, micro] = output, leaf

    def _check_output(self, stage: int, output: torch.Tensor) -> None:
        shape, dtype = self._plan.outputs[stage]
        found = tuple(output.shape), str(output.dtype).removeprefix("torch.")
        if found != (shape, dtype):
            raise ValueError(
                "expected micro-batches of the size that was profiled, with an output of "
                f"{dtype}{list(shape)} of stage {stage}, got {found[1]}{list(found[0])}; "
                "profile with a sample of the micro-batch's size"
            )

    def _backward(self, action: Action) -> None:
        stage, _, micro = action
        needed = self._needed(action)
        gradient = None if needed is None else self._receive(needed)
        output, leaf = self._computed.pop((stage, micro))
        model = self._runner._models[stage]
        final = self._runner._final[stage] == action
        if output.requires_grad:
            if final and isinstance(model, DistributedDataParallel):
                # DDP's forward could not prepare this, since backwards of other micro-batches came
                # in between. Torch's own pipeline stages do the same.
                model.reducer.prepare_for_backward([output])
            with contextlib.nullcontext() if final else _unsynchronized(model):
                output.backward(gradient)
        # If the leaf has no gradient, the output does not depend on the input: send zeros.
        if stage and action not in self._sent:
            self._send(action, stage - 1, torch.zeros_like(leaf))
        leaf.grad = None

    # --- messages ---------------------------------------------------------------------------------

    def _needed(self, action: Action) -> Action | None:
        """Return the action on another stage whose result ``action`` needs, or None."""
        stage = action.stage + (-1 if action.kind == FORWARD else 1)
        return action._replace(stage=stage) if 0 <= stage <= self._runner._last else None

    def _device(self, action: Action) -> int:
        return self._plan.stages[action.stage].device(action.micro)

    def _tag(self, action: Action) -> int:
        kind = 2 * action.stage + (action.kind == BACKWARD)
        return kind * self._plan.microbatches + action.micro

    def _post(self) -> None:
        while self._awaited and len(self._posted) < _POSTED_AHEAD:
            message = self._awaited.popleft()
            # The gradient of a stage's input has the shape of the previous stage's output.
            shape, dtype = self._plan.outputs[message.stage - (message.kind == BACKWARD)]
            buffer = torch.empty(shape, dtype=getattr(torch, dtype))
            work = dist.irecv(buffer, self._device(message), tag=self._tag(message))
            self._posted[message] = buffer, work

    def _receive(self, message: Action) -> torch.Tensor:
        if message in self._local:
            return self._local.pop(message)
        buffer, work = self._posted.pop(message)
        self._post()
        work.wait()
        return buffer

    def _send(self, message: Action, stage: int, tensor: torch.Tensor) -> None:
        """Send the result of an action to the device that computes its micro-batch on ``stage``."""
        target = self._device(message._replace(stage=stage))
        self._sent.add(message)
        if target == self._device(message):
            self._local[message] = tensor.detach().clone()
            return
        self._sending = [each for each in self._sending if not each[1].is_completed()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, target, tag=self._tag(message))
        self._sending.append((tensor, work))


def _unsynchronized(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return contextlib.nullcontext()
