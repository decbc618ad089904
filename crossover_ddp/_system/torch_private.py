"""Every private name of torch that this package uses. Other modules take them from here.

A private name may change or disappear with any release of torch. So each has a comment with its
purpose, the damage if it is missing, and the test that guards it. All of them exist in torch 2.11
to 2.14 unless the comment gives a version. `tests/unit/system/test_torch_private.py` looks each up in
the installed torch, and fails if a module of the package uses a private name that is not here.

Functions are bound to a name without an underscore. Attributes that may be missing are strings, for
``getattr``. Attributes that must exist are C functions from `operator`. No Python code of this
module runs in a training step.

[Note: relied on without a name] The package relies on three more facts that are private to torch:

* ``torch.optim.optimizer`` and ``torch.optim.lr_scheduler`` wrap ``Optimizer.step`` in functions
  whose code is called "wrapper". `stripped` in `_owners/optimizer.py` removes these wrappers;
  without any, it returns the function unchanged. Guard: tests/unit/owners/test_optimizer.py.
* A live DDP model refers to its class, so the garbage collector finds it, see
  [Note: finding the model] in `checks.py`. Guard: tests/unit/ddp/test_model_search.py.
* DDP compares the annotations of a hook as objects. Guard: tests/conformance.
"""

import contextlib
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

# --- process groups ---

# Returns the store of a process group. In destroy_process_group torch's registry drops the only
# handle to it, which is how the package notices the end of a group. Job names and turns travel
# through the store. Without it: the package cannot be imported.
# Guards: tests/journeys/test_ends.py, tests/unit/ddp/test_leaving.py.
process_group_store: Callable[[dist.ProcessGroup], dist.Store] = (
    distributed_c10d._get_process_group_store
)

UNKNOWN_TIMEOUT_S: Final = 600.0
"""The shorter of torch's default timeouts of groups: 10 minutes for NCCL, 30 for gloo."""


def group_timeout_s(group: dist.ProcessGroup | None) -> float:
    """Return the timeout of a group's collectives, in seconds.

    This is the shortest timeout of the group's backends, or `UNKNOWN_TIMEOUT_S` if no backend has
    one. Torch has no public function for it, so it is read from the backends' options.
    Guard: tests/journeys/test_devices.py.
    """
    found: list[float] = []
    for device in getattr(group, "_device_types", ()):
        # A device type may have no backend, and the group may not be torch's.
        with contextlib.suppress(AttributeError, RuntimeError):
            backend: Any = group._get_backend(device)  # type: ignore[union-attr]
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            found.append(backend.options._timeout.total_seconds())
    return min(found, default=UNKNOWN_TIMEOUT_S)


# --- DistributedDataParallel ---

# The pairs of hook and state that were registered with a model. They distinguish models that wrap
# the same module. Without them: checkpoint() and restore() report that the hook is not registered.
# Guard: tests/unit/ddp/test_model_search.py.
COMM_HOOKS: Final = "_comm_hooks"

# The configuration of Join, which is enabled inside of Join. Without it: Join counts as not
# entered, and buffers stay with DDP.
# Guards: tests/journeys/test_replicas.py, the joined cases of tests/conformance.
JOIN_CONFIG: Final = "_join_config"

# A method of the reducer that lists the parameters of each bucket. It finds parameters whose
# requires_grad was set after the model was wrapped. Without it: an error about differing parameters
# does not name this cause. Guard: tests/journeys/test_replicas.py, "unfrozen".
ZERO_BUCKETS: Final = "_get_zeros_like_grad_buckets"

# A method of DDP's reducer that forgets a forward whose backward did not run. Without it: a step of
# virtual ranks that an exception has ended between the two cannot begin again.
# Guard: tests/virtual/test_steps.py, "between".
RESET_REDUCER: Final = "_reset_state"

# The names of parameters and buffers that DDP leaves alone, as set by the model's
# _set_params_and_buffers_to_ignore_for_model. Without it: they are compared like all others.
# Guard: tests/journeys/test_replicas.py, "on purpose".
IGNORED_NAMES: Final = "parameters_to_ignore"

