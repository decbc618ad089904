"""Times the steps of any script that trains with DistributedDataParallel, or FSDP2 on two levels.

`crossover-ddp advise` and `compare` copy this file to ``sitecustomize.py`` in a directory, and put
that directory first on the script's PYTHONPATH. So Python runs the copy when it starts. The copy
writes its recordings to the same directory. It imports this package only for `advise`, after the
last block, and only if the script's Python has it.

[Note: blocks of steps]
DDP forms its buckets in the first few steps. After that, two kinds of blocks alternate. In the
first kind, buckets are sent at the same time as in plain DDP, and a step takes C + N. In the second
kind, buckets are held back until the end of backward. They are sent once the device has finished
and all ranks have met. Such a step takes C + M, plus the time that ranks wait for each other, which
is recorded separately. In the second kind, the time from the end of the model's last forward to its
last bucket counts as backward.

A block begins and ends with an idle device, so the host's clock suffices. In both kinds, the
gradient is the mean over ranks. Our design.

[Note: steps of FSDP2]
With fully_shard on a mesh of two dimensions, gradients travel in each backward pass by one
all-reduce between nodes for each group of parameters. In the second kind of blocks, each of them
waits until the device has finished and its ranks have met. So M is of the hop between nodes, and C
includes FSDP2's own collectives inside the node.

[Note: after the last block]
The number of blocks is in the file `BLOCKS`. Before the first training forward behind the last
block, ranks rehearse each way to exchange gradients; see `rehearsal.py`.
All of them come to this forward, as its backward exchanges gradients.

[Note: time alone]
If there is a file `WINDOW`, as for `compare`, steps are timed and nothing else is changed. The file
has two numbers: how many steps are skipped, and how many are timed after these. The clock is read at
the begin and the end of this window only, each time with an idle device. A step is a forward whose
backward exchanges gradients. In a process without DDP, it is a step of the optimizer. Step hooks
would make decoupled training stop deferring, so the optimizer's step is counted at the point that
torch has for its profiler.
"""

import atexit
import functools
import gc
import importlib.abc
import importlib.util
import json
import os
import re
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

