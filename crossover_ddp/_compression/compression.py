"""Compression of all buckets of one model: when it begins, and what becomes of residuals when buckets change.

[Note: exact steps] The first step travels exact: after it DDP rebuilds its buckets. With work of owners between the
halves, as in K-FAC, so do the first two: then buckets stay as they are, also with ``static_graph``. So does the step
after `drain`, which leaves no residuals.

[Note: residuals aside] In an exact step, and when DDP hands over a bucket of other parameters than before, each rank
adds what it has kept of these parameters to its gradients, those of an owner as often as there are ranks, since the
exchange divides by that. So do loaded residuals. Ranks exchange nothing for that, and nothing is lost.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import HIDDEN, OnlyModel, check_keys, resolve_group
from crossover_ddp._ddp.contents import Run, contents_of
from crossover_ddp._ddp.groups import told_by_all
from crossover_ddp._engine.buckets import BucketWay, Turn
from crossover_ddp._engine.exchange import Around, Exchange
from crossover_ddp._engine.journeys import GradientFuture
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.states import Agreement, HookState
from crossover_ddp.errors import UnsupportedConfigurationError

from .codec import CodecChoice, Scratch, codecs_of, in_words
from .coded_link import CodedLink, Part, parts_of
from .planning import CANDIDATES, AnyCodec, CodecPlan, plan_from

logger = logging.getLogger(__name__)

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

LossScale = float | Callable[[], float]
Scale = float | torch.Tensor


class Compression:
    """One model's residuals on this rank, and its buckets' messages; ``state``: that the hook is registered with.

    ``has_work``: owners make something of the mean, and something else travels in the place of buckets.
    """

    def __init__(
        self, codec: CodecChoice, loss_scale: LossScale, state: Any, has_work: bool = False
    ) -> None:
        self._codecs, self._dtypes = codecs_of(codec), _DTYPES[: 1 if has_work else 3]
        self._loss_scale, self._state, self._has_work = loss_scale, state, has_work
        self._scale: Scale | None = None
        self._buckets: dict[int, CodedLink] = {}
        self._scratch = Scratch()
        # See [Note: residuals aside]; what was loaded goes there when the model's names are known.
        self._aside: Any = WeakTensorKeyDictionary()
        self._loaded: dict[str, torch.Tensor] = {}
        self._model, self._leaves_unused = OnlyModel(), True
        self._exact_left = self._first_steps = 2 if has_work else 1
        self._is_new_step = True
        self._sent_bytes = self._exact_bytes = self.steps = 0

    def around(
        self, bucket: dist.GradBucket, exchange: Exchange, pack: Callable[[], Any] | None = None
    ) -> Around | None:
        """Return what encodes ``bucket``, or ``flat``, ``layout`` and ``runs()`` of ``pack()``, and makes its link."""
        if exchange.size == 1 and not self._loaded and not self._aside:
            return None  # one rank keeps nothing of its own, but takes along what was loaded
        return lambda link: self._coded(link, bucket, exchange, None if pack is None else pack())

    def _coded(self, link: Link, bucket: dist.GradBucket, exchange: Exchange, packed: Any) -> Link:
        # With a version counter of its own: decoded values are no change that somebody has made.
        flat = bucket.buffer().data if packed is None else packed.flat
        parameters, known = bucket.parameters(), self._buckets.get(bucket.index())
        if known is not None and [*map(id, known.parameters)] != [*map(id, parameters)]:
            known = None
        if known is None:
            self._enter(bucket, flat.dtype, exchange.size)
        if self._is_new_step:
            self._begin_step()
        is_exact, self._is_new_step = self._exact_left > 0 or exchange.size == 1, bucket.is_last()
        if bucket.is_last():
            self.steps += 1
            self._exact_left = max(0, self._exact_left - 1)
        if known is None or is_exact:
            self._put_aside(parameters)
        if known is not None:
            parts = known.parts
        elif packed is not None:
            parts = parts_of(packed.runs(), packed.layout)
        else:
            runs = [Run(parameter, 0, span) for parameter, _, span in contents_of(bucket, flat)]
            parts = parts_of(runs, exchange.equal_layout(flat))
        self._add_aside(flat, parts)
        if is_exact:
            return known.drained(link) if known is not None and self._has_work else link
        if known is None:
            options = self._has_work, self._leaves_unused
            known = CodedLink(
                link, self._codecs, parameters, parts, flat.device, self._scratch, *options
            )
            self._buckets[bucket.index()] = known
        known.encode(flat, link)
        sent, exact = known.sent_bytes(flat)
        self._sent_bytes, self._exact_bytes = self._sent_bytes + sent, self._exact_bytes + exact
        return known

    def _enter(self, bucket: dist.GradBucket, dtype: torch.dtype, ranks: int) -> None:
        """Begin anew with another model; refuse what cannot be encoded."""
        rows = len(self._codecs[0].codecs)
        if ranks > 1 and rows not in (1, ranks):
            raise UnsupportedConfigurationError(
                f"expected a PerPair with a row for each of {ranks} ranks, got {rows} rows; make one for this group"
            )
        if dtype not in self._dtypes:
            raise UnsupportedConfigurationError(
                f"expected gradients of {', '.join(map(str, self._dtypes))}, got dtype={dtype}: residuals and sums of "
                "a codec are float32; pass codec=None"
            )
        if (model := self._model.enter(bucket, self._state)) is not None:
            self._forget()
            self._leaves_unused = model.find_unused_parameters

    def _begin_step(self) -> None:
        """Let residuals follow the loss's scale, and what was loaded go to its parameters."""
        scale, former = _now(self._loss_scale), self._scale
        # Of a device's scale the host does not look whether it has changed.
        if former is not None and (isinstance(scale, torch.Tensor) or scale != former):
            factor = scale / former
            for each in self._buckets.values():
                each.scale(factor)
            for residual in (*self._aside.values(), *self._loaded.values()):
                residual.mul_(factor if isinstance(factor, float) else factor.to(residual.device))
        self._scale = scale
        known = {name: parameter for parameter, name in self._model.names.items() if name}
        if self._loaded and known:
            by_plain = {_plain(name): parameter for name, parameter in known.items()}
            found: dict[str, Any] = {
                name: known.get(name, by_plain.get(_plain(name))) for name in self._loaded
            }
            if unknown := [name for name, parameter in found.items() if parameter is None]:
                raise UnsupportedConfigurationError(
                    f"expected residuals of this model's parameters, got some of {', '.join(unknown[:3])}; load the "
                    "state dict of the same model"
                )
            self._aside.update(
                {each: self._loaded[name].to(each.device) for name, each in found.items()}
            )
            self._loaded = {}

    def _forget(self) -> None:
        self._buckets.clear()
        self._aside.clear()
        self._exact_left, self._is_new_step = self._first_steps, True

    def _put_aside(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take apart all buckets that have one of ``parameters``."""
        wanted = set(map(id, parameters))
        for index, each in [*self._buckets.items()]:
            if not wanted.isdisjoint(map(id, each.parameters)):
                for parameter, residual in each.kept():
                    # Beside that of a gradient of zeros, see `_add_aside`.
                    self._aside[parameter] = residual + self._aside.get(parameter, 0)
                del self._buckets[index]

    def _add_aside(self, flat: torch.Tensor, parts: Sequence[Part]) -> None:
        """Add to the gradients what is kept of them outside of any bucket."""
        for parameter, residual in [*self._aside.items()]:
            runs = [run for part in parts for run in part.coded if run.parameter is parameter]
            pieces = [flat[run.span.start : run.span.stop] for run in runs]
            if self._leaves_unused and not any([bool(piece.any()) for piece in pieces]):
                continue  # DDP may leave its gradient None
            for run, piece in zip(runs, pieces, strict=True):
                piece.add_(residual[run.begin : run.begin + len(piece)])
            if runs:
                del self._aside[parameter]

    def drain(self) -> None:
        self._exact_left = max(1, self._exact_left)
        self._state.agreement.forget()  # ranks that do so alone would send what others cannot read

    @property
    def is_drained(self) -> bool:
        """Whether nothing is kept: an exact step takes all buckets apart."""
        return not self._buckets and not any(bool(each.any()) for each in self._aside.values())

    def state(self) -> dict[str, Any]:
        """Return the loss's scale, and a copy of this rank's residuals, by name, flat, on the host."""
        kept = [
            *self._aside.items(),
            *(pair for each in self._buckets.values() for pair in each.kept()),
        ]
        if not all(self._model.names.get(parameter) for parameter, _ in kept):
            raise UnsupportedConfigurationError(HIDDEN)
        named = {name: residual.clone() for name, residual in self._loaded.items()}
        for parameter, residual in kept:  # of a gradient of zeros aside and in its bucket
            name = self._model.names[parameter]
            named[name] = residual.cpu() + named.get(name, 0)
        return {
            "residuals": named,
            "loss_scale": None if self._scale is None else float(self._scale),
        }

    def load(self, residuals: Mapping[str, torch.Tensor], scale: float | None) -> None:
        """Begin with ``residuals``; the next step travels exact."""
        self._forget()
        self._loaded = {
            name: residual.detach().float().clone() for name, residual in residuals.items()
        }
        self._scale = scale
        self._state.agreement.forget()  # as in `drain`

    def share(self, group: dist.ProcessGroup) -> None:
        """Let each rank go on with the mean of all ranks' residuals, as a resumed job does. **Collective**."""
        state, means = self.state(), {}
        own: dict[str, torch.Tensor] = state["residuals"]
        for name in sorted({name for names in told_by_all(group, [*own]) for name in names}):
            kept = [each for each in told_by_all(group, own.get(name)) if each is not None]
            means[name] = torch.stack(kept).sum(0) / group.size()
        self.load(means, state["loss_scale"])

    def stats(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "sent_bytes": self._sent_bytes,
            "rate": self._sent_bytes / self._exact_bytes if self._exact_bytes else 1.0,
            "residual_bytes": sum(each.nbytes for each in self._buckets.values()),
        }


class CodedState(HookState):
    """A state with ``codec=`` whose buckets travel by the split; see `CompressedState`."""

    def __init__(
        self,
        codec: AnyCodec,
        loss_scale: LossScale,
        group: dist.ProcessGroup | None,
        compares: bool,
    ) -> None:
        self.process_group, self.compare_replicas = group, compares
        self.codec, self._loss_scale = codec, loss_scale
        self.compression = None if codec is None else Compression(codec, loss_scale, self)
        self.agreement = Agreement()

    def stats(self) -> dict[str, Any]:
        """Return what all states tell, "sent_bytes" and "residual_bytes". Not collective."""
        coded = None if self.compression is None else self.compression.stats()
        return {**(coded or {}), **self._told(codec=self.codec, coded=coded)}

    def said(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return what all ranks must have in common."""
        return {"codec": in_words(self.codec)}

    def _carry(
        self, bucket: dist.GradBucket, exchange: Exchange, journey: BucketWay, turn: Turn | None
    ) -> GradientFuture:
        """Start the journey of ``bucket`` in its hook, on a coded link if there is a codec."""
        way = None if self.compression is None else self.compression.around(bucket, exchange)
        return exchange.carry(bucket, journey, turn=turn, state=self, around=way).future

    def drain(self) -> None:
        """Let the next step travel exact, residuals included: after it there are none. Does nothing without a codec.

        **Collective**: all ranks must call it between the same two steps.
        """
        if self.compression is not None:
            self.compression.drain()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        if self.compression is not None:
            self.compression.share(resolve_group(self.process_group))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by the parameters' names, on the host. Not collective; different on each rank.

        Right after `checkpoint` they are the same on all ranks, and any number of ranks may go on with them.
        """
        if self.compression is None:
            return {"residuals": {}, "loss_scale": None}
        return self.compression.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with residuals of `state_dict`; the next step travels exact and takes them with it.

        Not collective, but all ranks must. A rank that did not exist then passes ``{"residuals": {}, "loss_scale":
        None}``; with another number of ranks the sum of residuals is divided by the new number.
        """
        if self.compression is not None:
            check_keys(
                state, {"residuals", "loss_scale"}, "'residuals' and 'loss_scale'", has_more=True
            )
            self.compression.load(state["residuals"], state["loss_scale"])

    def plan_codec(self, candidates: Sequence[AnyCodec] = CANDIDATES) -> CodecPlan:
        """Choose the weakest codec that hides as much as any: from the steps so far and a few probes of the link.

        Train some ten steps first, best without a codec. Then make a new DDP model with a state of ``plan.codec``: rank
        0's choice, the same on all ranks. ``plan.options`` has the predicted seconds per step of each candidate.

        Args:
            candidates: the weakest first; None: no codec. Default: none, ``Half()``, ``Int8()``, ``SIDCo(0.05)``,
                ``SIDCo(0.01)``.

        On failure: ``UnsupportedConfigurationError`` on all ranks with one rank, on a GPU, whose work the host's clock
        does not time, with a codec of your own, whose processor time is not known, or as long as some rank has recorded
        no step. ``ValueError`` for a `PerPair` among them. **Collective**: all ranks, between two steps.
        """
        return plan_from(resolve_group(self.process_group), self.codec, candidates)


def _now(loss_scale: LossScale) -> Scale:
    """Return the loss's scale now; a GradScaler's as it lies on its device, for which the host need not wait."""
    if isinstance(scaler := getattr(loss_scale, "__self__", None), torch.amp.GradScaler):
        kept = getattr(scaler, "_scale", None)
        if isinstance(kept, torch.Tensor) and kept.device.type != "cpu":
            return kept.clone()  # it is changed in place
    return float(loss_scale() if callable(loss_scale) else loss_scale)


def _plain(name: str) -> str:
    """Return a parameter's name without what DDP and torch.compile put in."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))
