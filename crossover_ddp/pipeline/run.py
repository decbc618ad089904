"""Runs a plan: each rank computes the actions of its stages in the plan's order.

[Note: entries]
The input of a stage is the result of an autograd function, `_Entry`. Its backward sends the
gradient to the previous stage, before ``backward()`` has returned. The function keeps no data. An
input that is a leaf would keep its data until backward, and a layer that works in place would need
a copy.

[Note: outputs are released]
A stage keeps only tensors that its layers save for backward. It keeps the gradient edge of an
output, and autograd begins backward there. A send keeps the output until it has been sent. Gloo
notes this only in ``wait()``, so a thread waits for the sends.

[Note: no replica waits for another within a step]
Through the previous stages, the last forward of a replica may depend on a message that another
replica sends only after its own last backward. So no forward and no backward may wait for the other
replicas. A replica begins to exchange gradients in its last backward, and waits for the exchange at
the end of the step. In a simulated step no action waits for an exchange either.

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

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from crossover_ddp._ddp.groups import compare
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex

from .chain import LayerChain
from .materialize import check_resets, materialize
from .model import BACKWARD, FORWARD, Action
from .plan import Plan

_POSTED_AHEAD: Final = 4
"""How many receives to post before they are needed.

Gloo sends only to a posted receive.
"""


class PipelineRunner:
    """Train the layers according to a plan. Public as ``crossover_ddp.pipeline.Runner``.

    After `step`, each parameter of this rank's stages has the gradient of the mean loss over the
    whole batch. It equals the gradient of the uncut model, up to the order of additions.
    Rank i is device i of the plan's cluster. Replicas of a stage begin with the values of the first
    replica.

    Args:
        plan: the plan. It must be the same on all ranks, and have no split backward.
        layers: the whole chain, on the CPU or on the meta device. This rank keeps only its stages.
            It initializes their layers if they are on the meta device; see `materialize`. Layers
            on the CPU must have the same values on all ranks.
        loss_fn: called as ``loss_fn(output, target)``. It must return the mean over the
            micro-batch.
        mutex: the mutex for taking turns with sibling jobs. Each band of a step is one turn
            (`BandTurns`). Default None: no turns.

    On failure: ``ValueError`` if the plan has a split backward or is for other layers or ranks, and
    if stages share parameters. `UnsupportedConfigurationError` for a backend other than gloo, for
    layers on other devices, for modules on the meta device without ``reset_parameters()``, and if
    ranks have different plans. So plan on one rank, save the plan, and load it on all ranks. If a
    peer dies, or the default group's timeout passes, `step` raises torch's error; restart the job.

    **Collective**: all ranks of the default process group must create the runner and call `step`.
    This includes ranks without a stage.

    Example::

        runner = Runner(plan, layers, nn.functional.cross_entropy)
        # A rank may have no stage, and an optimizer needs a parameter.
        optimizer = torch.optim.SGD([*runner.parameters()] or [torch.zeros(1)], lr=0.1)
        loss = runner.step(x, y)
        runner.clip_grad_norm_(1.0)
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
        # A rank without actions takes part in the turns of all bands.
        bands = plan.bands()
        self._bands = bands.get(self._rank) or [[] for _ in next(iter(bands.values()))]
        self._turns = None if mutex is None else BandTurns(mutex, len(self._bands))
        # This rank's stages by number.
        self.modules: dict[int, LayerChain] = {}
        # The process groups of those stages that have replicas.
        self._groups: dict[int, dist.ProcessGroup] = {}
        # This rank's layers, by their names in the whole chain.
        self._layers = nn.ModuleDict()
        for number, stage in enumerate(plan.stages):
            # Every rank creates every group, in the order of stages.
            group = dist.new_group(list(stage.devices)) if len(stage.devices) > 1 else None
            if self._rank not in stage.devices:
                continue
            module = LayerChain(
                *layers[stage.start : stage.stop], recomputed=plan.recomputed_in(number)
            )
            materialize(module, "cpu")
            self.modules[number] = module
            for place, layer in enumerate(module, stage.start):
                self._layers[str(place)] = layer
            if isinstance(group, dist.ProcessGroup):
                self._groups[number] = group
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.detach(), stage.devices[0], group=group)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, for an optimizer."""
        return self._layers.parameters()

    def train(self, mode: bool = True) -> None:
        """Set this rank's layers to training mode, or to evaluation mode if ``mode`` is False."""
        self._layers.train(mode)

    def eval(self) -> None:
        """Set this rank's layers to evaluation mode."""
        self._layers.eval()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages, by the names of the whole chain.

        All ranks together have the state of ``nn.Sequential(*layers)``.
        """
        return self._layers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a state.

        Args:
            state: the state of the whole chain, or at least of this rank's stages.

        On failure: torch's ``RuntimeError`` with the names that are missing or have another shape.
        """
        own = self._layers.state_dict().keys() & state.keys()
        self._layers.load_state_dict({name: state[name] for name in own})

    def step(
        self, x: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run forward and backward on a batch. Gradients accumulate, as with ``backward()``.

        Args:
            x: the whole batch. The size of its first dimension must be a multiple of M. Only ranks
                of the first stage use it. Others may leave it out.
            y: the targets of the whole batch. Only ranks of the last stage use them. Others may
                leave them out.

        Returns the mean loss on ranks of the last stage, and None on others.

        On failure: ``TypeError`` if a batch is missing or is no tensor, or if the loss is no single
        number. ``ValueError`` for a batch of the wrong size.

        **Collective.**
        """
        return self._run(x, y, train=True)

    def evaluate(
        self, x: torch.Tensor | None = None, y: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the mean loss on a batch, without gradients. Call `eval` first.

        Arguments, result and failures are those of `step`. **Collective.**
        """
        return self._run(x, y, train=False)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages so that their norm is at most ``max_norm``.

        Replicas of a stage count once.

        Args:
            max_norm: the greatest 2-norm of all gradients together.

        Returns the norm before, on all ranks. **Collective.**
        """
        counted = [
            parameter.grad
            for number, module in self.modules.items()
            if self.plan.stages[number].devices[0] == self._rank
            for parameter in module.parameters()
            if parameter.grad is not None
        ]
        square = nn.utils.get_total_norm(counted).double().square()
        dist.all_reduce(square)
        norm = square.sqrt().float()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def _run(
        self, x: torch.Tensor | None, y: torch.Tensor | None, *, train: bool
    ) -> torch.Tensor | None:
        last = len(self.plan.stages) - 1
        inputs = _micros("x", x, self.plan.microbatches, needed=self._computes(0))
        targets = _micros("y", y, self.plan.microbatches, needed=self._computes(last))
        bands = [[each for each in band if train or each.kind == FORWARD] for band in self._bands]
        messages = _Messages(self.plan, [*itertools.chain(*bands)])
        sums = {
            number: _Sum(self.modules[number], group)
            for number, group in self._groups.items()
            if train
        }
        step = _Step(self, inputs, targets, messages, sums)
        with messages, torch.set_grad_enabled(train):
            for number, band in enumerate(bands):
                with contextlib.nullcontext() if self._turns is None else self._turns.band(number):
                    for action in band:
                        step.compute(action)
        for each in sums.values():
            each.finish()
        return self._mean(step.loss) if last in self.modules else None

    def _computes(self, stage: int) -> bool:
        """Return whether this rank computes micro-batches on a stage."""
        return any(action.stage == stage for band in self._bands for action in band)

    def _mean(self, loss: float) -> torch.Tensor:
        """Return the mean of all micro-batches' losses, given the sum of those on this rank."""
        total = torch.tensor(loss, dtype=torch.float64)
        if (group := self._groups.get(len(self.plan.stages) - 1)) is not None:
            dist.all_reduce(total, group=group)
        return (total / self.plan.microbatches).float()


def _check(plan: Plan, layers: Sequence[nn.Module]) -> None:
    if plan.split:
        raise ValueError(
            "expected a plan with whole backwards, got split=True; plan with split=False, or give "
            "plan.csv() to torch's schedules"
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
    if any(p.device.type not in ("cpu", "meta") for each in layers for p in each.parameters()):
        raise UnsupportedConfigurationError(
            "expected layers on the CPU or the meta device, got parameters on another device; gloo "
            "sends only tensors of the CPU from rank to rank"
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
    check_resets(layers)
    remedy = "plan on one rank, save the plan, and load it on all ranks"
    compare(group, {"plan": plan.to_json()}, remedy)


def _micros(name: str, batch: Any, count: int, *, needed: bool) -> Sequence[torch.Tensor]:
    """Divide a batch into micro-batches. Ranks that do not need the batch may have none."""
    if batch is None and not needed:
        return ()
    if not isinstance(batch, torch.Tensor):
        raise TypeError(
            f"expected a tensor with the whole batch, got {name} of type {type(batch).__name__}; "
            "ranks of the first stage need x, and those of the last stage need y"
        )
    size = len(batch) if batch.dim() else 0
    if size % count or not size:
        raise ValueError(
            f"expected a batch that can be divided into {count} micro-batches, "
            f"got len({name})={size}; drop the last batch"
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


class _Step:
    """Computes the actions of one step on one rank."""

    def __init__(
        self,
        runner: PipelineRunner,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        messages: "_Messages",
        sums: Mapping[int, "_Sum"],
    ) -> None:
        self._plan = runner.plan
        self._modules = runner.modules
        self._loss_fn = runner._loss_fn
        self._inputs = inputs
        self._targets = targets
        self._messages = messages
        self._sums = sums
        # Where the backward of each computed forward begins, by stage and micro-batch.
        self._edges: dict[tuple[int, int], GradientEdge] = {}
        # The sum of the losses of this rank's micro-batches.
        self.loss = 0.0
        # The last backward of each stage on this rank. Replicas exchange gradients in it.
        self._final = {each.stage: each for each in messages.actions if each.kind == BACKWARD}

    def compute(self, action: Action) -> None:
        if action.kind == FORWARD:
            self._forward(action)
        else:
            self._backward(action)

    def _forward(self, action: Action) -> None:
        stage, _, micro = action
        received = self._messages.receive(action)
        inputs = self._inputs[micro] if received is None else self._entered(received, stage, micro)
        output = self._modules[stage](inputs)
        if stage == len(self._plan.stages) - 1:
            output = self._loss(output, micro)
        else:
            _check_output(self._plan, stage, output)
            self._messages.send(action, output)
        if output.requires_grad:
            self._edges[stage, micro] = get_gradient_edge(output)

    def _entered(self, received: torch.Tensor, stage: int, micro: int) -> torch.Tensor:
        """Let autograd record a received tensor as the input of a stage; see [Note: entries]."""
        if not (torch.is_grad_enabled() and received.is_floating_point()):
            return received

        def send(gradient: torch.Tensor) -> None:
            self._messages.send(Action(stage, BACKWARD, micro), gradient)

        entered: torch.Tensor = _Entry.apply(received, torch.empty((), requires_grad=True), send)
        return entered

    def _loss(self, output: torch.Tensor, micro: int) -> torch.Tensor:
        loss = self._loss_fn(output, self._targets[micro])
        if not isinstance(loss, torch.Tensor) or loss.dim():
            found = f"shape={tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise TypeError(
                "expected a loss_fn that returns the mean over the micro-batch as a tensor without "
                f"dimensions, got {found}; use reduction='mean'"
            )
        self.loss += loss.item()
        # Each micro-batch has an equal part in the mean of the batch.
        return loss / self._plan.microbatches

    def _backward(self, action: Action) -> None:
        stage, _, micro = action
        gradient = self._messages.receive(action)
        edge = self._edges.pop((stage, micro), None)
        if stage in self._sums and action == self._final[stage]:
            self._sums[stage].begin()
        if edge is not None:
            torch.autograd.backward(edge, torch.ones(()) if gradient is None else gradient)
        if stage and action not in self._messages.sent:  # the output does not depend on the input
            shape, dtype = _shape_and_dtype(self._plan, stage - 1)
            self._messages.send(action, torch.zeros(shape, dtype=dtype))


class _Entry(torch.autograd.Function):
    """Passes a received tensor to a stage, and its gradient to a function."""

    @staticmethod
    def forward(
        ctx: Any,
        received: torch.Tensor,
        handle: torch.Tensor,
        send: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """Return ``received`` itself. Autograd records it since ``handle`` requires a gradient."""
        ctx.send = send
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.send(gradient)
        return None, None, None


def _shape_and_dtype(plan: Plan, stage: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return those of a stage's output, which are also those of the next stage's gradient."""
    shape, name = plan.outputs[stage]
    dtype: torch.dtype = getattr(torch, name)
    return shape, dtype


def _check_output(plan: Plan, stage: int, output: torch.Tensor) -> None:
    shape, dtype = plan.outputs[stage]
    found = tuple(output.shape), str(output.dtype).removeprefix("torch.")
    if found != (shape, dtype):
        raise ValueError(
            "expected micro-batches of the size that was profiled, with an output of "
            f"{dtype}{list(shape)} of stage {stage}, got {found[1]}{list(found[0])}; "
            "profile with a sample of the micro-batch's size"
        )


class _Messages:
    """The results that the actions of one step on one rank receive and send.

    A message is the result of an action. The action serves as its name.
    """

    def __init__(self, plan: Plan, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.sent: set[Action] = set()
        self._plan = plan
        # Messages between two stages on this rank.
        self._local: dict[Action, torch.Tensor] = {}
        # Posted receives: the buffer, and the handle to wait for.
        self._posted: dict[Action, tuple[torch.Tensor, Any]] = {}
        self._outbox = _Outbox()
        needs = [(need, action) for action in actions if (need := self._needed(action))]
        # Messages from other ranks whose receive is not posted yet, in the order of their use.
        self._awaited = deque(
            need for need, action in needs if self._device(need) != self._device(action)
        )

    def __enter__(self) -> None:
        self._post()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._outbox.close()
        if error is None:
            self._outbox.wait()

    def receive(self, action: Action) -> torch.Tensor | None:
        """Return the message that an action needs, or None if it needs none."""
        needed = self._needed(action)
        if needed is None:
            return None
        if needed in self._local:
            return self._local.pop(needed)
        buffer, work = self._posted.pop(needed)
        self._post()
        work.wait()
        return buffer

    def send(self, message: Action, tensor: torch.Tensor) -> None:
        """Send the result of an action to the device of the action that needs it."""
        self.sent.add(message)
        step = 1 if message.kind == FORWARD else -1
        target = self._device(message._replace(stage=message.stage + step))
        if target == self._device(message):
            # The next stage may work in place.
            self._local[message] = tensor.detach().clone()
        else:
            self._outbox.send(tensor.detach().contiguous(), target, self._tag(message))

    def _needed(self, action: Action) -> Action | None:
        """Return the action on another stage whose result ``action`` needs, or None."""
        stage = action.stage + (-1 if action.kind == FORWARD else 1)
        return action._replace(stage=stage) if 0 <= stage < len(self._plan.stages) else None

    def _device(self, action: Action) -> int:
        return self._plan.stages[action.stage].device(action.micro)

    def _tag(self, action: Action) -> int:
        kind = 2 * action.stage + (action.kind == BACKWARD)
        return kind * self._plan.microbatches + action.micro

    def _post(self) -> None:
        while self._awaited and len(self._posted) < _POSTED_AHEAD:
            message = self._awaited.popleft()
            # The gradient of a stage's input has the shape of the previous stage's output.
            shape, dtype = _shape_and_dtype(self._plan, message.stage - (message.kind == BACKWARD))
            buffer = torch.empty(shape, dtype=dtype)
            work = dist.irecv(buffer, self._device(message), tag=self._tag(message))
            self._posted[message] = buffer, work


class _Outbox:
    """Sends tensors, and releases each when it has been sent; see [Note: outputs are released]."""

    def __init__(self) -> None:
        self._sending: SimpleQueue[tuple[torch.Tensor, Any] | None] = SimpleQueue()
        self._error: BaseException | None = None
        # If the step fails, a peer may never receive. The thread must not keep the process alive.
        self._thread = threading.Thread(target=self._release, daemon=True)
        self._thread.start()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        self._sending.put((tensor, dist.isend(tensor, target, tag=tag)))

    def close(self) -> None:
        self._sending.put(None)

    def wait(self) -> None:
        """Wait until all tensors have been sent. Raise the error of a send that failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _release(self) -> None:
        while (sending := self._sending.get()) is not None:
            try:
                sending[1].wait()
            except RuntimeError as error:
                self._error = error
            del sending  # or the tensor would be kept until the next one is sent


class _Sum:
    """Sums the gradients of one stage over its replicas in one step.

    Each replica has only the part of the gradient from its own micro-batches, which may be none.
    Gradients of earlier steps are sums already, so they are set aside.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        # The buckets whose sum has not begun.
        self._unsummed = _buckets(module)
        # The others, each with its sum and the handle to wait for.
        self._sums: list[tuple[list[nn.Parameter], torch.Tensor, Any]] = []
        self._hooks: list[Any] = []
        self._former = {p: p.grad for bucket in self._unsummed for p in bucket}
        for parameter in self._former:
            parameter.grad = None

    def begin(self) -> None:
        """Sum each bucket when the next backward has computed its gradients."""
        ready: set[torch.Tensor] = set()

        def note(parameter: torch.Tensor) -> None:
            ready.add(parameter)
            # All replicas must sum the buckets in the same order.
            while self._unsummed and ready.issuperset(self._unsummed[0]):
                self._sum_next()

        self._hooks = [p.register_post_accumulate_grad_hook(note) for p in self._former]

    def finish(self) -> None:
        """Sum the other buckets, and wait for all sums."""
        for hook in self._hooks:
            hook.remove()
        while self._unsummed:
            self._sum_next()
        for bucket, total, work in self._sums:
            work.wait()
            parts = total.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                former = self._former.pop(parameter)
                gradient = part.view_as(parameter)
                parameter.grad = gradient if former is None else former.add_(gradient)

    def _sum_next(self) -> None:
        bucket = self._unsummed.popleft()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        if any(gradient.is_sparse for gradient in gradients):
            raise UnsupportedConfigurationError(
                "expected dense gradients of stages with replicas, got a sparse one; create the "
                "embedding with sparse=False"
            )
        total = torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(total, group=self._group, async_op=True)
        self._sums.append((bucket, total, work))


def _buckets(module: nn.Module) -> deque[list[nn.Parameter]]:
    """Group the trained parameters by layer and dtype, last layers first, as backward does."""
    buckets: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layer = name.partition(".")[0]
            buckets.setdefault((layer, parameter.dtype), []).append(parameter)
    return deque(reversed([*buckets.values()]))
