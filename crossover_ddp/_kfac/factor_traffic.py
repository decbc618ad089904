"""Bring K-FAC's factors to the layers' owners, along with the gradients' buckets or behind them.

Factors always travel in journeys of their own, but they leave at different times. In steps that
compute solvers, the factors of a bucket's layers leave just before the bucket's gradients.

[Note: late factors] The running factors matter only when solvers are computed from them, and most
steps compute none. In such steps the factors wait until the step's gradients are gathered. Then
they leave in groups, one group behind the gradients of each following step, while the ranks
compute. All groups have left before the next step that takes factors or computes solvers begins its
exchange, so the running means are the same as if all factors had travelled at once. kfac-pytorch
also lets factors trail, and the groups are our own design.

[Note: forms of a factor] A rank sends either the triangle of a factor or the columns that it is
computed from, whichever is shorter, or nothing if the rank has no such factor. So the ranks first
send the owners the form of each factor. They do so when the journey begins, even for late factors:
the order is the same on all ranks, see [Note: who waits where] in `_engine.links`. Where
collectives are issued in the program's order, the host would have to wait for the forms, so all
ranks send triangles. Each triangle is followed by one more number, which is 1 if the rank has the
factor. If no other rank contributes to a factor, the owner uses its own factor unchanged.

All ranks send the same groups in the same order. The owners add them to the running means in that
order.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate, Journey
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

# The form of a factor is one of these values, or the number of its columns.
_NONE: Final = 0
_TRIANGLE: Final = -1


class Contribution(NamedTuple):
    """One rank's factor in the form in which it travels, see [Note: forms of a factor]."""

    form: int
    flat: Tensor


class Factor(NamedTuple):
    """The A or G that this rank has captured for one layer in one step."""

    of: OwnedLayer
    dim: int
    # [groups, dim, dim], or its columns. None if this rank has no such factor.
    value: BatchFactor | None = None

    @property
    def groups(self) -> int:
        return self.of.layer.shape.groups

    @property
    def triangle_numel(self) -> int:
        """The number of elements in the triangle, including the number behind it."""
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
        """Return the number of elements that this factor has in a form, perhaps another rank's."""
        return self.triangle_numel if form == _TRIANGLE else self.groups * self.dim * form

    def pack(self, form: int, out: Tensor) -> None:
        if self.value is None:
            out.zero_()
        elif form == _TRIANGLE:
            _pack_triangle(multiplied(self.value), out)
        elif isinstance(self.value, Columns):
            out.view(self.value.source.shape).copy_(self.value.source)

    def mean(self, contributions: Sequence[Contribution], like: Tensor) -> BatchFactor:
        """Return the mean of the ranks' contributions, or NaNs if there are none."""
        if not contributions:
            return like.new_full((self.groups, self.dim, self.dim), math.nan)
        columns = [
            each.flat.view(self.groups, self.dim, each.form)
            for each in contributions
            if each.form != _TRIANGLE
        ]
        if len(columns) == len(contributions):
            return Columns(torch.cat(columns, dim=2) * math.sqrt(1 / len(contributions)))
        total = like.new_zeros(self.triangle_numel)
        triangle = like.new_empty(self.triangle_numel)
        for form, flat in contributions:
            if form == _TRIANGLE:
                total += flat
            else:
                source = flat.view(self.groups, self.dim, form)
                _pack_triangle(multiplied(Columns(source)), triangle)
                total += triangle
        # The sum of the numbers behind the triangles counts the ranks that have the factor.
        return unpack_triangle(total[:-1], self.groups, self.dim).div_(total[-1])

    def alone(self, like: Tensor) -> BatchFactor:
        """Return this rank's own factor as the mean, or NaNs if it has none."""
        if self.value is None:
            return self.mean((), like)
        value = multiplied(self.value)
        if value.is_cuda:
            # The host drops it before the device has read it, like in `FactorMessages.travel`.
            value.record_stream(torch.cuda.current_stream(value.device))
        return value.to(like.dtype)


def _pack_triangle(value: Tensor, out: Tensor) -> None:
    pack_triangle(value.to(out.dtype), out[:-1])
    out[-1] = 1.0


