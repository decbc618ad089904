"""Runs a plan on torch's own pipeline runtime: `Plan.build_stages` and `Plan.schedule`.

[Note: sums instead of scaling] Torch's runtime divides each stage's gradients by the number of
micro-batches at the end of a step. That would divide gradients of earlier steps again, and
parameters of two stages twice. Here the loss's gradient is divided instead, before any backward.
Hooks thus see the gradients of the mean loss.

[Note: the last stage numbers the micro-batches] Torch's runtime expects the last stage to compute
its forwards in the order of their numbers. It would otherwise take the loss of another micro-batch.
All micro-batches of a step are alike, so they are renumbered in the order of the last stage.

[Note: replicas and their exchange] A stage with replicas is a DDP model. Its last backward ends
only after the exchange of its gradients. Replicas cannot block each other: when the last backward
of a stage begins, the later stages have ended theirs, in each replica of the pipeline. So all
replicas exchange the gradients of the last stage first, and those of the first stage at the end.
The previous stage does not wait for the exchange, since the gradient of the input leaves earlier,
from a hook on that leaf. DDP would rebuild its buckets in the next forward, which would wait for
the other replicas. Here it does so at the end of the step.

[Note: tied parameters] Layers of several stages may share a parameter. Stages on one rank share it
as they are. Otherwise each rank has a copy, with the same values. After a step, the ranks sum the
copies' gradients of this step, and only then add the gradients of earlier steps.
"""

import contextlib
import inspect
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._ddp.groups import compare
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._system.torch_private import (
    HAS_REBUILT,
    LOAD_SCHEDULE,
    describe_inputs,
    group_timeout_s,
    is_view,
    pipeline_runtime,
    rebuild_buckets,
    skip_messages_to_self,
    start_messages,
)
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import UnsupportedConfigurationError

from .chain import LayerChain
from .materialize import check_resets, materialize
from .model import BACKWARD, FORWARD, Action

if TYPE_CHECKING:
    from .plan import Plan

Loss = Callable[..., torch.Tensor]
Register = Callable[[DistributedDataParallel], object]

# Each replica keeps its own buffers. Torch 2.14 renamed the argument, and warns about the old name.
_ARGUMENTS: Final = inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS: Final[dict[str, Any]] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}


class TiedParameter(NamedTuple):
    """A parameter of stages on several ranks: this rank's copy, and the group of these ranks."""

    parameter: nn.Parameter
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Share:
    """This rank's part of a plan, which all of its stages refer to.

    Args:
        plan: the plan.
        replica: the number of the pipeline that this rank belongs to. It is below ``replicas``.
        replicas: the number of equal pipelines.
        ranks: the ranks of this pipeline, in ascending order.
        mesh: the ranks of all pipelines, with the dimensions ``dp`` and ``pp``. None if there is
            one pipeline, or if the pipelines' ranks form no mesh in ascending order.
        tied: this rank's parameters that other ranks of this pipeline have as well.
    """

    plan: "Plan"
    replica: int
    replicas: int
    ranks: tuple[int, ...]
    mesh: DeviceMesh | None
    tied: tuple[TiedParameter, ...]


