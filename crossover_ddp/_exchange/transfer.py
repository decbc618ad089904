"""One bucket on its way from the hook to its Future, and the turn around it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from crossover_ddp._ddp.module_buffers import BufferCopy
from crossover_ddp._engine.places import GradientFuture
from crossover_ddp._engine.turns import Turn
from crossover_ddp._timeline.record import Detail, Timeline
from crossover_ddp.errors import CrossoverError, ExchangeError

from .collectives import HostBuffer, RingAllGather, RingReduceScatter
from .layout import Layout, Span
from .staging import Side
from .step import Step

OwnerStep = Callable[[torch.Tensor], None]


class Failure(NamedTuple):
    """Why no exchange can succeed any more."""

    text: str
    cause: BaseException

    def error(self) -> CrossoverError:
        """Make the error that one step raises; what says its own remedy stays as it is."""
        if isinstance(self.cause, CrossoverError):
            return self.cause
        error = ExchangeError(self.text)
        error.__cause__ = self.cause
        return error


class Sharded(NamedTuple):
    """A flat tensor, and who owns which part of it."""

    tensor: torch.Tensor
    layout: Layout

    def part(self, rank: int) -> torch.Tensor:
        """Return what ``rank`` owns."""
        span = self.layout.part(rank)
        return self.tensor[span.start : span.stop]


class Travelling(NamedTuple):
    """Where a run of a parameter's elements is in a payload: in its owner's part of both buffers.

    ``begin``: its first element in the parameter, in the order in which the payload holds them.
    """

    parameter: torch.Tensor
    begin: int
    owner: int
    there: Span
    back: Span


@dataclass(frozen=True, eq=False)
class Payload:
    """What travels for a bucket in place of the bucket's own buffer.

    Args:
        scatter: is summed into its owners, divided by the number of ranks.
        gather: is copied from its owners to all ranks. ``scatter`` itself goes both ways; another one is filled by
            ``step``; None: nothing comes back.
        step: the owner's work between the halves; it gets the own part of ``scatter``.
        unload: called when ``gather`` is whole, before the bucket's Future completes.
        keeps_turn: ``step`` is compute inside the job's turn, which is given away after that of the last bucket.
        is_long: ``step`` takes so long that it runs on a thread of its own, beside the gathers of earlier buckets.
        matrices: returns where parameters of two dimensions or more travel, which a codec may round, in the order of
            owners and offsets. None: nothing may be rounded.
    """

    scatter: Sharded
    gather: Sharded | None
    step: OwnerStep
    unload: Callable[[], None]
    keeps_turn: bool = False
    is_long: bool = False
    matrices: Callable[[], Sequence[Travelling]] | None = None


class Messages(Protocol):
    """What travels in a bucket's place where it cannot be added on its way; see [Note: straight to the owner].

    All of it is bytes. ``outgoing``: for each other owner; ``incoming``: memory for those of each other rank, of the
    size that it sends; ``gather``: what owners copy to all. By a backend's own collectives everything is called on the
    hook's thread, `step` and what follows on the side stream.
    """

    @property
    def outgoing(self) -> Sharded:
        """By owner; nothing for this rank."""

    @property
    def incoming(self) -> Sharded:
        """By rank; nothing of this one."""

    @property
    def gather(self) -> Sharded:
        """By owner."""

    def step(self) -> None:
        """Make the own part of ``gather`` of what has come, and fill the bucket's own part from it.

        On the gatherer, or the stepper if deferred.
        """

    def unload(self) -> None:
        """Fill the rest of the bucket's buffer from ``gather``. On the gatherer."""


MakeMessages = Callable[[Payload | None], Messages | None]


class RingHalves(NamedTuple):
    """Both halves of a bucket on a ring; no gather yet if it is of another buffer, or if there is none."""

    buffer: HostBuffer
    scatter: RingReduceScatter
    gather: RingAllGather | None


