"""What users may pass as a codec: one for both halves, one for each half, or one for each pair of ranks.

[Note: near and far] Messages to owners go straight from rank to rank, so where links differ each pair of ranks may have
its own codec, or none: a fast link need not round what a slow one must. What owners send back goes around the ring,
over all links, and all ranks decode the same bytes; so there is one codec for it. Our design.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from crossover_ddp.errors import UnsupportedConfigurationError

from .codec import Codec, Whole

_NEEDED: Final = ("nbytes", "encode", "add_decoded")
_FORMER: Final = ("room", "encode", "add_decoded")
_WHOLE: Final = Whole()
_HEAD_BYTES: Final = 16


@dataclass(frozen=True)
class PerPair:
    """Encode what goes to owners by the pair of ranks: near ranks weakly or not at all, far ones more.

    It is the first of a pair, ``codec=(PerPair(…), Int8())``, because what owners send back goes to all ranks. Our
    design.

    Args:
        codecs: a row for each rank of the group, and in it a codec for each peer, the same in both directions; None:
            float32. The diagonal means nothing, and becomes None.

    Raises ``ValueError`` for a table that is not square or not symmetric.
    """

    codecs: tuple[tuple[Codec | None, ...], ...]

    def __post_init__(self) -> None:
        rows = [
            tuple([None if one == other else codec for other, codec in enumerate(row)])
            for one, row in enumerate(self.codecs)
        ]
        object.__setattr__(self, "codecs", tuple(rows))
        size = len(self.codecs)
        if not size or any(len(row) != size for row in self.codecs):
            raise ValueError(
                f"expected as many codecs in each row as there are rows, got {[len(row) for row in self.codecs]}; "
                "pass a row for each rank, with a codec for each rank"
            )
        for one, other, codec in self._off_diagonal():
            if codec != self.codecs[other][one]:
                raise ValueError(
                    f"expected the same codec in both directions, got {codec!r} from rank {one} to rank {other} and "
                    f"{self.codecs[other][one]!r} back; pass a symmetric table"
                )

    @classmethod
    def by_node(cls, nodes: Sequence[Any], *, far: Codec, near: Codec | None = None) -> "PerPair":
        """Encode between nodes with ``far`` and inside of each with ``near``.

        Args:
            nodes: for each rank of the group, what names its node, such as ``[0, 0, 1, 1]``.
            far: for ranks on different nodes.
            near: for ranks on one node. Default: float32.
        """
        names = list(nodes)
        return cls(tuple([tuple([near if one == other else far for other in names]) for one in names]))

    def between(self, one: int, other: int) -> Codec:
        """Return what two ranks send each other with."""
        codec = self.codecs[one][other]
        return _WHOLE if codec is None else codec

    def all(self) -> list[Codec]:
        """Return what all pairs of different ranks send with."""
        return [self.between(one, other) for one, other, _ in self._off_diagonal()]

    def _off_diagonal(self) -> Iterator[tuple[int, int, Codec | None]]:
        for one, row in enumerate(self.codecs):
            for other, codec in enumerate(row):
                if one != other:
                    yield one, other, codec


# For both halves of an exchange, or a pair: push to owners, pull from owners.
CodecChoice = Codec | tuple[Codec | PerPair, Codec]


class Codecs(NamedTuple):
    """What encodes to owners, and what owners encode with."""

    push: Codec | PerPair
    pull: Codec

    def between(self, rank: int, peer: int) -> Codec:
        """Return what two ranks send each other with, each as the owner of its part."""
        return self.push.between(rank, peer) if isinstance(self.push, PerPair) else self.push

    def all(self) -> list[Codec]:
        """Return what any ranks send with."""
        return [*(self.push.all() if isinstance(self.push, PerPair) else [self.push]), self.pull]


def codecs_of(codec: CodecChoice) -> Codecs:
    """Return the codec of each half; raise ``TypeError`` for what is none."""
    if isinstance(codec, PerPair):
        raise TypeError(
            "expected a codec for what goes to all ranks beside a PerPair, got a PerPair alone; pass "
            "codec=(PerPair(…), Int8())"
        )
    push, pull = codec if isinstance(codec, tuple) else (codec, codec)
    if isinstance(push, PerPair):
        rows = [[None if each is None else _served(each) for each in row] for row in push.codecs]
        return Codecs(PerPair(tuple(map(tuple, rows))), _served(pull))
    served = _served(push)
    return Codecs(served, served if pull is push else _served(pull))


def check_size(push: Codec | PerPair, ranks: int) -> None:
    """Refuse a table for another number of ranks."""
    if isinstance(push, PerPair) and len(push.codecs) != ranks:
        raise UnsupportedConfigurationError(
            f"expected a PerPair with a row for each of {ranks} ranks, got {len(push.codecs)} rows; make it anew for "
            "this group"
        )


def _served(codec: Codec) -> Codec:
    """Return a codec as messages need it."""
    if not isinstance(codec, type):
        if _has(codec, _NEEDED):
            return codec
        if _has(codec, _FORMER):
            return Former.of(codec)
    raise TypeError(
        f"expected a codec such as Int8(), got codec={codec!r} without {', '.join(_NEEDED)}; pass an object of "
        "crossover_ddp.codecs, or None for no compression"
    )


def _has(codec: object, names: Sequence[str]) -> bool:
    return all(callable(getattr(codec, name, None)) for name in names)


# --- codecs as former versions took them ---------------------------------------------------------------------------


class Encoded(NamedTuple):
    """What an encoder of former versions says of one message.

    Args:
        finite: False: the values hold Inf or NaN, neither the message nor the residual was written.
        wanted: how many elements the codec would have sent, had there been room.
        memory: for the next message of the same values; any object, or None.
    """

    finite: bool
    wanted: int
    memory: Any


@dataclass(frozen=True)
class Former:
    """A codec with ``room``, and with ``encode`` and ``add_decoded`` of lengths; without its memory. On the CPU."""

    codec: Any
    multiple: int = 1

    @classmethod
    def of(cls, codec: Any) -> "Former":
        """Serve ``codec``, and warn."""
        warnings.warn(
            f"{type(codec).__name__} has room(lengths, wanted), which codecs of the next version do not have: its "
            "messages have one size from now on, and its memory is not kept; give it multiple, nbytes(numel), "
            "encode(values, message, residual) and add_decoded(message, out), see crossover_ddp.codecs.Codec",
            FutureWarning,
            stacklevel=2,
        )
        return cls(codec)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message."""
        return _HEAD_BYTES + int(self.codec.room([numel]))

    def encode(self, values: torch.Tensor, message: torch.Tensor, residual: torch.Tensor) -> None:
        """Write a message whose head is 0, or NaN."""
        encoded = self.codec.encode(values, [values.numel()], message[_HEAD_BYTES:], residual)
        message[:4].view(torch.float32).fill_(0.0 if encoded.finite else torch.nan)

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Add what a message holds."""
        if message[:4].view(torch.float32).isnan():
            out.fill_(torch.nan)
        else:
            self.codec.add_decoded(message[_HEAD_BYTES:], [out.numel()], out)
