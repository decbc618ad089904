"""Take the step of torch's Muon in two halves: an owner computes a direction, all ranks apply it.

The coroutine that carries a bucket is `orthogonalise` in `crossover_ddp.muon_hooks`.

[Note: torch's own arithmetic] Both halves call the functions that ``torch.optim.Muon`` itself
calls, in the same order, so the results are bitwise equal whatever torch computes in them. These
functions are private to torch. So `check_torch` compares the two halves with a whole step, once per
process, and refuses a version of torch in which the results differ.

[Note: Muon's packing] In the buffer sent to the owners, a rank's part holds its matrices'
gradients. In the buffer that returns, a rank's part holds its matrices' directions in bfloat16, at
two bytes per number whatever the bucket's dtype. Each direction is followed by the squared norm of
its gradient, as eight raw bytes. Both buffers also hold the rank's share of the elements that pass
through, as [Note: packing] explains.

With a codec there is one buffer, in float32: directions return in the memory of the gradients, and
the codec makes them small. Each is followed by its norm, as the sum of two float32 numbers.

[Note: momentum and skipped steps] A backward pass computes the new momentum beside the old one.
``muon.step()`` puts the new momentum into effect by swapping the two. A skipped step leaves the old
momentum as it was. Each rank thus keeps two momenta for each matrix that it owns, instead of one
for each matrix in the model.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Muon

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Run, copy_parts, part_of, view_of
from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

from .optimizer import Seal
from .packing import Packing, Place

# The key of the momentum in the state that torch's Muon keeps for a parameter.
MOMENTUM: Final = "momentum_buffer"
_NORM_BYTES: Final = 8
# With a codec a norm is the sum of this many float32 numbers.
NORM_NUMEL: Final = 2

Settings = Mapping[str, Any]


def settings_of(group: Mapping[str, Any]) -> Settings:
    """Return the current settings in a parameter group that affect a direction."""
    return {name: group[name] for name in ("momentum", "nesterov", *_ns_names())}


@functools.cache
def _ns_names() -> tuple[str, ...]:
    """Return the names of the Newton-Schulz settings, which differ between versions of torch."""
    if torch_private.newton_schulz is None or torch_private.adjusted_lr is None:
        raise _unknown_torch("lacks functions that torch.optim.Muon was made of")
    names = list(inspect.signature(torch_private.newton_schulz).parameters)
    return tuple(names[1:])  # the first one is the matrix


def direction_of(
    gradient: Tensor, momentum: Tensor, new_momentum: Tensor, settings: Settings
) -> Tensor:
    """Return the direction of a matrix in bfloat16, as torch's Muon computes it.

    Args:
        gradient: the mean gradient over the ranks, in the matrix's shape and memory order.
        momentum: the momentum before the step. It is not changed, unless it is ``new_momentum``.
        new_momentum: receives the momentum after the step. It may be ``momentum`` itself.
        settings: the result of `settings_of` for the matrix's group.
    """
    torch.lerp(momentum, gradient, 1 - settings["momentum"], out=new_momentum)
    update = new_momentum
    if settings["nesterov"]:
        update = gradient.lerp(new_momentum, settings["momentum"])
    elif update.dtype == torch.bfloat16:
        # Before torch 2.15 Newton-Schulz normalises its argument in place (pytorch#194664).
        update = update.clone()
    assert torch_private.newton_schulz is not None  # or `_ns_names` has raised
    return torch_private.newton_schulz(update, **{name: settings[name] for name in _ns_names()})


def take_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Update ``parameter`` as torch's Muon does, with the group's current settings."""
    # A tensor stays a tensor, as in torch, because it rounds in its own dtype.
    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    assert torch_private.adjusted_lr is not None  # or `check_torch` has raised
    adjusted_lr = torch_private.adjusted_lr(lr, group["adjust_lr_fn"], parameter.shape)
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(direction, alpha=-adjusted_lr)


def newton_schulz_flop(shape: Sequence[int], steps: int = 5) -> int:
    """Return the number of floating-point operations in one Newton-Schulz iteration of a matrix.

    If the matrix is m × n or n × m with m <= n, each step computes X·Xᵀ (2·m²·n), G·G (2·m³) and
    G·X (2·m²·n). Five steps cost 20·m²·n + 10·m³.

    Args:
        shape: the numbers of rows and columns.
        steps: the parameter group's ``ns_steps``.
    """
    small, large = sorted(shape)
    return steps * (4 * small**2 * large + 2 * small**3)


