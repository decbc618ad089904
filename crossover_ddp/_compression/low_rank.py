"""PowerSGD: the mean of gradients as products of thin factors, by two small all-reduces.

[Note: low rank] A parameter of more than one dimension is a matrix M of gradient plus residual. Its
mean over the ranks is approximated by P Qᵀ, where P and Q have as many columns as the codec's rank.
Q is known from the previous step. Ranks average P = M Q, orthogonalize it, and average Q = Mᵀ P. So
P Qᵀ is the exact mean, projected on the columns of P. Each rank keeps M − P Qᵀ as its residual, with
the bits of P Qᵀ that it applies, so nothing is lost. All ranks multiply the same P and Q. So they
apply the same bits if they have the same kind of processor and as many threads. A new link begins
with a Q from a fixed seed, for instance after an exact step or in a resumed job. Source: PowerSGD
(arXiv 1905.13727), as in torch's ``powerSGD_hook``.

[Note: thin memory] P and Q are kept as Pᵀ and Qᵀ. BLAS multiplies with those up to three times as
fast, and LAPACK returns them in this order. Matrices of one shape are multiplied together.

[Note: an idle matrix] A column of Q that becomes zero would stay zero in all later steps. So the
former column is kept instead, and all former columns if the mean is not finite. QR replaces columns
that depend on others by orthogonal ones. So a matrix whose rank is below the codec's needs no
special case.

[Note: later collectives] The second all-reduce of a journey may begin in a different order on each
rank. A reduce-scatter must not, because its sums receive data in the order of journeys. So both
all-reduces are an all-to-all and an all-gather, which a journey may begin at any time. Two ranks
send their values to each other in one hop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._engine.buckets import Run
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.links import Halfway, Layout, Link, parts, tree_sum

from .coded_link import Part, ResidualLink, padded

# The seed of all first values of Q. It must only be the same on all ranks.
_SEED: Final = 0
# Shards of a message are multiples of this: NCCL is slow if they are not aligned to 128 bytes.
_ALIGNED_NUMEL: Final = 32


@dataclass(frozen=True)
class PowerSGD:
    """Average each matrix as the product of two thin factors, by two small all-reduces.

    A parameter of more than one dimension is viewed as a matrix, with a row for each index of its
    outermost dimension in memory. Each factor has ``rank`` columns, so a matrix takes
    ``rank * (rows + columns)`` float32 values, if those are fewer than its own. All other parameters
    travel exactly. The rest of a gradient is sent later ("error feedback"), but much later than with
    `Int8`: after the same number of steps the loss may be clearly higher, see docs/codecs.md.

    A `Codec` has messages from rank to rank, whereas this one averages a bucket at once. So it needs
    a state that does nothing between the halves of an exchange: `CompressedState`, `CrossoverState`
    or ``AutoState(losses="any")``. Others refuse it. Source: PowerSGD (arXiv 1905.13727).

    Args:
        rank: the number of columns of both factors. Default: 2. A higher rank sends more bytes and
            approximates better. A value smaller than 1 raises ``ValueError``.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"expected rank >= 1, got rank={self.rank}; 2 is the default")


class Shape(NamedTuple):
    """A matrix, and the rank that approximates it."""

    rows: int
    columns: int
    rank: int


def shape_of(parameter: Tensor, rank: int) -> Shape | None:
    """Return how a parameter is coded, or None if it travels exactly. Pure.

    The rows are those of the parameter's outermost dimension in memory, since gradients lie in
    buckets as parameters do in memory.
    """
    if parameter.dim() < 2 or parameter.is_complex() or not parameter.numel():
        return None
    rows = parameter.shape[max(range(parameter.dim()), key=parameter.stride)]
    columns = parameter.numel() // rows
    rank = min(rank, rows, columns)
    is_smaller = rank * (rows + columns) < parameter.numel()
    return Shape(rows, columns, rank) if is_smaller else None


