"""K-FAC's factors on their way to the layers' owners: with the gradients' buckets, or behind them.

Always as journeys of their own; only the moment differs. In steps that make solvers the factors of a bucket's layers
leave with it, just before its gradients.

[Note: late factors] The running factors matter when solvers are made of them, and in most steps none are. In such
steps the factors wait until the step's gradients are gathered, and then leave in groups, one behind the gradients
of each following step, while the ranks compute. All of them have left before the next step that takes factors or makes
solvers begins its exchange, so the running means are the same as if they had come at once. kfac-pytorch lets factors
trail, too; the groups are our design.

[Note: forms of a factor] A rank sends the triangle of a factor, or the columns that it is made of, whichever is less,
or nothing if it has none. So the ranks first tell the owners how much will come, also of late factors when the journey
begins: in one order on all ranks, see [Note: who waits where] in `_engine.links`. Where collectives are issued in the
program's order the host would have to wait for that, and all ranks send triangles. Behind a triangle stands whether
there is one. An owner's own factors that meet no others stay as they are.

All ranks send the same groups in the same order. They are added to the running means in that order, too.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate, Trip
from crossover_ddp._engine.links import Link, parts
from crossover_ddp._engine.observe import Meter

from .capture import FactorCapture
from .curvature import OwnedLayer
from .factors import (
    BatchFactor,
    Columns,
    multiplied,
    pack_triangle,
    triangle_numel,
    unpack_triangle,
)

_NONE: Final = 0
_TRIANGLE: Final = -1  # else the number of columns


class Factor(NamedTuple):
    """A or G of one layer, [groups, dim, dim], or its columns; None: this rank has none."""

    of: OwnedLayer
    dim: int
    value: BatchFactor | None = None

    @property
    def groups(self) -> int:
        return self.of.layer.shape.groups

    @property
    def triangle_numel(self) -> int:
        """Elements of its triangle, and whether there is one."""
        return triangle_numel(self.groups, self.dim) + 1

    @property
    def nbytes(self) -> int:
        value = self.value.source if isinstance(self.value, Columns) else self.value
        return 0 if value is None else value.nbytes

    def form(self) -> int:
        if self.value is None:
            return _NONE
        return self.value.width if isinstance(self.value, Columns) else _TRIANGLE

    def numel(self, form: int) -> int:
        """Return the elements that a factor of this size takes."""
        return self.triangle_numel if form == _TRIANGLE else self.groups * self.dim * form

    def pack(self, form: int, out: Tensor) -> None:
        if self.value is None:
            out.zero_()
        elif form == _TRIANGLE:
            _pack_triangle(multiplied(self.value), out)
        elif isinstance(self.value, Columns):
            out.view(self.value.source.shape).copy_(self.value.source)

    def mean(self, shares: Sequence[tuple[int, Tensor]], like: Tensor) -> BatchFactor:
        """Return the mean of the ranks' ``shares``, each its form and itself; not a number if there is none."""
        if not shares:
            return like.new_full((self.groups, self.dim, self.dim), math.nan)
        columns = [
            flat.view(self.groups, self.dim, form) for form, flat in shares if form != _TRIANGLE
        ]
        if len(columns) == len(shares):
            return Columns(torch.cat(columns, dim=2) * math.sqrt(1 / len(shares)))
        total, triangle = like.new_zeros(self.triangle_numel), like.new_empty(self.triangle_numel)
        for form, flat in shares:
            if form != _TRIANGLE:
                _pack_triangle(
                    multiplied(Columns(flat.view(self.groups, self.dim, form))), triangle
                )
            total += flat if form == _TRIANGLE else triangle
        return unpack_triangle(total[:-1], self.groups, self.dim).div_(total[-1])

    def alone(self, like: Tensor) -> BatchFactor:
        """Return the mean of this rank's share alone."""
        if self.value is None:
            return self.mean((), like)
        value = multiplied(self.value)
        if value.is_cuda:  # as in `FactorMessages.travel`
            value.record_stream(torch.cuda.current_stream(value.device))
        return value.to(like.dtype)


