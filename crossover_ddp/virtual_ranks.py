"""Virtual ranks: the losses, the parameters and the random numbers of V ranks on any number of ranks.

[Note: virtual ranks] A virtual rank is a rank of an imagined job. Each real rank computes the
micro-batches of its virtual ranks one after the other. Everything that a micro-batch depends on
belongs to the virtual rank: samples, random numbers, the buffers that its forward begins with, and
its place in the sum. So the job's results are those of V ranks, and a job that resumes on fewer or
more ranks continues with the same bits. Idea: EasyScale (Li et al., SC'23), which has a framework
of its own; the fold into DDP's buckets is our design.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from crossover_ddp._ddp.checks import check_keys, wants_buffers_broadcast
from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._engine.buckets import set_fold
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.states import HookState
from crossover_ddp._system import torch_private
from crossover_ddp._virtual.buffers import NORMS, StepBuffers
from crossover_ddp._virtual.data import SeededDataset, VirtualSampler, as_made
from crossover_ddp._virtual.folding import Folding
from crossover_ddp._virtual.seeds import mixed, seeded

from .errors import UnsupportedConfigurationError

__all__ = ["VirtualRanks"]

Batch = TypeVar("Batch")

# The virtual ranks of each model, as long as both are alive.
_known: "weakref.WeakValueDictionary[int, VirtualRanks]" = weakref.WeakValueDictionary()
_END: Final = object()
_NO_GRADIENTS: Final = (
    "expected a hook of this package to get the gradients of a step's last micro-batch"
)
_REGISTER: Final = "call model.register_comm_hook(None, reduce_scatter_all_gather_hook)"
# If these differ when a job is resumed, some bits change: which ones, and the remedy.
_CHANGES: Final = {
    "count": (
        "all samples, random numbers and sums",
        "pass the same count to VirtualRanks, on any number of ranks",
    ),
    "seed": ("the order of samples and all random numbers", "pass the same seed to VirtualRanks"),
    "threads": (
        "sums over a batch in convolutions and normalisations, which are divided among threads",
        "set OMP_NUM_THREADS to it: torchrun sets it to 1, but not with --nproc-per-node=1",
    ),
    "cpu": (
        "sums in most kernels, which add as many numbers at once as a vector register holds",
        "use a machine of that kind, or set ATEN_CPU_CAPABILITY to a kind that all machines have "
        "from the first step on",
    ),
    "device": ("the kernels of matrix products and convolutions", "use a device of that kind"),
    "torch": ("any kernel", "install that version"),
}


class VirtualRanks:
    """``count`` virtual ranks of a DDP model, on as many ranks as there are.

    Gradients, losses, samples, random numbers and BatchNorm's statistics are those of a job with
    ``count`` ranks, bit for bit, on any number of ranks up to ``count``. So a job can be resumed on
    fewer or more devices and continues the same curve. docs/virtual.md lists the conditions. The
    gradients of a step begin at zero, whether or not the loop has called ``zero_grad()``.

    Use it beside `reduce_scatter_all_gather_hook`, `crossover_hook`, `decoupled_hook`, `owner_hook`
    or `muon_hook`. Each rank runs its micro-batches one after the other, the first ones without an
    exchange. Then a step sends as many bytes as with DDP, if each rank has 1, 2, 4, 8, … virtual
    ranks. Otherwise all ranks together send up to 1.5 times as many, and `owner_hook` and `muon_hook`
    refuse to train.
    Memory grows by about log2(``count`` / ranks) times the gradients.

    Args:
        model: the DDP model. The hook may be registered before or later.
        count: the number of virtual ranks, at least the number of ranks of the model's process group.
        seed: determines the order of samples and all random numbers inside micro-batches. Default 0.

    Attributes:
        step: the number of steps whose gradients have been exchanged, including earlier runs of a
            resumed job.
        own: the virtual ranks of this rank, in the order of its micro-batches.

    On failure: ``TypeError`` if ``model`` is not a DDP model, and ``ValueError`` for other values of
    ``count``. ``UnsupportedConfigurationError`` for ``SyncBatchNorm``, for BatchNorm with
    ``broadcast_buffers=False``, ``find_unused_parameters=True``, ``static_graph=True``, parameters that
    are complex or that DDP ignores, and a model that already has virtual ranks. ``backward()`` raises
    it for a state with a codec, for other states and for hooks of other libraries.

    Not collective, but all ranks must create it with the same arguments.

    Example::

        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
        ranks = VirtualRanks(model, 8)
        for images, labels in ranks.micro_batches(ranks.loader(dataset, batch_size=32)):
            loss = loss_function(model(images), labels)  # not divided by anything
            loss.backward()
            ranks.report(loss)
            if ranks.is_step_end:
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(self, model: DistributedDataParallel, count: int, *, seed: int = 0) -> None:
        _check(model, count)
        self.count = count
        self.seed = seed
        self.step = 0
        self._model = model
        self._folding = Folding(model, count, self._ends_step)
        self.own = self._folding.leaves
        self._buffers = StepBuffers(
            model.module,
            is_broadcast=wants_buffers_broadcast(model),
            has_first=self.own[0] == 0 and len(self.own) > 1,
        )
        # The place of the latest micro-batch among those of its step, or None before the first one.
        self._at: int | None = None
        self._is_inside = False
        self._is_hook_known = False
        self._losses: list[tuple[int, int, Tensor]] = []  # step, virtual rank, loss
        # Frozen ones as well: the fold refuses them once they are trained.
        set_fold([*model.module.parameters()], self._folding)
        _known[id(model)] = self
        if any(True for _ in model.module.buffers()):
            before, after = (
                OwnHook(uncompiled(functools.partial(_call, weakref.ref(self), name)))
                for name in ("before_forward", "after_forward")
            )
            model.module.register_forward_pre_hook(before, prepend=True)
            model.module.register_forward_hook(after)

    # --- the loop ---

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's micro-batches, in the order that `micro_batches` needs.

        A virtual rank gets the samples that ``DistributedSampler`` gives to the same rank of
        ``count`` ranks. Random numbers in the dataset and in ``collate_fn`` do not depend on the
        worker. Iteration begins where the job is: after a resume, or after a ``break``, within the
        epoch. Then ``loader.batch_sampler.epoch`` is the number of complete epochs, and
        ``loader.batch_sampler.steps`` the number of steps in one.

        Args:
            dataset: a dataset with a length.
            batch_size: the number of samples in a micro-batch of one virtual rank.
            shuffle: whether to shuffle the samples in each epoch. Default True.
            drop_last: whether to drop the last samples of an epoch if they do not fill a micro-batch
                of each virtual rank. Default True. Otherwise the last micro-batches are smaller, and
                some samples are repeated.
            options: other options of ``DataLoader``, such as ``num_workers`` and ``collate_fn``.

        On failure: ``TypeError`` for an ``IterableDataset``; ``ValueError`` if an epoch would have
        no step, for a ``batch_size`` below 1 and for ``in_order=False``.
        """
        if batch_size < 1:
            raise ValueError(f"expected batch_size >= 1, got {batch_size}")
        if not options.get("in_order", True):
            raise ValueError(
                "expected micro-batches in order, got in_order=False: virtual ranks would get each "
                "other's samples; leave in_order out"
            )
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                "expected a dataset with a length, got an IterableDataset, whose samples cannot be "
                "chosen; give micro_batches() an iterable that yields the samples of ranks.own"
            )
        sampler = VirtualSampler(self, dataset, batch_size, shuffle=shuffle, drop_last=drop_last)
        if not sampler.steps:
            raise ValueError(
                f"expected samples for at least one step of {self.count} micro-batches of "
                f"{batch_size}, got a dataset of {len(dataset)}; pass a smaller batch_size, or "  # type: ignore[arg-type]
                "drop_last=False"
            )
        collate = options.pop("collate_fn", None) or default_collate
        seeded_dataset = SeededDataset(dataset, collate)
        return DataLoader(
            seeded_dataset,
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=as_made,
            **options,
        )

    def micro_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's micro-batches, each inside of `micro_batch`.

        A step that a ``break`` or an exception has left unfinished begins again.

        Args:
            batches: for each step, one micro-batch for each virtual rank of `own`, such as `loader`
                yields. Random numbers that it draws in this process are those of the virtual rank.

        On failure: ``ValueError`` if ``batches`` ends within a step, and as `micro_batch`.
        """
        self._at = None
        iterator = iter(batches)
        while True:
            at = self._next()
            with self._seeded(at):
                batch: Any = next(iterator, _END)
                if batch is _END:
                    break
                with self._within(at):
                    yield batch
        if at:
            self._abandon_step()
            raise ValueError(
                f"expected {len(self.own)} micro-batches for each step on this rank, got {at} for "
                "the last one; use ranks.loader, or drop the last ones"
            )

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Run the forward and the backward of this rank's next micro-batch within the block.

        Random numbers are those of the virtual rank. Afterwards generators continue as before. All
        micro-batches but the last one of a step run in ``model.no_sync()``. After the last one,
        gradients are the mean over all virtual ranks. An exception makes the step begin again.

        On failure: ``RuntimeError`` inside of another micro-batch;
        ``UnsupportedConfigurationError`` if no hook of this package has got the gradients.
        """
        at = self._next()
        with self._seeded(at), self._within(at):
            yield

    def _seeded(self, at: int) -> contextlib.AbstractContextManager[None]:
        return seeded(mixed(self.seed, "micro-batch", self.step, self.own[at]))

    @contextlib.contextmanager
    def _within(self, at: int) -> Iterator[None]:
        """Run the micro-batch with this place among the step's."""
        if self._is_inside:
            raise RuntimeError(
                "expected one micro-batch at a time, got one inside of another: micro_batches() enters "
                "micro_batch() itself, and a loop that has ended early still runs while its iterator "
                "is referenced; write ranks.micro_batches(tqdm(loader)), not the other way round"
            )
        if not self._is_hook_known:
            _check_hook(self._model)
            self._is_hook_known = True
        is_last = at == len(self.own) - 1
        self._is_inside = True
        try:
            if at == 0:
                self._folding.begin_step()
            self._folding.begin(self.own[at])
            self._buffers.begin(is_first=at == 0)
            self._at = at
            with contextlib.nullcontext() if is_last else self._model.no_sync():
                yield
            if not is_last:
                self._folding.end(self.own[at])
            elif self._folding.awaits_buckets:
                raise UnsupportedConfigurationError(
                    f"{_NO_GRADIENTS}, got none: there was no backward(), a parameter got no gradient "
                    "(frozen since, or unused), or the registered hook calls none of this package; "
                    f"{_REGISTER}, and call backward() once in each micro-batch"
                )
            self._buffers.end(is_first=at == 0)
        except BaseException:
            self._abandon_step()
            if is_last and self._folding.awaits_buckets:
                # DDP still expects the backward of a forward that has run.
                getattr(self._model.reducer, torch_private.RESET_REDUCER, nothing)()
            raise
        finally:
            self._is_inside = False

    @property
    def is_step_end(self) -> bool:
        """Whether the latest micro-batch is the last one of a step on this rank."""
        return self._at == len(self.own) - 1

    def report(self, loss: Tensor | float) -> None:
        """Record the loss of the micro-batch that runs, for `losses`. It does not wait for a device.

        On failure: ``RuntimeError`` before the first micro-batch; ``ValueError`` unless it is one
        number.
        """
        value = torch.as_tensor(loss).detach().clone()
        if value.numel() != 1:
            raise ValueError(
                f"expected one number, got loss of shape {tuple(value.shape)}; report loss.mean()"
            )
        if self._at is None:
            raise RuntimeError(
                "expected report() in or after a micro-batch, got it before; move it"
            )
        step = self.step - (self.is_step_end and not self._folding.awaits_buckets)
        self._losses.append((step, self.own[self._at], value))

    def losses(self) -> list[float]:
        """Return the losses that all virtual ranks have reported since the last call.

        They are in the order of steps, and within a step in the order of virtual ranks. So their sum
        has the same bits on any number of ranks.

        **Collective**.
        """
        mine = [(step, v, float(loss)) for step, v, loss in self._losses]
        self._losses = []
        gathered = gather_objects(self._model.process_group, mine)
        every = [each for of_rank in gathered for each in of_rank]
        return [loss for _, _, loss in sorted(every, key=lambda each: each[:2])]

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and what later steps need to get the same bits. Not collective.

        Save it with the model and the optimizer, between two steps. It is the same on all ranks.
        """
        parameter = next(self._model.module.parameters())
        is_cuda = parameter.device.type == "cuda"
        device = torch.cuda.get_device_name(parameter.device) if is_cuda else parameter.device.type
        return {
            "step": self.step,
            "count": self.count,
            "seed": self.seed,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "device": device,
            "torch": str(torch.__version__),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the step of a saved state, on any number of ranks. Not collective.

        Args:
            state: the result of `state_dict`. To accept other bits, change its entry before.

        On failure: ``ValueError`` if anything differs that changes bits; the message names them. The
        number of ranks changes none. ``RuntimeError`` inside of a micro-batch.
        """
        if self._is_inside:
            raise RuntimeError(
                "expected load_state_dict() before the loop, got it inside of a micro-batch, whose "
                "samples come from another step; end the loop first"
            )
        mine = self.state_dict()
        check_keys(state, {*mine}, "the keys of VirtualRanks.state_dict()")
        differing = [key for key in _CHANGES if state[key] != mine[key]]
        if differing:
            found = "; ".join(
                f"{key}={state[key]!r} there and {mine[key]!r} here, which changes {_CHANGES[key][0]}: "
                f"{_CHANGES[key][1]}"
                for key in differing
            )
            raise ValueError(f"expected to resume where the job began, got {found}")
        self.step = int(state["step"])
        self._at = None
        self._losses = []

    # --- within a step ---

    def _next(self) -> int:
        return 0 if self._at is None or self.is_step_end else self._at + 1

    def _abandon_step(self) -> None:
        """Let the step that is under way begin again, as if it had not begun."""
        self._at = None
        self._buffers.abandon_step()
        self._losses = [each for each in self._losses if each[0] < self.step]

    def _ends_step(self) -> None:
        self._buffers.end_step()
        # Counted here, so that a checkpoint behind optimizer.step() has it even if the loop ends.
        self.step += 1


