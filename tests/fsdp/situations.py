"""The situations of FSDP2 in which hooks on the hop train like native hybrid sharding.

Each situation is a function that trains a network in a given `Arm` and returns what must agree. A
new one needs the decorator `situation`, and nothing else.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import crossover_ddp as ddp
from crossover_ddp.fsdp import register_comm_hook

WORDS: Final = 31  # shards of an odd number of rows are uneven
WIDTH: Final = 16
STEPS: Final = 5
RATE: Final = 0.1
# By name: the losses, the parameters before and after training, and additions of a situation.
Results = dict[str, Tensor]
# Returns the state and the hook, given the process group between the nodes.
Make = Callable[[dist.ProcessGroup], tuple[Any, Any]]


@dataclass(frozen=True)
class Hook:
    """A hook in one setting, and how close to native training it is."""

    make: Make
    # How far parameters may be from native ones, relative to the distance that training has moved
    # them. Zero: all bits are equal. None: they are not compared.
    tolerance: float | None = 0.0
    # Whether nodes differ until `average()`.
    averages: bool = False


HOOKS: Final = {
    "split": Hook(lambda group: (group, ddp.reduce_scatter_all_gather_hook)),
    "int8": Hook(
        lambda group: (ddp.CompressedState(ddp.Int8(), process_group=group), ddp.compressed_hook),
        tolerance=0.05,
    ),
    "crossover": Hook(lambda group: (ddp.CrossoverState(process_group=group), ddp.crossover_hook)),
    "averaged_every_step": Hook(
        lambda group: (ddp.LocalSGDState(1, process_group=group), ddp.local_sgd_hook)
    ),
    "local_sgd": Hook(
        lambda group: (ddp.LocalSGDState(4, delay=1, process_group=group), ddp.local_sgd_hook),
        tolerance=None,
        averages=True,
    ),
    "all_reduce": Hook(lambda group: (group, allreduce_hook)),
    "wrapped_all_reduce": Hook(
        lambda group: (
            ddp.CrossoverState(hook_state=group, process_group=group),
            ddp.crossover_wrapper(allreduce_hook),
        )
    ),
}


def shard_blocks(network: Any, mesh: DeviceMesh, **options: Any) -> None:
    for block in network.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(network, mesh=mesh, **options)


def shard_root(network: Any, mesh: DeviceMesh, **options: Any) -> None:
    fully_shard(network, mesh=mesh, **options)


def shard_blocks_together(network: Any, mesh: DeviceMesh, **options: Any) -> None:
    fully_shard([network.blocks[0], network.blocks[1]], mesh=mesh, **options)
    fully_shard(network, mesh=mesh, **options)


def shard_columns(network: Any, mesh: DeviceMesh, **options: Any) -> None:
    """Divide matrices by columns where the number of columns is even."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None

    shard_blocks(network, mesh, shard_placement_fn=placement, **options)


def replicate_blocks(network: Any, mesh: DeviceMesh, **options: Any) -> None:
    for block in network.blocks:
        replicate(block, mesh=mesh, **options)
    replicate(network, mesh=mesh, **options)


@dataclass
class Arm:
    """One way to train: natively, or with a hook between the nodes."""

    mesh: DeviceMesh
    device: torch.device
    # None is native.
    hook: Hook | None = None
    state: Any = field(default=None, init=False)
    # The error of `end`; empty if nodes have the same parameters.
    disagreement: str = field(default="", init=False)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def shard(self, network: Any, apply: Callable[..., None] = shard_blocks, **options: Any) -> Any:
        network.to(self.device)
        if self.hook is None:
            apply(network, self.mesh, **options)
            return network
        apply(network, self.mesh["inside"], **options)
        group = self.mesh["between"].get_group()
        self.state, hook = self.hook.make(group)
        register_comm_hook(network, self.state, hook)
        return network

    def end(self, network: Any) -> None:
        """Compare the parameters of the nodes, after the average of a hook that averages them."""
        if self.hook is None:
            return
        if self.hook.averages:
            if self._agrees(network):
                self.disagreement += "the nodes have agreed before their average; "
            self.state.average()
        if not self._agrees(network):
            self.disagreement += "the nodes have different parameters; "

    def _agrees(self, network: Any) -> bool:
        own = hashlib.sha256()
        for parameter in parameters_of(network).values():
            own.update(bytes_of(parameter.to_local()))
        group = self.mesh["between"].get_group()
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, own.hexdigest(), group=group)
        return len({*found}) == 1


