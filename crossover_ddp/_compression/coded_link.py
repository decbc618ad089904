"""A link that wraps another link and applies a codec, so that any journey can travel coded.

[Note: residuals] A rank keeps what its messages to owners do not hold, in units of its gradient. An
owner keeps what its message to all ranks does not hold, in units of the mean, or of the result of
its work on the mean. After each step, the following holds for each element: the value that all
ranks apply = mean of gradients + mean of the ranks' old residuals + the owner's old residual − the
same two terms for the new residuals. An owner sends no message to itself, so its own gradient is
added exactly.

[Note: without a look] Nothing here reads a value on the host, because the host launches all of this
while the device is still busy with earlier work. So messages have a fixed size, and tensors on the
device record which values are not finite and which parameters are unused.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Run
from crossover_ddp._engine.links import Layout, Link, LinkAround, parts

from .codec import Codec, PerPair, Scratch

_ALIGNED: Final = 16
# NCCL's collectives are slow if a rank's share begins at an address that is not aligned like this.
_ALIGNED_BY_COLLECTIVES: Final = 128
# A one-dimensional parameter is a bias or a scale. It has few elements, and each one matters.
_CODED_DIMENSIONS: Final = 2


class Part(NamedTuple):
    """One owner's part of a buffer: the runs that are coded, and the spans that travel exactly."""

    coded: list[Run]
    exact: list[Span]

    @property
    def spans(self) -> list[Span]:
        return [*[run.span for run in self.coded], *self.exact]

    def slots(self, multiple: int) -> list[Span]:
        """Return where each span lies among the part's values.

        Each coded run begins at a multiple of ``multiple``. The exact spans follow without gaps.
        """
        lengths = [padded(run.span.numel, multiple) for run in self.coded]
        lengths += [span.numel for span in self.exact]
        starts = accumulate(lengths, initial=0)
        return [
            Span(start, start + span.numel) for start, span in zip(starts, self.spans, strict=False)
        ]


