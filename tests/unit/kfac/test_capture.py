"""The factors that the hooks record equal their definition in float64.

Only calls that contribute to the step's gradient form factors, whatever else a training loop does.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from crossover_ddp._kfac.curvature import Columns, WeightSharing, multiplied
from crossover_ddp._kfac.factors import FactorCapture
from crossover_ddp._kfac.layers import LayerShape, find_layers
from tests.multiprocess.kfac_oracle import RankRun

pytestmark = pytest.mark.torch_version
assert_close = torch.testing.assert_close
# By a layer's name: A of [groups, a_dim, a_dim] and G of [groups, g_dim, g_dim], or their columns.
Factors = dict[str, tuple[Any, Any]]


class Net(nn.Module):
    """A convolution, an activation, and a layer used ``uses`` times on tokens.

    All uses but the first ``outside`` are in an activation checkpoint, unless ``reentrant`` is
    None.
    """

    def __init__(self, uses: int, reentrant: bool | None, outside: int, inplace: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.act = nn.ReLU(inplace)
        self.token = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.uses = uses
        self.reentrant = reentrant
        self.outside = outside
        self.inplace = inplace

    def tokens(self, x: Tensor, uses: int) -> Tensor:
        for _ in range(uses):
            # If the output is changed in place, the gradient to record is that of the output
            # before.
            output = self.token(x)
            x = output.sin_() if self.inplace else output.sin()
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(self.act(self.conv(x)).flatten(2).mT, self.outside)
        uses = self.uses - self.outside
        if self.reentrant is None:
            x = self.tokens(x, uses)
        else:
            x = checkpoint(self.tokens, x, uses, use_reentrant=self.reentrant)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def net(
    uses: int = 1, reentrant: bool | None = None, outside: int = 0, inplace: bool = True
) -> Net:
    torch.manual_seed(0)
    return Net(uses, reentrant, outside, inplace).double()


def batch(size: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    return output.exp().sum(-1).mean()


def expected(
    uses: int = 1, x: Tensor | None = None, loss: Any = loss_of, model: Any = None
) -> Factors:
    """Return the factors of every layer by their definition."""
    run = RankRun(model or net(uses, inplace=False), batch() if x is None else x, loss)
    return {name: run.factors(name, "expand") for name in run.layers}


class Recorded:
    """A model with its capture."""

    def __init__(self, model: nn.Module, sharing: WeightSharing = "expand", **options: Any) -> None:
        self.model = model
        self.layers, _ = find_layers(model)
        self.capture = FactorCapture(self.layers, sharing=sharing, model=model, **options)

    def backward(self, *parts: Tensor) -> None:
        """Accumulate the mean gradient over micro-batches, by default over one."""
        parts = parts or (batch(),)
        for part in parts:
            (loss_of(self.model(part)) / len(parts)).backward()

    def backward_by_samples(self, sizes: Sequence[int]) -> None:
        """Accumulate over micro-batches of these sizes.

        Each loss is its share of the step's loss, or, for "sum", a mean of its own.
        """
        total = sum(sizes)
        for part in batch(total).split(list(sizes)):
            divisor = max(1, len(part)) if self.capture._accumulated == "sum" else total
            (self.model(part).exp().sum() / divisor).backward()

    def taken(self) -> Factors:
        """Take the factors of all layers. None for a layer without a call or without a gradient."""
        return {layer.name: self.capture.take(index) for index, layer in enumerate(self.layers)}


@pytest.mark.parametrize(
    ("sharing", "uses", "accumulated"),
    [
        ("expand", 1, "mean"),
        ("expand", 2, "sum"),
        ("reduce", 2, "mean"),
        ("kfac-pytorch", 2, "mean"),
    ],
)
def test_four_micro_batches_are_one_large_batch(
    sharing: WeightSharing, uses: int, accumulated: str
) -> None:
    large = Recorded(net(uses), sharing)
    small = Recorded(net(uses), sharing, accumulated=accumulated)
    large.backward(batch(8))
    for part in batch(8).chunk(4):
        (loss_of(small.model(part)) / (4 if accumulated == "mean" else 1)).backward()
    assert small.capture.micro_batches == 4
    assert_close(small.taken(), large.taken())


Accumulated = Literal["mean", "sum"]
ACCUMULATED: tuple[Accumulated, ...] = ("mean", "sum")


@pytest.mark.parametrize("accumulated", ACCUMULATED)
@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 2), (1, 7), (8, 0), (0, 8), (3, 0, 5)], ids=str)
def test_micro_batches_count_by_their_samples(
    sizes: Sequence[int], accumulated: Accumulated
) -> None:
    run = Recorded(net(2), accumulated=accumulated)
    run.backward_by_samples(sizes)
    assert run.capture.micro_batches == sum(map(bool, sizes))
    assert_close(run.taken(), expected(2, batch(8)))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.sampled_from(ACCUMULATED),
    st.booleans(),
)
def test_any_split_has_the_factors_of_one_batch(
    sizes: list[int], accumulated: Accumulated, few: bool
) -> None:
    """With ``few`` the factors are kept as columns."""
    run = Recorded(net(), accumulated=accumulated)
    if few:
        run.capture._rooms = [(1000, 1000)] * 3
        run.capture.begin_step()
    run.backward_by_samples(sizes)
    taken = run.taken()
    assert all(isinstance(factor, Columns) == few for each in taken.values() for factor in each)
    whole = expected(1, batch(sum(sizes)))
    assert_close({name: tuple(map(multiplied, each)) for name, each in taken.items()}, whole)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_checkpointed_unequal_micro_batches_have_the_factors_of_one_batch(
    sharing: WeightSharing, reentrant: bool
) -> None:
    """The first layer is not captured, as if another rank owned it and factors were local."""
    large, small = Recorded(net(2), sharing), Recorded(net(2, reentrant), sharing, only=[1, 2])
    large.backward(batch(8))
    small.backward_by_samples((0, 1, 4, 3))
    assert_close(small.taken(), large.taken() | {"conv": (None, None)})


@pytest.mark.parametrize("accumulated", ACCUMULATED)
def test_equal_micro_batches_are_plain_sums_to_the_last_bit(accumulated: Accumulated) -> None:
    whole = Recorded(net(), accumulated=accumulated)
    alone = Recorded(net())
    sums: dict[str, list[Tensor]] = {}
    for part in batch(9).chunk(3):
        loss_of(whole.model(part)).backward()
        loss_of(alone.model(part)).backward()
        for name, each in alone.taken().items():
            if name in sums:
                sums[name] = [a + b for a, b in zip(sums[name], each, strict=True)]
            else:
                sums[name] = list(each)
        alone.model.zero_grad()
        alone.capture.begin_step()
    scales = 1 / 3, 3 if accumulated == "mean" else 1 / 3
    made = {
        name: tuple(s * scale for s, scale in zip(each, scales, strict=True))
        for name, each in sums.items()
    }
    assert_close(whole.taken(), made, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(8, 0), (0, 3, 5)], ids=str)
def test_plain_means_over_calls_leave_empty_calls_out(sizes: Sequence[int]) -> None:
    whole, run = Recorded(net(), "kfac-pytorch"), Recorded(net(), "kfac-pytorch")
    run.backward_by_samples(sizes)
    whole.backward_by_samples([size for size in sizes if size])
    assert_close(run.taken(), whole.taken(), rtol=0, atol=0)


def test_a_step_without_samples_has_no_factors() -> None:
    run = Recorded(net())
    (run.model(batch(0)).sum() * 1.0).backward()
    assert run.capture.micro_batches == 0
    assert run.taken() == dict.fromkeys(("conv", "token", "head"), (None, None))
    run.model.zero_grad()
    run.capture.begin_step()
    run.backward()
    assert_close(run.taken(), expected())


def test_two_views_are_one_micro_batch_of_the_size_of_the_larger() -> None:
    """The calls of each view count by the samples of that view."""
    large = Recorded(net())
    small = Recorded(net())
    views = batch(8), batch(4, seed=1)

    def backward(run: Recorded, *views: Tensor) -> None:
        outputs = [
            run.model(view).exp().sum() / whole for view, whole in zip(views, (8, 4), strict=True)
        ]
        sum(outputs[1:], outputs[0]).backward()

    backward(large, *views)
    for parts in zip(
        *[view.split([len(view) // 4, 3 * len(view) // 4]) for view in views], strict=True
    ):
        backward(small, *parts)
    assert small.capture.micro_batches == 2
    taken, one_batch = small.taken(), large.taken()
    assert_close([g for _, g in taken.values()], [g for _, g in one_batch.values()])
    first, second = (expected(1, view) for view in views)
    mean = {name: (8 * first[name][0] + 4 * second[name][0]) / 12 for name in first}
    assert_close({name: a for name, (a, _) in taken.items()}, mean)
    assert_close({name: a for name, (a, _) in one_batch.items()}, mean)


def test_a_forward_whose_graph_is_gone_gives_no_size() -> None:
    """As in a loop that skips a loss that is not finite: the graph is gone by the next backward."""
    run = Recorded(net())
    for part in batch(8).split([3, 5]):
        loss = run.model(batch(20, seed=1)).sum() if len(part) == 5 else torch.zeros(())
        assert loss.isfinite()
        loss = run.model(part).exp().sum() / 8
        loss.backward()
    assert_close(run.taken(), expected(1, batch(8)))


class Listed(nn.Module):
    """Takes a list of tensors, from which the number of samples cannot be known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: Any) -> Tensor:
        whole = torch.cat(parts) if isinstance(parts, list) else parts
        return self.model(whole)  # type: ignore[no-any-return]


