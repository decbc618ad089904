"""Folds the gradients of a rank's earlier micro-batches into the buckets of its last one.

A rank computes the micro-batches of its virtual ranks one after the other, the first ones without
an exchange. `Folding` keeps their gradients as partial sums of the tree of virtual ranks, and adds
them to DDP's buckets before any hook reads these. So hooks need not know of virtual ranks.

[Note: division at the root] Gradients are added as they are, and the owner of a shard divides the
sum by the number of virtual ranks. This rounds once, and costs less than a division of each addend.
In float16 the sum may overflow, so there each leaf is divided instead.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.checks import check_not_joined, flat_gradients
from crossover_ddp._engine.buckets import contents_of, part_of, view_of
from crossover_ddp._engine.journeys import nothing
from crossover_ddp._engine.links import Halfway, Layout, Link, LinkAround, parts
from crossover_ddp._engine.states import HookState
from crossover_ddp.errors import UnsupportedConfigurationError

from .tree import PartialSums, is_left_sibling, leaves_of, sums_of

Gradients = list[Tensor]
"""The gradients of all parameters."""


class Folding:
    """Adds the gradients of a rank's virtual ranks, and averages them over all virtual ranks.

    Args:
        model: the DDP model.
        count: the number V of virtual ranks.
        ends_step: a function to call when the hook of a step's last bucket runs.
    """

    def __init__(
        self, model: DistributedDataParallel, count: int, ends_step: Callable[[], None]
    ) -> None:
        group = model.process_group
        size = group.size()
        self.count = count
        leaves_by_rank = [leaves_of(rank, size, count) for rank in range(size)]
        self.leaves = leaves_by_rank[group.rank()]
        self.parameters = [p for p in model.module.parameters() if p.requires_grad]
        # The partial sums that each rank sends.
        self.sums_by_rank = [sums_of(leaves, count) for leaves in leaves_by_rank]
        share, more = divmod(count, size)
        # Whether each rank's sum is a node of the tree, and all of these are on one level.
        self.is_even = not more and share & (share - 1) == 0
        self._model = model
        self._ends_step = ends_step
        self._index = {id(p): index for index, p in enumerate(self.parameters)}
        self._divides_leaves = any(p.dtype == torch.float16 for p in self.parameters)
        self._sums: PartialSums[Gradients] = PartialSums(count, _added)
        # Whether the buckets of the step's last micro-batch are due.
        self._is_due = False
        # By bucket, the sums that travel beside it.
        self._beside: dict[int, list[Tensor]] = {}

    def begin_step(self) -> None:
        """Drop all gradients: a step's first micro-batch begins."""
        self._sums.nodes.clear()
        self._beside.clear()
        self._is_due = False
        for p in self.parameters:
            # zero_grad(set_to_none=False) leaves zeros in DDP's buckets, and our sums would be there.
            p.grad = None

    def begin(self, leaf: int) -> None:
        """Begin the micro-batch of a leaf."""
        self._is_due = leaf == self.leaves[-1]

    @torch.no_grad()
    def end(self, leaf: int) -> None:
        """Take the gradients of a micro-batch that is not the step's last one."""
        if all(p.grad is None for p in self.parameters):
            raise UnsupportedConfigurationError(
                "expected gradients at the end of a micro-batch, got none: there was no backward(), or "
                "zero_grad() followed it; call zero_grad() only at the end of a step, and for a loss "
                "that you drop, call (0 * loss).backward(), or skip the step on all ranks"
            )
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        if self._divides_leaves:
            torch._foreach_div_(gradients, self.count)
        self._sums.push(leaf, leaf + 1, gradients)

    @property
    def awaits_buckets(self) -> bool:
        """Whether the hook has yet to run for the step's last bucket."""
        return self._is_due

    # --- in the hook ---

    @torch.no_grad()
    def add_to(self, grad_bucket: dist.GradBucket, state: object, *, is_wrapped: bool) -> None:
        """See `Fold.add_to`."""
        self._check(grad_bucket, state, is_wrapped=is_wrapped)
        flat = grad_bucket.buffer().data
        if self._divides_leaves:
            torch._foreach_div_([flat], self.count)  # as leaves are divided
        if self._sums.nodes:
            self._beside[grad_bucket.index()] = self._add(grad_bucket, flat)
        if grad_bucket.is_last():
            self._is_due = False
            self._sums.nodes.clear()
            self._ends_step()

    def _add(self, grad_bucket: dist.GradBucket, flat: Tensor) -> list[Tensor]:
        """Add partial sums to the bucket, and return those that travel beside it."""
        contents = contents_of(grad_bucket, flat)
        indices = [self._index[id(each.parameter)] for each in contents]
        views = [each.gradient.data for each in contents]
        beside: list[Tensor] = []
        for left in reversed(self._sums.nodes):
            addends = [left.value[index] for index in indices]
            if not beside and is_left_sibling(left, self.leaves.stop, self.count):
                torch._foreach_add_(views, addends)
            else:
                more = torch.zeros_like(flat)
                places = [view_of(part_of(more, each.span), each.parameter) for each in contents]
                torch._foreach_copy_(places, addends)
                beside.insert(0, more)
        return beside

    def link(self, grad_bucket: dist.GradBucket, network: Any) -> Link:
        """See `Fold.link`."""
        beside = self._beside.pop(grad_bucket.index(), [])
        divisor = 1 if self._divides_leaves else self.count
        return VirtualLink(network.link(divides=False), self, beside, divisor)

    def _check(self, grad_bucket: dist.GradBucket, state: object, *, is_wrapped: bool) -> None:
        if not self._is_due:
            raise UnsupportedConfigurationError(
                "expected one backward() in each micro-batch of VirtualRanks, got another one; call "
                "it once, inside `for batch in ranks.micro_batches(...)` or `with ranks.micro_batch()`, "
                "do not set require_backward_grad_sync, and let nothing fetch from micro_batches() "
                "ahead of the loop"
            )
        if any(id(p) not in self._index for p in grad_bucket.parameters()):
            raise UnsupportedConfigurationError(
                "expected gradients of the parameters that VirtualRanks found in the model, got one "
                "of another parameter; create VirtualRanks when all parameters that will be trained "
                "have requires_grad=True"
            )
        flat_gradients(grad_bucket)
        check_not_joined(self._model, "all virtual ranks take part in each step")
        why = ""
        if isinstance(state, HookState):
            why = state.why_not_virtual
            if is_wrapped and not why:
                why = "another library's hook adds in an order that depends on the number of ranks"
            if state.packs_by_owner and not self.is_even:
                why = (
                    f"{self.count} virtual ranks on {len(self.sums_by_rank)} ranks leave several "
                    "partial sums on a rank, which owners cannot add; use as many ranks that "
                    "each has 1, 2, 4, 8, … virtual ranks"
                )
        if why:
            name = type(state).__name__
            raise UnsupportedConfigurationError(
                f"expected a hook that works with VirtualRanks, got {name}: {why}; use "
                "reduce_scatter_all_gather_hook, crossover_hook, decoupled_hook, owner_hook or "
                "muon_hook, without codec="
            )


