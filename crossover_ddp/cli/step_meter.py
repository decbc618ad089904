"""Times the steps of any script that trains with DistributedDataParallel.

`crossover-ddp advise` copies this file to ``sitecustomize.py`` in a directory, and puts that
directory first on the script's PYTHONPATH. So Python runs the copy when it starts. The copy imports
nothing from this package, and writes its recordings to the same directory.

[Note: blocks of steps]
DDP forms its buckets in the first few steps. After that, two kinds of blocks alternate. In the
first kind, buckets are sent at the same time as in plain DDP, and a step takes C + N. In the second
kind, buckets are held back until the end of backward. They are sent once the device has finished
and all ranks have met. Such a step takes C + M, plus the time that ranks wait for each other, which
is recorded separately. In the second kind, the time from the end of the model's last forward to its
last bucket counts as backward.

A block begins and ends with an idle device, so the host's clock suffices. In both kinds, the
gradient is the mean over ranks. Our design.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from typing import Any

WARM_UP_STEPS = 5
BLOCK_STEPS = 6
# If more backwards in a row than this belong to other models, one of those is measured instead.
_PATIENCE = 2 * BLOCK_STEPS
_HERE = os.path.dirname(os.path.abspath(__file__))
_DDP = "torch.nn.parallel.distributed"


class _Meter:
    """Measures the steps of one model, including any traffic of other models in these steps."""

    def __init__(self) -> None:
        self._model: Any = None
        # How many backwards of other models there were since the last one of `_model`. Because of
        # the initial value, the first model is measured at once.
        self._others = _PATIENCE
        # Negative while the model warms up.
        self._step = 0
        # The kind of the current block: whether communication is apart from compute.
        self._apart = False
        # Whether this process has written a block.
        self._has_written = False
        # When the block began. None before the first block.
        self._block_s: float | None = None
        # When the model's last forward ended.
        self._forward_s: float | None = None
        # Buckets that wait for the end of backward: buffer, process group and Future.
        self._held = list[Any]()
        # Futures of the all-reduces in this step.
        self._sent = list[Any]()
        self._sums = dict.fromkeys(("backward_s", "met_s", "wire_s", "bytes"), 0.0)

    def end_forward(self, model: Any) -> None:
        """Record when a training forward ends, in steps that keep communication apart."""
        import torch

        if self._apart and model is self._model and torch.is_grad_enabled():
            self._forward_s = _now_s(next(model.parameters()).device)

    def exchange(self, model, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        """Send a bucket now or at the end of backward. Return a Future for the mean over ranks."""
        from torch.futures import Future

        buffer = bucket.buffer()
        self._sums["bytes"] += buffer.numel() * buffer.itemsize
        if not self._apart:
            self._send(buffer, model.process_group)
            future = self._sent[-1].then(lambda done: done.value()[0])
        else:
            future = Future(devices=[buffer.device] if buffer.device.type != "cpu" else None)
            self._held.append((buffer, model.process_group, future))
        if bucket.is_last():
            self._end_backward(model, buffer.device)
        return future

    def _send(self, buffer: Any, group: Any) -> None:
        import torch.distributed as dist

        self._sent.append(
            dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True).get_future()
        )

    def _end_backward(self, model: Any, device: Any) -> None:
        if self._held:  # DDP waits for them at the end of each model's backward
            self._send_held(device, model)
        self._others = 0 if model is self._model else self._others + 1
        if self._others > _PATIENCE:
            self._measure(model)
        if model is self._model:
            if self._step % BLOCK_STEPS == BLOCK_STEPS - 1:
                for sent in self._sent:
                    sent.wait()
                self._end_block(_now_s(device), model.process_group.size())
            self._step += 1
            self._sent = []

    def _measure(self, model: Any) -> None:
        """Measure this model from now on."""
        self._model = model
        self._others = 0
        self._step = -WARM_UP_STEPS
        self._apart = False
        self._block_s = None

    def _send_held(self, device: Any, model: Any) -> None:
        import torch
        import torch.distributed as dist

        begin_s = _now_s(device)
        if model is self._model and self._forward_s is not None:
            self._sums["backward_s"] += begin_s - self._forward_s
            self._forward_s = None
        # A barrier: the time on the wire begins when all ranks have arrived here.
        dist.all_reduce(
            torch.zeros(1, dtype=torch.float32, device=device), group=model.process_group
        )
        met_s = _now_s(device)
        for buffer, its_group, _ in self._held:
            self._send(buffer, its_group)
        for sent in self._sent:
            sent.wait()
        end_s = _now_s(device)
        self._sums["met_s"] += met_s - begin_s
        self._sums["wire_s"] += end_s - met_s
        if self._forward_s is not None:  # another model's buckets: our backward still runs
            self._forward_s += end_s - begin_s
        for buffer, _, future in self._held:
            future.set_result(buffer)
        self._held = []

    def _end_block(self, now_s: float, ranks: int) -> None:
        import torch.distributed as dist

        if self._block_s is not None:
            sums = {"step_s": now_s - self._block_s, **self._sums}
            means = {name: value / BLOCK_STEPS for name, value in sums.items()}
            block = {"apart": self._apart, "ranks": ranks, **means}
            # The first block replaces the file, since a script may start new training processes.
            path = os.path.join(_HERE, f"rank-{dist.get_rank()}.jsonl")
            with open(path, "a" if self._has_written else "w") as file:
                file.write(json.dumps(block) + "\n")
            self._has_written = True
            self._apart = not self._apart
        self._block_s = now_s
        self._sums = dict.fromkeys(self._sums, 0.0)


def _now_s(device: Any) -> float:
    """Wait until the device has finished, and return the time."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
    return time.monotonic()


def _watch(ddp: Any) -> None:
    """Patch DDP so that every model runs the meter instead of the script's own hook."""
    meter = _Meter()
    init = ddp.__init__
    register = ddp.register_comm_hook
    post_forward = ddp._post_forward

    @functools.wraps(init)
    def init_measured(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if not self._comm_hooks:  # DDP's mixed precision registers its own hook
            register(self, self, meter.exchange)
            self._comm_hooks.clear()  # or the meter would be pickled with the model
        self._is_made = True

    def register_own(self: Any, state: Any, hook: Any) -> None:
        if not hasattr(self, "_is_made"):
            register(self, state, hook)
        else:
            # List the hook without running it: states find their model by it when a script resumes.
            self._comm_hooks.append((hook, state))

    def register_builtin(self: Any, *args: Any, **options: Any) -> None:
        """Do nothing: torch's own hooks are not run either."""

    def post_forward_measured(self: Any, output: Any) -> Any:
        output = post_forward(self, output)
        meter.end_forward(self)
        return output

    ddp.__init__ = init_measured
    ddp.register_comm_hook = register_own
    ddp._register_builtin_comm_hook = register_builtin
    ddp._post_forward = post_forward_measured


class _Finder(importlib.abc.MetaPathFinder):
    """Patches DDP when the script imports its module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _DDP:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_watch(module: Any) -> None:
            execute(module)
            _watch(module.DistributedDataParallel)

        spec.loader.exec_module = execute_and_watch
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
    # The environment may have its own sitecustomize: find it without this directory, and run it.
    sys.path = [each for each in sys.path if os.path.abspath(each) != _HERE]
    this = sys.modules.pop(__name__)
    if importlib.util.find_spec(__name__):
        importlib.import_module(__name__)
    sys.modules.setdefault(__name__, this)
