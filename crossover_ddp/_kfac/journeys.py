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

from collections.abc import Mapping

import torch
from torch import Tensor

from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import ExchangeError

from .packed import Packed
from .settings import HyperNow


async def precondition(packed: Packed, step: "Step", bucket: Bucket, link: Link) -> None:
    """Average each layer's gradient at its owner, who preconditions it, and copy the direction to all."""
    await link.reduce_scatter(packed.flat, packed.layout)

    await link.compute()
    for layer in packed.layers:
        if layer.needs_solver(step.now):
            await packed.factors
        step.terms[layer.layer.index] = packed.work(layer, step.now)
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
        compares: whether the ranks compare bits, see [Note: equal bits].
        former_bits: those of the step before.
        device: of the gradients.

    Attributes:
        waiting: gradients of layers that are not complete yet, by the parameters' ids.
        whole: by layer of which a part waits in an earlier bucket: opened when all of it is written.
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
        *,
        compares: bool,
        former_bits: Mapping[int, Tensor],
        device: torch.device,
    ) -> None:
        self.now, self.rates, self._loss_scale = now, rates, loss_scale
        self._compares, self._former_bits, self._device = compares, former_bits, device
        self.waiting: dict[int, Tensor] = {}
        self.whole: dict[int, Gate] = {}
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
        if self.is_refused or not (self._compares or self.now.kl_clip is not None):
            return
        own = torch.stack([self._kl_sum(), self._sum_of_bits().view(torch.float64)])
        everyone, counts = own.new_empty(2 * link.size), [2] * link.size
        await link.all_to_all(own.repeat(link.size), counts, everyone, counts)
        table = everyone.view(link.size, 2)
        table[link.rank] = own
        kl_sums, bits = table[:, 0], table[:, 1].contiguous().view(torch.int64)
        # On a GPU the host waits for it, so only where it does so anyway.
        looks = self._compares and (self.now.inverts or not bits.is_cuda)
        if looks and bool((bits != bits[0]).any()):
            raise ExchangeError(
                "expected the same directions of layers that are spread on all ranks, got other bits on some; restart "
                "the job from a checkpoint, with the same processor, torch and number of threads for all ranks"
            )
        if self.now.kl_clip is not None:
            # In the order of ranks, so that all get the same. Nothing to scale by where all gradients are zero: min(1,
            # inf).
            total = kl_sums.sum().abs() / self._loss_scale**2
            self.scale = (self.now.kl_clip / total).sqrt().clamp(max=1.0)

    def _kl_sum(self) -> Tensor:
        """Return this rank's share, rounded alike whatever the buckets."""
        terms = [term for _, term in sorted(self.terms.items()) if term is not None]
        none = torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(terms).sum() if terms else none

    def _sum_of_bits(self) -> Tensor:
        bits = [each for _, each in sorted(self._former_bits.items())]
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        return torch.stack(bits).sum() if bits else none
