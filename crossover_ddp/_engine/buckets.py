"""The buckets of backward passes, their contents and failures, and the turn in a journey.

`BehindLastBucket` sends other data of the model with a step's last bucket.

[Note: errors after backward] An exception must not leave a hook, because DDP is unusable
afterwards. An exception in the Future that the hook returned surfaces as a misleading cast error.
So a failing bucket is completed like any other. The failure is raised on the training thread after
DDP has finished the backward pass, in a callback of the autograd engine: ``backward()`` raises that
very error. DDP queues its own callback for the end of backward after our hook has run, so our
callback queues another one. Outside of a backward pass, for example in Join's shadow pass, no
callback runs. There the Future carries the exception.

[Note: the turn in a journey] The journey of a step's last bucket releases the job's turn, requests
the next one and acquires it, in this order, on all ranks. When the hook of the last bucket runs,
the step's compute has been launched. So ``release()`` comes first, on the hook's thread, unless
owners also compute for this step. The request travels while gradients are gathered: a sibling that
computes meanwhile sees that this job waits. ``acquire()`` comes before DDP's Future completes,
because the optimizer and forward follow. A deferred journey does not acquire the turn; the next
forward does.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import check_exchanged_group, check_group, flat_gradients, weakly
from crossover_ddp._ddp.digests import COMPARED_EVERY, Digests
from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._ddp.layout import Span
from crossover_ddp._ddp.module_buffers import ModuleBuffers
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

from .journeys import (
    Completion,
    Gate,
    GradientFuture,
    Journey,
    JourneyCoroutine,
    Place,
    nothing,
    uncompiled_when_called,
)
from .links import Layout, Link

if TYPE_CHECKING:
    from .exchange import Exchange
    from .observe import Meter

# Integers by their size in bytes.
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Turn(Protocol):
    """The interface of a mutex, as far as the engine needs it.

    If a method raises, ``backward()`` raises the same error.
    """

    @property
    def awaits_device(self) -> bool:
        """Whether the device must finish a step's buckets before the next turn is acquired."""

    @property
    def mode(self) -> str:
        """The name that the timeline shows for how the job shares the device with its siblings."""

    def release(self) -> None:
        """Give the turn away, because the step's compute has been launched. Must not block.

        It is called on the hook's thread, or on the thread where owners compute.
        """

    def request(self) -> None:
        """Join the siblings' queue ahead of `acquire`. It is called on a thread of the engine."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the next turn, see ``awaits_device``. Return whether it was acquired.

        It is called on a thread that may block. If ``blocking`` is False, it returns False instead
        of blocking.
        """


