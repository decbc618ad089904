"""Several ranks on each node of the emulated cluster: they share its link, and one centre of EA-wild."""

import json
from pathlib import Path

import pytest

from lab import Cluster, Job, command
from tests.harness.scripts import ROOT
from tests.recipes.test_lab import python, shaped, unshaped

pytestmark = pytest.mark.timeout(120)

# Trains until the hosts have met three times; ranks may make different numbers of steps.
WILD = """
import json, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from crossover_ddp.averaging_hooks import ElasticState, elastic_hook
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(300, 40), broadcast_buffers=False, gradient_as_bucket_view=True)
state = ElasticState(2, "wild")
model.register_comm_hook(state, elastic_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
started = time.monotonic()
for step in range(10_000):
    model(torch.randn(8, 300)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.001)
    if step > 40 and (state.stats()["rounds"] >= 3 or dist.get_rank() % 2 and state.stats()["hosts"] == 2
                      or state.stats()["hosts"] == 1 or time.monotonic() - started > 30):
        break
apart = float(model.module.weight.detach().double().sum())
state.average()
print(json.dumps({**state.stats(), "apart": apart, "mean": float(model.module.weight.detach().double().sum())}))
state.close()
dist.destroy_process_group()
"""


def told(directory: Path, ranks: int) -> list[dict[str, float]]:
    return [json.loads((directory / f"rank{r}.log").read_text().splitlines()[-1]) for r in range(ranks)]


@pytest.mark.parametrize("on_links", [shaped, unshaped])
@pytest.mark.usefixtures("forked_lab")
def test_ranks_of_a_node_share_a_wild_centre_and_nodes_meet(on_links: bool, tmp_path: Path) -> None:
    with Cluster(ranks_per_node=2, rate_mbit=500, shaped=on_links) as cluster:
        job = Job("wild", python(WILD), {"PYTHONPATH": str(ROOT)})
        result = cluster.run([job], 100, out=tmp_path)
    found = told(tmp_path / "wild", 4)
    assert {each["hosts"] for each in found} == {2 if on_links else 1}
    assert all(each["own_pulls"] >= 20 for each in found)
    rounds = [each["rounds"] for each in found]
    if on_links:  # all ranks see them; the first one of each node offers its centre
        assert min(rounds) >= 3
        assert min(result.sent_bytes) > 3 * 300 * 40 * 4
    else:
        assert rounds == [0, 0, 0, 0]
    assert len({each["mean"] for each in found}) == 1, "ranks differ after average()"
    assert len({each["apart"] for each in found}) == 4


def test_the_command_takes_ranks_per_node(tmp_path: Path) -> None:
    job = "a: python -c 'import os; print(os.environ[\"RANK\"])'"
    words = ["run", "--unshaped", "--ranks-per-node", "3", "--out", str(tmp_path), "--json"]
    assert command.main([*words, "--job", job]) == 0
    logs = sorted((tmp_path / "a").glob("rank*.log"))
    assert [log.read_text().strip() for log in logs] == [str(rank) for rank in range(6)]
