"""What the messages of one bucket do not hold, and what is made of it when buckets change.

[Note: residuals] A rank keeps what its messages to owners do not hold (the *push residual*, in units of its gradient),
an owner what its message to all does not hold (the *owner's residual*, in units of the mean). After each step, for each
element: what all ranks apply = mean of gradients + mean of old push residuals + old owner's residual − the same sum of
the new ones. An owner does not send to itself: its own addend enters the sum exact.

With an owner's step in between, such as K-FAC's, the owner's residual is in units of what that step makes, and the sum
above holds for each half by itself.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from .codec import Codec
from .cut import OwnedSpan, Part
from .message import views

# Elements of a segment, on average, from which one operation for each costs less than another pass over memory.
_LARGE: Final = 1 << 14


class Stream:
    """One way that a codec sends again and again, and its residual.

    Args:
        codec: that encodes.
        part: what is sent.
        device: of the values.
    """

    def __init__(self, codec: Codec, part: Part, device: torch.device | None = None) -> None:
        self.codec, self.part = codec, part
        self.residual = torch.zeros(part.coded_numel, device=device)

    def sum(self, flat: torch.Tensor, segments: Sequence[OwnedSpan], out: torch.Tensor) -> torch.Tensor:
        """Return segments of ``flat`` plus the residual, in ``out``."""
        if out.numel() < _LARGE * len(segments):
            return collect(flat, segments, out).add_(self.residual)
        pieces = zip(
            segments, views(out, self.part.lengths), views(self.residual, self.part.lengths), strict=True
        )
        for segment, piece, kept in pieces:
            torch.add(flat[segment.span.start : segment.span.stop], kept, out=piece)
        return out


class BucketResiduals:
    """The residuals of one bucket, see [Note: residuals].

    Args:
        parameters: of the bucket.
        numels: of their gradients.
        parts: what is coded, by owner.
        rank: of this process.
        push: the messages to each owner, the own part's too.
        pull: the owner's message to all.
        gives_mean: whether owners send the mean, and not what they make of it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        numels: Sequence[int],
        parts: Sequence[Part],
        rank: int,
        push: Sequence[Stream],
        pull: Stream,
        *,
        gives_mean: bool = True,
    ) -> None:
        self.parameters = list(parameters)
        self.parts = tuple(parts)
        self.rank = rank
        self._numels = list(numels)
        self._own = self.parts[rank]
        self._push_streams, self._pull_stream = tuple(push), pull
        self._gives_mean = gives_mean
        self._is_own_kept = False

    def kept(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each coded parameter with its whole residual, flat, in units of this rank's gradient.

        An owner's residual is part of a mean; so many times as there are ranks, it is part of this rank's gradient.
        Where owners send something else than the mean, theirs is left out.
        """
        whole: dict[int, torch.Tensor] = {}
        for segment, push in self._pieces():
            numel = self._numels[segment.parameter]
            residual = whole.setdefault(segment.parameter, self._pull_stream.residual.new_zeros(numel))
            residual[segment.begin : segment.begin + push.numel()] = push
        pulled = zip(self._own.coded, views(self._pull_stream.residual, self._own.lengths), strict=True)
        for segment, pull in pulled if self._gives_mean else ():
            place = whole[segment.parameter][segment.begin : segment.begin + pull.numel()]
            place.add_(pull, alpha=len(self.parts))
        for number, residual in whole.items():
            yield self.parameters[number], residual

    def keep(self, parameter: int, residual: torch.Tensor) -> None:
        """Begin with ``residual`` for the bucket's parameter of this number, in place of what there is."""
        self._is_own_kept = True
        for segment, push in self._pieces():
            if segment.parameter == parameter:
                push.copy_(residual[segment.begin : segment.begin + push.numel()])

    def scale(self, factor: float) -> None:
        """Multiply all residuals."""
        for stream in self._all():
            stream.residual.mul_(factor)

    @property
    def is_kept(self) -> bool:
        """Whether any residual is not zero."""
        return any([bool(stream.residual.any()) for stream in self._all()])

    @property
    def nbytes(self) -> int:
        """Bytes of the residuals."""
        return sum(stream.residual.nbytes for stream in self._all())

    def _all(self) -> list[Stream]:
        return [*self._push_streams, self._pull_stream]

    def _pieces(self) -> Iterator[tuple[OwnedSpan, torch.Tensor]]:
        for stream in self._push_streams:
            yield from zip(stream.part.coded, views(stream.residual, stream.part.lengths), strict=True)


def collect(flat: torch.Tensor, segments: Sequence[OwnedSpan], out: torch.Tensor) -> torch.Tensor:
    """Copy segments of ``flat`` one behind the other."""
    if segments:
        pieces = [flat[segment.span.start : segment.span.stop] for segment in segments]
        if flat.dtype == out.dtype:
            torch.cat(pieces, out=out)
        else:
            out.copy_(torch.cat(pieces))
    return out


def spread(values: torch.Tensor, segments: Sequence[OwnedSpan], flat: torch.Tensor) -> None:
    """Copy back what `collect` has collected."""
    if segments:
        places = [flat[segment.span.start : segment.span.stop] for segment in segments]
        pieces = views(values, [segment.span.numel for segment in segments])
        torch._foreach_copy_(places, pieces)
