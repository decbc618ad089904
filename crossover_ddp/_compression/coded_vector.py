"""Wraps the links of a flat vector's exchanges in a codec, with error feedback in both halves."""

from collections.abc import Sequence

import torch

from crossover_ddp._engine.buckets import Run
from crossover_ddp._engine.links import Layout, Link

from .codec import Codec, PerPair, Scratch
from .coded_link import OwnersLink, carrier_of, check_rows, coded_link, half_bytes, parts_of


class CodedVector:
    """The codec and the residuals of a vector that is exchanged repeatedly.

    At most one exchange may be under way.

    Args:
        codecs: the codecs for messages to owners and for messages to all ranks.
        runs: the tensors that make up the vector. Those with one dimension travel exactly.
        has_work: True if owners work on the mean between the halves and send the result.
    """

    def __init__(
        self, codecs: tuple[PerPair, Codec], runs: Sequence[Run], *, has_work: bool
    ) -> None:
        self._codecs = codecs
        self._runs = runs
        self._has_work = has_work
        self._scratch = Scratch()
        # Made by the first exchange, because it depends on the network.
        self._link: OwnersLink | None = None
        self.sent_bytes = 0
        # The bytes that would have been sent without a codec.
        self.exact_bytes = 0

    def around(self, values: torch.Tensor, layout: Layout, link: Link) -> Link:
        """Encode ``values`` plus the residual, and return the link that carries the messages.

        Args:
            values: the vector, in float32. The result will overwrite it.
            layout: the length of each rank's part.
            link: the link to wrap.
        """
        if link.size == 1:
            return link
        check_rows(self._codecs, link.size)
        link = carrier_of(link, self._codecs)
        if self._link is None:
            self._link = coded_link(
                OwnersLink,
                link,
                self._codecs,
                [run.parameter for run in self._runs],
                parts_of(self._runs, layout),
                layout,
                values.device,
                self._scratch,
                has_work=self._has_work,
            )
        self.sent_bytes += self._link.sent_bytes()
        self.exact_bytes += 2 * half_bytes(link, layout, values.itemsize)
        return self._link.around(values, link)

    def add_left_out(self, values: torch.Tensor) -> None:
        """Add the residuals to ``values``. Their mean over the ranks is missing so far."""
        places = {id(run.parameter): run for run in self._runs}
        for parameter, left_out in self._link.left_out() if self._link is not None else ():
            run = places[id(parameter)]
            own = left_out[run.begin : run.begin + run.span.numel]
            values[run.span.start : run.span.stop].add_(own)

    def forget(self) -> None:
        """Drop the residuals."""
        self._link = None

    @property
    def nbytes(self) -> int:
        """The size of the residuals in bytes."""
        return 0 if self._link is None else self._link.nbytes