def _added(left: Gradients, right: Gradients) -> Gradients:
    torch._foreach_add_(left, right)
    return left


class VirtualLink(LinkAround):
    """A link that averages over virtual ranks.

    Args:
        link: a link whose sums are a tree over ranks. It does not divide.
        folding: the virtual ranks.
        beside: sums that this rank sends beside the tensor, each in the layout of the tensor.
        divisor: the number by which to divide sums.
    """

    def __init__(
        self, link: Link, folding: Folding, beside: Sequence[Tensor], divisor: int
    ) -> None:
        super().__init__(link)
        self._folding = folding
        self._beside = beside
        self._divisor = divisor
        # NCCL adds in an order of its own if there are more than two ranks.
        self._adds_here = not folding.is_even or (link.in_program_order and self.size > 2)

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        if self._adds_here and self.size > 1:
            own = await self._add(flat, layout)
        else:
            own = await self._link.reduce_scatter(flat, layout)
        return own.div_(self._divisor) if self._divisor > 1 else own

    async def all_reduce(self, flat: Tensor, layout: Layout, halfway: Halfway = nothing) -> None:
        if self.size != 2 or self._adds_here:  # an owner divides its own shard alone
            return await super().all_reduce(flat, layout, halfway)
        await self._link.all_reduce(flat, layout, halfway)
        if self._divisor > 1:
            flat.div_(self._divisor)

    async def _add(self, flat: Tensor, layout: Layout) -> Tensor:
        """Send all partial sums to the owners of the shards, and add there; see [Note: one tree]."""
        by_sum = [parts(each, layout) for each in (*self._beside, flat)]
        own = by_sum[-1][self.rank]
        incoming = [len(sums) * own.numel() for sums in self._folding.sums_by_rank]
        outgoing = [len(by_sum) * length for length in layout]
        incoming[self.rank] = outgoing[self.rank] = 0
        received = flat.new_empty(sum(incoming))
        sent = [part[r] for r in range(self.size) if r != self.rank for part in by_sum]
        await self._link.all_to_all(torch.cat(sent), outgoing, received, incoming)
        total: PartialSums[Tensor] = PartialSums(self._folding.count, Tensor.add_)
        for (start, stop), value in self._by_leaf(by_sum, received.split(incoming)):
            total.push(start, stop, value)
        ((_, _, value),) = total.nodes
        return own if value is own else own.copy_(value)

    def _by_leaf(
        self, by_sum: Sequence[Sequence[Tensor]], received: Sequence[Tensor]
    ) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Yield the interval and this rank's shard of each partial sum, of all ranks."""
        for rank, sums in enumerate(self._folding.sums_by_rank):
            if rank == self.rank:
                values = [part[rank] for part in by_sum]
            else:
                shape = len(sums), by_sum[-1][self.rank].numel()
                values = list(received[rank].view(shape).unbind())
            yield from zip(sums, values, strict=True)
