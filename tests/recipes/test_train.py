"""The training recipe, run as it is run in earnest: real ranks, real images, a few steps."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.harness import run_ranks, spawn_script
from tests.harness.groups import free_port
from tests.recipes import RECIPES

WORLD = 2
# BatchNorm, so that buffers are broadcast; several buckets; dropout, so that random state matters.
CONVNET = [
    *("--model", "timm:resnet18", "--model-option", "channels=(8,8,16,16)"),
    *("--model-option", "drop_rate=0.1", "--bucket-cap-mb", "0.02"),
    *("--image-size", "32", "--channels", "1", "--batch-size", "8", "--lr", "0.05", "--eval-every", "0"),
]
GPT = [
    *("--model", "gpt", "--model-option", "dim=32", "--vocabulary", "512", "--context", "32"),
    *("--batch-size", "8", "--optimizer", "adamw", "--lr", "0.01", "--eval-every", "0"),
]

Record = dict[str, Any]


def call_main(rank: int, world_size: int, arguments: Sequence[str]) -> None:
    """Run the script's own main in a rank of the harness, which has torch and timm imported already."""
    sys.argv[0] = "train.py"
    import train

    train.main(arguments)


def train_ranks(arguments: Sequence[str], log: Path, *, world_size: int = WORLD) -> list[list[Record]]:
    """Train in so many ranks and return the log of each."""
    port = free_port()
    job = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = [{**job, "RANK": str(rank)} for rank in range(world_size)]
    given = [*arguments, "--threads", "1", "--device", "cpu", "--log-json", f"{log}-{{rank}}.jsonl"]
    run_ranks(call_main, world_size, args=(given,), backend=None, environment=environment)
    return [read_log(Path(f"{log}-{rank}.jsonl")) for rank in range(world_size)]


def read_log(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(records: Sequence[Record]) -> list[float]:
    return [record["loss"] for record in records if record["event"] == "step"]


def parameters_of(logs: Sequence[Sequence[Record]]) -> str:
    """Return the fingerprint of the final parameters, which must be the same on all ranks."""
    fingerprints = {log[-1]["parameters_sha256"] for log in logs}
    assert len(fingerprints) == 1
    return str(fingerprints.pop())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[Record]]:
    """Ten steps of the small convolutional net with plain DDP."""
    return train_ranks([*CONVNET, "--steps", "10"], tmp_path_factory.mktemp("reference") / "log")


def test_log_has_a_start_each_step_and_an_end(reference: list[list[Record]]) -> None:
    for rank, log in enumerate(reference):
        start, *steps, end = log
        assert start["event"] == "start"
        assert (start["rank"], start["world_size"]) == (rank, WORLD)
        assert start["arguments"]["model"] == "timm:resnet18"
        assert [(each["event"], each["step"]) for each in steps] == [("step", step) for step in range(10)]
        assert {"loss", "lr", "cpu_s", "core_busy_s", "wire_bytes"} <= steps[0].keys()
        times = [time for each in steps for time in (each["begin_s"], each["end_s"])]
        assert times == sorted(times)
        assert all(each["cpu_s"] > 0 for each in steps)
        assert (end["event"], end["steps"]) == ("end", 10)
    assert losses(reference[0]) != losses(reference[1]), "ranks see different images"
    assert parameters_of(reference)


