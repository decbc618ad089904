"""A plan: the stages and devices for a chain, and the order of all actions; saved as a file.

[Note: split backward]
A split backward computes the gradient of the input first, and the gradient of the weights later
(zero bubble, arXiv 2401.10241). So it sends gradients earlier. DDP supports only whole backwards,
and so does `Runner`. Torch's own runtime supports both, but a split backward only without replicas.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from .documents import Document
from .model import Action, Stage
from .schedule import bands
from .simulate import StepSpan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.nn.parallel import DistributedDataParallel

    from .torch_runtime import PlanSchedule, PlanStage

_RUNTIMES: Final = {"torch": "torch (Plan.schedule)", "runner": "crossover_ddp's Runner"}
_PROVEN: Final = 1 + 1e-9


@dataclass(frozen=True)
class Plan(Document):
    """A plan: the layers of each rank, and the order of its actions.

    Args:
        stages: the stages, first to last. They refer to devices by their number in the cluster,
            which is also the rank for `Runner`.
        orders: the actions of each device, in order.
        microbatches: the number of micro-batches in a step.
        step_s: the simulated time of a step, in seconds.
        method: how the plan was found: ``search``, or the name of a baseline that was not beaten.
        baselines: the simulated time of a step for each known design, in seconds. None if the
            design does not fit in memory, or is not defined here.
        devices: the names of the cluster's devices.
        layers: the names of the chain's layers.
        outputs: the shape and dtype of each stage's output.
        spans: the spans of the simulated step.
        split: whether backward has two actions. Such a plan is for torch's own runtime.
        bound_s: a lower bound of the step time, in seconds. If a device has several stages, or
            backward is split, no plan is shorter. Otherwise no plan is shorter that has at most one
            stage on each device and whole backwards. Replicas may share micro-batches equally or in
            proportion to their speed.
        recomputed: the indices of the layers that keep only their input, and compute their forward
            again in backward.
    """

    stages: tuple[Stage, ...]
    orders: Mapping[int, Sequence[Action]]
    microbatches: int
    step_s: float
    method: str
    baselines: Mapping[str, float | None]
    devices: tuple[str, ...]
    layers: tuple[str, ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    spans: tuple[StepSpan, ...]
    split: bool = False
    bound_s: float = 0.0
    recomputed: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """How much longer the step is than its lower bound, as a ratio. 1 means that it is proven.

        Infinite without a bound.
        """
        if not self.bound_s:
            return math.inf if self.step_s else 1.0
        return self.step_s / self.bound_s

    @property
    def runtimes(self) -> tuple[str, ...]:
        """The runtimes that can run the plan: ``torch`` (`schedule`), ``runner`` (`Runner`)."""
        found = ["torch"] if runs_on_torch(self.stages, self.microbatches, self.split) else []
        return tuple(found if self.split else [*found, "runner"])

    def recomputed_in(self, stage: int) -> list[int]:
        """Return the recomputed layers of a stage, counted from the stage's first layer."""
        start, stop = self.stages[stage][:2]
        return [layer - start for layer in self.recomputed if start <= layer < stop]

    def bands(self) -> dict[int, list[list[Action]]]:
        """Return the actions of each device, grouped in bands; see `schedule.bands`."""
        return bands(self.spans)

    def module_names(self) -> list[list[str]]:
        """Return the layer names of each stage, for torchtitan's ``module_fqns_per_model_part``."""
        return [list(self.layers[stage.start : stage.stop]) for stage in self.stages]

    def csv(self) -> str:
        """Return the compute-only schedule in the format of torch's schedules, one rank per line.

        On failure: ``ValueError`` for a plan with replicas, since torch keeps a stage on one rank.
        """
        replicated = [number for number, stage in enumerate(self.stages) if len(stage.devices) > 1]
        if replicated:
            raise ValueError(
                f"expected one device per stage, got replicas of stages {replicated}; torch's "
                "schedules support none: run the plan with Plan.schedule or Runner, or plan with "
                "max_replicas=1"
            )
        used = dict.fromkeys(stage.devices[0] for stage in self.stages)
        return "".join(",".join(map(str, self.orders[device])) + "\n" for device in used)

    def build_stages(
        self,
        layers: Sequence["nn.Module"],
        device: "torch.device | str",
        *,
        ddp: "Callable[[DistributedDataParallel], object] | None" = None,
    ) -> list["PlanStage"]:
        """Return this rank's stages for torch's runtime, ``torch.distributed.pipelining``.

        Rank i is device i of the plan's cluster. A rank without a stage gets an empty list. The
        names in a stage's ``submod.state_dict()`` are those of ``nn.Sequential(*layers)``. Layers
        may share parameters.

        If all stages have r > 1 replicas, there are r equal pipelines, and each stage's ``submod``
        is a DDP model over its replicas. The attribute ``share`` of each stage has the number of
        this rank's pipeline (``replica``), the number of pipelines (``replicas``), and a device
        mesh of all pipelines (``mesh``).

        Args:
            layers: the whole chain, on the CPU, on ``device`` or on the meta device. All ranks must
                give the same values. This rank's layers are moved to ``device``. Those on the meta
                device are initialized there by ``reset_parameters()`` of each module. The stages
                keep no other layers.
            device: this rank's device. Gloo needs the CPU. With NCCL, call
                ``torch.cuda.set_device`` before.
            ddp: called with each DDP model to register a hook, as in
                ``lambda model: model.register_comm_hook(state, hook)``. The model's
                ``process_group`` has the replicas. Without replicas it is not called. Default:
                `reduce_scatter_all_gather_hook`.

        On failure: ``ValueError`` if the plan is for other layers or ranks, if its replicas are
        uneven, share devices or have a split backward, if a stage is empty or has an unknown shape,
        and if a module on the meta device lacks ``reset_parameters``.
        `UnsupportedConfigurationError` if the device does not suit the backend or the layers, and
        if ranks have different plans.

        **Collective**: all ranks of the default process group must call it, including ranks without
        a stage.
        """
        # Torch's pipelines are imported only when they are used.
        from .torch_runtime import build_stages

        return build_stages(self, layers, device, ddp)

    def schedule(
        self, stages: Sequence["PipelineStage"], loss_fn: Callable[..., "torch.Tensor"]
    ) -> "PlanSchedule":
        """Return torch's runtime for this rank's stages, with this plan's order of actions.

        ``schedule.step(x, target=y, losses=[])`` and ``schedule.eval(…)`` are torch's own. Ranks of
        the first stage give ``x``, and ranks of the last stage give ``target``. Each of r pipelines
        gets its own part of the batch, M / r micro-batches. After ``step``, each parameter has the
        gradient of the mean loss over the whole batch, added to the gradient that it had before.

        Args:
            stages: this rank's stages from `build_stages`. A rank without stages needs no schedule.
            loss_fn: called as ``loss_fn(output, target)``. It must return the mean over the
                micro-batch.

        On failure: ``ValueError`` if the stages are not from this plan, or are none. ``step``
        raises an error if micro-batches have another size than the one that was profiled.
        """
        from .torch_runtime import build_schedule

        return build_schedule(self, stages, loss_fn)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        document = asdict(self)
        document["orders"] = {
            str(device): [str(action) for action in actions]
            for device, actions in self.orders.items()
        }
        document["stages"] = [stage._asdict() for stage in self.stages]
        document["spans"] = [[*span[:-1], str(span.action)] for span in self.spans]
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Plan":
        """Create a plan from the output of `to_json`."""
        try:
            stages = [
                Stage(each["start"], each["stop"], tuple(each["devices"]), tuple(each["pattern"]))
                for each in document["stages"]
            ]
            orders = {
                int(device): [Action.parse(text) for text in texts]
                for device, texts in document["orders"].items()
            }
            outputs = tuple([(tuple(shape), dtype) for shape, dtype in document["outputs"]])
            spans = tuple(
                [StepSpan._make([*rest, Action.parse(text)]) for *rest, text in document["spans"]]
            )
            lists = ("devices", "layers", "recomputed")
            names: dict[str, Any] = {name: tuple(document[name]) for name in lists}
            numbers = ("microbatches", "step_s", "method", "baselines", "split", "bound_s")
            others = {name: document[name] for name in numbers}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"expected a plan, got another document ({error!r}); save it with Plan.save"
            ) from error
        return cls(tuple(stages), orders, outputs=outputs, spans=spans, **names, **others)

    def __str__(self) -> str:
        count = f"{len(self.stages)} stage{'s' * (len(self.stages) > 1)}"
        first = f"{count}, {self.microbatches} micro-batches, {self.step_s:.6g} s a step"
        lines = [f"{first} ({self.method}{', split backward' if self.split else ''})"]
        lines.append(f"  {self._bound_in_words()}")
        for number, (names, stage) in enumerate(zip(self.module_names(), self.stages, strict=True)):
            layers = " … ".join(dict.fromkeys((names[0], names[-1])))
            devices = [self.devices[device] for device in stage.devices]
            if stage.pattern:
                shares = [stage.pattern.count(place) for place in range(len(devices))]
                devices = [f"{name} ({n})" for name, n in zip(devices, shares, strict=True)]
            lines.append(f"  stage {number}: {layers} on {', '.join(devices)}")
        if self.recomputed:
            names = [self.layers[layer] for layer in self.recomputed]
            lines.append(f"  recomputed: {', '.join(names)}")
        lines.append(f"  runs on: {' or '.join(_RUNTIMES[name] for name in self.runtimes)}")
        for name, step_s in self.baselines.items():
            if step_s and self.step_s:
                lines.append(f"  {name}: {step_s:.6g} s, {step_s / self.step_s:.2f}×")
            else:
                lines.append(f"  {name}: does not fit, or is not defined")
        return "\n".join(lines)

    def _bound_in_words(self) -> str:
        used = [device for stage in self.stages for device in stage.devices]
        others = "plan"
        if not self.split and len(set(used)) == len(used):
            others = "plan with one stage per device"
        if self.gap <= _PROVEN:
            return f"no other {others} is shorter"
        return f"at most {100 * (self.gap - 1):.1f} % longer than any other {others}"


def runs_on_torch(stages: Sequence[Stage], microbatches: int, split: bool) -> bool:
    """Return whether torch's runtime can run a plan with these stages.

    It keeps a stage on one rank. So a pipeline with replicas is several equal pipelines, and stages
    with replicas need whole backwards, since they are DDP models.
    """
    counts = {len(stage.devices) for stage in stages}
    if counts == {1}:
        return True
    if len(counts) > 1 or split or microbatches % counts.pop():
        return False
    devices = [device for stage in stages for device in stage.devices]
    return len(set(devices)) == len(devices) and not any(stage.pattern for stage in stages)
