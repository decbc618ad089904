"""The minimal recipes, which users copy: their losses are those of plain DDP."""

import re
import uuid
from pathlib import Path

import pytest
import torch

from tests.harness.scripts import spawn_script
from tests.recipes import RECIPES

TIMEOUT_S = 90.0
PLAIN = {"CROSSOVER_DISABLE": "1"}


def losses(output: str) -> list[str]:
    return re.findall(r"^epoch \d+: loss ([\d.]+)$", output, re.MULTILINE)


def train(name: str, *args: str, ranks: int = 2, environment: dict[str, str] | None = None) -> str:
    """Run a recipe in some ranks. Return their output: one of them prints the losses."""
    with spawn_script(
        RECIPES / f"minimal_{name}.py", ranks, args=args, environment=environment, forked=True
    ) as spawned:
        return "".join(spawned.wait(TIMEOUT_S))


@pytest.fixture(scope="module")
def plain() -> list[str]:
    found = losses(train("crossover", environment=PLAIN))
    assert len(found) == 3
    return found


def test_a_compressed_job_learns_with_a_quarter_of_the_bytes(plain: list[str]) -> None:
    printed = train("compressed")
    loss, (rate,) = losses(printed)[0], re.findall(r"rate ([0-9.]+)", printed)
    assert loss != plain[0]
    # The loss of one batch at a high learning rate differs by a quarter through rounding alone.
    # Without learning it is 2.3.
    assert float(loss) < 0.5
    assert 0.25 < float(rate) < 0.27


def test_fsdp_learns_with_a_quarter_of_the_bytes_between_nodes() -> None:
    printed = train("fsdp", ranks=4)
    exact = losses(train("fsdp", ranks=4, environment=PLAIN))
    assert re.findall(r"rate (0\.2\d+)", printed)
    assert losses(printed)[0] != exact[0]
    assert float(losses(printed)[0]) == pytest.approx(float(exact[0]), rel=0.01)
    assert float(losses(printed)[-1]) < 0.5


def test_minimal_recipes_import_only_public_names() -> None:
    for path in RECIPES.glob("minimal_*.py"):
        assert not re.search(r"(from|import) +(crossover_ddp\._|_[a-z]|lab)", path.read_text()), (
            path
        )


def test_siblings_have_the_losses_of_plain_ddp(plain: list[str]) -> None:
    script, group = RECIPES / "minimal_crossover.py", {"CROSSOVER_GROUP": uuid.uuid4().hex}
    # The sibling trains longer, so that the other one is never alone.
    with (
        spawn_script(
            script, 2, args=["--epochs", "4", "--lr", "0.05"], environment=group, forked=True
        ) as other,
        spawn_script(script, 2, environment=group, forked=True) as one,
    ):
        assert losses(one.wait(TIMEOUT_S)[0]) == plain
        assert len(losses(other.wait(TIMEOUT_S)[0])) == 4


def test_auto_has_the_losses_of_plain_ddp(plain: list[str]) -> None:
    output = train("auto")
    assert losses(output)[: len(plain)] == plain
    assert "crossover_ddp: chose " in output
    assert "looked at" not in output, "this loop reads no gradients, so it is not warned"


# Limits of the loss of one batch. It was 2.3 before training, 0.033 with plain SGD, 1e-5 with
# K-FAC. With elastic averaging it depends on the replicas' pace: 0.007 to 0.30 in a dozen runs.
@pytest.mark.parametrize(
    ("name", "arguments", "limit", "shown"),
    [
        ("averaging", [], 0.2, ""),
        ("averaging", ["--elastic"], 1.0, ""),
        ("kfac", [], 0.05, "KFACState(3 layers"),
        ("pipeline", ["--max-replicas", "1"], 1.0, "micro-batches"),
    ],
)
def test_a_minimal_recipe_learns(name: str, arguments: list[str], limit: float, shown: str) -> None:
    printed = train(name, *arguments)
    assert shown in printed
    assert float(losses(printed)[-1]) < limit


