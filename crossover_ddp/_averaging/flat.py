"""Parameters and buffers of a model as flat vectors, without moving them: they are read and written in place."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.layout import Span
from crossover_ddp.errors import UnsupportedConfigurationError

_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which small changes of such parameters do not vanish."""
    return _WIDE.get(dtype, dtype)


@dataclass(frozen=True)
class FlatEntry:
    """One tensor of the model; ``get`` returns it, since a module may replace a buffer."""

    name: str
    get: Callable[[], torch.Tensor]


class FlatBlock:
    """The elements of some tensors of one dtype on one device, one behind the other, as they lie in memory.

    [Note: kept views] The training thread asks for the same slices again and again, and making views of a dozen small
    tensors takes longer than copying them. So the views are kept, and made anew where a tensor has got other memory:
    as long as a view is kept, no other tensor can lie at the same address.

    Args:
        parameters: come first.
        buffers: come behind them.
    """

    def __init__(self, parameters: Sequence[FlatEntry], buffers: Sequence[FlatEntry]) -> None:
        self.entries = [*parameters, *buffers]
        first = self.entries[0].get()
        self.dtype, self.device = _real(first).dtype, first.device
        lengths = [_flat(entry.name, entry.get()).numel() for entry in self.entries]
        self._stops = list(accumulate(lengths))
        self.numel = self._stops[-1]
        self.parameters_numel = sum(lengths[: len(parameters)])
        self._kept_back: torch.Tensor | None = None
        self._kept: dict[Span, tuple[list[int], list[torch.Tensor]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def whole(self) -> Span:
        """All of it."""
        return Span(0, self.numel)

    def copy(
        self, span: Span | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return a copy of ``span``, of all by default, in another dtype or on another device if one is given."""
        start, stop = span = self.whole if span is None else span
        values = torch.empty(stop - start, dtype=dtype or self.dtype, device=device or self.device)
        self.pack(span, values)
        return values

    def pieces(self, span: Span) -> list[torch.Tensor]:
        """Return the model's own memory of ``span``, as flat pieces; see [Note: kept views]."""
        first, last = bisect_right(self._stops, span.start), bisect_left(self._stops, span.stop) + 1
        entries = self.entries[first:last]
        addresses = [entry.get().data_ptr() for entry in entries]
        kept = self._kept.get(span)
        if kept is None or kept[0] != addresses:
            start = self._stops[first - 1] if first else 0
            kept = self._kept[span] = addresses, self._cut(entries, start, span)
        return kept[1]

    def _cut(self, entries: Sequence[FlatEntry], start: int, span: Span) -> list[torch.Tensor]:
        found = []
        for entry in entries:
            flat = _flat(entry.name, entry.get())
            found.append(flat[max(0, span.start - start) : span.stop - start])
            start += flat.numel()
        return found

    def pack(self, span: Span, values: torch.Tensor) -> None:
        """Copy ``span`` into ``values``; into wider ones with what `add` has kept."""
        self._copy(span, values)
        if self._kept_back is not None and values.dtype != self.dtype:
            values.add_(self._kept_back[span.start : span.stop].to(values.device))

    def _copy(self, span: Span, values: torch.Tensor) -> None:
        pieces = self.pieces(span)
        if not pieces:
            return  # nothing between two tensors
        if values.dtype == self.dtype:
            torch.cat(pieces, out=values)
        else:
            torch._foreach_copy_(_split(values, pieces), pieces)

    def unpack(self, span: Span, values: torch.Tensor) -> None:
        """Copy ``values`` into ``span``."""
        pieces = self.pieces(span)
        if pieces:
            torch._foreach_copy_(pieces, _split(values, pieces))

    def add(self, span: Span, values: torch.Tensor) -> None:
        """Add ``values`` to ``span``; of wider ones what the block's dtype does not hold is kept for later."""
        pieces = self.pieces(span)
        if values.dtype != self.dtype:
            if self._kept_back is None:
                self._kept_back = torch.zeros(self.numel, dtype=values.dtype, device=self.device)
            whole, rounded = torch.empty_like(values), torch.empty_like(values)
            self.pack(span, whole)
            self.unpack(span, whole.add_(values))
            self._copy(span, rounded)
            torch.sub(whole, rounded, out=self._kept_back[span.start : span.stop])
        elif pieces:
            torch._foreach_add_(pieces, _split(values, pieces))

    def named(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a vector over the whole block by the tensors' names and in their shapes, on the host."""
        found, start = {}, 0
        for entry, stop in zip(self.entries, self._stops, strict=True):
            like = _real(entry.get())
            flat = values[start:stop].cpu()
            found[entry.name] = flat.as_strided(like.shape, like.stride(), flat.storage_offset()).contiguous()
            start = stop
        return found

    def unnamed(self, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return what `named` has made as a vector again."""
        whole, start = torch.zeros(self.numel, dtype=dtype, device=self.device), 0
        for entry, stop in zip(self.entries, self._stops, strict=True):
            like, given = _real(entry.get()), values.get(entry.name)
            if given is None or given.shape != like.shape:
                raise ValueError(
                    f"expected values of shape {tuple(like.shape)} for {entry.name}, got "
                    f"{'none' if given is None else tuple(given.shape)}; load the state of the same model"
                )
            whole[start:stop].as_strided(like.shape, like.stride(), start).copy_(given)
            start = stop
        return whole


def blocks_of(model: DistributedDataParallel) -> list[FlatBlock]:
    """Return all trainable parameters and floating-point buffers, a block for each dtype and device.

    Those that DDP was told to ignore are left out, and so are frozen parameters, which no step changes, integers, and
    buffers with infinities, such as an attention mask, which have no mean.
    """
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    parameters: dict[tuple[torch.dtype, torch.device], list[FlatEntry]] = {}
    buffers: dict[tuple[torch.dtype, torch.device], list[FlatEntry]] = {}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            parameters.setdefault(_key(parameter), []).append(FlatEntry(name, parameter.detach))
    for name, get in _buffers(model.module):
        counts = get().is_floating_point() or get().is_complex()
        if name not in ignored and counts and bool(get().isfinite().all()):
            buffers.setdefault(_key(get()), []).append(FlatEntry(name, get))
    keys = dict.fromkeys([*parameters, *buffers])
    return [FlatBlock(parameters.get(key, ()), buffers.get(key, ())) for key in keys]


def _key(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return _real(tensor.detach()).dtype, tensor.device


def _buffers(network: nn.Module) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield names and what returns the buffers of this moment; one that several modules share comes once."""
    seen: set[int] = set()
    for prefix, module in network.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, _getter(module, name)


def _getter(module: nn.Module, name: str) -> Callable[[], torch.Tensor]:
    def get() -> torch.Tensor:
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer.detach()

    return get


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
