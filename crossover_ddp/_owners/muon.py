"""torch's Muon in two halves, what an owner computes of a matrix and what all ranks do with it; how directions travel.

[Note: torch's own arithmetic] Both halves call the functions that ``torch.optim.Muon`` is made of, in its order, so
that results are equal to the last bit whatever torch does in them. They are private to torch: `check_torch` compares
both halves with a whole step, once a process, and refuses a torch in which they are not the same.

Directions travel in backward with `muon_hook` (`Directions`), in the next forward with decoupled training's owners.

[Note: Muon's packing] On the way there a rank's part holds the gradients of its matrices, on the way back their
directions in bfloat16, two bytes a number whatever the bucket's numbers take; both ways its share of what passes
through. Behind that come, on the way back, the squared norms of the gradients of its matrices, eight raw bytes each.

[Note: momentum and skipped steps] A backward pass computes the new momentum beside the old one. ``muon.step()`` makes
it the momentum by exchanging the two; a step that is skipped leaves the old one as it was. Their memory is that of
two matrices for each matrix owned, instead of one for each matrix of the model.
"""

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Muon
from torch.optim import _muon as torch_muon

from crossover_ddp._ddp.checks import model_of
from crossover_ddp._ddp.contents import contents_of
from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import Bucket
from crossover_ddp._engine.links import Link
from crossover_ddp.errors import UnsupportedConfigurationError

from .kept import Kept
from .optimizer import check_not_intercepted, intercept
from .packing import Item, Packing, packing

_MOMENTUM: Final = "momentum_buffer"
_NORM_BYTES: Final = 8


class DirectionSettings(NamedTuple):
    """What of a parameter group enters a direction; ``newton_schulz``: further arguments of torch's function."""

    momentum: float
    nesterov: bool
    newton_schulz: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, group: dict[str, Any]) -> "DirectionSettings":
        """Take the settings of this moment."""
        return cls(group["momentum"], group["nesterov"], tuple([(name, group[name]) for name in _ns_names()]))


@functools.cache
def _ns_names() -> tuple[str, ...]:
    """Name the settings of torch's Newton-Schulz, which differ between versions of torch."""
    try:
        names = list(inspect.signature(torch_muon._zeropower_via_newtonschulz).parameters)
    except AttributeError:
        raise _unknown_torch("has no torch.optim._muon._zeropower_via_newtonschulz") from None
    return tuple(names[1:])


def direction_of(
    gradient: Tensor, momentum: Tensor, new_momentum: Tensor, settings: DirectionSettings
) -> Tensor:
    """Return the direction of a matrix, bfloat16, as torch's Muon computes it.

    Args:
        gradient: mean over the ranks, of the matrix's shape and order in memory.
        momentum: before the step; not changed.
        new_momentum: filled with the momentum after the step; may be ``momentum`` itself.
        settings: of the matrix's group.
    """
    torch.lerp(momentum, gradient, 1 - settings.momentum, out=new_momentum)
    update = gradient.lerp(new_momentum, settings.momentum) if settings.nesterov else new_momentum
    if update is new_momentum and update.dtype == torch.bfloat16:
        update = update.clone()  # torch before 2.15 normalises its argument in place (pytorch#194664)
    return torch_muon._zeropower_via_newtonschulz(update, **dict(settings.newton_schulz))


