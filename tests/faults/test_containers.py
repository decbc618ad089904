"""Siblings in containers: other process ids, users and mounts, one /dev/shm.

Every rank is alone in its own namespaces, and believes that it is root. So the protocol must not
depend on process ids, inherited descriptors or parents.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.campaign import RANKS, Site
from tests.faults.lanes import Lane, why_no_container
from tests.harness.groups import files_of, new_group

STEPS = 12
WHY_NOT = why_no_container("users")


@pytest.mark.quiet
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_siblings_in_containers_train_as_alone_and_a_death_costs_no_lease(tmp_path: Path) -> None:
    group = new_group()
    with ExitStack() as stack:
        lanes = [
            stack.enter_context(Lane("tests.faults.trainee", "users")) for _ in range(2 * RANKS)
        ]
        steady, victim = (
            Site(lanes[:RANKS], tmp_path, group),
            Site(lanes[RANKS:], tmp_path / "victim", group),
        )
        victim.directory.mkdir()
        job, other = (site.start(seed) for seed, site in enumerate((steady, victim)))
        for each in (job, other):
            assert all(rank.pid < 20 for rank in each.ranks), "not in a container of its own"
            each.train(STEPS)
        for container in victim.lanes:
            container.kill()
        job.train(STEPS)
        job.end("leave")
        for stats in job.stats():
            assert stats["leases_expired"] == stats["siblings"] == 0
            assert stats["handovers"] > 0, "the job never waited for its sibling"
            assert stats["turn"] > stats["turns"], "the jobs have no common order"
        assert not files_of(group)
        assert [rank.losses() for rank in job.ranks] == steady.losses_alone(job.seed, job.count)