class Backward:
    """The buckets of one backward pass, up to and including the one that DDP calls the last."""

    turn: Turn | None = None
    # Whether DDP has handed out the last bucket.
    is_whole = False
    # Whether the step's compute has been launched, so that a sibling may have the turn.
    compute_ended = False
    # The time up to which waits for these buckets have been counted.
    waited_s: float | None = None

    def __init__(
        self, number: int = 0, compute_ends: Callable[["Backward"], None] | None = None
    ) -> None:
        self.number = number
        # Deferred buckets stay here until all are reduced, since forward needs the last one first.
        self.gathers = Gate()
        # For each bucket, its size in bytes and the time when its hook ran.
        self.ready: list[tuple[int, float]] = []
        # The Futures of another library's hook that `crossover_wrapper` wraps.
        self.futures: list[GradientFuture] = []
        self._compute_ends = compute_ends
        self._lock = threading.Lock()
        self._watching = 0  # callbacks that will run at the end of backward
        self._error: BaseException | None = None

    def watch(self, *, is_last: bool) -> None:
        """Have a failure raised once DDP has finished this backward pass.

        Call it in each bucket's hook. The first bucket's callback catches early failures. The last
        bucket's callback runs at the end of backward, even if earlier buckets were ready in a
        nested backward pass that has already ended.
        """
        if (not self.ready or is_last) and after_backward(self._after_ddp):
            with self._lock:
                self._watching += 1

    def complete(self, future: GradientFuture, result: Tensor, error: BaseException | None) -> None:
        """Complete a bucket's Future. It carries ``error`` only if no callback will raise it."""
        with self._lock:
            is_watched = self._watching > 0
            if is_watched:
                self._error = self._error or error
        if error is None or is_watched:
            try:
                return future.set_result(result)
            except RuntimeError as lost:  # the device has failed
                error = error or lost
        future.set_exception(error)  # type: ignore[arg-type]

    def _after_ddp(self) -> None:
        # A nested backward pass (re-entrant checkpointing) may end before the last bucket is ready.
        # From then on no callback is left, so a bucket that fails later puts its error in its
        # Future.
        with self._lock:
            self._watching -= 1
            error = self._error
            self._error = None
        if error is not None:
            raise error

    def end_compute(self) -> None:
        """Note that the step's compute has been launched, and release the turn.

        Only the first call counts.
        """
        if self.compute_ended:
            return
        self.compute_ended = True
        if self._compute_ends is not None:
            self._compute_ends(self)
        if self.turn is not None:
            self.turn.release()

    def refuse(self, grad_bucket: dist.GradBucket) -> None:
        """Note that a bucket is not exchanged.

        If it is the last one, the step's compute still ends and the gate still opens.
        """
        if grad_bucket.is_last():
            self.end_compute()
            self.gathers.open()


class Passes:
    """The backward passes of one process group, one after the other.

    Args:
        compute_ends: a function to call when a step's compute has been launched.
    """

    def __init__(self, compute_ends: Callable[[Backward], None]) -> None:
        self.current = Backward(compute_ends=compute_ends)
        # The number of buckets whose hook has run.
        self.entered = 0
        self._compute_ends = compute_ends

    def enter(self, grad_bucket: dist.GradBucket, turn: Turn | None = None) -> Backward:
        """Return the backward pass of a bucket, whose hook must make this call once.

        The last bucket ends the pass, so that the next bucket enters another one.
        """
        self.entered += 1
        backward = self.current
        backward.turn = turn
        backward.watch(is_last=grad_bucket.is_last())
        if grad_bucket.is_last():
            backward.is_whole = True
            self.current = Backward(backward.number + 1, self._compute_ends)
        return backward


class _Checked(NamedTuple):
    """Weak references to the model and the process group that a bucket was checked with."""

    model: Callable[[], DistributedDataParallel | None]  # returns None if the model is not known
    group: Callable[[], dist.ProcessGroup | None]  # the model's group, which is the hook's too


