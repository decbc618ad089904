"""What DDP does around a hook, row by row of what it is known for: the right result or a clear error."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._exchange.exchange import Exchange
from crossover_ddp._exchange.routes import Routes
from crossover_ddp.comm_hooks import reduce_scatter_all_gather_hook
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError
from tests.unit.exchange.fuse import blow

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.torch_version]


def hooked(module: nn.Module, **options: Any) -> DistributedDataParallel:
    model = DistributedDataParallel(module, **options)
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    return model


def backward(model: nn.Module, x: torch.Tensor | None = None) -> None:
    model(torch.ones(2, 3) if x is None else x).sum().backward()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Indices of the buckets that reach the engine."""
    seen: list[int] = []
    submit = Exchange.submit

    def counted(
        self: Exchange, bucket: dist.GradBucket, **options: Any
    ) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        return submit(self, bucket, **options)

    monkeypatch.setattr(Exchange, "submit", counted)
    yield seen


def test_signature_is_what_ddp_demands() -> None:
    signature = inspect.signature(reduce_scatter_all_gather_hook)
    assert inspect.isfunction(reduce_scatter_all_gather_hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


def test_a_second_hook_is_refused_by_torch_itself() -> None:
    model = hooked(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match=r"register_comm_hook .* can only be called once"):
        model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    backward(model)


def test_sparse_gradients_raise_after_backward_every_time() -> None:
    model = hooked(nn.Embedding(5, 3, sparse=True))
    for _ in range(3):
        with pytest.raises(UnsupportedConfigurationError, match=r"layout=torch\.sparse_coo; .*sparse=False"):
            backward(model, torch.tensor([1, 2]))


def test_a_failure_raises_after_backward_and_ddp_stays_usable_for_the_next_message() -> None:
    def failing(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert dist.group.WORLD is not None
        return Exchange.of(dist.group.WORLD).submit(bucket, owner_step=fail)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), bucket_cap_mb=1e-6)
    model.register_comm_hook(None, failing)
    for _ in range(3):
        with pytest.raises(ExchangeError, match="bucket 0 failed: the link broke") as caught:
            backward(model)
        assert isinstance(caught.value.__cause__, OSError)


def fail(part: torch.Tensor) -> None:
    raise OSError("the link broke")


def test_an_error_of_one_step_does_not_reach_the_next() -> None:
    model = hooked(nn.EmbeddingBag(5, 3, mode="sum", sparse=True))
    other = hooked(nn.Linear(3, 3))
    with pytest.raises(UnsupportedConfigurationError):
        backward(model, torch.tensor([[1, 2]]))
    backward(other)
    assert other.module.weight.grad is not None


def test_an_exception_of_the_model_itself_leaves_the_hook_working() -> None:
    broken, whole = hooked(nn.Linear(3, 3)), hooked(nn.Linear(3, 3))
    with pytest.raises(ArithmeticError, match="blown"):
        blow(broken(torch.ones(2, 3))).sum().backward()
    for _ in range(2):
        backward(whole)


@pytest.mark.parametrize("group", [-100, "world", object()])
def test_what_is_no_group_of_ours_raises_after_backward(group: object) -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    model.register_comm_hook(group, reduce_scatter_all_gather_hook)
    with pytest.raises(
        UnsupportedConfigurationError, match="expected a process group that this process belongs"
    ):
        backward(model)


@pytest.mark.parametrize(("owner", "broken"), [(Exchange, "of"), (Routes, "of_bucket")])
def test_not_even_a_mistake_of_our_own_leaves_the_hook(
    owner: type, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hooked(nn.Linear(3, 3))
    backward(model)
    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, raise_key_error)
        with pytest.raises(KeyError, match="ours"):
            backward(model)
    backward(model)  # an exception that left the hook would have left DDP unusable


def raise_key_error(*args: Any) -> None:
    raise KeyError("ours")


def test_no_sync_does_not_call_the_hook(calls: list[int]) -> None:
    model = hooked(nn.Linear(3, 3))
    with model.no_sync():
        backward(model)
    assert calls == []
    backward(model)
    assert calls == [0]


def test_the_first_step_is_one_bucket_and_the_next_ones_are_real(calls: list[int]) -> None:
    model = hooked(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), bucket_cap_mb=1e-6)
    backward(model)
    first = len(calls)
    backward(model)
    assert first < len(calls) - first


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copies", [copy.deepcopy, pickled])
def test_a_copied_model_has_silently_lost_its_hook(copies: Callable[[Any], Any], calls: list[int]) -> None:
    """Not our choice: our documentation says so, and this test says when torch changes it."""
    model = copies(hooked(nn.Linear(3, 3)))
    backward(model)
    assert calls == []
    assert "deep copy" in (reduce_scatter_all_gather_hook.__doc__ or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="DDP's own mixed precision needs a CUDA device")
def test_native_mixed_precision_takes_the_hook_slot_itself() -> None:
    precision = pytest.importorskip("torch.nn.parallel.distributed")._MixedPrecision(
        param_dtype=torch.bfloat16
    )
    with pytest.raises(RuntimeError, match="can only be called once"):
        hooked(nn.Linear(3, 3), mixed_precision=precision)


@pytest.mark.parametrize("outside", [True, False])
def test_a_compiled_model_calls_the_hook_and_has_the_same_gradients(outside: bool, calls: list[int]) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    plain = DistributedDataParallel(copy.deepcopy(module))
    backward(plain)
    if outside:
        model = torch.compile(hooked(module), backend="eager")
    else:
        model = hooked(torch.compile(module, backend="eager"))  # type: ignore[arg-type]
    backward(model)  # type: ignore[arg-type]
    assert calls
    for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert torch.equal(got.grad, expected.grad)


def test_static_graph_with_no_sync_crashes_in_torch_with_or_without_a_hook() -> None:
    """pytorch#187732; when torch mends it this test says so and the case belongs to the conformance suite."""
    model = DistributedDataParallel(nn.Linear(3, 3), static_graph=True)
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"), model.no_sync():
        backward(model)


def test_sync_batch_norm_needs_a_gpu() -> None:
    """On a CPU torch refuses; the conformance suite plays its collectives with a module of its own."""
    with pytest.raises(ValueError, match="only work with GPU modules"):
        hooked(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3))))


def test_the_python_reducer_is_refused_after_backward() -> None:
    # Its own way of patching: what pytest's monkeypatch puts back, the module no longer finds.
    with pytest.importorskip("torch._dynamo.config").patch(optimize_ddp="python_reducer"):
        model = hooked(nn.Linear(3, 3))
        with pytest.raises(UnsupportedConfigurationError, match="python_reducer"):
            backward(model)


def test_a_future_carries_the_error_where_no_backward_pass_runs() -> None:
    error = UnsupportedConfigurationError("no")
    future = Exchange.refuse((torch.zeros(1), torch.zeros(1)), error)
    with pytest.raises(UnsupportedConfigurationError, match="no"):
        future.wait()
