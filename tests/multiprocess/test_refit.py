"""Other buckets in the middle of a job, and no hook at all: the training stays plain DDP's."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.multiprocessing.reductions import StorageWeakRef

from crossover_ddp import GPUMutex, Int8
from crossover_ddp._ddp.refit import BucketSizes, small_buckets
from tests.harness import in_ranks, inside
from tests.harness.networks import Branches, blow, mlp
from tests.harness.oracles import heard
from tests.harness.training import Training, batch, decoupled, noted, same
from tests.multiprocess.identity_codec import Identity

MIB = 2**20
SMALL = BucketSizes(200)  # about a layer
SMALLER = BucketSizes(50)
STEPS_A_PART = 7
PLAIN = {"bucket_cap_mb": 25}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6)
    )


def pair(rank: int, make: Callable[[], nn.Module] = network, **options: Any) -> list[Training]:
    """Return a training of a decoupled model in one bucket, and one of plain DDP."""
    codec = options.pop("codec", None)
    ways = (decoupled(codec=codec), None)
    return [Training(way, rank, module=make(), **(PLAIN | options)) for way in ways]


def assert_alike(one: Training, plain: Training, steps: int = STEPS_A_PART) -> None:
    for _ in range(steps):
        assert one.step() == plain.step()
    one.state.flush()
    assert same(one, plain)


def parts_of_a_job(one: Training, plain: Training) -> list[int]:
    """Train without the hook, deferred, not deferred, and so on. Return the steps deferred."""
    state = one.state
    deferred = []
    assert_alike(one, plain, 3)
    parts: list[tuple[Any, bool, bool]] = [
        (None, False, True),  # sizes, hooked, defers
        (SMALL, True, True),
        (None, False, True),
        (SMALLER, True, False),
        (BucketSizes(25 * MIB), True, False),
        (small_buckets(4 * MIB), True, True),
        (None, False, False),
        (None, True, True),
    ]
    for sizes, hooked, defers in parts:
        before = state.stats()["steps_deferred"]
        assert inside.refit(state, sizes, hooked=hooked)
        inside.defer(state, defers)
        assert_alike(one, plain)
        assert inside.is_hooked(state) is hooked
        assert hooked or "plain DDP" in state.stats()["not_deferred_because"]
        assert state.checkpoint(to=0).keys() == (
            {"model", "optimizer", "hook"} if one.rank == 0 else set()
        )
        deferred.append(state.stats()["steps_deferred"] - before)
    return deferred


@pytest.mark.torch_version
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("views", [True, False])
@in_ranks(timeout_s=120.0)
def test_a_job_with_and_without_its_hook_is_plain_ddps(rank: int, views: bool) -> list[int]:
    """Two or three steps after each refit are not deferred, because DDP rebuilds its buckets."""
    deferred = parts_of_a_job(*pair(rank, gradient_as_bucket_view=views))
    assert [deferred[i] for i in (0, 2, 3, 4, 6)] == [0] * 5
    assert all(STEPS_A_PART - 3 <= deferred[i] <= STEPS_A_PART - 1 for i in (1, 5, 7))
    return deferred


@pytest.mark.torch_version
@pytest.mark.parametrize("options", ["static_graph", "find_unused_parameters"])
@in_ranks(2, timeout_s=120.0)
def test_other_kinds_of_graphs_stay_plain_ddps(rank: int, options: str) -> list[int]:
    module = Branches if options == "find_unused_parameters" else network
    return parts_of_a_job(*pair(rank, module, **{options: True}))


@in_ranks(2)
def test_a_codec_keeps_what_it_owes_over_refits(rank: int) -> None:
    """An exact step at the end brings the residuals, whatever buckets they were kept in."""
    assert_alike(*pair(rank, codec=Identity()))
    one, plain = pair(rank, codec=Int8(32))
    for each in (one, plain):
        each.optimizer.param_groups[0]["lr"] = 0.0
    owed = [torch.zeros_like(p, dtype=torch.float64) for p in one.held]
    for step in range(20):
        if step % 5 == 4:
            assert inside.refit(one.state, (SMALL, SMALLER, BucketSizes(25 * MIB))[step // 5 % 3])
        if step == 19:
            one.state.drain()
        for each in (one, plain):
            each.backward(step)
        one.state.flush()
        for total, a, b in zip(owed, one.held, plain.held, strict=True):
            assert a.grad is not None and b.grad is not None
            total += a.grad.double() - b.grad.double()
        one.update()
        plain.update()
        if step == 15:
            assert max(float(each.abs().max()) for each in owed) > 1e-4
    assert max(float(each.abs().max()) for each in owed) < 1e-6


@pytest.mark.parametrize("views", [True, False])
@in_ranks(2)
def test_gradients_outlive_a_refit_between_micro_batches(rank: int, views: bool) -> None:
    """With and without no_sync. A gradient that is not dropped is the same after the refit."""
    one, plain = pair(rank, gradient_as_bucket_view=views)
    assert_alike(one, plain)
    for turn, (sizes, hooked) in enumerate([(SMALL, True), (None, False), (SMALLER, True)]):
        for waits in (True, False):
            for micro in range(3):
                if micro == 1 + waits:
                    assert inside.refit(one.state, sizes if waits else None, hooked=hooked)
                for each in (one, plain):
                    quiet = waits and micro < 2
                    with each.model.no_sync() if quiet else contextlib.nullcontext():
                        each.backward(100 * turn + micro)
            one.state.flush()
            for a, b in zip(one.held, plain.held, strict=True):
                assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
            for each in (one, plain):
                each.optimizer.step()
                each.optimizer.zero_grad(set_to_none=False)
        assert_alike(one, plain, 2)


@in_ranks(2)
def test_a_static_graph_is_refit_outside_of_no_sync(rank: int) -> None:
    one, plain = pair(rank, static_graph=True)
    for step in range(9):
        if step == 4:
            assert inside.refit(one.state, SMALL)
        for each in (one, plain):
            with each.model.no_sync() if step else contextlib.nullcontext():
                each.backward(step)
            each.backward(100 + step)
            each.update()
    assert one.state._pending.refitter.sizes == SMALL
    assert_alike(one, plain)


class Blowing(nn.Module):
    """Backward raises between the two layers, once ``is_blown`` is set."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.is_blown = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(blow(y) if self.is_blown else y)  # type: ignore[no-any-return]