def take_step(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Update ``parameter`` as torch's Muon does, with the group's learning rate and weight decay of this moment."""
    # A tensor stays one, as in torch: it rounds in its own type.
    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    adjusted_lr = torch_muon._adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.add_(direction, alpha=-adjusted_lr)


def newton_schulz_flop(shape: Sequence[int], steps: int = 5) -> int:
    """Return the floating-point operations of one Newton-Schulz of a matrix.

    With m <= n its sides, a step multiplies X·Xᵀ (2·m²·n), G·G (2·m³) and G·X (2·m²·n); five steps cost
    20·m²·n + 10·m³.

    Args:
        shape: rows and columns.
        steps: ``ns_steps`` of the parameter group.
    """
    small, large = sorted(shape)
    return steps * (4 * small**2 * large + 2 * small**3)


def direction_numel(numel: int, itemsize: int) -> int:
    """Return how many elements, of ``itemsize`` bytes, a direction of ``numel`` numbers takes; the last one in part."""
    return -(-numel * torch.bfloat16.itemsize // itemsize)


def direction_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """Return the direction in ``flat`` in the order in memory that torch's has, so that sums take the same way.

    Args:
        flat: as many elements as `direction_numel` says.
        shape: of the matrix.
    """
    rows, columns = shape
    flat = flat.view(torch.bfloat16)[: rows * columns]
    return flat.view(columns, rows).T if rows > columns else flat.view(rows, columns)


def matrix_view(flat: Tensor, like: Tensor) -> Tensor:
    """Return the gradient in ``flat`` as a matrix of the shape of ``like`` and, unless that has gaps, its strides."""
    if not like.is_contiguous() and like.T.is_contiguous():
        return flat.view(like.shape[1], like.shape[0]).T
    return flat.view(like.shape)


def momentum_in(state: dict[str, Any]) -> Tensor | None:
    """Return the momentum in what torch's Muon keeps of a parameter."""
    return state.get(_MOMENTUM)


def put_momentum(state: dict[str, Any], momentum: Tensor) -> None:
    """Keep ``momentum`` where torch's Muon keeps it."""
    state[_MOMENTUM] = momentum


@functools.cache
def check_torch() -> None:
    """Refuse a torch whose Muon is not made of our two halves. Takes about a millisecond, once a process."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 3), (3, 5)):
        start, *gradients = (torch.randn(shape, generator=generator, device="cpu") for _ in range(3))
        whole, halves = start.clone().requires_grad_(), start.clone()
        muon = Muon([whole], lr=0.3, weight_decay=0.2, momentum=0.9)
        momentum, new_momentum = torch.zeros_like(halves), torch.zeros_like(halves)
        group = muon.param_groups[0]
        for gradient in gradients:
            whole.grad = gradient.clone()
            muon.step()
            with torch.no_grad():
                direction = direction_of(gradient, momentum, new_momentum, DirectionSettings.of(group))
                take_step(halves, direction, group)
            momentum, new_momentum = new_momentum, momentum
        if direction.dtype != torch.bfloat16 or not torch.equal(whole, halves):
            raise _unknown_torch("computes another step than its parts do")
        if not torch.equal(momentum, muon.state[whole][_MOMENTUM]):
            raise _unknown_torch("keeps another momentum")


def _unknown_torch(what: str) -> UnsupportedConfigurationError:
    return UnsupportedConfigurationError(
        f"expected a torch.optim.Muon as of torch 2.11 to 2.15, got torch {torch.__version__}, which {what}; "
        "use plain DDP, or one of these versions"
    )


class Round:
    """One backward pass: the settings of each matrix that it began with, and by the matrix's number what comes of it.

    Attributes:
        directions: of all matrices that had a gradient, bfloat16, equal on all ranks.
        squared_norms: of their mean gradients, before the loss's scale, float64 without dimension.
        travelled: memory that other streams may use until the next backward pass.
    """

    def __init__(self, settings: Sequence[DirectionSettings], scale: float) -> None:
        self.settings, self.scale = settings, scale
        self.directions: dict[int, Tensor] = {}
        self.squared_norms: dict[int, Tensor] = {}
        self.travelled: list[Tensor] = []

    @property
    def grad_norm(self) -> Tensor:
        """The norm over all matrices; summed in one order whatever buckets they came in."""
        squares = [self.squared_norms[number] for number in sorted(self.squared_norms)]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


class Packed(NamedTuple):
    """What travels in a bucket's place.

    ``numbers``: of the matrices; ``spans``: where their gradients are in ``flat``, the bucket's buffer; ``back``: what
    returns.
    """

    round_: Round
    plan: Packing
    numbers: Sequence[int]
    spans: Sequence[Span]
    flat: Tensor
    back: Tensor

    def there(self) -> Tensor:
        """Return what is averaged: the bucket itself if it lies as it travels, as a large matrix alone does."""
        moves = [*zip(self.spans, self.plan.items, strict=True), *self.plan.passing]
        if all(span == place.there for span, place in moves):
            return self.flat
        there = self.flat.new_empty(sum(self.plan.there))
        for span, place in moves:
            _part(there, place.there).copy_(_part(self.flat, span))
        return there


class Directions:
    """The matrices of a ``torch.optim.Muon``, each orthogonalised by its owner.

    Args:
        muon: the optimizer.
        owner_of: rank by the id of each matrix that has an owner.
        rank, world_size: of this process.
        loss_scale: returns what the loss is multiplied by.
        state: that the hook is registered with.
    """

    def __init__(
        self,
        muon: Muon,
        owner_of: Mapping[int, int],
        rank: int,
        world_size: int,
        *,
        loss_scale: Callable[[], float],
        state: object,
    ) -> None:
        self._muon = muon
        self._matrices: list[Tensor] = [
            m for g in muon.param_groups for m in g["params"] if id(m) in owner_of
        ]
        self._number_of = {id(matrix): number for number, matrix in enumerate(self._matrices)}
        self._owners = [owner_of[id(matrix)] for matrix in self._matrices]
        self._rank, self._world_size = rank, world_size
        self._loss_scale = loss_scale
        self._state = weakref.ref(state)
        # The new momentum of owned matrices, beside the old one until the step.
        self._next: dict[int, Tensor] = {}
        self._is_checked = self._is_closed = False
        self._round: Round | None = None
        self._waiting: Round | None = None
        self.latest: Round | None = None
        self.calls = 0
        """Number of directions that this rank has computed."""
        self.kept = Kept([muon], owner_of, rank, self._loaded)
        self._hooks = intercept(muon, on_step=self._step, on_zero_grad=self._forget)
        self._hooks.enter_context(self.kept.hooks)

    def close(self) -> None:
        """Give the optimizer back as it was."""
        self._is_closed = True
        self._hooks.close()

    def memory_usage(self) -> dict[str, int]:
        """Return bytes: "momentum", "next_momentum" beside it, "buffers" with what came of the last backward pass."""
        return {
            "momentum": self.kept.nbytes,
            "next_momentum": sum(each.nbytes for each in self._next.values()),
            "buffers": 0 if self.latest is None else sum(each.nbytes for each in self.latest.travelled),
        }

    # --- the hook --------------------------------------------------------------------------------------------

    def way(self, grad_bucket: dist.GradBucket, bucket: Bucket, link: Link) -> Coroutine[Any, Any, None]:
        """Make a bucket's journey; on the hook's thread, in the order of buckets."""
        if self._is_closed:
            raise UnsupportedConfigurationError(
                "expected a MuonState that is not closed, got a backward() after close(); wrap the model again"
            )
        if self._round is None or bucket.index == 0:
            self._round = None
            self._round = self._begin(grad_bucket)
        bucket.keeps_turn = True
        return self._travel(self._pack(grad_bucket, bucket.flat, self._round), link)

    async def _travel(self, packed: Packed, link: Link) -> None:
        """Bring each matrix to its owner whole, and its direction back to all."""
        there, plan = packed.there(), packed.plan
        await link.reduce_scatter(there, plan.there)
        await link.compute()
        self._orthogonalise(packed, there)
        del there
        await link.all_gather(packed.back, plan.back)
        self._unload(packed)

    def end(self) -> None:
        """The step's last bucket was handed out, or refused."""
        ended, self._round = self._round, None
        if ended is not None:
            self._waiting = self.latest = ended

    def _begin(self, bucket: dist.GradBucket) -> Round:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.directions and math.isfinite(float(waiting.grad_norm)):
            self._waiting = waiting
            raise UnsupportedConfigurationError(
                "expected muon.step() between two exchanges, got a second backward() without it; accumulate gradients "
                "in model.no_sync(), or drop them by muon.zero_grad() if the step is to be skipped"
            )
        if not self._is_checked:
            self._check_model(bucket)
            self._is_checked = True
        self.latest = None
        return Round(self._settings(), power_of_two(self._loss_scale()))

    def _pack(self, grad_bucket: dist.GradBucket, flat: Tensor, round_: Round) -> Packed:
        contents = [(self._number_of.get(id(p)), span) for p, _, span in contents_of(grad_bucket, flat)]
        numbers = [number for number, _ in contents if number is not None]
        spans = [span for number, span in contents if number is not None]
        owners, itemsize = [self._owners[number] for number in numbers], flat.itemsize
        items = [
            Item(owner, span.numel, direction_numel(span.numel, itemsize))
            for owner, span in zip(owners, spans, strict=True)
        ]
        norms = [Item(owner, 0, -(-_NORM_BYTES // itemsize)) for owner in owners]
        passing = tuple([span for number, span in contents if number is None])
        plan = packing(self._world_size, tuple(items), passing, tuple(norms))
        back = flat.new_empty(sum(plan.back))  # of the hook's stream, as `muon.step` is, which reads it
        round_.travelled.append(back)
        return Packed(round_, plan, numbers, spans, flat, back)

    # On the owner, between the halves.

    def _orthogonalise(self, packed: Packed, there: Tensor) -> None:
        # With one rank, and on NCCL, this runs inside of backward(), which may have been called under autocast.
        with torch.autocast(there.device.type, enabled=False):
            for number, place, norm in zip(
                packed.numbers, packed.plan.items, packed.plan.behind, strict=True
            ):
                if place.owner == self._rank:
                    gradient = matrix_view(_part(there, place.there), self._matrices[number])
                    self._compute(packed, number, gradient, place.back, norm.back)
        for _, place in packed.plan.passing:
            if place.owner == self._rank:
                _part(packed.back, place.back).copy_(_part(there, place.there))

    def _compute(self, packed: Packed, number: int, gradient: Tensor, at: Span, norm_at: Span) -> None:
        matrix, round_ = self._matrices[number], packed.round_
        if round_.scale != 1.0:
            gradient.mul_(1.0 / round_.scale)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        _part(packed.back, norm_at).copy_(norm.square().reshape(1).view(packed.back.dtype))
        momentum = momentum_in(self._muon.state.get(matrix, {}))
        if momentum is None:
            momentum = torch.zeros_like(matrix, memory_format=torch.preserve_format)
        if number not in self._next:
            self._next[number] = torch.empty_like(matrix, memory_format=torch.preserve_format)
        direction = direction_of(gradient, momentum, self._next[number], round_.settings[number])
        direction_view(_part(packed.back, at), matrix.shape).copy_(direction)
        self.calls += 1

    # Wherever the bucket's way ends.

    def _unload(self, packed: Packed) -> None:
        """Keep the directions for the step; of the matrices' gradients only leave whether they were finite."""
        round_, plan, back = packed.round_, packed.plan, packed.back
        for number, span, place, norm in zip(
            packed.numbers, packed.spans, plan.items, plan.behind, strict=True
        ):
            square = _part(back, norm.back).clone().view(torch.float64)[0]
            round_.directions[number] = direction_view(_part(back, place.back), self._matrices[number].shape)
            round_.squared_norms[number] = square
            # 0, or NaN if anything was not finite: a GradScaler then skips the step on all ranks, and asks no device.
            _part(packed.flat, span).fill_((square * 0).to(packed.flat.dtype))
        for span, place in plan.passing:
            _part(packed.flat, span).copy_(_part(back, place.back))

    # --- muon.step() and its relatives -----------------------------------------------------------------------

    def _step(self, original: Callable[[], Any]) -> Any:
        """Call torch's step, which finds no gradients; then apply the directions."""
        if self._is_closed or (self._waiting is None and self.kept.only_makes_state(self._muon)):
            return original()
        round_, self._waiting = self._waiting, None
        numbers = [number for number, matrix in enumerate(self._matrices) if matrix.grad is not None]
        if numbers:
            self._check(round_, numbers)
        directions = {} if round_ is None else round_.directions
        gradients = {number: self._matrices[number].grad for number in numbers}
        try:
            for number in numbers:
                self._matrices[number].grad = None
            result = original()
            with torch.no_grad():
                for number, group in self._in_groups():
                    if number in gradients:
                        take_step(self._matrices[number], directions[number], group)
        finally:
            for number, gradient in gradients.items():
                self._matrices[number].grad = gradient
        self._keep_momentum(numbers)
        return result

    def _check(self, round_: Round | None, numbers: Sequence[int]) -> None:
        missing = [number for number in numbers if round_ is None or number not in round_.directions]
        if round_ is None or missing:
            raise UnsupportedConfigurationError(
                f"expected a backward() with muon_hook between two steps, got {len(missing)} matrices with a gradient "
                f"of which no direction has come, the first of shape {tuple(self._matrices[missing[0]].shape)}; call "
                "muon.step() once after each exchange, outside of no_sync(), with all of Muon's matrices in the model"
            )
        if round_.settings != self._settings():
            raise UnsupportedConfigurationError(
                "expected momentum, nesterov and the settings of Newton-Schulz as they were in backward(), where the "
                "owners computed with them, got others in muon.step(); change them before backward()"
            )

    def _keep_momentum(self, numbers: Sequence[int]) -> None:
        """Make the new momentum of owned matrices the momentum, see [Note: momentum and skipped steps]."""
        for number in numbers:
            if self._owners[number] == self._rank:
                state = self._muon.state[self._matrices[number]]
                old = momentum_in(state)
                put_momentum(state, self._next.pop(number))
                if old is not None:
                    self._next[number] = old
        if numbers:
            self.kept.stepped()

    def _in_groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for group in self._muon.param_groups:
            for matrix in group["params"]:
                if id(matrix) in self._number_of:
                    yield self._number_of[id(matrix)], group

    def _settings(self) -> list[DirectionSettings]:
        """Return those of each matrix at this moment."""
        return [
            settings for _, settings in sorted((n, DirectionSettings.of(g)) for n, g in self._in_groups())
        ]

    def _forget(self) -> None:
        self._waiting = None

    def _loaded(self) -> None:
        self._waiting = None
        self._next.clear()

    # --- checks ----------------------------------------------------------------------------------------------

    def _check_model(self, bucket: dist.GradBucket) -> None:
        model = model_of(bucket, state=self._state())
        if model is None:
            return
        known = {id(parameter) for parameter in model.module.parameters()}
        foreign = [each for each in self._matrices if each.requires_grad and id(each) not in known]
        if foreign:
            raise UnsupportedConfigurationError(
                f"expected the matrices of one DDP model in Muon, got {len(foreign)} that the model with this hook "
                f"does not have, one of shape {tuple(foreign[0].shape)}; make a Muon and a MuonState for each model"
            )


def power_of_two(scale: float) -> float:
    """Return ``scale`` if no rounding can come from it; raise ``ValueError`` otherwise."""
    if not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"expected a loss_scale that is a power of two, got loss_scale={scale}; another one rounds gradients, and "
            "so turns directions: GradScaler's init_scale, growth_factor and backoff_factor must be powers of two"
        )
    return float(scale)


def check_optimizer(muon: object) -> None:
    """Refuse what is not torch's Muon, whose step is known, or has a state already."""
    if not isinstance(muon, Muon):
        raise TypeError(
            f"expected a torch.optim.Muon, got muon={type(muon).__name__}; give the matrices to torch.optim.Muon and "
            "the other parameters to another optimizer, which needs no state"
        )
    own = [
        cls.__name__ for cls in type(muon).__mro__[: type(muon).__mro__.index(Muon)] if "step" in vars(cls)
    ]
    if own:
        raise TypeError(
            f"expected torch.optim.Muon's own step, got muon={type(muon).__name__}, of which {own[0]} has another; "
            "pass a torch.optim.Muon"
        )
    parameters = [parameter for group in muon.param_groups for parameter in group["params"]]
    if any(parameter.is_complex() for parameter in parameters):
        raise UnsupportedConfigurationError(
            "expected real matrices, got complex ones, which torch.optim.Muon does not support; give them to another "
            "optimizer"
        )
    check_not_intercepted(muon)


def _part(flat: Tensor, span: Span) -> Tensor:
    return flat[span.start : span.stop]
