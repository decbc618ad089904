"""Times the steps of any script that trains with DistributedDataParallel, whatever its hook and its device.

`crossover-ddp advise` puts a copy of this file, as ``sitecustomize.py``, first on the script's PYTHONPATH, so Python
runs it at its start. It is not imported from the package, imports nothing of it, and writes beside itself.

[Note: blocks of steps]
After a few steps, in which DDP forms its buckets, blocks of two kinds take turns. In the one, buckets travel as plain
DDP sends them: a step takes C + N. In the other they are held back to the end of backward, and travel when the device
has finished and all ranks have met: a step takes C + M, with what ranks wait for each other beside. In this kind the
part of C from the end of the model's last forward to its last bucket is backward. A block begins and ends with an idle
device, so the clock of the host will do. In both kinds the gradient is the mean. Our design.
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
_PATIENCE = 2 * BLOCK_STEPS  # backwards of other models, after which one of them is measured
_HERE = os.path.dirname(os.path.abspath(__file__))
_DDP = "torch.nn.parallel.distributed"


class _Meter:
    """Counts the steps of one model of this process, with what other models send meanwhile."""

    def __init__(self) -> None:
        self._model: Any = None
        self._others = _PATIENCE  # so the first model is measured at once
        self._step, self._apart, self._is_noted = 0, False, False
        self._block_s: float | None = None
        self._forward_s: float | None = None  # when the model's last forward ended
        self._held, self._sent = list[Any](), list[Any]()
        self._sums = dict.fromkeys(("backward_s", "met_s", "wire_s", "bytes"), 0.0)

    def end_forward(self, model: Any) -> None:
        """Note the time of a forward that trains, in steps whose communication is apart."""
        import torch

        if self._apart and model is self._model and torch.is_grad_enabled():
            self._forward_s = _now_s(next(model.parameters()).device)

    def exchange(self, model, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        """Send one bucket, now or at the end of backward; its Future holds the mean of all ranks."""
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
            self._model, self._others, self._step = model, 0, -WARM_UP_STEPS
            self._apart, self._block_s = False, None
        if model is self._model:
            if self._step % BLOCK_STEPS == BLOCK_STEPS - 1:
                for sent in self._sent:
                    sent.wait()
                self._end_block(_now_s(device), model.process_group.size())
            self._step, self._sent = self._step + 1, []

    def _send_held(self, device: Any, model: Any) -> None:
        import torch
        import torch.distributed as dist

        begin_s = _now_s(device)
        if model is self._model and self._forward_s is not None:
            self._sums["backward_s"] += begin_s - self._forward_s
            self._forward_s = None
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
        if self._forward_s is not None:  # another model's: backward goes on
            self._forward_s += end_s - begin_s
        for buffer, _, future in self._held:
            future.set_result(buffer)
        self._held = []

    def _end_block(self, now_s: float, ranks: int) -> None:
        import torch.distributed as dist

        if self._block_s is not None:
            sums = {"step_s": now_s - self._block_s, **self._sums}
            means = {name: value / BLOCK_STEPS for name, value in sums.items()}
            found = {"apart": self._apart, "ranks": ranks, **means}
            # A script may train in new processes again and again.
            with open(
                os.path.join(_HERE, f"rank-{dist.get_rank()}.jsonl"), "a" if self._is_noted else "w"
            ) as file:
                file.write(json.dumps(found) + "\n")
            self._is_noted = True
            self._apart = not self._apart
        self._block_s = now_s
        self._sums = dict.fromkeys(self._sums, 0.0)


def _now_s(device: Any) -> float:
    """Return the time once the device has finished."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
    return time.monotonic()


def _watch(ddp: Any) -> None:
    """Let every model of the class be measured, whatever hook the script registers."""
    meter, made, register, after_forward = (
        _Meter(),
        ddp.__init__,
        ddp.register_comm_hook,
        ddp._post_forward,
    )

    @functools.wraps(made)
    def made_and_measured(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if not self._comm_hooks:  # mixed precision has one of its own
            register(self, self, meter.exchange)
            self._comm_hooks.clear()  # a model that is pickled would have the meter with it
        self._is_made = True

    def register_own(self: Any, state: Any, hook: Any) -> None:
        if not hasattr(self, "_is_made"):
            register(self, state, hook)
        else:  # not run, but a script that resumes finds the model of a state by it
            self._comm_hooks.append((hook, state))

    def after_forward_measured(self: Any, output: Any) -> Any:
        output = after_forward(self, output)
        meter.end_forward(self)
        return output

    ddp.__init__, ddp.register_comm_hook, ddp._post_forward = (
        made_and_measured,
        register_own,
        after_forward_measured,
    )
    ddp._register_builtin_comm_hook = lambda *args, **options: None


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the script to import DDP's module."""

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
    # The environment may have a file of this name of its own.
    sys.path = [each for each in sys.path if os.path.abspath(each) != _HERE]
    this = sys.modules.pop(__name__)
    if importlib.util.find_spec(__name__):
        importlib.import_module(__name__)
    sys.modules.setdefault(__name__, this)