def _pack_triangle(value: Tensor, out: Tensor) -> None:
    pack_triangle(value.to(out.dtype), out[:-1])
    out[-1] = 1.0


class FactorMessages:
    """The factors of some layers on their way to the owners, packed.

    Args:
        factors: the same in the same order on all ranks.
        like: of their device and dtype.
        tells: whether ranks first tell the owners what comes, see [Note: forms of a factor].
    """

    def __init__(
        self, factors: Sequence[Factor], rank: int, size: int, like: Tensor, *, tells: bool
    ) -> None:
        self._rank, self._size, self._tells = rank, size, tells
        self._by_owner = [
            [each for each in factors if each.of.owner == owner] for owner in range(size)
        ]
        self._forms = [
            [f.form() if tells else _TRIANGLE for f in of_owner] for of_owner in self._by_owner
        ]
        numels = [_numels(*of_owner) for of_owner in zip(self._by_owner, self._forms, strict=True)]
        self._to = [sum(of_owner) for of_owner in numels]
        self._flat = like.new_empty(sum(self._to))
        places = iter(self._flat.split([numel for of_owner in numels for numel in of_owner]))
        for of_owner in zip(self._by_owner, self._forms, strict=True):
            for factor, form in zip(*of_owner, strict=True):
                factor.pack(form, next(places))

    async def travel(self, link: Link, after: Gate | None) -> Iterator[tuple[Factor, BatchFactor]]:
        """Have all factors go to their owners; return the own ones and their means.

        ``after``: opened before they leave, unless collectives are issued in the program's order.
        """
        if self._flat.is_cuda:  # the host lets go of it before the device has read it
            self._flat.record_stream(torch.cuda.current_stream(self._flat.device))
        own, forms = self._by_owner[self._rank], [self._forms[self._rank]] * self._size
        if self._tells:
            forms = await self._told(link)
            if after is not None:
                await after
        numels = [_numels(own, of_rank) for of_rank in forms]
        of = [sum(of_rank) for of_rank in numels]
        incoming = self._flat.new_empty(sum(of))
        await link.all_to_all(self._flat, self._to, incoming, of)
        arrived = parts(incoming, of)
        arrived[self._rank] = parts(self._flat, self._to)[self._rank]
        by_rank = [
            list(zip(*each, strict=True))
            for each in zip(forms, map(torch.split, arrived, numels), strict=True)
        ]
        return (
            (factor, factor.mean([share for share in shares if share[0] != _NONE], self._flat))
            for factor, *shares in zip(own, *by_rank, strict=True)
        )

    async def _told(self, link: Link) -> list[list[int]]:
        """Return the forms of all ranks' factors of the own layers."""
        device, count = self._flat.device, len(self._forms[self._rank])
        there = torch.tensor(
            [form for of_owner in self._forms for form in of_owner], dtype=torch.int32
        )
        back = torch.empty(self._size * count, dtype=torch.int32, device=device)
        to = [len(of_owner) for of_owner in self._forms]
        await link.all_to_all(there.to(device), to, back, [count] * self._size)
        forms: list[list[int]] = (
            back.view(self._size, count).tolist() if count else [[]] * self._size
        )
        forms[self._rank] = self._forms[self._rank]
        return forms


def _numels(factors: Sequence[Factor], forms: Sequence[int]) -> list[int]:
    return [factor.numel(form) for factor, form in zip(factors, forms, strict=True)]


