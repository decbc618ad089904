"""One rank's model as flat vectors, without moving it, and what travels of them outside of a backward pass."""

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

from crossover_ddp._ddp.contents import is_dense
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Turn
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Trip
from crossover_ddp._engine.links import Link, all_finite
from crossover_ddp._engine.observe import Meter
from crossover_ddp.errors import UnsupportedConfigurationError

OwnPart = Callable[[torch.Tensor], None]
KEPT: Final = "what owners keep"
_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which small changes of such parameters do not vanish."""
    return _WIDE.get(dtype, dtype)


class FlatEntry(NamedTuple):
    """One tensor of the model; ``get`` returns it, since a module may replace a buffer."""

    name: str
    get: Callable[[], torch.Tensor]


class FlatBlock:
    """Parameters, then buffers, of one dtype on one device: their elements one behind the other as in memory."""

    def __init__(self, parameters: Sequence[FlatEntry], buffers: Sequence[FlatEntry]) -> None:
        self.entries = [*parameters, *buffers]
        flats = [*map(_flat, self.entries)]
        self.dtype, self.device = flats[0].dtype, flats[0].device
        self._lengths = [flat.numel() for flat in flats]
        self._stops = list(accumulate(self._lengths))
        self.numel = self._stops[-1]
        self.whole = Span(0, self.numel)
        self.parameters_numel = sum(self._lengths[: len(parameters)])
        self.rest: torch.Tensor | None = None  # what `add` has rounded off

    def copy(
        self, span: Span, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        values = torch.empty(
            span.stop - span.start, dtype=dtype or self.dtype, device=device or self.device
        )
        self.pack(span, values)
        return values

    def pieces(self, span: Span) -> list[torch.Tensor]:
        """Return the model's own memory of ``span``, as flat pieces."""
        first, last = bisect_right(self._stops, span.start), bisect_left(self._stops, span.stop) + 1
        found, start = [], [0, *self._stops][first]
        for entry, stop in zip(self.entries[first:last], self._stops[first:last], strict=True):
            if (flat := _flat(entry)).numel() != stop - start:
                raise UnsupportedConfigurationError(
                    f"expected {entry.name} of {stop - start} elements, as before, got {flat.numel()}: what changes "
                    "its size has no mean; make it a plain attribute of its module, not a buffer"
                )
            found.append(flat[max(0, span.start - start) : span.stop - start])
            start = stop
        return found

    def pack(self, span: Span, values: torch.Tensor) -> None:
        """Copy ``span`` into ``values``; into wider ones, which are of all, with what `add` has kept."""
        pieces = self.pieces(span)
        if not pieces:
            return  # an owner's part without parameters
        if (values.dtype, values.device) == (self.dtype, self.device):
            torch.cat(pieces, out=values)
        else:  # also from a device to the host
            for place, piece in zip(_split(values, pieces), pieces, strict=True):
                place.copy_(piece)
        if self.rest is not None and values.dtype != self.dtype:
            values.add_(self.rest.to(values.device))

    def unpack(self, span: Span, values: torch.Tensor, rest: torch.Tensor | None = None) -> None:
        """Replace ``span`` by ``values``; ``rest``: what `add` has kept of them, not of former ones."""
        pieces, self.rest = self.pieces(span), rest
        torch._foreach_copy_(pieces, _split(values, pieces))

    def add(self, span: Span, values: torch.Tensor) -> None:
        """Add ``values`` to ``span``; of wider ones what the block's dtype does not hold is kept for later."""
        if values.dtype == self.dtype:
            pieces = self.pieces(span)
            torch._foreach_add_(pieces, _split(values, pieces))
        else:
            whole = self.copy(span, values.dtype).add_(values)
            self.unpack(span, whole)
            self.rest = whole.sub_(self.copy(span, values.dtype))

    def named(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a vector over the whole block by the tensors' names and in their shapes, on the host."""
        return {name: shaped.contiguous() for name, shaped in self._shaped(values.cpu())}

    def unnamed(self, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return what `named` has made as a vector again."""
        whole = torch.zeros(self.numel, dtype=dtype, device=self.device)
        for name, shaped in self._shaped(whole):
            given = values.get(name)
            if given is None or given.shape != shaped.shape:
                raise ValueError(
                    f"expected values of shape {tuple(shaped.shape)} for {name}, got "
                    f"{'none' if given is None else tuple(given.shape)}; load the state of the same model"
                )
            shaped.copy_(given)
        return whole

    def _shaped(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor's name, and its part of a vector in its shape."""
        for entry, flat in zip(self.entries, whole.split(self._lengths), strict=True):
            like = _real(entry.get())
            yield entry.name, flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def blocks_of(model: DistributedDataParallel) -> list[FlatBlock]:
    """Return all trainable parameters and floating-point buffers, a block for each dtype and device.

    Left out are those that DDP was told to ignore, and buffers with infinities, such as a mask, which have no mean.
    """
    network, ignored = model.module, set(getattr(model, "parameters_to_ignore", ()))
    # Of each dtype and device the parameters, and the buffers.
    found: dict[Any, tuple[list[FlatEntry], list[FlatEntry]]] = defaultdict(lambda: ([], []))

    def note(kind: int, name: str, get: Callable[[], torch.Tensor]) -> None:
        real = _real(get())
        if name not in ignored and real.numel():
            found[real.dtype, real.device][kind].append(FlatEntry(name, get))

    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            note(0, name, parameter.detach)
    for name, buffer in network.named_buffers():
        if (buffer.is_floating_point() or buffer.is_complex()) and bool(buffer.isfinite().all()):
            note(1, name, functools.partial(network.get_buffer, name))
    return [FlatBlock(*entries) for entries in found.values()]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(entry: FlatEntry) -> torch.Tensor:
    """Return the tensor's memory as a vector: its elements may lie in another order than that of its dimensions."""
    real = _real(entry.get().detach())
    if not (real.is_contiguous() or is_dense(real)):
        raise UnsupportedConfigurationError(
            f"expected tensors without gaps, got {entry.name} of shape {tuple(real.shape)} with strides "
            f"{real.stride()}; make it contiguous before the model is wrapped"
        )
    return real.as_strided((real.numel(),), (1,))


def _split(values: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(values.split([piece.numel() for piece in pieces]))


def from_first_rank(exchange: Exchange, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as rank 0 has them. **Collective**."""
    exchange.gather(values, [values.numel()] + [0] * (exchange.size - 1), KEPT)
    return values


class Flight(NamedTuple):
    """A slice on its way: ``values`` come back, added if ``adds``, else in its place; ``sent`` if they come late."""

    block: FlatBlock
    span: Span
    values: torch.Tensor
    trip: Trip
    adds: bool
    sent: torch.Tensor | None = None


class Replica:
    """The model of one rank, the ranks with which it is averaged, and what happens to it between two steps.

    All methods run on the training thread. ``settings``: arguments that must be the same on all ranks.
    ``steps_together``: all ranks call for a mean after as many steps. ``local_from``: number of steps after which steps
    use this rank's gradients alone. ``acted``: the backward passes whose update is done, and what was due after it, or
    is being done. ``blocks``: none before the model is known.

    The rules that derive from it have ``begin``, for the first local step, when parameters are the same on all ranks;
    ``act``, which does what is due after the ``acted`` passes; ``kept``, which returns what is kept beside the
    parameters; ``load``, which has ``begin`` take it over; ``stats``. ``begin`` and ``kept`` are collective.
    """

    settings: Mapping[str, object]
    steps_together = True
    local_from: float = 0
    acted = 0
    blocks: Sequence[FlatBlock] = ()

    def adopt(
        self, blocks: Sequence[FlatBlock], group: dist.ProcessGroup, turn: Turn | None, meter: Meter
    ) -> None:
        """Take a model; ``turn`` is given away while training waits, ``meter`` counts what travels."""
        self.blocks, self.group, self._turn, self.meter = blocks, group, turn, meter
        self.exchange = Exchange.of(group)
        self._unread: deque[tuple[int, torch.cuda.Event, torch.Tensor]] = deque()

    def begin_mean(
        self,
        values: torch.Tensor,
        owner_step: OwnPart | None = None,
        sent: torch.Tensor | None = None,
    ) -> Trip:
        """Begin to replace ``values`` by the ranks' mean less ``sent``, see [Note: delta rule]. **Collective**."""
        layout = self.exchange.equal_layout(values)

        async def late_mean(link: Link) -> None:
            own = await link.reduce_scatter(values, layout)
            if owner_step is not None:
                await link.compute()
                owner_step(own)
            await link.all_gather(values, layout)
            if sent is not None:
                values.sub_(sent)

        return self.exchange.begin(
            late_mean, values, "parameters", deferred=sent is not None, meter=self.meter
        )

    def send(
        self, block: FlatBlock, span: Span, owner_step: OwnPart | None = None, *, late: bool = False
    ) -> Flight:
        """Send a copy of ``span`` on its way, see `begin_mean`; ``late``: training goes on meanwhile."""
        values = block.copy(span)
        sent = values.clone() if late else None
        return Flight(block, span, values, self.begin_mean(values, owner_step, sent), late, sent)

    def land(self, flights: Sequence[Flight], *, gives_turn: bool = True) -> None:
        """Apply what comes back when all of it has come; a sibling may compute until then if ``gives_turn``."""
        turn = self._turn if flights and gives_turn else None
        if turn is not None:
            turn.release()
        try:
            arrived = [self.arrived(flight) for flight in flights]  # all, before any is written
        finally:
            if turn is not None:
                turn.request()
                turn.acquire()
        for flight, values in zip(flights, arrived, strict=True):
            (flight.block.add if flight.adds else flight.block.unpack)(flight.span, values)

    def arrived(self, flight: Flight) -> torch.Tensor:
        """Wait for what comes back, and return it; refuse what is not finite, before it is written anywhere.

        What comes late on a device becomes zeros then, and a later step refuses it: the host does not wait for it.
        """
        flight.trip.wait()
        values, sent = flight.values, flight.sent
        if sent is None or values.device.type == "cpu":
            if not all_finite(values):
                own = flight.block.pieces(flight.span) if sent is None else [sent]
                self._refuse(self.acted, is_guilty=not all(map(all_finite, own)))
            return values
        self.check_landed(self.acted)
        fine = torch.stack([torch.isfinite(each).all() for each in (values, sent)])
        told = torch.empty(2, dtype=torch.bool, pin_memory=True)
        told.copy_(fine, non_blocking=True)
        self._unread.append(
            (self.acted, torch.cuda.current_stream(values.device).record_event(), told)
        )
        return torch.where(fine[0], values, 0)

    def check_landed(self, steps: int) -> None:
        """Refuse a late mean that was not finite, if it has come after fewer than ``steps`` steps."""
        while self._unread and self._unread[0][0] < steps:
            at, event, told = self._unread[0]
            event.synchronize()
            if not told[0]:
                self._refuse(at, is_guilty=not told[1])
            self._unread.popleft()

    def _refuse(self, steps: int, *, is_guilty: bool, what: str = "parameters") -> NoReturn:
        guilty = "this rank's are among them" if is_guilty else "see the other ranks"
        raise UnsupportedConfigurationError(
            f"expected finite {what} on all ranks, got infinities or NaN in the mean after step {steps} "
            f"({guilty}; this is rank {self.exchange.rank}); no rank has taken the mean over. Lower the learning rate, "
            "clip, or use GradScaler, and restart from a checkpoint"
        )

    def take_mean(self, beside: Sequence[torch.Tensor] = ()) -> None:
        """Replace all parameters and buffers, and tensors ``beside``, by their mean over the ranks. **Collective**."""
        self.check_landed(self.acted + 1)
        is_fit = all(map(all_finite, map(_real, beside)))  # before parameters are written
        if beside and [0.0] in self.exchange.gather_numbers([is_fit], self.blocks[0].device):
            self._refuse(self.acted, is_guilty=not is_fit, what="state of the optimizers")
        self.land([self.send(block, block.whole) for block in self.blocks], gives_turn=False)
        for tensor in map(_real, beside):
            values = tensor.flatten().clone()
            self.begin_mean(values).wait()
            tensor.copy_(values.view_as(tensor))

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """Apply what is in flight, which ``leave`` does again when it is due; exchange nothing more. **Collective**."""
        yield

    def close(self) -> None:
        """End threads, let memory go."""
