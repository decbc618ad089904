"""The training recipe, run as it is run in earnest: real ranks, real images, a few steps."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.harness import run_ranks
from tests.harness.groups import free_port

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
SMALL_GPT = [*GPT, "--model-option", "depth=1"]

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
    """Ten steps of the small convolutional net with plain DDP, and an evaluation."""
    arguments = [*CONVNET, "--steps", "10", "--eval-every", "1"]
    return train_ranks(arguments, tmp_path_factory.mktemp("reference") / "log")


def test_log_has_a_start_each_step_an_evaluation_and_an_end(reference: list[list[Record]]) -> None:
    for rank, log in enumerate(reference):
        start, *steps, evaluation, end = log
        assert start["event"] == "start"
        assert (start["rank"], start["world_size"]) == (rank, WORLD)
        assert start["arguments"]["model"] == "timm:resnet18"
        assert [(each["event"], each["step"]) for each in steps] == [("step", step) for step in range(10)]
        assert {"loss", "lr", "cpu_s", "core_busy_s", "wire_bytes"} <= steps[0].keys()
        times = [time for each in steps for time in (each["begin_s"], each["end_s"])]
        assert times == sorted(times)
        assert all(each["cpu_s"] > 0 for each in steps)
        assert {**evaluation, "at_s": 0} == {**reference[0][-2], "at_s": 0}
        right = evaluation["accuracy"] * 360  # of all test images, each once
        assert (evaluation["event"], right) == ("eval", pytest.approx(round(right)))
        assert (end["event"], end["steps"]) == ("end", 10)
    assert losses(reference[0]) != losses(reference[1]), "ranks see different images"
    assert parameters_of(reference)


RESUMED = {
    "decoupled": [*CONVNET, "--steps", "10"],  # only the run that is stopped has the hook
    # Factors and solvers in some steps only; a checkpoint lies between two of each.
    "kfac": [
        *(*CONVNET, "--hook", "kfac", "--damping", "0.03", "--kl-clip", "0.01", "--steps", "10"),
        *("--factor-update-steps", "2", "--inv-update-steps", "4"),
    ],
    "muon": [*SMALL_GPT, "--hook", "muon", "--optimizer", "muon", "--steps", "10"],
    "local_sgd": [*CONVNET, "--hook", "local_sgd", "--delay", "1", "--fragments", "4", "--steps", "10"],
    "elastic": [*CONVNET, "--hook", "elastic", "--elastic-mode", "sync", "--steps", "10"],
    "adamw": [*SMALL_GPT, "--context", "128", "--batch-size", "50", "--epochs", "2"],
}
AVERAGED = ("local_sgd", "elastic")  # a checkpoint of replicas is one of their averages


@pytest.mark.parametrize("name", RESUMED)
def test_a_job_goes_on_from_its_checkpoint(name: str, reference: list[list[Record]], tmp_path: Path) -> None:
    """One with epochs is stopped in its second."""
    arguments = RESUMED[name]
    stopped = ["--hook", "decoupled", "--checkpoint-every", "3"] if name == "decoupled" else []
    whole = train_ranks(arguments, tmp_path / "whole")
    assert (losses(whole[0]) == losses(reference[0])) == (name == "decoupled")
    steps = len(losses(whole[0])) * 7 // 10
    saved = [*arguments, "--checkpoint", str(tmp_path / "checkpoint"), "--resume"]
    begun = train_ranks([*saved, *stopped, "--stop-after", str(steps)], tmp_path / "begun")
    resumed = train_ranks(saved, tmp_path / "resumed")
    for expected, before, after in zip(whole, begun, resumed, strict=True):
        found, exact = losses(before) + losses(after), steps if name in AVERAGED else None
        assert (len(losses(before)), len(found)) == (steps, len(losses(expected)))
        assert found[:exact] == losses(expected)[:exact]
    assert name in AVERAGED or parameters_of(resumed) == parameters_of(whole)
    assert [*tmp_path.glob("checkpoint*")] == [tmp_path / "checkpoint"]


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


def test_image_folder_trains_and_does_not_depend_on_workers(tmp_path: Path) -> None:
    """With the first zeros, ones and twos in PNG files, one fourth of them for validation."""
    digits = load_digits()
    chosen = [index for index in range(len(digits.target)) if digits.target[index] < 3][:80]
    for number, index in enumerate(chosen):
        folder = tmp_path / ("val" if number % 4 == 0 else "train") / str(digits.target[index])
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((digits.images[index] * 15).astype("uint8"))
        image.resize((40, 48)).save(folder / f"{index}.png")
    arguments = [*CONVNET, "--channels", "3", "--data-dir", str(tmp_path), "--epochs", "1"]
    alone = train_ranks([*arguments, "--eval-every", "1"], tmp_path / "alone")
    helped = train_ranks([*arguments, "--workers", "1"], tmp_path / "helped")
    assert [each["event"] for each in alone[0]] == ["start", *["step"] * 3, "eval", "end"]
    assert losses(helped[0]) == losses(alone[0])
    assert parameters_of(helped) == parameters_of(alone)
