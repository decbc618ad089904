"""Links that wrap another link and apply a codec, so that any journey can travel coded.

[Note: one hop] Between two ranks, the two halves of an exchange send as many bytes as if each rank
sent all of its coded gradients to the other. So they do the latter if one codec is used for both
halves and nothing happens between them. It saves a hop and the second rounding. Both ranks decode the
same two messages in the same order. Our design.

[Note: tiles] On a CPU, memory takes most of the time. So a part of a bucket is cut into tiles that fit
into a core's cache. Each has a message of its own within the part's message, and all passes over a
tile follow each other. On a device, and for a codec that looks at all values together, the part is
one tile. Tiles begin where blocks of the codec begin, so they do not change a single bit. Where a
codec has fused passes, they read and write the bucket itself; see [Note: kernels] in `kernels.py`.

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
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Run
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.levels import TwoLevelLink
from crossover_ddp._engine.links import Halfway, Layout, Link, LinkAround, parts
from crossover_ddp.errors import UnsupportedConfigurationError

from .codec import Codec, PerPair, Scratch
from .kernels import Kernel, Runs, kernel_of

_ALIGNED: Final = 16
# NCCL's collectives are slow if a rank's share begins at an address that is not aligned like this.
_ALIGNED_BY_COLLECTIVES: Final = 128
# A tile of float32 takes a quarter of a megabyte, and all that is done to it about a megabyte.
_TILE_NUMEL: Final = 1 << 16
# A one-dimensional parameter is a bias or a scale. It has few elements, and each one matters.
_CODED_DIMENSIONS: Final = 2


class Part(NamedTuple):
    """One owner's part of a buffer: the runs that are coded, and the spans that travel exactly."""

    coded: list[Run]
    exact: list[Span]

    @property
    def spans(self) -> list[Span]:
        return [*[run.span for run in self.coded], *self.exact]

    def moved(self, by: int) -> "Part":
        """Return the part of a buffer in which the values begin ``by`` elements later."""
        coded = [run._replace(span=_moved(run.span, by)) for run in self.coded]
        return Part(coded, [_moved(span, by) for span in self.exact])

    def slots(self, multiple: int) -> list[Span]:
        """Return the place of each span among the part's values.

        Each coded run begins at a multiple of ``multiple``. The exact spans follow without gaps.
        """
        lengths = [padded(run.span.numel, multiple) for run in self.coded]
        lengths += [span.numel for span in self.exact]
        starts = accumulate(lengths, initial=0)
        return [
            Span(start, start + span.numel) for start, span in zip(starts, self.spans, strict=False)
        ]


def _moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


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


def column_of(content: Sequence[Part], layout: Layout, ranks: Sequence[int]) -> list[Part]:
    """Return the parts of some ranks in memory that holds only these parts, one after the other.

    Args:
        content: all parts of a buffer, by rank.
        layout: the number of values in each of them.
        ranks: the ranks whose parts the memory holds.
    """
    starts = list(accumulate(layout, initial=0))
    places = accumulate([layout[rank] for rank in ranks], initial=0)
    return [
        content[rank].moved(place - starts[rank])
        for rank, place in zip(ranks, places, strict=False)
    ]


def joined(parts: Sequence[Part]) -> Part:
    """Return one part that holds all ``parts``."""
    return Part(
        [run for part in parts for run in part.coded],
        [span for part in parts for span in part.exact],
    )


class MessageBuffer(NamedTuple):
    """The messages to or from all ranks, in one tensor of bytes that a collective can use."""

    tensor: Tensor
    layout: Layout  # bytes per rank


class _Message(NamedTuple):
    """Views of a tile's message: exact values in float32, followed by a codec's bytes."""

    codec: Codec
    exact: Tensor
    exact_spans: list[Tensor]
    coded: Tensor
    kernel: Kernel | None


class _Places(NamedTuple):
    """The places of a tile's coded runs and exact spans in some memory."""

    spans: list[Span]
    exact: list[Span]
    runs: Runs


class _Views(NamedTuple):
    """Views of the memory for a tile's values."""

    of: Tensor
    spans: list[Tensor]  # without padding
    exact_spans: list[Tensor]  # the last of them
    gaps: list[Tensor]  # the padding
    coded: Tensor
    exact: Tensor


