"""Tensors by a backend's own collectives: NCCL and its like.

[Note: one order] Ranks that issue collectives in different orders wait for each other for ever. So all are issued by
the thread that starts the journey, among the model's own: nothing here is awaited.
"""

import weakref
from typing import Final

import torch.distributed as dist
from torch import Tensor

from .links import Alone, Layout, Place, parts

# Torch 2.14 gave them new names, and warns of the old ones.
_REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Native(Alone):
    """As `Alone` a network, and its own link.

    On a device all goes to the stream that is current, which `Journey` has chosen.

    Args:
        group: whose collectives; held weakly.
        place: of its tensors.
    """

    in_program_order = True
    alignment_bytes = 128  # NCCL is much slower on parts that begin elsewhere (pytorch#195450, nccl#413)

    def __init__(self, group: dist.ProcessGroup, place: Place) -> None:
        super().__init__(place)
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """See `links.Link`: an equal front in one collective, each longer part's rest by itself."""
        group, (front, rest) = self._alive(), self._front_and_rest(flat, layout)
        flat.div_(self.size)
        if front.numel():
            _wait(_REDUCE_SCATTER(front.chunk(self.size)[self.rank], front, group=group, async_op=True))
        for owner, part in rest:
            _wait(dist.reduce(part, group=group, group_dst=owner, async_op=True))
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """See `links.Link`."""
        group, (front, rest) = self._alive(), self._front_and_rest(flat, layout)
        if front.numel():
            _wait(_ALL_GATHER(front, front.chunk(self.size)[self.rank], group=group, async_op=True))
        for owner, part in rest:
            _wait(dist.broadcast(part, group=group, group_src=owner, async_op=True))

    async def all_to_all(self, outgoing: Tensor, to: Layout, incoming: Tensor, of: Layout) -> None:
        """See `links.Link`."""
        sizes = {"output_split_sizes": [*of], "input_split_sizes": [*to]}
        _wait(dist.all_to_all_single(incoming, outgoing, **sizes, group=self._alive(), async_op=True))

    def _front_and_rest(self, flat: Tensor, layout: Layout) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return what is cut equally, but for the last rank's rest; or nothing, and all parts that are not empty."""
        share = layout[0]
        if all(length == share for length in layout[:-1]) and layout[-1] >= share:
            front, last = flat[: share * self.size], flat[share * self.size :]
            return front, [(self.size - 1, last)] if last.numel() else []
        return flat[:0], [(owner, part) for owner, part in enumerate(parts(flat, layout)) if part.numel()]

    def _alive(self) -> dist.ProcessGroup:
        if (group := self._group()) is None:
            raise RuntimeError("the process group was destroyed while an exchange was under way")
        return group


def _wait(work: dist.Work | None) -> None:
    """Have the current stream (on a CPU this thread) wait."""
    if work is None:
        raise RuntimeError("this process is not a rank of the process group")
    work.wait()
