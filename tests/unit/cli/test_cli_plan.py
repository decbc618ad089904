"""``crossover-ddp plan``: its output, its files, and refused arguments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossover_ddp import cli
from crossover_ddp.pipeline import LayerProfile, Plan, Profile
from tests.harness import documents

ROOT = Path(__file__).resolve().parents[3]


def blocks() -> list[nn.Module]:
    return [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)]


class LastToken(nn.Module):
    def forward(self, hidden: torch.Tensor) -> Any:
        return hidden[:, -1], None


def words() -> list[nn.Module]:
    """Return a chain for tokens, on the meta device."""
    with torch.device("meta"):
        return [nn.Embedding(5, 8), nn.Linear(8, 8), LastToken(), nn.Linear(8, 5)]


def sequence() -> nn.Module:
    return nn.Sequential(*words())


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.two(self.one(x))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    Profile(tuple(LayerProfile(f"l{k}", 1.0, 2.0, 1e6, 1e6) for k in range(4))).save(
        tmp_path / "profile.json"
    )
    (tmp_path / "c.json").write_text(json.dumps({"devices": 2, "bandwidth_gbit": 1}))
    return tmp_path


def plan(files: Path, model: str, *more: str) -> int:
    return cli.main(
        ["plan", model, "--cluster", str(files / "c.json"), "--microbatches", "4", *more]
    )


def test_a_plan_is_printed_saved_and_exported(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = str(files / "profile.json")
    assert plan(files, profile, "--save", str(files / "plan.json")) == 0
    assert "4 micro-batches" in capsys.readouterr().out
    assert Plan.load(files / "plan.json").microbatches == 4
    assert plan(files, profile, "--csv", "--max-stages", "2") == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    assert rows[0].startswith("0F0")


def test_a_number_of_micro_batches_is_chosen_for_a_batch(
    files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--cluster", str(files / "c.json"), "--stages", "2", "--runtime", "torch"]
    model = f"{__name__}:blocks"
    assert cli.main(["plan", model, "--input", "8,8", "--microbatches", "2,4", *options]) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert first.startswith(("2 stages, 2 micro-batches", "2 stages, 4 micro-batches"))
    assert cli.main(["plan", model, "--input", "2,8", "--microbatches", "2,3", *options]) == 1
    assert "that divide the batch of 4, got 3" in capfd.readouterr().err
    profile = str(files / "profile.json")
    assert cli.main(["plan", profile, "--microbatches", "2,4", *options]) == 1
    assert "one number of micro-batches for a saved profile" in capfd.readouterr().err


def test_an_importable_chain_is_measured(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = files / "measured.json"
    assert plan(files, f"{__name__}:blocks", "--input", "2,8", "--save-profile", str(found)) == 0
    assert [layer.shape for layer in Profile.load(found).layers] == [(2, 8), (2, 8), (2, 4)]


@pytest.mark.parametrize("model", ["words", "sequence"])
def test_a_chain_for_tokens_is_measured_in_another_dtype(
    model: str, files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = files / "measured.json"
    more = ["--tokens", "2,7", "--dtype", "bfloat16", "--save-profile", str(found)]
    assert plan(files, f"{__name__}:{model}", *more) == 0
    profile = Profile.load(found)
    assert [layer.shape for layer in profile.layers] == [(2, 7, 8), (2, 7, 8), (2, 8), (2, 5)]
    assert {layer.dtype for layer in profile.layers} == {"bfloat16"}
    assert "layer 4 of 4, 3: forward" in capfd.readouterr().err


def test_autocast_changes_the_outputs(files: Path) -> None:
    found = files / "measured.json"
    more = ["--input", "2,8", "--autocast", "bfloat16", "--save-profile", str(found)]
    assert plan(files, f"{__name__}:blocks", *more) == 0
    profile = Profile.load(found)
    assert {layer.dtype for layer in profile.layers} == {"bfloat16"}
    assert profile.layers[0].parameter_bytes == 4 * 72


@pytest.mark.fake_cuda
def test_layers_are_measured_on_a_gpu(files: Path) -> None:
    found = files / "measured.json"
    more = ["--input", "2,8", "--device", "cuda", "--save-profile", str(found)]
    assert plan(files, f"{__name__}:blocks", *more) == 0
    assert len(Profile.load(found)) == 3


def test_a_transformer_is_a_chain_as_documented() -> None:
    timm = pytest.importorskip("timm", reason="timm is in the extra 'recipes'")
    source = documents.blocks((ROOT / "docs" / "pipeline.md").read_text(), "python")[-1]
    names: dict[str, Any] = {"__name__": "myvit"}
    exec(compile(source, "pipeline.md", "exec"), names)
    torch.manual_seed(0)
    chain = nn.Sequential(*names["blocks"]())
    torch.manual_seed(0)
    model, images = timm.create_model("vit_tiny_patch16_224"), torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(chain.eval()(images), model.eval()(images))


@pytest.mark.parametrize(
    ("model", "more", "code", "message"),
    [
        (f"{__name__}:Skipping", ["--input", "2,8"], 1, "and takes (2, 8), got"),
        (f"{__name__}:nothing", [], 1, "expected a profile (a .json file), timm:NAME"),
        (f"{__name__}:blocks", ["--input", "2,9"], 1, "got layer '0', which refuses shape=(2, 9)"),
        (
            f"{__name__}:blocks",
            ["--tokens", "2,8"],
            1,
            "expected a model with an nn.Embedding, got",
        ),
        (f"{__name__}:blocks", ["--cluster", "measure"], 2, "expected ranks to measure the links"),
        ("missing.json", [], 2, "missing.json"),
        ("c.json", [], 1, "expected a profile, got another document"),
        ("profile.json", ["--cluster", __file__], 1, "expected JSON in"),
        ("profile.json", ["--max-stages", "9"], 1, "expected at least as many layers as stages"),
    ],
)
def test_wrong_models_and_clusters_are_refused_with_a_message(
    model: str,
    more: list[str],
    code: int,
    message: str,
    files: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = str(files / model) if model.endswith(".json") else model
    assert plan(files, model, *more) == code
    assert message in capfd.readouterr().err


def test_a_gpu_that_is_missing_is_refused(
    files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan(files, str(files / "profile.json"), "--device", "cuda") == 1
    assert "expected a CUDA device, got none; use --device cpu" in capfd.readouterr().err


@pytest.mark.parametrize("more", [["--tokens", "4"], ["--tokens", "4,8", "--input", "4,8"]])
def test_wrong_tokens_are_refused(more: list[str], files: Path) -> None:
    with pytest.raises(SystemExit):
        plan(files, "profile.json", *more)
