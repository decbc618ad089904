"""Torch's private names stand in one module of the package, and the installed torch has them."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import crossover_ddp
from crossover_ddp._ddp.refit import Refitter
from crossover_ddp._system import torch_private

PACKAGE = Path(crossover_ddp.__file__).parent
HOLDER = "_system/torch_private.py"
# Private names of Python's standard library: named tuples, os, sys, threading.
PYTHONS = {"_asdict", "_exit", "_fields", "_getframe", "_is_owned", "_make", "_replace"}
# Where private names of torch stand outside of their module today. This shrinks.
ELSEWHERE = {
    "_decoupled/guards.py",
    "_decoupled/owner_costs.py",
    "_decoupled/pending.py",
    "_engine/buckets.py",
    "_kfac/curvature.py",
    "_kfac/factors.py",
    "_kfac/layers.py",
    "_kfac/settings.py",
    "averaging_hooks.py",
    "cli/step_meter.py",
    "pipeline/chain.py",
    "pipeline/profile.py",
}


def is_private(name: str) -> bool:
    """Return whether a name is private. ``torch._foreach_add_`` and its like count as public."""
    return name.startswith("_") and not name.startswith(("__", "_foreach_"))


def used(tree: ast.AST) -> Iterator[str]:
    """Yield names of attributes, names imported from torch, and constants given to getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from [*str(node.module).split("."), *[each.name for each in node.names]]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("attr"):
            yield from [each.value for each in node.args if isinstance(each, ast.Constant)]


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            yield node.attr


def test_private_names_of_torch_are_used_in_one_module() -> None:
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    ours = {name for tree in trees.values() for name in defined(tree)} | PYTHONS
    found = {
        path: sorted({each for each in used(tree) if is_private(str(each))} - ours)
        for path, tree in trees.items()
    }
    outside = {path: names for path, names in found.items() if names and path != HOLDER}
    assert {path: outside[path] for path in outside.keys() - ELSEWHERE} == {}


@pytest.mark.torch_version
@pytest.mark.usefixtures("process_group")
def test_the_installed_torch_has_the_names() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert all(hasattr(model, name) for name in torch_private.NEEDED_FOR_BUFFERS)
    assert torch_private.is_broadcast_due(model) in (True, False)
    assert hasattr(model.reducer, torch_private.ZERO_BUCKETS)
    assert hasattr(model.reducer, torch_private.RESET_REDUCER)
    assert getattr(model, torch_private.COMM_HOOKS) == []
    assert "buffer_hook" in inspect.getsource(DistributedDataParallel)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert hasattr(model, torch_private.FORWARD_SYNC_BUFFERS) == (version >= (2, 14))
    assert torch_private.SUBMODULES in vars(model)
    assert [*torch_private.own_parameters(model.module[0])] == ["weight", "bias"]
    group = dist.group.WORLD
    assert group is not None
    assert isinstance(torch_private.process_group_store(group), dist.Store)


@pytest.mark.torch_version
@pytest.mark.usefixtures("process_group")
def test_the_installed_torch_has_the_names_that_make_a_reducer() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    assert all(hasattr(model, name) for name in torch_private.NEEDED_TO_REFIT)
    assert getattr(model, torch_private.STATIC_GRAPH_RECORDED) is False
    config = getattr(model, torch_private.BUCKET_CONFIG, None)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (config is not None) == (version >= (2, 14))
    if config is not None:
        names = {each.name for each in dataclasses.fields(config)}
        assert names == torch_private.BUCKET_CONFIG_FIELDS
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == 2**20, "as `refit.py` takes for granted"
    torch_private.set_static_graph(model.logger)
    torch_private.remove_reducer_hooks(model.reducer)
    assert Refitter(model, {*map(id, model.parameters())}).why_not() == (
        "the model has no hook, or several"
    )


@pytest.mark.torch_version
def test_the_installed_torch_has_the_names_of_tensors_and_optimizers() -> None:
    tensor = torch.zeros(1)
    with torch_private.preserved_versions((tensor,)):
        tensor.add_(1)
    assert torch_private.version_of(tensor) == 0
    assert torch_private.profiler_is_on() is False
    source = inspect.getsource(sys.modules[_apply_optimizer_in_backward.__module__])
    assert torch_private.IN_BACKWARD_OPTIMIZERS in source
    optimizer = torch.optim.SGD([nn.Parameter(tensor)], lr=0.1)
    assert all(hasattr(optimizer, name) for name in torch_private.STEP_HOOKS)
    module = torch_private.optimizer_module
    assert all(hasattr(module, name) for name in torch_private.GLOBAL_STEP_HOOKS)
    assert torch_private.STEP_WAS_CALLED in inspect.getsource(lr_scheduler)
    assert torch_private.newton_schulz is not None
    assert torch_private.adjusted_lr is not None
