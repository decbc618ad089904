"""Siblings in containers: other process ids, users and mounts, one /dev/shm.

Every rank is the only one in namespaces of its own, and each thinks that it is root. Nothing of the protocol may
rest on a process id, on an inherited descriptor, or on a parent.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.campaign import Job, Site
from tests.faults.lanes import Lane, why_no_container
from tests.harness.groups import files_of, new_group

RANKS = 2
STEPS = 12
WHY_NOT = why_no_container("users")
pytestmark = [
    pytest.mark.quiet,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "containers can be made"),
]


@pytest.fixture(scope="module")
def containers() -> Iterator[list[list[Lane]]]:
    """Those of two jobs, for all tests; the last one kills some."""
    with ExitStack() as stack:
        yield [
            [stack.enter_context(Lane("tests.faults.trainee", "users")) for _ in range(RANKS)]
            for _ in range(2)
        ]


@pytest.fixture
def sites(tmp_path: Path, containers: list[list[Lane]]) -> list[Site]:
    group = new_group()
    return [Site(each, tmp_path / f"site{number}", group) for number, each in enumerate(containers)]


def start(sites: list[Site]) -> list[Job]:
    """Let two jobs train for a while."""
    for site in sites:
        site.directory.mkdir()
    jobs = [site.start(seed) for seed, site in enumerate(sites, 1)]
    assert all(rank.pid < 20 for job in jobs for rank in job.ranks), "process ids are the containers' own"
    for job in jobs:
        job.train(STEPS)
    return jobs


def test_siblings_in_containers_take_turns_with_results_as_alone(sites: list[Site]) -> None:
    jobs = start(sites)
    for job in jobs:
        job.stop.touch()
    for job in jobs:
        job.end("leave")
        for stats in job.stats():
            assert stats["leases_expired"] == 0
            assert stats["handovers"] > 0, "it never waited for its sibling"
            assert stats["turn"] > stats["turns"], "the order of turns is not common to both"
    assert not files_of(sites[0].group)
    for site, job in zip(sites, jobs, strict=True):
        assert [rank.losses() for rank in job.ranks] == site.losses_alone(job.seed, job.count)


def test_a_container_that_is_killed_holds_its_sibling_up_for_no_time(sites: list[Site]) -> None:
    steady, _ = start(sites)
    for container in sites[1].lanes:
        container.kill()
    steady.train(STEPS)
    steady.end("leave")
    assert all(stats["leases_expired"] == stats["siblings"] == 0 for stats in steady.stats())
    assert not files_of(sites[0].group)
