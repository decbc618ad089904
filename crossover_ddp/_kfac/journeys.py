"""The journey of a bucket of K-FAC: what travels, when, and who waits for whom.

[Note: who waits for whom] An inversion waits for the factors that left before it, and these for those before them: a
running mean is not commutative. No direction is written before the KL clip is known, for which all of the step's
buckets must have been worked on. A layer whose bias and weight come in two buckets travels with the last of them; the
other one is whole when that has been written. These waits form no circle: factors wait for buckets of former steps
only, owners' work for factors, the clip for the owners' work, buckets for the clip and for later buckets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.links import Link

from .factor_traffic import Factor
from .packed import Packed
from .settings import HyperNow


async def precondition(packed: Packed, step: "Step", bucket: Bucket, link: Link) -> None:
    """Average each layer's gradient at its owner, who preconditions it, and copy the direction to all."""
    await link.reduce_scatter(packed.flat, packed.layout)

    await link.compute()
    for layer in packed.layers:
        if layer.needs_solver(step.now):
            await packed.factors
        if (term := packed.work(layer, step.now)) is not None:
            step.terms[layer.index] = term
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


@dataclass(eq=False)
class Step:
    """One backward pass.

    Args:
        now: what is due, the same on all ranks.
        rates: learning rates by the parameters' ids, if there is a clip.
        loss_scale: undone in the KL clip.
        device: of the gradients.
        waiting: gradients of layers that are not complete yet, by the parameters' ids.
        whole: by layer of which a part waits in an earlier bucket: opened when all of it is written.
        taken: factors that leave behind the gradients, by layer.
        terms: of the KL clip's sum, by layer: added in the order of layers, whatever the order of buckets.
        worked: opened when the owners' work on all buckets is done.
        written: opened when all buckets are written.
        clip: opened when ``scale`` is known, by which all directions are scaled; None: by nothing.
        is_refused: whether a bucket was refused: nothing is written any more.
    """

    now: HyperNow
    rates: Mapping[int, float]
    loss_scale: float
    device: torch.device
    waiting: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, Gate] = field(default_factory=dict)
    taken: list[list[Factor]] = field(default_factory=list)
    terms: dict[int, Tensor] = field(default_factory=dict)
    worked: Everyone = field(default_factory=Everyone)
    written: Everyone = field(default_factory=Everyone)
    clip: Gate = field(default_factory=Gate)
    scale: Tensor | None = None
    is_refused: bool = False

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
        """Find the scale, from the sums of all ranks' terms."""
        if self.is_refused or self.now.kl_clip is None:
            return
        terms = [term for _, term in sorted(self.terms.items())]  # rounded alike whatever the buckets
        own = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device=self.device)
        sums, counts = own.new_empty(link.size), [1] * link.size
        await link.all_to_all(own.repeat(link.size), counts, sums, counts)
        sums[link.rank] = own
        # In the order of ranks, so that all get the same. Where all gradients are zero the scale is min(1, inf).
        total = sums.sum().abs() / self.loss_scale**2
        self.scale = (self.now.kl_clip / total).sqrt().clamp(max=1.0)
