"""The crossover hook in a job of one rank: no processes, milliseconds."""

import contextlib
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, ExchangeError, GPUMutex, crossover_hook, crossover_wrapper
from crossover_ddp._system.shared_memory import SHARED_MEMORY
from tests.harness import single_process_group
from tests.harness.groups import new_group
from tests.unit.turns.mutexes import membership_of

Hook = default_hooks.allreduce_hook


@pytest.fixture
def group_name(monkeypatch: pytest.MonkeyPatch) -> str:
    name = new_group()
    monkeypatch.setenv("CROSSOVER_GROUP", name)
    return name


def small_model(**options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    return DistributedDataParallel(network, **options)  # type: ignore[arg-type]


def losses(model: DistributedDataParallel, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(16, 8, generator=generator)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@contextlib.contextmanager
def registered(state: CrossoverState, hook: object = crossover_hook) -> Iterator[DistributedDataParallel]:
    model = small_model()
    model.register_comm_hook(state, hook)  # type: ignore[arg-type]
    try:
        yield model
    finally:
        state.close()


@pytest.mark.usefixtures("process_group", "group_name")
def test_state_without_arguments_is_enough() -> None:
    expected = losses(small_model())
    state = CrossoverState()
    with registered(state) as model:
        assert losses(model) == expected
        assert state.mutex is not None
        assert state.mutex.holding
        assert state.stats()["turns"] == 4


@pytest.mark.usefixtures("process_group")
def test_siblings_are_those_that_name_the_same_group(group_name: str) -> None:
    state = CrossoverState()
    with registered(state) as model, contextlib.closing(GPUMutex(group_name)) as sibling:
        losses(model, steps=1)
        assert state.stats()["siblings"] == 1
        assert sibling.stats()["siblings"] == 1


@pytest.mark.usefixtures("process_group", "group_name")
def test_the_turn_is_given_away_between_the_last_bucket_and_the_optimizer() -> None:
    seen: list[bool] = []
    state = CrossoverState()

    def watching(inner: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert state.mutex is None or state.mutex.holding, "computes in its turn"
        seen.append(bucket.is_last())
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    released: list[bool] = []
    with registered(state, crossover_wrapper(watching)) as model:
        losses(model, steps=1)
        assert state.mutex is not None
        release = state.mutex.release
        state.mutex.release = lambda: (release(), released.append(state.mutex.holding))  # type: ignore
        losses(model, steps=3)
        assert state.mutex.holding
    assert released == [False] * 3
    assert seen[-1]


@pytest.mark.usefixtures("process_group", "group_name")
def test_a_mutex_of_the_users_own_is_used() -> None:
    with contextlib.closing(GPUMutex(device="a-device")) as mutex:
        state = CrossoverState(mutex=mutex)
        with registered(state) as model:
            losses(model)
            assert state.mutex is mutex
            assert mutex.stats()["turns"] == 4


@pytest.mark.usefixtures("process_group", "group_name")
def test_paused_gives_the_turn_away() -> None:
    state = CrossoverState()
    with state.paused():
        pass  # before the first exchange there is nothing to give
    with registered(state) as model:
        losses(model, steps=2)
        assert state.mutex is not None
        with state.paused():
            assert not state.mutex.holding
        assert state.mutex.holding, "a job of one rank takes it back"


@pytest.mark.usefixtures("process_group", "group_name")
def test_disable_makes_it_a_plain_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(small_model())
    monkeypatch.setenv("CROSSOVER_DISABLE", "1")
    for hook in (crossover_hook, crossover_wrapper(default_hooks.allreduce_hook)):
        state = CrossoverState()
        with registered(state, hook) as model:
            assert losses(model) == expected
            assert state.mutex is None


@pytest.mark.usefixtures("process_group")
def test_a_foreign_segment_costs_one_warning(
    group_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses(small_model())
    monkeypatch.setattr(
        "crossover_ddp._turns.segment.TurnSegment.__init__.__kwdefaults__", {"base": str(tmp_path)}
    )
    foreign = tmp_path / f"crossover_ddp-{os.geteuid()}"
    foreign.symlink_to(tmp_path / "elsewhere")
    state = CrossoverState()
    with registered(state) as model:
        assert losses(model) == expected
        assert str(foreign) in state.stats()["disabled_because"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(foreign) in warnings[0]
    assert not (tmp_path / "elsewhere").exists()
    assert not list(Path(SHARED_MEMORY).glob(f"crossover*/{group_name}*"))


@pytest.mark.usefixtures("process_group")
def test_a_wrong_group_name_is_raised_by_the_first_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", "a/b")
    with registered(CrossoverState()) as model, pytest.raises(ExchangeError, match="expected a group name"):
        losses(model, steps=1)


@pytest.mark.usefixtures("process_group", "group_name")
def test_turns_that_fail_under_way_cost_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    expected = losses(small_model(), steps=5)
    state = CrossoverState()
    with registered(state) as model, caplog.at_level(logging.WARNING, logger="crossover_ddp"):
        found = losses(model, steps=1)
        assert state.mutex is not None
        os.truncate(membership_of(state.mutex).segment.path, 10)
        model.load_state_dict(small_model().state_dict())
        found = losses(model, steps=5)
        assert found == expected
        assert state.stats()["disabled_because"]
    assert len([record for record in caplog.records if "trains on without" in record.message]) == 1


@pytest.mark.usefixtures("process_group", "group_name")
def test_a_pickled_state_leaves_the_process_behind() -> None:
    state = CrossoverState(hook_state={"rank": 4})
    copy = pickle.loads(pickle.dumps(state))
    assert copy.hook_state == {"rank": 4}
    assert copy.mutex is None
    assert copy.process_group is None


@pytest.mark.usefixtures("process_group", "group_name")
def test_two_models_of_one_process_are_one_job() -> None:
    """Otherwise each would wait for the other to give back a turn, a lease for every step."""
    first, second = CrossoverState(), CrossoverState()
    with registered(first) as generator, registered(second) as critic:
        for model in (generator, critic):
            losses(model, steps=2)
        assert first.mutex is second.mutex
        assert first.stats()["siblings"] == 0
        assert first.stats()["turns"] == 3, "the second model joins at the end of its first exchange"
        assert first.stats()["leases_expired"] == 0


@pytest.mark.usefixtures("process_group", "group_name")
def test_a_state_made_after_another_was_closed_joins_anew() -> None:
    for _ in range(2):
        state = CrossoverState()
        with registered(state) as model:
            losses(model, steps=2)
            assert state.stats()["turns"] == 2


@pytest.mark.usefixtures("group_name")
def test_the_job_leaves_its_siblings_when_the_process_group_is_destroyed() -> None:
    """Although model and state live on, as the process may."""
    with single_process_group():
        state, model = CrossoverState(), small_model()
        model.register_comm_hook(state, crossover_hook)
        losses(model)
        assert state.stats()["holding"]
    stats = state.stats()
    assert (stats["turns"], stats["holding"], stats["disabled_because"]) == (4, False, "closed")