def parameters_of(network: nn.Module) -> dict[str, Any]:
    """Return the divided parameters. An evaluation leaves some gathered; `state_dict` ends that."""
    names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in network.state_dict().items() if name in names}


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Identity(nn.Identity):
    """Stands for LayerNorm on the emulated device, which has none in bfloat16."""


class Net(nn.Module):
    """A small language model whose blocks may be called in several ways."""

    # Whether the side layer is used, which has no gradient otherwise.
    uses_side = False
    side: nn.Linear
    # The order in which forward calls the blocks.
    order: tuple[int, ...] = (0, 1)

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        norm = Identity if device.type == "cuda" else nn.LayerNorm
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS)

    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number in self.order:
            x = self.call(self.blocks[number], x)
        if self.uses_side:
            x = x + self.side(x)
        return self.head(self.norm(x))


def batch(arm: Arm, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + arm.rank)
    tokens = torch.randint(0, WORDS, (4, 7), generator=generator).to(arm.device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(arm: Arm, network: Any, step: int) -> Tensor:
    x, y = batch(arm, step)
    outputs = network(x)
    kept = outputs if outputs.dtype == torch.float64 else outputs.float()
    return F.cross_entropy(kept.flatten(0, 1), y.flatten())


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps depend on the scale of gradients."""
    return torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)


def whole(tensor: Any) -> Tensor:
    """Return a copy of a tensor on the host, gathered if it is divided."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    copy: Tensor = full.detach().cpu().clone()
    return copy


class Run:
    """Records a training run of a network in an arm."""

    def __init__(self, arm: Arm, network: Any) -> None:
        self.arm = arm
        self.network = network
        self.results: Results = {}
        self._losses: list[Tensor] = []
        self._note_parameters("start of")

    def backward(self, loss: Tensor, *, scale: float = 1.0) -> None:
        self._losses.append(loss.detach().cpu())
        (loss * scale if scale != 1.0 else loss).backward()

    def note(self, name: str, value: Any) -> None:
        """Add a value to the results. **Collective** if it is divided."""
        index = sum(each.startswith(f"{name} ") for each in self.results)
        self.results[f"{name} {index}"] = whole(value)

    def note_gradients(self) -> None:
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None:
                self.note(f"gradient of {name},", parameter.grad)

    def finish(self) -> Results:
        self.arm.end(self.network)
        self._note_parameters("end of")
        for name, buffer in self.network.named_buffers():
            self.results[f"buffer {name}"] = whole(buffer)
        self.results["losses"] = torch.stack(self._losses)
        return self.results

    def _note_parameters(self, when: str) -> None:
        for name, parameter in parameters_of(self.network).items():
            self.results[f"{when} {name}"] = whole(parameter)


def train(
    arm: Arm,
    network: Any,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    make_optimizer: Callable[[nn.Module], Any] = sgd,
    before_micro: Callable[[int, int], None] = lambda step, micro: None,
    before_step: Callable[[Run], None] = lambda run: None,
    after_step: Callable[[Run, int], None] = lambda run, step: None,
    loss: Callable[[Arm, Any, int], Tensor] = loss_of,
    called: Any = None,
    scale: float = 1.0,
    set_to_none: bool = True,
) -> Results:
    """Train ``network`` for some steps, and call functions of the situation in between.

    ``called`` is a compiled form of the network.
    """
    run = Run(arm, network)
    optimizer = make_optimizer(network)
    for step in range(steps):
        for micro in range(accumulate):
            before_micro(step, micro)
            run.backward(
                loss(arm, network if called is None else called, step * accumulate + micro),
                scale=scale,
            )
        before_step(run)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        after_step(run, step)
    return run.finish()


@dataclass(frozen=True)
class Situation:
    train: Callable[[Arm], Results]
    # The numbers of nodes and of ranks inside each.
    mesh: tuple[int, int] = (2, 2)
    # That of exact hooks, see `Hook.tolerance`.
    tolerance: float = 0.0
    # The reason for which it cannot run here; empty if it can.
    lacks: str = ""
    # Hooks that cannot run it or differ in it, each with the reason.
    differs: Mapping[str, str] = field(default_factory=dict)
    # The hooks of the short form; empty: `split` and another one, in rotation.
    hooks: tuple[str, ...] = ()
    # Whether the short form leaves it out: FSDP2 does something else in it, the hop does not.
    is_of_fsdp: bool = False


SITUATIONS: Final[dict[str, Situation]] = {}


def situation(**options: Any) -> Callable[[Callable[[Arm], Results]], Callable[[Arm], Results]]:
    """Register the decorated function. ``options`` are those of `Situation`."""

    def decorated(function: Callable[[Arm], Results]) -> Callable[[Arm], Results]:
        SITUATIONS[function.__name__] = Situation(function, **options)
        return function

    return decorated


# --- gradients and steps ---


@situation(hooks=(*HOOKS,))
def plain(arm: Arm) -> Results:
    results = train(arm, arm.shard(Net(arm.device)), before_step=Run.note_gradients)
    if isinstance(arm.state, ddp.CompressedState):
        assert arm.state.stats()["rate"] < 0.6, "the codec has coded little or nothing"
    return results


@situation(is_of_fsdp=True)
def adamw(arm: Arm) -> Results:
    make = functools.partial(_adamw, fused=False)
    return train(arm, arm.shard(Net(arm.device)), make_optimizer=make)


def _adamw(network: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=3e-3, **options)


@situation()
def clipping(arm: Arm) -> Results:
    def clip(run: Run) -> None:
        norm = nn.utils.clip_grad_norm_(run.network.parameters(), 0.3)
        run.note("norm", norm)
        assert run.results["norm 0"] > 0.3

    return train(arm, arm.shard(Net(arm.device)), before_step=clip)


@situation(is_of_fsdp=True)
def zeros_instead_of_none(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device)), set_to_none=False)


