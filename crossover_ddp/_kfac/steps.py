"""K-FAC's backward passes on the hook's thread: what each bucket sends, what each step needs before and after."""

import functools
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossover_ddp._ddp.checks import flat_gradients, model_of
from crossover_ddp._ddp.contents import Content, contents_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import turns_disabled

from .bucket_layer import BucketLayer
from .factor_messages import Due
from .factors import multiplied
from .journeys import Step, precondition
from .layers import unwrapped
from .packed import Packed
from .preconditioner import Preconditioner
from .settings import HyperNow
from .setup import KFACSetup
from .waiting import WaitingDirections

_MOST_GROUPS: Final = 16  # of late factors; each costs messages


class Steps:
    """Packs each bucket, and counts steps.

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
        self._free: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self.is_deferred = False
        self.steps = 0

    def use(self, preconditioner: Preconditioner) -> None:
        """Work with ``preconditioner`` from now on, between two steps."""
        self._preconditioner = preconditioner
        self._traffic = preconditioner.traffic
        self._step: Step | None = None
        self._is_refused = False
        self._taken: list[Due] = []
        self._bits: Mapping[int, Tensor] = {}
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

    @property
    def nbytes(self) -> int:
        """Memory of the buffers that travel."""
        return sum(buffer.nbytes for buffer in self._free.values())

    # --- a step ----------------------------------------------------------------------------------------------

    def prepare_step(self, after: Gate | None = None) -> None:
        """Capture what the next step needs; send what it builds on ``after`` the former one's gradients."""
        now, traffic = self._now(), self._traffic
        self._preconditioner.capture.active = now.takes_factors and not turns_disabled()
        traffic.trails = now.takes_factors and not now.inverts and traffic.can_trail
        traffic.leave(after, all_groups=now.takes_factors or now.inverts)

    def _now(self) -> HyperNow:
        now = self._setup.hypers.at(self.steps)
        return now._replace(takes_factors=False, inverts=False) if self._closed else now

    @torch.no_grad()
    def enter(self, bucket: dist.GradBucket) -> None:
        """Prepare the exchange of a backward pass, if one begins with ``bucket``. May be called again."""
        if bucket.index():
            return
        if self._step is not None:
            self._step.refuse()  # of a pass that did not end
        self._step, self._is_refused, now = None, False, self._now()
        self._preconditioner.capture.begin_exchange()
        if now.takes_factors and not self._traffic.trails:
            self._traffic.send_rest()

    def refuse(self, bucket: dist.GradBucket) -> None:
        """Note that ``bucket`` is not exchanged: nobody waits for it."""
        self._is_refused = True
        if self._step is not None:
            self._step.refuse()
            if bucket.is_last():
                self._step.end()

    def end(self) -> None:
        """The step's last bucket is under way, or refused."""
        ended, self._step, after = self._step, None, None
        if ended is not None:
            after = ended.written
            self._waiting.wait({self._layer_of[parameter] for parameter in ended.waiting})
            self._bits = ended.bits
            self._traffic.end_step()
            if ended.now.takes_factors and self._traffic.trails:
                self._traffic.hold(self._taken, min(ended.now.factor_steps, _MOST_GROUPS), ended.now.decay)
        self._taken, self._is_refused = [], False
        self.steps += 1
        self._preconditioner.capture.begin_step()
        self.prepare_step(after)

    def _begin(self, device: torch.device) -> Step:
        now, setup, owned = self._now(), self._setup, self._preconditioner
        self._taken = []
        step = Step(
            now,
            self._learning_rates(now.kl_clip is not None),
            setup.loss_scale(),
            compares=bool(owned.spread.chosen),
            former_bits=self._bits,
            device=device,
        )
        if self._is_refused:
            step.refuse()
        return step

    # --- a bucket --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self, bucket: dist.GradBucket) -> Packed:
        """Pack what travels in the bucket's place, and send the factors of its layers. Raises what refuses it."""
        # Its own version counter: the user's changes show in the gradients', ours do not.
        buffer = flat_gradients(bucket).data
        if self._step is None:
            self._step = self._begin(buffer.device)
        step, traffic = self._step, self._traffic
        contents = [each._replace(gradient=each.gradient.data) for each in contents_of(bucket, buffer)]
        self._check_known(bucket, contents)
        self._waiting.check([self._layer_of[id(p)] for p, *_ in contents if id(p) in self._layer_of])
        layers, passing, elsewhere = self._completed(step, contents)
        if bucket.is_last() and not step.is_refused:
            self._check_whole(step)
        if step.now.takes_factors and not self._setup.local:
            due = [traffic.taken(layer.index) for layer in layers]
            if traffic.trails:
                self._taken += due
            elif due:
                traffic.send(due, step.now.decay)
        with torch.autocast(buffer.device.type, enabled=False):  # backward may have been called under it
            return Packed(
                self._preconditioner,
                layers,
                buffer,
                contents,
                passing,
                take=functools.partial(self._take, bucket.index(), buffer),
                give=functools.partial(self._give, bucket.index()),
                bits=step.bits,
                elsewhere=elsewhere,
            )

    def way(self, packed: Packed, bucket: Bucket, link: Link) -> Coroutine[Any, Any, None]:
        """Return the journey of what was packed; nothing raises any more."""
        step = self._step
        assert step is not None
        step.expect()
        if bucket.last:
            step.end()
        bucket.keeps_turn = step.now.inverts and self._setup.keeps_turn
        return precondition(packed, step, bucket, link)

    def _take(self, bucket: int, like: Tensor, numel: int) -> Tensor:
        """Lend the memory of what travels for a bucket."""
        found = self._free.pop((bucket, like.dtype, like.device), None)
        return like.new_empty(numel) if found is None or found.numel() != numel else found

    def _give(self, bucket: int, flat: Tensor) -> None:
        self._free[bucket, flat.dtype, flat.device] = flat

    def _completed(
        self, step: Step, contents: Sequence[Content]
    ) -> tuple[list[BucketLayer], tuple[Span, ...], list[Gate]]:
        """Return the layers that this bucket completes, what passes through, and gates of layers in a later one."""
        complete, passing, begun = [], [], set()
        for parameter, gradient, span in contents:
            index = self._layer_of.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            step.waiting[id(parameter)] = gradient
            begun.add(index)
            if all(id(each) in step.waiting for each in self._setup.layers[index].parameters().values()):
                complete.append(self._bucket_layer(step, index))
                begun.remove(index)
        return complete, tuple(passing), [step.whole.setdefault(index, Gate()) for index in sorted(begun)]

    def _bucket_layer(self, step: Step, index: int) -> BucketLayer:
        layer = self._setup.layers[index]
        weight = step.waiting[id(layer.weight)]
        takes_own = step.now.takes_factors and self._setup.local and index in self._preconditioner.curvatures
        lr = step.rates.get(id(layer.weight), 0.0)  # without a clip it is not read
        bias_lr = lr if layer.bias is None else step.rates.get(id(layer.bias), 0.0)
        spread, sends_solver = self._preconditioner.spread.of(index, renewed=step.now.inverts)
        if bias_lr != lr:  # the bias has no part of its own in the rows' share of the clip's sum
            spread = None
        return BucketLayer(
            index,
            layer.shape,
            weight.mT if layer.shape.transposed else weight,
            None if layer.bias is None else step.waiting[id(layer.bias)],
            lr=lr,
            bias_lr=bias_lr,
            local=self._local(index) if takes_own else None,
            spread=spread,
            sends_solver=sends_solver,
            whole=step.whole.get(index),
        )

    def _local(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Return this rank's own A and G of a layer that it owns; None if it has not both."""
        capture = self._preconditioner.capture
        a, g = capture.take_input(index), capture.take_output(index)
        return None if a is None or g is None else (multiplied(a), multiplied(g))

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

    def _check_whole(self, step: Step) -> None:
        """Refuse a layer of which only a part has come: neither a plain gradient nor a direction would be exchanged."""
        for layer in self._setup.layers:
            named = layer.parameters()
            missing = [name for name, parameter in named.items() if id(parameter) not in step.waiting]
            if 0 < len(missing) < len(named):
                raise UnsupportedConfigurationError(
                    f"expected gradients of all parameters of K-FAC's layers, got none of {missing[0]}, which was "
                    "frozen since the KFACState was made, or which DDP ignores; make the KFACState after that, or name "
                    "the layer in skip="
                )