class _Mean:
    """Memory for float32 values of which all ranks compute the mean, see [Note: later collectives].

    It is never freed between steps, because another stream of the device may still be reading it.

    Args:
        numel: the number of values.
        link: a link of the ranks.
        device: the bucket's device.
    """

    def __init__(self, numel: int, link: Link, device: torch.device) -> None:
        self._is_one_hop = link.size == 2
        if self._is_one_hop:
            self._layout: Layout = [0 if rank == link.rank else numel for rank in range(2)]
        else:
            self._layout = [padded(-(-numel // link.size), _ALIGNED_NUMEL)] * link.size
        # Zeros, because the padding is sent as well.
        self._memory = torch.zeros(sum(self._layout), dtype=torch.float32, device=device)
        self._incoming = torch.empty_like(self._memory)
        self.values = self._memory[:numel]
        hops = 1 if self._is_one_hop else 2 * (link.size - 1)
        # The bytes that a rank sends.
        self.sent_bytes = 4 * hops * max(self._layout)

    def views(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return views of the values, one after the other."""
        lengths = [torch.Size(shape).numel() for shape in shapes]
        pieces = self.values[: sum(lengths)].split(lengths)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    async def average(self, link: Link) -> None:
        """Replace the values with their mean over the ranks."""
        sizes = self._layout
        await link.all_to_all(self._memory, sizes, self._incoming, sizes)
        if self._is_one_hop:
            # a + b equals b + a in every bit.
            self._memory.add_(self._incoming).div_(2)
            return
        own = parts(self._memory, sizes)[link.rank]
        addends = parts(self._incoming, sizes)
        addends[link.rank] = own
        tree_sum(addends, own)
        own.div_(link.size)
        await link.all_gather(self._memory, sizes)


class _Stack(NamedTuple):
    """Matrices of one shape, and a view of each."""

    whole: Tensor
    each: Sequence[Tensor]


def _stack(zeros: Tensor) -> _Stack:
    return _Stack(zeros, zeros.unbind())


class _Batch:
    """The matrices of a bucket that have the same shape, see [Note: low rank].

    Args:
        shape: their shape.
        runs: where they are.
        device: the bucket's device.
        generator: draws the first Q.
    """

    # Pᵀ and Qᵀ of all matrices, in the memory of messages. Set by `LowRankLink`.
    left: Tensor
    right: Tensor

    def __init__(
        self, shape: Shape, runs: Sequence[Run], device: torch.device, generator: torch.Generator
    ) -> None:
        rows, columns, rank = shape
        self.runs = runs
        self.left_shape = len(runs), rank, rows
        self.right_shape = len(runs), rank, columns
        zeros = torch.zeros(len(runs), rows, columns, dtype=torch.float32, device=device)
        self.residual = _stack(zeros)
        # Gradients plus residuals, which become the residuals of the next step.
        self._sums = _stack(torch.empty_like(zeros))
        # Qᵀ of the step before.
        self._known = torch.randn(self.right_shape, dtype=torch.float32, generator=generator).to(
            device
        )
        # The matrices that this rank does not use in this step; None if residuals need not wait.
        self._unused: Tensor | None = None

    def encode(self, flat: Tensor, leaves_unused: bool) -> None:
        """Compute P of the bucket's gradients plus residuals.

        If no rank uses a parameter, DDP leaves its gradient None, and the residual would be lost.
        So a rank sends nothing for a gradient of zeros, but takes part in the mean.
        """
        self._pieces = [
            flat[slice(*run.span)].view(total.shape)
            for run, total in zip(self.runs, self._sums.each, strict=True)
        ]
        for piece, rest, total in zip(
            self._pieces, self.residual.each, self._sums.each, strict=True
        ):
            torch.add(piece, rest, out=total)
        if leaves_unused:
            used = torch.stack([piece.any() for piece in self._pieces])
            self._unused = used.logical_not()[:, None, None]
        # An orthogonal Q has columns of the same span, but P is more exact and does not underflow.
        torch.bmm(_orthogonal(self._known), self._sums.whole.mT, out=self.left)
        self._leave_out(self.left)

    def project(self) -> None:
        """Orthogonalize the mean of P, and compute Q."""
        self._finite = _all_finite(self.left)
        # LAPACK is only called with finite numbers.
        self._axes = _orthogonal(self.left.masked_fill_(self._finite.logical_not(), 0))
        torch.bmm(self._axes, self._sums.whole, out=self.right)
        self._leave_out(self.right)

    def decode(self) -> None:
        """Write P Qᵀ to the bucket, and keep the rest.

        If it is not finite, it is NaN on all ranks, and the residual and Q remain.
        """
        finite = self._finite.logical_and_(_all_finite(self.right))
        lengths = torch.linalg.vector_norm(self.right, dim=2, keepdim=True)
        is_usable = (lengths > 0).logical_and_(finite)  # see [Note: an idle matrix]
        self._known = torch.where(is_usable, self.right, self._known)
        self.right.masked_fill_(finite.logical_not(), torch.nan)
        for axes, right, piece, total in zip(
            self._axes, self.right, self._pieces, self._sums.each, strict=True
        ):
            # Autocast would round the operands if the result were not given.
            if piece.dtype == torch.float32:
                torch.mm(axes.mT, right, out=piece)
            else:
                # An infinite mean would leave an infinite residual.
                limit = torch.finfo(piece.dtype).max
                product = torch.mm(axes.mT, right, out=torch.empty_like(total))
                piece.copy_(product.clamp_(-limit, limit))
            total.sub_(piece)
        # A device's values are not read, so that the host need not wait.
        if finite.device.type != "cpu" or not bool(finite.all()):
            former = self.residual.whole
            torch.where(finite, self._sums.whole, former, out=self._sums.whole)
        self.residual, self._sums = self._sums, self.residual

    def _leave_out(self, factors: Tensor) -> None:
        if self._unused is not None:
            factors.masked_fill_(self._unused, 0)


def _orthogonal(transposed: Tensor) -> Tensor:
    """Return a batch of thin matrices with orthogonal columns of length 1, all of them transposed."""
    columns: Tensor = torch.linalg.qr(transposed.mT).Q
    return columns.mT


def _all_finite(batch: Tensor) -> Tensor:
    """Return whether all values of each matrix are finite."""
    return batch.isfinite().flatten(1).all(1)[:, None, None]


class LowRankLink(ResidualLink):
    """Carries one bucket as matrices of a low rank, see [Note: low rank].

    Journeys must call `all_reduce`, because there are no halves.

    Args:
        link: the link for the first step.
        codec: the codec.
        parameters: the bucket's parameters.
        content: the bucket's only part. Some of its coded runs may travel exactly.
        device: the bucket's device.
        leaves_unused: True if DDP may leave a parameter's gradient None when no rank uses it.
    """

    def __init__(
        self,
        link: Link,
        codec: PowerSGD,
        parameters: Sequence[Tensor],
        content: Part,
        device: torch.device,
        *,
        leaves_unused: bool = False,
    ) -> None:
        super().__init__(link, codec, parameters, [content])
        self._leaves_unused = leaves_unused
        runs: dict[Shape, list[Run]] = {}
        self._exact_spans = [*content.exact]
        for run in content.coded:
            shape = shape_of(run.parameter, codec.rank)
            if shape is None:
                self._exact_spans.append(run.span)
            else:
                runs.setdefault(shape, []).append(run)
        generator = torch.Generator().manual_seed(_SEED)
        self._batches = [_Batch(shape, its, device, generator) for shape, its in runs.items()]
        exact = [(span.numel,) for span in self._exact_spans]
        left = [batch.left_shape for batch in self._batches]
        right = [batch.right_shape for batch in self._batches]
        self._first = _Mean(_numel([*left, *exact]), link, device)
        self._second = _Mean(_numel(right), link, device)
        views = self._first.views([*left, *exact])
        self._exact = views[len(left) :]
        for batch, itself, other in zip(
            self._batches, views, self._second.views(right), strict=False
        ):
            batch.left = itself
            batch.right = other

    def encode(self, flat: Tensor, link: Link) -> None:
        self._link = link
        for batch in self._batches:
            batch.encode(flat, self._leaves_unused)
        for span, place in zip(self._exact_spans, self._exact, strict=True):
            place.copy_(flat[slice(*span)])

    @property
    def nbytes(self) -> int:
        return sum(batch.residual.whole.nbytes for batch in self._batches)

    def residuals(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (run.parameter, residual.flatten())
            for batch in self._batches
            for run, residual in zip(batch.runs, batch.residual.each, strict=True)
        ]

    def scale(self, factor: float | Tensor) -> None:
        for batch in self._batches:
            batch.residual.whole.mul_(factor)

    def sent_bytes(self) -> int:
        return self._first.sent_bytes + self._second.sent_bytes

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        await self._first.average(self._link)
        await self.compute()
        for batch in self._batches:
            batch.project()
        halfway()
        for span, place in zip(self._exact_spans, self._exact, strict=True):
            flat[slice(*span)].copy_(place)
        if self._batches:
            await self._second.average(self._link)
        for batch in self._batches:
            batch.decode()


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