class FactorMessages:
    """The factors of some layers, packed for the journey to their owners.

    Args:
        factors: the factors to send. All ranks must pass the same factors in the same order.
        rank: this rank.
        size: the number of ranks.
        like: a tensor on the factors' device, with the dtype in which they travel.
        sends_forms: whether ranks first send the owners the forms, see [Note: forms of a factor].
    """

    def __init__(
        self, factors: Sequence[Factor], rank: int, size: int, like: Tensor, *, sends_forms: bool
    ) -> None:
        self._rank = rank
        self._size = size
        self._sends_forms = sends_forms
        # For each rank: the factors that it owns, and the forms in which this rank sends them.
        self._by_owner: list[list[Factor]] = [[] for _ in range(size)]
        for factor in factors:
            self._by_owner[factor.of.owner].append(factor)
        self._forms = [
            [factor.form() if sends_forms else _TRIANGLE for factor in of_owner]
            for of_owner in self._by_owner
        ]
        by_owner = list(zip(self._by_owner, self._forms, strict=True))
        # For each rank: the number of elements that this rank sends to it.
        self._layout = [sum(_numels(of_owner, forms)) for of_owner, forms in by_owner]
        self._flat = like.new_empty(sum(self._layout))
        for (of_owner, forms), part in zip(by_owner, parts(self._flat, self._layout), strict=True):
            outs = part.split(_numels(of_owner, forms))
            for factor, form, out in zip(of_owner, forms, outs, strict=True):
                factor.pack(form, out)

    async def travel(self, link: Link, after: Gate | None) -> Iterator[tuple[Factor, BatchFactor]]:
        """Send all factors to their owners.

        The factors leave when ``after`` is open, unless collectives are issued in the program's
        order.

        Returns:
            Each factor that this rank owns, with its mean.
        """
        if self._flat.is_cuda:
            # The host drops the tensor before the device has read it.
            self._flat.record_stream(torch.cuda.current_stream(self._flat.device))
        own = self._by_owner[self._rank]
        forms = [self._forms[self._rank]] * self._size
        if self._sends_forms:
            # The forms travel first, so that each owner knows how much it will receive.
            forms = await self._exchange_forms(link)
            # Late factors wait here for the gradients in front of them.
            if after is not None:
                await after
        numels = [_numels(own, of_rank) for of_rank in forms]
        layout = [sum(of_rank) for of_rank in numels]
        incoming = self._flat.new_empty(sum(layout))
        # Each rank sends every owner its factors. If a peer is lost, this raises, and so does the
        # next backward().
        await link.all_to_all(self._flat, self._layout, incoming, layout)
        arrived = parts(incoming, layout)
        # The link leaves this rank's own part to the caller.
        arrived[self._rank] = parts(self._flat, self._layout)[self._rank]
        flats = [part.split(of_rank) for part, of_rank in zip(arrived, numels, strict=True)]
        return self._means(forms, flats)

    def _means(
        self, forms: Sequence[Sequence[int]], flats: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Factor, BatchFactor]]:
        """Yield each factor that this rank owns, with its mean.

        The means are computed one at a time to save memory.

        ``forms`` and ``flats`` are indexed by rank and then by factor.
        """
        for index, factor in enumerate(self._by_owner[self._rank]):
            contributions = [
                Contribution(of_rank[index], flat[index])
                for of_rank, flat in zip(forms, flats, strict=True)
                if of_rank[index] != _NONE
            ]
            yield factor, factor.mean(contributions, self._flat)

    async def _exchange_forms(self, link: Link) -> list[list[int]]:
        """Return, for each rank, the forms in which it sends the factors that this rank owns."""
        device = self._flat.device
        count = len(self._forms[self._rank])
        outgoing = torch.tensor(
            [form for of_owner in self._forms for form in of_owner], dtype=torch.int32
        )
        incoming = torch.empty(self._size * count, dtype=torch.int32, device=device)
        layout = [len(of_owner) for of_owner in self._forms]
        await link.all_to_all(outgoing.to(device), layout, incoming, [count] * self._size)
        forms: list[list[int]] = [[] for _ in range(self._size)]
        if count:
            forms = incoming.view(self._size, count).tolist()
        forms[self._rank] = self._forms[self._rank]
        return forms


def _numels(factors: Sequence[Factor], forms: Sequence[int]) -> list[int]:
    return [factor.numel(form) for factor, form in zip(factors, forms, strict=True)]


def _alone(factors: Iterable[Factor], like: Tensor) -> Iterator[tuple[Factor, BatchFactor]]:
    """Yield each factor with its mean if no other rank contributes to it."""
    for factor in factors:
        yield factor, factor.alone(like)


