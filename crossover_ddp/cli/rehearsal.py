"""Runs steps of a stub in place of a job's model, once with each way to exchange its gradients.

`crossover-ddp advise` runs this in the ranks of the job that it has measured. The stub has as many
parameters of the same sizes, and its layers compute for as long as those of the job. So the
processor time of messages, codecs and updates in parts counts as it does in the job. Our design.
"""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from crossover_ddp._system import environment

_WARM_UP: Final = 7
"""Steps without computation, until buckets are settled and no step is checked any more."""
_ROUNDS: Final = 4
_STEPS: Final = 3
"""The steps of a way that are timed in each round. One before them is not."""
_CALIBRATION_S: Final = 0.1
_LONGEST_S: Final = 1.5
"""Longer steps are not rehearsed, since the processor time of messages hardly counts in them."""

WHOLE: Final = "whole"
DEFERRED: Final = "deferred"
HALF: Final = "half"
INT8: Final = "int8"


def rehearsed(model: Any, block: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the time of a step with each way to exchange the gradients of a DDP ``model``.

    None on a GPU, where processor time is hidden, and if steps are long. ``block`` is the meter's
    latest block with communication apart from compute.

    **Collective**: all ranks of the model's process group call it, between two steps.
    """
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from crossover_ddp import DecoupledState

    group = model.process_group
    compute_s = block["step_s"] - block["met_s"] - block["wire_s"]
    # The slowest rank determines C, and all ranks must come to the same decision.
    figures = torch.tensor([block["step_s"], compute_s, block["processor_s"]], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX, group=group)
    step_s, compute_s, processor_s = figures.tolist()
    if next(model.parameters()).device.type != "cpu" or step_s > _LONGEST_S:
        return None
    as_made = {
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
    }
    work = _Work(processor_s / compute_s, lambda: dist.barrier(group))
    steps = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_enabled())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        for way, register in _ways(group).items():
            network = _stub(model.module, block, compute_s, work)
            options = DecoupledState.ddp_options(network) if way == DEFERRED else as_made
            ddp = DistributedDataParallel(network, process_group=group, **options)
            optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.5)
            close = getattr(register(ddp, optimizer), "close", None)
            if close is not None:
                stack.callback(close)
            steps[way] = _Step(ddp, optimizer)
            for _ in range(_WARM_UP):
                steps[way].take()
        work.is_on = True
        times_s: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(_ROUNDS):
            for way in [*steps][:: 1 - 2 * (number % 2)]:
                times_s[way] += steps[way].timed()
    return {way: statistics.median(times) for way, times in times_s.items()}


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    """Let states work as usual: `advise` disables them in the script that it measures."""
    disabled = os.environ.pop(environment.DISABLE, None)
    try:
        yield
    finally:
        if disabled is not None:
            os.environ[environment.DISABLE] = disabled


def _ways(group: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """Return functions that register a way's hook on a DDP model, and return its state if any."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from crossover_ddp import (
        CompressedState,
        DecoupledState,
        Int8,
        compressed_hook,
        decoupled_hook,
    )

    def deferred(ddp: Any, optimizer: Any) -> Any:
        state = DecoupledState(optimizer, group, defer="always", compare_replicas=False)
        ddp.register_comm_hook(state, decoupled_hook)
        return state

    def int8(ddp: Any, optimizer: Any) -> Any:
        state = CompressedState(Int8(), process_group=group, compare_replicas=False)
        ddp.register_comm_hook(state, compressed_hook)
        return state

    return {
        WHOLE: lambda ddp, optimizer: None,
        DEFERRED: deferred,
        HALF: lambda ddp, optimizer: ddp.register_comm_hook(group, fp16_compress_hook),
        INT8: int8,
    }


class _Work:
    """Computation of a given length: products of matrices, and sleep if the job does not compute.

    The number of products is fixed, not the time, so it takes longer if other threads use the processor.

    Args:
        busy: the processors that the job's computation occupies.
        meet: a function that waits until all ranks have called it.
    """

    def __init__(self, busy: float, meet: Callable[[], object]) -> None:
        import torch

        self.is_on = False
        self._matrices = itertools.cycle([torch.full((128, 128), 1e-3) for _ in range(32)])
        # The part of the time in which the job only waits, such as for a device that is emulated.
        self._asleep = max(0.0, 1 - busy) if busy < 0.5 else 0.0
        self._owed_s = 0.0
        self._product_s = 0.0
        meet()
        begin_s = time.monotonic()
        count = 0
        while (took_s := time.monotonic() - begin_s) < _CALIBRATION_S:
            self._multiply()
            count += 1
        self._product_s = took_s / count

    def _multiply(self) -> None:
        each = next(self._matrices)
        each.mm(each)

    def run(self, length_s: float) -> None:
        """Compute for ``length_s``."""
        if not self.is_on:
            return
        if self._asleep:
            time.sleep(length_s * self._asleep)
        self._owed_s += length_s * (1 - self._asleep)
        while self._owed_s >= self._product_s:
            self._owed_s -= self._product_s
            self._multiply()


