"""Only what ends up in the step's gradient forms factors, whatever else a training loop does with the model."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from crossover_ddp._kfac.factors import Columns, multiplied
from tests.multiprocess.kfac_training import Training, same
from tests.unit.kfac.test_capture import (
    Captured,
    Net,
    assert_same,
    batch,
    defined,
    expected_of,
    loss_of,
    net,
    recorded,
)

pytestmark = pytest.mark.torch_version

KEPT: list[Tensor] = []


def attack(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    for _ in range(2):
        torch.autograd.grad(loss_of(model(x)) * 1000, x)


def attack_on_weights(model: nn.Module, x: Tensor) -> None:
    torch.autograd.grad(loss_of(model(x)) * 1000, list(model.parameters()))


def functional_gradient(model: nn.Module, x: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return loss_of(torch.func.functional_call(model, parameters, (x,)))

    torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})


def forward_alone(model: nn.Module, x: Tensor) -> None:
    model(x * 7)


def kept_forward(model: nn.Module, x: Tensor) -> None:
    KEPT.append(loss_of(model(x * 7)))


def given_up(model: nn.Module, x: Tensor, *, to_none: bool = True) -> None:
    (1000 * loss_of(model(x * 2))).backward()
    model.zero_grad(set_to_none=to_none)


def given_up_by_zeros(model: nn.Module, x: Tensor) -> None:
    given_up(model, x, to_none=False)


def attack_then_given_up(model: nn.Module, x: Tensor) -> None:
    attack(model, x)
    given_up(model, x)
    attack(model, x)


BEFORE = [
    attack,
    attack_on_weights,
    forward_alone,
    kept_forward,
    given_up,
    given_up_by_zeros,
    attack_then_given_up,
]


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    KEPT.clear()


@pytest.mark.parametrize(
    ("before", "reentrant"),
    [*((each, None) for each in (*BEFORE, functional_gradient)), (attack, False)],
)
def test_what_is_not_the_steps_leaves_no_trace(before: Callable[..., None], reentrant: bool | None) -> None:
    run = recorded(net(2, reentrant))
    before(run.model, batch(seed=1))
    loss_of(run.model(batch())).backward()
    assert run.capture.micro_batches == 1
    assert_same(run.taken(), expected_of(net(2), batch()))


def test_a_layer_whose_gradient_alone_is_cleared_keeps_the_others() -> None:
    run = recorded(net())
    parts = batch(8).chunk(2)
    (loss_of(run.model(parts[0])) / 2).backward()
    run.model.head.weight.grad = None
    (loss_of(run.model(parts[1])) / 2).backward()
    taken, expected = run.taken(), expected_of(net(), batch(8))
    for name in ("conv", "token"):
        assert_same({name: taken[name]}, {name: expected[name]})
    torch.testing.assert_close(taken["head"].a, expected_of(net(), parts[1])["head"].a)


def test_clipping_between_micro_batches_drops_nothing() -> None:
    run = recorded(net())
    for part in batch(8).chunk(2):
        (loss_of(run.model(part)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    assert_same(run.taken(), expected_of(net(), batch(8)))


def test_the_inner_gradient_of_a_penalty_is_not_counted() -> None:
    """The outer backward is: its G is that of the whole loss, the penalty's curvature included."""
    run, x = recorded(net()), batch().requires_grad_()

    def penalised(output: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
        return loss_of(output) + inner.square().sum()

    penalised(run.model(x)).backward()
    assert_same(run.taken(), expected_of(net(), x, loss=penalised))


def test_a_penalty_before_the_first_loss_is_the_same_micro_batch() -> None:
    """As a critic's loop has it: the penalty's forward and inner gradient first, one backward of all."""
    run = recorded(net())
    x = batch(seed=3).requires_grad_()
    (inner,) = torch.autograd.grad(loss_of(run.model(x)), x, create_graph=True)
    (loss_of(run.model(batch())) + 0 * inner.sum()).backward()
    assert run.capture.micro_batches == 1
    expected = expected_of(net(), batch())
    for name, captured in run.taken().items():
        torch.testing.assert_close(captured.g, expected[name].g, msg=name)  # type: ignore[union-attr]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_inside_and_outside_of_a_checkpoint_counts_twice(reentrant: bool) -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.conv(x)).flatten(2).mT
            x = checkpoint(self.tokens, self.tokens(x), use_reentrant=reentrant)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    run = recorded(Mixed().double())
    loss_of(run.model(batch())).backward()
    assert_same(run.taken(), expected_of(net(2), batch()))


def test_two_losses_of_one_forward_are_one_micro_batch() -> None:
    run = recorded(net())
    output = run.model(batch())
    loss_of(output).backward(retain_graph=True)
    loss_of(output).backward()
    assert run.capture.micro_batches == 1
    expected = {name: Captured(a, 2 * g) for name, (a, g) in expected_of(net(), batch()).items()}
    assert_same(run.taken(), expected)


@pytest.mark.parametrize("before", [attack, given_up])
def test_columns_are_given_up_like_factors(before: Callable[..., None]) -> None:
    run = recorded(net(2))
    # Of the second layer one too few for both calls.
    run.capture._rooms = [(most, most) for most in (54, 107, 6)]
    run.capture.begin_step()
    before(run.model, batch(seed=1))
    loss_of(run.model(batch())).backward()
    taken = {name: each for name, each in run.taken().items() if each is not None}
    forms = [[isinstance(factor, Columns) for factor in each] for each in taken.values()]
    assert forms == [[True, True], [False, False], [True, True]]
    factors = {name: Captured(multiplied(each.a), multiplied(each.g)) for name, each in taken.items()}
    assert_same(factors, expected_of(net(2), batch()))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_picture_without_a_batch_whose_output_changes_in_place(inplace: bool) -> None:
    """A convolution of one picture returns a view; what is done to it in place must not lose the hook."""
    torch.manual_seed(0)
    conv, picture = nn.Conv2d(2, 3, 3).double(), torch.randn(2, 5, 5, dtype=torch.float64)
    run = recorded(nn.Sequential(conv, nn.ReLU(inplace=inplace), nn.Flatten(0)))
    run.model(picture).exp().sum().backward()
    captured = run.taken()["0"]
    run.capture.close()
    output = conv(picture)
    (gradient,) = torch.autograd.grad(output.relu().exp().sum(), output)
    torch.testing.assert_close(captured.g[0], gradient.flatten(1) @ gradient.flatten(1).T)


def test_waiting_calls_keep_no_more_than_their_inputs() -> None:
    """A layer unrolled over many steps of time does not hold a factor for each of them until backward."""
    cell = nn.Linear(64, 64).double()
    run = recorded(cell)
    hidden = torch.randn(2, 64, dtype=torch.float64)
    for _ in range(5):
        hidden = cell(hidden).tanh()
    calls = [call.make_a for call in run.capture._sums[0].open]
    held = [make_a.__self__.source for make_a in calls if hasattr(make_a, "__self__")]
    assert [columns.numel() for columns in held] == [2 * 64] * 4
    del hidden  # abandoned, and gone with its graph
    gc.collect()
    assert not run.capture._sums[0].open


# --- with the hook ---------------------------------------------------------------------------------------------


class Disturbed(Training):
    """Does something with the model before each forward of a step."""

    def __init__(self, before: Callable[[nn.Module, Tensor], None] | None, parts: int) -> None:
        super().__init__(0, net(2), ddp={"bucket_cap_mb": 25}, inv_update_steps=1, kl_clip=None)
        self.before, self.parts = before, parts

    def backward(self, parts: int = 1) -> float:
        return super().backward(self.parts)

    def loss(self, part: int = 0, parts: int = 1) -> Tensor:
        x = batch(8, seed=self.steps).chunk(parts)[part]
        if self.before is not None:
            with self.model.no_sync():
                self.before(self.model, x)
        return loss_of(self.model(x)) / parts


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("before", "parts"), [(given_up, 1), (attack, 2), (kept_forward, 2)])
def test_the_directions_are_those_of_a_loop_without_it(before: Callable[..., None], parts: int) -> None:
    disturbed, usual = (Disturbed(each, parts) for each in (before, None))
    assert same(disturbed.trained(3), usual.trained(3))
    assert disturbed.kfac.stats()["dropped"] == 0


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_zeroed_gradients_take_all_micro_batches_with_them(
    process_group: dist.ProcessGroup, late: bool, to_none: bool, bucket_view: bool
) -> None:
    """From the second step on the gradients may be views of the buckets."""
    model = DistributedDataParallel(net(), process_group=process_group, gradient_as_bucket_view=bucket_view)
    run = recorded(model)
    for seed in range(3):
        run.capture.begin_step()
        model.zero_grad(set_to_none=to_none)
        with model.no_sync():
            for given_up in (9, 10):
                (loss_of(model(batch(seed=given_up))) / 3).backward()
            # As many loops have it: between forward and backward.
            output = model(batch(8, seed)[:4]) if late else None
            model.zero_grad(set_to_none=to_none)
            (loss_of(model(batch(8, seed)[:4]) if output is None else output) / 2).backward()
        (loss_of(model(batch(8, seed)[4:])) / 2).backward()
        assert run.capture.micro_batches == 2
        assert_same(run.taken(), expected_of(net(), batch(8, seed)))


def test_a_layer_that_only_the_given_up_part_used_has_no_factors(process_group: dist.ProcessGroup) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()

        def forward(self, x: Tensor, branch: int) -> Tensor:
            return (self.first, self.second)[branch](x)  # type: ignore[no-any-return]

    model = DistributedDataParallel(Branches(), process_group=process_group, find_unused_parameters=True)
    run = recorded(model)
    x = torch.randn(4, 3, dtype=torch.float64)
    with model.no_sync():
        loss_of(model(x, 0)).backward()
        model.zero_grad(set_to_none=False)  # DDP itself fails where it is None
    loss_of(model(x, 1)).backward()
    taken = run.taken()
    assert taken["first"] is None
    assert_same({"second": taken["second"]}, {"second": defined(model.module.second, x)[""]})
