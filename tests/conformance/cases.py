"""Situations of DDP. Each trains a few steps with the hook of `Wrap` and returns the results."""

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from crossover_ddp.errors import CrossoverError
from tests.harness import inside
from tests.harness.campaign import IN_CAMPAIGN

# The loss scale of states that want to know it.
SCALE: ContextVar[Callable[[], float] | None] = ContextVar("SCALE", default=None)
# Wraps a module in DDP with the hook under test. The keywords are DDP's.
Wrap = Callable[..., DistributedDataParallel]
Results = dict[str, torch.Tensor]
# Takes ``wrap``, the rank and the world size.
Case = Callable[[Wrap, int, int], Results]

CASES: dict[str, Case] = {}
TINY_MB = 0.0004
STEPS = 5 if IN_CAMPAIGN else 4  # decoupled training defers from the third step on
DEPTH = 4 if IN_CAMPAIGN else 3  # linear layers
WIDTH = 12
DEVICE = torch.device("cpu")  # of models and inputs; `backends` replaces it


def case(function: Case, *, views: bool = False) -> Case:
    """Register a case. With ``views`` also ``…_viewed``, whose gradients are views of buckets."""
    if views:

        def viewed(wrap: Wrap, rank: int, world_size: int) -> Results:
            return function(functools.partial(wrap, gradient_as_bucket_view=True), rank, world_size)

        CASES[f"{function.__name__}_viewed"] = viewed
    CASES[function.__name__] = function
    return function


class Recorder:
    """Trains a model. Records the gradients of every step, and parameters and buffers at the end.

    ``wrap`` leaves a row of `hooks.HOOKS` with the model. The row makes the optimizers. It
    registers its hook here, since some states need the optimizers. Plain DDP is a row as well.
    """

    def __init__(self, model: nn.Module, *, lr: float = 0.1) -> None:
        self.model: Any = model
        self._row = vars(model)["row"]
        self.optimizers: list[torch.optim.Optimizer] = self._row.optimizers(model, lr)
        # The hook's state. None with plain DDP and with hooks that have no state.
        self._state = self._row.attach(model, self.optimizers)
        self.results: Results = {}
        # The number of steps so far, with those that were dropped.
        self._steps = 0

    def forward(self, rank: int, step: int) -> torch.Tensor:
        """Return the loss on a rank's inputs of a step."""
        self.note_pending()
        return loss_of(self.model(inputs(rank, step, next(self.model.parameters()).dtype)))

    def note_pending(self) -> None:
        """Count a forward that begins while updates are under way, which it can hide."""
        stats = getattr(self._state, "stats", dict)()
        vars(self.model)["pending"] = vars(self.model).get("pending", 0) + bool(
            stats.get("deferred")
        )

    def step(self, loss: torch.Tensor, max_norm: float | None = None) -> None:
        loss.backward()
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            self.results[f"step {self._steps} norm"] = norm.detach().clone()
        self.note_and_update()

    def drop(self) -> None:
        """Drop the gradients without an update, as loops do after an error."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._steps += 1

    def note_and_update(self, *, skips: bool = False) -> None:
        """Record the gradients, then update the parameters.

        With ``skips`` the gradients are dropped instead, as in loops that have seen an overflow.
        """
        if self._row.reads == "flushed":
            self._state.flush()
        if self._row.reads != "never":
            self._note_gradients()
        if skips:
            self.drop()
        else:
            self.update()

    def _note_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            # A missing gradient and one of zeros are different results.
            value = torch.full((), torch.nan)
            if parameter.grad is not None:
                value = parameter.grad.detach().clone()
            self.results[f"step {self._steps} gradient of {name}"] = value

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.drop()

    def note_state(self, when: str) -> None:
        self.results.update(
            (f"{when} {name}", v.clone()) for name, v in self.model.state_dict().items()
        )

    def finish(self) -> Results:
        self.note_state("final")
        return self.results


def mlp(depth: int = DEPTH, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def inputs(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, WIDTH, generator=generator).to(DEVICE, dtype)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def recorder_of(wrap: Wrap, model: nn.Module, *, lr: float = 0.1, **options: Any) -> Recorder:
    return Recorder(wrap(model, **{"bucket_cap_mb": TINY_MB, **options}), lr=lr)


def stepped(
    *, model: Callable[[], nn.Module] = mlp, steps: int = STEPS, views: bool = False, **options: Any
) -> Callable[[Callable[[Recorder, int, int], None]], None]:
    """Return a decorator that registers a function, called in each step, as a case.

    The function takes a recorder, the rank and the number of the step. ``options`` are those of
    `recorder_of`.
    """

    def registered(do: Callable[[Recorder, int, int], None]) -> None:
        def run(wrap: Wrap, rank: int, world_size: int) -> Results:
            recorder = recorder_of(wrap, model(), **options)
            for step in range(steps):
                do(recorder, rank, step)
            return recorder.finish()

        run.__name__ = do.__name__
        case(run, views=views)

    return registered


def trained(name: str, *, max_norm: float | None = None, **options: Any) -> None:
    """Register a case of ordinary steps. ``options`` are those of `stepped`."""

    def do(recorder: Recorder, rank: int, step: int) -> None:
        recorder.step(recorder.forward(rank, step), max_norm)

    do.__name__ = name
    stepped(**options)(do)


trained("many_buckets", views=True)
trained("one_bucket", views=True, bucket_cap_mb=25)
trained("static_graph", views=True, static_graph=True)
# Buckets have new memory in every step. Before torch 2.15 this is the plain case once more.
LAZY = "lazy_bucket_allocation"
HAS_LAZY = LAZY in inspect.signature(DistributedDataParallel).parameters
trained(LAZY, **({LAZY: True} if HAS_LAZY else {}))
trained("bfloat16_parameters", model=lambda: mlp(dtype=torch.bfloat16), lr=0.01)
trained("clipping", max_norm=0.01)


@stepped(views=True)
def accumulation(recorder: Recorder, rank: int, step: int) -> None:
    with recorder.model.no_sync():
        recorder.forward(rank, 10 + step).backward()
    recorder.step(recorder.forward(rank, step))


@stepped()
def accumulation_by_flag(recorder: Recorder, rank: int, step: int) -> None:
    """Set DDP's attribute, as nanoGPT does instead of entering `no_sync`."""
    recorder.model.require_backward_grad_sync = False
    recorder.forward(rank, 10 + step).backward()
    recorder.model.require_backward_grad_sync = True
    recorder.step(recorder.forward(rank, step))


