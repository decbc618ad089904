"""One rank's model as flat vectors, without moving it, and what travels of them outside of a backward pass."""

import contextlib
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Turn
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Meter, Trip
from crossover_ddp._engine.links import Layout, Link, all_finite
from crossover_ddp.errors import UnsupportedConfigurationError

OwnPart = Callable[[torch.Tensor], None]
_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which small changes of such parameters do not vanish."""
    return _WIDE.get(dtype, dtype)


class FlatEntry(NamedTuple):
    """One tensor of the model; ``get`` returns it, since a module may replace a buffer."""

    name: str
    get: Callable[[], torch.Tensor]


class FlatBlock:
    """Parameters, then buffers, of one dtype on one device: their elements one behind the other, as they lie in memory.

    [Note: kept views] The training thread asks for the same slices again and again, and making views of a dozen small
    tensors takes longer than copying them. So the views are kept, and made anew where a tensor has got other memory:
    as long as a view is kept, no other tensor can lie at the same address.
    """

    def __init__(self, parameters: Sequence[FlatEntry], buffers: Sequence[FlatEntry]) -> None:
        self.entries = [*parameters, *buffers]
        first = self.entries[0].get()
        self.dtype, self.device = _real(first).dtype, first.device
        self._lengths = [_flat(entry.name, entry.get()).numel() for entry in self.entries]
        self._stops = list(accumulate(self._lengths))
        self.numel = self._stops[-1]
        self.whole = Span(0, self.numel)
        self.parameters_numel = sum(self._lengths[: len(parameters)])
        self.rest: torch.Tensor | None = None  # what `add` has rounded off
        self._kept: dict[Span, tuple[list[int], list[torch.Tensor]]] = {}

    def copy(
        self, span: Span | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        start, stop = span = self.whole if span is None else span
        values = torch.empty(stop - start, dtype=dtype or self.dtype, device=device or self.device)
        self.pack(span, values)
        return values

    def pieces(self, span: Span) -> list[torch.Tensor]:
        """Return the model's own memory of ``span``, as flat pieces; see [Note: kept views]."""
        first, last = bisect_right(self._stops, span.start), bisect_left(self._stops, span.stop) + 1
        entries = self.entries[first:last]
        addresses = [entry.get().data_ptr() for entry in entries]
        if (kept := self._kept.get(span)) is None or kept[0] != addresses:
            flats = [_flat(entry.name, entry.get()) for entry in entries]
            (start, stop), starts = span, [0, *self._stops][first:last]
            cut = [flat[max(0, start - at) : stop - at] for flat, at in zip(flats, starts, strict=True)]
            kept = self._kept[span] = addresses, cut
        return kept[1]

    def pack(self, span: Span, values: torch.Tensor) -> None:
        """Copy ``span`` into ``values``; into wider ones, which are of all, with what `add` has kept."""
        pieces = self.pieces(span)
        if not pieces:
            return  # nothing between two tensors
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
        if pieces:
            torch._foreach_copy_(pieces, _split(values, pieces))

    def add(self, span: Span, values: torch.Tensor) -> None:
        """Add ``values`` to ``span``; of wider ones what the block's dtype does not hold is kept for later."""
        pieces = self.pieces(span)
        if values.dtype != self.dtype:
            whole = self.copy(span, values.dtype).add_(values)
            self.unpack(span, whole)
            self.rest = whole.sub_(self.copy(span, values.dtype))
        elif pieces:
            torch._foreach_add_(pieces, _split(values, pieces))

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

    Those that DDP was told to ignore are left out, and so are frozen parameters, which no step changes, integers, and
    buffers with infinities, such as an attention mask, which have no mean.
    """
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    # Of each dtype and device the parameters, and the buffers.
    found: dict[Any, tuple[list[FlatEntry], list[FlatEntry]]] = defaultdict(lambda: ([], []))
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            found[_key(parameter)][0].append(FlatEntry(name, parameter.detach))
    for name, buffer in model.module.named_buffers():
        counts = buffer.is_floating_point() or buffer.is_complex()
        if name not in ignored and counts and bool(buffer.isfinite().all()):
            found[_key(buffer)][1].append(FlatEntry(name, _buffer_of(model.module, name)))
    return [FlatBlock(*entries) for entries in found.values()]


def _key(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return _real(tensor.detach()).dtype, tensor.device


def _buffer_of(network: nn.Module, name: str) -> Callable[[], torch.Tensor]:
    return lambda: network.get_buffer(name).detach()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as a vector: its elements may lie in another order than that of its dimensions."""
    real = _real(tensor)
    expected = 1
    for stride, size in sorted(zip(real.stride(), real.shape, strict=True)):
        if size != 1 and stride != expected:
            raise UnsupportedConfigurationError(
                f"expected tensors without gaps, got {name} of shape {tuple(real.shape)} with strides {real.stride()}; "
                "make it contiguous before the model is wrapped"
            )
        expected *= size
    return real.as_strided((real.numel(),), (1,))