def _call(ranks: "weakref.ref[VirtualRanks]", name: str, *_: Any) -> None:
    """Call a method of the buffers in a hook of the module."""
    if (known := ranks()) is not None and known._is_inside:
        getattr(known._buffers, name)()


def _check_hook(model: DistributedDataParallel) -> None:
    """Refuse a model without a hook that could fold, before any step is lost."""
    hooks = getattr(model, torch_private.COMM_HOOKS, None)
    if hooks is None:  # noticed at the end of the first step
        return
    found = "" if hooks else "no hook"
    for hook, state in hooks:
        if hook.__module__.startswith("torch."):
            found = f"torch's {hook.__name__}"
        elif isinstance(state, HookState) and state.agreement.disabled:
            found = "CROSSOVER_DISABLE=1, which turns it into a plain all-reduce; unset it"
    if found:
        raise UnsupportedConfigurationError(f"{_NO_GRADIENTS}, got {found}; {_REGISTER}")


def _check(model: DistributedDataParallel, count: int) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"expected a DistributedDataParallel, got model={type(model).__name__}; wrap the model "
            "first, and pass the DDP model itself, also if torch.compile wraps it"
        )
    if not isinstance(count, int):
        raise TypeError(f"expected a whole number, got count={count!r}")
    size = model.process_group.size()
    if count < size:
        raise ValueError(
            f"expected count >= {size}, the number of ranks, got count={count}: each rank needs a "
            "virtual rank; use fewer ranks, or more virtual ranks from the first step on"
        )
    found = ""
    known = _known.get(id(model))
    if known is not None and known._model is model:
        found = "one that has virtual ranks already; use the first VirtualRanks"
    elif model.find_unused_parameters:
        found = (
            "find_unused_parameters=True: DDP looks for unused parameters in the last micro-batch "
            "alone; let each forward use all parameters (0 * p.sum() added to the loss uses p)"
        )
    elif model.static_graph:
        found = (
            "static_graph=True: with it, DDP fails if the first backward() runs in no_sync(), as all "
            "micro-batches but the last one of a step do; leave static_graph out"
        )
    is_broadcast = wants_buffers_broadcast(model)
    for name, module in model.module.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            found = (
                f"SyncBatchNorm in {name!r}: it computes statistics over the real ranks; use "
                "BatchNorm, as in a job of count ranks without SyncBatchNorm"
            )
        elif isinstance(module, NORMS) and module.track_running_stats and not is_broadcast:
            found = (
                f"broadcast_buffers=False and running statistics in {name!r}: each rank would keep "
                "its own; pass broadcast_buffers=True"
            )
    ignored = getattr(model, torch_private.IGNORED_NAMES, ())
    for name, parameter in model.module.named_parameters():
        if parameter.is_complex():
            found = f"complex parameter {name!r}: use pairs of real numbers"
        if name in ignored and parameter.requires_grad:
            found = f"parameter {name!r}, which DDP ignores: each rank would train its own"
    if found:
        raise UnsupportedConfigurationError(f"expected a model for VirtualRanks, got {found}")