@case
def gradient_scaler(wrap: Wrap, rank: int, world_size: int) -> Results:
    """Scale the loss. One rank overflows in a step, which all of them skip."""
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
    SCALE.set(scaler.get_scale)
    recorder = recorder_of(wrap, mlp())
    SCALE.set(None)
    for step in range(STEPS):
        factor = torch.inf if step == 1 and rank == world_size - 1 else 1.0
        scaler.scale(recorder.forward(rank, step) * factor).backward()
        for optimizer in recorder.optimizers:
            scaler.step(optimizer)
        scaler.update()
        recorder.drop()
        recorder.results[f"step {step} scale"] = torch.tensor(scaler.get_scale())
    return recorder.finish()


def averaged(name: str, *, every: int) -> None:
    """Register a case with a moving average of the model, updated in every so many steps."""

    def run(wrap: Wrap, rank: int, world_size: int) -> Results:
        recorder = recorder_of(wrap, mlp())
        average = AveragedModel(recorder.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(STEPS):
            recorder.step(recorder.forward(rank, step))
            if (step + 1) % every == 0:
                average.update_parameters(recorder.model.module)
        recorder.results.update(
            (f"average {name}", value.clone()) for name, value in average.state_dict().items()
        )
        return recorder.finish()

    run.__name__ = name
    case(run)


averaged("average_each_step", every=1)
averaged("average_every_other_step", every=2)


class Block(nn.Module):
    """A module of our own: torch 2.11 compiles no frame of torch's layers that stand alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


def compiled(name: str) -> None:
    """Register a case in which the network, its blocks, or the DDP model are compiled."""

    def run(wrap: Wrap, rank: int, world_size: int) -> Results:
        torch._dynamo.reset()
        network: Any = nn.Sequential(*(Block() for _ in range(DEPTH)))
        if name == "compiled_network":
            network = torch.compile(network, backend="aot_eager")
        for block in network if name == "compiled_blocks" else ():
            block.compile(backend="aot_eager")
        # torch wants buckets of at least 1 MiB where it compiles the DDP model.
        recorder = Recorder(wrap(network, bucket_cap_mb=1))
        called = recorder.model
        if name == "compiled_model":
            called = torch.compile(called, backend="aot_eager")
        for step in range(STEPS):
            recorder.note_pending()
            recorder.step(loss_of(called(inputs(rank, step))))
        return recorder.finish()

    run.__name__ = name
    case(run)


compiled("compiled_network")
compiled("compiled_blocks")
compiled("compiled_model")


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.forward(context, gradient)


class SyncNorm(nn.Module):
    """Normalises by the statistics of all ranks' inputs, as SyncBatchNorm, which needs a GPU.

    It sums over the model's own group in forward and in backward.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = len(x) * dist.get_world_size()
        mean = SumOverRanks.apply(x.sum(0)) / count
        variance = SumOverRanks.apply((x - mean).square().sum(0)) / count
        return (x - mean) / (variance + 1e-5).sqrt()


trained(
    "synchronised_batch_norm",
    model=lambda: nn.Sequential(*mlp(1), SyncNorm(), *mlp(1), SyncNorm(), *mlp(1)),
)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, *, left: bool) -> torch.Tensor:
        branch = self.left if left else self.right
        return self.head(branch(x))  # type: ignore[no-any-return]