class _Tile:
    """A tile, which is encoded by itself, and the residual of its messages. See [Note: tiles].

    The *values* of a tile are its padded coded runs, followed by its exact spans.

    Args:
        content: the tile's runs and spans.
        multiple: coded runs begin at multiples of this many values.
        device: the bucket's device.
        leaves_unused: True if DDP may leave a parameter's gradient None when no rank uses it.
        scratch: memory for values that are not needed after a call.
    """

    def __init__(
        self,
        content: Part,
        multiple: int,
        device: torch.device,
        leaves_unused: bool,
        scratch: Scratch,
    ) -> None:
        self.content = content
        self._device = device
        self._scratch = scratch
        self._leaves_unused = leaves_unused
        self._slots = content.slots(multiple)
        count = len(content.coded)
        ends = [(slot.stop, padded(slot.stop, multiple)) for slot in self._slots[:count]]
        self._gaps = [slice(*gap) for gap in ends if gap[0] < gap[1]]
        # The number of coded values, including padding.
        self._coded_numel = ends[-1][1] if ends else 0
        exact_numel = sum(span.numel for span in content.exact)
        self._exact_bytes = 4 * exact_numel
        self.numel = self._coded_numel + exact_numel  # of the values
        self.in_bucket = self._places(content.spans, multiple)
        self.in_values = self._places(self._slots, multiple)
        # It stays 0 for values that travel exactly.
        self.residual = torch.zeros(self.numel, dtype=torch.float32, device=device)
        self._residual_views = self._made_views(self.residual)
        # Those of the last two threads. Making views takes as long as a pass over the tile.
        self._known_views: list[_Views] = []

    def _places(self, spans: list[Span], multiple: int) -> _Places:
        count = len(self.content.coded)
        slots = self._slots[:count]
        runs = [
            (span.start, slot.start, slot.numel, padded(slot.numel, multiple))
            for span, slot in zip(spans, slots, strict=False)
        ]
        return _Places(spans, spans[count:], Runs(runs))

    def message_bytes(self, codec: Codec) -> int:
        return padded(self._exact_bytes, _ALIGNED) + codec.nbytes(self._coded_numel)

    def message(self, memory: Tensor, codec: Codec) -> _Message:
        """Return the message that fills ``memory``: exact values first, then the codec's bytes."""
        exact = memory[: self._exact_bytes].view(torch.float32)
        exact_spans = list(exact.split_with_sizes([span.numel for span in self.content.exact]))
        coded = memory[padded(self._exact_bytes, _ALIGNED) :]
        kernel = kernel_of(codec) if memory.device.type == "cpu" else None
        return _Message(codec, exact, exact_spans, coded, kernel)

    def coded_residuals(self) -> Iterator[tuple[Run, Tensor]]:
        """Yield each coded run, with a view of its residual."""
        return zip(self.content.coded, self._residual_views.spans, strict=False)

    def pack(self, flat: Tensor, values: Tensor) -> None:
        """Copy the tile's spans of ``flat`` to ``values``, and zero the padding."""
        views = self.views(values)
        for gap in views.gaps:
            gap.zero_()
        for piece, place in zip(_slices(flat, self.content.spans), views.spans, strict=True):
            place.copy_(piece)

    def unpack(self, values: Tensor, flat: Tensor, divisor: Tensor | None = None) -> None:
        """Copy ``values`` to the tile's spans of ``flat``, divided by ``divisor`` if given."""
        pieces = _slices(flat, self.content.spans)
        for piece, view in zip(pieces, self.views(values).spans, strict=True):
            if divisor is None:
                piece.copy_(view)
            else:
                torch.div(view, divisor, out=piece)

    def values(self) -> Tensor:
        """Return memory for the tile's values, until the next call."""
        return self._scratch.take(self.numel, self._device)

    def encode(self, memory: Tensor, places: _Places, message: _Message) -> None:
        """Encode gradients plus the residual, except for residuals of unused parameters.

        If no rank uses a parameter, DDP leaves its gradient None, and a residual that was sent
        for it would be lost. So such residuals are kept.

        Args:
            memory: the memory that holds the gradients.
            places: their places in it.
            message: the message to write.
        """
        rests = self._residual_views
        if message.kernel is not None and memory.dtype == torch.float32:
            pieces = _slices(memory, places.exact)
            for piece, rest, sent in zip(
                pieces, rests.exact_spans, message.exact_spans, strict=True
            ):
                torch.add(piece, rest, out=sent)
            message.kernel.encode(
                memory, places.runs, rests.coded, message.coded, self._leaves_unused
            )
            return
        views = self.views(self.values())
        pieces = _slices(memory, places.spans)
        coded_pieces = pieces[: len(self.content.coded)] if self._leaves_unused else ()
        unused = [piece.any().logical_not() for piece in coded_pieces]
        for gap in views.gaps:
            gap.zero_()
        for piece, rest, place in zip(pieces, rests.spans, views.spans, strict=True):
            torch.add(piece, rest, out=place)
        message.exact.copy_(views.exact)
        if not self._coded_numel:
            return
        residual = rests.coded
        former = residual.clone() if unused else residual
        for piece, is_unused in zip(views.spans, unused, strict=False):
            piece.masked_fill_(is_unused, 0)
        message.codec.encode(views.coded, message.coded, residual)
        for slot, is_unused in zip(self._slots, unused, strict=False):
            piece = residual[slice(*slot)]
            torch.where(is_unused, former[slice(*slot)], piece, out=piece)

    def read(
        self, messages: Sequence[_Message], flat: Tensor, divisor: Tensor | None = None
    ) -> None:
        """Overwrite the tile's spans of a bucket with the sum of ``messages``.

        Args:
            messages: the messages, which are added in this order.
            flat: the bucket's memory.
            divisor: divides the sum, if given.
        """
        first, *others = messages
        if flat.dtype == torch.float32 and all(each.kernel is not None for each in messages):
            for index, message in enumerate(messages):
                is_last = index == len(others)
                divides_by = float(divisor) if is_last and divisor is not None else 1.0
                self._fused(message, flat, self.in_bucket, index > 0, divides_by)
            return
        values = self.values()
        views = self.views(values)
        views.exact.copy_(first.exact)
        if self._coded_numel:
            decode = getattr(first.codec, "decode", None)
            if decode is not None:
                decode(first.coded, views.coded)
            else:
                first.codec.add_decoded(first.coded, views.coded.zero_())
        for message in others:
            self.add_decoded(message, values)
        self.unpack(values, flat, divisor)

    def add_decoded(self, message: _Message, values: Tensor) -> None:
        """Add the values of ``message`` to ``values``."""
        if message.kernel is not None:
            self._fused(message, values, self.in_values, True)
            return
        views = self.views(values)
        views.exact.add_(message.exact)
        if self._coded_numel:
            message.codec.add_decoded(message.coded, views.coded)

    def _fused(
        self, message: _Message, out: Tensor, places: _Places, adds: bool, divisor: float = 1.0
    ) -> None:
        """Read one message with the codec's kernel; see `read`."""
        assert message.kernel is not None
        for piece, sent in zip(_slices(out, places.exact), message.exact_spans, strict=True):
            if adds:
                piece.add_(sent)
            else:
                piece.copy_(sent)
            if divisor != 1.0:
                piece.div_(divisor)
        message.kernel.decode(message.coded, out, places.runs, self._coded_numel, adds, divisor)

    def views(self, values: Tensor) -> _Views:
        """Return views of memory for the tile's values."""
        for known in self._known_views:
            if known.of is values:
                return known
        made = self._made_views(values)
        if values.device.type == "cpu":  # a device's memory is new each time
            self._known_views = [made, *self._known_views[:1]]
        return made

    def _made_views(self, values: Tensor) -> _Views:
        gaps = [values[gap] for gap in self._gaps]
        coded, exact = values[: self._coded_numel], values[self._coded_numel :]
        spans = _slices(values, self._slots)
        return _Views(values, spans, spans[len(self.content.coded) :], gaps, coded, exact)


