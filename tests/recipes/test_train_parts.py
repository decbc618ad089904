"""The parts of the training recipe that need no ranks: models, data, schedule, meter, arguments."""

import argparse
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import _data
import _models
import train
from _options import parse_arguments
from lab import meter as meters


def model_of(name: str, **sizes: int) -> _models.Preset:
    return _models.Preset(name, 8, 25.0, "sgd", 0.1, **{"channels": 3, **sizes})


@pytest.mark.parametrize("name", ["timm:resnet10t", "vit_tiny_patch16_224", "squeezenet1_1"])
def test_models_are_found_by_name_and_learn_the_image_size(name: str) -> None:
    model = _models.make(model_of(name), classes=7)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize("name", sorted(_models.PRESETS))
def test_presets_have_the_size_they_promise(name: str, process_group: dist.ProcessGroup) -> None:
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
    """Return the bytes of each bucket in the order of the exchange, from the second iteration on."""
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


def test_gpt_shares_its_embedding_with_its_head_and_looks_only_back() -> None:
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
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments, train.HOOKS)
    assert message in capsys.readouterr().err


def test_what_cannot_be_trained_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"expected the name .* or torchvision.*'resnet81'.*mean .*resnet18"):
        _models.make(model_of("resnet81"), classes=10)
    with pytest.raises(ValueError, match="expected a model library timm or torchvision, got 'keras'"):
        _models.make(model_of("keras:resnet18"), classes=10)
    with pytest.raises(ValueError, match=r"expected a directory DATA_DIR/train.*--data-dir"):
        _data.load_data(model_of("timm:resnet10t"), Path("nowhere"))
    with pytest.raises(ValueError, match=r"the 718 samples.*accumulate=2; lower one of them"):
        train.count_steps(argparse.Namespace(batch_size=500, accumulate=2), 718)


def test_core_busy_time_counts_all_but_idle(tmp_path: Path) -> None:
    table = tmp_path / "stat"
    table.write_text("cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 100 1 50 1000 70 3 4 2 0 0\ncpu11 7 7 7 7 7 7 7 7 0 0\n")
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