@stepped(views=True, model=Branches, steps=STEPS + 1, find_unused_parameters=True)
def unused_parameters(recorder: Recorder, rank: int, step: int) -> None:
    # In steps 0 and 1 the ranks use different branches. Later they agree: one branch is unused.
    left = (step + rank) % 2 == 0 if step < 2 else step == 2
    recorder.note_pending()
    recorder.step(loss_of(recorder.model(inputs(rank, step), left=left)))


class Normed(nn.Module):
    """Has buffers of several dtypes. Some change, DDP ignores one, and one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh()
        )
        self.second = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, affine=False)
        )
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("low", torch.zeros(1, 3, dtype=torch.float16), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mine", torch.zeros(2))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.recomputes = False
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["mine"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = ~self.seen  # a new tensor, not an in-place change
            self.low += x[0, 0]
            self.mine += x[0, 1]
        first = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.second(first)  # type: ignore[no-any-return]


class BufferRecorder(Recorder):
    """Records buffers at the end of each forward.

    Between two steps the buffers of all ranks but rank 0 are undefined.
    """

    def __init__(self, wrap: Wrap, rank: int) -> None:
        super().__init__(wrap(Normed(), bucket_cap_mb=TINY_MB))
        self._rank = rank
        self._forwards = 0

    def next_loss(self) -> torch.Tensor:
        # The norm of a normalised output is constant. Its distance to the inputs is not.
        x = inputs(self._rank, 100 + self._forwards)
        loss = loss_of(self.model(x) - x)
        for name, buffer in self.model.named_buffers():
            self.results[f"forward {self._forwards} {name}"] = buffer.clone()
        self._forwards += 1
        return loss

    def train(self) -> Results:
        for _ in range(STEPS):
            self.step(self.next_loss())
            # All ranks change this buffer between two steps. The change must stay.
            self.model.module.updates.add_(1)
        return self.finish()

    def finish(self) -> Results:
        self.evaluate()
        return super().finish()

    def evaluate(self) -> None:
        self.model.eval()
        self.next_loss()
        self.model.train()


@case
def batch_norm_buffers(wrap: Wrap, rank: int, world_size: int) -> Results:
    """DDP broadcasts the running statistics inside forward, on the group that the hook uses."""
    return BufferRecorder(wrap, rank).train()


@case
def buffers_recomputed_in_backward(wrap: Wrap, rank: int, world_size: int) -> Results:
    """Activation checkpointing runs forward twice, so that backward changes statistics."""
    recorder = BufferRecorder(wrap, rank)
    recorder.model.module.recomputes = True
    return recorder.train()


@case
def buffers_over_several_forwards(wrap: Wrap, rank: int, world_size: int) -> Results:
    """Accumulation, two forwards before one backward, an unused forward, evaluation in between."""
    recorder = BufferRecorder(wrap, rank)
    # On older torch DDP's broadcast changes tensors that autograd has saved. Then backward raises,
    # with or without a hook.
    may_interleave = "preserve_version" in inspect.getsource(DistributedDataParallel._sync_buffers)
    # Each iteration makes three updates. After an odd number of them plain DDP leaves different
    # statistics on each rank.
    for step in range(5 if IN_CAMPAIGN else 3):
        with recorder.model.no_sync():
            recorder.next_loss().backward()
        recorder.step(recorder.next_loss())
        if may_interleave:
            recorder.step(recorder.next_loss() + recorder.next_loss())
        if step % 2:
            recorder.next_loss()
        loss = recorder.next_loss()
        if step % 2 and may_interleave:
            with torch.no_grad():
                recorder.evaluate()
                recorder.next_loss()
        recorder.step(loss)
        with torch.no_grad():
            recorder.evaluate()
    return recorder.finish()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In parallel: in a chain the fine dtypes' layers would carry the coarse ones' roundings.
        return torch.cat(
            [torch.tanh(layer(x.to(layer.weight.dtype))).float() for layer in self.layers], -1
        )


trained("several_dtypes", model=Mixed, bucket_cap_mb=25)


@case
def complex_parameters(wrap: Wrap, rank: int, world_size: int) -> Results:
    """DDP shows a hook complex gradients as real ones."""
    recorder = Recorder(wrap(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)))
    for step in range(STEPS):
        recorder.step(recorder.model(inputs(rank, step, torch.complex64)).abs().square().mean())
    return {
        name: torch.view_as_real(v) if v.is_complex() else v
        for name, v in recorder.finish().items()
    }


@case
def joined_ranks_with_buffers(wrap: Wrap, rank: int, world_size: int) -> Results:
    """Ranks run out of inputs one after the other, rank 0 first. Joined ranks contribute zeros.

    Until all ranks have joined, the buffers of the last rank with inputs count; then rank 0's do. A
    joined rank contributes to two steps in a row, one of which is the eighth, after which ranks
    exchange digests of the parameters.
    """
    recorder = BufferRecorder(wrap, rank)
    with Join([recorder.model]):
        for _ in range(6 + 2 * rank):
            recorder.step(recorder.next_loss())
    recorder.next_loss()
    return {name: value for name, value in recorder.finish().items() if not name.startswith("step")}


class Shared(nn.Module):
    """Embeds and predicts with the same weights, so that its last bucket is the largest.

    One of its layers runs twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.block(self.embedding(tokens)))
        return self.head(torch.tanh(self.block(hidden)))  # type: ignore[no-any-return]