@dataclass(eq=False)
class FactorTraffic:
    """Decides for each step when its factors travel; the same on all ranks.

    Args:
        layers: of the model, in the order of the capture's; their curvatures take the factors.
        local: whether owners take their own factors, and none travels.

    Attributes:
        meter: counts what travels.
        late: groups that leave behind gradients of later steps.
        arrived: opened when all factors that have left so far are in the running means.
    """

    layers: Sequence[OwnedLayer]
    capture: FactorCapture
    group: dist.ProcessGroup
    local: bool

    def __post_init__(self) -> None:
        self.meter: Meter | None = None
        self.late: list[list[Factor]] = []
        self._late_decay = 0.0
        self.arrived = Gate()
        self.arrived.open()
        self._newest: Trip | None = None

    @functools.cached_property
    def can_trail(self) -> bool:
        """Whether factors that are not needed yet can travel behind the gradients."""
        on_host = all(each.layer.weight.device.type == "cpu" for each in self.layers)
        return self.group.size() > 1 and not self.local and on_host

    def taken(self, layer: OwnedLayer) -> list[Factor]:
        """Take a layer's factors of this step: A and G, or nothing where this rank needs none."""
        if self.local and layer.curvature is None:
            return []
        shape, (a, g) = layer.layer.shape, self.capture.take(layer.index)
        return [Factor(layer, shape.a_dim, a), Factor(layer, shape.g_dim, g)]

    def hold(self, taken: Sequence[Sequence[Factor]], groups: int, decay: float) -> None:
        """Keep a step's factors, by layer, which leave in so many groups at most, see [Note: late factors]."""
        sizes = [sum(factor.triangle_numel for factor in of_layer) for of_layer in taken]
        groups_of = in_equal_groups(sizes, groups)
        self.late = [[factor for place in group for factor in taken[place]] for group in groups_of]
        self._late_decay = decay

    def leave(self, after: Gate | None = None, *, all_groups: bool = False) -> None:
        """Send the next group of late factors, or all that are left, ``after`` a gate was opened."""
        while self.late:
            self.send(self.late.pop(0), self._late_decay, after)
            if not all_groups:
                return

    def settle(self) -> None:
        """Send what is left, and wait until all has arrived. Collective. Raises what made it impossible."""
        self.leave(all_groups=True)
        newest, self._newest = self._newest, None
        if newest is not None:
            newest.wait()

    @property
    def nbytes(self) -> int:
        return sum(factor.nbytes for group in self.late for factor in group)

    @torch.no_grad()
    def send(self, factors: Sequence[Factor], decay: float, after: Gate | None = None) -> None:
        """Begin to add what was `taken` to the running means of the owners, of which ``decay`` remains.

        They leave ``after`` a gate was opened, and are added when those have been which left before.
        """
        exchange, weight = Exchange.of(self.group), self.layers[0].layer.weight
        like = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        messages = None  # if no other rank has a share in them
        if exchange.size > 1 and not self.local:
            tells = exchange.sends_messages(like.device)
            messages = FactorMessages(factors, exchange.rank, exchange.size, like, tells=tells)
        former, self.arrived = self.arrived, Gate()
        here = self.arrived

        async def bring(link: Link) -> None:
            alone = ((each, each.alone(like)) for each in factors)
            means = alone if messages is None else await messages.travel(link, after)

            await link.compute()
            await former
            with torch.autocast(like.device.type, enabled=False):
                for (factor, a), (_, g) in zip(means, means, strict=True):  # as `taken` has them
                    if factor.of.curvature is not None:
                        factor.of.curvature.add(a, g, decay)
            here.open()

        self._newest = exchange.begin(bring, like, "factors of K-FAC", meter=self.meter)


def in_equal_groups(sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Cut into at most ``count`` consecutive groups of about the same sum; none is empty."""
    total = max(1, sum(sizes))
    ends = list(itertools.accumulate(sizes))

    def group(place: int) -> int:
        """Return in which ``count``-th of the whole the middle of this one lies."""
        return min(count - 1, int((ends[place] - sizes[place] / 2) * count / total))

    for _, places in itertools.groupby(range(len(sizes)), key=group):
        yield list(places)