# Whether DDP broadcasts rank 0's buffers before a forward. It exists since 2.14; in earlier
# versions broadcast_buffers alone decides. Guard: tests/multiprocess/test_module_buffers.py.
FORWARD_SYNC_BUFFERS: Final = "forward_sync_buffers"

# A buffer hook that user code has registered; such buffers stay with DDP. Without it: our copy
# would replace the hook. Guard: tests/multiprocess/test_module_buffers.py, "buffer_hook".
BUFFER_HOOK: Final = "buffer_hook"

# A method that returns whether this forward of DDP would broadcast buffers, and the flag that it
# reads. We set the flag to False when our copy replaces the broadcast. Without either: buffers stay
# with DDP.
# Guard: tests/multiprocess/test_module_buffers.py.
is_broadcast_due: Callable[[DistributedDataParallel], bool] = operator.methodcaller(
    "_check_sync_bufs_pre_fwd"
)
NEEDED_FOR_BUFFERS: Final = (
    "_check_sync_bufs_pre_fwd",
    "require_forward_param_sync",
    IGNORED_NAMES,
    JOIN_CONFIG,
)

# The names that `refit.py` makes a model's reducer with, as DDP's constructor and unpickling do. The
# settings decide the sizes of its buckets. Without any of them: the model keeps its buckets.
# Guards: tests/multiprocess/test_refit.py, tests/unit/system/test_torch_private.py.
BUCKET_SETTINGS: Final = ("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default")
PARAMETERS_FOR_REDUCER: Final = "_build_params_for_reducer"
NAMES_FOR_REDUCER: Final = "_build_debug_param_to_name_mapping"
MAKE_REDUCER: Final = "_ddp_init_helper"
HAS_REBUILT: Final = "_has_rebuilt_buckets"
CHECK_FINALIZED: Final = "_check_reducer_finalized"
USES_PYTHON_REDUCER: Final = "_use_python_reducer"
DELAYED_PARAMETERS: Final = "_delay_all_reduce_params"
NEEDED_TO_REFIT: Final = (
    *BUCKET_SETTINGS,
    PARAMETERS_FOR_REDUCER,
    NAMES_FOR_REDUCER,
    MAKE_REDUCER,
    HAS_REBUILT,
    CHECK_FINALIZED,
    USES_PYTHON_REDUCER,
    DELAYED_PARAMETERS,
    COMM_HOOKS,
)

# The same settings in one dataclass, and its fields. It exists since 2.14. With other fields, the
# model keeps its buckets. Guards: the same.
BUCKET_CONFIG: Final = "_bucket_config"
BUCKET_CONFIG_FIELDS: Final = frozenset(
    {"bucket_bytes_cap", "per_bucket_bytes_caps", "first_bucket_bytes_cap"}
)

# Methods of the reducer and of its logger. The former removes the reducer's hooks on parameters, the
# latter declares the graph to be static. A model with static_graph=True also has a flag, which is
# False until the first backward pass of its reducer. Without them: refit raises an AttributeError.
# Guards: the same.
remove_reducer_hooks: Callable[[Any], None] = operator.methodcaller("_remove_autograd_hooks")
set_static_graph: Callable[[Any], None] = operator.methodcaller("_set_static_graph")
STATIC_GRAPH_RECORDED: Final = "_static_graph_delay_allreduce_enqueued"

# --- modules and tensors ---

# A module's own parameters and submodules by name. Reading them bypasses the guards of a decoupled
# model, and is safe even if a constructor or a copy of DDP has failed half-way. Without them:
# nothing works. Guard: tests/unit/ddp/test_model_search.py.
own_parameters: Callable[[torch.nn.Module], Any] = operator.attrgetter("_parameters")
SUBMODULES: Final = "_modules"
submodules_of: Callable[[torch.nn.Module], Any] = operator.attrgetter("_modules")