@situation(is_of_fsdp=True)
def scaled_loss(arm: Arm) -> Results:
    def unscale(run: Run) -> None:
        for parameter in run.network.parameters():
            parameter.grad.div_(1024.0)

    return train(arm, arm.shard(Net(arm.device)), scale=1024.0, before_step=unscale)


@situation()
def gradient_scaler(arm: Arm) -> Results:
    """One step has gradients that are not finite, on one node: all ranks leave it out."""
    network = arm.shard(Net(arm.device))
    run = Run(arm, network)
    optimizer = sgd(network)
    scaler = torch.amp.GradScaler(arm.device.type, init_scale=1024.0, growth_interval=2)
    scaler.scale(torch.zeros((), device=arm.device))  # makes its tensors
    for step in range(STEPS):
        factor = float("inf") if step == 2 and arm.rank == 0 else scaler.get_scale()
        run.backward(loss_of(arm, network, step), scale=factor)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        run.note("scale", torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()
    return run.finish()


@situation()
def optimizer_in_backward(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))
    optimizers = {each: torch.optim.SGD([each], lr=RATE) for each in network.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    run = Run(arm, network)
    for number in range(STEPS):
        run.backward(loss_of(arm, network, number))
    return run.finish()


# --- several backward passes a step ---


@situation()
def accumulation(arm: Arm) -> Results:
    """Each micro-batch is averaged over all ranks."""
    return train(arm, arm.shard(Net(arm.device)), accumulate=3)


@situation()
def accumulation_without_sync(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))

    def sync_last(step: int, micro: int) -> None:
        network.set_requires_gradient_sync(micro == 2)

    return train(arm, network, accumulate=3, before_micro=sync_last)


@situation(hooks=("split", "int8"))
def accumulation_inside_nodes(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))

    def cross_last(step: int, micro: int) -> None:
        network.set_requires_all_reduce(micro == 2)

    return train(arm, network, accumulate=3, before_micro=cross_last)


