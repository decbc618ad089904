"""The job's turn on its devices: siblings compute while this job's last bucket travels."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError

from .buckets import Bucket
from .journeys import GradientFuture
from .links import Layout, Link, LinkAround


class Turn(Protocol):
    """What a mutex offers to the engine. No method raises."""

    @property
    def ranks(self) -> Sequence[int] | None:
        """The ranks of the default group that take the turn together, empty for this process alone; None: any."""

    @property
    def shared(self) -> bool:
        """Whether a sibling was on this rank's device when the turn began."""

    @property
    def mode(self) -> str:
        """How the job computes beside its siblings, for a timeline."""

    def release(self) -> None:
        """Give the turn away: the step's compute is launched. Never blocks.

        Called on the hook's thread, or, if the last bucket ``keeps_turn``, on that of its owners' work.
        """

    def request(self) -> None:
        """Join the queue early: the last bucket is half-way. Called on a thread of the engine."""

    def acquire(self) -> None:
        """Take the turn again: the step's buckets are complete. Called on a thread that may block.

        Where nobody shares the device it may still be busy with them.
        """


def check_turn(turn: Turn | None, process_group: dist.ProcessGroup | None) -> None:
    """Raise unless the ranks of the group take the turn together, and no others: these would wait for ours."""
    if turn is None or turn.ranks is None or process_group is None:
        return
    own, theirs = sorted(dist.get_process_group_ranks(process_group)), sorted(turn.ranks)
    if own != theirs and (theirs or len(own) > 1):
        raise UnsupportedConfigurationError(
            f"expected a mutex of the ranks {own}, which train this model, got one of "
            f"{theirs or 'this process alone'}: a turn belongs to all its ranks; leave mutex= out, or make it with "
            "GPUMutex(process_group=…) of the model's group"
        )


class TurnLink(LinkAround):
    """The link of a step's last bucket, which joins the siblings' queue early: when the means are there.

    Where collectives go in the program's order, only a thread that issues nothing afterwards may wait for that: what
    waits for it is left to `take`.
    """

    def __init__(self, link: Link, bucket: Bucket, turn: Turn) -> None:
        super().__init__(link)
        self._bucket, self._turn = bucket, turn
        self._reached = bucket.place.reached()

    async def reduce_scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        own = await super().reduce_scatter(flat, layout)
        if not self._bucket.keeps_turn:
            self._half_way()
        return own

    async def all_gather(self, flat: Tensor, layout: Layout) -> None:
        """End the turn if owners' work, which is done, was part of it."""
        if self._bucket.keeps_turn:
            self._bucket.compute_ends()
            self._half_way()
        await super().all_gather(flat, layout)

    async def all_reduce(self, flat: Tensor, layout: Layout) -> None:
        """Leave one message one: between two ranks a second is dearer than to ask for the turn a little later."""
        if self.size == 2 and not self.in_program_order:
            await self._link.all_reduce(flat, layout)
            self._half_way()
        else:
            await super().all_reduce(flat, layout)

    def _half_way(self) -> None:
        if self.in_program_order:
            self._reached = self._bucket.place.reached()
        elif self.size > 1 and not self._bucket.deferred:
            self._turn.request()

    async def take(self) -> None:
        """Take the turn again, which `Exchange.carry` has given away; the bucket has gone its way.

        A job that shares its device with nobody does not wait for the device: the host runs ahead as it would without
        us.
        """
        bucket, turn = self._bucket, self._turn
        whole_way = bucket.place.reached()
        await self.settle()
        if self.in_program_order and turn.shared:
            self._reached()
            turn.request()
            whole_way()
        elif self.size == 1:
            turn.request()
        bucket.exchanged()
        turn.acquire()


async def behind(futures: Sequence[GradientFuture], bucket: Bucket, link: Link, turn: Turn) -> None:
    """Wait for what somebody else's hook has made of a step's buckets, and take the turn again."""
    await link.settle()
    for future in futures:
        bucket.result = future.wait()
    if turn.shared:
        bucket.place.reached()()
    bucket.exchanged()
    turn.acquire()