@stepped(model=Shared)
def tied_weights(recorder: Recorder, rank: int, step: int) -> None:
    tokens = torch.randint(0, 40, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
    recorder.step(loss_of(recorder.model(tokens.to(DEVICE))))


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.shift = nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.sum()


trained("fewer_elements_than_ranks", model=Scalars, bucket_cap_mb=1e-6)


def partly_frozen() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


trained("frozen_parameters", model=partly_frozen)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


trained("reentrant_checkpointing", model=Recomputed)


@case
def two_models_on_one_group(wrap: Wrap, rank: int, world_size: int) -> Results:
    recorders = [recorder_of(wrap, mlp(2)), Recorder(wrap(mlp(3)))]
    for step in range(STEPS):
        first, second = (recorder.model(inputs(rank, step)) for recorder in recorders)
        loss_of(first + second).backward()
        for recorder in recorders:
            recorder.note_and_update()
    return {
        f"model {index} {name}": value
        for index, recorder in enumerate(recorders)
        for name, value in recorder.finish().items()
    }


@stepped()
def mixed_precision_by_autocast(recorder: Recorder, rank: int, step: int) -> None:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss = recorder.forward(rank, step)
    recorder.step(loss)


@stepped()
def non_finite_on_one_rank(recorder: Recorder, rank: int, step: int) -> None:
    """An overflow on one rank reaches all ranks. The loop drops that step without a trace."""
    factor = torch.inf if step == 1 and rank == dist.get_world_size() - 1 else 1.0
    (recorder.forward(rank, step) * factor).backward()
    recorder.note_and_update(skips=step == 1)


@stepped()
def refused_bucket(recorder: Recorder, rank: int, step: int) -> None:
    """All ranks refuse a bucket before any part of it is sent. The loop drops that step."""
    loss = recorder.forward(rank, step)
    if step != 1:
        recorder.step(loss)
        return
    with inside.refuse_bucket(1, times=1), contextlib.suppress(KeyError, CrossoverError):
        loss.backward()
    recorder.drop()


@stepped()
def failing_forward(recorder: Recorder, rank: int, step: int) -> None:
    if step in (1, STEPS - 1):
        with contextlib.suppress(RuntimeError):
            recorder.model(torch.zeros(3, WIDTH + 1, device=DEVICE))
    recorder.step(recorder.forward(rank, step))


@stepped()
def saved_in_every_step(recorder: Recorder, rank: int, step: int) -> None:
    """Code that saves the model between ``step()`` and the next forward sees it complete."""
    recorder.step(recorder.forward(rank, step))
    recorder.note_state(f"after step {step}")


@case
def schedule_and_groups(wrap: Wrap, rank: int, world_size: int) -> Results:
    recorder = recorder_of(wrap, mlp())
    for optimizer in recorder.optimizers:
        # Move the first parameter to a group of its own.
        group = optimizer.param_groups[0]
        first, *group["params"] = group["params"]
        optimizer.add_param_group(
            {**group, "params": [first], "lr": group["lr"] / 2, "weight_decay": 0.01}
        )
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.7) for each in recorder.optimizers]
    for step in range(STEPS):
        recorder.step(recorder.forward(rank, step))
        for schedule in schedules:
            schedule.step()
    return recorder.finish()


