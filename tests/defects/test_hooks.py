"""Known defects of hooks in general: training without an exchange, on the wrong ranks, or with another hook's state."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import (
    CrossoverState,
    DecoupledState,
    KFACState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    kfac_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.errors import CrossoverError, UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import run_ranks

# Makes a state of a network and its optimizer.
MakeState = Callable[[nn.Module, Any], Any]
HOOKS: dict[str, tuple[MakeState, Any]] = {
    "split": (lambda network, optimizer: None, reduce_scatter_all_gather_hook),
    "crossover": (lambda network, optimizer: CrossoverState(), crossover_hook),
    "compressed": (lambda network, optimizer: CompressedState(Int8()), compressed_hook),
    "decoupled": (lambda network, optimizer: DecoupledState(optimizer), decoupled_hook),
    "owners": (lambda network, optimizer: DecoupledState(optimizer, owners="layers"), decoupled_hook),
    "kfac": (lambda network, optimizer: KFACState(network, kl_clip=None), kfac_hook),
    "muon": (lambda network, optimizer: MuonState(optimizer), muon_hook),
    "local_sgd": (lambda network, optimizer: LocalSGDState(2), local_sgd_hook),
    "elastic": (lambda network, optimizer: ElasticState(2, "sync"), elastic_hook),
}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))


def optimizer_of(name: str, network: nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.Muon if name == "muon" else torch.optim.SGD
    return kind(network.parameters(), lr=0.1)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    loss: torch.Tensor = (
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean()
    )
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 100 * step + dist.get_rank()).backward()
        optimizer.step()


@contextlib.contextmanager
def hooked(name: str, model: Any, network: nn.Module, optimizer: Any) -> Iterator[Any]:
    make, hook = HOOKS[name]
    state = make(network, optimizer)
    model.register_comm_hook(state, hook)
    try:
        yield state
    finally:
        with contextlib.suppress(CrossoverError):  # Muon would keep a part of its momentum
            getattr(state, "close", lambda: None)()


# --- no exchange at all, or of the wrong ranks --------------------------------------------------------------------


@pytest.mark.defect("strangers-17")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("name", "whole"), [("split", True), *((name, False) for name in HOOKS)])
def test_the_python_reducer_is_refused_in_compiled_autograd(name: str, whole: bool) -> None:
    """A user who compiles forward and backward with the python reducer is told, and never trains each rank alone."""
    compiled = pytest.importorskip("torch._dynamo.compiled_autograd")
    network = small()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=whole):
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)

        def step() -> None:
            loss_of(model, 0).backward()

        with (
            hooked(name, model, network, optimizer_of(name, network)),
            pytest.raises(UnsupportedConfigurationError, match="python_reducer"),
        ):
            if whole:
                torch.compile(step, backend="eager")()
            else:
                with compiled._enable(torch.compile(backend="eager")):
                    step()
    torch._dynamo.reset()


def replicated(rank: int, world_size: int, name: str) -> str | tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the error, or parameters after some steps with and without ``replicate()``."""
    networks = [small(), small()]
    models = [replicate(networks[0]), DistributedDataParallel(networks[1])]
    for model, network in zip(models, networks, strict=True):
        optimizer = optimizer_of(name, network)
        with hooked(name, model, network, optimizer):
            try:
                train(model, optimizer, 4)
            except UnsupportedConfigurationError as error:
                return str(error)
    with_it, without = ([p.detach() for p in network.parameters()] for network in networks)
    return with_it, without


@pytest.mark.defect("strangers-18")
@pytest.mark.parametrize("name", ["decoupled", "owners", "local_sgd", "elastic"])
def test_replicate_is_refused_where_forward_matters(name: str) -> None:
    """A user of replicate() is told that averaging and decoupled training see no forward of its model."""
    for message in run_ranks(replicated, 2, args=(name,)):
        assert isinstance(message, str) and "got replicate()" in message


@pytest.mark.defect("strangers-18")
@pytest.mark.parametrize("name", ["split", "crossover", "compressed", "kfac", "muon"])
def test_replicate_trains_as_ddp(name: str) -> None:
    """A user of replicate() gets the parameters of DDP to the last bit with all other hooks."""
    for with_it, without in run_ranks(replicated, 2, args=(name,)):
        assert all(map(torch.equal, with_it, without))


