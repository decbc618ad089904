"""Compression of all of a model's buckets: when they are coded, and where residuals go.

[Note: exact steps] The first step travels exactly, because DDP rebuilds its buckets after it. If
owners work on the mean between the halves, as in K-FAC, the first two steps travel exactly: after
the second one buckets no longer change, even with ``static_graph``. The step after `drain` also
travels exactly, and leaves no residuals.

[Note: residuals aside] Residuals are set aside in an exact step, in the first step with another
codec, and whenever DDP passes a bucket whose parameters have changed. Each rank then adds its
residuals for these parameters to its gradients. It multiplies an owner's residual by the number of
ranks, since the exchange divides by that number. Loaded residuals are added in the same way. Ranks
need not exchange anything for this, and nothing is lost.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import HIDDEN, BoundModel, check_keys, resolve_group
from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._ddp.shards import divided, flat_part
from crossover_ddp._engine.buckets import BucketJourney, Join, Run, Turn, contents_of
from crossover_ddp._engine.exchange import Around, Exchange
from crossover_ddp._engine.journeys import GradientFuture
from crossover_ddp._engine.levels import TwoLevelLink
from crossover_ddp._engine.links import Layout, Link, parts
from crossover_ddp._engine.states import CODEC_OF_RANKS, HookState
from crossover_ddp.errors import UnsupportedConfigurationError

from .codec import Codec, PerPair, Scratch, codecs_of, in_words
from .coded_link import (
    OneHopLink,
    OwnersLink,
    Part,
    ResidualLink,
    carrier_of,
    check_rows,
    coded_link,
    half_bytes,
    parts_of,
    suits_one_hop,
)
from .low_rank import LowRankLink, PowerSGD
from .planning import CANDIDATES, AnyCodec, CodecPlan, plan_from

logger = logging.getLogger(__name__)

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

LossScale = float | Callable[[], float]
Scale = float | torch.Tensor


class Compression:
    """One model's residuals on this rank, and the messages of its buckets.

    Args:
        codec: one codec for both halves, a pair of codecs, or `PowerSGD`. None if gradients travel
            exactly until `use` is called.
        loss_scale: the factor by which the loss is scaled, or a function that returns it.
        state: the state with which the hook is registered.
        has_work: True if owners work on the mean, and other tensors travel instead of the buckets.
        keeps_rest: False if an owner drops the rounding error of its message to all ranks.
        scales_rest: False if that error is not in units of the scaled loss's gradient.
        codes_back: False if messages to all ranks are made elsewhere.
        one_hop: see `use`.
    """

    def __init__(
        self,
        codec: AnyCodec,
        loss_scale: LossScale,
        state: Any,
        has_work: bool = False,
        *,
        keeps_rest: bool = True,
        scales_rest: bool = True,
        codes_back: bool = True,
        one_hop: bool = False,
    ) -> None:
        self.use(codec, one_hop=one_hop)
        self._keeps_rest = keeps_rest
        self._scales_rest = scales_rest
        self._codes_back = codes_back
        self._dtypes = _DTYPES[:1] if has_work else _DTYPES
        self._loss_scale = loss_scale
        self._state = state
        self._has_work = has_work
        # The loss scale in the last step. Residuals are in units of gradients with that scale.
        self._scale: Scale | None = None
        # The link of each bucket, by index. A bucket is added in its first coded step.
        self._buckets: dict[int, ResidualLink] = {}
        self._scratch = Scratch()
        # Residuals that are in no bucket, by parameter; see [Note: residuals aside].
        self._aside: Any = WeakTensorKeyDictionary()
        # Loaded residuals, by name. They are set aside as soon as the model's names are known.
        self._loaded: dict[str, torch.Tensor] = {}
        self._bound: BoundModel = state.bound_model
        # Returns the model to which the residuals belong.
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._leaves_unused = True
        # See [Note: exact steps].
        self._first_steps = 2 if has_work else 1
        self._exact_left = self._first_steps
        self._is_new_step = True
        self.steps = 0
        self._sent_bytes = 0
        # The bytes that would have been sent without a codec.
        self._exact_bytes = 0

    def use(self, codec: AnyCodec, *, one_hop: bool = False) -> None:
        """Code gradients with ``codec`` from the next step on; None lets them travel exactly.

        All ranks must change to the same codec in the same step. Residuals of another codec are set
        aside, and added to the next step's gradients, see [Note: residuals aside]. So nothing is
        lost.

        Args:
            codec: see `Compression`.
            one_hop: whether two ranks exchange their messages in one hop if that suits the codec.
                Journeys must then call `Link.all_reduce`. Deferring needs both halves. `PowerSGD`
                has none, so it is refused otherwise.
        """
        self._codecs: tuple[PerPair, Codec] | PowerSGD | None = None
        if isinstance(codec, PowerSGD):
            if not one_hop:
                raise UnsupportedConfigurationError(
                    f"expected a codec of messages, such as Int8(), got codec={codec!r}: it "
                    "averages a bucket at once, and this state works between the two halves of an "
                    "exchange; use CompressedState, CrossoverState or AutoState(losses='any') "
                    "with it"
                )
            self._codecs = codec
        elif codec is not None:
            self._codecs = codecs_of(codec)
        self._one_hop = one_hop

    def around(
        self, bucket: dist.GradBucket, exchange: Exchange, pack: Callable[[], Any] | None = None
    ) -> Around | None:
        """Return a function that encodes ``bucket`` and wraps its link; None if nothing is coded.

        Args:
            bucket: DDP's bucket.
            exchange: the exchange of the bucket's group.
            pack: a function that returns an object with ``flat``, ``layout`` and ``runs()``, which
                travels instead of the bucket. Default: None, so that the bucket's buffer travels.
        """
        # A single rank sends nothing, so it can only have loaded residuals.
        sends_exact = exchange.size == 1 or (self._codecs is None and self._model() is not None)
        has_residuals = self._loaded or self._aside or self._buckets
        if sends_exact and not has_residuals and self._is_new_step:
            return None
        return lambda link: self._coded(link, bucket, exchange, None if pack is None else pack())

    def _coded(self, link: Link, bucket: dist.GradBucket, exchange: Exchange, packed: Any) -> Link:
        """Add residuals that were set aside, encode the bucket, and return the wrapped link."""
        # `.data` has a version counter of its own, so decoded values do not look as if user code
        # had changed the gradients.
        flat = bucket.buffer().data if packed is None else packed.flat
        link = carrier_of(link, self._codecs)
        known = self._known(bucket, link)
        if known is None:
            self._enter(bucket, flat.dtype, exchange.size)
        if self._is_new_step:
            self._begin_step()
        is_exact = self._codecs is None or self._exact_left > 0 or exchange.size == 1
        self._is_new_step = bucket.is_last()
        if bucket.is_last():
            self.steps += 1
            self._exact_left = max(0, self._exact_left - 1)
        if known is None or is_exact:
            self._put_aside(bucket.parameters())
        layout = exchange.equal_layout(flat) if packed is None else packed.layout
        if known is not None:
            content = known.content
        else:
            runs = _runs_of(bucket, flat) if packed is None else packed.runs()
            # Only owners between all ranks or all nodes divide a bucket into parts.
            is_whole = self._kind(link) is not OwnersLink and not isinstance(link, TwoLevelLink)
            content = parts_of(runs, [flat.numel()] if is_whole else layout)
        self._add_aside(flat, content)
        if is_exact:
            return self._drained(known, link)
        if known is None:
            known = self._made(bucket, link, content, layout, flat.device)
            self._buckets[bucket.index()] = known
        self._count(known, flat, link, layout)
        return known.around(flat, link)

    def _kind(self, link: Link) -> type[ResidualLink]:
        """Return the class of link that carries a bucket with the present codecs."""
        codecs = self._codecs
        if isinstance(codecs, PowerSGD):
            return LowRankLink
        ranks = len(link.column) if isinstance(link, TwoLevelLink) else link.size
        if isinstance(codecs, tuple) and self._one_hop and suits_one_hop(codecs, ranks):
            return OneHopLink
        return OwnersLink

    def _known(self, bucket: dist.GradBucket, link: Link) -> ResidualLink | None:
        """Return the bucket's coded link; None if it has none that suits its present content."""
        known = self._buckets.get(bucket.index())
        is_same = (
            known is not None
            and isinstance(known, self._kind(link))
            and known.codecs == self._codecs
            and [*map(id, known.parameters)] == [*map(id, bucket.parameters())]
        )
        return known if is_same else None

    def _drained(self, known: ResidualLink | None, link: Link) -> Link:
        """Return the link of an exact step, in which owners with work add their residuals."""
        if not self._has_work or not isinstance(known, OwnersLink):
            return link
        drained = known.drained
        if not isinstance(link, TwoLevelLink):
            return drained(link)
        link.code(lambda _, between: drained(between))
        return link

    def _made(
        self,
        bucket: dist.GradBucket,
        link: Link,
        content: Sequence[Part],
        layout: Layout,
        device: torch.device,
    ) -> ResidualLink:
        """Return a new coded link for the bucket.

        Args:
            bucket: DDP's bucket.
            link: the link for its first step.
            content: its parts, by rank.
            layout: the number of values in each part.
            device: its device.
        """
        codecs = self._codecs
        parameters = bucket.parameters()
        if isinstance(codecs, PowerSGD):
            [whole] = content
            return LowRankLink(
                link, codecs, parameters, whole, device, leaves_unused=self._leaves_unused
            )
        assert codecs is not None
        return coded_link(
            OneHopLink if self._kind(link) is OneHopLink else OwnersLink,
            link,
            codecs,
            parameters,
            content,
            layout,
            device,
            self._scratch,
            has_work=self._has_work,
            keeps_rest=self._keeps_rest,
            scales_rest=self._scales_rest,
            codes_back=self._codes_back,
            leaves_unused=self._leaves_unused,
        )

    def _count(self, known: ResidualLink, flat: torch.Tensor, link: Link, layout: Layout) -> None:
        """Count the bytes of a coded bucket, and those that it would take without a codec."""
        self._sent_bytes += known.sent_bytes()
        halves = 2 if self._codes_back else 1
        self._exact_bytes += halves * half_bytes(link, layout, flat.itemsize)

    def _enter(self, bucket: dist.GradBucket, dtype: torch.dtype, ranks: int) -> None:
        """Start over if the bucket belongs to a new model; refuse one that cannot be encoded.

        Args:
            bucket: the bucket.
            dtype: the dtype of its gradients.
            ranks: the number of ranks.
        """
        check_rows(self._codecs, ranks)
        if dtype not in self._dtypes:
            raise UnsupportedConfigurationError(
                f"expected gradients of {', '.join(map(str, self._dtypes))}, got dtype={dtype}: "
                "residuals and sums of a codec are float32; use exact gradients (codec=None, or "
                "losses='same')"
            )
        model = self._bound.bind(bucket, self._state)
        if model is not None and model is not self._model():
            self._forget()
            self._model = weakref.ref(model)
            self._leaves_unused = model.find_unused_parameters

    def _begin_step(self) -> None:
        """Rescale residuals if the loss scale has changed, and set loaded residuals aside."""
        former = self._scale
        self._scale = _current(self._loss_scale)
        # The host does not read a scale on a device to see whether it changed: it always rescales.
        if former is not None and (isinstance(self._scale, torch.Tensor) or self._scale != former):
            self._rescale(self._scale / former)
        parameters = {name: parameter for parameter, name in self._bound.names.items() if name}
        if self._loaded and parameters:
            self._assign_loaded(parameters)

    def _rescale(self, factor: Scale) -> None:
        for each in self._buckets.values():
            each.scale(factor)
        for residual in (*self._aside.values(), *self._loaded.values()):
            residual.mul_(factor if isinstance(factor, float) else factor.to(residual.device))

    def _assign_loaded(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set loaded residuals aside for the model's ``parameters``, which are given by name."""
        by_plain_name = {_plain(name): parameter for name, parameter in parameters.items()}
        found: dict[str, Any] = {
            name: parameters.get(name, by_plain_name.get(_plain(name))) for name in self._loaded
        }
        unknown = [name for name, parameter in found.items() if parameter is None]
        if unknown:
            raise UnsupportedConfigurationError(
                "expected residuals of this model's parameters, got some of "
                f"{', '.join(unknown[:3])}; load the state dict of the same model"
            )
        for name, parameter in found.items():
            self._aside[parameter] = self._loaded[name].to(parameter.device)
        self._loaded = {}

    def _forget(self) -> None:
        self._buckets.clear()
        self._aside.clear()
        self._exact_left = self._first_steps
        self._is_new_step = True

    def _put_aside(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set aside the residuals of every bucket that contains any of ``parameters``."""
        wanted = set(map(id, parameters))
        for index, each in [*self._buckets.items()]:
            if not wanted.isdisjoint(map(id, each.parameters)):
                for parameter, residual in each.residuals():
                    # An unused parameter may already have a residual aside; see `_add_aside`.
                    self._aside[parameter] = residual + self._aside.get(parameter, 0)
                del self._buckets[index]

    def _add_aside(self, flat: torch.Tensor, parts: Sequence[Part]) -> None:
        """Add the residuals that were set aside to the gradients in ``flat``."""
        for parameter, residual in [*self._aside.items()]:
            runs = [run for part in parts for run in part.coded if run.parameter is parameter]
            pieces = [flat[run.span.start : run.span.stop] for run in runs]
            if self._leaves_unused and not any([bool(piece.any()) for piece in pieces]):
                continue  # DDP may leave its gradient None, which would lose the residual
            for run, piece in zip(runs, pieces, strict=True):
                piece.add_(residual[run.begin : run.begin + len(piece)])
            if runs:
                del self._aside[parameter]

    def drain(self) -> None:
        """Make the next step travel exactly; see [Note: exact steps]."""
        self._exact_left = max(1, self._exact_left)
        # Make ranks compare again: if only some drained, others could not read their messages.
        self._state.agreement.forget()

    @property
    def is_drained(self) -> bool:
        """Whether no residual is left. An exact step sets the residuals of all buckets aside."""
        return not self._buckets and not any(bool(each.any()) for each in self._aside.values())

    def state(self) -> dict[str, Any]:
        """Return the loss scale, and a copy of this rank's flat residuals on the host."""
        pairs = [*self._aside.items()]
        for each in self._buckets.values():
            pairs += each.residuals()
        if not all(self._bound.names.get(parameter) for parameter, _ in pairs):
            raise UnsupportedConfigurationError(HIDDEN)
        named = {name: residual.clone() for name, residual in self._loaded.items()}
        # An unused parameter can have one residual aside and another in its bucket.
        for parameter, residual in pairs:
            name = self._bound.names[parameter]
            named[name] = residual.cpu() + named.get(name, 0)
        return {
            "residuals": named,
            "loss_scale": None if self._scale is None else float(self._scale),
        }

    def load(self, residuals: Mapping[str, torch.Tensor], scale: float | None) -> None:
        """Replace all residuals with ``residuals``; the next step then travels exactly."""
        self._forget()
        self._loaded = {
            name: flat_part(residual).float().clone() for name, residual in residuals.items()
        }
        self._scale = scale
        self._state.agreement.forget()  # as in `drain`

    def share(self, group: dist.ProcessGroup) -> None:
        """Replace each rank's residuals with their mean, as in a resumed job. **Collective**."""
        state = self.state()
        own: dict[str, torch.Tensor] = state["residuals"]
        means = {}
        for name in sorted({name for names in gather_objects(group, [*own]) for name in names}):
            kept = [each for each in gather_objects(group, own.get(name)) if each is not None]
            means[name] = torch.stack(kept).sum(0) / group.size()
        self.load(means, state["loss_scale"])

    @property
    def has_rest(self) -> bool:
        """Whether messages of this rank's results have left anything out."""
        return any(
            bool(piece.any())
            for each in self._buckets.values()
            if isinstance(each, OwnersLink)
            for _, piece in each.rest()
        )

    def gather_rest(self, exchange: Exchange) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gather the residuals of the owners' results, and set them to zero. **Collective**.

        Yields each coded parameter, which must belong to one owner, with its flat residual.
        """
        for index, each in sorted(self._buckets.items()):
            if not isinstance(each, OwnersLink):
                continue
            layout = [sum(run.span.numel for run in part.coded) for part in each.content]
            rest = torch.zeros(sum(layout), dtype=torch.float32, device=each.device)
            own = parts(rest, layout)[exchange.rank]
            for (_, piece), place in zip(
                each.rest(), own.split([len(piece) for _, piece in each.rest()]), strict=True
            ):
                place.copy_(piece)
                piece.zero_()
            exchange.gather(rest, layout, f"the residuals of bucket {index}")
            runs = [run for part in each.content for run in part.coded]
            pieces = rest.split([run.span.numel for run in runs])
            yield from zip([run.parameter for run in runs], pieces, strict=True)

    def stats(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "sent_bytes": self._sent_bytes,
            "rate": self._sent_bytes / self._exact_bytes if self._exact_bytes else 1.0,
            "residual_bytes": sum(each.nbytes for each in self._buckets.values()),
        }


class ResidualState(HookState):
    """A state with a ``codec`` argument, whose checkpoints hold the residuals.

    A subclass calls `_use_codec` in its constructor.
    """

    codec: Any  # the constructor's argument
    compression: Compression | None

    def _use_codec(self, codec: AnyCodec, loss_scale: LossScale, **settings: bool) -> None:
        """Compress with ``codec``, or not at all if it is None.

        Args:
            codec: the codec, or None.
            loss_scale: see `Compression`.
            settings: other arguments of `Compression`.
        """
        self.codec = codec
        self._loss_scale = loss_scale
        self.compression = (
            None if codec is None else Compression(codec, loss_scale, self, **settings)
        )

    def stats(self) -> dict[str, Any]:
        """Return the common statistics, plus those of the codec. Not collective.

        With a codec, they include "sent_bytes" and "residual_bytes".
        """
        coded = None if self.compression is None else self.compression.stats()
        return {**(coded or {}), **self._common_stats(codec=self.codec, coded=coded)}

    @property
    def why_not_virtual(self) -> str:
        """See `HookState.why_not_virtual`."""
        return "" if self.codec is None else CODEC_OF_RANKS

    def fingerprint(self, bucket: dist.GradBucket) -> dict[str, object]:
        """Return the settings that must be the same on all ranks."""
        return {"codec": in_words(self.codec)}

    def drain(self) -> None:
        """Make the next step travel exactly and send all residuals, so that none are left after it.

        Without a codec, this does nothing.

        **Collective**: all ranks must call it between the same two steps.
        """
        if self.compression is not None:
            self.compression.drain()

    def _bring_together(self, optimizers: Sequence[Any], to: int | None) -> None:
        if self.compression is not None:
            self.compression.share(resolve_group(self.process_group))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, on the host, and the loss scale.

        Residuals differ from rank to rank. Right after `checkpoint` they are the same on all ranks,
        and any number of ranks may resume with them. Not collective.
        """
        if self.compression is None:
            return {"residuals": {}, "loss_scale": None}
        state = self.compression.state()
        return {**state, "residuals": divided(self.bound_model.model(), state["residuals"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the output of `state_dict`; the next step adds the residuals and travels exactly.

        Not collective, but all ranks must call it. A rank that did not exist when the state was
        saved passes ``{"residuals": {}, "loss_scale": None}``. If the number of ranks has changed,
        the sum of the residuals is divided by the new number.
        """
        if state or self.compression is not None:  # a hook without residuals saves nothing
            check_keys(
                state, {"residuals", "loss_scale"}, "'residuals' and 'loss_scale'", has_more=True
            )
        if self.compression is not None:
            self.compression.load(state["residuals"], state["loss_scale"])
        elif state.get("residuals"):
            logger.warning(
                "the checkpoint has residuals of a codec, and this %s has none: they are dropped; "
                "call drain() one step before you save, or pass a codec",
                type(self).__name__,
            )


class CodedState(ResidualState):
    """A state with a ``codec`` argument whose buckets use the split; see `CompressedState`."""

    def __init__(
        self,
        codec: AnyCodec,
        loss_scale: LossScale,
        group: dist.ProcessGroup | None,
        compares: bool,
        model: DistributedDataParallel | None,
    ) -> None:
        super().__init__(group, model, compares)
        self._use_codec(codec, loss_scale, one_hop=True)

    def _send(
        self,
        bucket: dist.GradBucket,
        exchange: Exchange,
        journey: BucketJourney,
        *,
        turn: Turn | None = None,
        join: Join | None = None,
    ) -> GradientFuture:
        """Start the journey of ``bucket``, on a coded link if there is a codec."""
        if bucket.parameters()[0] not in self.bound_model.names:  # once per bucket
            self.bound_model.bind(bucket, self)
        around = None if self.compression is None else self.compression.around(bucket, exchange)
        started = exchange.send(bucket, journey, turn=turn, join=join, state=self, around=around)
        return started.future

    def plan_codec(self, candidates: Sequence[AnyCodec] = CANDIDATES) -> CodecPlan:
        """Choose the weakest codec whose predicted step time is close to the shortest.

        The prediction uses the steps so far and a few probes of the link. First train about ten
        steps, preferably without a codec. Then create a new DDP model whose state uses
        ``plan.codec``. Rank 0 makes the choice, and all ranks get the same plan. ``plan.options``
        has the predicted seconds per step for each candidate.

        Args:
            candidates: the codecs to consider, weakest first; None means no codec. Default: no
                codec, ``Half()``, ``Int8()``, ``SIDCo(0.05)`` and ``SIDCo(0.01)``.

        On failure: ``UnsupportedConfigurationError`` on all ranks if there is only one rank; on a
        GPU, since the host's clock does not time its work; for a codec of your own, since its
        processor time is not known; for `PowerSGD`, whose rate depends on the model; or if a rank
        has recorded no step. ``ValueError`` if any of the candidates contains a `PerPair`.

        **Collective**: all ranks must call it between the same two steps.
        """
        return plan_from(resolve_group(self.process_group), self.codec, candidates)


def _runs_of(bucket: dist.GradBucket, flat: torch.Tensor) -> list[Run]:
    return [Run(parameter, 0, span) for parameter, _, span in contents_of(bucket, flat)]


def _current(loss_scale: LossScale) -> Scale:
    """Return the loss scale.

    If a GradScaler keeps the scale on a device, return a tensor there, so the host need not wait.
    """
    scaler = getattr(loss_scale, "__self__", None)
    if isinstance(scaler, torch.amp.GradScaler):
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, torch.Tensor) and scale.device.type != "cpu":
            return scale.clone()  # the scaler changes it in place
    return float(loss_scale() if callable(loss_scale) else loss_scale)


def _plain(name: str) -> str:
    """Return a parameter's name without the parts that DDP and torch.compile add."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))