def returned_numel(numel: int, itemsize: int) -> int:
    """Return the number of elements of ``itemsize`` bytes that hold a direction and a norm.

    The direction has ``numel`` elements in bfloat16.
    """
    return -(-numel * torch.bfloat16.itemsize // itemsize) + _NORM_BYTES // itemsize


def direction_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """View ``flat`` as a direction with the memory order that torch uses, so that rounding agrees.

    Args:
        flat: a flat tensor that begins with the direction, in the direction's dtype.
        shape: the shape of the matrix.
    """
    rows, columns = shape
    flat = flat[: rows * columns]
    return flat.view(columns, rows).T if rows > columns else flat.view(rows, columns)


def _norm_in(sent: Tensor) -> Tensor:
    """Return a view of the squared norm, the eight bytes that travel behind a direction."""
    return sent[-(_NORM_BYTES // sent.itemsize) :]


class Momenta:
    """The momenta of this rank's matrices, see [Note: momentum and skipped steps].

    Args:
        muon: the optimizer, whose state has the momenta that are in effect.
    """

    def __init__(self, muon: Muon) -> None:
        self._muon = muon
        # The new momentum of each owned matrix, kept beside the old one until the step.
        self.new: dict[Tensor, Tensor] = {}
        # How many directions were computed so far.
        self.directions = 0

    def direction_of(self, matrix: Tensor, gradient: Tensor, settings: Settings) -> Tensor:
        """Compute the direction of a matrix, and its new momentum, from the mean gradient."""
        momentum = self._muon.state.get(matrix, {}).get(MOMENTUM)
        if momentum is None:
            momentum = torch.zeros_like(matrix, memory_format=torch.preserve_format)
        if matrix not in self.new:
            self.new[matrix] = torch.empty_like(matrix, memory_format=torch.preserve_format)
        self.directions += 1
        return direction_of(gradient, momentum, self.new[matrix], settings)

    def take_effect(self, matrix: Tensor) -> None:
        """Swap the old and the new momentum of a matrix."""
        state = self._muon.state[matrix]
        old = state.get(MOMENTUM)
        state[MOMENTUM] = self.new.pop(matrix)
        if old is not None:
            self.new[matrix] = old


@dataclass(eq=False)
class MuonStep:
    """One backward pass and its results, which ``muon.step()`` applies."""

    # Each matrix's settings at the beginning of the pass.
    settings: Mapping[Tensor, Settings]
    # The loss scale.
    scale: float
    # The direction of each matrix that had a gradient: bfloat16, equal on all ranks.
    directions: dict[Tensor, Tensor] = field(default_factory=dict)
    # The squared norm of each matrix's mean gradient without the loss scale: a float64 scalar.
    squared_norms: dict[Tensor, Tensor] = field(default_factory=dict)
    # Buffers that other streams may use until the next backward pass.
    travelled: list[Tensor] = field(default_factory=list)
    # Seals the matrices at the end of backward.
    seal: Seal | None = None

    @property
    def can_step(self) -> bool:
        """Whether there are directions, and all mean gradients are finite. Waits for a device."""
        return bool(self.directions) and math.isfinite(float(self.grad_norm))

    @property
    def grad_norm(self) -> Tensor:
        """The norm over all matrices. The order of the sum does not depend on the buckets."""
        squares = [
            self.squared_norms[matrix] for matrix in self.settings if matrix in self.squared_norms
        ]
        if not squares:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(squares).sum().sqrt()


@dataclass(eq=False)
class MuonBucket:
    """The contents of one bucket, and the buffers that travel for it; see [Note: Muon's packing].

    `pack` makes the buffer that goes to the owners, `orthogonalise` fills this rank's part of the
    one that returns, and `unpack` reads all of it.
    """

    step: MuonStep
    momenta: Momenta
    rank: int
    plan: Packing
    # Each matrix, the span of its gradient in `buffer`, and its place in the buffers that travel.
    matrices: Sequence[tuple[Tensor, Span, Place]]
    buffer: Tensor  # the bucket's own
    back: Tensor  # the buffer that returns from the owners

    def pack(self) -> Tensor:
        """Return the buffer that goes to the owners, filled with this rank's gradients.

        It is the bucket's own buffer if both have the same layout, as with one matrix.
        """
        moves = [(span, place.there) for _, span, place in self.matrices]
        moves += [(span, place.there) for span, place in self.plan.passing]
        if all(span == place for span, place in moves):
            return self.buffer
        there = self.buffer.new_empty(sum(self.plan.there))
        copy_parts(self.buffer, there, moves)
        return there

    def orthogonalise(self, there: Tensor) -> None:
        """Compute the directions of this rank's matrices from their means in ``there``."""
        # With one rank, and on NCCL, this runs inside backward(), perhaps under autocast.
        with torch.autocast(there.device.type, enabled=False):
            for matrix, _, place in self.matrices:
                if place.owner != self.rank:
                    continue
                start = place.there.start
                own = Span(start, start + matrix.numel())
                gradient = view_of(part_of(there, own), matrix)
                if self.step.scale != 1.0:
                    gradient.mul_(1.0 / self.step.scale)
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                direction = self.momenta.direction_of(matrix, gradient, self.step.settings[matrix])
                self._write(direction, norm, part_of(self.back, place.back))
        own_passing = [place for _, place in self.plan.passing if place.owner == self.rank]
        self._return_passing(there, own_passing)

    def unpack(self) -> None:
        """Keep the directions for the step. Fill the matrices' gradients with zero or NaN."""
        for matrix, span, place in self.matrices:
            received = part_of(self.back, place.back)
            direction, square = self._read(received, matrix)
            self.step.directions[matrix] = direction
            self.step.squared_norms[matrix] = square
            # This fills in NaN if a gradient was not finite, so that a GradScaler skips the step on
            # all ranks. The host does not wait for a device here.
            part_of(self.buffer, span).fill_((square * 0).to(self.buffer.dtype))
        moves = [(place.back, span) for span, place in self.plan.passing]
        copy_parts(self.back, self.buffer, moves)

    def _write(self, direction: Tensor, norm: Tensor, sent: Tensor) -> None:
        """Write a direction, and the norm of its gradient, to their place in `back`."""
        _norm_in(sent).copy_(norm.square().reshape(1).view(sent.dtype))
        direction_view(sent.view(torch.bfloat16), direction.shape).copy_(direction)

    def _read(self, received: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the direction of ``matrix``, and the squared norm of its gradient."""
        square = _norm_in(received).clone().view(torch.float64)[0]
        return direction_view(received.view(torch.bfloat16), matrix.shape), square

    def _return_passing(self, there: Tensor, places: Sequence[Place]) -> None:
        """Copy the means of this rank's share of the elements that pass through to `back`."""
        copy_parts(there, self.back, [(place.there, place.back) for place in places])


@dataclass(eq=False)
class CodedMuonBucket(MuonBucket):
    """The same with a codec: one buffer travels both ways, see [Note: Muon's packing]."""

    def __post_init__(self) -> None:
        moves = [(span, place.there) for span, place in self.plan.passing]
        for matrix, span, place in self.matrices:
            stop = place.there.stop
            moves.append((span, Span(place.there.start, place.there.start + matrix.numel())))
            # On the way to the owners there is no norm.
            part_of(self.back, Span(stop - NORM_NUMEL, stop)).zero_()
        copy_parts(self.buffer, self.back, moves)

    def pack(self) -> Tensor:
        return self.back

    # --- for the codec, which encodes `flat` before the journey begins ---

    @property
    def flat(self) -> Tensor:
        return self.back

    @property
    def layout(self) -> Sequence[int]:
        return self.plan.there

    def runs(self) -> list[Run]:
        """Return the places of all elements, of which only the matrices are encoded.

        The others belong to a flat tensor here: elements of one-dimensional tensors travel exactly.
        """
        runs = []
        for matrix, _, place in self.matrices:
            start, stop = place.there
            runs.append(Run(matrix, 0, Span(start, stop - NORM_NUMEL)))
            runs.append(Run(self.back, 0, Span(stop - NORM_NUMEL, stop)))
        return [*runs, *(Run(self.back, 0, place.there) for _, place in self.plan.passing)]

    def _write(self, direction: Tensor, norm: Tensor, sent: Tensor) -> None:
        first = norm.float()
        # Raw bytes could not pass through a codec's link, which adds residuals, if only zeros.
        sent[-NORM_NUMEL:].copy_(torch.stack([first, (norm - first).float()]))
        direction_view(sent, direction.shape).copy_(direction)

    def _read(self, received: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        square = received[-NORM_NUMEL:].double().sum().square()
        return direction_view(received, matrix.shape), square

    def _return_passing(self, there: Tensor, places: Sequence[Place]) -> None:
        """Leave them where they are."""


@functools.cache
def check_torch() -> None:
    """Refuse a version of torch whose Muon computes a different step than our two halves.

    The check takes about a millisecond and runs once per process.
    """
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (3, 5)):
        start, *gradients = (
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            for _ in range(3)
        )
        whole = start.clone().requires_grad_()
        halves = start.clone()
        muon = Muon([whole], lr=0.3, weight_decay=0.2, momentum=0.9)
        momentum = torch.zeros_like(halves)
        new_momentum = torch.zeros_like(halves)
        group = muon.param_groups[0]
        for gradient in gradients:
            whole.grad = gradient.clone()
            muon.step()
            with torch.no_grad():
                direction = direction_of(gradient, momentum, new_momentum, group)
                take_step(halves, direction, group)
            momentum, new_momentum = new_momentum, momentum
        if direction.dtype != torch.bfloat16 or not torch.equal(whole, halves):
            raise _unknown_torch("computes another step than its parts do")
        if not torch.equal(momentum, muon.state[whole][MOMENTUM]):
            raise _unknown_torch("stores another momentum")


def _unknown_torch(difference: str) -> UnsupportedConfigurationError:
    return UnsupportedConfigurationError(
        "expected a torch.optim.Muon as of torch 2.11 to 2.15, got torch "
        f"{torch.__version__}, which {difference}; use plain DDP, or one of these versions"
    )
