"""One backward pass of Muon: what each bucket sends in its place, and what the owners make of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.muon_direction import (
    DirectionSettings,
    direction_of,
    direction_view,
    matrix_view,
)
from crossover_ddp._exchange.transfer import Payload, Sharded

from .momentum import OwnedMomentum
from .payload_sizes import MatrixSize, MuonLayout, muon_layout


@dataclass(frozen=True)
class MuonPlan:
    """What all ranks do in one backward pass.

    Args:
        rank, world_size: of this process.
        owners: rank of each matrix.
        matrices: the parameters.
        settings: of each matrix, of the moment at which backward began.
        scale: of the loss, a power of two.
        keeps_turn: whether computing directions is compute inside the job's turn.
    """

    rank: int
    world_size: int
    owners: Sequence[int]
    matrices: Sequence[Tensor]
    settings: Sequence[DirectionSettings]
    scale: float
    keeps_turn: bool


@dataclass(eq=False)
class MuonRound:
    """One backward pass, and what has come of it.

    Attributes:
        directions: of all matrices that had a gradient, bfloat16, equal on all ranks.
        squared_norms: of their mean gradients, before the loss's scale, float64 without dimension.
        calls: how many directions this rank has computed.
    """

    plan: MuonPlan
    directions: dict[int, Tensor] = field(default_factory=dict)
    squared_norms: dict[int, Tensor] = field(default_factory=dict)
    calls: int = 0

    def grad_norm(self) -> Tensor:
        """Return the norm over all matrices; summed in one order whatever buckets they came in."""
        squares = [self.squared_norms[index] for index in sorted(self.squared_norms)]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


class BucketMatrix(NamedTuple):
    """A matrix in a bucket: its number, and where its gradient is."""

    number: int
    span: Span


class Lender(NamedTuple):
    """Lends memory: ``there``, at least so much, until ``give_back``; ``back`` until the bucket's next exchange."""

    there: Callable[[int], Tensor]
    give_back: Callable[[Tensor], None]
    back: Callable[[int], Tensor]


class MuonPayload:
    """The matrices of one bucket and what else of it passes through, packed for the way.

    Args:
        round: of this backward pass.
        momentum: of the matrices that this rank owns.
        buffer: of the bucket, flat.
        matrices: in it.
        passing: spans of ``buffer`` that pass through.
        lender: of memory.
    """

    def __init__(
        self,
        round: MuonRound,
        momentum: OwnedMomentum,
        buffer: Tensor,
        matrices: Sequence[BucketMatrix],
        passing: tuple[Span, ...],
        lender: Lender,
    ) -> None:
        self._round = round
        self._momentum = momentum
        self._buffer = buffer
        self._matrices = matrices
        plan = round.plan
        sizes = tuple([MatrixSize(plan.owners[each.number], each.span.numel) for each in matrices])
        self.layout: MuonLayout = muon_layout(plan.world_size, buffer.itemsize, sizes, passing)
        self._back = lender.back(self.layout.back.numel)
        moves = [*zip([each.span for each in matrices], self.layout.gradients, strict=True)]
        moves += self.layout.passing_there
        self._lent: Tensor | None = None
        if all(source == target for source, target in moves):
            self._there = buffer  # it lies as it travels: a large matrix that has a bucket of its own
            return
        self._lent = lender.there(self.layout.there.numel)
        self._give_back = lender.give_back
        self._there = self._lent[: self.layout.there.numel]
        for source, target in moves:
            _part(self._there, target).copy_(_part(buffer, source))

    def payload(self) -> Payload:
        """Return what the engine needs to know."""
        return Payload(
            Sharded(self._there, self.layout.there),
            Sharded(self._back, self.layout.back),
            self._step,
            self._unload,
            keeps_turn=self._round.plan.keeps_turn,
            is_long=True,
        )

    # On the owner, between the halves.

    def _step(self, part: Tensor) -> None:
        rank, owners = self._round.plan.rank, self._round.plan.owners
        # With one rank, and on NCCL, this runs inside of backward(), which may have been called under autocast.
        with torch.autocast(part.device.type, enabled=False):
            for place, each in enumerate(self._matrices):
                if owners[each.number] == rank:
                    self._compute(each.number, place)
        own = self.layout.there.part(rank)
        for (_, source), (_, target) in zip(self.layout.passing_there, self.layout.passing_back, strict=True):
            if own.start <= source.start < own.stop:
                _part(self._back, target).copy_(_part(self._there, source))

    def _compute(self, number: int, place: int) -> None:
        plan, matrix = self._round.plan, self._round.plan.matrices[number]
        gradient = matrix_view(_part(self._there, self.layout.gradients[place]), matrix)
        if plan.scale != 1.0:
            gradient.mul_(1.0 / plan.scale)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        _part(self._back, self.layout.norms[place]).copy_(norm.square().reshape(1).view(self._back.dtype))
        momentum = self._momentum.now(number)
        direction = direction_of(gradient, momentum, self._momentum.next(number), plan.settings[number])
        self._direction(place).copy_(direction)
        self._round.calls += 1

    # Wherever the bucket's way ends.

    def _unload(self) -> None:
        """Keep the directions for the step; of the matrices' gradients only leave whether they were finite."""
        for place, each in enumerate(self._matrices):
            norm = _part(self._back, self.layout.norms[place]).clone().view(torch.float64)[0]
            self._round.directions[each.number] = self._direction(place)
            self._round.squared_norms[each.number] = norm
            # 0, or NaN if anything was not finite: a GradScaler then skips the step on all ranks, and asks no device.
            _part(self._buffer, each.span).fill_((norm * 0).to(self._buffer.dtype))
        for span, source in self.layout.passing_back:
            _part(self._buffer, span).copy_(_part(self._back, source))
        if self._lent is not None:
            self._give_back(self._lent)

    def _direction(self, place: int) -> Tensor:
        matrix = self._round.plan.matrices[self._matrices[place].number]
        flat = _part(self._back, self.layout.directions[place]).view(torch.bfloat16)
        return direction_view(flat[: matrix.numel()], matrix.shape)


def _part(flat: Tensor, span: Span) -> Tensor:
    return flat[span.start : span.stop]