def tensor_parallel(rank: int, world_size: int, name: str) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    network = small()
    parallelize_module(network, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DistributedDataParallel(network, device_mesh=mesh["data"])
    group = model.process_group
    state: Any = {
        "crossover": CrossoverState,
        "compressed": lambda group: CompressedState(None, process_group=group),
    }
    state = state[name](group) if name in state else group
    model.register_comm_hook(state, HOOKS[name][1] if name in HOOKS else allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 100 * step + group.rank()).backward()
        optimizer.step()
    if name == "crossover":
        state.close()
    return [parameter.to_local().detach().clone() for parameter in network.parameters()]


@pytest.mark.defect("strangers-18")
def test_hooks_go_with_tensor_parallelism() -> None:
    """A user with tensor parallelism inside of DDP gets plain DDP's parameters to the last bit."""
    plain = run_ranks(tensor_parallel, 4, args=("plain",))
    for name in ("split", "crossover", "compressed"):
        for ours, theirs in zip(run_ranks(tensor_parallel, 4, args=(name,)), plain, strict=True):
            assert all(map(torch.equal, ours, theirs)), name


def wrong_group(rank: int, world_size: int, name: str) -> str:
    alone = dist.new_group([rank], use_local_synchronization=True)
    for group in (None, alone):
        network = small()
        model = DistributedDataParallel(network, process_group=group)
        optimizer = optimizer_of(name, network)
        with hooked(name, model, network, optimizer):
            try:
                train(model, optimizer, 3)
            except UnsupportedConfigurationError as error:
                return str(error)
    return "no error"


@pytest.mark.defect("strangers-8")
@pytest.mark.parametrize("name", ["split", "crossover", "compressed", "muon", "kfac"])
def test_each_model_is_compared_with_the_hooks_group(name: str) -> None:
    """A user with two models of equal shapes on different groups is told that one has the wrong group."""
    for message in run_ranks(wrong_group, 2, args=(name,)):
        assert message.startswith("expected the process group that DDP was given")


# --- states -------------------------------------------------------------------------------------------------------


# Each hook, and each state that is not its own; split has None for one, which a wrapper has none of.
WRAPPED = crossover_wrapper(allreduce_hook)
ALL = {**{name: hook for name, (_, hook) in HOOKS.items()}, "wrapper": WRAPPED}
OTHERS = [
    (name, given)
    for name, hook in ALL.items()
    for given in ("None", *HOOKS)
    if name != "owners"
    and (given if given == "None" else ALL[given]) is not hook
    and (name, given) not in (("split", "None"), ("wrapper", "crossover"))
]


@pytest.mark.defect("strangers-30")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("name", "given"), OTHERS)
def test_another_hooks_state_is_refused(name: str, given: str) -> None:
    """A user who mixes up states is told which one the hook wants, after backward."""
    network = small()
    model = DistributedDataParallel(network)
    state = None if given == "None" else HOOKS[given][0](network, optimizer_of(given, network))
    model.register_comm_hook(state, ALL[name])
    for _ in range(2):
        with pytest.raises(UnsupportedConfigurationError, match=r"got (state|process_group)="):
            loss_of(model, 0).backward()


@pytest.mark.defect("strangers-30")
@pytest.mark.usefixtures("process_group")
def test_a_wrapped_hook_takes_no_codec() -> None:
    """A user who passes a codec to the state of a wrapped hook is told that nothing would be coded."""
    model = DistributedDataParallel(small())
    model.register_comm_hook(CrossoverState(codec=Int8()), crossover_wrapper(allreduce_hook))
    with pytest.raises(
        UnsupportedConfigurationError, match=r"expected codec=None for crossover_wrapper, got"
    ):
        loss_of(model, 0).backward()


def with_environment(rank: int, world_size: int, name: str) -> str:
    network = small()
    model = DistributedDataParallel(network)
    optimizer = optimizer_of(name, network)
    with hooked(name, model, network, optimizer):
        try:
            train(model, optimizer, 2)
        except CrossoverError as error:
            return str(error)
    return "no error"


@pytest.mark.defect("strangers-23")
@pytest.mark.parametrize(
    ("name", "variable"),
    [
        *(
            (name, "CROSSOVER_DISABLE")
            for name in ("crossover", "compressed", "decoupled", "muon", "local_sgd")
        ),
        ("crossover", "CROSSOVER_GROUP"),
    ],
)
def test_ranks_of_other_environments_are_told(name: str, variable: str) -> None:
    """A user who has set a variable on one rank alone gets an error on all ranks, in no time."""
    for message in run_ranks(with_environment, 2, args=(name,), environment=[{variable: "1"}, {}]):
        assert message.startswith(f"expected the same {variable} on all ranks, got")


# --- replicas -----------------------------------------------------------------------------------------------------


def apart(rank: int, world_size: int, name: str) -> str:
    network = small()
    model = DistributedDataParallel(network)
    optimizer = optimizer_of(name, network)
    with torch.no_grad():
        network[2].weight.add_(float(rank))
    with hooked(name, model, network, optimizer):
        try:
            train(model, optimizer, 10)
        except CrossoverError as error:
            return str(error)
    return "no error"


@pytest.mark.defect("strangers-0")
@pytest.mark.parametrize("name", [name for name in HOOKS if name not in ("local_sgd", "elastic")])
def test_replicas_that_differ_are_found(name: str) -> None:
    """A user whose replicas differ gets an error within ten steps that names the parameter, on all ranks."""
    for message in run_ranks(apart, 2, args=(name,)):
        assert "2.weight" in message
