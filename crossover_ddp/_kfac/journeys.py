"""The journey of a bucket of K-FAC: what travels, when, and who waits for whom.

[Note: who waits for whom] An inversion waits for the factors that left before it, and these for those before them: a
running mean is not commutative. No direction is written before the KL clip is known, for which all of the step's
buckets must have been worked on. A layer whose bias and weight come in two buckets travels with the last of them; the
other one is whole when that has been written. These waits form no circle: factors wait for buckets of former steps
only, owners' work for factors, the clip for the owners' work, buckets for the clip and for later buckets.

[Note: equal bits] The last product of a spread layer is every rank's own. Should one round it otherwise than the others
one day, since its number of threads has changed, say, replicas would drift apart in silence. So each rank tells the sum
of the directions' bits, as whole numbers, with its share of the KL clip's sum in the next step, and all compare them.
"""

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
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import turns_disabled

from .capture import WaitingDirections
from .factor_traffic import Factor
from .layers import unwrapped
from .packed import Packed, Rows, Whole
from .preconditioner import KFACSetup, Preconditioner
from .settings import HyperNow

_MOST_GROUPS: Final = 16  # of late factors; each costs messages


async def precondition(packed: Packed, step: "Step", bucket: Bucket, link: Link) -> None:
    """Average each layer's gradient at its owner, who preconditions it, and copy the direction to all."""
    await link.reduce_scatter(packed.flat, packed.layout)

    await link.compute()
    for layer in packed.layers:
        if layer.needs_solver(step.now):
            await packed.factors
        step.terms[layer.index] = packed.work(layer, step.now)
    step.worked.passes()
    if bucket.last:
        await step.worked
        await step.agree(link)
        await step.clip.passed_first()

    if not bucket.deferred or await bucket.summed():
        await link.all_gather(packed.flat, packed.layout)
        await packed.share_solvers(link)
        await step.clip
        for gate in packed.elsewhere:
            await gate
        if not step.is_refused:
            packed.unload(step.scale)
    packed.done()
    step.written.passes()


