"""The recipes that compare optimizers on digits: real ranks, a few steps, and whether their figures are real."""

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks, single_process_group
from tests.harness.groups import free_port

WORLD = 2
Found = dict[str, Any]


def call_main(rank: int, world_size: int, script: str, arguments: Sequence[str]) -> None:
    """Run a script's own main in a rank of the harness, which has torch imported already."""
    importlib.import_module(f"studies.{script}").main(arguments)


def call(script: str, *arguments: str, world_size: int = 1) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    environment = [{**address, "RANK": str(rank)} for rank in range(world_size)]
    # A rank by itself is told nothing, as without torchrun.
    run_ranks(
        call_main,
        world_size,
        args=(script, arguments),
        backend=None,
        environment=environment if world_size > 1 else None,
    )


def read(path: Path) -> Found:
    found: Found = json.loads(path.read_text())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return found


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of the autoencoder with all optimizers, and hardly any steps."""
    out = tmp_path_factory.mktemp("autoencoder")
    call("optimizer_study", "--configs", "2", "--seeds", "1", "--budget", "4", "--out", str(out))
    return out / "study.json"


def trials_of(found: Found, name: str) -> list[Found]:
    return [trial for trial in found["trials"] if trial["name"] == name]


def test_every_optimizer_gets_the_same_number_of_configurations(autoencoder: Path) -> None:
    found = read(autoencoder)
    names = [result["optimizer"] for result in found["results"]]
    assert names == ["adam", "sgd", "kfac", "kfac 10/100"]
    for name in names:
        trials = trials_of(found, name)
        assert [trial["config"] for trial in trials] == [0, 1]
        assert len({json.dumps(trial["options"]) for trial in trials}) == 2


def test_the_file_holds_twelve_configurations_and_their_seeds(tmp_path: Path) -> None:
    call("optimizer_study", "--only", "adam", "sgd", "--seeds", "2", "--budget", "1", "--out", str(tmp_path))
    trials = read(tmp_path / "study.json")["trials"]
    expected = [(name, config, seed) for name in ("adam", "sgd") for config in range(12) for seed in range(2)]
    assert [(trial["name"], trial["config"], trial["seed"]) for trial in trials] == expected


@pytest.mark.parametrize("study", ["autoencoder", "cnn"])
def test_all_variants_of_kfac_try_the_same_twelve_configurations(study: str) -> None:
    from studies.optimizer_study import contenders

    found = {each.name: each.choices for each in contenders(study, 12, peer=True)}
    assert {len(choices) for choices in found.values()} == {12}
    for name in ("kfac", "kfac-pytorch"):
        for often, seldom in zip(found[name], found[f"{name} 10/100"], strict=True):
            periods = {"factor_update_steps": 10, "inv_update_steps": 100}
            assert often.optimizer == seldom.optimizer == name
            assert {**often.options, **periods} == seldom.options
            assert (often.options["factor_update_steps"], often.options["inv_update_steps"]) == (1, 1)


def test_the_target_is_adams_own_late_loss(autoencoder: Path) -> None:
    found = read(autoencoder)
    trials = trials_of(found, "adam")
    assert all(len(trial["values"]) == 4 + 1 for trial in trials)
    best = min(trials, key=lambda trial: trial["values"][-1])
    assert found["target"] == pytest.approx(best["values"][round(0.9 * 4)], rel=1e-5)


def test_results_follow_from_the_curves(autoencoder: Path) -> None:
    found = read(autoencoder)
    for result in found["results"]:
        firsts = [
            next(
                (step for step, loss in enumerate(trial["values"]) if loss <= found["target"] * (1 + 1e-6)),
                None,
            )
            for trial in trials_of(found, result["optimizer"])
        ]
        met = [first for first in firsts if first is not None]
        assert result["met"] == len(met)
        assert result["median"] == (min(met) if met else None)


def test_losses_begin_where_an_ignorant_model_is(autoencoder: Path) -> None:
    for trial in read(autoencoder)["trials"]:
        assert trial["values"][0] == pytest.approx(64 * math.log(2), rel=0.05)


def test_the_study_of_the_classifier_counts_in_quarters_of_epochs(tmp_path: Path) -> None:
    arguments = ("--study", "cnn", "--smoke", "--only", "sgd", "kfac", "--out", str(tmp_path))
    call("optimizer_study", *arguments, world_size=WORLD)
    found = read(tmp_path / "study.json")
    assert (found["world_size"], found["unit"], found["target"]) == (WORLD, "epochs", 0.97)
    trial = next(trial for trial in found["trials"] if trial["name"] == "sgd")
    assert [round(22 * moment) for moment in trial["at"]] == [6, 11, 16, 22]
    assert all(360 * value == pytest.approx(round(360 * value), abs=1e-2) for value in trial["values"])


def test_second_order_draws_all_curves_at_full_length(tmp_path: Path) -> None:
    call("second_order", "--steps", "4", "--out", str(tmp_path), world_size=WORLD)
    found = read(tmp_path / "second_order.json")
    curves = found["curves"]
    assert [(curve["model"], curve["optimizer"]) for curve in curves] == [
        (model, optimizer) for model in ("cnn", "vit") for optimizer in ("sgd", "adamw", "kfac")
    ]
    for curve in curves:
        assert [len(curve[quantity]) for quantity in ("losses", "seconds", "megabytes")] == [4, 4, 4]
        assert curve["seconds"] == sorted(curve["seconds"])
        assert curve["megabytes"] == sorted(curve["megabytes"])
        assert 0 <= curve["accuracy"] <= 1
    for model in ("cnn", "vit"):
        # The same weights and the same images: optimizers do not differ before they have done a step.
        firsts = [curve["losses"][0] for curve in curves if curve["model"] == model]
        assert firsts == [firsts[0]] * 3
        assert len({curve["losses"][3] for curve in curves if curve["model"] == model}) == 3


def test_the_best_of_a_study_can_be_run_again(autoencoder: Path, tmp_path: Path) -> None:
    arguments = ("--model", "autoencoder", "--from-study", str(autoencoder), "--out", str(tmp_path))
    call("second_order", *arguments)
    found, study = read(tmp_path / "second_order.json"), read(autoencoder)
    assert found["target"] == study["target"]
    for curve, result in zip(found["curves"], study["results"], strict=True):
        assert curve["optimizer"] == result["optimizer"]
        assert curve["choice"]["options"] == result["choice"]["options"]
        (trial,) = (t for t in trials_of(study, result["optimizer"]) if t["config"] == result["config"])
        length = min(len(curve["losses"]), len(trial["values"]))
        assert curve["losses"][:length] == pytest.approx(trial["values"][:length], rel=1e-4)
        assert curve["to_target"]["steps"] == result["median"]


def test_ranks_divide_the_images_among_them() -> None:
    from studies._digits import Choice, Training, make_problem

    with single_process_group():
        training = Training(make_problem("cnn"), Choice("sgd", {"lr": 0.1}), seed=0)
        seen = []
        for _ in range(training.steps_per_epoch):
            seen += training._next_images().tolist()
            training.step()
        assert len(seen) == len(set(seen)) == training.steps_per_epoch * 32
        assert training.epochs == 1.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_computed_bytes_are_those_of_the_split(world_size: int) -> None:
    from studies._digits import computed_bytes

    model = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Conv2d(2, 5, 3, bias=False)
    )
    gradients, factors = 4 * (8 + 4 + 90), 4 * (10 + 3 + 171 + 15 + 4)
    assert computed_bytes(model, world_size, with_factors=False) == gradients
    assert computed_bytes(model, world_size, with_factors=True) == gradients + factors / 2


def test_a_named_interface_counts_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from studies._digits import WireMeter

    counter = tmp_path / "link0" / "statistics" / "tx_bytes"
    counter.parent.mkdir(parents=True)
    counter.write_text("1234\n")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "link0")
    assert (WireMeter(tmp_path).source, WireMeter(tmp_path).read()) == ("counted by link0", 1234)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert WireMeter(tmp_path).source == "computed"


def test_a_running_mean_forgets_and_is_not_biased() -> None:
    from studies.second_order import smooth

    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([0.0, 1.0], share=0.5) == pytest.approx([0.0, 1 / 1.5])


def test_a_study_of_another_model_is_refused(autoencoder: Path) -> None:
    from studies.second_order import main

    with pytest.raises(ValueError, match="expected --model autoencoder"):
        main(["--model", "cnn", "--from-study", str(autoencoder)])
    assert not dist.is_initialized()
