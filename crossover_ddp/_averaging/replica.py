"""One rank's model as flat vectors, and its exchanges outside the backward pass."""

import abc
import contextlib
import functools
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp import checks
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Run, Turn, is_dense
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Journey, JourneyCoroutine, outside_of_autograd
from crossover_ddp._engine.links import Layout, Link, all_finite
from crossover_ddp._engine.observe import Meter
from crossover_ddp.errors import UnsupportedConfigurationError

from .increments import Increments

OwnerStep = Callable[[torch.Tensor], None]
# The coroutine `average` of `crossover_ddp.averaging_hooks`.
Average = Callable[
    [torch.Tensor, Layout, OwnerStep | None, torch.Tensor | None, Increments | None, Link],
    JourneyCoroutine,
]
# What error messages call the data of journeys that gather the owners' state.
OWNED_STATE: Final = "the state of owners"
_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype wide enough for small changes to parameters of ``dtype``."""
    return _WIDE.get(dtype, dtype)


class FlatEntry(NamedTuple):
    """A named tensor of the model."""

    name: str
    # Returns the current tensor, since a module may replace a buffer.
    get: Callable[[], torch.Tensor]


class FlatBlock:
    """All parameters and then all buffers of one dtype on one device, seen as one flat vector.

    The tensors stay where they are. Each tensor's elements are taken in memory order.
    """

    def __init__(self, parameters: Sequence[FlatEntry], buffers: Sequence[FlatEntry]) -> None:
        self.entries = [*parameters, *buffers]
        flats = [_flat(entry) for entry in self.entries]
        self.dtype = flats[0].dtype
        self.device = flats[0].device
        self._lengths = [flat.numel() for flat in flats]
        self._stops = list(accumulate(self._lengths))
        self.numel = self._stops[-1]
        self.whole = Span(0, self.numel)
        self.parameters_numel = sum(self._lengths[: len(parameters)])
        # The rounding error of the values that were added, which the block's dtype cannot hold.
        # Only `add` sets it, for wider values. The next `pack` into wider values includes it.
        self.rounded_off: torch.Tensor | None = None

    def copy(
        self, span: Span, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        with outside_of_autograd():
            values = torch.empty(
                span.stop - span.start, dtype=dtype or self.dtype, device=device or self.device
            )
        self.pack(span, values)
        return values

    def pieces(self, span: Span) -> list[torch.Tensor]:
        """Return flat views of the model's memory that together make up ``span``."""
        first = bisect_right(self._stops, span.start)
        last = bisect_left(self._stops, span.stop) + 1
        start = [0, *self._stops][first]
        found = []
        for entry, stop in zip(self.entries[first:last], self._stops[first:last], strict=True):
            flat = _flat(entry)
            if flat.numel() != stop - start:
                raise UnsupportedConfigurationError(
                    f"expected {entry.name} of {stop - start} elements, as before, got "
                    f"{flat.numel()}: a tensor that changes its size has no mean; make it a plain "
                    "attribute of its module, not a buffer"
                )
            found.append(flat[max(0, span.start - start) : span.stop - start])
            start = stop
        return found

    def runs(self, span: Span) -> list[Run]:
        """Return the tensors that make up ``span``, with their places in it.

        Buffers are returned as flat tensors, which codecs leave exact.
        """
        found = []
        starts = [0, *self._stops]
        for entry, start, stop in zip(self.entries, starts, self._stops, strict=False):
            own = Span(max(start, span.start), min(stop, span.stop))
            if own.start < own.stop:
                is_parameter = start < self.parameters_numel
                tensor = entry.get() if is_parameter else _flat(entry)
                place = Span(own.start - span.start, own.stop - span.start)
                found.append(Run(tensor, own.start - start, place))
        return found

    def pack(self, span: Span, values: torch.Tensor) -> None:
        """Copy ``span`` to ``values``.

        If ``values`` is wider than the block, `rounded_off` is added, so ``span`` must then be the
        whole block.
        """
        pieces = self.pieces(span)
        if not pieces:
            return  # an owner's part without parameters
        if (values.dtype, values.device) == (self.dtype, self.device):
            torch.cat(pieces, out=values)
        else:  # torch.cat converts neither dtype nor device
            for place, piece in zip(_split(values, pieces), pieces, strict=True):
                place.copy_(piece)
        if self.rounded_off is not None and values.dtype != self.dtype:
            values.add_(self.rounded_off.to(values.device))

    def unpack(
        self, span: Span, values: torch.Tensor, rounded_off: torch.Tensor | None = None
    ) -> None:
        """Write ``values`` to ``span``, and replace the old `rounded_off` with the new one."""
        pieces = self.pieces(span)
        self.rounded_off = rounded_off
        torch._foreach_copy_(pieces, _split(values, pieces))

    def add(self, span: Span, values: torch.Tensor) -> None:
        """Add ``values`` to ``span``; if they are wider, keep the rounding error."""
        if values.dtype == self.dtype:
            pieces = self.pieces(span)
            torch._foreach_add_(pieces, _split(values, pieces))
        else:
            total = self.copy(span, values.dtype).add_(values)
            self.unpack(span, total)
            self.rounded_off = total.sub_(self.copy(span, values.dtype))

    def named(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a whole-block vector into tensors by name, on the host and in their own shapes."""
        return {name: shaped.contiguous() for name, shaped in self._shaped(values.cpu())}

    def unnamed(self, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Reverse `named`: return the whole-block vector."""
        whole = torch.zeros(self.numel, dtype=dtype, device=self.device)
        for name, shaped in self._shaped(whole):
            given = values.get(name)
            if given is None or given.shape != shaped.shape:
                raise ValueError(
                    f"expected values of shape {tuple(shaped.shape)} for {name}, got "
                    f"{'none' if given is None else tuple(given.shape)}; load the state of the "
                    "same model"
                )
            shaped.copy_(given)
        return whole

    def _shaped(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name and a view of its part of ``whole``, in the tensor's shape."""
        for entry, flat in zip(self.entries, whole.split(self._lengths), strict=True):
            like = _real(entry.get())
            yield entry.name, flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def blocks_of(model: DistributedDataParallel) -> list[FlatBlock]:
    """Return the trainable parameters and floating-point buffers, in a block per dtype and device.

    Complex buffers are included. Tensors that DDP ignores are left out, and so are buffers that
    contain infinities or NaN, such as an attention mask, because they have no mean.
    """
    network = checks.network_of(model)
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    parameters: dict[Any, list[FlatEntry]] = defaultdict(list)  # by dtype and device
    buffers: dict[Any, list[FlatEntry]] = defaultdict(list)

    def append(
        found: dict[Any, list[FlatEntry]], name: str, get: Callable[[], torch.Tensor]
    ) -> None:
        real = _real(get())
        if name not in ignored and real.numel():
            found[real.dtype, real.device].append(FlatEntry(name, get))

    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            append(parameters, name, parameter.detach)
    for name, buffer in network.named_buffers():
        if (buffer.is_floating_point() or buffer.is_complex()) and bool(buffer.isfinite().all()):
            append(buffers, name, functools.partial(network.get_buffer, name))
    kinds = dict.fromkeys([*parameters, *buffers])  # in the order of the model
    return [FlatBlock(parameters[kind], buffers[kind]) for kind in kinds]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(entry: FlatEntry) -> torch.Tensor:
    """Return a flat view of the tensor's elements in memory order."""
    real = _real(entry.get().detach())
    if not (real.is_contiguous() or is_dense(real)):
        raise UnsupportedConfigurationError(
            f"expected tensors without gaps, got {entry.name} of shape {tuple(real.shape)} with "
            f"strides {real.stride()}; make it contiguous before the model is wrapped"
        )
    return real.as_strided((real.numel(),), (1,))


def _split(values: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(values.split([piece.numel() for piece in pieces]))


def from_first_rank(exchange: Exchange, values: torch.Tensor) -> torch.Tensor:
    """Overwrite ``values`` with those of rank 0 and return ``values``. **Collective**."""
    exchange.gather(values, [values.numel()] + [0] * (exchange.size - 1), OWNED_STATE)
    return values


class PendingSlice(NamedTuple):
    """A slice of a block that is being exchanged."""

    block: FlatBlock
    span: Span
    # The journey writes its result here.
    values: torch.Tensor
    trip: Journey
    # True if the result is added to the parameters, False if it replaces them.
    adds: bool
    # A copy of the values that were sent, if the result is added.
    snapshot: torch.Tensor | None = None


class Replica(abc.ABC):
    """One rank's model, and an algorithm that keeps it close to the other ranks' replicas.

    All methods run on the training thread, between steps.
    """

    # The constructor's arguments, which must be the same on all ranks.
    settings: Mapping[str, object]
    # Whether all ranks must ask for a mean after the same number of steps.
    steps_together = True
    # After this number of steps, each step uses only this rank's gradients.
    local_from: float = 0
    # The number of backward passes whose updates are done. The exchanges that were due after them
    # have been run or are being run.
    acted = 0
    # A state dict that `begin` has not restored yet.
    loaded: dict[str, Any] | None = None
    # Empty until the model is known.
    blocks: Sequence[FlatBlock] = ()

    def adopt(
        self,
        blocks: Sequence[FlatBlock],
        group: dist.ProcessGroup,
        turn: Turn | None,
        meter: Meter,
        average: Average,
    ) -> None:
        """Start to work on a model.

        Args:
            blocks: the model's blocks.
            group: the ranks whose replicas are averaged.
            turn: the turn to release while training waits for an exchange; None if the job takes no
                turns.
            meter: counts the bytes that exchanges send and the time that they take.
            average: the coroutine that carries a slice of a block.
        """
        self.blocks = blocks
        self.group = group
        self._turn = turn
        self.meter = meter
        self._average = average
        self.exchange = Exchange.of(group)
        # Checks of late means on a device. The host has not read their results yet. Each entry has
        # the number of steps, an event recorded after the copy to the host, and two flags: whether
        # the mean was finite, and whether the snapshot was.
        self._unread: deque[tuple[int, torch.cuda.Event, torch.Tensor]] = deque()

    @abc.abstractmethod
    def begin(self) -> None:
        """Prepare for the first local step. **Collective**.

        All ranks have the same parameters at this point.
        """

    @abc.abstractmethod
    def act(self) -> None:
        """Run the exchanges that are due after `acted` backward passes."""

    def in_flight(self) -> Sequence[PendingSlice]:
        """Return the slices whose exchanges have begun and whose results are not applied."""
        return ()

    def wait(self) -> None:
        """Wait for the exchanges in flight."""
        for each in self.in_flight():
            each.trip.wait()

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all state except the parameters. **Collective**."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept an output of `state_dict`. `begin` restores it."""

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return this rank's statistics."""

    def begin_mean(
        self,
        values: torch.Tensor,
        owner_step: OwnerStep | None = None,
        snapshot: torch.Tensor | None = None,
        increments: Increments | None = None,
    ) -> Journey:
        """Start to replace ``values`` with their mean over the ranks. **Collective**.

        Args:
            values: a flat tensor.
            owner_step: a function that changes the owner's part of the mean in place before it is
                gathered.
            snapshot: a tensor to subtract from the result; see [Note: delta rule].
            increments: the increments that ``values`` hold; see [Note: increments].
        """
        layout = self.exchange.equal_layout(values)
        around = None
        if increments is not None:
            around = functools.partial(increments.codec.around, values, layout)
        return self.exchange.begin(
            functools.partial(self._average, values, layout, owner_step, snapshot, increments),
            values,
            "parameters",
            deferred=snapshot is not None,
            around=around,
            meter=self.meter,
        )

    def send(
        self,
        block: FlatBlock,
        span: Span,
        owner_step: OwnerStep | None = None,
        *,
        late: bool = False,
        increments: Increments | None = None,
    ) -> PendingSlice:
        """Start to average a copy of ``span``, or this rank's ``increments`` of it.

        With ``late``, keep a snapshot as well, so that training can continue meanwhile.
        """
        values = block.copy(span)
        if increments is not None:
            increments.take(values)
        adds = late or increments is not None
        snapshot = values.clone() if adds else None
        trip = self.begin_mean(values, owner_step, snapshot, increments)
        return PendingSlice(block, span, values, trip, adds, snapshot)

    def apply(self, slices: Sequence[PendingSlice], *, gives_turn: bool = True) -> None:
        """Wait for all ``slices``, then write their results to the model.

        With ``gives_turn``, release the turn while this rank waits.
        """
        turn = self._turn if slices and gives_turn else None
        if turn is not None:
            turn.release()
        try:
            # All results are checked before the first one is written.
            results = [self.result(each) for each in slices]
        finally:
            if turn is not None:
                turn.request()
                turn.acquire()
        for each, values in zip(slices, results, strict=True):
            if each.adds:
                each.block.add(each.span, values)
            else:
                each.block.unpack(each.span, values)

    def result(self, pending: PendingSlice) -> torch.Tensor:
        """Wait for the exchange and return its result; raise if the result is not finite.

        The host does not wait to learn whether a late mean on a device is finite. If it is not,
        the result is zeros, so that the parameters do not change, and a later step raises.
        """
        pending.trip.wait()
        values = pending.values
        snapshot = pending.snapshot
        if snapshot is None or values.device.type == "cpu":
            if not all_finite(values):
                own = pending.block.pieces(pending.span) if snapshot is None else [snapshot]
                self._refuse(self.acted, is_guilty=not all(map(all_finite, own)))
            return values
        self.check_late_means(self.acted)
        finite = torch.stack([torch.isfinite(each).all() for each in (values, snapshot)])
        on_host = torch.empty(2, dtype=torch.bool, pin_memory=True)
        on_host.copy_(finite, non_blocking=True)
        event = torch.cuda.current_stream(values.device).record_event()
        self._unread.append((self.acted, event, on_host))
        return torch.where(finite[0], values, 0)

    def check_late_means(self, steps: int) -> None:
        """Raise if a mean that was due after fewer than ``steps`` steps was not finite."""
        while self._unread and self._unread[0][0] < steps:
            due, event, on_host = self._unread[0]
            event.synchronize()
            mean_is_finite, snapshot_is_finite = on_host.tolist()
            if not mean_is_finite:
                self._refuse(due, is_guilty=not snapshot_is_finite)
            self._unread.popleft()

    def _refuse(self, steps: int, *, is_guilty: bool, what: str = "parameters") -> NoReturn:
        guilty = "this rank's are among them" if is_guilty else "see the other ranks"
        raise UnsupportedConfigurationError(
            f"expected finite {what} on all ranks, got infinities or NaN in the mean after step "
            f"{steps} ({guilty}; this is rank {self.exchange.rank}); no rank has applied the mean. "
            "Lower the learning rate, clip, or use GradScaler, and restart from a checkpoint"
        )

    def take_mean(self, beside: Sequence[torch.Tensor] = ()) -> None:
        """Replace parameters, buffers and the ``beside`` tensors with means. **Collective**."""
        self.check_late_means(self.acted + 1)
        is_finite = all(map(all_finite, map(_real, beside)))
        # All ranks check that everything is finite before the first parameter is written.
        if beside and [0.0] in self.exchange.gather_numbers([is_finite], self.blocks[0].device):
            self._refuse(self.acted, is_guilty=not is_finite, what="state of the optimizers")
        self.apply([self.send(block, block.whole) for block in self.blocks], gives_turn=False)
        for tensor in map(_real, beside):
            values = tensor.flatten().clone()
            self.begin_mean(values).wait()
            tensor.copy_(values.view_as(tensor))

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """Apply all pending results, and exchange nothing in the ``with`` block. **Collective**.

        With ``leave``, the results also stay pending and are applied again when they are due, so
        the caller must restore the parameters.
        """
        yield

    @abc.abstractmethod
    def close(self) -> None:
        """Stop threads and free memory."""
