"""Gradients that complete themselves when they are read, and their norms, which come earlier.

[Note: lazy gradients] After the `backward()` of a deferred step, a rank has only its own shards of
the mean. So from then on ``p.grad`` is a `LazyGradient`, a tensor without memory of its own. Clipping
and GradScaler ask it only for norms, and whether values are finite, and then multiply it by numbers.
Norms are computed from sums of squares, and multiplications are recorded and applied with the
update: neither needs the gradient. Any other operation completes the exchange first, and then runs
on the plain gradient. Code that reads memory directly, such as a C++ extension, gets an error with
the remedy. Our design.

[Note: sums ahead of gathers] The sums of squares travel in the journey of the step's last bucket,
between the reductions and the gathers. So a rank that asks for a norm waits for half of the
exchange, but not for other ranks to ask as well. The sums travel only if some rank has asked for a
norm lately. Otherwise the rank that asks completes its gradients.

[Note: one norm] A clock may decide whether a step is deferred, but the results of a run must not
depend on the clock. So squares are always added over the same pieces in the same order, whether the
gradient is complete or each rank has its own shard only. The sums are in float64, and the result is
rounded to the gradient's type. It may differ from torch's own norm in the last bits, but it is
equal on all ranks. With virtual ranks neither the number of shards nor the buckets, which differ
after a resume, may change the result. There the squares of a gradient are added in one piece, so a
rank that asks for a norm completes its gradients. The sums only answer whether values are finite.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from crossover_ddp._ddp.layout import Span
from crossover_ddp._engine.buckets import is_dense
from crossover_ddp._engine.journeys import Completion
from crossover_ddp._engine.links import Layout, Link
from crossover_ddp._system import torch_private
from crossover_ddp.errors import UnsupportedConfigurationError

if TYPE_CHECKING:
    from crossover_ddp._engine.buckets import Bucket

_SUM: Final = torch.float64
_ROW_NUMEL: Final = 1 << 12
_LONGEST_SILENCE: Final = 64
_LARGEST_ITEM: Final = 4  # bytes of a type whose squares do not overflow in float64
_NO_MEMORY: Final = (
    "p.grad is read by its memory address between backward() and the end of the next forward, while "
    "crossover_ddp still exchanges it; call state.flush() before that line"
)

_NO_VALUES: Final = (
    "expected the 2-norm of a gradient, got another norm where parameters have owners: only a "
    "parameter's owner has its mean; use state.clip_grad_norm_, which knows all norms"
)

aten: Final = torch.ops.aten


# --- sums of squares ----------------------------------------------------------------------------


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squared magnitudes of a flat tensor, as a float64 scalar."""
    if not values.numel():
        return values.new_zeros((), dtype=_SUM)
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    if values.is_cuda:
        return _squares(values, _SUM)
    # In float32 this takes a fifth of the time. A single square may overflow there.
    single = _squares(values, torch.promote_types(values.dtype, torch.float32))
    return single if math.isfinite(single) else _squares(values, _SUM)