class PlanStage(PipelineStage):
    """A stage of a plan, for torch's runtime. `Plan.build_stages` creates it.

    ``share`` is this rank's part of the plan. ``submod`` has the stage's layers, under their
    numbers in the chain. With replicas it is a DDP model.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        device: torch.device,
        group: dist.ProcessGroup,
        share: Share,
    ) -> None:
        plan = share.plan
        # The shape of the first stage's input is unknown; see `forward_one_chunk`.
        inputs = _like(plan.outputs[number - 1]) if number else torch.empty(0, device="meta")
        super().__init__(
            module,
            number,
            len(plan.stages),
            device,
            input_args=inputs,
            output_args=_like(plan.outputs[number]),
            group=group,
        )
        skip_messages_to_self(self)
        self.share = share
        backwards = [
            action.micro
            for action in _numbered(share)[self.group_rank]
            if action.stage == number and action.kind == BACKWARD
        ]
        ranks = [stage.devices[share.replica] for stage in plan.stages]
        sends = number > 0 and ranks[number - 1] != ranks[number]
        # The micro-batch whose gradient leaves during backward, which exchanges gradients as well.
        self._leaves_early: int | None = None
        if sends and isinstance(module, DistributedDataParallel):
            self._leaves_early = backwards[-1]
        # The gradient that left during this step's backward, and its messages.
        self._left: list[tuple[list[dist.P2POp], list[dist.Work]]] = []

    # --- forward ----------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, *rest: Any, **options: Any) -> Any:
        """Compute a forward, as torch does."""
        if self.is_first:
            describe_inputs(self, args)
        elif self.has_backward:
            for info in self.args_recv_info[fwd_chunk_id]:
                # Torch 2.11 omits this if the first pass was an evaluation.
                if info.buffer is not None:
                    info.buffer.requires_grad_()
        output = super().forward_one_chunk(fwd_chunk_id, args, *rest, **options)
        if self.has_backward and fwd_chunk_id == self._leaves_early:
            self._send_early(fwd_chunk_id)
        return output

    def forward_maybe_with_nosync(self, *args: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Call the module with copies of received tensors, and check its output."""
        if not self.is_first:
            # The first layer may work in place, which autograd forbids on leaves.
            args = tuple([_Copy.apply(each) for each in args])
        forward: Callable[..., torch.Tensor] = super().forward_maybe_with_nosync
        output = forward(*args, **kwargs)
        self._check(output)
        output = output.contiguous()
        # With a split backward, torch detaches outputs in place. Autograd forbids this for views.
        return output.clone() if self.share.plan.split and is_view(output) else output

    def _check(self, output: Any) -> None:
        shape, dtype = self.share.plan.outputs[self.stage_index]
        expected = f"{dtype}{list(shape)}"
        found = type(output).__name__
        if isinstance(output, torch.Tensor):
            found = f"{str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
        if found != expected:
            raise ValueError(
                "expected micro-batches of the size that was profiled, with an output of "
                f"{expected} of stage {self.stage_index}, got {found}; profile with a sample of "
                "the micro-batch's size and with the same autocast"
            )

    # --- backward ---------------------------------------------------------------------------------

    def _send_early(self, chunk: int) -> None:  # [Note: replicas and their exchange]
        leaf = self.fwd_cache[chunk][1][0]

        def send(tensor: torch.Tensor) -> None:
            handle.remove()
            self.bwd_cache[chunk] = (tensor.grad,)
            operations = super(PlanStage, self).get_bwd_send_ops(chunk)
            self._left.append((operations, start_messages(operations)))

        handle = leaf.register_post_accumulate_grad_hook(send)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the messages with the gradient of the input, unless they have left already."""
        if self._left and bwd_chunk_id == self._leaves_early:
            self.bwd_cache.pop(bwd_chunk_id)
            return []
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient of the input, or nothing in an evaluation, as torch should."""
        gradients: Callable[[int], Any] = super().get_local_bwd_output
        return gradients(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradient of the output, or nothing in an evaluation, as torch should."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def finish(self) -> None:
        """Wait until all messages have left, and rebuild DDP's buckets. Called after each step."""
        for _, messages in self._left:
            for message in messages:
                message.wait()
        self._left.clear()
        model = self.submod
        is_exchanged = self.has_backward and isinstance(model, DistributedDataParallel)
        if is_exchanged and rebuild_buckets(model.reducer):
            setattr(model, HAS_REBUILT, True)


class PlanSchedule(pipeline_runtime()):  # type: ignore[misc]
    """Torch's runtime with the order of a plan. `Plan.schedule` creates it."""

    def __init__(self, stages: Sequence[PlanStage], loss_fn: Loss) -> None:
        share = stages[0].share
        count = share.plan.microbatches // share.replicas

        def part_of_mean(*args: Any, **kwargs: Any) -> Any:
            return _Divided.apply(loss_fn(*args, **kwargs), count)

        # [Note: sums instead of scaling]
        super().__init__([*stages], count, loss_fn=part_of_mean, scale_grads=False)
        self.stages = tuple(stages)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "schedule.csv")
            rows = [",".join(map(str, actions)) for actions in _numbered(share)]
            path.write_text("\n".join(rows))
            getattr(self, LOAD_SCHEDULE)(str(path), format="compute_only")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step as torch does, and then sum the gradients of tied parameters.

        The arguments and the result are those of torch's ``step``. **Collective**: all ranks of the
        pipeline must call it, and those of all replicas.
        """
        with contextlib.ExitStack() as after:
            for tied in self.stages[0].share.tied:
                after.enter_context(self._summed(tied))
            output = super().step(*args, **kwargs)
            for stage in self.stages:
                stage.finish()
        return output

    @contextlib.contextmanager
    def _summed(self, tied: TiedParameter) -> Iterator[None]:  # [Note: tied parameters]
        parameter, group = tied
        earlier, parameter.grad = parameter.grad, None
        yield
        if self.stages[0].has_backward:
            gradient = parameter.grad
            if gradient is None:  # the stage did not use the parameter
                gradient = torch.zeros_like(parameter)
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


class _Copy(torch.autograd.Function):
    """Copies a tensor. The gradient is contiguous, since it may be sent."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Divided(torch.autograd.Function):
    """Returns the loss as it is, and divides its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.count, None


# --- the schedule ---------------------------------------------------------------------------------


def build_schedule(plan: "Plan", stages: Sequence[PipelineStage], loss_fn: Loss) -> PlanSchedule:
    """Return torch's schedule with this plan's order. See `Plan.schedule`."""
    ours = [stage for stage in stages if isinstance(stage, PlanStage)]
    if not ours or len(ours) < len(stages) or any(each.share.plan != plan for each in ours):
        raise ValueError(
            f"expected this rank's stages from build_stages of the same plan, got {[*stages]}; "
            "a rank without stages takes no part in steps, and needs no schedule"
        )
    return PlanSchedule(ours, loss_fn)


def _numbered(share: Share) -> list[list[Action]]:
    """Return the actions of each rank of the pipeline, for its own numbers of micro-batches.

    See [Note: the last stage numbers the micro-batches].
    """
    plan = share.plan
    last = len(plan.stages) - 1
    on_last = plan.orders[plan.stages[last].devices[share.replica]]
    forwards = [each.micro for each in on_last if (each.stage, each.kind) == (last, FORWARD)]
    numbers = {micro: number for number, micro in enumerate(forwards)}
    return [
        [each._replace(micro=numbers[each.micro]) for each in plan.orders[rank]]
        for rank in share.ranks
    ]


# --- the stages -----------------------------------------------------------------------------------


def build_stages(
    plan: "Plan",
    layers: Sequence[nn.Module],
    device: torch.device | str,
    ddp: Register | None = None,
) -> list[PlanStage]:
    """Return this rank's stages for torch's runtime. See `Plan.build_stages`."""
    device = torch.device(device)
    world = _check_ranks(plan, layers)
    _check_plan(plan)
    _check_layers(plan, layers, device)
    # The rank of each stage, for each pipeline.
    pipelines = [*zip(*[stage.devices for stage in plan.stages], strict=True)]
    ties = _ties(plan, layers)
    groups = _Groups(world)
    # Every rank creates every group, in the same order.
    exchanges = [groups.of_replicas(stage.devices) for stage in plan.stages]
    for ranks in pipelines:
        groups.add(ranks)
        for stages in ties.values():
            groups.add(ranks[each] for each in stages)
    replica = next((n for n, ranks in enumerate(pipelines) if world.rank() in ranks), None)
    if replica is None:
        return []
    ranks = pipelines[replica]
    modules = {n: _module(plan, layers, n) for n, each in enumerate(ranks) if each == world.rank()}
    copies = materialize(nn.ModuleList(modules.values()), device)
    models = {n: _replicated(module, exchanges[n], ddp) for n, module in modules.items()}
    tied = []
    for parameter, stages in ties.items():
        holders = [ranks[each] for each in stages]
        if world.rank() in holders and len({*holders}) > 1:
            tied.append(TiedParameter(_copy_of(parameter, copies), groups[holders]))
            dist.broadcast(tied[-1].parameter.detach(), holders[0], group=groups[holders])
    mesh = _mesh(pipelines, device, (exchanges[min(models)], groups[ranks]))
    trained = tuple([each for each in tied if each.parameter.requires_grad])
    share = Share(plan, replica, len(pipelines), tuple(sorted({*ranks})), mesh, trained)
    return [PlanStage(model, n, device, groups[ranks], share) for n, model in models.items()]


class _Groups:
    """Process groups by their ranks. All ranks must add the same ones in the same order."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._timeout = timedelta(seconds=group_timeout_s(world))
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def add(self, ranks: Iterable[int]) -> None:
        """Create a group unless these ranks have one. **Collective** over all ranks."""
        key = tuple(sorted({*ranks}))
        if key not in self._made:
            self._made[key] = self._create(key)

    def of_replicas(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Create a group for the exchange of one stage. **Collective** over all ranks.

        Return None outside the group, and for a stage without replicas.
        """
        return self._create(ranks) if len(ranks) > 1 else None

    def _create(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        made = dist.new_group(list(ranks), timeout=self._timeout)
        # Outside the group, torch returns a constant that is not a process group.
        return made if isinstance(made, dist.ProcessGroup) else None

    def __getitem__(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        group = self._made[tuple(sorted({*ranks}))]
        assert group is not None
        return group


def _module(plan: "Plan", layers: Sequence[nn.Module], number: int) -> LayerChain:
    """Return a stage's layers as a module. Their names are those in ``nn.Sequential(*layers)``."""
    start, stop = plan.stages[number][:2]
    named = OrderedDict((str(place), layers[place]) for place in range(start, stop))
    return LayerChain(named, recomputed=plan.recomputed_in(number))


def _ties(plan: "Plan", layers: Sequence[nn.Module]) -> dict[nn.Parameter, list[int]]:
    """Return the parameters of several stages, with the numbers of these stages."""
    found: dict[nn.Parameter, list[int]] = {}
    for number in range(len(plan.stages)):
        for parameter in _module(plan, layers, number).parameters():
            found.setdefault(parameter, []).append(number)
    return {parameter: stages for parameter, stages in found.items() if len(stages) > 1}


def _copy_of(parameter: nn.Parameter, copies: Mapping[torch.Tensor, torch.Tensor]) -> nn.Parameter:
    copy = copies.get(parameter, parameter)
    assert isinstance(copy, nn.Parameter)
    return copy


def _replicated(
    module: nn.Module, group: dist.ProcessGroup | None, register: Register | None
) -> nn.Module:
    """Return a DDP model with its hook, or the module itself if it exchanges no gradients."""
    if group is None:
        return module
    if not any(each.requires_grad for each in module.parameters()):
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        return module
    model = DistributedDataParallel(module, process_group=group, **_OWN_BUFFERS)
    Exchange.of(group).leaves_buffers_to_ddp = True
    if register is None:
        model.register_comm_hook(group, reduce_scatter_all_gather_hook)
    else:
        register(model)
    return model


def _mesh(
    pipelines: Sequence[Sequence[int]],
    device: torch.device,
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup],
) -> DeviceMesh | None:
    """Return the mesh of this rank's two groups. Its order must be that of the groups' ranks."""
    exchange, pipeline = groups
    rows = [sorted({*ranks}) for ranks in pipelines]
    places = [
        [row.index(rank) for rank in ranks] for row, ranks in zip(rows, pipelines, strict=True)
    ]
    columns = [sorted(column) for column in zip(*rows, strict=False)]
    is_grid = (
        places == places[:1] * len(places) and [*map(list, zip(*columns, strict=True))] == rows
    )
    if exchange is None or not is_grid:
        return None
    return DeviceMesh.from_group(
        [exchange, pipeline], device.type, mesh=rows, mesh_dim_names=("dp", "pp")
    )


