"""Hooks on the hop between nodes train like native hybrid sharding, from the same seed.

Each test trains one situation natively, and once with each hook. Results of exact hooks must have
the native bits. The short form trains with `split` and with one more hook, in rotation, and leaves
out situations in which only FSDP2 does something else. With CROSSOVER_CAMPAIGN all hooks train in
all situations.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.fsdp import register_comm_hook
from tests.fsdp.situations import HOOKS, RATE, SITUATIONS, Arm, Hook, Results, bytes_of, whole
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
# The hooks that take turns beside `split` in the short form.
ROTATION = ("int8", "crossover", "int8", "averaged_every_step", "int8", "local_sgd", "all_reduce")
# The situations of the short form on the emulated device: those in which streams or the backend's
# reductions matter.
SHORT_ON_DEVICE = (
    *("plain", "accumulation_inside_nodes", "bfloat16", "divided_by_a_factor"),
    *("unused_parameters", "evaluation_between_steps"),
)


def hooks_of(name: str) -> list[str]:
    situation = SITUATIONS[name]
    hooks = [hook for hook in HOOKS if hook not in situation.differs]
    if IN_CAMPAIGN:
        return hooks
    second = ROTATION[[*SITUATIONS].index(name) % len(ROTATION)]
    return [hook for hook in hooks if hook in (situation.hooks or ("split", second))]


def findings(rank: int, world_size: int, backend: str, name: str, hooks: list[str]) -> list[str]:
    """Train a situation natively and with each hook. Return how the hooks' results differ."""
    device = torch.device(DEVICES[backend])
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    situation = SITUATIONS[name]
    mesh = init_device_mesh(device.type, situation.mesh, mesh_dim_names=("between", "inside"))

    def trained(hook: Hook | None) -> tuple[Results, str]:
        torch.manual_seed(5)
        arm = Arm(mesh, device, hook)
        return situation.train(arm), arm.disagreement

    native, _ = trained(None)
    found = []
    for each in hooks:
        got, disagreement = trained(HOOKS[each])
        tolerance = HOOKS[each].tolerance
        if tolerance is not None:
            disagreement += difference(got, native, max(tolerance, situation.tolerance))
        if disagreement:
            found.append(f"{each}: {disagreement}")
    return found


def difference(got: Results, native: Results, tolerance: float) -> str:
    """Describe how results differ from native ones. Empty if they do not."""
    if got.keys() != native.keys():
        return f"other results: {sorted(got.keys() ^ native.keys())}"
    found = []
    for name, wanted in native.items():
        change: Any = (got[name].double() - wanted.double()).norm()
        if torch.equal(got[name], wanted) or (same_bits(got[name], wanted)):
            continue
        scale = wanted.double()
        if name.startswith("end of "):  # relative to the distance that training has moved it
            scale = scale - native[name.replace("end", "start", 1)].double()
        # Also false if a value is not a number.
        if tolerance and bool(change <= tolerance * scale.norm()):
            continue
        found.append(f"{name} by {float(change):.3g} of {float(scale.norm()):.3g}")
    return ", ".join(found)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether floats are equal, with equal places of NaN."""
    return (
        got.shape == wanted.shape
        and got.dtype == wanted.dtype
        and bool(((got == wanted) | (got.isnan() & wanted.isnan())).all())
    )


def cells() -> list[Any]:
    found = []
    for backend in DEVICES:
        for name, situation in SITUATIONS.items():
            is_short = name in SHORT_ON_DEVICE if backend == "nccl" else not situation.is_of_fsdp
            if not (IN_CAMPAIGN or is_short):
                continue
            marks = [pytest.mark.fake_cuda] if backend == "nccl" else [pytest.mark.torch_version]
            if situation.lacks:
                marks = [pytest.mark.skip(reason=situation.lacks)]
            found.append(pytest.param(backend, name, id=f"{backend}-{name}", marks=marks))
    return found


@pytest.mark.parametrize(("backend", "name"), cells())
def test_hooks_agree_with_native_hybrid_sharding(backend: str, name: str) -> None:
    nodes, inside = SITUATIONS[name].mesh
    hooks = hooks_of(name)
    found = run_ranks(
        findings, nodes * inside, args=(backend, name, hooks), backend=backend, timeout_s=150.0
    )
    for rank, each in enumerate(found):
        assert each == [], f"rank {rank} differs from native training:\n" + "\n".join(each)


class Chain(nn.Module):
    """Matrices without biases, each of which is a bucket both of DDP and of FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def trained_with_codec(rank: int, world_size: int) -> tuple[list[bytes], list[bytes], float]:
    """Return the parameters that DDP and FSDP2 have trained with a codec, and FSDP2's rate."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("between", "inside"))
    found: list[list[bytes]] = []
    for kind in ("ddp", "fsdp"):
        torch.manual_seed(5)
        network: Any = Chain()
        state = CompressedState(Int8(), process_group=mesh["between"].get_group())
        model = network
        if kind == "ddp":
            model = DistributedDataParallel(
                network, process_group=state.process_group, bucket_cap_mb=1e-6
            )
            model.register_comm_hook(state, compressed_hook)
        else:
            for layer in network.layers:
                fully_shard(layer, mesh=mesh["inside"])
            fully_shard(network, mesh=mesh["inside"])
            register_comm_hook(network, state, compressed_hook)
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9)
        for step in range(6):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            loss = model(torch.randn(8, 40, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([bytes_of(whole(each)) for each in network.parameters()])
    return found[0], found[1], state.stats()["rate"]


@pytest.mark.torch_version
def test_a_codec_trains_as_under_ddp() -> None:
    """With one rank a node shards are whole, so buckets and residuals are the same, bit for bit."""
    for ddp, fsdp, rate in run_ranks(trained_with_codec, 2):
        assert rate < 0.6
        assert fsdp == ddp
