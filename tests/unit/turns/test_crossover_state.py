"""The crossover hook in a job of one rank: no processes, milliseconds."""

import contextlib
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import CrossoverState, ExchangeError, GPUMutex, crossover_hook
from tests.harness import single_process_group
from tests.harness.groups import new_group

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


@pytest.mark.usefixtures("process_group")
def test_a_wrong_group_name_is_raised_by_the_first_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_GROUP", "a/b")
    with registered(CrossoverState()) as model, pytest.raises(ExchangeError, match="expected a group name"):
        losses(model, steps=1)


@pytest.mark.usefixtures("process_group", "group_name")
def test_a_pickled_state_leaves_the_process_behind() -> None:
    state = CrossoverState(hook_state={"rank": 4})
    copy = pickle.loads(pickle.dumps(state))
    assert copy.hook_state == {"rank": 4}
    assert copy.mutex is None
    assert copy.process_group is None


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