# --- checks ---------------------------------------------------------------------------------------


def _check_ranks(plan: "Plan", layers: Sequence[nn.Module]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise UnsupportedConfigurationError(
            "expected a default process group, got none; call "
            "torch.distributed.init_process_group first"
        )
    if world.size() != len(plan.devices):
        raise ValueError(
            f"expected a rank for each of the plan's {len(plan.devices)} devices, "
            f"got {world.size()} ranks; start as many, or plan for them"
        )
    compare(
        world,
        {"plan": plan.to_json(), "number of layers": len(layers)},
        "plan on one rank, save the plan, and load it on all ranks",
    )
    return world


def _check_plan(plan: "Plan") -> None:
    counts = [len(stage.devices) for stage in plan.stages]
    replicas = counts[0]
    micros = range(plan.microbatches)
    regular = [
        stage.device(micro) == stage.devices[micro % len(stage.devices)]
        for stage in plan.stages
        for micro in micros
    ]
    if counts != [replicas] * len(counts) or plan.microbatches % replicas or not all(regular):
        raise ValueError(
            "expected stages with equally many replicas, which share the micro-batches evenly, got "
            f"{counts} replicas for {plan.microbatches} micro-batches; run the plan with "
            "crossover_ddp.pipeline.Runner, or plan with runtime='torch'"
        )
    pipelines = zip(*[stage.devices for stage in plan.stages], strict=True)
    if sum(len({*ranks}) for ranks in pipelines) != len(
        {d for s in plan.stages for d in s.devices}
    ):
        raise ValueError(
            "expected replicas of the pipeline on devices of their own, got "
            f"devices={[stage.devices for stage in plan.stages]}; run the plan with "
            "crossover_ddp.pipeline.Runner, or plan with runtime='torch'"
        )
    if plan.split and replicas > 1:
        raise ValueError(
            f"expected whole backwards, which DDP needs, got split=True with {replicas} replicas; "
            "plan with split=False, or with max_replicas=1"
        )
    for number, (stage, (shape, dtype)) in enumerate(zip(plan.stages, plan.outputs, strict=True)):
        if stage.stop <= stage.start:
            raise ValueError(
                f"expected at least one layer in each stage, got layers {stage.start} to "
                f"{stage.stop - 1} in stage {number}; plan again"
            )
        if not shape or not getattr(torch, dtype).is_floating_point:
            raise ValueError(
                f"expected outputs with a known shape of a floating-point dtype, got {dtype}"
                f"{list(shape)} of stage {number}; profile with Profile.measure, and cut elsewhere"
            )


def _check_layers(plan: "Plan", layers: Sequence[nn.Module], device: torch.device) -> None:
    if len(layers) != len(plan.layers):
        raise ValueError(
            f"expected the {len(plan.layers)} layers of the plan, got {len(layers)}; "
            "give the chain that was profiled"
        )
    config = dist.get_backend_config()
    backend = dict(each.split(":") for each in config.split(",")).get(device.type)
    # Gloo sends only tensors of the CPU from rank to rank.
    if backend is None or (backend == "gloo" and device.type != "cpu"):
        raise UnsupportedConfigurationError(
            f"expected a device that the process group's backends ({config}) send from, got "
            f"device={device}; use the CPU with gloo, and CUDA with NCCL"
        )
    allowed = {"cpu", "meta", device.type}
    for place, layer in enumerate(layers):
        tensors = [*layer.parameters(), *layer.buffers()]
        if wrong := {str(each.device) for each in tensors if each.device.type not in allowed}:
            raise UnsupportedConfigurationError(
                f"expected layers on the CPU, on the meta device or on {device}, got layer {place} "
                f"on {sorted(wrong)}; create the layers on one of these devices"
            )
    check_resets(layers)


def _like(output: tuple[tuple[int, ...], str]) -> torch.Tensor:
    shape, dtype = output
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=True)