def _split(values: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(values.split([piece.numel() for piece in pieces]))


# --- what travels -------------------------------------------------------------------------------------------------


def gather(exchange: Exchange, values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return ``values`` with each owner's part on all ranks. **Collective**."""
    exchange.begin(lambda link: link.all_gather(values, layout), values, "what owners keep").wait()
    return values


def from_first_rank(exchange: Exchange, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as rank 0 has them. **Collective**."""
    return gather(exchange, values, [values.numel()] + [0] * (exchange.size - 1))


class Replica:
    """The model of one rank, the ranks with which it is averaged, and what happens to it between two steps.

    All methods run on the training thread. Subclasses have ``settings``: arguments that must be the same on all ranks.
    ``steps_together``: all ranks call for a mean after as many steps. ``has_local_steps``: any step, however late, uses
    this rank's gradients alone. ``acted``: the backward passes whose update is done, and what was due after it, or is
    being done. ``blocks``: none before the model is known.
    """

    settings: Mapping[str, object]
    steps_together = has_local_steps = True
    acted = 0
    blocks: Sequence[FlatBlock] = ()

    def adopt(
        self, blocks: Sequence[FlatBlock], group: dist.ProcessGroup, turn: Turn | None, meter: Meter
    ) -> None:
        """Take a model; ``turn`` is given away while training waits, ``meter`` counts what travels, and how long."""
        self.blocks, self.group, self._turn, self.meter = blocks, group, turn, meter
        self.exchange = Exchange.of(group)
        self._unread: deque[tuple[int, torch.cuda.Event, torch.Tensor]] = deque()

    def begin_mean(
        self, values: torch.Tensor, *, owner_step: OwnPart | None = None, sent: torch.Tensor | None = None
    ) -> Trip:
        """Begin to replace ``values``, in use until then, by their mean over the ranks. **Collective**.

        ``owner_step`` changes the own part of the mean in place, before it goes to all; ``sent`` is taken off the
        result, see [Note: delta rule] in ``late.py``, and others may need it longer.
        """
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

    def wait(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, which waits for an exchange; a sibling may compute meanwhile."""
        if (turn := self._turn) is not None:
            turn.release()
        try:
            wait()
        finally:
            if turn is not None:
                turn.request()
                turn.acquire()

    def check_finite(self, values: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
        """Refuse a mean that is not finite, before it is written anywhere; ``own`` is what this rank has sent."""
        if not all_finite(values):
            self._refuse(self.acted, is_guilty=not all(map(all_finite, own)))

    def finite_or_zero(self, values: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """Return what may be added of a late mean; see `check_finite`.

        On a device the host does not wait for it: what is not finite becomes zeros, and is refused at a later step.
        """
        if values.device.type == "cpu":
            self.check_finite(values, [sent])
            return values
        self.check_landed(self.acted)
        fine = torch.stack([torch.isfinite(each).all() for each in (values, sent)])
        told = torch.empty(2, dtype=torch.bool, pin_memory=True)
        told.copy_(fine, non_blocking=True)
        self._unread.append((self.acted, torch.cuda.current_stream(values.device).record_event(), told))
        return torch.where(fine[0], values, 0)

    def check_landed(self, steps: int) -> None:
        """Refuse a late mean that was not finite, if it has come after fewer than ``steps`` steps."""
        while self._unread and self._unread[0][0] < steps:
            at, event, told = self._unread[0]
            event.synchronize()
            if not told[0]:
                self._refuse(at, is_guilty=not told[1])
            self._unread.popleft()

    def _refuse(self, steps: int, *, is_guilty: bool) -> NoReturn:
        guilty = "this rank's are among them" if is_guilty else "see the other ranks"
        raise UnsupportedConfigurationError(
            f"expected finite parameters on all ranks, got infinities or NaN in the mean after step {steps} "
            f"({guilty}; this is rank {self.exchange.rank}); no rank has taken the mean over. Lower the learning rate, "
            "clip, or use GradScaler, and restart from a checkpoint"
        )

    def take_mean(self, beside: Sequence[torch.Tensor] = ()) -> None:
        """Replace all parameters and buffers, and tensors ``beside``, by their mean over the ranks. **Collective**."""
        self.check_landed(self.acted + 1)
        copies = [block.copy() for block in self.blocks]
        trips = [self.begin_mean(values) for values in copies]
        for block, values, trip in zip(self.blocks, copies, trips, strict=True):
            trip.wait()
            self.check_finite(values, block.pieces(block.whole))
        for block, values in zip(self.blocks, copies, strict=True):
            block.unpack(block.whole, values)
        for tensor in map(_real, beside):
            values = tensor.flatten().clone()
            self.begin_mean(values).wait()
            tensor.copy_(values.view_as(tensor))

    # --- what subclasses do ----------------------------------------------------------------------------------

    def is_local(self, steps: int) -> bool:
        """Tell whether the step after ``steps`` of them uses this rank's gradients alone."""
        return True

    def begin(self) -> None:
        """The first local step begins; the parameters are the same on all ranks. **Collective**."""
        raise NotImplementedError

    def act(self) -> None:
        """Do what is due after the ``acted`` passes."""
        raise NotImplementedError

    @contextlib.contextmanager
    def at_rest(self, *, leave: bool) -> Iterator[None]:
        """Apply what is in flight, and let nothing more be exchanged during the block. **Collective**.

        ``leave`` it to be applied once more when it is due: the caller puts the parameters back.
        """
        yield

    def kept(self) -> dict[str, Any]:
        """Return what is kept beside the parameters, by name. **Collective**."""
        raise NotImplementedError

    def load(self, kept: dict[str, Any]) -> None:
        """Take it over when the first local step begins."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None:
        """End threads, let memory go."""
