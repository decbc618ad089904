"""Compression of payloads: of what travels in a bucket's place where owners do something with the mean, as in K-FAC.

Gradients of matrices are coded on their way to owners, what owners make of them on its way back, each with a residual
of its own; all else in a payload travels exact.

[Note: two exact steps] The first two steps travel as without a codec. Then DDP's buckets stay as they are, also with
``static_graph``, and so does who owns what: an owner's residual, which is no part of a mean here, never has to move. A
step after `drain` travels as messages that hold everything, in both halves.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp._exchange.layout import Layout, Span
from crossover_ddp._exchange.transfer import Messages, Payload, Sharded, Travelling
from crossover_ddp.errors import UnsupportedConfigurationError

from .achieved import AchievedRate
from .bucket import Buffers, CodedBucket
from .choice import CodecChoice, Codecs, codecs_of
from .compression import check_coded
from .cut import OwnedSpan, Part
from .scratch import Scratch

_EXACT_STEPS: Final = 2


class PayloadCompression:
    """The residuals of one model on this rank, and the messages of its payloads.

    Args:
        codec: for both halves, or a pair: push to owners, pull from owners.
        loss_scale: what the loss is multiplied by.
    """

    def __init__(self, codec: CodecChoice, loss_scale: Callable[[], float]) -> None:
        self.codecs: Codecs = codecs_of(codec)
        self._loss_scale = loss_scale
        self._scale: float | None = None
        self._buckets: dict[int, CodedBucket] = {}
        self._scratch = Scratch()
        self._exact_left = _EXACT_STEPS
        self._is_whole, self._is_new_step = False, True
        self._achieved = AchievedRate()
        self.steps = 0

    def messages(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, payload: Payload | None
    ) -> Messages | None:
        """Encode what ``payload`` carries for ``bucket``; None: it travels as it is. On the hook's thread."""
        assert payload is not None
        scatter = payload.scatter.tensor
        if not check_coded(scatter, group, self.codecs):
            raise UnsupportedConfigurationError(
                f"expected gradients on the CPU and gloo for a codec with K-FAC, got device={scatter.device}; what "
                "K-FAC sends in a bucket's place is not coded elsewhere yet, pass codec=None"
            )
        if scatter.dtype != torch.float32:
            raise UnsupportedConfigurationError(
                f"expected gradients of float32 for a codec with K-FAC, got dtype={scatter.dtype}; pass codec=None"
            )
        if self._is_new_step:
            self._begin_step()
        is_exact, whole = self._exact_left > 0, self._is_whole
        self._is_new_step = bucket.is_last()
        if bucket.is_last():
            self.steps += 1
            self._exact_left = max(0, self._exact_left - 1)
            self._is_whole = False
        if is_exact or payload.matrices is None or payload.gather is None:
            return None
        runs = payload.matrices()
        push = parts_of(payload.scatter.layout, runs, there=True)
        pull = parts_of(payload.gather.layout, runs, there=False)
        coded = self._bucket(bucket.index(), runs, push, group.rank())
        parts, both = payload.scatter.layout.parts, scatter.nbytes + payload.gather.tensor.nbytes
        self._achieved.count(coded, both * (parts - 1) // parts)
        step = functools.partial(_step, payload, group.rank())
        coded.encode(Buffers(scatter, push, payload.gather.tensor, pull, step), whole=whole)
        return coded

    def _begin_step(self) -> None:
        scale = float(self._loss_scale())
        if self._scale is not None and scale != self._scale:
            for each in self._buckets.values():
                each.scale(scale / self._scale)
        self._scale = scale

    def _bucket(
        self, index: int, runs: Sequence[Travelling], parts: Sequence[Part], rank: int
    ) -> CodedBucket:
        known, parameters = self._buckets.get(index), _parameters(runs)
        if known is not None and _shape(known.parameters, known.parts) == _shape(parameters, parts):
            return known
        numels = [parameter.numel() for parameter in parameters]
        made = CodedBucket(
            self.codecs, parameters, numels, parts, rank, gives_mean=False, scratch=self._scratch
        )
        kept = {id(p): residual for each in self._buckets.values() for p, residual in each.kept()}
        for number, parameter in enumerate(parameters):
            if id(parameter) in kept:
                made.keep(number, kept[id(parameter)])
        self._buckets[index] = made
        return made

    def drain(self) -> None:
        """Let the next step travel exact, residuals included."""
        self._is_whole = True

    def forget(self) -> None:
        """Begin anew, without residuals."""
        self._buckets.clear()
        self._exact_left, self._is_whole = _EXACT_STEPS, False

    @property
    def nbytes(self) -> int:
        """Bytes of the residuals."""
        return sum(each.nbytes for each in self._buckets.values())

    @property
    def is_drained(self) -> bool:
        """Whether no residual is left."""
        return not any(each.is_kept for each in self._buckets.values())

    def stats(self) -> dict[str, float]:
        """Return what was sent since the beginning, and the memory of residuals."""
        return self._achieved.stats(self.steps, self.nbytes)


def parts_of(layout: Layout, runs: Sequence[Travelling], *, there: bool) -> tuple[Part, ...]:
    """Cut a payload's buffer by owner into what is coded and the rest, which travels exact."""
    numbers = {id(parameter): number for number, parameter in enumerate(_parameters(runs))}
    parts = []
    for owner in range(layout.parts):
        whole, exact = layout.part(owner), []
        spans = [(run, run.there if there else run.back) for run in runs if run.owner == owner]
        coded = [OwnedSpan(numbers[id(run.parameter)], span, run.begin) for run, span in spans]
        start = whole.start
        for _, span in [*spans, (None, Span(whole.stop, whole.stop))]:
            if start < span.start:
                exact.append(OwnedSpan(-1, Span(start, span.start), 0))
            start = span.stop
        parts.append(Part(tuple(coded), tuple(exact)))
    return tuple(parts)


def _shape(parameters: Sequence[torch.Tensor], parts: Sequence[Part]) -> tuple[object, ...]:
    return [id(parameter) for parameter in parameters], [part.lengths for part in parts]


def _parameters(runs: Sequence[Travelling]) -> list[torch.Tensor]:
    return list({id(run.parameter): run.parameter for run in runs}.values())


def _step(payload: Payload, rank: int) -> None:
    """Do the owner's work on its part."""
    scatter: Sharded = payload.scatter
    part = scatter.layout.part(rank)
    payload.step(scatter.tensor[part.start : part.stop])