@case
def messages_of_the_users(wrap: Wrap, rank: int, world_size: int) -> Results:
    """User code starts collectives and messages on the model's own group during backward.

    It waits for some at once, as SyncBatchNorm does, which torch has for GPUs only.
    """
    recorder = recorder_of(wrap, mlp())
    pending: list[Any] = []

    def exchange(gradient: torch.Tensor) -> None:
        total = gradient.abs().sum()
        dist.all_reduce(total)
        sent = total.clone()
        pending.append((dist.all_reduce(total, async_op=True), total))
        for tag in range(3) if world_size > 1 else ():
            received = torch.zeros_like(sent)
            pending.append((dist.isend(sent, (rank + 1) % world_size, tag=tag), sent))
            pending.append((dist.irecv(received, (rank - 1) % world_size, tag=tag), received))

    def after_forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        dist.all_reduce(output.detach().sum())
        output.register_hook(exchange)

    middle = recorder.model.module[3]
    middle.register_forward_hook(after_forward)
    for step in range(STEPS):
        recorder.step(recorder.forward(rank, step))
        for number, (work, value) in enumerate(pending):
            work.wait()
            recorder.results[f"forward {step} message {number}"] = value.clone()
        pending.clear()
    return recorder.finish()


@case
def model_not_found_on_one_rank(wrap: Wrap, rank: int, world_size: int) -> Results:
    """The last rank's model is hidden from the collector, with which hooks search for buffers.

    All ranks must decide alike.
    """
    recorder = BufferRecorder(wrap, rank)
    if rank == world_size - 1:
        gc.freeze()
    return recorder.train()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