@pytest.mark.parametrize("known_first", [None, True, False])
def test_sizes_that_are_not_known_count_as_the_first_known_one(known_first: bool | None) -> None:
    """None: no size is known."""
    run = Recorded(Listed(net()))
    first, second, third = batch(9).split([3, 5, 1])
    inputs: list[Any] = [[first], [second], [third[:0]]]
    if known_first is not None:
        inputs[not known_first] = inputs[not known_first][0]
    for each in inputs:
        loss_of(run.model(each)).backward()
    assert run.capture.micro_batches == 2
    one, other = (expected(1, each) for each in (first, second))
    wanted = {
        f"model.{name}": ((one[name][0] + other[name][0]) / 2, 2 * (one[name][1] + other[name][1]))
        for name in one
    }
    assert_close(run.taken(), wanted)


class Expert(nn.Module):
    """Calls its second layer with the samples whose first feature is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return torch.cat([self.first(x[~chosen]), self.second(x[chosen])])


def test_calls_without_samples_do_not_change_the_factor_of_a_layers_inputs() -> None:
    run = Recorded(Expert().double())
    x = torch.randn(6, 4, dtype=torch.float64)
    x[:, 0] = torch.tensor([1, 1, -1, -1, -1, -1])
    for part in x.split([2, 4]):
        (run.model(part).exp().sum() / 6).backward()
    (first, _), (second, _) = run.taken().values()
    for factor, rows in ((first, x[2:]), (second, x[:2])):
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        assert_close(factor[0], rows.T @ rows / len(rows))


def test_micro_batches_count_if_the_model_is_in_eval_mode_and_its_parts_train() -> None:
    run = Recorded(net())
    run.model.training = False
    run.backward(*batch().chunk(3))
    assert run.capture.micro_batches == 3
    assert_close(run.taken(), expected())


@pytest.mark.parametrize(("uses", "outside", "micro_batches"), [(1, 0, 1), (2, 0, 3), (2, 1, 1)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_count_once(
    reentrant: bool, uses: int, outside: int, micro_batches: int
) -> None:
    run = Recorded(net(uses, reentrant, outside))
    run.backward(*batch().chunk(micro_batches))
    assert run.capture.micro_batches == micro_batches
    assert_close(run.taken(), expected(uses))


def test_an_output_that_another_hook_has_replaced_is_not_recorded() -> None:
    model = net()
    model.head.register_forward_hook(lambda module, args, output: output * 3)
    run = Recorded(model)
    loss_of(model(batch()) / 3).backward()
    assert_close(run.taken(), expected())


def attack(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    for _ in range(2):
        torch.autograd.grad(loss_of(model(x)) * 1000, x)


def given_up(model: nn.Module, x: Tensor, *, to_none: bool = True) -> None:
    (1000 * loss_of(model(x * 2))).backward()
    model.zero_grad(set_to_none=to_none)


def functional_gradient(model: nn.Module, x: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return loss_of(torch.func.functional_call(model, parameters, (x,)))

    torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


def evaluated(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    loss_of(model.eval()(x)).backward()
    model.train()


# Actions of a training loop that do not belong to its step.
BEFORE: dict[str, Callable[[Any, Tensor], object]] = {
    "attack": attack,
    "attack on weights": lambda m, x: torch.autograd.grad(
        loss_of(m(x)) * 1000, list(m.parameters())
    ),
    "functional gradient": functional_gradient,
    "forward alone": lambda m, x: loss_of(m(x * 7)).item(),
    "forward that is kept": lambda m, x: loss_of(m(x * 7)),
    "given up": given_up,
    "given up by zeros": lambda m, x: given_up(m, x, to_none=False),
    "attack, then given up": lambda m, x: (attack(m, x), given_up(m, x), attack(m, x)),
    "deep copy": lambda m, x: loss_of(copy.deepcopy(m)(x)).backward(),
    "pickled copy": lambda m, x: loss_of(pickle.loads(pickle.dumps(m))(x)).backward(),
    "evaluation": evaluated,
}


@pytest.mark.parametrize(
    ("before", "reentrant"), [*((each, None) for each in BEFORE), ("attack", False)]
)
def test_calls_outside_of_the_step_do_not_count(before: str, reentrant: bool | None) -> None:
    run = Recorded(net(2, reentrant))
    result = BEFORE[before](run.model, batch(seed=1))
    run.backward()
    assert run.capture.micro_batches == 1
    assert_close(run.taken(), expected(2))
    del result  # it has kept a graph alive until here


def test_clipping_and_clearing_another_layers_gradient_keep_micro_batches() -> None:
    clipped = Recorded(net())
    cleared = Recorded(net())
    parts = batch(8).chunk(2)
    both = expected(1, batch(8))
    for part in parts:
        cleared.model.head.weight.grad = None  # type: ignore[union-attr]
        for run in (clipped, cleared):
            (loss_of(run.model(part)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(clipped.model.parameters(), 1e-3)
    assert_close(clipped.taken(), both)
    taken = cleared.taken()
    assert_close(taken["head"][0], expected(1, parts[1])["head"][0])
    assert_close(taken | {"head": both["head"]}, both)


def test_the_inner_gradient_of_a_penalty_is_not_counted() -> None:
    """The outer backward counts: its G is that of the whole loss, with the penalty's curvature."""
    run = Recorded(net())
    x = batch().requires_grad_()

    def penalised(output: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
        return loss_of(output) + inner.square().sum()

    penalised(run.model(x)).backward()
    assert_close(run.taken(), expected(1, x, penalised))


def test_a_penalty_before_the_first_loss_belongs_to_the_same_micro_batch() -> None:
    """As in the loop of a GAN's critic: first the penalty's forward and inner gradient."""
    run = Recorded(net())
    x = batch(seed=3).requires_grad_()
    (inner,) = torch.autograd.grad(loss_of(run.model(x)), x, create_graph=True)
    (loss_of(run.model(batch())) + 0 * inner.sum()).backward()
    assert run.capture.micro_batches == 1
    assert_close([g for _, g in run.taken().values()], [g for _, g in expected().values()])


def test_two_losses_of_one_forward_are_one_micro_batch() -> None:
    run = Recorded(net())
    output = run.model(batch())
    loss_of(output).backward(retain_graph=True)
    loss_of(output).backward()
    assert run.capture.micro_batches == 1
    assert_close(run.taken(), {name: (a, 2 * g) for name, (a, g) in expected().items()})


@pytest.mark.parametrize("before", [attack, given_up])
def test_columns_of_calls_outside_of_the_step_do_not_count(before: Callable[..., None]) -> None:
    run = Recorded(net(2))
    # The second layer has room for one column less than both calls need.
    run.capture._rooms = [(most, most) for most in (54, 107, 6)]
    run.capture.begin_step()
    before(run.model, batch(seed=1))
    run.backward()
    taken = run.taken()
    forms = [[isinstance(factor, Columns) for factor in each] for each in taken.values()]
    assert forms == [[True, True], [False, False], [True, True]]
    assert_close({name: tuple(map(multiplied, each)) for name, each in taken.items()}, expected(2))


@pytest.mark.parametrize("inplace", [False, True])
def test_an_output_that_is_a_view_may_change_in_place(inplace: bool) -> None:
    """A convolution of one picture, without a batch dimension, returns a view."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3).double()
    picture = torch.randn(2, 5, 5, dtype=torch.float64)
    run = Recorded(nn.Sequential(conv, nn.ReLU(inplace=inplace), nn.Flatten(0)))
    run.model(picture).exp().sum().backward()
    _, g = run.taken()["0"]
    run.capture.close()
    output = conv(picture)
    (gradient,) = torch.autograd.grad(output.relu().exp().sum(), output)
    assert_close(g[0], gradient.flatten(1) @ gradient.flatten(1).T)


def test_factors_of_two_modules_with_the_same_parameters_are_summed() -> None:
    torch.manual_seed(0)
    first = nn.Linear(3, 3).double()
    second = nn.Linear(3, 3).double()
    second.weight = first.weight
    second.bias = first.bias
    x = torch.randn(4, 3, dtype=torch.float64)
    twins = nn.Sequential(first, nn.Tanh(), second)
    twice = nn.Sequential(first, nn.Tanh(), first)
    run = Recorded(twins)
    run.backward(x)
    assert_close(run.taken(), expected(x=x, model=twice))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_zero_grad_drops_all_micro_batches_before_it(
    late: bool, to_none: bool, bucket_view: bool
) -> None:
    """``late``: it is called between forward and backward, as in many loops.

    From the second step on the gradients may be views of the buckets.
    """
    model = DistributedDataParallel(net(), gradient_as_bucket_view=bucket_view)
    run = Recorded(model)
    for seed in range(3):
        run.capture.begin_step()
        model.zero_grad(set_to_none=to_none)
        with model.no_sync():
            run.backward(batch(seed=9), batch(seed=10))
            output = model(batch(8, seed)[:4]) if late else None
            model.zero_grad(set_to_none=to_none)
            (loss_of(model(batch(8, seed)[:4]) if output is None else output) / 2).backward()
        (loss_of(model(batch(8, seed)[4:])) / 2).backward()
        assert run.capture.micro_batches == 2
        assert_close(run.taken(), expected(1, batch(8, seed)))


class Zoo(nn.Module):
    """Parameters of every kind: plain, shared in several ways, frozen, of other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.twin = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.loose = nn.Linear(4, 4)
        self.bias_twin = nn.Linear(4, 4)
        self.bias_twin_too = nn.Linear(4, 4)
        self.cold = nn.Linear(4, 4)
        self.cold_bias = nn.Linear(4, 4)
        self.again = self.first
        self.twin.weight = self.first.weight
        self.twin.bias = self.first.bias
        self.loose.weight = self.tied.weight
        self.bias_twin_too.bias = self.bias_twin.bias
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv2d(4, 4, 1, groups=2)
        self.cold.weight.requires_grad_(False)
        self.cold_bias.bias.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.embedding.weight


def test_layers_are_found_and_all_other_parameters_have_a_reason() -> None:
    model = Zoo()
    layers, others = find_layers(model, skip=("block",))
    assert [layer.name for layer in layers] == ["first", "cold_bias", "conv"]
    assert layers[0].modules == (model.first, model.twin)
    assert layers[0].weight is model.first.weight and layers[0].bias is model.first.bias
    assert layers[1].bias is None and layers[1].shape == LayerShape(1, 4, 4, False)
    assert layers[2].shape == LayerShape(2, 3, 2, True)
    assert others == {
        **{
            f"block.{name}": "named in skip"
            for name in ("0.weight", "0.bias", "1.weight", "1.bias")
        },
        **dict.fromkeys(("norm.weight", "norm.bias"), "not Linear or Conv2d"),
        "embedding.weight": "shared with decoder.weight",
        "tied.weight": "shared with loose.weight",
        "tied.bias": "beside a shared parameter",
        "loose.bias": "beside a shared parameter",
        "bias_twin.weight": "beside a shared parameter",
        "bias_twin.bias": "shared with bias_twin_too.bias",
        "bias_twin_too.weight": "beside a shared parameter",
        "cold.weight": "frozen",
        "cold.bias": "beside a frozen weight",
        "cold_bias.bias": "frozen",
        "decoder.bias": "beside a shared parameter",
    }


def test_layers_are_skipped_by_names_or_patterns_of_any_of_their_modules() -> None:
    for pattern in ("again", "twin", "f*", "first"):
        layers, others = find_layers(Zoo(), skip=(pattern,))
        assert "first" not in [layer.name for layer in layers]
        assert others["first.weight"] == others["first.bias"] == "named in skip"
    for pattern, left in {"block.0": 1, "block.*": 0, "*.1": 1}.items():
        layers, _ = find_layers(Zoo(), skip=(pattern,))
        assert sum(layer.name.startswith("block.") for layer in layers) == left
    for pattern in ("bl", "frist", "module.first", "first.weight"):
        with pytest.raises(ValueError, match=f"got '{pattern}', which matches none"):
            find_layers(Zoo(), skip=("first", pattern))
    with pytest.raises(TypeError, match=r"pass skip=\['first'\]"):
        find_layers(Zoo(), skip="first")


class Stack(nn.Sequential):
    """Four layers with other functions before, between and behind them.

    Without a loop over the layers, which would be one cut of the graph.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        x = self[1](self[0](x.sin()).tanh() * 2).tanh() * 2
        return self[3](self[2](x).tanh() * 2).exp()  # type: ignore[no-any-return]


def graphs_by_call(widths: Sequence[int], *skip: str) -> list[int]:
    """Return the number of graphs after each call. Factors are taken in every second step."""
    torch._dynamo.reset()
    counter, model, counts = CompileCounter(), Stack(widths), []
    capture = FactorCapture(find_layers(model, skip)[0], sharing="expand", model=model)
    called = torch.compile(DistributedDataParallel(model), backend=counter)
    for call in range(5):
        capture.begin_step()
        capture.active = call % 2 == 0
        called(torch.randn(3, widths[0])).sum().backward()
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("widths", [(4, 4, 4, 4, 4), (4, 5, 6, 7, 8)])
@pytest.mark.usefixtures("process_group", "fresh_compiler")
def test_the_graph_is_cut_around_each_captured_layer_and_made_once(widths: Sequence[int]) -> None:
    """A claim of docs/kfac.md."""
    counts = graphs_by_call(widths)
    # The functions before, between and behind the layers. Some compilers also make a graph of a
    # layer's own code, and parts with the same code may share a graph.
    assert 2 <= counts[0] <= 2 * 4 + 2
    assert len(set(counts[1:])) == 1, (
        "nothing is compiled again, whether a step takes factors or not"
    )
    assert graphs_by_call(widths, "*")[-1] <= 2, "layers that are skipped are not cut out"
