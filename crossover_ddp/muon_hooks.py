"""Muon on the gradient's own buckets: register `muon_hook` with ``ddp_model.register_comm_hook``.

Our design: under DDP every rank repeats Muon's Newton-Schulz of every matrix. Here each matrix has an owner. The
reduce-scatter brings it the summed gradient, it keeps the momentum and computes the direction, once for all ranks, and
the all-gather brings the direction to everybody, in bfloat16, as torch computes it: 0.75 of the bytes of an all-reduce
of float32 gradients. ``muon.step()`` stays torch's own. Muon: Keller Jordan, https://kellerjordan.github.io/posts/muon/

[Note: Muon's packing] On the way there a rank's part holds the gradients of its matrices, on the way back their
directions in bfloat16, two bytes a number whatever the bucket's numbers take, each with the squared norm of its
gradient behind it, eight raw bytes; both ways its share of what passes through.

[Note: momentum and skipped steps] A backward pass computes the new momentum beside the old one. ``muon.step()`` makes
it the momentum by exchanging the two; a step that is skipped leaves the old one as it was. Their memory is that of
two matrices for each matrix owned, instead of one for each matrix of the model.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import functools
import logging
import math
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Muon

from crossover_ddp._ddp.checks import check_not_joined, model_of, resolve_group
from crossover_ddp._ddp.contents import contents_of, part_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket, JourneyTurn
from crossover_ddp._engine.exchange import Exchange, answered
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.states import Agreement
from crossover_ddp._owners.assignment import assign
from crossover_ddp._owners.kept import Kept, Owning
from crossover_ddp._owners.muon import (
    MOMENTUM,
    Settings,
    check_torch,
    direction_numel,
    direction_of,
    direction_view,
    matrix_view,
    newton_schulz_flop,
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
from crossover_ddp._owners.packing import Item, Packing, Place, packing

from .errors import UnsupportedConfigurationError
from .gpu_mutex import GPUMutex

__all__ = ["MuonState", "muon_hook", "muon_parameters"]

logger = logging.getLogger(__name__)

_NORM_BYTES: Final = 8
_SKIPPED_STEPS_TO_WARN: Final = 3


class _Round:
    """One backward pass: by matrix the settings that it began with, and what comes of it.

    ``directions``: of all matrices that had a gradient, bfloat16, equal on all ranks. ``squared_norms``: of their mean
    gradients, before the loss's scale, float64 without dimension. ``travelled``: memory that other streams may use
    until the next backward pass. ``seal``: the matrices as backward has left them.
    """

    def __init__(self, settings: dict[Tensor, Settings], scale: float) -> None:
        self.settings, self.scale = settings, scale
        self.directions: dict[Tensor, Tensor] = {}
        self.squared_norms: dict[Tensor, Tensor] = {}
        self.travelled: list[Tensor] = []
        self.seal: Seal | None = None

    @property
    def can_step(self) -> bool:
        """Whether there are directions, and the mean gradients were finite. The host waits for a device."""
        return bool(self.directions) and math.isfinite(float(self.grad_norm))

    @property
    def grad_norm(self) -> Tensor:
        """The norm over all matrices; summed in one order whatever buckets they came in."""
        squares = [
            self.squared_norms[matrix] for matrix in self.settings if matrix in self.squared_norms
        ]
        return (
            torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
        )


class _Packed(NamedTuple):
    """What travels in a bucket's place.

    ``matrices``: each with where its gradient is in ``flat``, the bucket's buffer, and its place in what travels.
    ``back``: what returns.
    """

    round_: _Round
    plan: Packing
    matrices: Sequence[tuple[Tensor, Span, Place]]
    flat: Tensor
    back: Tensor


def _norm_in(sent: Tensor) -> Tensor:
    """Return the eight bytes of the squared norm, as they travel behind a direction."""
    return sent[-(_NORM_BYTES // sent.itemsize) :]


class MuonState(Owning):
    """State of `muon_hook`: each matrix of a ``torch.optim.Muon`` is orthogonalised once, on its owner.

    The training loop stays as it is: ``backward()``, then ``muon.step()`` and the step of the optimizer that has the
    other parameters. ``muon.step()`` applies the direction that came with the exchange, with the learning rate, weight
    decay and ``adjust_lr_fn`` of its own moment; ``momentum``, ``nesterov`` and the settings of Newton-Schulz are those
    of ``backward()``. Parameters equal those of plain DDP and ``torch.optim.Muon`` to the last bit with one or two
    ranks, and with more up to the order in which gradients are added.

    After ``backward()`` the gradients of Muon's matrices are zero on all ranks, or NaN if the mean was not finite, so
    that a GradScaler skips the step everywhere. The other parameters' gradients are the mean over the ranks. Clipping
    therefore sees the others only; Muon's directions do not depend on the size of a gradient. `grad_norm` tells the
    norm of what the matrices had.

    The momentum of a matrix is on its owner only. Call `consolidate` on all ranks before ``muon.state_dict()``, which
    then is torch's own format, and can be loaded with and without this hook, with any number of ranks.

    A step that is not taken changes nothing: after a mean that is not finite the next ``backward()`` goes on; after
    others call ``muon.zero_grad()``. Otherwise a second exchange without ``muon.step()`` is an error. Accumulate in
    ``no_sync()``.

    Args:
        muon: the optimizer; its matrices must be the DDP model's. Parameters of other optimizers need no mention.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: take turns with sibling jobs; Newton-Schulz is compute inside the turn. Default: no turns.
        loss_scale: what the loss was multiplied by before ``backward()``, such as ``scaler.get_scale``: a power of two,
            or a function that returns one. Default 1.
        compare_replicas: raise ``ReplicasDifferError`` if parameters differ after 1, 2, 4, … steps, and every thousand.

    Attributes:
        owners: rank of each matrix that is not empty, in the order of ``muon.param_groups``.
        loads: cost of each rank's Newton-Schulz in a step, in FLOP: 20·m²·n + 10·m³ a matrix, m the smaller side.
        newton_schulz_calls: number of directions that this rank has computed so far.
        is_disabled: whether ``CROSSOVER_DISABLE=1`` was set when the state was made.

    On failure: ``TypeError`` for another optimizer, ``ValueError`` for a loss scale that is no power of two;
    ``UnsupportedConfigurationError``, here, from ``backward()`` or from ``muon.step()``, for what cannot work, with
    what to change; ``ExchangeError`` from ``backward()`` when a peer dies (NCCL: `reduce_scatter_all_gather_hook`).

    **Collective**: all ranks make the state, of Muons that are built alike, and register the hook.
    ``CROSSOVER_DISABLE=1``, set before, makes the hook a plain all-reduce, and leaves Muon alone.

    Example::

        model.register_comm_hook(MuonState(muon), muon_hook)
    """

    def __init__(
        self,
        muon: Muon,
        *,
        process_group: dist.ProcessGroup | None = None,
        mutex: GPUMutex | None = None,
        loss_scale: float | Callable[[], float] = 1.0,
        compare_replicas: bool = True,
    ) -> None:
        _check_optimizer(muon)
        check_torch()
        if not callable(loss_scale):
            _power_of_two(loss_scale)
        self.process_group = process_group
        self.compare_replicas = compare_replicas
        self.muon = self.optimizer = muon
        self.mutex = mutex
        self.agreement = Agreement()
        group = resolve_group(process_group)
        self._rank, self._world_size = group.rank(), group.size()
        self._loss_scale = loss_scale if callable(loss_scale) else lambda: loss_scale
        costs: dict[Tensor, int] = {
            matrix: newton_schulz_flop(matrix.shape, each["ns_steps"])
            if matrix.requires_grad
            else 0
            for each in muon.param_groups
            for matrix in each["params"]
            if matrix.numel()
        }
        self._assignment = assign([*costs.values()], group.size())
        self.owners, self.loads = self._assignment.owners, self._assignment.loads
        self._owner_of = dict(zip(costs, self.owners, strict=True))
        # The new momentum of owned matrices, beside the old one until the step.
        self._next: dict[Tensor, Tensor] = {}
        self._is_checked = self._is_closed = False
        self._ddp: Callable[[], DistributedDataParallel | None] = lambda: (
            None
        )  # while it has matrices that are trained
        self._round: _Round | None = None
        self._waiting: _Round | None = None
        self._latest: _Round | None = None
        self.newton_schulz_calls = 0
        self._skipped = 0  # steps in a row
        self.is_disabled = self.agreement.disabled
        if self.is_disabled:
            return
        owner_of = {id(matrix): owner for matrix, owner in self._owner_of.items()}
        kept = self._kept = Kept([muon], owner_of, group.rank(), self._loaded)
        step = functools.partial(self._step, kept)
        self._hooks = intercept(muon, on_step=step, on_zero_grad=self._forget)
        self._hooks.enter_context(kept.hooks)
        logger.info("%s", self)

    # --- for users -------------------------------------------------------------------------------------------

    def grad_norm(self) -> torch.Tensor:
        """Return the 2-norm of the matrices' mean gradients in the last backward pass, without the loss's scale.

        With the norm n of the other parameters' gradients, such as ``clip_grad_norm_`` returns, that of the model is
        ``math.hypot(state.grad_norm(), n)``. float64, the same on all ranks. Not collective.

        Raises ``UnsupportedConfigurationError`` before the first exchange.
        """
        if self._latest is None:
            raise UnsupportedConfigurationError(
                "expected a backward() with muon_hook before grad_norm(), got none yet; with CROSSOVER_DISABLE=1 the "
                "gradients are in p.grad"
            )
        return self._latest.grad_norm

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps: "momentum", "next_momentum", "buffers". Not collective."""
        return {
            "momentum": 0 if self._kept is None else self._kept.nbytes,
            "next_momentum": sum(each.nbytes for each in self._next.values()),
            "buffers": 0
            if self._latest is None
            else sum(each.nbytes for each in self._latest.travelled),
        }

    def close(self) -> None:
        """Give Muon back as torch made it. Later exchanges fail. Not collective, but after `consolidate` on all ranks.

        Raises ``UnsupportedConfigurationError`` if Muon would be left with a part of its momentum.
        """
        if self._kept is not None:
            self._kept.check_whole()
            self._is_closed = True
            self._hooks.close()

    def __repr__(self) -> str:
        own_count = sum(owner == self._rank for owner in self.owners)
        return (
            f"MuonState({len(self.owners)} matrices, {own_count} of them on rank {self._rank} of {self._world_size}, "
            f"the busiest rank has {self._assignment.busiest_share:.0%} of the cost)"
        )

    # --- the hook --------------------------------------------------------------------------------------------

    def said(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return what all ranks must have in common."""
        names = (*settings_of(self.muon.param_groups[0]), "lr", "weight_decay", "adjust_lr_fn")
        settings = [
            {
                name: v.tolist() if isinstance(v, Tensor) else v
                for name, v in each.items()
                if name in names
            }
            for each in self.muon.param_groups
        ]
        return {
            "matrices": [tuple(matrix.shape) for matrix in self._owner_of],
            "settings": settings,
        }

    def _take(
        self, exchange: Exchange, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of ``bucket``. Raises what makes it impossible."""
        try:
            way = functools.partial(self._way, bucket)
            return exchange.carry(bucket, way, turn=self.mutex, state=self).future
        finally:
            if bucket.is_last():
                ended, self._round = self._round, None
                if ended is not None:
                    ended.seal = Seal(ended.settings)
                    self._waiting = self._latest = ended

    def _way(
        self, grad_bucket: dist.GradBucket, bucket: Bucket, link: Link, turn: JourneyTurn
    ) -> Coroutine[Any, Any, None]:
        """Make a bucket's journey; on the hook's thread, in the order of buckets."""
        if self._is_closed:
            raise UnsupportedConfigurationError(
                "expected a MuonState that is not closed, got a backward() after close(); wrap the model again"
            )
        if self._round is None or bucket.index == 0:
            self._round = None
            self._round = self._begin(grad_bucket)
        packed = self._pack(grad_bucket, bucket.flat, self._round)
        return self._travel(packed, bucket, link, turn)

    async def _travel(self, packed: _Packed, bucket: Bucket, link: Link, turn: JourneyTurn) -> None:
        """Bring each matrix to its owner whole, and its direction back to all."""
        await bucket.computed()
        plan, flat = packed.plan, packed.flat
        moves = [(span, place.there) for _, span, place in packed.matrices]
        moves += [(span, place.there) for span, place in plan.passing]
        # The bucket itself travels if it lies so, as a large matrix alone does.
        there = (
            flat if all(span == place for span, place in moves) else flat.new_empty(sum(plan.there))
        )
        for span, place in moves if there is not flat else ():
            part_of(there, place).copy_(part_of(flat, span))
        await link.reduce_scatter(there, plan.there)
        await link.compute()
        self._orthogonalise(packed, there)
        del there
        turn.release()  # the owners' orthogonalisation was compute of this step
        turn.request()
        await link.all_gather(packed.back, plan.back)
        self._unload(packed)
        await turn.acquire()

    def _begin(self, bucket: dist.GradBucket) -> _Round:
        waiting = self._waiting
        if waiting is not None and waiting.can_step:
            raise UnsupportedConfigurationError(
                "expected muon.step() between two exchanges, got a second backward() without it; accumulate gradients "
                "in model.no_sync(), or drop them by muon.zero_grad() if the step is to be skipped"
            )
        if not self._is_checked:
            self._check_model(bucket)
            self._is_checked = True
        if (model := self._ddp()) is not None:
            check_not_joined(
                model, "an owner without data takes no step, and so updates no momentum"
            )
        self._waiting = self._latest = None
        return _Round(self._settings(), _power_of_two(self._loss_scale()))

    def _pack(self, grad_bucket: dist.GradBucket, flat: Tensor, round_: _Round) -> _Packed:
        contents = [(p, span) for p, _, span in contents_of(grad_bucket, flat)]
        owned = [(p, span) for p, span in contents if p in round_.settings]
        passing = tuple([span for p, span in contents if p not in round_.settings])
        norm_numel = _NORM_BYTES // flat.itemsize
        items = []
        for matrix, _ in owned:
            numel = direction_numel(matrix.numel(), flat.itemsize) + norm_numel
            items.append(Item(self._owner_of[matrix], matrix.numel(), numel))
        plan = packing(self._world_size, tuple(items), passing)
        back = flat.new_empty(
            sum(plan.back)
        )  # of the hook's stream, as `muon.step` is, which reads it
        round_.travelled.append(back)
        matrices = [(*each, place) for each, place in zip(owned, plan.items, strict=True)]
        return _Packed(round_, plan, matrices, flat, back)

    # On the owner, between the halves.

    def _orthogonalise(self, packed: _Packed, there: Tensor) -> None:
        round_, back = packed.round_, packed.back
        # With one rank, and on NCCL, this runs inside of backward(), which may have been called under autocast.
        with torch.autocast(there.device.type, enabled=False):
            for matrix, _, place in packed.matrices:
                if place.owner != self._rank:
                    continue
                gradient, sent = (
                    matrix_view(part_of(there, place.there), matrix),
                    part_of(back, place.back),
                )
                if round_.scale != 1.0:
                    gradient.mul_(1.0 / round_.scale)
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                _norm_in(sent).copy_(norm.square().reshape(1).view(back.dtype))
                momentum = self.muon.state.get(matrix, {}).get(MOMENTUM)
                if momentum is None:
                    momentum = torch.zeros_like(matrix, memory_format=torch.preserve_format)
                if matrix not in self._next:
                    self._next[matrix] = torch.empty_like(
                        matrix, memory_format=torch.preserve_format
                    )
                direction = direction_of(
                    gradient, momentum, self._next[matrix], round_.settings[matrix]
                )
                direction_view(sent, matrix.shape).copy_(direction)
                self.newton_schulz_calls += 1
        for _, place in packed.plan.passing:
            if place.owner == self._rank:
                part_of(back, place.back).copy_(part_of(there, place.there))

    # Wherever the bucket's way ends.

    def _unload(self, packed: _Packed) -> None:
        """Keep the directions for the step; of the matrices' gradients only leave whether they were finite."""
        round_, back = packed.round_, packed.back
        for matrix, span, place in packed.matrices:
            received = part_of(back, place.back)
            square = _norm_in(received).clone().view(torch.float64)[0]
            round_.directions[matrix] = direction_view(received, matrix.shape)
            round_.squared_norms[matrix] = square
            # 0, or NaN if anything was not finite: a GradScaler then skips the step on all ranks, and asks no device.
            part_of(packed.flat, span).fill_((square * 0).to(packed.flat.dtype))
        for span, place in packed.plan.passing:
            part_of(packed.flat, span).copy_(part_of(back, place.back))

    # --- muon.step() and its relatives -----------------------------------------------------------------------

    def _step(self, kept: Kept, original: Callable[[], Any]) -> Any:
        """Call torch's step, which finds no gradients; then apply the directions."""
        if self._is_closed or (self._waiting is None and kept.only_makes_state(self.muon)):
            return original()
        round_, self._waiting = self._waiting, None
        gradients = {
            matrix: matrix.grad for matrix, _ in self._in_groups() if matrix.grad is not None
        }
        if gradients:
            self._check(round_, gradients)
        try:
            for matrix in gradients:
                matrix.grad = None
            result = original()
            with torch.no_grad():
                for matrix, group in self._in_groups():
                    if round_ is not None and matrix in gradients:
                        take_step(matrix, round_.directions[matrix], group)
        finally:
            for matrix, gradient in gradients.items():
                matrix.grad = gradient
        # The new momentum becomes the momentum, see [Note: momentum and skipped steps].
        for matrix in gradients:
            if self._owner_of[matrix] == self._rank:
                state = self.muon.state[matrix]
                old, state[MOMENTUM] = state.get(MOMENTUM), self._next.pop(matrix)
                if old is not None:
                    self._next[matrix] = old
        if gradients:
            self._skipped = 0
            if kept.is_whole:
                kept.stepped()
        return result

    def _check(self, round_: _Round | None, matrices: Iterable[Tensor]) -> None:
        check_unhooked(self.muon)
        missing = [
            matrix for matrix in matrices if round_ is None or matrix not in round_.directions
        ]
        if round_ is None or missing:
            raise UnsupportedConfigurationError(
                f"expected a backward() with muon_hook between two steps, got {len(missing)} matrices with a gradient "
                f"of which no direction has come, the first of shape {tuple(missing[0].shape)}; call muon.step() once "
                "after each exchange, outside of no_sync(), with all of Muon's matrices in the model"
            )
        if round_.settings != self._settings():
            raise UnsupportedConfigurationError(
                "expected momentum, nesterov and the settings of Newton-Schulz as they were in backward(), where the "
                "owners computed with them, got others in muon.step(); change them before backward()"
            )

    def _in_groups(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.muon.param_groups:
            for matrix in group["params"]:
                if matrix in self._owner_of:
                    yield matrix, group

    def _settings(self) -> dict[Tensor, Settings]:
        """Return those of each matrix at this moment."""
        return {matrix: settings_of(group) for matrix, group in self._in_groups()}

    def _check_model(self, bucket: dist.GradBucket) -> None:
        model = model_of(bucket, state=self)
        known = {*map(id, () if model is None else model.module.parameters())}
        foreign = [each for each in self._owner_of if each.requires_grad and id(each) not in known]
        if model is not None and foreign:
            raise UnsupportedConfigurationError(
                f"expected the matrices of one DDP model in Muon, got {len(foreign)} that the model with this hook "
                f"does not have, one of shape {tuple(foreign[0].shape)}; make a Muon and a MuonState for each model"
            )
        if model is not None and any(each.requires_grad for each in self._owner_of):
            self._ddp = weakref.ref(model)

    def _forget(self) -> None:
        """The user drops the gradients: the step is skipped, unless something else has taken it."""
        dropped, self._waiting = self._waiting, None
        if dropped is None or not dropped.can_step:
            return
        if dropped.seal is not None and dropped.seal.is_broken:
            raise UnsupportedConfigurationError(
                "expected muon.step() after backward(), got matrices that were written without it, and gradients that "
                "were dropped (by another optimizer, a SAM step on exchanged gradients, or p -= lr * p.grad): with "
                "muon_hook the gradients of Muon's matrices are zero, and muon.step() alone applies their directions. "
                "To train with another optimizer wrap the model again with another hook; for SAM keep the first pass "
                "in model.no_sync()"
            )
        self._skipped += 1
        if self._skipped == _SKIPPED_STEPS_TO_WARN:
            logger.warning(
                "%d steps of Muon in a row were skipped: with muon_hook the gradients of its matrices are zero after "
                "backward(), and muon.step() alone trains them",
                self._skipped,
            )

    def _loaded(self) -> None:
        self._waiting = None
        self._next.clear()


def muon_hook(state: MuonState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the ranks, and bring the directions of Muon's matrices to all of them.

    Args:
        state: made once per model, on all ranks; see `MuonState`.
        bucket: DDP's bucket.

    Returns:
        A Future of the bucket's own buffer, with zeros for Muon's matrices.

    On failure: as `reduce_scatter_all_gather_hook`; see also `MuonState`. Nothing leaves the hook.

    **Collective**: DDP calls it on all ranks in the same order.
    """
    remedy = "pass MuonState(muon), with mutex= to share the device"
    return answered(
        state, bucket, MuonState, remedy, lambda exchange: state._take(exchange, bucket)
    )


def muon_parameters(
    model: nn.Module, *, head: nn.Module | None = None
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters of ``model`` as torch's page on Muon says: matrices of hidden layers, and all others.

    Embeddings, whatever is tied to them, and the head are no hidden layers. Matrices that a module keeps as parameters
    of its own, such as embeddings of positions, are taken for hidden ones.

    Args:
        model: the module that is trained.
        head: the module that makes the outputs. Default: the last one that has a matrix.

    Returns:
        What is for ``torch.optim.Muon``, and what is for another optimizer, each in the model's order.

    Example::

        matrices, others = muon_parameters(model)
        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)
    """
    having = [m for m in model.modules() if any(p.ndim == 2 for p in m.parameters(recurse=False))]
    apart: list[nn.Module] = [m for m in having if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    apart += [head] if head is not None else having[-1:]
    kept = {id(p) for module in apart for p in module.parameters()}
    parameters = [*model.parameters()]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in kept]
    hidden = {id(p) for p in matrices}
    return matrices, [p for p in parameters if id(p) not in hidden]


def _power_of_two(scale: float) -> float:
    """Return ``scale`` if no rounding can come from it; raise ``ValueError`` otherwise."""
    if not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"expected a loss_scale that is a power of two, got loss_scale={scale}; another one rounds gradients, and "
            "so turns directions: GradScaler's init_scale, growth_factor and backoff_factor must be powers of two"
        )
    return float(scale)


def _check_optimizer(muon: object) -> None:
    """Refuse what is not torch's Muon, whose step is known, or has a state already."""
    if not isinstance(muon, Muon):
        raise TypeError(
            f"expected a torch.optim.Muon, got muon={type(muon).__name__}; give the matrices to torch.optim.Muon and "
            "the other parameters to another optimizer, which needs no state"
        )
    if stripped(type(muon).step, SPANS) is not stripped(Muon.step, SPANS):
        raise TypeError(
            f"expected torch.optim.Muon's own step, got muon={type(muon).__name__}, which has another; pass a "
            "torch.optim.Muon"
        )
    if any(parameter.is_complex() for group in muon.param_groups for parameter in group["params"]):
        raise UnsupportedConfigurationError(
            "expected real matrices, got complex ones, which torch.optim.Muon does not support; give them to another "
            "optimizer"
        )
    check_not_intercepted(muon)
