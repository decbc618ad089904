"""How K-FAC's factors travel: as messages to the layers' owners, who add them up.

[Note: forms of a factor] A rank sends the triangle of a factor, or the columns that it is made of, whichever is less,
or nothing if it has none. So the ranks first tell the owners how much will come. Where collectives are issued in the
program's order the host would have to wait for that, and all ranks send triangles. Behind a triangle stands whether
there is one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link, parts

from .columns import triangle_numel
from .factors import BatchFactor, Gram, multiplied, pack_triangle, unpack_triangle

_NONE: Final = 0
_TRIANGLE: Final = -1  # else the number of columns


class Factor(NamedTuple):
    """A or G of one layer, [groups, dim, dim], or its columns; None: this rank has none."""

    groups: int
    dim: int
    value: BatchFactor | None

    @property
    def triangle_numel(self) -> int:
        """Elements of its triangle, and whether there is one."""
        return triangle_numel(self.groups, self.dim) + 1

    @property
    def nbytes(self) -> int:
        """Memory of this rank's."""
        value = self.value.columns if isinstance(self.value, Gram) else self.value
        return 0 if value is None else value.nbytes

    def form(self) -> int:
        """Return how it travels."""
        if self.value is None:
            return _NONE
        return self.value.width if isinstance(self.value, Gram) else _TRIANGLE

    def numel(self, form: int) -> int:
        """Return the elements that a factor of this size takes."""
        return self.triangle_numel if form == _TRIANGLE else self.groups * self.dim * form

    def pack(self, form: int, out: Tensor) -> None:
        """Write it."""
        if self.value is None:
            out.zero_()
        elif form == _TRIANGLE:
            self._pack_triangle(multiplied(self.value), out)
        elif isinstance(self.value, Gram):
            out.view(self.value.columns.shape).copy_(self.value.columns)

    def mean(self, shares: Sequence[tuple[int, Tensor]], like: Tensor) -> BatchFactor:
        """Return the mean of what was packed on those ranks that have it; not a number if none has.

        Args:
            shares: by rank, its form and itself; used as memory.
            like: of the same dtype and device.
        """
        if not shares:
            return like.new_full((self.groups, self.dim, self.dim), math.nan)
        if all(form != _TRIANGLE for form, _ in shares):
            found = [flat.view(self.groups, self.dim, form) for form, flat in shares]
            return Gram(torch.cat(found, dim=2) * math.sqrt(1 / len(shares)))
        total = like.new_zeros(self.triangle_numel)
        for form, flat in shares:
            total += flat if form == _TRIANGLE else self._triangle_of(flat.view(self.groups, self.dim, form))
        return unpack_triangle(total[:-1], self.groups, self.dim).div_(total[-1])

    def _triangle_of(self, columns: Tensor) -> Tensor:
        out = columns.new_empty(self.triangle_numel)
        self._pack_triangle(Gram(columns).factor(), out)
        return out

    def _pack_triangle(self, value: Tensor, out: Tensor) -> None:
        pack_triangle(value.to(out.dtype), out[:-1])
        out[-1] = 1.0


class Due(NamedTuple):
    """What leaves of one layer at one moment: ``which`` is "ga", or "g" or "a"."""

    layer: int
    owner: int
    which: str
    factors: tuple[Factor, ...]

    @property
    def numel(self) -> int:
        """Elements of triangles."""
        return sum(factor.triangle_numel for factor in self.factors)


async def bring_factors(
    messages: "FactorMessages",
    add: Callable[[int, str, Sequence[BatchFactor]], None],
    after: Gate | None,
    former: Gate,
    here: Gate,
    link: Link,
) -> None:
    """Bring factors to their owners, who ``add`` the means of the ranks to the running means.

    Args:
        messages: the factors.
        add: takes what has come of an own layer.
        after: they leave when it is open.
        former: opened when all factors that left earlier have been added.
        here: opened when these have been.
        link: of the group.
    """
    if after is not None and not link.in_program_order:
        await after
    await messages.travel(link)

    await link.compute()
    await former
    with torch.autocast(messages.device.type, enabled=False):
        for index, which, means in messages.means():
            add(index, which, means)
    here.open()


class FactorMessages:
    """The factors of some layers on their way to the owners, packed.

    Args:
        due: the same layers in the same order on all ranks.
        rank, size: of this process.
        like: a parameter on their device; what is added up is at least float32.
        tells: whether ranks first tell the owners what comes, see [Note: forms of a factor].
    """

    def __init__(self, due: Sequence[Due], rank: int, size: int, like: Tensor, *, tells: bool) -> None:
        self._rank, self._size, self._tells = rank, size, tells
        self._own = [each for each in due if each.owner == rank]
        by_owner = [[f for each in due if each.owner == r for f in each.factors] for r in range(size)]
        self._of_own = by_owner[rank]
        self._forms = [[f.form() if tells else _TRIANGLE for f in factors] for factors in by_owner]
        numels = [
            [f.numel(form) for f, form in zip(*pair, strict=True)]
            for pair in zip(by_owner, self._forms, strict=True)
        ]
        self._to = [sum(of_owner) for of_owner in numels]
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._flat = torch.empty(sum(self._to), dtype=dtype, device=like.device)
        places = iter(self._flat.split([numel for of_owner in numels for numel in of_owner]))
        for factors, forms in zip(by_owner, self._forms, strict=True):
            for factor, form in zip(factors, forms, strict=True):
                factor.pack(form, next(places))

    @property
    def device(self) -> torch.device:
        """Return where they are."""
        return self._flat.device

    async def travel(self, link: Link) -> None:
        """Have all factors go to their owners."""
        if self._flat.is_cuda:  # the host lets go of it before the device has read it
            self._flat.record_stream(torch.cuda.current_stream(self._flat.device))
        forms = [self._forms[self._rank]] * self._size
        if self._tells:
            forms = await self._told(link)
        of = [self._own_numel(of_rank) for of_rank in forms]
        incoming = self._flat.new_empty(sum(of))
        await link.all_to_all(self._flat, self._to, incoming, of)
        arrived = parts(incoming, of)
        arrived[self._rank] = parts(self._flat, self._to)[self._rank]
        self._arrived = [
            list(zip(of_rank, flat.split(self._own_numels(of_rank)), strict=True))
            for of_rank, flat in zip(forms, arrived, strict=True)
        ]

    async def _told(self, link: Link) -> list[list[int]]:
        """Return the forms of all ranks' factors of the own layers."""
        device, count = self._flat.device, len(self._of_own)
        there = torch.tensor([form for of_owner in self._forms for form in of_owner], dtype=torch.int32)
        back = torch.empty(self._size * count, dtype=torch.int32, device=device)
        to = [len(of_owner) for of_owner in self._forms]
        await link.all_to_all(there.to(device), to, back, [count] * self._size)
        forms: list[list[int]] = back.view(self._size, count).tolist() if count else [[]] * self._size
        forms[self._rank] = self._forms[self._rank]
        return forms

    def means(self) -> Iterator[tuple[int, str, list[BatchFactor]]]:
        """Yield each own layer, which factors have come of it, and their means."""
        place = 0
        for each in self._own:
            found = []
            for factor in each.factors:
                shares = [of_rank[place] for of_rank in self._arrived if of_rank[place][0] != _NONE]
                found.append(factor.mean(shares, self._flat))
                place += 1
            yield each.layer, each.which, found

    def _own_numels(self, forms: Sequence[int]) -> list[int]:
        return [factor.numel(form) for factor, form in zip(self._of_own, forms, strict=True)]

    def _own_numel(self, forms: Sequence[int]) -> int:
        return sum(self._own_numels(forms))