class BucketChecks:
    """Checks the buckets of one process group, each once for each group that its model is given.

    It holds the group by a weak reference.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._checked: Any = WeakTensorKeyDictionary()  # keys: one parameter of each bucket

    def check(self, grad_bucket: dist.GradBucket) -> None:
        """Raise ``UnsupportedConfigurationError`` for a bucket that the group cannot exchange."""
        group = self._group()
        if group is None:
            return
        parameter = grad_bucket.parameters()[0]
        checked = self._checked.get(parameter)
        if checked is None:
            flat_gradients(grad_bucket)  # checked once, since parameters do not change their kind
            model = check_group(grad_bucket, group)
        else:
            model = checked.model()
            if model is None or model.process_group is checked.group():
                return
            check_exchanged_group(model, group)
        its_group = None if model is None else model.process_group
        self._checked[parameter] = _Checked(weakly(model), weakly(its_group))


class Bucket(Journey):
    """The journey of one of DDP's buckets."""

    # Whether the memory will be reused before the gather. `all_reduced` then returns False.
    _is_dropped = False

    def __init__(
        self,
        grad_bucket: dist.GradBucket,
        layout: Layout,
        backward: Backward,
        place: Place,
        link: Link,
        meter: "Meter",
    ) -> None:
        super().__init__(f"bucket {grad_bucket.index()}", place, link.sent)
        self.index = grad_bucket.index()
        self.last = grad_bucket.is_last()
        self.result = grad_bucket.buffer()
        # The same memory with its own version counter: user code that writes to gradients bumps
        # theirs.
        self.flat = self.result.data
        self.layout = layout  # equal shards
        # Whether results must depend neither on the number of ranks nor on the buckets.
        self.is_folded = fold_of(grad_bucket) is not None
        self.backward = backward
        self.link = link
        self.meter = meter  # the hook's meter
        self.waits = meter
        self.future = place.future()
        self.own_shard = Completion()  # reached when this rank's shard is reduced
        self.own_shard.waits = meter
        self._on_device: Callable[[], None] = nothing

    async def all_reduced(self) -> bool:
        """Mark this rank's shard as reduced, and wait until all buckets of the step are reduced.

        Reductions end in the order of the buckets, so the last bucket opens the gate, and it
        resumes first. Returns False if the bucket was dropped meanwhile.
        """
        self.own_shard.reach(None, self.place.mark())
        gathers = self.backward.gathers
        if self.last:
            await gathers.passed_first()
        else:
            await gathers
        return not self._is_dropped

    def wait(self, *, on_host: bool = False) -> None:
        """Block until the mean has arrived. On a device, order the caller's later work behind it.

        It is safe to call it more than once.

        Args:
            on_host: whether to block also until the device has the mean.
        """
        gathers = self.backward.gathers
        if not self.backward.is_whole and not gathers.is_open:
            if self.link.in_program_order:
                raise ExchangeError(
                    "backward() ended with an exception before the last bucket, so that the gather of this bucket was "
                    "never issued; restart the job"
                )
            gathers.open()
        super().wait()
        if on_host:
            self._on_device()

    def drop(self) -> None:
        """Let the next backward pass reuse the memory. No rank will wait for this bucket."""
        self._is_dropped = self.link.in_program_order and not self.backward.is_whole
        if self._is_dropped:
            self.own_shard.wait()
        else:
            self.wait()

    def exposed_until(self, end_s: float) -> float:
        """Return the seconds that backward has waited for this bucket alone.

        Waiting begins when the hook of the step's last bucket runs.
        """
        backward = self.backward
        since_s = self.begun_s if self.last else backward.waited_s
        if since_s is None or end_s <= since_s:
            return 0.0
        backward.waited_s = end_s
        return end_s - since_s

    def end(self, error: BaseException | None) -> None:
        """End the journey, and complete the Future if backward waits for the bucket.

        An error is then raised after backward, see [Note: errors after backward].
        """
        if error is None and self.when_computed is not None:
            raise RuntimeError("its journey has sent it without awaiting bucket.computed() first")
        if self.last:
            self.backward.end_compute()  # in case the journey has not released the turn
        if self.deferred and error is None:
            self._on_device = self.place.reached()
        super().end(error)
        self.own_shard.reach(error, self._follow)
        if not self.deferred:
            self._is_followed = True  # the Future orders its waiter behind the work
            with self.place.side():
                self.backward.complete(self.future, self.result, error)


Join = Callable[[], Turn]


