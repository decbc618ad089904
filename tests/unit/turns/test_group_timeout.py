"""How long collectives wait is read from the group itself, in whatever way it was made."""

import datetime
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from crossover_ddp._turns.channel import UNKNOWN_TIMEOUT_S, group_timeout_s, job_group, patience_limit_s


@pytest.fixture(params=[dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])  # with which backends are wrapped
def world(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    timeout = datetime.timedelta(seconds=77)
    dist.set_debug_level(request.param)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.OFF)


class Group:
    """Answers as a group of two ranks does; one backend a device type."""

    def __init__(self, **backends: Any) -> None:
        self._device_types = [*backends]
        self._backends = backends

    def _get_backend(self, device: str) -> Any:
        if self._backends[device] is None:
            raise RuntimeError(f"Could not find the default device type {device}")
        return self._backends[device]

    def size(self) -> int:
        return 2


def backend(seconds: float) -> SimpleNamespace:
    return SimpleNamespace(options=SimpleNamespace(_timeout=datetime.timedelta(seconds=seconds)))


def test_a_real_group_tells_its_timeout_and_one_process_is_bound_by_leases_alone(
    world: dist.ProcessGroup,
) -> None:
    assert job_group(None) is world
    assert group_timeout_s(world) == 77.0
    assert group_timeout_s(dist.new_group([0], timeout=datetime.timedelta(seconds=33))) == 33.0
    assert patience_limit_s(world) == patience_limit_s(None) == math.inf


@pytest.mark.parametrize(
    ("group", "expected_s"),
    [
        (Group(cpu=backend(1800), cuda=backend(600)), 600.0),
        (Group(cpu=backend(1800), cuda=None), 1800.0),
        (Group(cpu=SimpleNamespace()), UNKNOWN_TIMEOUT_S),
        (Group(cpu=SimpleNamespace(options=SimpleNamespace(_timeout=30))), UNKNOWN_TIMEOUT_S),
        (Group(), UNKNOWN_TIMEOUT_S),
        (SimpleNamespace(), UNKNOWN_TIMEOUT_S),
    ],
)
def test_the_shortest_timeout_counts_and_an_unknown_one_is_short(group: Any, expected_s: float) -> None:
    assert group_timeout_s(group) == expected_s


def test_patience_is_a_quarter_of_the_timeout() -> None:
    assert job_group(None) is None, "one process is the job"
    assert patience_limit_s(cast(dist.ProcessGroup, Group(cpu=backend(400)))) == 100.0
