"""The training recipe in real ranks, and its parts: models, data, schedule, meter, arguments."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from sklearn.datasets import load_digits
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import _data
import _models
import train
from _options import parse_arguments
from lab import meter as meters
from tests.harness import run_ranks
from tests.harness.groups import free_port

WORLD = 2
# BatchNorm has buffers to broadcast, and dropout depends on the random state. Several buckets.
CONVNET = [
    *("--model", "timm:resnet18", "--model-option", "channels=(8,8,16,16)"),
    *("--model-option", "drop_rate=0.1", "--bucket-cap-mb", "0.02"),
    *("--image-size", "32", "--channels", "1", "--batch-size", "8"),
    *("--lr", "0.05", "--eval-every", "0"),
]
GPT = [
    *("--model", "gpt", "--model-option", "dim=32", "--vocabulary", "512", "--context", "32"),
    *("--batch-size", "8", "--optimizer", "adamw", "--lr", "0.01", "--eval-every", "0"),
]
SMALL_GPT = [*GPT, "--model-option", "depth=1"]

Record = dict[str, Any]


def call_main(rank: int, world_size: int, arguments: Sequence[str]) -> None:
    """Run the script's main in a rank of the harness, where torch and timm are imported already."""
    sys.argv[0] = "train.py"
    train.main(arguments)


def train_ranks(
    arguments: Sequence[str], log: Path, *, world_size: int = WORLD
) -> list[list[Record]]:
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
    arguments = [*CONVNET, "--steps", "10", "--eval-every", "1"]
    return train_ranks(arguments, tmp_path_factory.mktemp("reference") / "log")


def test_log_has_a_start_each_step_an_evaluation_and_an_end(reference: list[list[Record]]) -> None:
    for rank, log in enumerate(reference):
        start, *steps, evaluation, end = log
        assert start["event"] == "start"
        assert (start["rank"], start["world_size"]) == (rank, WORLD)
        assert start["arguments"]["model"] == "timm:resnet18"
        assert [(each["event"], each["step"]) for each in steps] == [
            ("step", step) for step in range(10)
        ]
        assert {"loss", "lr", "cpu_s", "core_busy_s", "wire_bytes"} <= steps[0].keys()
        times = [time for each in steps for time in (each["begin_s"], each["end_s"])]
        assert times == sorted(times)
        assert all(each["cpu_s"] > 0 for each in steps)
        assert {**evaluation, "at_s": 0} == {**reference[0][-2], "at_s": 0}
        right = evaluation["accuracy"] * 360  # each of the 360 test images counts once
        assert (evaluation["event"], right) == ("eval", pytest.approx(round(right)))
        assert (end["event"], end["steps"]) == ("end", 10)
    assert losses(reference[0]) != losses(reference[1]), "ranks see different images"
    assert parameters_of(reference)