class ResidualLink(LinkAround):
    """Carries one bucket with an error that it keeps. The base class of all such links.

    One object serves a bucket for many steps and wraps a new link in each step.

    Args:
        link: the link for the first step.
        codecs: the codecs. An object serves a bucket until they change.
        parameters: the bucket's parameters.
        content: the parts of the whole bucket.
    """

    def __init__(
        self, link: Link, codecs: object, parameters: Sequence[Tensor], content: Sequence[Part]
    ) -> None:
        super().__init__(link)
        self.codecs = codecs
        self.parameters = list(parameters)
        self.content = content

    def encode(self, flat: Tensor, link: Link) -> None:
        """Encode the messages.

        Args:
            flat: the gradients, which the result will overwrite.
            link: the link that carries this step's messages.
        """
        raise NotImplementedError

    def encoded(self, flat: Tensor, link: Link) -> Link:
        """Call `encode`, and return this link."""
        self.encode(flat, link)
        return self

    def around(self, flat: Tensor, link: Link) -> Link:
        """Encode ``flat``, and return the link that carries the messages.

        With two levels only nodes exchange coded messages, see [Note: coded between nodes] in
        ``_engine/levels.py``.
        """
        if isinstance(link, TwoLevelLink):
            link.code(self.encoded)
            return link
        return self.encoded(flat, link)

    @property
    def exact(self) -> Link:
        return self._link

    @property
    def nbytes(self) -> int:
        """The size of the residuals in bytes."""
        raise NotImplementedError

    def residuals(self) -> list[tuple[Tensor, Tensor]]:
        """Return each coded parameter and its whole flat residual, in units of the gradient."""
        raise NotImplementedError

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all residuals by ``factor``."""
        raise NotImplementedError

    def sent_bytes(self) -> int:
        """Return how many bytes this rank sends in one step."""
        raise NotImplementedError


class CodedLink(ResidualLink):
    """Carries one bucket in coded messages. The base class of both kinds of coded links.

    It holds the messages' residuals; see [Note: residuals]. Gradients are encoded undivided, added
    in float32, and only then divided, unless they are sums of gradients that were divided before.

    Args:
        link: the link for the first step.
        codecs: the codecs for messages to owners and for messages to all ranks.
        parameters: the bucket's parameters.
        parts: the parts of the memory to encode, by rank of ``link``.
        device: the bucket's device.
        scratch: memory for values that are not needed after a call.
        content: the parts of the whole bucket. Default: ``parts``.
        divided_by: the number by which gradients have been divided. If it is not 1, the result is
            the sum.
        has_work: True if owners work on the mean between the halves and send the result.
        keeps_rest: False if an owner drops the rounding error of its message to all ranks.
        scales_rest: False if that error is not in units of the scaled loss's gradient.
        codes_back: False if messages to all ranks are made elsewhere.
        leaves_unused: True if DDP may leave a parameter's gradient None when no rank uses it.
    """

    def __init__(
        self,
        link: Link,
        codecs: tuple[PerPair, Codec],
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        device: torch.device,
        scratch: Scratch,
        *,
        content: Sequence[Part] | None = None,
        divided_by: int = 1,
        has_work: bool = False,
        keeps_rest: bool = True,
        scales_rest: bool = True,
        codes_back: bool = True,
        leaves_unused: bool = False,
    ) -> None:
        super().__init__(link, codecs, parameters, parts if content is None else content)
        self.codecs: tuple[PerPair, Codec] = codecs
        self._divided_by = divided_by
        self.device = device
        self._has_work = has_work
        self._keeps_rest = keeps_rest
        self._scales_rest = scales_rest
        self._codes_back = codes_back
        to_owners, to_all = codecs
        used = [*to_owners.all(), to_all]
        # Coded runs must begin where any of the codecs may begin.
        multiple = math.lcm(*[codec.multiple for codec in used])
        cuts = device.type == "cpu" and all(getattr(codec, "is_local", False) for codec in used)
        # The tiles of each part.
        self._tiles = [
            [
                _Tile(content, multiple, device, leaves_unused, scratch)
                for content in (_cut(part, padded(_TILE_NUMEL, multiple)) if cuts else [part])
            ]
            for part in parts
        ]
        # This is a tensor because CUDA would multiply by the reciprocal of a Python number. With
        # some numbers of ranks, such as three, the bits would then differ from the CPU's.
        self._divides_by = link.size if divided_by == 1 else 1
        self._divisor = torch.full((), float(self._divides_by), dtype=torch.float32, device=device)
        self._make_messages()

    def _make_messages(self) -> None:
        """Allocate the memory of all messages.

        It is never freed between steps, because another stream of the device may still be reading
        the last step's messages when the next step begins.
        """
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(tile.residual.nbytes for tiles in self._tiles for tile in tiles)

    def residuals(self) -> list[tuple[Tensor, Tensor]]:
        return self._residuals([self._residual_factor(part) for part in range(len(self._tiles))])

    def _residuals(self, factors: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return each coded parameter and its flat residual, with a factor for each part."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for part, tiles in enumerate(self._tiles):
            factor = factors[part] * self._divided_by
            for run, piece in _coded_residuals(tiles):
                numel = run.parameter.numel() * (2 if run.parameter.is_complex() else 1)
                empty = run.parameter, piece.new_zeros(numel)
                _, residual = found.setdefault(id(run.parameter), empty)
                residual[run.begin : run.begin + len(piece)] = piece * factor
        return [*found.values()]

    def _residual_factor(self, part: int) -> int:
        """Return the factor that brings a part's residual to units of the gradient."""
        return 1

    def scale(self, factor: float | Tensor) -> None:
        for part, tiles in enumerate(self._tiles):
            if self._is_scaled(part):
                for tile in tiles:
                    tile.residual.mul_(factor)

    def _is_scaled(self, part: int) -> bool:
        """Return whether a part's residual has the loss scale of the gradients."""
        return True

    def _messages(
        self, contents: Mapping[int, tuple[int, Codec]]
    ) -> tuple[MessageBuffer, dict[int, list[_Message]]]:
        """Allocate messages. Return their buffer, and the messages of all tiles by peer.

        Args:
            contents: for each peer, the part that the message holds, and its codec.
        """
        aligned = _ALIGNED_BY_COLLECTIVES if self.in_program_order else _ALIGNED
        sizes = [0] * self.size
        lengths = {}
        for peer, (part, codec) in contents.items():
            tiles = self._tiles[part]
            lengths[peer] = [padded(tile.message_bytes(codec), _ALIGNED) for tile in tiles]
            sizes[peer] = padded(sum(lengths[peer]), aligned)
        if self.in_program_order and len(contents) == len(sizes):
            # NCCL's all-gather needs parts of equal size.
            sizes = [max(sizes)] * len(sizes)
        # Zero the memory. Otherwise the padding would send this process's old data to other ranks.
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        buffer = MessageBuffer(memory, sizes)
        messages = {}
        for peer, (part, codec) in contents.items():
            own = parts(*buffer)[peer]
            starts = accumulate(lengths[peer], initial=0)
            messages[peer] = [
                tile.message(own[start : start + tile.message_bytes(codec)], codec)
                for tile, start in zip(self._tiles[part], starts, strict=False)
            ]
        return buffer, messages