@dataclass(eq=False, slots=True)
class Transfer:
    """One bucket on its way from the hook to its Future.

    ``urgency`` is None for a bucket that backward waits for. A deferred bucket has a number: its gather comes
    before those with a greater one; ``gather`` does it. ``reduced`` is completed half-way, with the owned part.
    ``result`` is the Future's value if that is not ``tensor``. ``ready_s``: when its hook was called
    (``time.monotonic()``). ``whole_way``: blocks until the device has gathered a deferred bucket, which its Future does
    not wait for. ``largest_bytes``: of its largest gradient, which no smaller bucket can cut; 0 where no timeline asks.
    """

    index: int
    tensor: torch.Tensor
    layout: Layout
    sequence: int
    step: Step
    last: bool
    side: Side
    turn: Turn | None = None
    owner_step: OwnerStep | None = None
    payload: Payload | None = None
    messages: Messages | None = None
    result: torch.Tensor | None = None
    urgency: int | None = None
    halves: RingHalves | None = None
    gather: Callable[[], None] | None = None
    whole_way: Callable[[], None] | None = None
    ready_s: float = 0.0
    largest_bytes: int = 0
    future: GradientFuture = field(init=False)
    reduced: GradientFuture = field(init=False)
    finished: bool = False

    def __post_init__(self) -> None:
        self.future = self.side.future()
        self.reduced = self.side.future()

    def carry(self, payload: Payload) -> None:
        """Let ``payload`` travel, and the Future hold the bucket's buffer all the same."""
        self.payload, self.result = payload, self.tensor
        self.tensor, self.layout = payload.scatter
        self.step.keeps_turn = self.step.keeps_turn or payload.keeps_turn
        self.owner_step = payload.step

    def in_words(self) -> dict[str, Detail]:
        """Return what a timeline says of this bucket. ``owner``: 1 if there is an owner's step between the halves."""
        return {
            "bucket": self.index,
            "bytes": self.tensor.numel() * self.tensor.itemsize,
            "largest_bytes": self.largest_bytes,
            "ready_s": self.ready_s,
            "device_type": self.tensor.device.type,
            "owner": int(self.owner_step is not None),
        }

    @property
    def goes_back(self) -> bool:
        """Whether the same buffer goes both ways."""
        return self.payload is None or self.payload.gather is self.payload.scatter

    @property
    def whose(self) -> str:
        """Say in an error what travels: a bucket, or what leaves ahead of one, such as K-FAC's factors."""
        return f"of bucket {self.index}" if self.index >= 0 else f"ahead of bucket {len(self.step.ready)}"

    @property
    def keeps_turn(self) -> bool:
        """Whether the owner's step is compute inside the turn."""
        return self.payload is not None and self.payload.keeps_turn

    @property
    def has_long_step(self) -> bool:
        """Whether the owner's step runs on a thread of its own."""
        return self.payload is not None and self.payload.is_long

    @property
    def deferred(self) -> bool:
        """Whether backward does not wait for this bucket."""
        return self.urgency is not None

    @property
    def is_gathered_later(self) -> bool:
        """Whether its gather has a place in the order of deferred gathers; see [Note: order of gathers]."""
        return self.deferred and (self.payload is None or self.payload.gather is not None)

    @property
    def last_turn(self) -> Turn | None:
        """The turn to be taken again when this transfer ends."""
        return self.turn if self.last and not self.deferred else None


class Deferred:
    """A bucket that is exchanged in the background; whoever needs it waits.

    Waiting blocks the calling thread on gloo; on NCCL it orders the current stream instead. Both methods raise
    ``ExchangeError`` if the exchange failed. Not collective.
    """

    def __init__(self, transfer: Transfer, timeline: Timeline | None = None) -> None:
        self._transfer = transfer
        self._timeline = timeline
        self.buffers: BufferCopy | None = None
        """The model's, which left with the step's last bucket."""

    @property
    def tensor(self) -> torch.Tensor:
        """What travels: the bucket's buffer, with a version counter of its own, or a payload."""
        return self._transfer.tensor

    @property
    def bucket(self) -> torch.Tensor:
        """DDP's own buffer; `tensor` but where something else travels in its place."""
        return self._transfer.tensor if self._transfer.result is None else self._transfer.result

    @property
    def layout(self) -> Layout:
        """Who owns which part of what travels."""
        return self._transfer.layout

    def wait_on_host(self) -> None:
        """Block this thread until the device has gathered the bucket: `wait` may only order a stream after that."""
        self.wait()
        if self._transfer.whole_way is not None:
            self._transfer.whole_way()

    def own_part(self) -> torch.Tensor:
        """Wait for the reduce-scatter; return this rank's part of the mean."""
        begin_s = time.monotonic()
        part = self._transfer.reduced.wait()
        if self._timeline is not None:
            self._timeline.span("stall", begin_s, time.monotonic(), bucket=self._transfer.index)
        return part

    def wait(self) -> None:
        """Wait until the buffer holds the mean over the ranks, or what the payload is to bring is here."""
        transfer = self._transfer
        is_launched = transfer.halves is not None or transfer.messages is not None
        if not is_launched and not transfer.future.done():  # see [Note: native order]
            raise ExchangeError(
                "expected a bucket whose gather is under way, got one of a backward that did not end; restart the job"
            )
        begin_s = time.monotonic()
        transfer.future.wait()
        if self._timeline is not None:
            self._timeline.span("stall", begin_s, time.monotonic(), bucket=self._transfer.index)
