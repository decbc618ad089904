"""torchrun's elastic agent starts a job again after a death; its sibling goes on, and nobody's losses change."""

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
SEED = 1  # of both jobs, so that one run alone tells what both should compute
DIES = [1, 8]  # rank, step
TIMEOUT_S = 90.0
AGENT = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=2", "--monitor-interval=0.1"]
# Without it torch 2.15 finds gloo addresses of the life before in the agent's store, with or without a hook.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@only_in_campaign
def test_a_job_that_torchrun_starts_again_disturbs_nobody(tmp_path: Path) -> None:
    log, group = tmp_path / "victim-rank", new_group()
    order = {"log": str(log), "stop": f"{log}-stop", "group": group, "hook": "crossover"}
    told = json.dumps({**order, "seed": SEED, "steps": STEPS, "dies": DIES})
    words = [*AGENT, "-m", "tests.faults.trainee", told]

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
        with steady.slowed():  # as many steps as it makes are computed once more alone
            wait_for_steps(1, life=1)
        wait_for_steps(STEPS, life=1)
        agent.wait(TIMEOUT_S)
        steady.train(3)
        steady.end("leave")
        assert len(trained(1, life=0).steps()) == DIES[1], "it died where it should"
        alone = site.losses_alone(SEED, max(STEPS, steady.count))
    assert steady.stats()
    for rank, expected in enumerate(alone):
        assert trained(rank, life=1).losses() == expected[:STEPS], "it was started again once"
        found = steady.ranks[rank]
        assert len(found.losses()) > DIES[1]
        assert found.losses() == expected[: len(found.losses())]
        assert found.longest_s() < TIMEOUT_S / 2, "a stall without a lease would be endless"
    assert not files_of(group)