CodedLinkOfKind = TypeVar("CodedLinkOfKind", bound=CodedLink)


class OneHopLink(CodedLink):
    """Carries one bucket between two ranks, each of which sends its own message to the other.

    See [Note: one hop]. The whole bucket is the only part. The codecs must be equal, see
    `suits_one_hop`. Journeys must call `all_reduce`, because there are no halves.
    """

    def _make_messages(self) -> None:
        contents = {1 - self.rank: (0, self.codecs[1])}
        self._outgoing, leaving = self._messages(contents)
        self._incoming, arriving = self._messages(contents)
        [self._own], [self._theirs] = leaving.values(), arriving.values()

    def encode(self, flat: Tensor, link: Link) -> None:
        self._link = link
        for tile, message in zip(self._tiles[0], self._own, strict=True):
            tile.encode(flat, tile.in_bucket, message)

    def sent_bytes(self) -> int:
        return len(self._outgoing.tensor)

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        await self.all_to_all(*self._outgoing, *self._incoming)
        halfway()
        for tile, own, theirs in zip(self._tiles[0], self._own, self._theirs, strict=True):
            # Both ranks add in the same order, so their sums have the same bits.
            in_order = (theirs, own) if self.rank else (own, theirs)
            tile.read(in_order, flat, self._divisor)