RESUMED = {
    "decoupled": [*CONVNET, "--steps", "10"],  # only the run that is stopped has the hook
    "muon": [*SMALL_GPT, "--hook", "muon", "--optimizer", "muon", "--steps", "10"],
    "local_sgd": [
        *CONVNET,
        *("--hook", "local_sgd", "--delay", "1", "--fragments", "4", "--steps", "10"),
    ],
    "adamw": [*SMALL_GPT, "--context", "128", "--batch-size", "50", "--epochs", "2"],
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_job_resumes_from_its_checkpoint(
    name: str, reference: list[list[Record]], tmp_path: Path
) -> None:
    """A job with epochs is stopped in its second. A checkpoint of replicas has their average."""
    arguments = RESUMED[name]
    stopped = ["--hook", "decoupled", "--checkpoint-every", "3"] if name == "decoupled" else []
    whole = train_ranks(arguments, tmp_path / "whole")
    assert (losses(whole[0]) == losses(reference[0])) == (name == "decoupled")
    steps = len(losses(whole[0])) * 7 // 10
    saved = [*arguments, "--checkpoint", str(tmp_path / "checkpoint"), "--resume"]
    begun = train_ranks([*saved, *stopped, "--stop-after", str(steps)], tmp_path / "begun")
    resumed = train_ranks(saved, tmp_path / "resumed")
    for expected, before, after in zip(whole, begun, resumed, strict=True):
        found, exact = losses(before) + losses(after), steps if name == "local_sgd" else None
        assert (len(losses(before)), len(found)) == (steps, len(losses(expected)))
        assert found[:exact] == losses(expected)[:exact]
    assert name == "local_sgd" or parameters_of(resumed) == parameters_of(whole)
    assert [*tmp_path.glob("checkpoint*")] == [tmp_path / "checkpoint"]


def test_losses_fall_with_accumulation_and_in_half_precision(tmp_path: Path) -> None:
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
    """The images are the first zeros, ones and twos, as PNG files. A quarter is for validation."""
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


def model_of(name: str, **sizes: int) -> _models.Preset:
    return _models.Preset(name, 8, 25.0, "sgd", 0.1, **{"channels": 3, **sizes})


@pytest.mark.parametrize("name", ["timm:resnet10t", "vit_tiny_patch16_224", "squeezenet1_1"])
def test_models_are_found_by_name_and_learn_the_image_size(name: str) -> None:
    model = _models.make(model_of(name), classes=7)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("name", sorted(_models.PRESETS))
def test_presets_have_the_documented_sizes(name: str, process_group: dist.ProcessGroup) -> None:
    preset = _models.PRESETS[name]
    data = _data.load_data(preset)
    inputs, targets = map(torch.stack, zip(*(data.train[index] for index in range(2)), strict=True))
    sizes = bucket_sizes(_models.make(preset, data.classes), inputs, targets, preset.bucket_cap_mb)
    whole = preset.model.startswith("timm:") and not preset.model_options
    least, most = (0, 1e6) if name == "tiny" else (1e7, 2.5e7) if whole else (2e6, 6e6)
    assert least <= sum(sizes) <= most
    assert 4 <= len(sizes) <= 8
    if name == "gpt":
        assert 0.5 <= sizes[-1] / sum(sizes) <= 0.6


def bucket_sizes(model, inputs, targets, cap_mb: float) -> list[int]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    sizes: list[int] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().nbytes)
        return noop_hook(_, bucket)

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        sizes.clear()
        _models.loss_of(ddp(inputs), targets).backward()
    return sizes


def test_the_gpt_is_causal_and_shares_its_embedding_with_its_head() -> None:
    model = _models.TinyGPT(vocabulary=11, context=6, dim=8, depth=1, heads=2)
    assert sum(parameter.numel() == 11 * 8 for parameter in model.parameters()) == 1
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, -1] = 9
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_learning_rate_rises_then_falls() -> None:
    args = parse_arguments(["--lr", "0.4", "--warmup-steps", "4"], train.HOOKS)
    rates = [train.learning_rate(args, step, 20) for step in range(20)]
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[4] == pytest.approx(0.4)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "expected batch_size >= 1, got batch_size=0"),
        (["--resume"], "expected --checkpoint PATH with --resume"),
        (["--hook", "horovod"], "invalid choice: 'horovod'"),
        (["--model-option", "depth"], "expected KEY=VALUE, got 'depth'"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments, train.HOOKS)
    assert message in capsys.readouterr().err


def test_unknown_models_and_wrong_sizes_are_refused_with_a_hint() -> None:
    with pytest.raises(
        ValueError, match=r"expected the name .* or torchvision.*'resnet81'.*mean .*resnet18"
    ):
        _models.make(model_of("resnet81"), classes=10)
    with pytest.raises(
        ValueError, match="expected a model library timm or torchvision, got 'keras'"
    ):
        _models.make(model_of("keras:resnet18"), classes=10)
    with pytest.raises(ValueError, match=r"expected a directory DATA_DIR/train.*--data-dir"):
        _data.load_data(model_of("timm:resnet10t"), Path("nowhere"))
    with pytest.raises(ValueError, match=r"the 718 samples.*accumulate=2; lower one of them"):
        train.count_steps(argparse.Namespace(batch_size=500, accumulate=2), 718)


def test_core_busy_time_counts_all_but_idle(tmp_path: Path) -> None:
    table = tmp_path / "stat"
    table.write_text(
        "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 100 1 50 1000 70 3 4 2 0 0\ncpu11 7 7 7 7 7 7 7 7 0 0\n"
    )
    assert meters.core_busy_s(1, table) == pytest.approx(160 / os.sysconf("SC_CLK_TCK"))
    assert meters.core_busy_s(2, table) is None
    assert meters.core_busy_s(None, table) is None


def test_wire_bytes_leave_loopback_out(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    counters = "1 0 0 0 0 0 0"
    sent = {"   lo: ": 12, " eth0: ": 3000, "veth1:": 40}
    lines = [f"{name}11 {counters} {count} {counters}\n" for name, count in sent.items()]
    table.write_text("two lines\nof headings\n" + "".join(lines))
    assert meters.wire_bytes(table) == 3040
    assert meters.wire_bytes(tmp_path / "none") is None