@situation(is_of_fsdp=True)
def accumulation_of_gathered_parameters(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))

    def end_last(step: int, micro: int) -> None:
        network.set_requires_gradient_sync(micro == 2)
        network.set_is_last_backward(micro == 2)
        network.set_reshard_after_backward(micro == 2)

    return train(arm, network, accumulate=3, before_micro=end_last)


@situation()
def two_forwards(arm: Arm) -> Results:
    def both(arm: Arm, network: Any, step: int) -> Tensor:
        return loss_of(arm, network, 2 * step) + loss_of(arm, network, 2 * step + 1)

    return train(arm, arm.shard(Net(arm.device)), loss=both)


FOLLOWS_NO_FORWARD: Final = dict.fromkeys(
    ("averaged_every_step", "local_sgd"), "they refuse a backward pass that follows no forward"
)


# Two backward passes a step are `accumulation`; here they go through one graph.
@situation(differs=FOLLOWS_NO_FORWARD)
def retained_graph(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))
    run = Run(arm, network)
    optimizer = sgd(network)
    for step in range(STEPS):
        loss = loss_of(arm, network, step)
        loss.backward(retain_graph=True)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return run.finish()


# --- precision ---


def in_precision(**policy: Any) -> Callable[..., Any]:
    """Return a form of `Arm.shard` with this policy of mixed precision."""

    def shard(arm: Arm) -> Any:
        return arm.shard(Net(arm.device), mp_policy=MixedPrecisionPolicy(**policy))

    return shard


in_bfloat16 = in_precision(param_dtype=torch.bfloat16)


@situation()
def bfloat16_reduced_in_float32(arm: Arm) -> Results:
    shard = in_precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(arm, shard(arm))


@situation()
def bfloat16(arm: Arm) -> Results:
    """FSDP2 converts the averages to float32."""
    return train(arm, in_bfloat16(arm), before_step=Run.note_gradients)


@situation()
def outputs_converted(arm: Arm) -> Results:
    """The outermost module converts its outputs, so backward begins before its own hooks."""

    def apply(network: Any, mesh: DeviceMesh) -> None:
        inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in network.blocks:
            fully_shard(block, mesh=mesh, mp_policy=inner)
        outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(network, mesh=mesh, mp_policy=outer)

    return train(arm, arm.shard(Net(arm.device), apply))


@situation(is_of_fsdp=True)
def bfloat16_accumulated(arm: Arm) -> Results:
    return train(arm, in_bfloat16(arm), accumulate=2)


@situation()
def bfloat16_accumulated_inside_nodes(arm: Arm) -> Results:
    network = in_bfloat16(arm)

    def cross_last(step: int, micro: int) -> None:
        network.set_requires_all_reduce(micro == 1)

    return train(arm, network, accumulate=2, before_micro=cross_last)


# FSDP2 divides by a part of the number of ranks before it reduces: natively of all of them, here of
# those inside the node. So gradients are rounded in another place.
@situation(tolerance=5e-3)
def float16_reduction(arm: Arm) -> Results:
    shard = in_precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    return train(arm, shard(arm))


IN_DOUBLE: Final = {"int8": "codecs refuse float64"}


@situation(differs=IN_DOUBLE, is_of_fsdp=True)
def float64(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device).double()))


@situation(differs=IN_DOUBLE, mesh=(2, 3))
def float64_on_three_ranks(arm: Arm) -> Results:
    """FSDP2 divides by a part of the number of ranks after the hook."""
    return train(arm, arm.shard(Net(arm.device).double()))


# --- settings of FSDP2 ---


@situation(is_of_fsdp=True)
def gathered_after_forward(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device), reshard_after_forward=False))


@situation(is_of_fsdp=True)
def resharded_after_forward(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device), reshard_after_forward=True))


@situation()
def root_alone(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device), shard_root))


@situation(is_of_fsdp=True)
def two_blocks_in_one_group(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device), shard_blocks_together))


@situation()
def divided_by_columns(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device), shard_columns))


