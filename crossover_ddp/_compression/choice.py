"""What users may pass as a codec: one for both halves, one for each half, or one for each pair of ranks.

[Note: near and far] Messages to owners go straight from rank to rank, so where links differ each pair of ranks may have
its own codec, or none: a fast link need not round what a slow one must. What owners send back goes around the ring,
over all links, and all ranks decode the same bytes; so there is one codec for it. Our design.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Final, NamedTuple

from .codec import Codec, Whole

_NEEDED: Final = ("nbytes", "encode", "add_decoded")
_WHOLE: Final = Whole()


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
        size = len(self.codecs)
        if not size or any(len(row) != size for row in self.codecs):
            raise ValueError(
                f"expected as many codecs in each row as there are rows, got {[len(row) for row in self.codecs]}; "
                "pass a row for each rank, with a codec for each rank"
            )
        rows = [
            tuple([None if one == other else codec for other, codec in enumerate(row)])
            for one, row in enumerate(self.codecs)
        ]
        object.__setattr__(self, "codecs", tuple(rows))
        for one, other in combinations(range(size), 2):
            if rows[one][other] != rows[other][one]:
                raise ValueError(
                    f"expected the same codec in both directions, got {rows[one][other]!r} from rank {one} to rank "
                    f"{other} and {rows[other][one]!r} back; pass a symmetric table"
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
        return [self.between(one, other) for one, other in permutations(range(len(self.codecs)), 2)]


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
        return [*(self.push.all() if isinstance(self.push, PerPair) else [self.push]), self.pull]


def codecs_of(codec: CodecChoice) -> Codecs:
    """Return the codec of each half; raise ``TypeError`` for what is none."""
    if isinstance(codec, PerPair):
        raise TypeError(
            "expected a codec for what goes to all ranks beside a PerPair, got a PerPair alone; pass "
            "codec=(PerPair(…), Int8())"
        )
    codecs = Codecs(*(codec if isinstance(codec, tuple) else (codec, codec)))
    for each in codecs.all():
        if isinstance(each, type) or not all(callable(getattr(each, name, None)) for name in _NEEDED):
            raise TypeError(
                f"expected a codec such as Int8(), got codec={each!r} without {', '.join(_NEEDED)}; pass an object of "
                "crossover_ddp.codecs, or None for no compression"
            )
    return codecs
