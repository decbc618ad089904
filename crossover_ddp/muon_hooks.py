"""Muon on the gradient's own buckets: register `muon_hook` with ``ddp_model.register_comm_hook``.

The module begins with `orthogonalise`, the coroutine that carries one bucket. The state,
`MuonState`, and the hook, `muon_hook`, follow.

Under DDP every rank repeats Muon's Newton-Schulz iteration for every matrix. Here each matrix has
an owner. The reduce-scatter brings the mean gradient to the owner. The owner keeps the momentum
and computes the direction, once for all ranks. The all-gather sends the direction to all ranks in
bfloat16, the type in which torch computes it. So the exchange sends 0.75 times as many bytes as an
all-reduce of float32 gradients. ``muon.step()`` stays torch's own. This is our design. Muon: Keller
Jordan, https://kellerjordan.github.io/posts/muon/
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import enum
import functools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon

from crossover_ddp._compression.codec import CodecChoice
from crossover_ddp._compression.compression import ResidualState
from crossover_ddp._ddp.checks import check_not_joined, resolve_group
from crossover_ddp._engine.buckets import Bucket, JourneyTurn, contents_of
from crossover_ddp._engine.exchange import Exchange, run_hook
from crossover_ddp._engine.links import Link
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.muon import (
    NORM_NUMEL,
    CodedMuonBucket,
    Momenta,
    MuonBucket,
    MuonStep,
    Settings,
    check_torch,
    newton_schulz_flop,
    returned_numel,
    settings_of,
    take_step,
)
from crossover_ddp._owners.optimizer import (
    SPANS,
    Seal,
    check_not_intercepted,
    check_unhooked,
    intercept,
    stripped,
)
from crossover_ddp._owners.owned_state import OwnedState, Owning
from crossover_ddp._owners.packing import Item, packing

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex

__all__ = ["MuonState", "muon_hook", "muon_parameters"]

logger = logging.getLogger(__name__)

_SKIPPED_STEPS_TO_WARN: Final = 3  # in a row


async def orthogonalise(packed: MuonBucket, bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
    """Average each matrix's gradient at its owner, which sends the direction to all ranks.

    A direction is an orthogonalised momentum. All of this happens during backward, and nothing here
    waits for another bucket. ``muon.step()`` applies the directions later, on the training thread,
    without an exchange.

    If a peer dies, the timeout passes or the process group ends, the ``await`` under way raises.
    That ends all exchange of the process group, and ``backward()`` raises the error. The momentum
    in effect is still the old one then.
    """
    await bucket.computed()  # on a GPU backward's kernels may still run
    # Each rank sends every owner the gradients of its matrices. Afterwards this rank's part is the
    # mean: of the matrices that it owns, and of its share of all other elements.
    there = packed.pack()
    await link.reduce_scatter(there, packed.plan.there)
    # Orthogonalising may take long, so it runs where it delays no other bucket's reduction. It
    # fills this rank's part of `packed.back`.
    await link.compute()
    packed.orthogonalise(there)
    del there  # frees its memory while the directions travel
    turn.release()  # the owners' orthogonalisation was compute of this step
    turn.request()
    # Each owner sends its directions, in bfloat16, and its share of the mean to all ranks.
    await link.all_gather(packed.back, packed.plan.back)
    packed.unpack()  # keeps the directions for ``muon.step()``; gradients of matrices become zero
    await turn.acquire()  # before the optimizers' steps


class _Phase(enum.Enum):
    """The phases of a MuonState. Only `_enter` changes the phase."""

    # Before the first backward(), and after muon.step(), muon.zero_grad() or loading Muon's state.
    IDLE = enum.auto()
    # From a backward pass's first bucket to its last. After an exception in between, still this.
    IN_BACKWARD = enum.auto()
    # After backward(), while directions wait for muon.step().
    STEP_DUE = enum.auto()
    # After close(), to the end.
    CLOSED = enum.auto()


class MuonState(ResidualState, Owning):
    """State of `muon_hook`: each matrix of a ``torch.optim.Muon`` is orthogonalised by its owner.

    The training loop stays as it is: call ``backward()``, then ``muon.step()`` and the ``step()``
    of the optimizer that has the other parameters. ``muon.step()`` applies the direction that the
    exchange has sent, with the current learning rate, weight decay and ``adjust_lr_fn``. The values
    of ``momentum``, ``nesterov`` and the Newton-Schulz settings are those at the time of
    ``backward()``. With one or two ranks, parameters equal those of plain DDP with
    ``torch.optim.Muon`` to the last bit. With more ranks they are equal up to the order in which
    gradients are added.

    After ``backward()`` the gradients of Muon's matrices are zero on all ranks. They are NaN if the
    mean was not finite, so that a GradScaler skips the step everywhere. The other parameters'
    gradients are the mean over the ranks. Clipping therefore sees only the other parameters. Muon's
    directions do not depend on the size of a gradient. `grad_norm` returns the norm of the
    matrices' mean gradients.

    Only a matrix's owner has its momentum. Call `checkpoint` on all ranks before
    ``muon.state_dict()``. The state dict then has torch's own format, and can be loaded with or
    without this hook, on any number of ranks.

    A skipped step changes nothing. After a mean that is not finite, the next ``backward()`` is
    allowed. After any other mean, call ``muon.zero_grad()`` to skip the step; otherwise a second
    exchange without ``muon.step()`` is an error. Accumulate gradients in ``no_sync()``.

    With a codec, all ranks, the owner included, apply the decoded directions. So parameters are
    still the same on all ranks, but they differ from plain DDP's.

    Args:
        muon: the optimizer. Its matrices must be the DDP model's. Other optimizers are not passed.
        codec: a pair of codecs for the matrices: for gradients on their way to owners, which keep
            residuals, and for directions on their way back, which do not. One codec is used for
            both ways. ``(Int8(), Int4())`` sends 0.19 times as many bytes as float32, and
            ``(Half(), Int8())`` 0.38 times. The other parameters travel exactly, and so do the
            first two steps. Gradients must be float32. Default: no codec.
        process_group: the job's process group, which must also be the DDP model's. Default: the
            default group.
        mutex: the mutex for taking turns with sibling jobs. Newton-Schulz runs inside the turn.
            Default: no turns.
        loss_scale: the factor by which the loss is multiplied before ``backward()``, or a function
            that returns it, such as ``scaler.get_scale``. It must be a power of two. Default 1.
        compare_replicas: compare the parameters in steps 1, 2, 4, … and in every thousandth step,
            and raise ``ReplicasDifferError`` if they differ between ranks. Default True.
        model: the DDP model that the hook is registered on. Default: found at the first bucket.

    Attributes:
        owners: the rank that owns each non-empty matrix, in the order of ``muon.param_groups``.
        loads: the cost of each rank's Newton-Schulz iterations in a step, in FLOP. A matrix costs
            20·m²·n + 10·m³, where m is its smaller side.
        is_disabled: whether ``CROSSOVER_DISABLE=1`` was set when the state was created.

    On failure: ``TypeError`` for an optimizer that is not a Muon, or a codec of another type.
    ``ValueError`` for a loss scale that is not a power of two. For a configuration that cannot
    work, the constructor, ``backward()`` or ``muon.step()`` raises
    ``UnsupportedConfigurationError`` with a remedy. ``backward()`` raises ``ExchangeError`` when a
    peer dies (for NCCL see `reduce_scatter_all_gather_hook`).

    **Collective**: all ranks create the state, with Muons that are built alike, and register the
    hook. If ``CROSSOVER_DISABLE=1`` is set before that, the hook is a plain all-reduce, and Muon is
    left alone.

    Example::

        model.register_comm_hook(MuonState(muon), muon_hook)
    """

    def __init__(
        self,
        muon: Muon,
        *,
        codec: CodecChoice | None = None,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        compare_replicas: bool = True,
        model: DistributedDataParallel | None = None,
    ) -> None:
        _check_optimizer(muon)
        check_torch()
        if not callable(loss_scale):
            _power_of_two(loss_scale)
        super().__init__(process_group, model, compare_replicas)
        # Directions need no residuals: Newton-Schulz makes a new one of the same size in each step.
        self._use_codec(codec, loss_scale, has_work=True, keeps_rest=False)
        self.muon = self.optimizer = muon
        self.mutex = mutex
        group = resolve_group(process_group)
        self._rank = group.rank()
        self._world_size = group.size()
        costs: dict[Tensor, int] = {}
        for each in muon.param_groups:
            for matrix in each["params"]:
                if matrix.numel():
                    flop = newton_schulz_flop(matrix.shape, each["ns_steps"])
                    costs[matrix] = flop if matrix.requires_grad else 0
        self._assignment = assign([*costs.values()], group.size())
        self.owners = self._assignment.owners
        self.loads = self._assignment.loads
        self._owner_of = dict(zip(costs, self.owners, strict=True))
        self._momenta = Momenta(muon)
        # Whether the first backward has checked that the matrices are the model's.
        self._is_checked = False
        self._phase = _Phase.IDLE
        # The latest backward pass that has begun. None before the first, and after one was refused.
        self._latest: MuonStep | None = None
        self._skipped = 0  # how many steps in a row
        self.is_disabled = self.agreement.disabled
        if self.is_disabled:
            return
        owner_of = {id(matrix): owner for matrix, owner in self._owner_of.items()}
        owned_state = OwnedState([muon], owner_of, group.rank(), self._loaded)
        self._owned_state = owned_state
        step = functools.partial(self._step, owned_state)
        self._hooks = intercept(muon, on_step=step, on_zero_grad=self._forget)
        self._hooks.enter_context(owned_state.hooks)
        logger.info("%s", self)

    # --- for users ---

    @property
    def newton_schulz_calls(self) -> int:
        """The number of directions that this rank has computed so far."""
        return self._momenta.directions

    def grad_norm(self) -> torch.Tensor:
        """Return the 2-norm of the matrices' mean gradients in the last backward pass.

        The norm does not contain the loss scale. It is a float64 and the same on all ranks. If n is
        the norm of the other parameters' gradients, such as ``clip_grad_norm_`` returns, the norm
        of the whole model's gradients is ``math.hypot(state.grad_norm(), n)``. Not collective.

        Raises ``UnsupportedConfigurationError`` before the first exchange.
        """
        if self._latest is None or self._phase is _Phase.IN_BACKWARD:
            raise UnsupportedConfigurationError(
                "there is no norm yet: grad_norm() needs a backward() with muon_hook before it; "
                "with CROSSOVER_DISABLE=1 the gradients are in p.grad"
            )
        return self._latest.grad_norm

    def memory_usage(self) -> dict[str, int]:
        """Return how many bytes this rank keeps. Not collective.

        Returns:
            A dictionary with the keys "momentum", "next_momentum" and "buffers".
        """
        travelled: Sequence[Tensor] = ()
        if self._latest is not None and self._phase is not _Phase.IN_BACKWARD:
            travelled = self._latest.travelled
        return {
            "momentum": 0 if self._owned_state is None else self._owned_state.nbytes,
            "next_momentum": sum(each.nbytes for each in self._momenta.new.values()),
            "buffers": sum(each.nbytes for each in travelled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the residuals of `state_dict`. An empty state, as of version 0.1, has none."""
        super().load_state_dict(state or {"residuals": {}, "loss_scale": None})

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        ResidualState._bring_together(self, optimizers, to)
        Owning._bring_together(self, optimizers, to)

    def close(self) -> None:
        """Restore torch's own Muon. Later exchanges fail.

        Not collective, but call `checkpoint` on all ranks first. Raises
        ``UnsupportedConfigurationError`` if Muon would keep only a part of its momentum.
        """
        if self._owned_state is not None:
            self._owned_state.check_whole()
            self._enter(_Phase.CLOSED)
            self._hooks.close()

    def __repr__(self) -> str:
        own_count = sum(owner == self._rank for owner in self.owners)
        return (
            f"MuonState({len(self.owners)} matrices, {own_count} of them on rank {self._rank} of "
            f"{self._world_size}, the busiest rank has {self._assignment.busiest_share:.0%} of the "
            "cost)"
        )

    # --- the hook ---

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that must be the same on all ranks."""
        names = {*settings_of(self.muon.param_groups[0]), "lr", "weight_decay", "adjust_lr_fn"}
        settings = []
        for group in self.muon.param_groups:
            found = {name: value for name, value in group.items() if name in names}
            for name, value in found.items():
                if isinstance(value, Tensor):
                    found[name] = value.tolist()
            settings.append(found)
        return {
            **super().fingerprint(bucket),
            "matrices": [tuple(matrix.shape) for matrix in self._owner_of],
            "settings": settings,
        }

    def _enter(self, phase: _Phase) -> None:
        if self._phase is not _Phase.CLOSED:
            self._phase = phase

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``. Raise an error if the bucket is refused."""
        self.bound_model.bind(bucket, self)
        around = None

        # With a codec, the codec packs the bucket; otherwise making its journey does.
        @functools.cache
        def pack() -> MuonBucket:
            return self._pack(bucket)

        def make(under_way: Bucket, link: Link, turn: JourneyTurn) -> Coroutine[Any, Any, None]:
            return orthogonalise(pack(), under_way, link, turn)

        if self.compression is not None:
            around = self.compression.around(bucket, exchange, pack)
        try:
            started = exchange.send(bucket, make, turn=self.mutex, state=self, around=around)
            return started.future
        finally:
            if bucket.is_last() and self._phase is _Phase.IN_BACKWARD:
                assert self._latest is not None
                self._latest.seal = Seal(self._latest.settings)
                self._enter(_Phase.STEP_DUE)

    def _enter_bucket(self, bucket: dist.GradBucket) -> MuonStep:
        """Return the backward pass of ``bucket``, which begins with the first bucket."""
        if self._phase is _Phase.CLOSED:
            raise UnsupportedConfigurationError(
                "this MuonState is closed, so backward() cannot exchange gradients with it; wrap "
                "the model in DistributedDataParallel again"
            )
        if self._phase is _Phase.IN_BACKWARD and bucket.index() == 0:
            # The previous backward pass has ended with an exception.
            self._enter(_Phase.IDLE)
            self._latest = None
        if self._phase is not _Phase.IN_BACKWARD:
            self._begin()
        assert self._latest is not None
        return self._latest

    def _begin(self) -> None:
        """Begin a backward pass. Raise an error if it is refused."""
        is_step_due = self._phase is _Phase.STEP_DUE
        if is_step_due and self._latest is not None and self._latest.can_step:
            raise UnsupportedConfigurationError(
                "expected muon.step() between two exchanges, got a second backward() without it; "
                "accumulate gradients in model.no_sync(), or drop them by muon.zero_grad() if the "
                "step is to be skipped"
            )
        model = self.bound_model.model()
        if model is not None and not self._is_checked:
            self._check_matrices()
            self._is_checked = True
        if model is not None and any(each.requires_grad for each in self._owner_of):
            check_not_joined(
                model, "an owner without data takes no step, and so updates no momentum"
            )
        self._enter(_Phase.IDLE)
        self._latest = None
        scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        settings = self._settings()
        if self.compression is not None and len(settings) < len(self._owner_of):
            raise UnsupportedConfigurationError(
                f"expected the {len(self._owner_of)} matrices that Muon had when its MuonState was "
                f"made, got {len(settings)}: with a codec their messages have fixed sizes; make "
                "the model, Muon and MuonState again after a checkpoint()"
            )
        self._latest = MuonStep(settings, _power_of_two(scale))
        self._enter(_Phase.IN_BACKWARD)

    def _pack(self, grad_bucket: dist.GradBucket) -> MuonBucket:
        """Lay out the buffers that travel for a bucket; see [Note: Muon's packing].

        The hook's thread calls this in the order of the buckets.
        """
        step = self._enter_bucket(grad_bucket)
        # `.data` has a version counter of its own: user code that writes to gradients bumps theirs.
        flat = grad_bucket.buffer().data
        contents = [(p, span) for p, _, span in contents_of(grad_bucket, flat)]
        owned = [(p, span) for p, span in contents if p in step.settings]
        passing = tuple([span for p, span in contents if p not in step.settings])
        items = []
        for matrix, _ in owned:
            sent = matrix.numel()
            returned = returned_numel(sent, flat.itemsize)
            if self.compression is not None:
                sent = returned = sent + NORM_NUMEL
            items.append(Item(self._owner_of[matrix], sent, returned))
        plan = packing(self._world_size, tuple(items), passing)
        # The buffer is allocated on the hook's stream, since `muon.step` reads it there.
        back = flat.new_empty(sum(plan.back))
        step.travelled.append(back)
        matrices = [(*each, place) for each, place in zip(owned, plan.items, strict=True)]
        kind = MuonBucket if self.compression is None else CodedMuonBucket
        return kind(step, self._momenta, self._rank, plan, matrices, flat, back)

    # --- muon.step(), muon.zero_grad() and loading Muon's state ---

    def _step(self, owned_state: OwnedState, original: Callable[[], Any]) -> Any:
        """Call torch's step without gradients, then apply the directions."""
        if self._phase is _Phase.CLOSED:
            return original()
        step = self._take_due()
        if step is None and owned_state.only_makes_state(self.muon):
            return original()
        gradients = {
            matrix: matrix.grad for matrix, _ in self._in_groups() if matrix.grad is not None
        }
        if gradients:
            self._check(step, gradients)
        try:
            for matrix in gradients:
                matrix.grad = None
            result = original()
            with torch.no_grad():
                for matrix, group in self._in_groups():
                    if step is not None and matrix in gradients:
                        take_step(matrix, step.directions[matrix], group)
        finally:
            for matrix, gradient in gradients.items():
                matrix.grad = gradient
        # Put the new momentum into effect, see [Note: momentum and skipped steps].
        for matrix in gradients:
            if self._owner_of[matrix] == self._rank:
                self._momenta.take_effect(matrix)
        if gradients:
            self._skipped = 0
            if owned_state.is_whole:
                owned_state.stepped()
        return result

    def _take_due(self) -> MuonStep | None:
        """Return the backward pass that awaits muon.step(), if any. It then no longer awaits it."""
        if self._phase is not _Phase.STEP_DUE:
            return None
        self._enter(_Phase.IDLE)
        return self._latest

    def _check(self, step: MuonStep | None, matrices: Iterable[Tensor]) -> None:
        check_unhooked(self.muon)
        missing = [matrix for matrix in matrices if step is None or matrix not in step.directions]
        if step is None or missing:
            raise UnsupportedConfigurationError(
                f"expected a backward() with muon_hook between two steps, got {len(missing)} "
                "matrices with a gradient but without a direction, the first of shape "
                f"{tuple(missing[0].shape)}; call muon.step() once after each exchange, outside of "
                "no_sync(), with all of Muon's matrices in the model"
            )
        if step.settings != self._settings():
            raise UnsupportedConfigurationError(
                "expected momentum, nesterov and the settings of Newton-Schulz as they were in "
                "backward(), where the owners computed with them, got others in muon.step(); "
                "change them before backward()"
            )

    def _in_groups(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.muon.param_groups:
            for matrix in group["params"]:
                if matrix in self._owner_of:
                    yield matrix, group

    def _settings(self) -> dict[Tensor, Settings]:
        """Return the current settings of each matrix."""
        return {matrix: settings_of(group) for matrix, group in self._in_groups()}

    def _check_matrices(self) -> None:
        names = self.bound_model.names
        foreign = [each for each in self._owner_of if each.requires_grad and each not in names]
        if foreign:
            raise UnsupportedConfigurationError(
                f"expected the matrices of one DDP model in Muon, got {len(foreign)} that the "
                "model with this hook does not have, one of shape "
                f"{tuple(foreign[0].shape)}; make a Muon and a MuonState for each model"
            )

    def _forget(self) -> None:
        """Note that user code dropped the gradients: it skips the step, or took it elsewhere."""
        dropped = self._take_due()
        if dropped is None or not dropped.can_step:
            return
        if dropped.seal is not None and dropped.seal.is_broken:
            raise UnsupportedConfigurationError(
                "expected muon.step() after backward(), got matrices that were written without it, "
                "and gradients that were dropped (by another optimizer, a SAM step on exchanged "
                "gradients, or p -= lr * p.grad): with muon_hook the gradients of Muon's matrices "
                "are zero, and muon.step() alone applies their directions. To train with another "
                "optimizer wrap the model again with another hook; for SAM keep the first pass in "
                "model.no_sync()"
            )
        self._skipped += 1
        if self._skipped == _SKIPPED_STEPS_TO_WARN:
            logger.warning(
                "%d steps of Muon in a row were skipped: with muon_hook the gradients of its "
                "matrices are zero after backward(), and muon.step() alone trains them",
                self._skipped,
            )

    def _loaded(self) -> None:
        """Drop pending directions and new momenta, after a state dict was loaded into Muon."""
        self._take_due()
        self._momenta.new.clear()


def muon_hook(state: MuonState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks, and send the directions of Muon's matrices to all ranks.

    Args:
        state: the model's state; create one per model, on all ranks, see `MuonState`.
        bucket: the bucket that DDP passes.

    Returns:
        A Future that holds the bucket's own buffer, with zeros for Muon's matrices.

    On failure: like `reduce_scatter_all_gather_hook`; see also `MuonState`. The hook itself raises
    nothing.

    **Collective**: DDP calls it on all ranks in the same order.
    """
    remedy = "pass MuonState(muon), with mutex= to share the device"
    return run_hook(
        state, bucket, MuonState, remedy, lambda exchange: state._take(exchange, bucket)
    )


def muon_parameters(
    model: nn.Module, *, head: nn.Module | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters of ``model`` into matrices of hidden layers and all others.

    The split follows torch's page on Muon. Embeddings, modules tied to them, and the head are not
    hidden layers. Matrices that are a module's own parameters, such as positional embeddings, count
    as hidden.

    Args:
        model: the module to train.
        head: the module that computes the outputs. Default: the last module with a matrix.

    Returns:
        The parameters for ``torch.optim.Muon``, and the parameters for another optimizer. Both are
        in the model's order.

    Example::

        matrices, others = muon_parameters(model)
        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)
    """
    having = [m for m in model.modules() if any(p.ndim == 2 for p in m.parameters(recurse=False))]
    apart: list[nn.Module] = [m for m in having if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    apart += [head] if head is not None else having[-1:]
    excluded = {id(p) for module in apart for p in module.parameters()}
    parameters = [*model.parameters()]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in excluded]
    hidden = {id(p) for p in matrices}
    return matrices, [p for p in parameters if id(p) not in hidden]


def _power_of_two(scale: float) -> float:
    """Return ``scale`` if multiplying by it is exact. Raise ``ValueError`` otherwise."""
    if not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"expected a loss_scale that is a power of two, got loss_scale={scale}; another one "
            "rounds gradients, and so turns directions: GradScaler's init_scale, growth_factor and "
            "backoff_factor must be powers of two"
        )
    return float(scale)


def _check_optimizer(muon: object) -> None:
    """Refuse all but a torch Muon with torch's own step and real matrices, free of other states."""
    if not isinstance(muon, Muon):
        raise TypeError(
            f"expected a torch.optim.Muon, got muon={type(muon).__name__}; give the matrices to "
            "torch.optim.Muon and the other parameters to another optimizer, which needs no state"
        )
    if stripped(type(muon).step, SPANS) is not stripped(Muon.step, SPANS):
        raise TypeError(
            f"expected torch.optim.Muon's own step, got muon={type(muon).__name__}, which has "
            "another; pass a torch.optim.Muon"
        )
    if any(parameter.is_complex() for group in muon.param_groups for parameter in group["params"]):
        raise UnsupportedConfigurationError(
            "expected real matrices, got complex ones, which torch.optim.Muon does not support; "
            "give them to another optimizer"
        )
    check_not_intercepted(muon)
