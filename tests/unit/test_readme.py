"""What the README shows works: its Python blocks run, its diff names what exists, its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover_ddp
from tests.harness import documents, run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _run(rank: int, world_size: int, source: str, wrapped: bool) -> None:
    """Run a block where a reader would paste it: after a model, a loader and an optimizer were made."""
    network = nn.Linear(3, 2)
    names = {
        "model": DistributedDataParallel(network) if wrapped else network,
        "loader": [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(3)],
        "loss_function": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        "device": torch.device("cpu"),
        "DistributedDataParallel": DistributedDataParallel,
    }
    exec(compile(source, "README.md", "exec"), names)


@pytest.mark.parametrize("source", documents.blocks(README, "python"))
def test_python_block_runs(source: str) -> None:
    run_ranks(_run, 1, args=(source, True))


@pytest.mark.parametrize("diff", documents.blocks(README, "diff"))
def test_diff_gives_a_script_that_trains(diff: str) -> None:
    run_ranks(_run, 1, args=(documents.after(diff), False))


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_link_leads_to_a_file(link: str) -> None:
    assert (ROOT / link).is_file()


@pytest.mark.parametrize("target", re.findall(r"^    make (\w+)", README, flags=re.MULTILINE))
def test_command_is_a_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_names_in_the_text_are_public() -> None:
    mentioned = set(re.findall(r"`(crossover_\w+|[A-Z]\w*(?:State|Mutex))`", README)) - {"crossover_ddp"}
    assert mentioned <= set(crossover_ddp.__all__)


def test_the_hook_is_one_added_line_and_its_import() -> None:
    (diff, *_) = documents.blocks(README, "diff")
    added = [ast.parse(line).body[0] for line in documents.added(diff)]
    assert [type(node) for node in added] == [ast.ImportFrom, ast.Expr]
