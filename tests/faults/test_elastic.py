"""torchrun's elastic agent starts a job again after a death; its sibling goes on, and nobody's losses change."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.alone import losses_alone
from tests.faults.campaign import ENDLESS, ROOT, Rank
from tests.harness import spawn_script
from tests.harness.campaign import only_in_campaign
from tests.harness.children import Child, end
from tests.harness.groups import files_of, new_group

STEPS = 24
SEED = 1  # of both jobs, so that one run alone tells what both should compute
DIES = [1, 8]  # rank, step
RANKS = 2
TIMEOUT_S = 90.0
WORKER = ROOT / "tests" / "faults" / "elastic_worker.py"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # Without it torch 2.15 finds gloo addresses of the life before in the agent's store, with or without a hook.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Elastic:
    """A job of two ranks, and what they log in each of their lives."""

    def __init__(self, directory: Path, name: str, **order: Any) -> None:
        self._log = directory / name
        self.stop = directory / f"{name}.stop"
        self._slow = directory / f"{name}.slow"
        told = {"log": str(self._log), "stop": str(self.stop), "slow": str(self._slow), **order}
        self.order = json.dumps(told)

    def rank(self, rank: int, life: int = 0) -> Rank:
        return Rank(0, Path(f"{self._log}-rank{rank}-life{life}"))

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Let steps take longer while nothing is to be seen of them: as many are computed once more alone."""
        self._slow.touch()
        yield
        self._slow.unlink()


class Agent:
    """torchrun's elastic agent with a job; ended, with all its ranks, at the end of the block."""

    def __init__(self, directory: Path, job: Elastic) -> None:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
        ]
        command += ["--max-restarts", "2", "--monitor-interval", "0.1", "-m", "tests.faults.elastic_worker"]
        self._output = (directory / "agent.output").open("w+")
        self._process = Child(
            [*command, job.order],
            {**os.environ, **ENVIRONMENT},
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def wait(self) -> None:
        assert self._process.wait(TIMEOUT_S) == 0, self.output()

    def has_failed(self) -> bool:
        return self._process.poll() not in (None, 0)

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()[-3000:]

    def end(self) -> None:
        end([self._process], grace_s=10.0)  # the agent ends its ranks, which lead sessions of their own
        self._output.close()


@contextlib.contextmanager
def torchrun(directory: Path, job: Elastic) -> Iterator[Agent]:
    agent = Agent(directory, job)
    try:
        yield agent
    finally:
        agent.end()


def wait_for_steps(job: Elastic, steps: int, agent: Agent, *, life: int = 0) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(job.rank(0, life).steps()) < steps:
        assert time.monotonic() < deadline_s and not agent.has_failed(), agent.output()
        time.sleep(0.05)


@only_in_campaign
@pytest.mark.alone
def test_a_job_that_torchrun_starts_again_disturbs_nobody(tmp_path: Path) -> None:
    group = new_group()
    shared = {"group": group, "hook": "crossover"}
    steady = Elastic(tmp_path, "steady", seed=SEED, steps=ENDLESS, **shared)
    victim = Elastic(tmp_path, "victim", seed=SEED, steps=STEPS, dies=DIES, **shared)
    alone = {**ENVIRONMENT, "TORCHELASTIC_RESTART_COUNT": "0"}  # nobody starts the steady job again
    with (
        spawn_script(WORKER, RANKS, args=[steady.order], environment=alone, forked=True) as ranks,
        torchrun(tmp_path, victim) as agent,
    ):
        with steady.slowed():
            wait_for_steps(victim, 1, agent)
        wait_for_steps(victim, DIES[1], agent)
        with steady.slowed():
            wait_for_steps(victim, 1, agent, life=1)
        wait_for_steps(victim, STEPS, agent, life=1)
        with steady.slowed():
            agent.wait()
        wait_for_steps(steady, len(steady.rank(0).steps()) + 3, agent)
        steady.stop.touch()
        ranks.wait(TIMEOUT_S)
    assert len(victim.rank(1, life=0).steps()) == DIES[1], "it died where it should"
    lived = [victim.rank(rank, life=1) for rank in range(RANKS)]
    assert all(len(rank.steps()) == STEPS for rank in lived), "and was started again once"
    count = max(STEPS, len(steady.rank(0).steps()))
    references = losses_alone(tmp_path, seed=SEED, steps=count, ranks=RANKS, group=group)
    for rank, expected in enumerate(references):
        found = steady.rank(rank).losses()
        assert len(found) > DIES[1]
        assert found == expected[: len(found)]
        assert lived[rank].losses() == expected[:STEPS]
        stats = steady.rank(rank).stats()
        assert stats is not None and stats["disabled_because"] is None
    longest_s = max(
        end_s - begin_s for rank in range(RANKS) for _, begin_s, end_s, _ in steady.rank(rank).steps()
    )
    assert longest_s < TIMEOUT_S / 2, "a stall without a lease would be endless"
    assert not files_of(group)
