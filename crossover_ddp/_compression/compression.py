"""Compression of all buckets of one model: when it begins, and what becomes of residuals when buckets change.

[Note: exact steps] The first step travels exact: DDP puts all parameters into one bucket then, and rebuilds its buckets
after it. With work of owners between the halves, as in K-FAC, so do the first two: then DDP's buckets stay as they are,
also with ``static_graph``, and so does who owns what. In a step after `drain` messages hold all that is kept, in
float32, so afterwards there are no residuals.

[Note: residuals aside] When DDP hands over a bucket of other parameters than before, each rank adds what it has kept of
these parameters to its next gradients, those of an owner as often as there are ranks, since the exchange divides by
that. So do loaded residuals. Ranks need not exchange anything for that, and nothing is lost.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import OnlyModel, flat_gradients
from crossover_ddp._ddp.contents import Run, contents_of
from crossover_ddp._ddp.layout import Layout, Span
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp.errors import UnsupportedConfigurationError

from .bucket import Buffers, CodedBucket
from .choice import CodecChoice, check_size, codecs_of
from .codec import Former
from .cut import OwnedSpan, Part, cut
from .scratch import Scratch

_WRAPPINGS: Final = ("module", "_orig_mod")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class _Journey(NamedTuple):
    """What travels for one bucket, and of which parameters it is made."""

    buffers: Buffers
    parameters: Sequence[torch.Tensor]
    exact_bytes: int


class Packed(Protocol):
    """What travels in a bucket's place, laid out by owner."""

    @property
    def flat(self) -> torch.Tensor:
        """It goes both ways."""

    @property
    def layout(self) -> Sequence[int]:
        """Number of elements of each rank's part."""

    def runs(self) -> Sequence[Run]:
        """List what of it may be rounded, in its order."""