@in_ranks(2)
def test_a_refit_waits_for_the_end_of_a_backward_pass_that_failed(rank: int) -> None:
    """DDP itself refuses the next pass. The model has its former reducer until then."""
    one, _ = pair(rank, Blowing)
    one.run(4)
    one.model.module.is_blown = True
    with pytest.raises(ArithmeticError):
        one.backward()
    one.model.module.is_blown = False
    former = one.model.reducer
    assert inside.refit(one.state, SMALL)
    with pytest.raises(RuntimeError, match="finished reduction"):
        one.loss()
    assert one.model.reducer is former


@in_ranks(2)
def test_two_models_are_refit_apart(rank: int) -> None:
    one, plain = pair(rank)
    other, other_plain = pair(rank, functools.partial(mlp, 6, 6, seed=1))
    assert_alike(one, plain)
    assert_alike(other, other_plain)
    assert inside.refit(one.state, SMALL)
    assert_alike(one, plain)
    assert inside.refit(other.state, None, hooked=False)
    for _ in range(5):
        assert (one.step(), other.step()) == (plain.step(), other_plain.step())
    one.state.flush()
    assert same(one, plain)
    assert same(other, other_plain)
    assert one.is_pending is False
    assert inside.is_hooked(one.state) and not inside.is_hooked(other.state)


@in_ranks(2)
def test_the_memory_of_the_former_buckets_is_free(rank: int) -> None:
    memories: list[StorageWeakRef] = []

    def note(bucket: dist.GradBucket, future: Any) -> None:
        memories.append(StorageWeakRef(bucket.buffer().untyped_storage()))

    one = Training(decoupled(), rank, module=network(), around=noted(note), **PLAIN)
    one.run(4)
    former, count = memories[-1], len(memories)
    assert not former.expired()
    assert inside.refit(one.state, SMALL)
    one.run(4)
    assert former.expired()
    assert len(memories) > count + 4, "the hook that was registered is called, not ours inside"
    latest = memories[-1]
    assert inside.refit(one.state, None, hooked=False)
    count = len(memories)
    one.run(2)
    assert latest.expired()
    assert len(memories) == count