class JourneyTurn:
    """The job's turn as a bucket's journey uses it, see [Note: the turn in a journey].

    `release` acts only in the journey of a step's last bucket. So do `request` and `acquire`, which
    also need a mutex and do nothing in a deferred journey: there the next forward acquires the
    turn.

    Args:
        bucket: the bucket.
        link: the bucket's link.
        turn: the job's mutex; None if the job has none, or has yet to join its siblings.
        join: a function that joins the siblings and returns the mutex; None if there is nothing to
            join. It is collective and may block. So it is called in `request` over gloo, and in
            `acquire` on NCCL and with one rank: all ranks reach these in the same order.
    """

    def __init__(self, bucket: Bucket, link: Link, turn: Turn | None, join: Join | None) -> None:
        self._bucket = bucket
        self._link = link
        self._turn = turn
        self._join = join
        self._is_shared = bucket.last and (turn is not None or join is not None)
        # On NCCL, a function that blocks until the device has reached the point of the request.
        self._reached = bucket.place.reached() if self._is_shared else nothing

    @property
    def awaits_device(self) -> bool:
        """Whether to wait for the device, see `Turn.awaits_device`.

        Until the job has joined its siblings, the device is always awaited.
        """
        if self._turn is None:
            return self._is_shared
        return self._is_shared and self._turn.awaits_device

    def release(self) -> None:
        """Give the turn to a sibling, because this step's compute has been launched.

        Later calls do nothing.
        """
        bucket = self._bucket
        if not bucket.last:
            return
        if bucket.when_computed is None:
            bucket.backward.end_compute()  # owners' work ends on the journey's stream
        else:
            bucket.as_starter(bucket.backward.end_compute)  # backward ran on the hook's stream

    def request(self) -> None:
        """Queue for the next turn behind the sibling jobs, when the exchange is half done."""
        if not self._is_shared or self._bucket.deferred:
            return
        if self._link.in_program_order:
            # Ranks may issue only collectives here. `acquire` requests once the device gets here.
            self._reached = self._bucket.place.reached()
        elif self._link.size > 1:
            self._joined().request()

    async def acquire(self) -> None:
        """Wait for the next turn.

        Without siblings the host may run ahead of its device, as it would without a mutex.
        """
        if not self._is_shared or self._bucket.deferred:
            return
        turn = self._turn
        in_program_order = self._link.in_program_order
        whole_way = self._bucket.place.reached()
        self._bucket.done_s = time.monotonic()
        if turn is not None and not in_program_order and turn.acquire(blocking=False):
            return  # without a hop to another thread
        await self._link.settle()
        if in_program_order and self.awaits_device:
            self._reached()
            self._joined().request()
            whole_way()
            self._bucket.done_s = time.monotonic()
        self._joined().acquire()

    def _joined(self) -> Turn:
        if self._turn is None:
            assert self._join is not None
            self._turn = self._join()
        return self._turn


BucketJourney = Callable[[Bucket, Link, JourneyTurn], JourneyCoroutine]


# --- behind the last bucket -----------------------------------------------------------------------


class _Model:
    """The data of one model that travel behind the last bucket of its steps."""

    def __init__(self) -> None:
        self.digests = Digests()
        # The keys refer to the state that the model's hook was registered with.
        self.buffers: dict[weakref.ref[Any] | None, ModuleBuffers] = {}