def _squares(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up squares in ``dtype`` within rows, and the rows' sums in float64.

    No row is so long that torch would divide it among threads, whose number differs.
    """
    whole = values.numel() // _ROW_NUMEL * _ROW_NUMEL
    norms = torch.linalg.vector_norm(values[:whole].view(-1, _ROW_NUMEL), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(values[whole:], dtype=dtype)
    total: Tensor = norms.to(_SUM).square().sum() + rest.to(_SUM).square()
    return total


class Cut(NamedTuple):
    """One parameter's place in its bucket, and the number of its elements that each owner has."""

    parameter: Tensor
    span: Span
    lengths: tuple[int, ...]

    def squares(self, gradient: Tensor) -> Tensor:
        """Return the sum of squares of the whole gradient, added up like the owners' shards."""
        flat = gradient.detach()
        if is_dense(flat):  # in the order of the memory, as in the bucket
            flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
        flat = flat.reshape(-1)
        if flat.numel() < sum(self.lengths):
            flat = torch.view_as_real(flat).flatten()
        return _added([sum_of_squares(each) for each in flat.split(self.lengths)])


def cuts_of(parameters: Iterable[Tensor], is_complex: bool, layout: Layout) -> list[Cut]:
    """Return where the owners' shards cut each parameter of a bucket.

    Args:
        parameters: the parameters, in the order of their gradients in the bucket.
        is_complex: whether the bucket's flat tensor is complex. DDP exchanges complex gradients as
            pairs of real numbers.
        layout: the owners' shards of the bucket.
    """
    ends = [*accumulate(layout)]
    cuts = []
    begin = 0
    for parameter in parameters:
        reals = 2 if parameter.is_complex() and not is_complex else 1
        stop = begin + parameter.numel() * reals
        bounds = [min(max(end, begin), stop) for end in ends]
        lengths = [b - a for a, b in zip([begin, *bounds], bounds, strict=False)]
        cuts.append(Cut(parameter, Span(begin, stop), tuple(lengths)))
        begin = stop
    return cuts


class SquareSums:
    """The sums of squares of one backward pass, by parameter.

    Args:
        travel: whether the sums are exchanged in this pass; the same on all ranks.
        is_wanted: whether this rank has asked for a norm lately.
        is_due: whether this pass finds out which ranks have.
        has_norms: whether the sums give norms; see [Note: one norm].
    """

    def __init__(
        self, *, travel: bool, is_wanted: bool, is_due: bool = False, has_norms: bool = True
    ) -> None:
        self.travel = travel
        self.is_due = is_due
        self.has_norms = has_norms
        self._is_wanted = is_wanted
        self._column: dict[int, int] = {}
        self._own: list[Tensor] = []
        self._arrival: Completion | None = None
        self._table: Tensor | None = None
        self._norms: dict[torch.dtype, Sequence[Tensor]] = {}

    def add(self, shards: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add up this rank's reduced shards.

        Args:
            shards: pairs of a parameter and this rank's elements of its gradient, for all
                parameters of a bucket in the same order on all ranks. The elements may be none.
        """
        for parameter, own in shards:
            self._column[id(parameter)] = len(self._own)
            self._own.append(sum_of_squares(own))

    def expect(self, bucket: "Bucket") -> None:
        """Let `arrive` wait for the sums, which travel in the journey of the pass's last bucket."""
        if self.travel:
            self._arrival = bucket.own_shard

    async def gather(self, bucket: "Bucket", link: Link) -> None:
        """Send this rank's sums to all ranks, and receive theirs. The bucket is the pass's last."""
        width = len(self._own) + 1
        table = torch.zeros(link.size, width, dtype=_SUM, device=bucket.flat.device)
        sums = [each.to(table.device) for each in self._own]
        table[link.rank] = torch.stack([*sums, table.new_full((), self._is_wanted)])
        await link.exact.all_gather(table.view(-1), [width] * link.size)
        self._table = table

    def arrive(self) -> bool:
        """Wait until the sums of all ranks are there. Return False if they do not travel."""
        if self._arrival is None:
            return False
        self._arrival.wait()
        return self._table is not None

    @property
    def has_arrived(self) -> bool:
        """Whether `arrive` has found the sums of all ranks."""
        return self._table is not None

    def wanted(self) -> bool:
        """Return whether any rank has asked for a norm lately, once the sums have arrived."""
        if not self.arrive() or self._table is None:
            return False
        return bool(self._table[:, -1].any())

    def are_finite(self) -> bool:
        """Return whether the sums of all ranks have arrived and are finite."""
        return self.arrive() and self._table is not None and bool(self._table.isfinite().all())

    def norm(self, parameter: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the norm of a gradient; None if the sums do not give it."""
        column = self._column.get(id(parameter))
        if column is None or self._table is None or not self.has_norms:
            return None
        if dtype not in self._norms:
            squares = _added(self._table[:, :-1].unbind())
            self._norms[dtype] = squares.sqrt().to(dtype).unbind()
        return self._norms[dtype][column]


def _added(by_owner: Iterable[Tensor]) -> Tensor:
    """Add up in the order of owners; see [Note: one norm]."""
    return functools.reduce(torch.add, by_owner)


# --- one gradient -------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """An operation in place on a gradient: multiply or divide by a number, or clamp."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def apply(self, gradient: Tensor) -> None:
        """Apply the operation to a gradient, or to a flat tensor of several gradients."""
        self.function(gradient, *self.arguments)

    def is_nan(self) -> bool:
        """Return whether the operation makes every element NaN."""
        return any([each is not None and math.isnan(each) for each in self.arguments])

    def of_norm(self, norm: Tensor) -> Tensor | None:
        """Return the norm of a gradient after the operation; None if it is unknown."""
        if self.function not in (Tensor.mul_, Tensor.div_):
            return None
        scaled = norm.clone()
        self.function(scaled, abs(self.arguments[0]))
        return scaled


class LazyGradient(Tensor):
    """A stand-in for ``p.grad``; see [Note: lazy gradients].

    It has the shape, strides, type and device of the plain gradient, and no memory.
    """

    __torch_function__ = torch_private.disabled_torch_function

    answers: ClassVar[dict[Any, Callable[..., Any]]] = {}
    """Operations that need no values, by their overload in ``torch.ops``. A function returns
    NotImplemented if its arguments need them nevertheless."""

    plain: Tensor
    # All lazy gradients of the model.
    lazies: "LazyGradients"
    cut: Cut
    # The operations since backward, and those among them that are not applied yet.
    scalings: list[Scaling]
    due: list[Scaling]
    # The sum of squares before these operations, if this rank has added it up itself.
    squares: Tensor | None
    memory: "Memory"

    @staticmethod
    def __new__(cls, plain: Tensor, owner: "LazyGradients") -> "LazyGradient":
        made: LazyGradient = torch_private.make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            dtype=plain.dtype,
            layout=plain.layout,
            device=plain.device,
        )
        torch_private.explain_missing_memory(made, _NO_MEMORY)
        made.plain = plain
        made.lazies = owner
        return made

    def begin(self, cut: Cut, memory: "Memory") -> None:
        """Stand for the gradient of another backward pass."""
        self.cut = cut
        self.memory = memory
        self.scalings = []
        self.due = []
        self.squares = None

    def value(self) -> Tensor:
        """Return the plain gradient, once it is complete."""
        self.lazies.complete()
        return self.plain

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks func
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        answer = cls.answers.get(func)
        if answer is not None:
            result = answer(*args, **kwargs)
            if result is not NotImplemented:
                return result
        plain_args = [_values(each) for each in args]
        result = func(*plain_args, **{key: _values(each) for key, each in kwargs.items()})
        first = args[0] if args else None
        # An operation in place returns its argument.
        return first if isinstance(first, LazyGradient) and result is first.plain else result

    # Methods of Tensor that do not dispatch, or that need memory.

    @property
    def data(self) -> "LazyGradient":
        """The gradient itself, since autograd does not record it."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # otherwise an operation in place: p.grad.data /= 2
            self.value().data = value

    @property
    def is_current(self) -> bool:
        """Whether it is still the gradient of its parameter."""
        return self.cut.parameter.grad is self

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.value(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__dlpack__(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``Tensor.numpy``, of the plain gradient."""
        return self.value().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Like ``Tensor.tolist``, of the plain gradient."""
        return self.value().tolist()

    def data_ptr(self) -> int:
        """Like ``Tensor.data_ptr``, of the plain gradient."""
        return self.value().data_ptr()

    def storage(self) -> Any:
        """Like ``Tensor.storage``, of the plain gradient."""
        return self.value().storage()

    def untyped_storage(self) -> Any:
        """Like ``Tensor.untyped_storage``, of the plain gradient."""
        return self.value().untyped_storage()


def plain_of(gradient: Tensor | None) -> Tensor | None:
    """Return the tensor that a ``p.grad`` stands for, without completing it."""
    return gradient.plain if isinstance(gradient, LazyGradient) else gradient


def _values(argument: Any) -> Any:
    """Replace lazy gradients in an argument by plain ones."""
    if isinstance(argument, LazyGradient):
        return argument.value()
    if isinstance(argument, (list, tuple)):
        return type(argument)([_values(each) for each in argument])
    return argument


class Memory:
    """Detects writes by user code to the memory of a gradient, which others may share.

    Args:
        gradient: one of the gradients.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._version = torch_private.version_of(gradient)

    @property
    def is_changed(self) -> bool:
        """Whether user code has written to the memory since backward."""
        return torch_private.version_of(self._gradient) != self._version


# --- all gradients of a model -------------------------------------------------------------------


class _Latest(NamedTuple):
    """The latest scaling, to recognize it when it is applied to the next gradient."""

    key: tuple[object, ...]
    arguments: tuple[Any, ...]  # kept alive, since the key holds their ids
    scaling: Scaling


def _identity(argument: Any) -> object:
    if isinstance(argument, Tensor):
        return id(argument), torch_private.version_of(argument)
    return argument


class LazyGradients:
    """The lazy gradients of one model, from `backward()` until its updates are applied.

    Args:
        complete: a function that makes the plain gradients hold the mean, and then calls
            `completed`. None if this rank never gets complete gradients, since they have owners.
        lock: protects the scalings, since another thread may complete gradients meanwhile.
    """

    def __init__(
        self, complete: Callable[[], None] | None, lock: AbstractContextManager[Any]
    ) -> None:
        self.lock = lock
        self._complete = complete
        # Whether the plain gradients hold the mean, and no scaling is due.
        self._are_complete = True
        # Whether scalings still change the step: from backward() until step().
        self.precede_step = False
        self._sums = SquareSums(travel=False, is_wanted=False)
        # Views of DDP's buckets are kept from step to step. Others live as long as ``p.grad``, or
        # as long as user code holds them.
        self._of_views: dict[int, LazyGradient] = {}
        self._of_others: MutableMapping[int, LazyGradient] = weakref.WeakValueDictionary()
        self._cuts: dict[tuple[int, ...], list[Cut]] = {}
        self._latest: _Latest | None = None
        # The number of backward passes whose sums might have travelled.
        self._passes = 0
        # Whether this rank has asked for a norm since the last pass whose sums were due.
        self._is_asked = False
        # Whether any rank has; the same on all ranks.
        self._are_wanted = False

    # --- backward ---

    def begin_sums(self, *, always: bool = False, has_norms: bool = True) -> SquareSums:
        """Begin a deferred backward pass, and return its sums of squares.

        All ranks call this equally often, so they agree on the passes whose sums travel: those with
        the numbers 1, 2, 4, 8, … and every 64th. In between the sums travel if any rank had asked
        for a norm before the last one of these.

        Args:
            always: whether the sums travel in every pass.
            has_norms: see `SquareSums`.
        """
        self.end_sums()
        self._passes += 1
        passes = self._passes
        is_due = passes & (passes - 1) == 0 or passes % _LONGEST_SILENCE == 0
        travel = always or is_due or self._are_wanted
        self._sums = SquareSums(
            travel=travel, is_wanted=self._is_asked, is_due=is_due, has_norms=has_norms
        )
        if is_due:
            self._is_asked = False
        return self._sums

    def end_sums(self) -> None:
        """Forget the sums of the previous backward pass, but not whether any rank wants more."""
        if self._sums.is_due:
            self._are_wanted = self._sums.wanted()
        self._sums = SquareSums(travel=False, is_wanted=False)

    def cuts(self, parameters: Sequence[Tensor], flat: Tensor, layout: Layout) -> list[Cut]:
        """Return the cuts of a bucket; see `cuts_of`."""
        key = (*map(id, parameters), *layout)
        if (known := self._cuts.get(key)) is None:
            known = self._cuts[key] = cuts_of(parameters, flat.is_complex(), layout)
        return known

    def install(self, buckets: Iterable[Sequence[Cut]], *, are_complete: bool) -> None:
        """Replace gradients by lazy ones, at the end of a backward pass.

        Args:
            buckets: the cuts of each bucket.
            are_complete: whether the gradients already hold the mean.
        """
        self._are_complete = are_complete
        self.precede_step = True
        self._latest = None
        for cuts in buckets:
            memory: Memory | None = None
            for cut in cuts:
                gradient = cut.parameter.grad
                if gradient is None or isinstance(gradient, LazyGradient):
                    continue
                if memory is None or not torch_private.is_view(gradient):
                    memory = Memory(gradient)
                kept = self._of_views if torch_private.is_view(gradient) else self._of_others
                lazy = kept.get(id(cut.parameter))
                if lazy is None or lazy.plain is not gradient:
                    lazy = kept[id(cut.parameter)] = LazyGradient(gradient, self)
                lazy.begin(cut, memory)
                cut.parameter.grad = lazy

    def _all(self) -> list[LazyGradient]:
        return [*self._of_views.values(), *self._of_others.values()]

    def separate(self, parameter: Tensor) -> Tensor | None:
        """Return the plain gradient outside of DDP's buckets that is in use; None if there is none.

        User code may still hold it after ``zero_grad()`` has dropped it.
        """
        lazy = self._of_others.get(id(parameter))
        return plain_of(parameter.grad) if lazy is None else lazy.plain

    def withdraw(self, parameters: Iterable[Tensor]) -> None:
        """Put the plain gradients of some parameters back."""
        for parameter in parameters:
            if isinstance(parameter.grad, LazyGradient):
                parameter.grad = parameter.grad.plain

    def withdraw_all(self) -> None:
        """Put all plain gradients back."""
        self.withdraw([lazy.cut.parameter for lazy in self._all()])

    def forget_buckets(self) -> None:
        """Put all plain gradients back, and let go of the memory of DDP's buckets."""
        self.withdraw_all()
        self._of_views.clear()
        self._of_others.clear()
        self._cuts.clear()

    # --- the step ---

    def take_scalings(self, parameters: Iterable[Tensor]) -> dict[int, list[Scaling]]:
        """Return the scalings that are due, by the parameter's id. The caller applies them."""
        taken = {}
        for parameter in parameters:
            lazy = parameter.grad
            if isinstance(lazy, LazyGradient) and lazy.due:
                taken[id(parameter)] = lazy.due
                lazy.due = []
        return taken

    def note_norms(self, cuts: Iterable[Cut], flat: Tensor) -> None:
        """Add up squares before a scaling is applied, for norms that are asked for afterwards.

        Args:
            cuts: the cuts of a bucket.
            flat: the mean of the bucket. If the sums have arrived already, it is not read.
        """
        if self._sums.has_arrived:
            return
        for cut in cuts:
            lazy = cut.parameter.grad
            if isinstance(lazy, LazyGradient) and lazy.due and lazy.squares is None:
                lazy.squares = cut.squares(flat[cut.span.start : cut.span.stop])

    def completed(self) -> None:
        """Record that all plain gradients hold the mean, and apply scalings that are due to them.

        Only gradients that backward has completed have any left.
        """
        for lazy in self._all():
            if lazy.due and lazy.squares is None and not self._sums.has_arrived:
                lazy.squares = lazy.cut.squares(lazy.plain)
            for scaling in lazy.due:
                scaling.apply(lazy.plain.data)  # counts no version
            lazy.due = []
        self._are_complete = True

    def stepped(self) -> None:
        """Record that later scalings do not change the step."""
        self.precede_step = False

    def check_values(self) -> None:
        """Refuse a norm that needs the values of gradients that have owners."""
        if self._complete is None:
            raise UnsupportedConfigurationError(_NO_VALUES)

    def complete(self) -> None:
        """Make the plain gradients hold the mean, with all scalings."""
        if not self._are_complete and self._complete is not None:
            self._complete()

    # --- answers ---

    def record(
        self,
        lazies: Sequence[LazyGradient],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> bool:
        """Record an operation on gradients. Return False if the step has been taken without it."""
        with self.lock:
            if self.precede_step:
                scaling = self._scaling(function, arguments)
                for lazy in lazies:
                    lazy.scalings.append(scaling)
                    lazy.due.append(scaling)
                self._are_complete = False
            return self.precede_step

    def _scaling(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Scaling:
        """Return one object for all gradients that are scaled alike; see `DeferredBucket`."""
        key = (function, *[_identity(each) for each in arguments])
        if self._latest is None or self._latest.key != key:
            # User code may change a tensor later.
            copies = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
            self._latest = _Latest(key, arguments, Scaling(function, tuple(copies)))
        return self._latest.scaling

    def norm(self, lazy: LazyGradient, dtype: torch.dtype) -> Tensor | None:
        """Return the 2-norm of a gradient in ``dtype``; None if only torch can compute it."""
        if lazy.memory.is_changed:
            self.complete()
            return lazy.cut.squares(lazy.plain).sqrt().to(dtype)
        norm = self._unscaled_norm(lazy, dtype)
        for scaling in lazy.scalings:
            norm = None if norm is None else scaling.of_norm(norm)
        return norm

    def _unscaled_norm(self, lazy: LazyGradient, dtype: torch.dtype) -> Tensor | None:
        """Return the norm of a gradient as backward left it."""
        self._is_asked = True
        if self._sums.arrive():
            found = self._sums.norm(lazy.cut.parameter, dtype)
            if found is not None:
                return found
        if self._complete is None:
            return None
        if lazy.squares is None:
            self.complete()  # notes the sums of gradients that it scales
        if lazy.squares is None:
            lazy.squares = lazy.cut.squares(lazy.plain)
        return lazy.squares.sqrt().to(dtype)

    def is_finite(self, lazies: Sequence[LazyGradient]) -> Tensor | None:
        """Return whether all values are finite; None if that needs the values."""
        if any([lazy.memory.is_changed for lazy in lazies]):
            return None
        if not self._sums.has_norms and self._sums.are_finite():
            self._is_asked = True
            return torch.tensor(True, device=lazies[0].device)
        norms = []
        for lazy in lazies:
            norm = self._unscaled_norm(lazy, _SUM)
            if norm is None or lazy.dtype.itemsize > _LARGEST_ITEM:  # squares may overflow
                return None
            norms.append(norm)
        return torch.stack(norms).isfinite().all()


# --- operations that need no values -------------------------------------------------------------


def _vector_norm(
    gradient: Any,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if not gradient.is_current:
        return NotImplemented
    if ord != 2 or dim is not None or keepdim:
        gradient.lazies.check_values()
        return NotImplemented
    norm = gradient.lazies.norm(gradient, dtype or gradient.dtype.to_real())
    return NotImplemented if norm is None else norm


def _foreach_norm(gradients: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    if not _are_lazy(gradients):
        return NotImplemented
    norms = [_vector_norm(each, ord, dtype=dtype) for each in gradients]
    return NotImplemented if any([each is NotImplemented for each in norms]) else norms


def _scale(function: Callable[..., Any], gradient: Any, *arguments: Any, **options: Any) -> Any:
    if options or not _are_lazy([gradient]) or not _are_scalars(arguments):
        return NotImplemented
    return gradient if gradient.lazies.record([gradient], function, arguments) else NotImplemented


def _foreach_scale(function: Callable[..., Any], gradients: Any, *arguments: Any) -> Any:
    if not _are_lazy(gradients) or not _are_scalars(arguments):
        return NotImplemented
    return None if gradients[0].lazies.record(gradients, function, arguments) else NotImplemented


def _unscale(gradients: Any, found_inf: Tensor, inv_scale: Tensor) -> Any:
    """Check whether gradients are finite and multiply them, for GradScaler."""
    if not _are_lazy(gradients) or not gradients[0].lazies.precede_step:
        return NotImplemented
    is_finite = gradients[0].lazies.is_finite(gradients)
    if is_finite is None:
        return NotImplemented
    found_inf.masked_fill_(is_finite.logical_not().to(found_inf.device), 1.0)
    return _foreach_scale(Tensor.mul_, gradients, inv_scale)


def _are_lazy(gradients: Sequence[Any]) -> bool:
    """Return whether all gradients are lazy, in use, and of one model."""
    return all(
        [
            isinstance(each, LazyGradient)
            and each.is_current
            and each.lazies is gradients[0].lazies
            for each in gradients
        ]
    )


def _are_scalars(arguments: Iterable[Any]) -> bool:
    """Return whether all arguments are real numbers, or tensors without dimensions that hold one."""
    return all(
        [
            not each.dim() and not each.is_complex()
            if type(each) is Tensor
            else isinstance(each, (int, float)) or each is None
            for each in arguments
        ]
    )


LazyGradient.answers = {
    aten.detach.default: lambda gradient: gradient,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    torch_private.amp_unscale: _unscale,
}
for _function, _overloads, _foreach_overloads in (
    (
        Tensor.mul_,
        (aten.mul_.Tensor, aten.mul_.Scalar),
        (aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar),
    ),
    (
        Tensor.div_,
        (aten.div_.Tensor, aten.div_.Scalar),
        (aten._foreach_div_.Tensor, aten._foreach_div_.Scalar),
    ),
    (Tensor.clamp_, (aten.clamp_.default,), ()),
    (Tensor.clamp_min_, (aten.clamp_min_.default,), (aten._foreach_clamp_min_.Scalar,)),
    (Tensor.clamp_max_, (aten.clamp_max_.default,), (aten._foreach_clamp_max_.Scalar,)),
):
    for _overload in _overloads:
        LazyGradient.answers[_overload] = functools.partial(_scale, _function)
    for _overload in _foreach_overloads:
        LazyGradient.answers[_overload] = functools.partial(_foreach_scale, _function)