class _Step:
    """Takes steps of a stub."""

    def __init__(self, ddp: Any, optimizer: Any) -> None:
        self._ddp = ddp
        self._optimizer = optimizer

    def take(self) -> None:
        """Take a step."""
        import torch

        self._ddp(torch.zeros(1, requires_grad=True)).sum().backward()
        self._ddp.module.rest()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def timed(self) -> list[float]:
        """Return the lengths of some steps, each from one forward to the next."""
        self.take()
        begins_s = []
        for _ in range(_STEPS):
            begins_s.append(time.monotonic())
            self.take()
        begins_s.append(time.monotonic())
        for _ in self._ddp.module.parameters():  # apply the last step's updates
            pass
        return [end_s - begin_s for begin_s, end_s in itertools.pairwise(begins_s)]


def _stub(network: Any, block: Mapping[str, Any], compute_s: float, work: _Work) -> Any:
    """Return a model with the trained parameters of ``network``, in as many modules."""
    import torch
    from torch import nn

    class Answer(torch.autograd.Function):
        """Returns the gradients that a layer keeps, after the time that it has for backward."""

        @staticmethod
        def forward(ctx: Any, layer: Any, value: Any, *parameters: Any) -> Any:
            ctx.layer = layer
            work.run(layer.forward_s)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            work.run(ctx.layer.backward_s)
            return None, gradient, *ctx.layer.answers

    class Layer(nn.Module):
        """Has the parameters of one module."""

        forward_s = 0.0
        backward_s = 0.0

        def __init__(self, like: list[Any]) -> None:
            super().__init__()
            self.answers = []
            for number, each in enumerate(like):
                self.register_parameter(str(number), nn.Parameter(torch.zeros_like(each.data)))
                values = torch.linspace(-1e-3, 1e-3, each.numel(), dtype=each.dtype)
                self.answers.append(values.view(each.shape))
            self.size_bytes = sum(each.nbytes for each in self.answers)

        def forward(self, value: Any) -> Any:
            return Answer.apply(self, value, *self.parameters())

    class Stub(nn.Sequential):
        """Has all layers."""

        def rest(self) -> None:
            """Compute for the rest of C, beside forward and the last backward."""
            work.run(compute_s - forward_s - backward_s)

    seen: set[int] = set()
    layers = []
    for module in network.modules():
        own = [p for p in vars(module)["_parameters"].values() if p is not None]
        own = [p for p in own if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if own:
            layers.append(Layer(own))
    backward_s = min(block["backward_s"], compute_s)
    forward_s = max(0.0, compute_s / max(1.0, block["forwards"]) - backward_s)
    share = _share_of_backward(block["ready"], backward_s)
    done_bytes = 0
    for layer in reversed(layers):
        begun = share(done_bytes)
        done_bytes += layer.size_bytes
        layer.backward_s = backward_s * (share(done_bytes) - begun)
        layer.forward_s = forward_s * (share(done_bytes) - begun)
    return Stub(*layers)


def _share_of_backward(
    ready: list[tuple[int, float]], backward_s: float
) -> Callable[[float], float]:
    """Return a function from the bytes of gradients that are ready to the part that is computed.

    ``ready`` has each bucket's size, and its time after the last bucket, which is negative.
    """
    sizes = [0, *itertools.accumulate(size for size, _ in ready)]
    parts = [0.0, *(max(0.0, 1 + after_s / max(backward_s, 1e-9)) for _, after_s in ready)]

    def share(done_bytes: float) -> float:
        for end in range(1, len(sizes)):
            if done_bytes <= sizes[end]:
                part = (done_bytes - sizes[end - 1]) / (sizes[end] - sizes[end - 1])
                return parts[end - 1] + part * (parts[end] - parts[end - 1])
        return 1.0

    return share