class BehindLastBucket:
    """Sends digests of a model's parameters, and its buffers, with the last bucket of a step.

    Args:
        group: the process group. It is held by a weak reference.
        at_each_step: the function `at_each_step` in ``observe.py``.
    """

    def __init__(self, group: dist.ProcessGroup, at_each_step: Callable[..., Any]) -> None:
        self._group = weakref.ref(group)
        self._at_each_step = at_each_step
        self._models: Any = WeakTensorKeyDictionary()  # keys: the parameters of a last bucket

    def compare(self, exchange: "Exchange", grad_bucket: dist.GradBucket, state: object) -> None:
        """Compare the ranks' parameters, if the bucket is the last one of a step.

        This happens in steps 1, 2, 4, 8, … and in every thousandth step, see [Note: digests] in
        ``_ddp/digests.py``. **Collective**.
        """
        group = self._group()
        if exchange.size == 1 or group is None or not grad_bucket.is_last():
            return
        digests = self._model_of(grad_bucket).digests
        step = digests.steps = digests.steps + 1
        if digests.comparison is None and step & (step - 1) and step % COMPARED_EVERY:
            return
        look = digests.exchanged(grad_bucket, group, state, exchange.begin, self._at_each_step)
        if look is not None:
            look = functools.partial(look, functools.partial(gather_objects, group))
            if not after_backward(look):
                look()

    def send_buffers(
        self, exchange: "Exchange", grad_bucket: dist.GradBucket, state: object, meter: "Meter"
    ) -> None:
        """Send rank 0's buffers, see [Note: buffers behind the gradients].

        Call it for the last bucket of a step, on all ranks.
        """
        network = exchange.networks[grad_bucket.buffer().device]
        if exchange.size == 1 or network.in_program_order:
            return
        sources = self._model_of(grad_bucket).buffers
        key = None if state is None else weakref.ref(state)
        if (source := sources.get(key)) is None:
            source = sources[key] = _agreed_buffers(exchange, grad_bucket, state)
        copy = source.copy() if source.travel else None
        if copy is not None:
            flat, layout = copy.flat, [copy.flat.numel()] + [0] * (exchange.size - 1)
            name = f"bucket {grad_bucket.index()}'s buffers"
            copy.wait = exchange.begin(
                lambda link: link.all_gather(flat, layout),
                flat,
                name,
                deferred=True,
                meter=meter,
            ).wait

    def _model_of(self, last: dist.GradBucket) -> _Model:
        """Return the record of the model that ``last`` belongs to.

        DDP may just have rebuilt the bucket with other parameters, so any known parameter will do.
        """
        parameters = last.parameters()
        if (found := self._models.get(parameters[0])) is None:
            known = (self._models[each] for each in parameters if each in self._models)
            found = next(known, None) or _Model()
            for each in parameters:
                self._models[each] = found
        return cast(_Model, found)


def _agreed_buffers(
    exchange: "Exchange", grad_bucket: dist.GradBucket, state: object
) -> ModuleBuffers:
    """Return the buffers of the model that owns the bucket. They travel if all ranks agree."""
    device, cpu = grad_bucket.buffer().device, torch.device("cpu")
    byte_device = cpu if exchange.networks.sends_messages(cpu) else device
    buffers = ModuleBuffers(grad_bucket, state, sends=exchange.rank == 0, byte_device=byte_device)
    nbytes = buffers.nbytes(device)
    alike = exchange.gather_numbers([nbytes], device) == [[nbytes]] * exchange.size
    if alike and nbytes > 0:
        buffers.begin()
    return buffers


# --- gradients of earlier micro-batches -----------------------------------------------------------


class Fold(Protocol):
    """Adds gradients of earlier micro-batches to a model's buckets; see `VirtualRanks`."""

    def add_to(self, grad_bucket: dist.GradBucket, state: object, *, is_wrapped: bool) -> None:
        """Add to a bucket, before its hook reads it. Raises to refuse the hook.

        Args:
            grad_bucket: the bucket that DDP passed to the hook.
            state: the state that the hook was registered with.
            is_wrapped: whether another library's hook exchanges the bucket.
        """

    def link(self, grad_bucket: dist.GradBucket, network: Any) -> Link:
        """Return the network's next link, which averages over all micro-batches of the step."""


_folds: Any = WeakTensorKeyDictionary()  # keys: parameters; values: weak references


def set_fold(parameters: Sequence[Tensor], fold: Fold) -> None:
    """Let ``fold`` add to the buckets of these parameters. It is held by a weak reference."""
    for parameter in parameters:
        _folds[parameter] = weakref.ref(fold)


def fold_of(grad_bucket: dist.GradBucket) -> Fold | None:
    """Return the fold that adds to a bucket, if there is one."""
    if not len(_folds):
        return None
    found = _folds.get(grad_bucket.parameters()[0])
    return None if found is None else found()


# --- the parameters and gradients in a bucket -----------------------------------------------------


class Content(NamedTuple):
    """One parameter of a bucket, with its gradient."""

    parameter: Tensor
    gradient: Tensor
    span: Span  # the gradient's place in the flat buffer


class Run(NamedTuple):
    """Consecutive elements of a parameter that travel together."""

    parameter: Tensor
    begin: int  # the index of the first element
    span: Span  # the elements' place in the buffer that travels