def suits_one_hop(codecs: tuple[PerPair, Codec], size: int) -> bool:
    """Return whether ``size`` ranks can exchange a bucket in one hop, see [Note: one hop]. Pure."""
    to_owners, to_all = codecs
    return size == 2 and all(codec == to_all for codec in to_owners.all())


class OwnersLink(CodedLink):
    """Carries one bucket to its owners, and then from its owners to all ranks.

    After `reduce_scatter`, this rank's part holds the values that all ranks will decode. If owners
    have work to do, it holds the mean until `all_gather`. The parts are those of the owners, by
    rank.
    """

    # Whether the next step travels exactly. Set by `drained`, after which the object is dropped.
    _is_exact = False

    def _make_messages(self) -> None:
        to_owners, to_all = self.codecs
        rank = self.rank
        peers = [peer for peer in range(self.size) if peer != rank]
        self._own_tiles = self._tiles[rank]
        # This rank's own exact gradient for its part, and later the result of its work, by tile.
        self._own = [torch.empty_like(tile.residual) for tile in self._own_tiles]
        self._outgoing, self._to_owners = self._messages(
            {peer: (peer, to_owners.between(rank, peer)) for peer in peers}
        )
        self._incoming, self._from_peers = self._messages(
            {peer: (rank, to_owners.between(peer, rank)) for peer in peers}
        )
        owners = range(self.size) if self._codes_back else ()
        self._gathered, self._to_all = self._messages({owner: (owner, to_all) for owner in owners})

    def _residual_factor(self, part: int) -> int:
        # An owner's residual is in units of the mean, so it is multiplied by the number of ranks,
        # by which the exchange divides. If the owner has worked on the mean, its residual has no
        # such unit and is left out.
        return 0 if part == self.rank and self._has_work else self._unit(part)

    def _unit(self, part: int) -> int:
        return self._divides_by if part == self.rank else 1

    def left_out(self) -> list[tuple[Tensor, Tensor]]:
        """Return the residuals, with those of the owners' work.

        The mean of the flat tensors over the ranks has not arrived yet, if owners' results are in
        units of the mean.
        """
        return self._residuals([self._unit(part) for part in range(len(self._tiles))])

    def _is_scaled(self, part: int) -> bool:
        return self._scales_rest or part != self.rank

    def rest(self) -> list[tuple[Run, Tensor]]:
        """Return the coded runs of this owner's results, with views of their residuals."""
        return [*_coded_residuals(self._own_tiles)]

    def drained(self, link: Link) -> Link:
        """Make the next step travel exactly. Owners add their residuals to the results."""
        self._link = link
        self._is_exact = True
        return self

    def encode(self, flat: Tensor, link: Link) -> None:
        self._flat = flat
        self._link = link
        for owner, messages in self._to_owners.items():
            for tile, message in zip(self._tiles[owner], messages, strict=True):
                tile.encode(flat, tile.in_bucket, message)
        # Copy this rank's own gradient, because the result will overwrite it.
        self._pack_own()

    def sent_bytes(self) -> int:
        return len(self._outgoing.tensor) + (self.size - 1) * self._gathered.layout[self.rank]

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        if self._is_exact:
            return await super().reduce_scatter(flat, layout)
        await self.all_to_all(*self._outgoing, *self._incoming)
        await self.compute()
        for index, tile in enumerate(self._own_tiles):
            mean = self._mean(index)
            if self._has_work:
                tile.unpack(mean, flat)
            else:
                self._encode_own(index, mean)
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        if self._is_exact:
            self._add_residual(flat)
            await super().all_gather(flat, layout)
            return
        if self._has_work:
            self._pack_own()
            for index, own in enumerate(self._own):
                self._encode_own(index, own)
        await super().all_gather(*self._gathered)
        for owner, tiles in enumerate(self._tiles):
            if owner != self.rank:
                for index in range(len(tiles)):
                    self._decode(owner, index)
        del self._flat  # it may be large, and the next exchange may be far away

    def _pack_own(self) -> None:
        for tile, own in zip(self._own_tiles, self._own, strict=True):
            tile.pack(self._flat, own)

    def _add_residual(self, flat: Tensor) -> None:
        """Add this owner's residual to its result."""
        for tile in self._own_tiles:
            if tile.residual.is_cuda:
                # The host drops this object before the device has read the residual.
                tile.residual.record_stream(torch.cuda.current_stream(tile.residual.device))
        for run, piece in _coded_residuals(self._own_tiles):
            flat[slice(*run.span)].add_(piece)

    def _mean(self, index: int) -> Tensor:
        """Return the mean of a tile that this rank owns. Values are added in rank order."""
        tile = self._own_tiles[index]
        own = self._own[index]
        # a + b equals b + a in every bit, so ranks 0 and 1 can add to their own gradient in place.
        adds_to_own = self.rank <= 1
        values = own if adds_to_own else tile.values().zero_()
        for rank in range(self.size):
            if rank != self.rank:
                tile.add_decoded(self._from_peers[rank][index], values)
            elif not adds_to_own:
                values.add_(own)
        return values.div_(self._divisor)

    def _encode_own(self, index: int, values: Tensor) -> None:
        """Encode this owner's message to all ranks; decode it here too, to get the same bits."""
        tile = self._own_tiles[index]
        tile.encode(values, tile.in_values, self._to_all[self.rank][index])
        if not self._keeps_rest:
            tile.residual.zero_()
        self._decode(self.rank, index)

    def _decode(self, owner: int, index: int) -> None:
        """Decode a tile of an owner's message to all ranks into the bucket."""
        tile = self._tiles[owner][index]
        tile.read([self._to_all[owner][index]], self._flat)


