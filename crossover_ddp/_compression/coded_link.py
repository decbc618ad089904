"""A codec as a link around a link, so that every journey can travel coded without knowing it."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from crossover_ddp._engine.links import Layout, Link, LinkAround, parts

from .bucket import CodedBucket
from .compression import Compression, Packed


class CodedLink(LinkAround):
    """Sends codes to owners, who add what they mean, and send codes of the mean, or of what they make of it, to all.

    The codes are those of whole gradients, are added in float32, and divided then. Own parts are what all ranks will
    decode as soon as `reduce_scatter` is done, but where owners have work.

    Args:
        link: that carries the messages.
        coded: the bucket's; its messages to owners are encoded.
    """

    def __init__(self, link: Link, coded: CodedBucket) -> None:
        super().__init__(link)
        self._coded = coded

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """See `Link`."""
        coded, out, into = self._coded, self._coded.outgoing, self._coded.incoming
        await self.all_to_all(out.tensor, out.layout.lengths, into.tensor, into.layout.lengths)
        await self.compute()
        coded.add()
        return parts(flat, layout)[self.rank]

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """See `Link`."""
        if self._coded.has_work:
            self._coded.write()
        gather = self._coded.gather
        await super().all_gather(gather.tensor, gather.layout.lengths)
        self._coded.unload()

    def sent_bytes(self, kind: str, flat: Tensor) -> tuple[int, int]:
        """See `Coded` in ``_engine/spans.py``."""
        exact, back = flat.numel() * flat.itemsize * (self.size - 1) // self.size, self._coded.gather.layout
        if kind == "reduce_scatter":
            return self._coded.outgoing.layout.numel, exact
        return (self.size - 1) * back.part(self.rank).numel, exact


def around(
    compression: Compression,
    bucket: dist.GradBucket,
    group: dist.ProcessGroup,
    pack: Callable[[], Packed] | None = None,
) -> Callable[[Link], Link]:
    """Return what makes the link that ``bucket`` travels on, in its hook; it is encoded then.

    Args:
        compression: of the model.
        bucket: DDP's.
        group: the ranks.
        pack: returns what travels in the bucket's place.
    """

    def coded(link: Link) -> Link:
        messages = compression.messages(bucket, group, None if pack is None else pack())
        return link if messages is None else CodedLink(link, messages)

    return coded
