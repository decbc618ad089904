"""torchrun's elastic agent restarts a job after a death; its sibling's losses stay the same."""

import contextlib
import json
from pathlib import Path

import torch.distributed.run

from tests.faults.campaign import RANKS, Site, open_lanes
from tests.faults.lanes import Log
from tests.harness import spawn_script
from tests.harness.campaign import only_in_campaign
from tests.harness.groups import files_of, new_group
from tests.harness.waiting import eventually

STEPS = 24
SEED = 1  # of both jobs, so that one run alone gives the losses of both
DIES = [1, 8]  # rank, step
TIMEOUT_S = 90.0
AGENT = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=2", "--monitor-interval=0.1"]
# Else torch 2.15 finds gloo addresses of the life before in the agent's store, with any hook.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@only_in_campaign
def test_a_job_that_torchrun_restarts_does_not_disturb_its_sibling(tmp_path: Path) -> None:
    log = tmp_path / "victim-rank"
    group = new_group()
    order = {"log": str(log), "stop": f"{log}-stop", "group": group, "hook": "crossover"}
    argument = json.dumps({**order, "seed": SEED, "steps": STEPS, "dies": DIES})
    words = [*AGENT, "-m", "tests.faults.trainee", argument]

    def trained(rank: int, life: int) -> Log:
        return Log(Path(f"{log}{rank}-life{life}"))

    def wait_for_steps(steps: int, life: int) -> None:
        assert eventually(lambda: len(trained(0, life).steps()) >= steps, TIMEOUT_S), agent.output(
            0
        )

    with contextlib.ExitStack() as stack:
        site = Site(stack.enter_context(open_lanes()), tmp_path, group)
        steady = site.start(SEED)
        launched = spawn_script(
            torch.distributed.run.__file__, 1, args=words, environment=ENVIRONMENT
        )
        agent = stack.enter_context(launched)
        with steady.slowed():  # all its steps are computed again alone, so let it make few
            wait_for_steps(1, life=1)
        wait_for_steps(STEPS, life=1)
        agent.wait(TIMEOUT_S)
        steady.train(3)
        steady.end("leave")
        assert len(trained(1, life=0).steps()) == DIES[1], "the rank died elsewhere"
        alone = site.losses_alone(SEED, max(STEPS, steady.count))
    assert steady.stats()
    for rank, expected in enumerate(alone):
        assert trained(rank, life=1).losses() == expected[:STEPS], "the job was not restarted once"
        found = steady.ranks[rank]
        assert len(found.losses()) > DIES[1]
        assert found.losses() == expected[: len(found.losses())]
        assert found.longest_s() < TIMEOUT_S / 2, "a rank stalled"
    assert not files_of(group)
