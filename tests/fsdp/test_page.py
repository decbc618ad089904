"""The code blocks of docs/fsdp.md run as they stand, in two nodes of two ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import documents, in_ranks, spawn_script

PAGE = (Path(__file__).resolve().parents[2] / "docs/fsdp.md").read_text()
(DIFF,) = documents.blocks(PAGE, "diff")
CHECKPOINTS, DILOCO, TRAP = documents.blocks(PAGE, "python")
STEPS = 4


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(70, 70) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs).tanh()
        return inputs


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block.replace('"cuda"', '"cpu"'), "docs/fsdp.md", "exec"), names)


def optimized(names: dict[str, Any]) -> dict[str, Any]:
    """Add an optimizer to the names of a script, as a script does after it has registered a hook."""
    return {**names, "optimizer": torch.optim.AdamW(names["model"].parameters(), lr=0.01)}


def script(block: str) -> dict[str, Any]:
    """Return the names of a script up to its optimizer, with one of the page's diffs applied."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Network(), "nodes": 2, "ranks_per_node": 2}
    run(block, names)
    return optimized(names)


def train(names: dict[str, Any], *steps: int) -> list[Tensor]:
    """Train, and return the whole parameters. **Collective**."""
    model, optimizer = names["model"], names["optimizer"]
    for step in steps:
        seed = torch.Generator().manual_seed(4 * step + dist.get_rank())
        (model(torch.randn(8, 70, generator=seed)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.full_tensor().detach().clone() for each in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def same_on_all_ranks(found: list[Tensor]) -> bool:
    flat = torch.cat([each.flatten() for each in found])
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    return all(torch.equal(flat, each) for each in everywhere)


@in_ranks(4)
def test_the_diff_codes_gradients_between_nodes(rank: int) -> None:
    hooked, native = script(documents.after(DIFF)), script(documents.before(DIFF))
    found, expected = train(hooked, *range(STEPS)), train(native, *range(STEPS))
    assert same_on_all_ranks(found)
    assert not same(found, expected)
    assert hooked["state"].stats()["rate"] < 0.5
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.02)


@in_ranks(4)
def test_a_checkpoint_resumes_to_the_bit(rank: int, tmp_path: Path) -> None:
    training = script(documents.after(DIFF))
    run(CHECKPOINTS, training)
    train(training, *range(STEPS))
    training["save"](tmp_path)
    expected = train(training, *range(STEPS, 2 * STEPS))
    resumed = script(documents.after(DIFF))
    run(CHECKPOINTS, resumed)
    resumed["load"](tmp_path)
    assert any(
        bool(each.full_tensor().any())
        for each in resumed["state"].state_dict()["residuals"].values()
    )
    assert same(train(resumed, *range(STEPS, 2 * STEPS)), expected)


def diloco() -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    names = {"torch": torch, "mesh": mesh, "model": fully_shard(Network(), mesh=mesh["inside"])}
    run(DILOCO, names)
    return optimized(names)


@in_ranks(4)
def test_nodes_train_by_themselves_and_resume_from_a_file_of_each_rank(rank: int) -> None:
    training = diloco()
    assert not same_on_all_ranks(train(training, *range(12)))
    saved = copy.deepcopy(training["state"].checkpoint(training["optimizer"]))
    assert same_on_all_ranks(train(training))
    expected = train(training, *range(12, 30))
    resumed = diloco()
    resumed["state"].restore(saved, resumed["optimizer"])
    assert same(train(resumed, *range(12, 30)), expected)


@pytest.mark.fake_cuda
def test_the_script_of_the_trap_runs(tmp_path: Path) -> None:
    """`test_faults` shows that the gradients differ, with collectives that are late on purpose."""
    path = tmp_path / "trap.py"
    path.write_text(TRAP)
    with spawn_script(path, 4) as ranks:
        for output in ranks.wait(120.0):
            assert {"equal", "differ"} & {*output.split()}