def test_a_pipeline_on_torchs_runtime_has_the_losses_of_the_runner() -> None:
    expected = losses(train("pipeline", "--max-replicas", "1"))
    found = losses(train("torch_pipeline"))
    assert [*map(float, found)] == pytest.approx([*map(float, expected)], rel=0.02)


def test_muon_has_the_losses_of_plain_ddp_and_saves_a_checkpoint_for_torch(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    output = train("muon", "--checkpoint", str(path))
    assert losses(output) == losses(train("muon", environment=PLAIN))
    assert "MuonState(2 matrices" in output
    state = torch.load(path, weights_only=True)["optimizer"][0]["state"]
    assert {tuple(each["momentum_buffer"].shape) for each in state.values()} == {
        (256, 64),
        (128, 256),
    }


def test_virtual_ranks_have_one_hash_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    def train_to(epochs: int, name: str, ranks: int) -> tuple[list[str], str]:
        output = train(
            "virtual", "--checkpoint", str(tmp_path / name), "--epochs", f"{epochs}", ranks=ranks
        )
        (found,) = re.findall(r"^hash (\w+)$", output, re.MULTILINE)
        return losses(output), found

    whole, found = train_to(2, "whole", 3)
    assert len({*whole}) == 2
    first, other = train_to(1, "resumed", 1)
    assert first == whole[:1]
    assert other != found
    assert train_to(2, "resumed", 2) == (whole[1:], found)
    assert train_to(2, "resumed", 1) == ([], found)


def test_two_programs_take_turns() -> None:
    script, group = RECIPES / "minimal_mutex.py", {"CROSSOVER_GROUP": uuid.uuid4().hex}
    with (
        spawn_script(script, 1, args=["a", "--turns", "4"], environment=group, forked=True) as one,
        spawn_script(
            script, 1, args=["b", "--turns", "4"], environment=group, forked=True
        ) as other,
    ):
        outputs = one.wait(TIMEOUT_S) + other.wait(TIMEOUT_S)
    for output in outputs:
        assert "'turns': 4" in output
        assert "'disabled_because': None" in output
    assert any(int(re.findall(r"'handovers': (\d+)", output)[0]) > 0 for output in outputs)


def test_snapshots_are_evaluated_beside_their_training(tmp_path: Path) -> None:
    script, group = RECIPES / "minimal_evaluation.py", {"CROSSOVER_GROUP": uuid.uuid4().hex}
    own = {"environment": group, "cwd": tmp_path, "forked": True}
    with (
        spawn_script(script, 1, args=["evaluate"], **own) as evaluation,
        spawn_script(script, 2, args=["train"], **own) as training,
    ):
        trained = losses(training.wait(TIMEOUT_S)[0])
        (beside,) = evaluation.wait(TIMEOUT_S)
    with spawn_script(script, 1, args=["evaluate"], **own) as evaluation:
        (alone,) = evaluation.wait(TIMEOUT_S)
    metrics = re.findall(r"^epoch \d+: \d+ of 360 right$", beside, re.MULTILINE)
    assert len(metrics) == 3
    assert metrics == re.findall(r"^epoch .*", alone, re.MULTILINE)
    assert len({*metrics}) > 1
    assert "'turns': 18" in beside
    assert "'disabled_because': None" in beside
    (snapshots,) = tmp_path.iterdir()
    with spawn_script(
        script,
        2,
        args=["train", "--snapshots", "others"],
        environment=PLAIN,
        cwd=tmp_path,
        forked=True,
    ) as training:
        assert losses(training.wait(TIMEOUT_S)[0]) == trained
    for path in snapshots.iterdir():
        with_turns, without = (
            torch.load(each / path.name) for each in (snapshots, tmp_path / "others")
        )
        assert all(torch.equal(with_turns[name], without[name]) for name in without)