# A module's own buffers by name, which an average in parts is shown. Without it: `follow` fails.
# Guard: tests/unit/decoupled/test_follow.py.
own_buffers: Callable[[torch.nn.Module], Any] = operator.attrgetter("_buffers")

# The version counter, which reveals in-place changes by user code. Without it: nothing works.
# Guard: tests/multiprocess/test_written_between_steps.py.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")

# Whether a tensor shares its version counter with others that view the same memory. Without it:
# nothing works. Guard: tests/unit/decoupled/test_lazy_gradients.py.
is_view: Callable[[Tensor], bool] = operator.methodcaller("_is_view")

# For tensors without memory of their own, such as gradients that are still exchanged: the
# constructor; the value of __torch_function__ that leaves its operations to __torch_dispatch__; and
# a function that sets the error message for code that reads its address. Without the first two:
# nothing works. Without the last: torch's own message, which does not name the remedy.
# Guard: tests/unit/decoupled/test_lazy_gradients.py.
make_wrapper_subclass: Callable[..., Any] = getattr(Tensor, "_make_wrapper_subclass")  # noqa: B009
disabled_torch_function: Final[Any] = getattr(torch._C, "_disabled_torch_function_impl")  # noqa: B009
_set_message: Final[Callable[[int, str], None] | None] = getattr(
    torch._C, "_set_storage_data_ptr_access_error_msg", None
)


def explain_missing_memory(tensor: Tensor, message: str) -> None:
    """Set the message of the error that code gets if it reads the address of ``tensor``."""
    if _set_message is not None:
        storage = torch._C.TensorBase.untyped_storage(tensor)
        _set_message(storage._cdata, message)


# The operation with which GradScaler checks gradients and unscales them. Without it: the package
# cannot be imported. Guard: tests/unit/decoupled/test_lazy_gradients.py.
amp_unscale: Final[Any] = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

# A context manager that lets us write tensors without giving them a new version. Autograd may have
# saved the buffers that are overwritten, as with DDP's own broadcast. Without it: buffers stay with
# DDP. Guard: tests/multiprocess/test_module_buffers.py, "between_steps".
preserved_versions: Final[Any] = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)

# An attribute of parameters that torch.distributed.optim updates inside of backward. Replicas with
# such parameters are not compared. Without it: they are compared while they change.
# Guard: tests/unit/system/test_torch_private.py alone.
IN_BACKWARD_OPTIMIZERS: Final = "_in_backward_optimizers"

# Returns whether a profiler is on. Only then do the parts of a step have spans. Without it, bool()
# returns False: no spans. Guard: tests/unit/system/test_torch_private.py alone.
profiler_is_on: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)

# --- optimizers ---

# Marks that step() was called; schedulers warn if the optimizer lacks it. Without it: torch warns.
# Guard: tests/unit/system/test_torch_private.py alone.
STEP_WAS_CALLED: Final = "_opt_called"

# The step hooks of one optimizer, and those of all optimizers. Owners refuse such hooks, since the
# parameters are not yet updated when torch calls them. Without these names: hooks go unnoticed.
# Guard: tests/unit/owners/test_states.py, "hooks_of_muons_step".
STEP_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GLOBAL_STEP_HOOKS: Final = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
optimizer_module: Final = torch_optimizer

# The functions that torch.optim.Muon consists of, see [Note: torch's own arithmetic] in
# `_owners/muon.py`. They are None if torch lacks them; MuonState then raises
# UnsupportedConfigurationError. Guards: `check_torch`, tests/multiprocess/test_owners.py.
_muon: Final = getattr(torch.optim, "_muon", None)
newton_schulz: Final[Callable[..., Tensor] | None] = getattr(
    _muon, "_zeropower_via_newtonschulz", None
)
adjusted_lr: Final[Callable[..., Any] | None] = getattr(_muon, "_adjust_lr", None)

# --- dynamo, which is imported only when it is used ---

# Returns the backend of torch.compile with a name, and raises torch's error if there is none.
# Without it: `compiled` cannot be called. Guard: tests/unit/decoupled/test_pieces.py.