REFUSED: dict[str, tuple[str, Callable[[Training], object]]] = {
    "frozen": ("frozen", lambda one: one.held[0].requires_grad_(False)),
    "compiled": ("compiled", lambda one: one.model.module[0].compile(backend="eager")),
    "mixed": ("mixed precision", lambda one: setattr(one.model, "mixed_precision", object())),
    "python": ("Python reducer", lambda one: setattr(one.model, "_use_python_reducer", True)),
    "delayed": ("delay_all", lambda one: setattr(one.model, "_delay_all_reduce_params", [1])),
    "optimizers": ("optimizers", lambda one: setattr(one.held[0], "_in_backward_optimizers", [])),
    "hooks": ("several", lambda one: one.model._comm_hooks.append((None, None))),
    "joined": ("Join", lambda one: Join([one.model])),
    "torch": ("lacks DDP's _has_rebuilt", lambda one: delattr(one.model, "_has_rebuilt_buckets")),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.usefixtures("process_group")
def test_a_model_that_must_keep_its_buckets_keeps_them(why: str) -> None:
    one = Training(decoupled(), module=network()).run(4)
    reducer = one.model.reducer
    reason, change = REFUSED[why]
    change(one)
    with heard(20) as said:
        assert inside.refit(one.state, SMALL) is False
    assert reason in said[-1]
    assert one.model.reducer is reducer
    one.close()


@pytest.mark.usefixtures("process_group")
def test_a_state_without_a_model_has_no_buckets_to_change() -> None:
    one = Training(decoupled(), module=network())
    assert inside.refit(one.state, SMALL) is False, "before the first bucket"
    one.run(4)
    one.close()
    assert inside.refit(one.state, SMALL) is False


@contextlib.contextmanager
def failing_reducers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "Logger", lambda reducer: [][0])
        yield


@pytest.mark.usefixtures("process_group")
def test_a_reducer_that_cannot_be_made_leaves_the_former_one() -> None:
    one, plain = pair(0)
    assert_alike(one, plain)
    reducer, cap = one.model.reducer, one.model.bucket_bytes_cap
    assert inside.refit(one.state, SMALL)
    with failing_reducers(), pytest.raises(IndexError):
        one.model(batch(0, 0))
    assert (one.model.reducer, one.model.bucket_bytes_cap) == (reducer, cap)
    assert inside.refit(one.state, None)
    assert_alike(one, plain)
    one.close()


@pytest.mark.usefixtures("process_group")
def test_a_job_that_takes_turns_keeps_its_hook() -> None:
    one = Training(decoupled(), module=network(), mutex=GPUMutex(device="refit")).run(4)
    assert inside.refit(one.state, None, hooked=False) is False
    assert inside.refit(one.state, SMALL)
    one.run(2)
    assert inside.is_hooked(one.state)
    one.close()


def test_small_buckets_make_about_six_buckets_and_none_below_a_mib() -> None:
    assert small_buckets(20 * MIB) == (4 * MIB, True)
    assert small_buckets(1000) == (MIB, True)


@pytest.mark.usefixtures("process_group")
def test_sizes_are_those_of_the_buckets() -> None:
    """In the order of backward: a first bucket of its own size, and others of the next one."""
    found: list[list[int]] = [[]]

    def note(bucket: dist.GradBucket, future: Any) -> None:
        found[-1].append(bucket.buffer().nbytes)
        if bucket.is_last():
            found.append([])

    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    ones = torch.ones(1, 512)
    one = Training(
        decoupled(),
        module=module,
        loss=lambda model, *_: model(ones).sum(),
        around=noted(note),
        **PLAIN,
    )
    for sizes, expected in (
        (BucketSizes(MIB), [1] * 6),
        (BucketSizes(2 * MIB, small_first=True), [1, 2, 2, 1]),
        (BucketSizes(2 * MIB), [2, 2, 2]),
        (None, [6]),
    ):
        one.run(3)
        assert inside.refit(one.state, sizes)
        one.run(3)
        assert found[-2] == [each * MIB for each in expected]
    one.close()
