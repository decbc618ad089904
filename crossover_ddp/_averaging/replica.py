"""One rank's model as flat vectors, and what travels of them outside of a backward pass."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Layout, Link
from crossover_ddp._engine.turns import Turn
from crossover_ddp.errors import UnsupportedConfigurationError

from .flat import FlatBlock

OwnPart = Callable[[torch.Tensor], None]


async def late_mean(
    values: torch.Tensor,
    layout: Layout,
    link: Link,
    *,
    owner_step: OwnPart | None = None,
    sent: torch.Tensor | None = None,
) -> None:
    """Replace ``values`` by the mean over the ranks, or by what owners make of that.

    Args:
        values: flat.
        layout: who owns which part.
        link: between the ranks.
        owner_step: changes the own part of the mean in place.
        sent: is taken off the result, see [Note: delta rule] in ``late.py``.
    """
    own = await link.reduce_scatter(values, layout)
    if owner_step is not None:
        await link.compute()
        owner_step(own)
    await link.all_gather(values, layout)
    if sent is not None:
        values.sub_(sent)


def gather(exchange: Exchange, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return ``values`` with each owner's part on all ranks. **Collective**."""
    exchange.begin(lambda link: link.all_gather(values, layout), values.device, "what owners keep").wait()
    return values


def from_first_rank(exchange: Exchange, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as rank 0 has them. **Collective**."""
    return gather(exchange, values, [values.numel()] + [0] * (exchange.size - 1))


class Replica:
    """The model of one rank, and the ranks with which it is averaged.

    Args:
        blocks: of the model.
        group: the ranks.
        turn: given away while training waits.
    """

    def __init__(self, blocks: Sequence[FlatBlock], group: dist.ProcessGroup, turn: Turn | None) -> None:
        self.blocks, self.group, self._turn = blocks, group, turn
        self.exchange = Exchange.of(group)
        self.waited_s = 0.0
        self._unread: deque[tuple[int, torch.cuda.Event, torch.Tensor]] = deque()

    def begin_mean(
        self, values: torch.Tensor, *, owner_step: OwnPart | None = None, sent: torch.Tensor | None = None
    ) -> Trip:
        """Begin `late_mean` of vectors that are in use until it ends; with ``sent`` others may need it longer.

        **Collective**.
        """
        layout = self.exchange.equal_layout(values)
        return self.exchange.begin(
            lambda link: late_mean(values, layout, link, owner_step=owner_step, sent=sent),
            values.device,
            "parameters",
            deferred=sent is not None,
        )

    def wait(self, trip: Trip, *, without_turn: bool = False) -> None:
        """Wait for an exchange, and note for how long; ``without_turn`` a sibling may compute meanwhile."""
        begin_s, turn = time.monotonic(), self._turn if without_turn else None
        if turn is not None:
            turn.release()
        try:
            trip.wait()
        finally:
            self.waited_s += time.monotonic() - begin_s
            if turn is not None:
                turn.request()
                turn.acquire()

    def check_finite(self, values: torch.Tensor, own: Sequence[torch.Tensor], steps: int) -> None:
        """Refuse a mean that is not finite, before it is written anywhere.

        Args:
            values: the mean, or what is made of it.
            own: what this rank has sent.
            steps: how many were done.
        """
        if not all_finite([values]):
            self._refuse(steps, is_guilty=not all_finite(own))

    def finite_or_zero(self, values: torch.Tensor, sent: torch.Tensor, steps: int) -> torch.Tensor:
        """Return what may be added of a late mean; see `check_finite`.

        On a device the host does not wait for it: what is not finite becomes zeros, and is refused at a later step.
        """
        if values.device.type == "cpu":
            self.check_finite(values, [sent], steps)
            return values
        while self._unread and self._unread[0][0] < steps:
            at, event, told = self._unread.popleft()
            event.synchronize()
            if not told[0]:
                self._refuse(at, is_guilty=not told[1])
        fine = torch.stack([torch.stack(torch.aminmax(each)).isfinite().all() for each in (values, sent)])
        told = torch.empty(2, dtype=torch.bool, pin_memory=True)
        told.copy_(fine, non_blocking=True)
        self._unread.append((steps, torch.cuda.current_stream(values.device).record_event(), told))
        return torch.where(fine[0], values, 0)

    def _refuse(self, steps: int, *, is_guilty: bool) -> NoReturn:
        guilty = "this rank's are among them" if is_guilty else "see the other ranks"
        raise UnsupportedConfigurationError(
            f"expected finite parameters on all ranks, got infinities or NaN in the mean after step {steps} "
            f"({guilty}; this is rank {self.exchange.rank}); no rank has taken the mean over. Lower the learning rate, "
            "clip, or use GradScaler, and restart from a checkpoint"
        )

    def take_mean(self, steps: int) -> None:
        """Replace all parameters and buffers by their mean over the ranks. **Collective**."""
        sent = [(block, values, self.begin_mean(values)) for block, values in self.copy()]
        for block, values, trip in sent:
            trip.wait()
            self.check_finite(values, block.pieces(block.whole), steps)
        self.write([(block, values) for block, values, _ in sent])

    def copy(self) -> list[tuple[FlatBlock, torch.Tensor]]:
        """Return all blocks with copies of their values."""
        return [(block, block.copy()) for block in self.blocks]

    def write(self, values: Sequence[tuple[FlatBlock, torch.Tensor]]) -> None:
        """Write into all blocks what `copy` has returned, or what was made of it."""
        for block, each in values:
            block.unpack(block.whole, each)


class Rule:
    """What happens to the parameters between two steps. All methods run on the training thread.

    ``settings``: arguments that must be the same on all ranks. ``steps_together``: all ranks call for a mean after as
    many steps. ``has_local_steps``: any step, however late, uses this rank's gradients alone.
    """

    settings: Mapping[str, object]
    steps_together = has_local_steps = True
    replica: Replica

    def is_local(self, steps: int) -> bool:
        """Tell whether the step after ``steps`` of them uses this rank's gradients alone."""
        return True

    def begin(self, replica: Replica) -> None:
        """The first local step begins; the parameters are the same on all ranks. **Collective**."""
        self.replica = replica

    def act(self, steps: int) -> None:
        """``steps`` backward passes are done, and their updates."""
        raise NotImplementedError

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """Apply what is in flight, and let nothing more be exchanged during the block. **Collective**.

        Args:
            leave: apply it once more when it is due: the caller puts the parameters back.
        """
        yield

    def kept(self) -> dict[str, Any]:
        """Return what is kept beside the parameters, by name. **Collective**."""
        raise NotImplementedError

    def load(self, kept: dict[str, Any]) -> None:
        """Take it over when the first local step begins."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Return counters."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads, let memory go."""


def all_finite(vectors: Sequence[torch.Tensor]) -> bool:
    """Tell whether all elements are finite numbers: one pass, no intermediate results, since training waits for it.

    NaN is the least and the greatest of elements that contain it. A million elements take 0.15 ms on one core, where
    ``isfinite(…).all()`` takes 8 ms and the norm of the greatest magnitude 19 ms.
    """
    extremes = [extreme for vector in vectors if vector.numel() for extreme in torch.aminmax(vector)]
    return all(bool(extreme.isfinite()) for extreme in extremes)