def lookup_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that ``torch.compile`` calls for ``backend``."""
    from torch._dynamo.backends import registry

    return registry.lookup_backend(backend)


# Counts graph breaks by their reasons. Without it: `compiled` cannot be called.
# Guard: tests/unit/decoupled/test_pieces.py.


def graph_breaks() -> int:
    """Return the number of graph breaks that dynamo has met in this process."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


# Returns inductor's options of a ``mode`` of torch.compile. Without it: a mode is an error with
# `compiled("inductor")`. Guard: tests/unit/decoupled/test_pieces.py.


def inductor_options(mode: str) -> dict[str, Any]:
    """Return inductor's configuration for a ``mode`` of ``torch.compile``."""
    from torch import _inductor

    return _inductor.list_mode_options(mode)


# --- pipelines, which are imported only when they are used ---

# The class of schedules that run actions in a given order, and its method that reads the order from
# a file. `Plan.schedule` returns a subclass, and torchtitan uses both. Without them: an error in
# `Plan.schedule`. Guard: tests/multiprocess/test_pipeline_torch.py.


def pipeline_runtime() -> Any:
    """Return torch's class of schedules that run actions in a given order."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineScheduleRuntime


LOAD_SCHEDULE: Final = "_load_csv"

# Starts messages of a pipeline as its runtime does, so that NCCL uses the same communicator on both
# sides. Without it: stages with replicas raise an AttributeError.
# Guard: tests/multiprocess/test_pipeline_torch.py, "early".


def start_messages(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start to send or receive, and return handles to wait for."""
    from torch.distributed.pipelining import schedules

    return schedules._batch_p2p(operations)


# The place where a stage keeps the shapes of its inputs, with which it compares those of the first
# stage: in torch 2.11 always, in 2.14 with TORCH_DISTRIBUTED_DEBUG=DETAIL. Without it: torch
# refuses the first stage's inputs. Guard: tests/multiprocess/test_pipeline_torch.py.


def describe_inputs(stage: Any, inputs: tuple[Tensor, ...]) -> None:
    """Have a stage expect inputs such as these."""
    from torch.distributed.pipelining import stage as stages

    if hasattr(stage, "_stage_meta"):
        stage._stage_meta.inputs = stages.extract_tensor_metas(inputs)
        return
    for place, tensor in zip(stage.args_recv_info[0], inputs, strict=True):
        size, stride = tensor.size(), tensor.stride()
        place.meta = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")


# The messages with which a stage opens the connections to its neighbours. Torch 2.11 sends them
# even to a neighbour on the same rank, which gloo cannot. Without it: an AttributeError in
# `Plan.build_stages`. Guard: tests/multiprocess/test_pipeline_torch.py, "V".


def skip_messages_to_self(stage: Any) -> None:
    """Have a stage open no connection to its own rank."""
    messages = stage._get_init_p2p_neighbors_ops

    def to_others() -> list[dist.P2POp]:
        return [each for each in messages() if each.group_peer != stage.group_rank]

    stage._get_init_p2p_neighbors_ops = to_others


# Rebuilds a reducer's buckets in the order of the gradients, once, and returns whether it did.
# DDP calls it in the next forward. Without it: `Plan.schedule` raises an AttributeError in a step
# with replicas. Guard: tests/multiprocess/test_pipeline_torch.py.
rebuild_buckets: Callable[[Any], bool] = operator.methodcaller("_rebuild_buckets")

# --- FSDP2 ---

# The parameter groups of a module to which fully_shard was applied, each with its gradients in one
# flat tensor. Torch 2.11 and 2.12 have one group a module, and another name for it. Without
# both: `crossover_ddp.fsdp` finds no parameters and refuses the model. Seen in 2.11 and 2.14.
# Guard for all names of FSDP2: tests/unit/system/test_torch_fsdp.py.


def fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """Return the parameter groups of FSDP2 in ``module`` and its submodules."""
    found = []
    for state in _fsdp_states(module):
        if hasattr(state, "_fsdp_param_groups"):
            found += state._fsdp_param_groups
        elif state._fsdp_param_group is not None:
            found.append(state._fsdp_param_group)
    return found