def padded(numel: int, multiple: int) -> int:
    """Round ``numel`` up to a multiple of ``multiple``."""
    return -(-numel // multiple) * multiple


def parts_of(runs: Sequence[Run], layout: Sequence[int]) -> list[Part]:
    """Cut ``runs`` at the owners' boundaries, and separate coded runs from exact spans."""
    found = []
    start = 0
    for numel in layout:
        part = Part([], [])
        stop = start + numel
        for parameter, begin, span in runs:
            own = Span(max(span.start, start), min(span.stop, stop))
            if own.start >= own.stop:
                continue
            if parameter.dim() >= _CODED_DIMENSIONS:
                part.coded.append(Run(parameter, begin + own.start - span.start, own))
            elif part.exact and part.exact[-1].stop == own.start:
                part.exact.append(Span(part.exact.pop().start, own.stop))
            else:
                part.exact.append(own)
        found.append(part)
        start = stop
    return found


class MessageBuffer(NamedTuple):
    """The messages to or from all ranks, in one tensor of bytes that a collective can use."""

    tensor: Tensor
    layout: Layout  # bytes per rank


class _Message(NamedTuple):
    """Two views of a message: exact values in float32, followed by a codec's bytes."""

    codec: Codec
    exact: Tensor
    coded: Tensor


class CodedLink(LinkAround):
    """Carries one bucket in coded messages, first to its owners, then from its owners to all ranks.

    One object serves a bucket for many steps and wraps a new link in each step. It holds the
    messages' residuals; see [Note: residuals]. Gradients are encoded undivided, added in float32,
    and only then divided. After `reduce_scatter`, this rank's part holds the values that all ranks
    will decode. If owners have work to do, it holds the mean until `all_gather`.

    Args:
        link: the link for the first step.
        codecs: the codecs for messages to owners and for messages to all ranks.
        parameters: the bucket's parameters.
        parts: the owners' parts of the bucket, by rank.
        device: the bucket's device.
        scratch: memory for values that are not needed after a call.
        has_work: True if owners work on the mean between the halves and send the result.
        leaves_unused: True if DDP may leave a parameter's gradient None when no rank uses it.
    """

    # Whether the next step travels exactly. Set by `drained`, after which the object is dropped.
    _is_exact = False

    def __init__(
        self,
        link: Link,
        codecs: tuple[PerPair, Codec],
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        device: torch.device,
        scratch: Scratch,
        has_work: bool = False,
        leaves_unused: bool = False,
    ) -> None:
        super().__init__(link)
        self.codecs = codecs
        to_owners, to_all = codecs
        rank = link.rank
        peers = [peer for peer in range(len(parts)) if peer != rank]
        self.parameters = list(parameters)
        self.parts = parts
        self._has_work = has_work
        self._leaves_unused = leaves_unused
        self._scratch = scratch
        # Coded runs must begin where any of the codecs may begin.
        self._multiple = math.lcm(*[codec.multiple for codec in (*to_owners.all(), to_all)])
        # For each part, where its spans lie among its values.
        self._slots = [part.slots(self._multiple) for part in parts]
        # For each part, the number of coded values, including padding.
        self._coded_numel = []
        # For each part, the residual of all its values. It stays 0 for values that travel exactly.
        self._residuals = []
        for part in parts:
            coded = sum(padded(run.span.numel, self._multiple) for run in part.coded)
            exact = sum(span.numel for span in part.exact)
            self._coded_numel.append(coded)
            self._residuals.append(torch.zeros(coded + exact, dtype=torch.float32, device=device))
        # This rank's own exact gradient for its part, and later the result of its work.
        self._own = torch.empty_like(self._residuals[rank])
        # This is a tensor because CUDA would multiply by the reciprocal of a Python number. With
        # some numbers of ranks, such as three, the bits would then differ from the CPU's.
        self._divisor = torch.full((), float(len(parts)), dtype=torch.float32, device=device)
        # The messages' memory is never freed between steps, because another stream of the device
        # may still be reading the last step's messages when the next step begins.
        self._outgoing, self._to_owners = self._messages(
            {peer: (peer, to_owners.between(rank, peer)) for peer in peers}
        )
        self._incoming, self._from_peers = self._messages(
            {peer: (rank, to_owners.between(peer, rank)) for peer in peers}
        )
        self._gathered, self._to_all = self._messages(
            {owner: (owner, to_all) for owner in range(len(parts))}
        )

    def _messages(
        self, contents: dict[int, tuple[int, Codec]]
    ) -> tuple[MessageBuffer, dict[int, _Message]]:
        """Allocate messages; return their buffer, and the messages by peer.

        Args:
            contents: for each peer, the owner whose part the message holds, and its codec.
        """
        exact_bytes = [
            4 * (len(residual) - coded)
            for residual, coded in zip(self._residuals, self._coded_numel, strict=True)
        ]
        # Where the codec's bytes begin in a message with each owner's part.
        heads = [padded(nbytes, _ALIGNED) for nbytes in exact_bytes]
        ends = {}
        for peer, (owner, codec) in contents.items():
            ends[peer] = heads[owner] + codec.nbytes(self._coded_numel[owner])
        aligned = _ALIGNED_BY_COLLECTIVES if self.in_program_order else _ALIGNED
        sizes = [padded(ends.get(peer, 0), aligned) for peer in range(len(self.parts))]
        if self.in_program_order and len(contents) == len(sizes):
            # NCCL's all-gather needs parts of equal size.
            sizes = [max(sizes)] * len(sizes)
        # Zero the memory. Otherwise the padding would send this process's old data to other ranks.
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._own.device)
        buffer = MessageBuffer(memory, sizes)
        messages = {}
        for peer, (owner, codec) in contents.items():
            own = parts(*buffer)[peer]
            exact = own[: exact_bytes[owner]].view(torch.float32)
            messages[peer] = _Message(codec, exact, own[heads[owner] : ends[peer]])
        return buffer, messages

    @property
    def nbytes(self) -> int:
        """The size of the residuals in bytes."""
        return sum(residual.nbytes for residual in self._residuals)

    def residuals(self) -> list[tuple[Tensor, Tensor]]:
        """Return each coded parameter and its whole flat residual, in units of the gradient."""
        # An owner's residual is in units of the mean, so it is multiplied by the number of ranks,
        # by which the exchange divides. If the owner has worked on the mean, its residual has no
        # such unit and is left out.
        owner_factor = 0 if self._has_work else len(self.parts)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for owner, part in enumerate(self.parts):
            factor = owner_factor if owner == self.rank else 1
            pieces = self._views(self._residuals[owner], owner)
            for run, piece in zip(part.coded, pieces, strict=False):
                numel = run.parameter.numel() * (2 if run.parameter.is_complex() else 1)
                empty = run.parameter, piece.new_zeros(numel)
                _, residual = found.setdefault(id(run.parameter), empty)
                residual[run.begin : run.begin + len(piece)] = piece * factor
        return [*found.values()]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all residuals by ``factor``."""
        for residual in self._residuals:
            residual.mul_(factor)

    def drained(self, link: Link) -> "CodedLink":
        """Make the next step travel exactly; owners add their residuals to their results."""
        self._link = link
        self._is_exact = True
        return self

    def encode(self, flat: Tensor, link: Link) -> None:
        """Encode the messages to the owners.

        Args:
            flat: the gradients, which the result will overwrite.
            link: the link that carries this step's messages.
        """
        self._flat = flat
        self._link = link
        for owner, message in self._to_owners.items():
            self._encode(self._pieces(owner), owner, message, self._scratch_values(owner))
        # Copy this rank's own gradient, because the result will overwrite it.
        self._pack(self._pieces(self.rank), self.rank, self._own)

    @property
    def exact(self) -> Link:
        return self._link

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        if self._is_exact:
            shard = await super().reduce_scatter(flat, layout)
            if not self._has_work:
                self._add_residual(flat)
            return shard
        await self.all_to_all(*self._outgoing, *self._incoming)
        await self.compute()
        mean = self._mean()
        if self._has_work:
            self._unpack(self.rank, mean)
        else:
            self._encode_own(mean)
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        if self._is_exact:
            if self._has_work:
                self._add_residual(flat)
            await super().all_gather(flat, layout)
            return
        if self._has_work:
            self._pack(self._pieces(self.rank), self.rank, self._own)
            self._encode_own(self._own)
        await super().all_gather(*self._gathered)
        for owner in range(self.size):
            if owner != self.rank:
                self._decode(owner)

    def _add_residual(self, flat: Tensor) -> None:
        """Add this owner's residual to its result."""
        own = self._residuals[self.rank]
        if own.is_cuda:
            # The host drops this object before the device has read the residual.
            own.record_stream(torch.cuda.current_stream(own.device))
        pieces = self._views(own, self.rank)
        for run, piece in zip(self.parts[self.rank].coded, pieces, strict=False):
            flat[slice(*run.span)].add_(piece)

    def sent_bytes(self, flat: Tensor) -> tuple[int, int]:
        """Return how many bytes this rank sends in both halves, and how many it would uncoded."""
        exact = flat.numel() * flat.itemsize * (self.size - 1) // self.size
        to_owners = len(self._outgoing.tensor)
        to_all = (self.size - 1) * self._gathered.layout[self.rank]
        return to_owners + to_all, 2 * exact

    def _mean(self) -> Tensor:
        """Add all ranks' messages and this rank's own gradient in rank order; return the mean."""
        own = self._own
        # a + b equals b + a in every bit, so ranks 0 and 1 can add to their own gradient in place.
        adds_to_own = self.rank <= 1
        values = own if adds_to_own else self._scratch_values(self.rank).zero_()
        coded, exact = self._halves(values, self.rank)
        for rank in range(self.size):
            if rank != self.rank:
                message = self._from_peers[rank]
                exact.add_(message.exact)
                if len(coded):
                    message.codec.add_decoded(message.coded, coded)
            elif not adds_to_own:
                values.add_(own)
        return values.div_(self._divisor)

    def _encode_own(self, values: Tensor) -> None:
        """Encode this owner's message to all ranks; decode it here too, to get the same bits."""
        pieces = self._views(values, self.rank)
        self._encode(pieces, self.rank, self._to_all[self.rank], values)
        self._decode(self.rank)

    def _decode(self, owner: int) -> None:
        """Decode an owner's message to all ranks into the bucket."""
        message = self._to_all[owner]
        values = self._scratch_values(owner)
        coded, exact = self._halves(values, owner)
        exact.copy_(message.exact)
        if len(coded):
            decode = getattr(message.codec, "decode", None)
            if decode is not None:
                decode(message.coded, coded)
            else:
                message.codec.add_decoded(message.coded, coded.zero_())
        self._unpack(owner, values)

    def _encode(
        self, pieces: Sequence[Tensor], owner: int, message: _Message, values: Tensor
    ) -> None:
        """Encode ``pieces`` plus their residuals, except for residuals of unused parameters.

        If no rank uses a parameter, DDP leaves its gradient None, and a residual that was sent
        for it would be lost. So such residuals are kept.

        Args:
            pieces: the gradients of an owner's part.
            owner: the owner of that part.
            message: the message to write.
            values: memory for the sums.
        """
        coded, exact = self._halves(values, owner)
        residual, _ = self._halves(self._residuals[owner], owner)
        coded_pieces = pieces[: len(self.parts[owner].coded)] if self._leaves_unused else ()
        unused = [piece.any().logical_not() for piece in coded_pieces]
        self._pack(pieces, owner, values, self._residuals[owner])
        message.exact.copy_(exact)
        if not len(coded):
            return
        former = residual.clone() if unused else residual
        for piece, is_unused in zip(self._views(values, owner), unused, strict=False):
            piece.masked_fill_(is_unused, 0)
        message.codec.encode(coded, message.coded, residual)
        for slot, is_unused in zip(self._slots[owner], unused, strict=False):
            piece = residual[slice(*slot)]
            torch.where(is_unused, former[slice(*slot)], piece, out=piece)

    # "Values" are those of one owner's part: the padded coded runs, followed by the exact spans.

    def _scratch_values(self, owner: int) -> Tensor:
        return self._scratch.take(len(self._residuals[owner]), self._own.device)

    def _halves(self, values: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Return views of the coded values and of the exact values."""
        coded = self._coded_numel[owner]
        return values[:coded], values[coded:]

    def _views(self, values: Tensor, owner: int) -> list[Tensor]:
        """Return a view of each span's values, without padding."""
        return _slices(values, self._slots[owner])

    def _pieces(self, owner: int) -> list[Tensor]:
        """Return a view of the bucket's memory for each span."""
        return _slices(self._flat, self.parts[owner].spans)

    def _unpack(self, owner: int, values: Tensor) -> None:
        """Copy ``values`` to the owner's part of the bucket."""
        pieces = self._pieces(owner)
        if pieces:
            torch._foreach_copy_(pieces, self._views(values, owner))

    def _pack(
        self, pieces: Sequence[Tensor], owner: int, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """Write ``pieces``, plus ``residual`` if given, to ``out``, and zero the padding."""
        for slot, _ in zip(self._slots[owner], self.parts[owner].coded, strict=False):
            out[slot.stop : padded(slot.stop, self._multiple)].zero_()
        places = self._views(out, owner)
        if residual is not None:
            for piece, rest, place in zip(
                pieces, self._views(residual, owner), places, strict=True
            ):
                torch.add(piece, rest, out=place)
        elif places:
            torch._foreach_copy_(places, list(pieces))


def _slices(values: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [values[start:stop] for start, stop in spans]