def test_plain_and_decoupled_runs_resume_each_other_from_checkpoints_in_between(
    reference: list[list[Record]], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    arguments = [*CONVNET, "--steps", "10", "--checkpoint", str(checkpoint), "--checkpoint-every", "3"]
    begun = train_ranks([*arguments, "--hook", "decoupled", "--stop-after", "6"], tmp_path / "begun")
    resumed = train_ranks([*arguments, "--resume"], tmp_path / "resumed")
    assert losses(begun[0]) + losses(resumed[0]) == losses(reference[0])
    assert parameters_of(resumed) == parameters_of(reference)
    assert list(tmp_path.glob("checkpoint*")) == [checkpoint]


HOOKS = {
    # Factors and solvers in some steps only; a checkpoint lies between two of each.
    "kfac": [
        *(*CONVNET, "--hook", "kfac", "--damping", "0.03", "--kl-clip", "0.01"),
        *("--factor-update-steps", "2", "--inv-update-steps", "4"),
    ],
    "muon": [*GPT, "--model-option", "depth=1", "--hook", "muon", "--optimizer", "muon"],
    "local_sgd": [*CONVNET, "--hook", "local_sgd", "--sync-every", "4", "--delay", "1", "--fragments", "4"],
    "elastic": [*CONVNET, "--hook", "elastic", "--sync-every", "2", "--elastic-mode", "async"],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_job_goes_on_from_its_checkpoint(hook: str, reference: list[list[Record]], tmp_path: Path) -> None:
    arguments = [*HOOKS[hook], "--steps", "10"]
    saved = [*arguments, "--checkpoint", str(tmp_path / "checkpoint"), "--resume"]
    begun = train_ranks([*saved, "--stop-after", "3"], tmp_path / "begun")
    resumed = train_ranks(saved, tmp_path / "resumed")
    assert parameters_of(begun) != parameters_of(resumed)
    found = losses(begun[0]) + losses(resumed[0])
    assert len(found) == 10
    if hook != "muon":  # of the same weights
        assert found[0] == losses(reference[0])[0] and found != losses(reference[0])
    if hook in ("kfac", "muon"):  # a checkpoint of replicas is one of their averages
        whole = train_ranks(arguments, tmp_path / "whole")
        assert found == losses(whole[0])
        assert parameters_of(resumed) == parameters_of(whole)


def test_resume_across_epochs_with_adamw(tmp_path: Path) -> None:
    small = [*GPT, "--model-option", "depth=1", "--vocabulary", "64", "--batch-size", "100"]
    arguments = [*small, "--epochs", "2", "--checkpoint", str(tmp_path / "checkpoint")]
    whole = train_ranks(arguments, tmp_path / "whole")
    per_epoch = len(losses(whole[0])) // 2
    train_ranks([*arguments, "--stop-after", str(per_epoch + 2)], tmp_path / "begun")
    resumed = train_ranks([*arguments, "--resume"], tmp_path / "resumed")
    assert losses(resumed[1]) == losses(whole[1])[per_epoch + 2 :]
    assert parameters_of(resumed) == parameters_of(whole)


def test_losses_fall_also_in_parts_of_batches_and_in_half_precision(tmp_path: Path) -> None:
    short = [*GPT, "--steps", "8", "--warmup-steps", "1"]
    whole = train_ranks(short, tmp_path / "whole")
    parts = train_ranks([*short, "--batch-size", "4", "--accumulate", "2"], tmp_path / "parts")
    half = train_ranks([*short, "--amp"], tmp_path / "half")
    for rank in range(WORLD):
        found = losses(whole[rank])
        assert found[-1] < 0.95 * found[0]
        assert losses(parts[rank]) == pytest.approx(found, rel=1e-4)
        assert losses(half[rank]) != found
        assert losses(half[rank]) == pytest.approx(found, rel=0.02)


def test_evaluation_covers_every_test_image_once(tmp_path: Path) -> None:
    arguments = [*CONVNET, "--steps", "2", "--eval-every", "1", "--batch-size", "32"]
    both = train_ranks(arguments, tmp_path / "both")
    evaluations = [[each for each in log if each["event"] == "eval"] for log in both]
    assert [len(each) for each in evaluations] == [1, 1]
    first, second = evaluations[0][0], evaluations[1][0]
    assert (first["accuracy"], first["loss"]) == (second["accuracy"], second["loss"])
    assert first["accuracy"] * 360 == pytest.approx(round(first["accuracy"] * 360))


@pytest.fixture(scope="module")
def image_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of PNG files: the first 80 zeros, ones and twos, one fourth of them for validation."""
    digits = load_digits()
    directory = tmp_path_factory.mktemp("images")
    chosen = [index for index in range(len(digits.target)) if digits.target[index] < 3][:80]
    for number, index in enumerate(chosen):
        folder = directory / ("val" if number % 4 == 0 else "train") / str(digits.target[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[index] * 15).astype("uint8")).resize((40, 48)).save(
            folder / f"{index}.png"
        )
    return directory


def test_image_folder_trains_and_does_not_depend_on_workers(image_directory: Path, tmp_path: Path) -> None:
    arguments = [*CONVNET, "--channels", "3", "--data-dir", str(image_directory), "--epochs", "1"]
    alone = train_ranks([*arguments, "--eval-every", "1"], tmp_path / "alone")
    helped = train_ranks([*arguments, "--workers", "1"], tmp_path / "helped")
    assert [each["event"] for each in alone[0]] == ["start", *["step"] * 3, "eval", "end"]
    assert losses(helped[0]) == losses(alone[0])
    assert parameters_of(helped) == parameters_of(alone)


def test_script_runs_as_torchrun_would_start_it(tmp_path: Path) -> None:
    log = tmp_path / "lab"
    arguments = [*GPT, "--steps", "12", "--log-every", "5", "--deterministic", "--device", "cpu"]
    environment = {"CROSSOVER_LAB_DIR": str(log)}
    with spawn_script(
        RECIPES / "train.py", WORLD, args=arguments, environment=environment, forked=True
    ) as ranks:
        first, second = ranks.wait(timeout_s=60)
    said = [line.split(":")[0] for line in first.splitlines()[:3]]
    assert said == ["step 0 of 12", "step 5 of 12", "step 10 of 12"]
    assert "step" not in second
    assert [read_log(log / f"rank{rank}.jsonl")[-1]["steps"] for rank in range(WORLD)] == [12, 12]
