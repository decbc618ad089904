"""Into how many graphs a compiled model falls where layers are captured: what docs/kfac.md says of it."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._kfac.capture import FactorCapture
from crossover_ddp._kfac.layers import find_layers

pytestmark = pytest.mark.torch_version

LAYERS = 4
CALLS = 5
MOST = 2 * LAYERS + 2
ALIKE, DIFFERENT = (4,) * (LAYERS + 1), (4, 5, 6, 7, 8)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Where tqdm is installed torch's compiler uses it, and it starts a thread for good.
    if importlib.util.find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Stack(nn.Module):
    """Four layers with something before, between and behind them; a loop over them would be one cut."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self.first, self.second, self.third, self.fourth = layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.sin()).tanh() * 2).tanh() * 2
        return self.fourth(self.third(x).tanh() * 2).exp()  # type: ignore[no-any-return]


def graphs_by_call(widths: Sequence[int], *, skip: Sequence[str] = (), way: str = "outside") -> list[int]:
    """Return how many graphs there were after each call; factors are taken in every second step."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = Stack(widths)
    layers, _ = find_layers(model, skip)
    capture = FactorCapture(layers, sharing="expand", model=model)
    called: nn.Module = DistributedDataParallel(model) if way == "ddp" else model
    if way == "in place":
        called.compile(backend=backend)
    else:
        called = torch.compile(called, backend=backend)  # type: ignore[assignment]
    counts = []
    for call in range(CALLS):
        capture.begin_step()
        capture.active = call % 2 == 0
        called(torch.randn(3, widths[0])).sum().backward()
        counts.append(len(graphs))
    return counts


@pytest.mark.parametrize(
    ("way", "widths"), [("outside", ALIKE), ("outside", DIFFERENT), ("in place", ALIKE), ("ddp", ALIKE)]
)
@pytest.mark.usefixtures("process_group")
def test_the_graph_is_cut_around_each_captured_layer_and_never_made_again(
    way: str, widths: Sequence[int]
) -> None:
    counts = graphs_by_call(widths, way=way)
    # What is before, between and behind the layers; some compilers make one of a layer's own code, too, and parts
    # that have the same code may share one.
    assert 2 <= counts[0] <= MOST
    settled = counts if widths is ALIKE and way != "ddp" else counts[1:]
    assert len(set(settled)) == 1, "nothing is compiled again, whether a step takes factors or not"


def test_layers_that_are_skipped_are_not_cut_out() -> None:
    some = graphs_by_call(DIFFERENT, skip=["first", "second", "third"])
    assert 2 <= some[-1] <= 4
    torch._dynamo.reset()
    assert graphs_by_call(ALIKE, skip=["*"]) == [1] * CALLS