class Everyone(Gate):
    """Opened when all who were expected have passed, and nobody else is."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 1  # until `passes` is called for the backward pass itself

    def expect(self) -> None:
        """Expect one more."""
        with self._lock:
            self._left += 1

    def passes(self) -> None:
        """Let one pass."""
        with self._lock:
            self._left -= 1
            is_last = self._left <= 0
        if is_last:
            self.open()


class Step:
    """One backward pass.

    Args:
        now: what is due, the same on all ranks.
        rates: learning rates by the parameters' ids, if there is a clip.
        loss_scale: undone in the KL clip.
        former_bits: those of the step before; None: the ranks compare none, see [Note: equal bits].
        device: of the gradients.

    Attributes:
        waiting: gradients of layers that are not complete yet, by the parameters' ids.
        whole: by layer of which a part waits in an earlier bucket: opened when all of it is written.
        taken: factors that leave behind the gradients, by layer.
        terms: of the KL clip's sum, by layer: added in the order of layers, whatever the order of buckets.
        bits: of this step's directions of spread layers, when they have come back.
        worked: opened when the owners' work on all buckets is done.
        clip: opened when ``scale`` is known, by which all directions are scaled; None: by nothing.
        written: opened when all buckets are written.
        is_refused: whether a bucket was refused: nothing is written any more.
    """

    def __init__(
        self,
        now: HyperNow,
        rates: Mapping[int, float],
        loss_scale: float,
        former_bits: Mapping[int, Tensor] | None,
        device: torch.device,
    ) -> None:
        self.now, self.rates, self._loss_scale = now, rates, loss_scale
        self._former_bits, self._device = former_bits, device
        self.waiting: dict[int, Tensor] = {}
        self.whole: dict[int, Gate] = {}
        self.taken: list[list[Factor]] = []
        self.terms: dict[int, Tensor | None] = {}
        self.bits: dict[int, Tensor] = {}
        self.worked, self.written, self.clip = Everyone(), Everyone(), Gate()
        self.scale: Tensor | None = None
        self.is_refused = False

    def expect(self) -> None:
        """Expect one more bucket."""
        self.worked.expect()
        self.written.expect()

    def end(self) -> None:
        """Expect no more buckets. May be called again."""
        self.worked.passes()
        self.written.passes()

    def refuse(self) -> None:
        """Let nobody wait for a bucket that does not come."""
        self.is_refused = True
        for gate in (self.worked, self.clip, *self.whole.values()):
            gate.open()

    async def agree(self, link: Link) -> None:
        """Find the scale, from the sums of all ranks' terms; compare bits."""
        if self.is_refused or (self._former_bits is None and self.now.kl_clip is None):
            return
        # In the order of layers, so that a share is rounded alike whatever the buckets.
        terms = self._sum(
            {index: term for index, term in self.terms.items() if term is not None}, torch.float64
        )
        bits = self._sum(self._former_bits or {}, torch.int64)
        own = torch.stack([terms, bits.view(torch.float64)])
        everyone, counts = own.new_empty(2 * link.size), [2] * link.size
        await link.all_to_all(own.repeat(link.size), counts, everyone, counts)
        table = everyone.view(link.size, 2)
        table[link.rank] = own
        kl_sums, bits = table[:, 0], table[:, 1].contiguous().view(torch.int64)
        # On a GPU the host waits for it, so only where it does so anyway.
        if (self.now.inverts or not bits.is_cuda) and bool((bits != bits[0]).any()):
            raise ExchangeError(
                "expected the same directions of layers that are spread on all ranks, got other bits on some; restart "
                "the job from a checkpoint, with the same processor, torch and number of threads for all ranks"
            )
        if self.now.kl_clip is not None:
            # In the order of ranks, so that all get the same. Nothing to scale by where all gradients are zero: min(1,
            # inf).
            total = kl_sums.sum().abs() / self._loss_scale**2
            self.scale = (self.now.kl_clip / total).sqrt().clamp(max=1.0)

    def _sum(self, by_layer: Mapping[int, Tensor], dtype: torch.dtype) -> Tensor:
        found = [each for _, each in sorted(by_layer.items())]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=dtype, device=self._device)


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
        self._named = [layer.parameters() for layer in setup.layers]
        self._layer_of = {
            id(each): index for index, named in enumerate(self._named) for each in named.values()
        }
        self._waiting = WaitingDirections(setup.layers)
        self._free: dict[int, Tensor] = {}
        self.is_deferred = False
        self.steps = 0

    def use(self, preconditioner: Preconditioner) -> None:
        """Work with ``preconditioner`` from now on, between two steps."""
        self._preconditioner = preconditioner
        self._traffic = preconditioner.traffic
        self._step: Step | None = None
        self._is_refused = False
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
                self._traffic.hold(ended.taken, min(ended.now.factor_steps, _MOST_GROUPS), ended.now.decay)
        self._is_refused = False
        self.steps += 1
        self._preconditioner.capture.begin_step()
        self.prepare_step(after)

    def _begin(self, device: torch.device) -> Step:
        now, bits = self._now(), self._bits if self._preconditioner.spread else None
        rates = self._learning_rates(now.kl_clip is not None)
        step = Step(now, rates, self._setup.loss_scale(), bits, device)
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
        if step.now.takes_factors and layers:
            taken = [traffic.taken(layer.index) for layer in layers]
            if traffic.trails:
                step.taken += taken
            else:
                traffic.send([factor for of_layer in taken for factor in of_layer], step.now.decay)
        return Packed(
            self._preconditioner,
            layers,
            buffer,
            contents,
            passing,
            number=bucket.index(),
            free=self._free,
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

    def _completed(
        self, step: Step, contents: Sequence[Content]
    ) -> tuple[list[Whole | Rows], tuple[Span, ...], list[Gate]]:
        """Return the layers that this bucket completes, what passes through, and gates of layers in a later one."""
        complete, passing, begun = [], [], set()
        for parameter, gradient, span in contents:
            index = self._layer_of.get(id(parameter))
            if index is None:
                passing.append(span)
                continue
            step.waiting[id(parameter)] = gradient
            begun.add(index)
            if all(id(each) in step.waiting for each in self._named[index].values()):
                complete.append(self._bucket_layer(step, index))
                begun.remove(index)
        return complete, tuple(passing), [step.whole.setdefault(index, Gate()) for index in sorted(begun)]

    def _bucket_layer(self, step: Step, index: int) -> Whole | Rows:
        owned, layer, solver = self._preconditioner, self._setup.layers[index], None
        weight = step.waiting[id(layer.weight)]
        lr = step.rates.get(id(layer.weight), 0.0)  # without a clip it is not read
        bias_lr = lr if layer.bias is None else step.rates.get(id(layer.bias), 0.0)
        if not step.now.inverts:
            solver = owned.solvers.get(index)
        common: dict[str, Any] = {
            "index": index,
            "shape": layer.shape,
            "weight": weight.mT if layer.shape.transposed else weight,
            "bias": None if layer.bias is None else step.waiting[id(layer.bias)],
            "lr": lr,
            "bias_lr": bias_lr,
            "whole": step.whole.get(index),
        }
        # A bias of another rate has no part of its own in the rows' share of the clip's sum.
        if solver is not None and bias_lr == lr:
            size = self._setup.world_size
            return Rows(**common, solver=solver, rank=self._setup.rank, size=size, bits=step.bits)
        sends = index in owned.spread and solver is None
        curvature = owned.curvatures.get(index)
        return Whole(**common, owner=owned.owners[index], curvature=curvature, sends_solver=sends)

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
        for named in self._named:
            missing = [name for name, parameter in named.items() if id(parameter) not in step.waiting]
            if 0 < len(missing) < len(named):
                raise UnsupportedConfigurationError(
                    f"expected gradients of all parameters of K-FAC's layers, got none of {missing[0]}, which was "
                    "frozen since the KFACState was made, or which DDP ignores; make the KFACState after that, or name "
                    "the layer in skip="
                )
