"""A codec as a link around a link, so that every journey can travel coded without knowing it."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from crossover_ddp._engine.links import Layout, Link, parts

from .bucket import Buffers, CodedBucket


class MessageLink(Link, Protocol):
    """A link that also carries what nobody can add on its way."""

    async def all_to_all(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send a tensor to each other rank, and receive one from each."""


class CodedLink:
    """Sends codes to owners, who add what they mean, and send codes of the mean, or of what they make of it, to all.

    Unlike other links it brings the mean, not the sum: the codes are those of whole gradients, and are added in
    float32. Own parts are what all ranks will decode as soon as `reduce_scatter` is done, but where owners have work.

    Args:
        link: that carries the messages.
        coded: the bucket's.
        buffers: of this step, without work.
        whole: see `CodedBucket.encode`.
    """

    def __init__(
        self, link: MessageLink, coded: CodedBucket, buffers: Buffers, *, whole: bool = False
    ) -> None:
        self._link, self._coded, self._buffers, self._whole = link, coded, buffers, whole
        self.rank, self.size = link.rank, link.size
        self.compute = link.compute

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """See `Link`."""
        coded, others = self._coded, [rank for rank in range(self.size) if rank != self.rank]
        coded.encode(self._buffers, whole=self._whole)
        outgoing, incoming = coded.outgoing, coded.incoming
        await self._link.all_to_all(
            {rank: outgoing.part(rank) for rank in others}, {rank: incoming.part(rank) for rank in others}
        )
        coded.add()
        if not coded.has_work:
            coded.unload_own()
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """See `Link`."""
        if self._coded.has_work:
            self._coded.write()
        gather = self._coded.gather
        await self._link.all_gather(gather.tensor, gather.layout.lengths)
        self._coded.unload()