@dataclass(eq=False)
class FactorTraffic:
    """Decides when each step's factors travel. All ranks make the same decisions."""

    # The layers, in the same order as in the capture. Their curvatures receive the factors.
    layers: Sequence[OwnedLayer]
    capture: FactorCapture
    group: dist.ProcessGroup
    # Whether owners use only their own factors, so that no factors travel.
    local: bool

    def __post_init__(self) -> None:
        # Counts the traffic. Each backward pass sets it.
        self.meter: Meter | None = None
        # Groups of factors that will leave behind the gradients of later steps.
        self.late: list[list[Factor]] = []
        self._late_decay = 0.0
        # Opened when all factors sent so far have been added to the running means.
        self.arrived = Gate()
        self.arrived.open()
        self._newest: Journey | None = None

    @functools.cached_property
    def can_trail(self) -> bool:
        """Whether factors that are not needed yet may travel behind the gradients."""
        on_host = all(each.layer.weight.device.type == "cpu" for each in self.layers)
        return self.group.size() > 1 and not self.local and on_host

    def taken(self, layer: OwnedLayer) -> list[Factor]:
        """Take a layer's A and G for this step, or return no factors if this rank needs none."""
        if self.local and layer.curvature is None:
            return []
        shape = layer.layer.shape
        a, g = self.capture.take(layer.index)
        return [Factor(layer, shape.a_dim, a), Factor(layer, shape.g_dim, g)]

    def hold(self, taken: Sequence[Sequence[Factor]], groups: int, decay: float) -> None:
        """Keep a step's factors for later, in at most ``groups`` groups.

        ``taken`` has the factors of each layer. See [Note: late factors].
        """
        sizes = [sum(factor.triangle_numel for factor in of_layer) for of_layer in taken]
        self.late = []
        for layers in in_equal_groups(sizes, groups):
            self.late.append([factor for layer in layers for factor in taken[layer]])
        self._late_decay = decay

    def leave(self, after: Gate | None = None, *, all_groups: bool = False) -> None:
        """Send the next group of late factors, or all remaining groups, when ``after`` is open."""
        while self.late:
            self.send(self.late.pop(0), self._late_decay, after)
            if not all_groups:
                return

    def settle(self) -> None:
        """Send all late factors, and wait until all factors have arrived. **Collective**.

        If an error has ended the journeys in this group, that error is raised.
        """
        self.leave(all_groups=True)
        newest = self._newest
        self._newest = None
        if newest is not None:
            newest.wait()

    @property
    def nbytes(self) -> int:
        return sum(factor.nbytes for group in self.late for factor in group)

    @torch.no_grad()
    def send(self, factors: Sequence[Factor], decay: float, after: Gate | None = None) -> None:
        """Begin the journey that adds factors from `taken` to their owners' running means.

        The factors leave when ``after`` is open. They are added after all factors that were sent
        earlier. ``decay`` is the weight of the old mean.
        """
        exchange = Exchange.of(self.group)
        weight = self.layers[0].layer.weight
        like = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        # None if no other rank contributes to these factors.
        messages = None
        if exchange.size > 1 and not self.local:
            sends_forms = exchange.sends_messages(like.device)
            messages = FactorMessages(
                factors, exchange.rank, exchange.size, like, sends_forms=sends_forms
            )
        former = self.arrived
        arrived = Gate()
        self.arrived = arrived

        async def bring(link: Link) -> None:
            # The factors go to their owners. Each rank receives the other ranks' factors for the
            # layers that it owns.
            means = (
                _alone(factors, like) if messages is None else await messages.travel(link, after)
            )

            # Multiplying columns takes a long time, so it runs where it does not delay the
            # reduction of another journey.
            await link.compute()
            # A running mean depends on the order, so wait for the factors that were sent earlier.
            await former
            with torch.autocast(like.device.type, enabled=False):
                for factor, a in means:
                    # In the result of `taken`, a layer's G follows its A.
                    _, g = next(means)
                    if factor.of.curvature is not None:
                        factor.of.curvature.add(a, g, decay)
            # Solvers may be computed from these factors now.
            arrived.open()

        self._newest = exchange.begin(bring, like, "factors of K-FAC", meter=self.meter)


def in_equal_groups(sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Divide the sizes into at most ``count`` consecutive groups with about equal sums.

    Yield the indices in each group. No group is empty.
    """
    total = max(1, sum(sizes))
    ends = list(itertools.accumulate(sizes))

    def group(index: int) -> int:
        """Return which of ``count`` equal parts of the total contains the middle of this size."""
        return min(count - 1, int((ends[index] - sizes[index] / 2) * count / total))

    for _, indices in itertools.groupby(range(len(sizes)), key=group):
        yield list(indices)
