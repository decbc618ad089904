"""The code blocks of README and docs/ run as they stand, and train two ranks on gloo.

`test_loops` runs those of docs/loops.md, and tests/fsdp/test_page.py those of docs/fsdp.md.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from crossover_ddp.pipeline import Cluster, LayerProfile, Profile, plan_pipeline
from tests.harness import documents, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *(f"docs/{each.name}" for each in sorted((ROOT / "docs").glob("*.md"))),
]
ELSEWHERE = {
    "docs/loops.md": "tests/recipes/test_loops.py",
    "docs/fsdp.md": "tests/fsdp/test_page.py",
}


def blocks_of(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    diffs = [documents.after(each) for each in documents.blocks(text, "diff")]
    return [*diffs, *documents.blocks(text, "python")]


BLOCKS = {
    f"{page} {number}": block
    for page in PAGES
    if page not in ELSEWHERE
    for number, block in enumerate(blocks_of(page), 1)
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)
    )


def dataset() -> TensorDataset:
    """Return two steps of eight virtual ranks with batches of 32."""
    made = torch.Generator().manual_seed(0)
    samples = torch.randn(512, 6, generator=made)
    return TensorDataset(samples, torch.randint(3, (512,), generator=made))


def given() -> dict[str, Any]:
    """Return what a block may expect of the script around it."""
    net = network()
    model = DistributedDataParallel(net)
    return {
        "torch": torch,
        "DistributedDataParallel": DistributedDataParallel,
        "net": net,
        "network": net,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)],
        "loss_function": nn.functional.cross_entropy,
        "dataset": dataset(),
        "epochs": 2,
        "os": os,
        "path": "nowhere.pt",
        "rank": 1,  # of a rank that saves nothing
    }


def run_block(rank: int, world_size: int, block: str) -> tuple[list[Tensor], bool]:
    """Run a block and train. Return the parameters, and whether they have changed."""
    names = given()
    if "DistributedDataParallel(model)" in block:
        names["model"] = names["net"]
    before = [each.detach().clone() for each in names["net"].parameters()]
    exec(compile(block, "a document", "exec"), names)
    optimizers = {
        id(each): each for each in names.values() if isinstance(each, torch.optim.Optimizer)
    }
    # A block with virtual ranks has its own loop.
    for inputs, labels in [] if "ranks" in names else names["loader"]:
        names["loss_function"](names["model"](inputs), labels).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    after = [each.detach().clone() for each in names["model"].parameters()]
    return after, any(not torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("block", [each for each in BLOCKS if "pipeline" not in each])
def test_a_block_runs_and_trains(block: str) -> None:
    for after, has_changed in run_ranks(run_block, 2, args=(BLOCKS[block],)):
        assert has_changed
        assert all(bool(each.isfinite().all()) for each in after)


def run_virtual(
    rank: int, world_size: int, block: str, path: str, epochs: int
) -> tuple[list[Tensor], int]:
    """Train up to an epoch with the diff of virtual ranks. Return the parameters, and the steps."""
    torch.set_num_threads(1)
    names = {**given(), "path": path, "rank": rank, "epochs": epochs}
    names["model"] = names["net"]
    exec(compile(block, "docs/virtual.md", "exec"), names)
    return [each.detach() for each in names["net"].parameters()], names["ranks"].step


def test_virtual_ranks_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    block = BLOCKS["docs/virtual.md 1"]
    whole, resumed = str(tmp_path / "whole.pt"), str(tmp_path / "resumed.pt")
    expected, *_ = run_ranks(run_virtual, 1, args=(block, whole, 2))
    assert expected[1] == 4
    assert run_ranks(run_virtual, 3, args=(block, resumed, 1))[0][1] == 2
    for parameters, steps in run_ranks(run_virtual, 2, args=(block, resumed, 2)):
        assert steps == 4
        assert all(map(torch.equal, parameters, expected[0]))


def block_with(text: str) -> str:
    (block,) = [each for each in BLOCKS.values() if text in each]
    return block


def test_the_blocks_of_a_pipeline_are_the_model() -> None:
    names: dict[str, Any] = {}
    exec(block_with("def blocks()"), names)
    assert nn.Sequential(*names["blocks"]()).eval()(torch.randn(1, 3, 224, 224)).shape == (1, 1000)


def run_pipeline(rank: int, world_size: int, block: str) -> bool:
    """Run a block on torch's runtime. Return whether it has changed this rank's parameters."""
    net = network()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    data = TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))
    names: dict[str, Any] = {"layers": [*net], "device": "cpu", "data": data, "batch_size": 8}
    exec(compile(block, "a document", "exec"), names)
    assert len(names["losses"]) == (4 if rank == world_size - 1 else 0)
    (stage,) = names["stages"]
    after = stage.submod.state_dict()
    return all(not torch.equal(value, before[name]) for name, value in after.items())


def test_the_block_of_torchs_runtime_trains(tmp_path: Path) -> None:
    layers = [
        LayerProfile(str(n), 1.0, 2.0, 48, 168, shape=(2, 6 if n < 4 else 3)) for n in range(5)
    ]
    cluster = Cluster(((1e9,) * 2,) * 2)
    plan = plan_pipeline(Profile(tuple(layers)), cluster, microbatches=4, max_replicas=1)
    assert len(plan.stages) == 2
    plan.save(path := str(tmp_path / "plan.json"))
    block = block_with("plan.build_stages(").replace("plan.json", path)
    assert run_ranks(run_pipeline, 2, args=(block,)) == [True, True]


def test_every_page_with_code_is_run() -> None:
    assert len(BLOCKS) >= 13
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())
