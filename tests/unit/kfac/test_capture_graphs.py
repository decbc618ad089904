"""Into how many graphs a compiled model falls where layers are captured: what docs/kfac.md says of it."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._kfac.capture import FactorCapture
from crossover_ddp._kfac.layers import find_layers

pytestmark = pytest.mark.torch_version

LAYERS = 4
CALLS = 5
MOST = 2 * LAYERS + 2
WIDTHS = (4, 5, 6, 7, 8)


class Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * 2  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Four layers with something before, between and behind them."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (
            Block(*pair) for pair in itertools.pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.sin()))
        return self.fourth(self.third(x)).exp()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Where tqdm is installed torch's compiler uses it, and it starts a thread for good.
    if importlib.util.find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs_by_call(
    wrap: Callable[[nn.Module, Callable[..., object]], nn.Module],
    *,
    captured: bool,
    skip: Sequence[str] = (),
    widths: Sequence[int] = (4, 4, 4, 4, 4),
) -> list[int]:
    """Return how many graphs there were after each call; factors are taken in every second step."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = Stack(widths)
    layers, _ = find_layers(model, skip)
    capture = FactorCapture(layers if captured else (), sharing="expand", model=model)
    compiled = wrap(model, backend)
    counts = []
    for call in range(CALLS):
        capture.begin_step()
        capture.active = call % 2 == 0
        compiled(torch.randn(3, widths[0])).sum().backward()
        counts.append(len(graphs))
    return counts


def outside(model: nn.Module, backend: Callable[..., object]) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def in_place(model: nn.Module, backend: Callable[..., object]) -> nn.Module:
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("wrap", [outside, in_place])
def test_the_graph_is_cut_around_each_captured_layer_and_never_made_again(
    wrap: Callable[..., nn.Module],
) -> None:
    assert graphs_by_call(wrap, captured=False) == [1] * CALLS
    counts = graphs_by_call(wrap, captured=True)
    # What is before, between and behind the layers; some compilers make one of a layer's own code, too, and parts
    # that have the same code may share one.
    assert 2 <= counts[0] <= MOST
    assert counts == counts[:1] * CALLS, "nothing is compiled again, whether a step takes factors or not"


def test_layers_that_are_skipped_are_not_cut_out() -> None:
    some = graphs_by_call(outside, captured=True, skip=["first", "second", "third"], widths=WIDTHS)
    assert 2 <= some[-1] <= 4
    torch._dynamo.reset()
    assert graphs_by_call(outside, captured=True, skip=["*"]) == [1] * CALLS


def test_layers_of_many_shapes_make_no_more() -> None:
    counts = graphs_by_call(outside, captured=True, widths=WIDTHS)
    assert LAYERS <= counts[0] <= MOST
    assert counts[1:] == counts[1:2] * (CALLS - 1)


@pytest.mark.parametrize("captured", [False, True])
def test_under_ddp_as_many(process_group: dist.ProcessGroup, captured: bool) -> None:
    def wrap(model: nn.Module, backend: Callable[..., object]) -> nn.Module:
        return outside(DistributedDataParallel(model, process_group=process_group), backend)

    counts = graphs_by_call(wrap, captured=captured)
    assert 2 <= counts[-1] <= MOST if captured else counts[-1] == 1
    assert counts[1:] == counts[1:2] * (CALLS - 1)