def check_rows(codecs: object, ranks: int) -> None:
    """Refuse a `PerPair` for another number of ranks."""
    rows = len(codecs[0].codecs) if isinstance(codecs, tuple) else 1
    if ranks > 1 and rows not in (1, ranks):
        raise UnsupportedConfigurationError(
            f"expected a PerPair with a row for each of {ranks} ranks, got {rows} rows; "
            "make one for this group"
        )


def half_bytes(link: Link, layout: Layout, itemsize: int) -> int:
    """Return the bytes that this rank sends in one half of an exchange without a codec.

    With two levels only the bytes between nodes count.

    Args:
        link: the link to wrap.
        layout: the number of values that each rank owns.
        itemsize: the size of a value in bytes.
    """
    ranks, carried = link.size, sum(layout)
    if isinstance(link, TwoLevelLink):
        ranks, carried = len(link.column), sum(layout[rank] for rank in link.column)
    return carried * itemsize * (ranks - 1) // ranks


def carrier_of(link: Link, codecs: object) -> Link:
    """Return the link to wrap. With two levels it is the flat link if codecs need all ranks.

    Codecs for pairs of ranks do. `PowerSGD`'s factors are too small to gain from two levels.
    """
    has_one = isinstance(codecs, tuple) and len(codecs[0].codecs) == 1
    needs_all = codecs is not None and not has_one
    return link.flat if needs_all and isinstance(link, TwoLevelLink) else link