WARM_UP_STEPS = 5
BLOCK_STEPS = 6
BLOCKS = "blocks"
"""The file with the number of blocks after which ranks rehearse."""
# If more backwards in a row than this belong to other models, one of those is measured instead.
_PATIENCE = 2 * BLOCK_STEPS
WINDOW = "window"
"""The file with the steps to skip and to time; see [Note: time alone]."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_DDP = "torch.nn.parallel.distributed"
_OPTIMIZER = "torch.optim.optimizer"
_FSDP = "torch.distributed.fsdp._fully_shard"


_SUMMED = ("backward_s", "met_s", "wire_s", "bytes", "forwards", "processor_s")


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
        # The number of blocks that this process has written.
        self._written = 0
        # Whether this process has rehearsed.
        self._has_rehearsed = False
        # Whether DDP models that are made now are left alone.
        self.is_paused = False
        # When the block began. None before the first block.
        self._block_s: float | None = None
        # When the model's last forward ended.
        self._forward_s: float | None = None
        # Buckets that wait for the end of backward: buffer, process group and Future.
        self._held = list[Any]()
        # Futures of the all-reduces in this step.
        self._sent = list[Any]()
        # The size of each bucket in this step, and the time when it was ready.
        self._ready = list[tuple[int, float]]()
        # The latest block that kept communication apart.
        self._block: dict[str, Any] = {}
        # Processor seconds of this process at the beginning of the block.
        self._block_processor_s = 0.0
        self._sums = dict.fromkeys(_SUMMED, 0.0)

    def begin_forward(self, model: Any) -> None:
        """Rehearse other ways, once; see [Note: after the last block]."""
        import torch

        is_due = 0 < _blocks_wanted() <= self._written and not self._has_rehearsed
        if is_due and model is self._model and torch.is_grad_enabled():
            self._has_rehearsed = True
            self.is_paused = True
            with open(_path(), "a") as file:
                file.write(json.dumps({"rehearsed": _rehearsed(model, self._block)}) + "\n")
            self.is_paused = False
            self._measure(model)

    def end_forward(self, model: Any) -> None:
        """Count a training forward, and record its end if communication is kept apart."""
        import torch

        if model is self._model and torch.is_grad_enabled():
            self._sums["forwards"] += 1
            if self._apart:
                self._forward_s = _now_s(next(model.parameters()).device)

    def exchange(self, model, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        """Send a bucket now or at the end of backward. Return a Future for the mean over ranks."""
        from torch.futures import Future

        buffer = bucket.buffer()
        self._sums["bytes"] += buffer.numel() * buffer.itemsize
        if model is self._model:
            self._ready.append((buffer.numel() * buffer.itemsize, time.monotonic()))
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
                ranks = model.process_group.size()
                self._end_block(device, ranks, _nodes(ranks))
            self._step += 1
            self._sent = []
            self._ready = []

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
        begin_processor_s = time.process_time()
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
        self._sums["processor_s"] -= time.process_time() - begin_processor_s
        if self._forward_s is not None:  # another model's buckets: our backward still runs
            self._forward_s += end_s - begin_s
        for buffer, _, future in self._held:
            future.set_result(buffer)
        self._held = []

    def _end_block(self, device: Any, ranks: int, nodes: int, *, is_sharded: bool = False) -> None:
        now_s = _now_s(device)
        if self._block_s is not None:
            self._sums["processor_s"] += time.process_time() - self._block_processor_s
            sums = {"step_s": now_s - self._block_s, **self._sums}
            means = {name: value / BLOCK_STEPS for name, value in sums.items()}
            block = {
                "apart": self._apart,
                "ranks": ranks,
                "nodes": nodes,
                "sharded": is_sharded,
                "ready": [(size, ready_s - self._ready[-1][1]) for size, ready_s in self._ready],
                "seen": _seen(self._model),
                **means,
            }
            # The first block replaces the file, since a script may start new training processes.
            with open(_path(), "a" if self._written else "w") as file:
                file.write(json.dumps(block) + "\n")
            self._written += 1
            self._block = block if self._apart else self._block
            self._apart = not self._apart
            now_s = _now_s(device)
        self._block_s = now_s
        self._block_processor_s = time.process_time()
        self._sums = dict.fromkeys(_SUMMED, 0.0)


class _ShardedMeter(_Meter):
    """Measures the steps of a model of FSDP2, see [Note: steps of FSDP2]."""

    # The state of FSDP2 that ends the model's backward passes.
    _state: Any = None
    # The device and the process group of the latest exchange. None if this backward had none.
    _latest: Any = None

    def all_reduce(self, tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
        """Average gradients between nodes, as FSDP2 does, and time it in every second block."""
        import torch
        import torch.distributed as dist

        self._sums["bytes"] += tensor.nbytes
        self._latest = tensor.device, group
        all_reduce: Callable[..., Any] = dist.all_reduce
        if not self._apart:
            return all_reduce(tensor, *args, group=group, **options)
        begin_s = _now_s(tensor.device)
        begin_processor_s = time.process_time()
        all_reduce(torch.zeros(1, device=tensor.device), group=group)
        met_s = _now_s(tensor.device)
        work = all_reduce(tensor, *args, group=group, **options)
        end_s = _now_s(tensor.device)
        self._sums["met_s"] += met_s - begin_s
        self._sums["wire_s"] += end_s - met_s
        self._sums["processor_s"] -= time.process_time() - begin_processor_s
        return work

    def end_backward(self, state: Any) -> None:
        """Count a backward pass of FSDP2, which is a step if gradients were exchanged in it."""
        import torch.distributed as dist

        if self._state is None:
            self._state, self._model, self._step = state, state._modules[0], -WARM_UP_STEPS
        if state is not self._state:
            return
        self._sums["forwards"] += 1
        if self._latest is None:
            return
        (device, group), self._latest = self._latest, None
        if self._step % BLOCK_STEPS == BLOCK_STEPS - 1:
            # The bytes of one rank's shards, of which a node has as many as ranks.
            self._sums["bytes"] *= dist.get_world_size() // group.size()
            self._end_block(device, dist.get_world_size(), group.size(), is_sharded=True)
            if self._written == _blocks_wanted():
                with open(_path(), "a") as file:
                    file.write(json.dumps({"rehearsed": None}) + "\n")
        self._step += 1


def _now_s(device: Any) -> float:
    """Wait until the device has finished, and return the time."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
    return time.monotonic()