def set_in_all(network: Any, method: str, *values: Any) -> None:
    for module in network.modules():
        if isinstance(module, FSDPModule):
            getattr(module, method)(*values)


@situation()
def sums_forced(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))
    set_in_all(network, "set_force_sum_reduction_for_comms", True)
    return train(arm, network)


@situation()
def divided_by_a_factor(arm: Arm) -> Results:
    """Gradients are sums over all ranks, divided by the factor."""
    network = arm.shard(Net(arm.device))
    set_in_all(network, "set_gradient_divide_factor", 8.0)
    if arm.device.type == "cpu":  # gloo multiplies no operand before it adds
        set_in_all(network, "set_force_sum_reduction_for_comms", True)
    return train(arm, network, before_step=Run.note_gradients)


@situation()
def divided_by_the_ranks_of_a_node(arm: Arm) -> Results:
    """With this factor FSDP2 averages inside the node, on gloo as well, and then adds."""
    network = arm.shard(Net(arm.device))
    set_in_all(network, "set_gradient_divide_factor", 2.0)
    return train(arm, network, before_step=Run.note_gradients)


@situation(is_of_fsdp=True)
def prefetching(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))
    first, second = network.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return train(arm, network)


# --- parameters ---


def with_side(arm: Arm) -> Net:
    network = Net(arm.device)
    network.side = nn.Linear(WIDTH, WIDTH)
    return network


@situation(hooks=("split", "int8"))
def unused_parameters(arm: Arm) -> Results:
    """The side layer has gradients in every second step, in a group with others."""
    network = arm.shard(with_side(arm))

    def use(step: int, micro: int) -> None:
        network.uses_side = step % 2 == 1

    return train(arm, network, before_micro=use)


@situation()
def unused_block(arm: Arm) -> Results:
    """One block, which is a group, has gradients in every second step."""
    network = arm.shard(Net(arm.device))

    def use(step: int, micro: int) -> None:
        network.order = (0, 1) if step % 2 else (1,)

    return train(arm, network, before_micro=use)


_UNUSED: Final = "set_reduce_scatter_unused_params"


@situation(
    lacks="" if hasattr(FSDPModule, _UNUSED) else f"needs FSDPModule.{_UNUSED} of torch 2.13"
)
def unused_parameters_by_rank(arm: Arm) -> Results:
    network = arm.shard(with_side(arm))
    network.set_reduce_scatter_unused_params(True)

    def use(step: int, micro: int) -> None:
        network.uses_side = (step + arm.rank) % 2 == 1

    return train(arm, network, before_micro=use)


@situation()
def frozen_parameters(arm: Arm) -> Results:
    network: Any = Net(arm.device)
    network.embed.requires_grad_(False)
    network.blocks[0].up.weight.requires_grad_(False)
    network.blocks[1].requires_grad_(False)
    return train(arm, arm.shard(network))


@situation()
def frozen_midway(arm: Arm) -> Results:
    """A block and a layer are frozen for two steps, and trained again afterwards."""
    network = arm.shard(Net(arm.device))

    def freeze(run: Run, step: int) -> None:
        for module in (network.blocks[0], network.head):
            module.requires_grad_(not 1 <= step < 3)

    return train(arm, network, steps=6, after_step=freeze)


def twins(arm: Arm) -> Any:
    """Return a network in which a block has two layers of one size, of which one is frozen."""
    network = Net(arm.device)
    network.blocks[1].down = nn.Linear(WIDTH, WIDTH, bias=False)
    network.blocks[1].up = nn.Linear(WIDTH, WIDTH, bias=False)
    network.blocks[1].down.requires_grad_(False)
    return arm.shard(network)


@situation()
def frozen_in_turns(arm: Arm) -> Results:
    """Two matrices with equally many elements: each is frozen while the other one is trained."""
    network = twins(arm)

    def swap(run: Run, step: int) -> None:
        network.blocks[1].down.requires_grad_(step % 2 == 0)
        network.blocks[1].up.requires_grad_(step % 2 == 1)

    return train(arm, network, steps=6, set_to_none=False, after_step=swap)