def coded_link(
    kind: type[CodedLinkOfKind],
    link: Link,
    codecs: tuple[PerPair, Codec],
    parameters: Sequence[Tensor],
    content: Sequence[Part],
    layout: Layout,
    device: torch.device,
    scratch: Scratch,
    **options: bool,
) -> CodedLinkOfKind:
    """Return a coded link for ``content``. With two levels it connects nodes.

    Args:
        kind: the link's class.
        link: the link for the first step.
        codecs: the codecs for messages to owners and for messages to all ranks.
        parameters: the tensors that travel.
        content: the parts of the whole memory.
        layout: the number of values that each rank owns.
        device: the memory's device.
        scratch: memory for values that are not needed after a call.
        **options: see `CodedLink`.
    """
    coded, divided_by = content, 1
    if isinstance(link, TwoLevelLink):
        coded = column_of(content, layout, link.column)
        link, divided_by = link.between, link.size
    return kind(
        link,
        codecs,
        parameters,
        [joined(coded)] if issubclass(kind, OneHopLink) else coded,
        device,
        scratch,
        content=content,
        divided_by=divided_by,
        **options,
    )


def _cut(part: Part, numel: int) -> list[Part]:
    """Cut a part into tiles of at most ``numel`` coded values, not counting padding.

    Runs are cut at multiples of ``numel`` from where they begin. Exact spans, which are few, all
    belong to the first tile.
    """
    tiles = [Part([], part.exact)]
    room = numel
    for parameter, begin, span in part.coded:
        for offset in range(0, span.numel, numel):
            start = span.start + offset
            run = Run(parameter, begin + offset, Span(start, min(span.stop, start + numel)))
            if run.span.numel > room and tiles[-1].coded:
                tiles.append(Part([], []))
                room = numel
            tiles[-1].coded.append(run)
            room -= run.span.numel
    return tiles


def _coded_residuals(tiles: Sequence[_Tile]) -> Iterator[tuple[Run, Tensor]]:
    """Yield all coded runs of ``tiles``, each with a view of its residual."""
    for tile in tiles:
        yield from tile.coded_residuals()


def _slices(values: Tensor, spans: Sequence[Span]) -> list[Tensor]:
    return [values[start:stop] for start, stop in spans]