def _nodes(ranks: int) -> int:
    """Return the number of nodes of a job; that of its ranks if nodes have different numbers."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ranks if ranks % on_node else ranks // on_node


def _path() -> str:
    """Return this rank's file."""
    import torch.distributed as dist

    return os.path.join(_HERE, f"rank-{dist.get_rank()}.jsonl")


@functools.cache
def _blocks_wanted() -> int:
    """Return the number of blocks after which ranks rehearse; 0 if they do not."""
    try:
        with open(os.path.join(_HERE, BLOCKS)) as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def _rehearsed(model: Any, block: dict[str, Any]) -> Any:
    """Return the step time of each way to exchange gradients; None if it cannot be measured."""
    try:
        from crossover_ddp.cli.rehearsal import rehearsed

        return rehearsed(model, block)
    except Exception as error:
        sys.stderr.write(f"crossover-ddp advise: no rehearsal, {type(error).__name__}: {error}\n")
        return None


# --- GradScaler and its like ----------------------------------------------------------------------

# The names of classes of moving averages: torch's, timm's, diffusers', torch_ema's, ema_pytorch's.
_AVERAGE = re.compile(r"AveragedModel|Ema|EMA|MovingAverage")
_noted = set[str]()


def _seen(model: Any) -> list[str]:
    """Return which of these the script uses: GradScaler, clipping, EMA, torch.compile.

    Objects are found among those of the garbage collector, whatever framework made them. Only their
    types and dictionaries are read, since a lazy object may import modules when it is asked.
    """
    import torch

    seen = {*_noted}
    inside = {*map(id, model.modules())}
    for each in gc.get_objects():
        kinds = type(each).__mro__
        if torch.amp.GradScaler in kinds:
            # A scaler that has scaled nothing is switched off, or not used.
            if vars(each).get("_scale") is not None:
                seen.add("GradScaler")
        elif _AVERAGE.search(kinds[0].__name__) and id(each) not in inside:
            if torch.nn.Module in kinds or "shadow_params" in getattr(each, "__dict__", ()):
                seen.add("EMA")
        elif kinds[0].__name__ == "OptimizedModule" and model in each.modules():
            seen.add("torch.compile")
    if any(map(_is_compiled, (model, getattr(model, "module", model)))):
        seen.add("torch.compile")
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["stats"] and "torch.compile" not in seen:
        seen.add("torch.compile of parts")
    return sorted(seen)


def _is_compiled(module: Any) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or vars(module).get("_compiled_call_impl") is not None
    )


