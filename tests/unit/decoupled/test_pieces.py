"""A model compiled as a whole waits piece by piece; see [Note: pieces] in `_ddp/compiled.py`."""

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp import DecoupledState, compiled
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness import training as harness
from tests.harness.campaign import only_in_campaign

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.torch_version]
WIDTH = 512
LAYERS = 4
STEPS = 8


class Net(nn.Module):
    """Has layers of 1 MiB, each a bucket and a piece."""

    def __init__(self, between: Callable[[], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.between = between

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            features = features + layer(features).tanh()
        if self.between is not None:  # not in a loop: dynamo would run all of forward uncompiled
            self.between()
        for layer in self.layers[2:]:
            features = features + layer(features).tanh()
        return features


@torch.compiler.disable
def graph_break() -> None:
    """Run outside of all graphs."""


class Trained(harness.Training):
    """Trains a model that is compiled as a whole, with our backend or the one within."""

    def __init__(
        self,
        rank: int = 0,
        *,
        decoupled: bool = True,
        backend: Any = "eager",
        pieces: bool = True,
        between: Callable[[], object] | None = None,
    ) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        net = torch.compile(Net(between), backend=compiled(backend) if pieces else backend)
        super().__init__(
            harness.decoupled(defer="always") if decoupled else None,
            rank,
            module=net,
            loss=lambda model, rank, step: model(inputs(rank, step)).square().mean(),
            **DecoupledState.ddp_options(net),
        )

    def update(self) -> None:
        self.optimizer.step()
        self.drop()
        self.steps += 1


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=only_in_campaign), "aot_eager"])
@in_ranks(2, timeout_s=120.0)
def test_pieces_train_as_plain_ddp_and_are_not_compiled_again(backend: str, rank: int) -> None:
    # DDPOptimizer makes a progress bar, which would leave its thread behind.
    with contextlib.suppress(ImportError):
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    plain = Trained(rank, decoupled=False, backend=backend).run(STEPS)
    trained = Trained(rank, backend=backend).run(5)
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trained.run(STEPS - 5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations
    assert trained.state.stats()["steps_deferred"] == STEPS - 2
    trained.close()
    for ours, theirs in zip(trained.weights(), plain.weights(), strict=True):
        assert torch.equal(ours, theirs)
    torch._dynamo.reset()


def pending_at_pieces(trained: Trained, pieces: list[int]) -> None:
    """Have ``pieces`` get the number of deferred updates when a piece begins to run."""
    pending = trained.state._pending
    reads = pending.guards._reads

    def noted(parameters: Any) -> None:
        reads(parameters)
        pieces.append(len(pending.unread))

    for region in regions(trained):
        region._reads = noted


def regions(trained: Trained) -> list[Any]:
    """Return the regions of a model's guards."""
    return trained.state._pending.guards.regions


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("pieces", [True, False])
def test_each_piece_waits_for_its_own_parameters(pieces: bool) -> None:
    trained = Trained(pieces=pieces).run(6)
    seen: list[int] = []
    assert [each.is_in_pieces for each in regions(trained)] == [pieces]
    pending_at_pieces(trained, seen)
    trained.run(1)
    if pieces:
        assert len(seen) > 1
        assert seen == sorted(seen, reverse=True)
        assert seen[0] > seen[-1] == 0
    trained.close()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", ["graph break", "one piece"])
def test_all_parameters_are_updated_before(case: str) -> None:
    with torch._dynamo.config.patch(optimize_ddp=case != "one piece"):
        between = graph_break if case == "graph break" else None
        trained = Trained(between=between).run(6)
        plain = Trained(decoupled=False, between=between).run(6)
        assert not any(each.is_in_pieces for each in regions(trained))
    trained.close()
    for ours, theirs in zip(trained.weights(), plain.weights(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("process_group")
def test_code_that_runs_past_the_pieces_is_an_error() -> None:
    """Parameters may have been read before their update."""
    trained = Trained().run(6)
    torch._dynamo.reset()
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(UnsupportedConfigurationError, match="compiled in pieces"),
    ):
        trained.run(1)
    trained.close()


def test_modes_and_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = compiled("inductor")
    passed: dict[str, Any] = {}
    monkeypatch.setattr(backend, "_compile", lambda graph, inputs, **more: passed.update(more))
    graph = torch.fx.symbolic_trace(nn.Identity())
    backend(graph, [], mode="max-autotune", options={"trace.enabled": True})
    assert passed["config_patches"]["max_autotune"]
    assert passed["config_patches"]["trace.enabled"]


def test_a_wrong_name_is_torchs_error() -> None:
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="nonsense"):
        compiled("nonsense")


def test_the_package_starts_without_dynamo() -> None:
    code = "import sys, crossover_ddp; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
