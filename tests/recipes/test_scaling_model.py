"""The scaling model: its inputs are the true layers, its outputs stand in the docs, its claims follow from them."""

import json
import sys
from pathlib import Path

import pytest

from studies import scaling_model
from studies.scaling_model import OURS, OURS_HIDDEN, Phases
from tests.recipes import RECIPES

DOCS = RECIPES.parent / "docs" / "scaling.md"


def by_name(rate_gbit: float | None = None) -> dict[str, Phases]:
    return {phases.name: phases for phases in scaling_model.designs(rate_gbit=rate_gbit)}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the script in this process: a new one imports torch anew, for seconds."""
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", *arguments])
    scaling_model.main()


def test_the_script_prints_what_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "scaling.png"
    run(monkeypatch, "--json", "--picture", str(picture))
    assert scaling_model.markdown(json.loads(capsys.readouterr().out)) in DOCS.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    run(monkeypatch)
    assert "DP-KFAC" in capsys.readouterr().out


def test_the_layers_are_those_of_resnet50() -> None:
    layers = {layer.cost.name: layer for layer in scaling_model.layers_of("resnet50")}
    assert len(layers) == 54
    first, last = layers["conv1"], layers["fc"]
    assert (first.cost.a_dim, first.cost.g_dim) == (3 * 7 * 7, 64)
    assert first.factor_work == 112 * 112 * (147**2 + 64**2)
    assert (last.cost.a_dim, last.cost.g_dim) == (2048 + 1, 1000)
    assert last.cost.gradient_bytes == 4 * (2048 * 1000 + 1000)
    assert last.cost.factor_bytes == 4 * (2049 * 2050 // 2 + 1000 * 1001 // 2)


def test_spd_kfac_is_its_published_phases_and_nothing_is_fitted_to_the_others() -> None:
    found = by_name()
    assert found["SPD-KFAC"].step_s() == pytest.approx(0.132 + 0.065 + 0.212 + 0.098 + 0.105 + 0.064)
    published = scaling_model.PUBLISHED_S["resnet50"]
    assert found["MPD-KFAC"].step_s() == pytest.approx(published["MPD-KFAC"], rel=0.05)
    assert found["D-KFAC"].step_s() == pytest.approx(published["D-KFAC"], rel=0.25)


def test_both_exchanges_tell_of_about_the_same_network() -> None:
    device = scaling_model.device_of_constants()
    assert device.gradient_gbit == pytest.approx(device.factor_gbit, rel=0.2)


def test_what_the_docs_say_of_the_intervals() -> None:
    found = by_name()
    dp = found["DP-KFAC"]
    assert dp.step_s() < found[OURS_HIDDEN].step_s() < found[OURS].step_s() < found["SPD-KFAC"].step_s()
    assert [found[OURS].step_s(n) < dp.step_s(n) for n in (12, 13)] == [False, True]
    assert [found[OURS_HIDDEN].step_s(n) < dp.step_s(n) for n in (9, 10)] == [False, True]


def test_what_the_docs_say_of_fast_networks() -> None:
    found = by_name(100)
    assert found[OURS].step_s() == pytest.approx(found["SPD-KFAC"].step_s(), abs=1e-3)
    faster = by_name(400)
    assert faster[OURS].step_s() == pytest.approx(faster["SPD-KFAC"].step_s(), rel=0.02)


@pytest.mark.parametrize("rate_gbit", [1, 10, 25])
def test_this_design_beats_all_that_exchange_factors_on_slower_networks(rate_gbit: float) -> None:
    found = by_name(rate_gbit)
    assert found[OURS].step_s() < min(found[name].step_s() for name in ("D-KFAC", "MPD-KFAC", "SPD-KFAC"))


def test_an_overhead_longer_than_all_inversions_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--overhead-ms", "50")
    assert ended.value.code == 2
    assert "expected costs that are finite and >= 0" in capsys.readouterr().err
