"""K-FAC's backward passes: what each of DDP's buckets sends, and what each step needs before and after."""

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossover_ddp._ddp.checks import flat_gradients, model_of
from crossover_ddp._exchange.contents import Content, contents_of
from crossover_ddp._exchange.layout import Span
from crossover_ddp._exchange.transfer import Payload
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import turns_disabled

from .bucket_layer import BucketLayer
from .layers import Layer, unwrapped
from .packing import TravellingFactors
from .payload import BucketPayload, KFACRound
from .preconditioner import Preconditioner
from .settings import HyperNow
from .setup import KFACSetup
from .waiting import WaitingDirections

_MOST_GROUPS: Final = 16  # of late factors; each costs a message


class Rounds:
    """Makes the payload of each bucket; counts steps.

    Args:
        setup: of the state.
        model: that it was made of; held weakly.
        learning_rates: returns the present ones by the parameters' ids; its argument says whether there is a KL clip.
        state: that the hook is registered with.
    """

    def __init__(
        self,
        setup: KFACSetup,
        model: nn.Module,
        learning_rates: Callable[[bool], dict[int, float]],
        state: object,
    ) -> None:
        self._setup = setup
        self._network = weakref.ref(unwrapped(model))
        self._learning_rates = learning_rates
        self._state = weakref.ref(state)
        parts = [
            (index, each) for index, layer in enumerate(setup.layers) for each in (layer.weight, layer.bias)
        ]
        self._layer_of = {id(parameter): index for index, parameter in parts if parameter is not None}
        self._waiting = WaitingDirections(setup.layers)
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self.is_deferred = False
        self.steps = 0

    def use(self, preconditioner: Preconditioner) -> None:
        """Work with ``preconditioner`` from now on, between two steps."""
        self._preconditioner = preconditioner
        self._traffic = preconditioner.traffic
        self._traffic.steps_apart = self.is_deferred
        self._round: KFACRound | None = None
        self._taken: list[TravellingFactors] = []
        self._bits: Mapping[int, Tensor] = {}
        self._lrs: dict[int, float] = {}
        self._model_seen = False
        self._closed = False
        preconditioner.capture.active = not turns_disabled()

    def close(self) -> None:
        """Take no factors and make no solvers from now on."""
        self._closed = True
        self._traffic.trails = False

    def defer(self, state: object) -> None:
        """Let buckets come back late, for ``state``, with which the model's hook is registered."""
        self.is_deferred, self._state = True, weakref.ref(state)
        self._traffic.steps_apart = True

    @property
    def nbytes(self) -> int:
        """Memory of the buffers that travel."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    # --- a step ----------------------------------------------------------------------------------------------

    def prepare_step(self) -> None:
        """Capture what the next step needs; have on the way what it builds on."""
        now, traffic = self._now(), self._traffic
        self._preconditioner.capture.active = now.takes_factors and not turns_disabled()
        traffic.trails = now.takes_factors and not now.inverts and traffic.can_trail
        traffic.leave(all_groups=now.takes_factors or now.inverts)

    def _now(self) -> HyperNow:
        now = self._setup.hypers.at(self.steps)
        return now._replace(takes_factors=False, inverts=False) if self._closed else now

    def end(self, wait: Callable[[], None] | None = None) -> Mapping[int, Collection[int]]:
        """The step's last bucket was handed out, or refused.

        Args:
            wait: blocks until it has come back; None if backward does.

        Returns:
            By the number of a bucket, those of later ones that it needs, see `KFACRound`.
        """
        ended, self._round = self._round, None
        if self.is_deferred and wait is None:  # a bucket was refused, others may still travel
            self._buffers.clear()
        if ended is not None:
            self._waiting.wait({self._layer_of[parameter] for parameter in ended.waiting})
            self._bits = ended.bits
            self._traffic.end_step()
            if ended.counts is not None:
                self._traffic.counts_come(lambda: ended.greatest_counts, wait)
            if ended.trails:
                self._traffic.hold(self._taken, min(ended.now.factor_steps, _MOST_GROUPS), ended.now.decay)
        self._taken = []
        self.steps += 1
        self._preconditioner.capture.begin_step()
        self.prepare_step()
        return {} if ended is None else ended.brought_by

    def _begin(self) -> KFACRound:
        now, setup, owned = self._now(), self._setup, self._preconditioner
        owned.capture.begin_exchange()
        self._lrs = self._learning_rates(now.kl_clip is not None)
        self._taken = []
        trails = now.takes_factors and self._traffic.trails
        if now.takes_factors and not trails:
            self._traffic.send_rest()
        lacks_solver = any(each.solver is None for each in owned.curvatures.values())
        if self.is_deferred and ((now.takes_factors and not trails) or now.inverts or lacks_solver):
            # Owners' steps do not come behind what trails: that is the gatherer's order, not the stepper's.
            self._traffic.arrive()
        return KFACRound(owned, now, setup.loss_scale(), trails, self._bits)

    # --- a bucket --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def payload(self, bucket: dist.GradBucket) -> Payload:
        """Return what travels in the bucket's place."""
        # Its own version counter: the user's changes show in the gradients', ours do not.
        buffer = flat_gradients(bucket).data
        if self._round is None or bucket.index() == 0:
            if self._round is not None:  # a backward that did not end: its buckets may still travel
                self._buffers.clear()
            self._round = self._begin()
        if not self._round.trails:
            self._taken = []  # of a bucket that was refused
        contents = [each._replace(gradient=each.gradient.data) for each in contents_of(bucket, buffer)]
        self._check_known(bucket, contents)
        self._waiting.check([self._layer_of[id(p)] for p, *_ in contents if id(p) in self._layer_of])
        layers, passing = self._completed(self._round, contents, bucket.index())
        if bucket.is_last() and len(self._round.payloads) == bucket.index():  # and no bucket was refused
            self._check_whole(self._round)
        if bucket.is_last() and self._round.now.takes_factors:
            self._round.counts = self._traffic.own_counts()
        take = functools.partial(self._buffer, buffer, bucket.index())
        made = BucketPayload(self._round, layers, buffer, passing, last=bucket.is_last(), take=take)
        clips = made.has_message and self._round.now.kl_clip is not None
        for earlier in range(bucket.index()) if clips else ():
            self._round.brought_by.setdefault(earlier, set()).add(bucket.index())
        if self._taken and not self._round.trails:
            self._traffic.add(self._taken, self._round.now.decay)
            self._taken = []
        weights = {layer.index: self._setup.layers[layer.index].weight for layer in layers}
        return made.payload(functools.partial(made.matrices, weights, contents))

    def _buffer(self, like: Tensor, bucket: int, numel: int) -> Tensor:
        """Lend the memory of what travels for a bucket."""
        key = (bucket, like.dtype, like.device)
        lent = self._buffers.get(key)
        if lent is None or lent.numel() != numel:
            lent = self._buffers[key] = like.new_empty(numel)
        return lent

    def _completed(
        self, round: KFACRound, contents: Sequence[Content], bucket: int
    ) -> tuple[list[BucketLayer], tuple[Span, ...]]:
        """Return the layers that this bucket completes, and the spans that pass through."""
        complete, passing = [], []
        for parameter, gradient, span in contents:
            index = self._layer_of.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            layer = self._setup.layers[index]
            round.waiting[id(parameter)] = gradient
            round.bucket_of[id(parameter)] = bucket
            others = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
            if all(id(other) in round.waiting for other in others):
                complete.append(self._bucket_layer(round, index, layer))
                for earlier in {round.bucket_of[id(other)] for other in others} - {bucket}:
                    round.brought_by.setdefault(earlier, set()).add(bucket)
        return complete, tuple(passing)

    def _bucket_layer(self, round: KFACRound, index: int, layer: Layer) -> BucketLayer:
        weight = round.waiting[id(layer.weight)]
        local = None
        if round.now.takes_factors and not self._setup.local:
            self._taken.append(self._traffic.taken(index))
        elif round.now.takes_factors and index in self._preconditioner.curvatures:
            local = self._local(index)
        lr = self._lrs.get(id(layer.weight), 0.0)  # without a clip it is not read
        bias_lr = lr if layer.bias is None else self._lrs.get(id(layer.bias), 0.0)
        spread, sends_solver = self._preconditioner.spread.of(index, renewed=round.now.inverts)
        if bias_lr != lr:  # the bias has no part of its own in the rows' share of the clip's sum
            spread = None
        return BucketLayer(
            index,
            layer.shape,
            weight.mT if layer.shape.transposed else weight,
            None if layer.bias is None else round.waiting[id(layer.bias)],
            lr=lr,
            bias_lr=bias_lr,
            local=local,
            spread=spread,
            sends_solver=sends_solver,
        )

    def _local(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return this rank's own A and G of a layer that it owns; None if it has not both."""
        capture = self._preconditioner.capture
        a, g = capture.take_input(index), capture.take_output(index)
        return None if a is None or g is None else (a, g)

    def _check_known(self, bucket: dist.GradBucket, contents: Sequence[Content]) -> None:
        network = self._network()
        if network is None or bucket.index() or self._model_seen:
            return
        known = {id(parameter) for parameter in network.parameters()}
        if any(id(content.parameter) not in known for content in contents):
            raise UnsupportedConfigurationError(
                "expected the hook on the model that KFACState was made of, got a bucket with other parameters; "
                "make a KFACState for each model"
            )
        self._traffic.adopt(model_of(bucket, state=self._state()))
        self._model_seen = True

    def _check_whole(self, round: KFACRound) -> None:
        """Refuse a layer of which only a part has come: neither a plain gradient nor a direction would be exchanged."""
        for layer in self._setup.layers:
            named = layer.parameters()
            missing = [name for name, parameter in named.items() if id(parameter) not in round.waiting]
            if 0 < len(missing) < len(named):
                raise UnsupportedConfigurationError(
                    f"expected gradients of all parameters of K-FAC's layers, got none of {missing[0]}, which was "
                    "frozen since the KFACState was made, or which DDP ignores; make the KFACState after that, or name "
                    "the layer in skip="
                )