def part_of(flat: Tensor, span: Span) -> Tensor:
    """Return a view of the elements of ``flat`` that ``span`` covers."""
    return flat[span.start : span.stop]


def bits_of(values: Tensor) -> Tensor:
    """Return a view of floating-point values as integers of the same size."""
    return values.view(_INTEGERS[values.itemsize])


def copy_parts(source: Tensor, target: Tensor, moves: Sequence[tuple[Span, Span]]) -> None:
    """Copy parts of one flat buffer to another one.

    Args:
        source: the buffer to read.
        target: the buffer to write to.
        moves: for each part, its span in ``source`` and its span in ``target``.
    """
    if moves:  # torch refuses empty lists
        torch._foreach_copy_(
            [part_of(target, place) for _, place in moves],
            [part_of(source, span) for span, _ in moves],
        )


def contents_of(bucket: dist.GradBucket, buffer: Tensor) -> list[Content]:
    """Return the parameters of a bucket, in the order of their gradients in ``buffer``.

    Raises if the gradients do not fill ``buffer`` exactly.
    """
    contents = []
    start = 0
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        stop = start + parameter.numel()
        if parameter.is_complex() and not buffer.is_complex():
            stop += parameter.numel()  # DDP shows complex gradients as pairs of real numbers
        ordered = _as_parameter(parameter, gradient, buffer[start:stop])
        contents.append(Content(parameter, ordered, Span(start, stop)))
        start = stop
    if start != buffer.numel():
        raise UnsupportedConfigurationError(
            f"expected a bucket of {start} elements, got {buffer.numel()}: this version of torch "
            "lays out its buckets in a way that this hook does not know; use another version of "
            "torch, or plain DDP"
        )
    return contents


def _as_parameter(parameter: Tensor, gradient: Tensor, part: Tensor) -> Tensor:
    """Return the gradient in the parameter's memory order, as DDP lays it out in the buffer.

    The tensors in ``bucket.gradients()`` have the parameters' shapes. But they read the elements in
    contiguous order, whatever order the parameter itself has.
    """
    if parameter.is_contiguous() or parameter.is_complex():
        return gradient
    return view_of(part, parameter)


def view_of(part: Tensor, parameter: Tensor) -> Tensor:
    """Return ``part`` of a flat buffer as a view with the shape of ``parameter``.

    The strides are the ones that DDP uses for the gradient of ``parameter``.
    """
    return part.as_strided(parameter.shape, _strides_in_bucket(parameter))


def _strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    if parameter.is_contiguous() or is_dense(parameter):
        return parameter.stride()
    # The parameter has gaps or overlaps, so DDP uses contiguous order.
    return torch.empty(parameter.shape, device="meta").stride()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# --- the end of backward --------------------------------------------------------------------------


_caller = threading.local()


@contextlib.contextmanager
def errors_to_caller() -> Iterator[None]:
    """Have the hooks that the block calls put their errors into their Futures.

    Otherwise ``backward()`` raises them, see [Note: errors after backward]. It is for a caller that
    waits for the Futures itself, where there is no DDP.
    """
    _caller.gets_errors = True
    try:
        yield
    finally:
        _caller.gets_errors = False


def after_backward(callback: Callable[[], None]) -> bool:
    """Have ``callback`` called once DDP has finished this backward pass.

    Call it in a hook. ``backward()`` raises what ``callback`` raises. Returns False outside of a
    backward pass and in `errors_to_caller`, where ``callback`` will not be called.
    """
    if getattr(_caller, "gets_errors", False):
        return False
    return _queue(functools.partial(_run_at_end, callback))


@uncompiled_when_called
def _run_at_end(callback: Callable[[], None]) -> None:
    if not _queue(functools.partial(_run, callback)):
        callback()


@uncompiled_when_called
def _run(callback: Callable[[], None]) -> None:
    callback()


def _queue(callback: Callable[[], None]) -> bool:
    try:
        Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False
    return True
