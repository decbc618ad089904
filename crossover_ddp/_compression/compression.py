"""Compression of all buckets of one model: when it begins, and what becomes of residuals when buckets change.

[Note: exact steps] The first step travels exact: DDP puts all parameters into one bucket then, and rebuilds its buckets
after it. So does the step after `drain`. In an exact step each rank adds its residuals to its gradients, those of an
owner as often as there are ranks, since the exchange divides by that. Afterwards there are none.

[Note: buckets that change] When DDP hands over a bucket of other parameters than before, the residuals of these
parameters move over, and an owner's residual becomes part of its rank's push residual. Ranks need not exchange
anything for that, and nothing is lost.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import OnlyModel, flat_gradients
from crossover_ddp._exchange.contents import contents_of
from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.layout import Layout
from crossover_ddp._exchange.transfer import DeviceMessages, Messages, Payload
from crossover_ddp.errors import UnsupportedConfigurationError

from .achieved import AchievedRate
from .bucket import Buffers, CodedBucket
from .choice import CodecChoice, Codecs, check_size, codecs_of
from .cut import cut
from .device_bucket import DeviceBucket, can_encode_on_device
from .scratch import Scratch

_WRAPPINGS: Final = ("module", "_orig_mod")
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Compression:
    """The residuals of one model on this rank, and its buckets' messages.

    Args:
        codec: for both halves, or a pair: push to owners, pull from owners.
        loss_scale: what the loss is multiplied by.
        state: that the hook is registered with; tells apart models that wrap one module.
    """

    def __init__(self, codec: CodecChoice, loss_scale: float | Callable[[], float], state: object) -> None:
        self.codecs = codecs_of(codec)
        self._loss_scale = loss_scale if callable(loss_scale) else functools.partial(float, loss_scale)
        self._state = state
        self._scale: float | None = None
        self._buckets: dict[int, CodedBucket | DeviceBucket] = {}
        self._scratch = Scratch()
        # Of parameters whose bucket is not known yet, or is not there any more.
        self._pool: Any = WeakTensorKeyDictionary()
        self._loaded: dict[str, torch.Tensor] = {}
        self._model, self._leaves_unused = OnlyModel(), True
        self._is_exact, self._is_new_step = True, True
        self.steps = 0
        self._achieved = AchievedRate()

    # --- in a hook -------------------------------------------------------------------------------------------

    def messages(
        self, bucket: dist.GradBucket, group: dist.ProcessGroup, payload: Payload | None
    ) -> Messages | DeviceMessages | None:
        """Encode ``bucket``; None: it travels as it is, with all residuals in it. On the hook's thread."""
        flat = flat_gradients(bucket)
        on_ring = check_coded(flat, group, self.codecs)
        model = self._model.enter(bucket, self._state)
        if model is not None:
            self._begin_model(model, on_ring=on_ring)
        if self._is_new_step:
            self._begin_step()
        is_exact = self._is_exact
        self._is_new_step = bucket.is_last()
        if bucket.is_last():
            self.steps += 1
            self._is_exact = False
        if is_exact:
            self._add_residuals(bucket, flat)
            return None
        coded = self._bucket(bucket, flat, group, on_ring=on_ring)
        self._achieved.count(coded, 2 * flat.nbytes * (group.size() - 1) // group.size())
        # With a version counter of its own: decoded values are no change that somebody has made.
        own = flat.data
        coded.encode(Buffers(own, coded.parts, own, coded.parts))
        return coded

    def _begin_model(self, model: DistributedDataParallel, *, on_ring: bool) -> None:
        self._buckets.clear()
        self._pool.clear()
        self._is_exact = True
        self._leaves_unused = model.find_unused_parameters
        if self._leaves_unused and not on_ring:
            raise UnsupportedConfigurationError(
                "expected find_unused_parameters=False for a codec on a backend's own collectives, got True: which "
                "parameters are in use would have to be read from the device for each bucket; pass False, or "
                "codec=None"
            )

    def _begin_step(self) -> None:
        scale = float(self._loss_scale())
        if self._scale is not None and scale != self._scale:
            for each in self._buckets.values():
                each.scale(scale / self._scale)
            for residual in (*self._pool.values(), *self._loaded.values()):
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

    def _add_residuals(self, bucket: dist.GradBucket, flat: torch.Tensor) -> None:
        """Add what is kept for the bucket's parameters to its gradients, and keep nothing."""
        self._retire(bucket.parameters())
        for parameter, _, span in contents_of(bucket, flat):
            piece, residual = flat[span.start : span.stop], self._taken(parameter)
            if residual is None:
                continue
            if self._leaves_unused and not bool(piece.any()):  # then DDP may leave its gradient None
                self._pool[parameter] = residual
            else:
                piece.add_(residual.to(piece.device))

    def _bucket(
        self, bucket: dist.GradBucket, flat: torch.Tensor, group: dist.ProcessGroup, *, on_ring: bool
    ) -> CodedBucket | DeviceBucket:
        parameters = bucket.parameters()
        known = self._buckets.get(bucket.index())
        if known is not None and _are_same(known.parameters, parameters):
            return known
        self._retire(parameters)
        layout = Layout.equal(flat.numel(), group.size())
        numels = [content.span.numel for content in contents_of(bucket, flat)]
        parts = cut(numels, [parameter.dim() for parameter in parameters], layout)
        made: CodedBucket | DeviceBucket
        if on_ring:
            made = CodedBucket(self.codecs, parameters, numels, parts, group.rank(), scratch=self._scratch)
        else:
            made = DeviceBucket(self.codecs, parameters, numels, parts, group.rank(), flat.device)
        for number, parameter in enumerate(parameters):
            residual = self._taken(parameter)
            if residual is not None:
                made.keep(number, residual)
        self._buckets[bucket.index()] = made
        return made

    def _retire(self, parameters: list[torch.Tensor]) -> None:
        """Take apart all buckets that have one of ``parameters``, see [Note: buckets that change]."""
        wanted = set(map(id, parameters))
        for index, each in list(self._buckets.items()):
            if not wanted.isdisjoint(map(id, each.parameters)):
                for parameter, residual in each.kept():
                    self._pool[parameter] = residual
                del self._buckets[index]

    def _taken(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what is kept for a parameter outside of any bucket, and keep it no longer."""
        found: torch.Tensor | None = self._pool.pop(parameter, None)
        loaded = self._loaded.pop(self._model.names.get(parameter, ""), None)
        if loaded is None or found is None:
            return loaded if found is None else found
        return found.add_(loaded.to(found.device))

    # --- between steps ---------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let the next step travel exact, residuals included."""
        self._is_exact = True

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's residuals on the host by the parameter's name, flat, in the order of buckets."""
        kept = [*self._pool.items(), *(pair for each in self._buckets.values() for pair in each.kept())]
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
        self._pool.clear()
        self._loaded = {name: residual.detach().float().clone() for name, residual in residuals.items()}
        self._scale = scale
        self.drain()

    @property
    def scale(self) -> float | None:
        """The loss's scale that residuals belong to; None before the first step."""
        return self._scale

    def stats(self) -> dict[str, float]:
        """Return what was sent since the beginning, and the memory of residuals."""
        return self._achieved.stats(self.steps, sum(each.nbytes for each in self._buckets.values()))


def state_of(compression: Compression | None) -> dict[str, Any]:
    """Return what a state dict holds; nothing without a codec."""
    if compression is None:
        return {"residuals": {}, "loss_scale": None}
    return {"residuals": compression.residuals(), "loss_scale": compression.scale}


def _plain(name: str) -> str:
    """Return a parameter's name without what DDP and torch.compile put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPINGS)


def _are_same(known: list[torch.Tensor], parameters: list[torch.Tensor]) -> bool:
    return len(known) == len(parameters) and all(map(lambda a, b: a is b, known, parameters))


def check_coded(flat: torch.Tensor, group: dist.ProcessGroup, codecs: Codecs) -> bool:
    """Return whether messages travel over gloo, not by a backend's own collectives; refuse what no codec works for."""
    check_size(codecs.push, group.size())
    on_ring = Exchange.of(group).routes.is_on_ring(flat.device)
    if on_ring and flat.device.type != "cpu":
        raise UnsupportedConfigurationError(
            f"expected gradients on a device whose own backend exchanges them, got device={flat.device} on gloo; make "
            "the process group with NCCL, or pass codec=None"
        )
    if not on_ring and not can_encode_on_device(codecs):
        raise UnsupportedConfigurationError(
            f"expected a codec whose messages have one size, got {codecs.push!r} and {codecs.pull!r} for gradients on "
            f"{flat.device}; there Int8() and Half() work, others only on the CPU with gloo"
        )
    if flat.dtype not in _DTYPES:
        raise UnsupportedConfigurationError(
            f"expected gradients of float32, bfloat16 or float16, got dtype={flat.dtype}: residuals and sums "
            "of a codec are float32; pass codec=None"
        )
    return on_ring
