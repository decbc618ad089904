"""torchrun's elastic agent starts a job again after a death; its sibling goes on, and nobody's losses change."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.faults.campaign import Job, Site
from tests.faults.lanes import ROOT, Lane, Log
from tests.harness.campaign import only_in_campaign
from tests.harness.children import Child, end
from tests.harness.groups import files_of, new_group
from tests.harness.waiting import eventually

STEPS = 24
SEED = 1  # of both jobs, so that one run alone tells what both should compute
DIES = [1, 8]  # rank, step
RANKS = 2
TIMEOUT_S = 90.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # Without it torch 2.15 finds gloo addresses of the life before in the agent's store, with or without a hook.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Agent:
    """torchrun's elastic agent with a job of two ranks, and what these log in each of their lives."""

    def __init__(self, directory: Path, group: str) -> None:
        self._log = directory / "victim-rank"
        order = {"log": str(self._log), "stop": f"{self._log}-stop", "group": group, "hook": "crossover"}
        words = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
            "--max-restarts",
            "2",
        ]
        words += ["--monitor-interval", "0.1", "-m", "tests.faults.trainee"]
        told = json.dumps({**order, "seed": SEED, "steps": STEPS, "dies": DIES})
        self._output = (directory / "agent.output").open("w+")
        self._process = Child(
            [sys.executable, "-m", *words, told],
            {**os.environ, **ENVIRONMENT},
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *exc_info: object) -> None:
        end([self._process], grace_s=10.0)  # the agent ends its ranks, which lead sessions of their own
        self._output.close()

    def trained(self, rank: int, life: int) -> Log:
        return Log(Path(f"{self._log}{rank}-life{life}"))

    def wait_for_steps(self, steps: int, life: int) -> None:
        def has_done() -> bool:
            return len(self.trained(0, life).steps()) >= steps or self._process.poll() not in (None, 0)

        assert eventually(has_done, TIMEOUT_S) and self._process.poll() in (None, 0), self.output()

    def wait(self) -> None:
        assert self._process.wait(TIMEOUT_S) == 0, self.output()

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()[-3000:]


@contextlib.contextmanager
def slowed(job: Job) -> Iterator[None]:
    """Let steps take longer while nothing is to be seen of them: as many are computed once more alone."""
    slow = Path(f"{job.stop}.slow")
    slow.touch()
    yield
    slow.unlink()


@only_in_campaign
def test_a_job_that_torchrun_starts_again_disturbs_nobody(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(Lane("tests.faults.trainee")) for _ in range(RANKS)]
        site = Site(lanes, tmp_path, new_group())
        steady, agent = site.start(SEED), stack.enter_context(Agent(tmp_path, site.group))
        with slowed(steady):
            agent.wait_for_steps(1, life=0)
        agent.wait_for_steps(DIES[1], life=0)
        with slowed(steady):
            agent.wait_for_steps(1, life=1)
        agent.wait_for_steps(STEPS, life=1)
        with slowed(steady):
            agent.wait()
        steady.train(3)
        steady.end("leave")
        assert len(agent.trained(1, life=0).steps()) == DIES[1], "it died where it should"
        alone = site.losses_alone(SEED, max(STEPS, steady.count))
    for rank, expected in enumerate(alone):
        assert agent.trained(rank, life=1).losses() == expected[:STEPS], "it was started again once"
        found = steady.ranks[rank]
        assert len(found.losses()) > DIES[1]
        assert found.losses() == expected[: len(found.losses())]
        stats = found.stats()
        assert stats is not None and stats["disabled_because"] is None
        assert found.longest_s() < TIMEOUT_S / 2, "a stall without a lease would be endless"
    assert not files_of(site.group)