class Compression:
    """The residuals of one model on this rank, and its buckets' messages.

    Args:
        codec: for both halves, or a pair: push to owners, pull from owners.
        loss_scale: what the loss is multiplied by.
        state: that the hook is registered with; tells apart models that wrap one module.
        has_work: owners make something of the mean; something else travels in the place of buckets.
    """

    def __init__(
        self,
        codec: CodecChoice,
        loss_scale: float | Callable[[], float],
        state: object,
        *,
        has_work: bool = False,
    ) -> None:
        self.codecs = codecs_of(codec)
        self._loss_scale = loss_scale if callable(loss_scale) else functools.partial(float, loss_scale)
        self._state, self._has_work = state, has_work
        self._scale: float | None = None
        self._buckets: dict[int, CodedBucket] = {}
        self._scratch = Scratch()
        self._checked: set[tuple[torch.dtype, torch.device]] = set()
        # See [Note: residuals aside].
        self._aside: Any = WeakTensorKeyDictionary()
        self._loaded: dict[str, torch.Tensor] = {}
        self._model, self._leaves_unused = OnlyModel(), not has_work
        self._exact_left = self._first_steps = 2 if has_work else 1
        self._is_draining, self._is_new_step = False, True
        self._sent_bytes = self._exact_bytes = 0
        self.steps = 0

    # --- in a hook -------------------------------------------------------------------------------------------

    def messages(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, packed: Packed | None = None
    ) -> CodedBucket | None:
        """Encode ``bucket``, or what travels in its place; None: it travels as it is. On the hook's thread."""
        flat = flat_gradients(bucket) if packed is None else packed.flat
        if (flat.dtype, flat.device) not in self._checked:
            self._check(flat, group)
            self._checked.add((flat.dtype, flat.device))
        model = None if self._has_work else self._model.enter(bucket, self._state)
        if model is not None:
            self._begin_model(model)
        if self._is_new_step:
            self._begin_step()
        is_exact, is_draining = self._exact_left > 0, self._is_draining
        self._is_new_step = bucket.is_last()
        if bucket.is_last():
            self.steps += 1
            self._exact_left, self._is_draining = max(0, self._exact_left - 1), False
        known = self._buckets.get(bucket.index())
        journey = _journey_of(bucket, flat, group, known) if packed is None else _journey_with(packed)
        buffers, parameters = journey.buffers, journey.parameters
        if known is None or not known.is_of(parameters, buffers.parts):
            self._put_aside(parameters)
            known = None
        self._add_aside(journey)
        if is_exact:
            return None
        if known is None:
            known = self._buckets[bucket.index()] = CodedBucket(
                self.codecs,
                parameters,
                buffers.parts,
                group.rank(),
                flat.device,
                has_work=self._has_work,
                leaves_unused=self._leaves_unused,
                by_collectives=not Exchange.of(group).sends_messages(flat.device),
                scratch=self._scratch,
            )
        known.encode(buffers, whole=is_draining)
        if not is_draining:
            self._sent_bytes += known.sent_bytes
            self._exact_bytes += journey.exact_bytes * (group.size() - 1) // group.size()
        return known

    def _check(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Refuse what does not work."""
        check_size(self.codecs.push, group.size())
        on_ring = Exchange.of(group).sends_messages(flat.device)
        on_host = on_ring and flat.device.type == "cpu"
        if self._has_work and not (on_host and flat.dtype == torch.float32):
            raise UnsupportedConfigurationError(
                "expected gradients on the CPU and gloo for a codec with K-FAC, of float32, got "
                f"device={flat.device} and dtype={flat.dtype}; pass codec=None"
            )
        if not on_host and any(isinstance(each, Former) for each in self.codecs.all()):
            raise UnsupportedConfigurationError(
                f"expected codecs with nbytes(numel) for gradients on {flat.device}, got {self.codecs.push!r} and "
                f"{self.codecs.pull!r}; codecs of former versions work on the CPU with gloo"
            )
        if flat.dtype not in _DTYPES:
            raise UnsupportedConfigurationError(
                f"expected gradients of float32, bfloat16 or float16, got dtype={flat.dtype}: residuals and sums "
                "of a codec are float32; pass codec=None"
            )

    def _begin_model(self, model: DistributedDataParallel) -> None:
        self._buckets.clear()
        self._aside.clear()
        self._exact_left = self._first_steps
        self._leaves_unused = model.find_unused_parameters

    def _begin_step(self) -> None:
        scale = float(self._loss_scale())
        if self._scale is not None and scale != self._scale:
            for each in self._buckets.values():
                each.scale(scale / self._scale)
            for residual in (*self._aside.values(), *self._loaded.values()):
                residual.mul_(scale / self._scale)
        self._scale = scale
        if self._loaded:
            self._loaded = self._renamed(self._loaded)

    def _renamed(self, loaded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loaded residuals by this model's names, which may be those of another wrapping."""
        known = {name for name in self._model.names.values() if name}
        by_plain = {_plain(name): name for name in known}
        unknown = [name for name in loaded if name not in known and _plain(name) not in by_plain]
        if known and unknown:
            raise UnsupportedConfigurationError(
                f"expected residuals of this model's parameters, got some of {', '.join(unknown[:3])}; load the state "
                "dict of the same model"
            )
        return {
            name if name in known else by_plain.get(_plain(name), name): each for name, each in loaded.items()
        }

    def _put_aside(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take apart all buckets that have one of ``parameters``."""
        wanted = set(map(id, parameters))
        for index, each in list(self._buckets.items()):
            if not wanted.isdisjoint(map(id, each.parameters)):
                for parameter, residual in each.kept():
                    self._aside[parameter] = residual
                del self._buckets[index]

    def _add_aside(self, journey: _Journey) -> None:
        """Add to the gradients what is kept of them outside of any bucket."""
        if not self._aside and not self._loaded:
            return
        flat = journey.buffers.flat
        for number, parameter in enumerate(journey.parameters):
            residual = self._taken(parameter)
            if residual is None:
                continue
            segments = [
                each
                for part in journey.buffers.parts
                for each in (*part.coded, *part.exact)
                if each.parameter == number
            ]
            pieces = [flat[each.span.start : each.span.stop] for each in segments]
            if self._leaves_unused and not any([bool(piece.any()) for piece in pieces]):
                self._aside[parameter] = residual  # DDP may leave its gradient None
                continue
            for piece, each in zip(pieces, segments, strict=True):
                piece.add_(residual[each.begin : each.begin + each.span.numel].to(piece.device))

    def _taken(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what is kept for a parameter outside of any bucket, and keep it no longer."""
        found: torch.Tensor | None = self._aside.pop(parameter, None)
        loaded = self._loaded.pop(self._model.names.get(parameter, ""), None)
        if loaded is None or found is None:
            return loaded if found is None else found
        return found.add_(loaded.to(found.device))

    # --- between steps ---------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let the next step travel exact, residuals included."""
        self._is_draining = True

    @property
    def is_drained(self) -> bool:
        """Whether no residual is left."""
        return not self._aside and not any(each.is_kept for each in self._buckets.values())

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's residuals on the host by the parameter's name, flat, in the order of buckets."""
        kept = [*self._aside.items(), *(pair for each in self._buckets.values() for pair in each.kept())]
        if not all(self._model.names.get(parameter) for parameter, _ in kept):
            raise UnsupportedConfigurationError(
                "expected a DDP model that Python's collector knows, got parameters without a name; "
                "call gc.freeze() after the first backward(), not before"
            )
        named = {self._model.names[parameter]: residual.cpu().clone() for parameter, residual in kept}
        return {**{name: residual.clone() for name, residual in self._loaded.items()}, **named}

    def load(self, residuals: Mapping[str, torch.Tensor], scale: float | None) -> None:
        """Begin with ``residuals`` in place of what there is; the next step travels exact."""
        self._buckets.clear()
        self._aside.clear()
        self._loaded = {name: residual.detach().float().clone() for name, residual in residuals.items()}
        self._scale = scale
        self._exact_left = self._first_steps

    @property
    def scale(self) -> float | None:
        """The loss's scale that residuals belong to; None before the first step."""
        return self._scale

    def stats(self) -> dict[str, float]:
        """Return what was sent since the beginning, and the memory of residuals."""
        return {
            "steps": self.steps,
            "sent_bytes": self._sent_bytes,
            "rate": self._sent_bytes / self._exact_bytes if self._exact_bytes else 1.0,
            "residual_bytes": sum(each.nbytes for each in self._buckets.values()),
        }


def state_of(compression: Compression | None) -> dict[str, Any]:
    """Return what a state dict holds; nothing without a codec."""
    if compression is None:
        return {"residuals": {}, "loss_scale": None}
    return {"residuals": compression.residuals(), "loss_scale": compression.scale}


def _plain(name: str) -> str:
    """Return a parameter's name without what DDP and torch.compile put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPINGS)


def _journey_of(
    bucket: dist.GradBucket, flat: torch.Tensor, group: dist.ProcessGroup, known: CodedBucket | None
) -> _Journey:
    """Return what travels for a bucket whose mean is wanted; cut as it was before, if it is ``known``."""
    parameters = bucket.parameters()
    if known is not None and known.is_of(parameters):
        parts = known.parts
    else:
        numels = [content.span.numel for content in contents_of(bucket, flat)]
        parts = cut(numels, [each.dim() for each in parameters], Layout.equal(flat.numel(), group.size()))
    # With a version counter of its own: decoded values are no change that somebody has made.
    own = flat.data
    return _Journey(Buffers(own, parts), parameters, 2 * flat.nbytes)


def _journey_with(packed: Packed) -> _Journey:
    """Return what travels in a bucket's place."""
    runs = packed.runs()
    parameters = [*{id(run.parameter): run.parameter for run in runs}.values()]
    parts = parts_of(Layout.of_lengths(packed.layout), runs)
    return _Journey(Buffers(packed.flat, parts), parameters, 2 * packed.flat.nbytes)


def parts_of(layout: Layout, runs: Sequence[Run]) -> tuple[Part, ...]:
    """Cut a buffer by owner into ``runs``, which are coded, and the rest, which travels exact."""
    numbers: dict[int, int] = {}
    for run in runs:
        numbers.setdefault(id(run.parameter), len(numbers))
    parts = []
    for owner in range(layout.parts):
        whole, exact = layout.part(owner), []
        spans = [run.span for run in runs if run.owner == owner]
        coded = [
            OwnedSpan(numbers[id(run.parameter)], run.span, run.begin) for run in runs if run.owner == owner
        ]
        start = whole.start
        for span in [*spans, Span(whole.stop, whole.stop)]:
            if start < span.start:
                exact.append(OwnedSpan(-1, Span(start, span.start), 0))
            start = span.stop
        parts.append(Part(tuple(coded), tuple(exact)))
    return tuple(parts)