def _note_clipping(module: Any) -> None:
    """Note calls of torch's clipping, which `torch.nn.utils` takes from ``module`` later."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        setattr(module, name, _noting(getattr(module, name), "clipping"))


def _noting(function: Any, as_what: str) -> Any:
    @functools.wraps(function)
    def noted(*args: Any, **options: Any) -> Any:
        _noted.add(as_what)
        return function(*args, **options)

    return noted


def _watch(ddp: Any) -> None:
    """Patch DDP so that every model runs the meter instead of the script's own hook."""
    meter = _Meter()
    init = ddp.__init__
    register = ddp.register_comm_hook
    pre_forward = ddp._pre_forward
    post_forward = ddp._post_forward

    @functools.wraps(init)
    def init_measured(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if meter.is_paused:
            return
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

    def pre_forward_measured(self: Any, *inputs: Any, **options: Any) -> Any:
        meter.begin_forward(self)
        return pre_forward(self, *inputs, **options)

    def post_forward_measured(self: Any, output: Any) -> Any:
        output = post_forward(self, output)
        meter.end_forward(self)
        return output

    ddp.__init__ = init_measured
    ddp.register_comm_hook = register_own
    ddp._register_builtin_comm_hook = register_builtin
    ddp._pre_forward = pre_forward_measured
    ddp._post_forward = post_forward_measured


class _Collectives:
    """Replaces ``torch.distributed`` in FSDP2's module of collectives.

    It has the same functions, apart from ``all_reduce``.
    """

    def __init__(self, all_reduce: Callable[..., Any]) -> None:
        self.all_reduce = all_reduce

    def __getattr__(self, name: str) -> Any:
        import torch.distributed as dist

        return getattr(dist, name)


def _watch_states(state: Any, meter: _ShardedMeter) -> None:
    ends = state._root_post_backward_final_callback

    @functools.wraps(ends)
    def ends_measured(self: Any) -> None:
        ends(self)
        meter.end_backward(self)

    state._root_post_backward_final_callback = ends_measured


# --- time alone -----------------------------------------------------------------------------------


class _Timer:
    """Times a window of steps; see [Note: time alone].

    The first model or optimizer that reaches the end of the window is the one that is timed.

    Args:
        skip: the number of steps before the window.
        steps: the number of steps in the window.
    """

    def __init__(self, skip: int, steps: int) -> None:
        self._skip = skip
        self._steps = steps
        # The number of steps that each model or optimizer has done.
        self._done = weakref.WeakKeyDictionary[Any, int]()
        # When the window of each model or optimizer began.
        self._begun_s = weakref.WeakKeyDictionary[Any, float]()
        self._has_ddp = False
        self._is_over = False
        # For a script that ends before the window does.
        atexit.register(self._write_count)

    def begin_forward(self, model: Any) -> None:
        """Count a forward whose backward exchanges gradients. The steps before it are done."""
        import torch

        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._has_ddp = True
            self._count(model, self._done.get(model, -1) + 1)

    def end_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer, if this process has no DDP model."""
        if not self._has_ddp:
            self._count(optimizer, self._done.get(optimizer, 0) + 1)

    def _count(self, owner: Any, done: int) -> None:
        self._done[owner] = done
        if self._is_over:
            return
        if done == self._skip:
            self._write({"begun": done})
            self._begun_s[owner] = _idle_s()
        elif done == self._skip + self._steps and owner in self._begun_s:
            self._is_over = True
            self._write({"step_s": (_idle_s() - self._begun_s[owner]) / self._steps})

    def _write_count(self) -> None:
        if self._done and not self._is_over:
            self._write({"steps": max(self._done.values()) + self._has_ddp})

    def _write(self, line: dict[str, Any]) -> None:
        with open(os.path.join(_HERE, f"rank-{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


def _idle_s() -> float:
    """Wait until the GPU that this process uses has finished, and return the time."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def _time_forwards(ddp: Any, timer: _Timer) -> None:
    pre_forward = ddp._pre_forward

    @functools.wraps(pre_forward)
    def pre_forward_timed(self: Any, *inputs: Any, **options: Any) -> Any:
        timer.begin_forward(self)
        return pre_forward(self, *inputs, **options)

    ddp._pre_forward = pre_forward_timed


def _time_optimizers(optimizer: Any, timer: _Timer) -> None:
    step_code = optimizer._optimizer_step_code

    @functools.wraps(step_code)
    def step_code_timed(self: Any) -> None:
        timer.end_step(self)
        step_code(self)

    optimizer._optimizer_step_code = step_code_timed


# --- patching -------------------------------------------------------------------------------------


def _patches() -> dict[str, Callable[[Any], None]]:
    """Return a function for each module of torch that is patched."""
    try:
        with open(os.path.join(_HERE, WINDOW)) as file:
            skip, steps = map(int, file.read().split())
    except FileNotFoundError:
        sharded = _ShardedMeter()
        return {
            _DDP: lambda module: _watch(module.DistributedDataParallel),
            f"{_FSDP}._fsdp_collectives": lambda module: setattr(
                module, "dist", _Collectives(sharded.all_reduce)
            ),
            f"{_FSDP}._fsdp_state": lambda module: _watch_states(module.FSDPState, sharded),
            "torch.nn.utils.clip_grad": _note_clipping,
        }
    timer = _Timer(skip, steps)
    return {
        _DDP: lambda module: _time_forwards(module.DistributedDataParallel, timer),
        _OPTIMIZER: lambda module: _time_optimizers(module.Optimizer, timer),
    }


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules of torch when `import torch` imports them."""

    def __init__(self) -> None:
        self._patches = _patches()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if (patch := self._patches.pop(name, None)) is None:
            return None
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_watch(module: Any) -> None:
            execute(module)
            patch(module)

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