# The parameters of a group, in the order in which their shards follow each other in the flat
# gradient, and the padded memory of each shard. Seen in 2.11 and 2.14.


def fsdp_shards(group: Any) -> list[tuple[torch.nn.Parameter, Tensor]]:
    """Return the parameters of a group, each with the memory of its shard, padding included."""
    return [
        (each.sharded_param, each._sharded_param_data.view(each.padded_sharded_param_size))
        for each in group.fsdp_params
    ]


# The hook that FSDP2 calls with a group's flat gradient between its reduction and its use.
# set_all_reduce_hook sets the same attribute, but refuses modules with several groups.
# Seen in 2.11 and 2.14.
FSDP_HOOK: Final = "_all_reduce_hook"

# Whether gradients are averaged in this backward pass, see set_requires_all_reduce; the divisor of
# set_gradient_divide_factor; whether set_force_sum_reduction_for_comms was called, so that FSDP2
# divides after the hook; whether shards are kept on the CPU. Seen in 2.11 and 2.14.
is_fsdp_group_averaged: Callable[[Any], bool] = operator.attrgetter("all_reduce_grads")
fsdp_divisor: Callable[[Any], float | None] = operator.attrgetter("gradient_divide_factor")
fsdp_divides_late: Callable[[Any], bool] = operator.attrgetter("force_sum_reduction_for_comms")


def is_fsdp_group_offloaded(group: Any) -> bool:
    """Return whether FSDP2 copies the group's gradients to the CPU right after the hook."""
    return any(each.offload_to_cpu for each in group.fsdp_params)


# The hooks of an optimizer inside of backward. FSDP2 calls them right after its own hook, with the
# gradient that this one has left. Seen in 2.11 and 2.14.
AFTER_GRADIENT: Final = "_post_accumulate_grad_hooks"


# A method of each module's state. FSDP2 queues that of the outermost module to run at the end of
# backward. Without it: an AttributeError in `register_comm_hook`. Seen in 2.11 and 2.14.


def at_end_of_fsdp_backward(module: torch.nn.Module, callback: Callable[[], None]) -> None:
    """Have ``callback`` called when FSDP2 has ended a backward pass of ``module``."""
    for state in _fsdp_states(module):
        ends = state._root_post_backward_final_callback

        def both(ends: Callable[[], None] = ends) -> None:
            ends()
            callback()

        state._root_post_backward_final_callback = both


# Whether a module is the outermost one. It is None before the first forward. Without it: an
# AttributeError in the first backward. Seen in 2.11 and 2.14.


def is_fsdp_root(module: torch.nn.Module) -> bool | None:
    """Return whether FSDP2 treats ``module`` as the outermost one; None before the first forward."""
    is_root: bool | None = _fsdp_state(module)._is_root
    return is_root


# Whether a backward pass is under way. Seen in 2.11 and 2.14.


def is_in_fsdp_backward(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 has begun a backward pass of ``module``, and neither ended nor reset it."""
    return bool(_fsdp_state(module)._state_ctx.post_backward_final_callback_queued)


# The number of the backward pass that runs on this thread, -1 outside of one. Seen in 2.11 and 2.14.


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    number: int = torch._C._current_graph_task_id()
    return number != -1


# Waits until parameters that unshard(async_op=True) gathers have arrived. Seen in 2.11 and 2.14.
wait_for_fsdp_group: Callable[[Any], None] = operator.methodcaller("wait_for_unshard")


def _fsdp_state(module: torch.nn.Module) -> Any:
    """Return FSDP2's state of ``module``, or None if fully_shard was not applied to it."""
    get_state = getattr(module, "_get_fsdp_state", None)
    return None if get_state is None else get_state()


def _fsdp_states(module: torch.nn.Module) -> list[Any]:
    """Return the states of ``module`` and its submodules. Several modules may share one."""
    found = [_fsdp_state(each) for each in module.modules()]
    return [*{id(state): state for state in found if state is not None}.values()]