@situation(is_of_fsdp=True)
def tied_weights(arm: Arm) -> Results:
    network = Net(arm.device)
    network.head.weight = network.embed.weight
    return train(arm, arm.shard(network))


def loaded(assign: bool) -> Callable[[Arm], Results]:
    def run(arm: Arm) -> Results:
        network = arm.shard(Net(arm.device))
        kept: dict[str, Any] = {}

        def load(run: Run, step: int) -> None:
            if step == 1:
                state = run.network.state_dict()
                kept.update((name, value.detach().clone()) for name, value in state.items())
            if step == 3:
                run.network.load_state_dict(kept, assign=assign)

        # The optimizer of the former parameters would not step those that are assigned.
        make = _Following if assign else sgd
        return train(arm, network, steps=6, make_optimizer=make, after_step=load)

    return run


class _Following:
    """SGD without momentum, of the parameters that the network has at each step."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._network.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._network.zero_grad(set_to_none=set_to_none)


SITUATIONS["state_loaded_midway"] = Situation(loaded(assign=False), is_of_fsdp=True)
SITUATIONS["state_assigned_midway"] = Situation(loaded(assign=True))


# --- modules ---


@situation()
def block_used_twice(arm: Arm) -> Results:
    network = Net(arm.device)
    network.order = (0, 1, 0)
    return train(arm, arm.shard(network))


def checkpointing(reentrant: bool) -> Callable[[Arm], Results]:
    class Recomputed(Net):
        def call(self, block: nn.Module, x: Tensor) -> Any:
            return checkpoint(block, x, use_reentrant=reentrant)

    return lambda arm: train(arm, arm.shard(Recomputed(arm.device)))


SITUATIONS["checkpointing"] = Situation(checkpointing(reentrant=False), is_of_fsdp=True)
SITUATIONS["reentrant_checkpointing"] = Situation(checkpointing(reentrant=True))


@situation(hooks=("split", "local_sgd"))
def evaluation_between_steps(arm: Arm) -> Results:
    """An evaluation leaves the outermost module gathered."""
    network = arm.shard(Net(arm.device))

    def evaluate(run: Run, step: int) -> None:
        network.eval()
        with torch.no_grad():
            run.note("evaluated", loss_of(arm, network, 100 + step))
        network.train()

    return train(arm, network, after_step=evaluate)


class Normalized(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.batch_norm(self.block(x).transpose(1, 2)).transpose(1, 2)


@situation()
def batch_norm_buffers(arm: Arm) -> Results:
    """Each rank keeps its own statistics, as natively."""
    network = Net(arm.device)
    network.blocks[1] = Normalized(network.blocks[1])
    results = train(arm, arm.shard(network))
    assert any(name.startswith("buffer ") for name in results)
    return results


@situation(hooks=("split",))
def compiled_blocks(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))
    with compiler():
        for block in network.blocks:
            block.compile(backend="aot_eager")
        return train(arm, network, steps=3)


@situation(hooks=("split",))
def compiled_model(arm: Arm) -> Results:
    network = arm.shard(Net(arm.device))
    with compiler():
        called = torch.compile(network, backend="aot_eager")
        return train(arm, network, steps=3, called=called)


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


# --- other meshes ---


@situation(mesh=(2, 1))
def one_rank_a_node(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device)))


@situation(mesh=(2, 1))
def replicated(arm: Arm) -> Results:
    """``replicate`` takes a mesh of one dimension, natively of all ranks."""
    if arm.hook is None:
        arm.mesh = arm.mesh["between"]
    return train(arm, arm.shard(Net(arm.device), replicate_blocks))


# With three and more summands the order of additions differs.
@situation(mesh=(3, 1), tolerance=1e-4)
def three_nodes(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device)), accumulate=2)


@situation(mesh=(3, 2), tolerance=1e-4, is_of_fsdp=True)
def three_nodes_of_two_ranks(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device)), accumulate=2)


@situation(mesh=(2, 3), is_of_fsdp=True)
def two_nodes_of_three_ranks(arm: Arm) -> Results:
    return train(arm, arm.shard(Net(arm.device)), accumulate=2)
