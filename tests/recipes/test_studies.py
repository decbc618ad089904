"""The runner of studies: what a step's time is, whose ratio is printed, and that every claim can be started."""

import shlex
from pathlib import Path

import pytest

from _hooks import HOOKS
from _options import parse_arguments
from lab.analysis import MeteredStep
from studies import peer, run
from studies.claims import CLAIMS, Claim, Way, every
from studies.run import Trained, as_markdown, batch_s, same_losses, summarize

PLAIN = Way("--hook none", warm_up=0)


def log(*, begin_s: float, step_s: float, steps: int) -> list[MeteredStep]:
    ends = [begin_s + number * step_s for number in range(steps + 1)]
    return [MeteredStep(number, *ends[number : number + 2]) for number in range(steps)]


def test_a_lone_job_takes_the_mean_of_its_steps() -> None:
    accumulated = Way("--accumulate 4", warm_up=1, batches=4)
    assert batch_s([log(begin_s=3.0, step_s=2.0, steps=4)], accumulated) == pytest.approx(0.5)


def test_siblings_are_timed_while_both_train() -> None:
    """One begins later and ends later; in between they make three steps in two seconds."""
    first, second = log(begin_s=0.0, step_s=1.0, steps=10), log(begin_s=2.5, step_s=2.0, steps=10)
    assert batch_s([first, second], PLAIN) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="expected jobs that train at the same time"):
        batch_s([log(begin_s=0.0, step_s=1.0, steps=2), log(begin_s=5.0, step_s=1.0, steps=2)], PLAIN)


def test_losses_are_compared_as_long_as_both_train() -> None:
    expected, near = {"a": [[2.0, 1.5], [2.0]]}, {"a": [[2.0, 1.501], [2.0]]}
    assert same_losses(expected, {"a": [[2.0, 1.5, 1.2], [2.0]]}, 0.0)
    assert same_losses(expected, near, 1e-2)
    assert not same_losses(expected, near, 0.0)
    assert not same_losses(expected, {"a": [[2.0, 1.5], [1.0]]}, 0.0)


def test_ratios_are_of_one_repeat_and_over_the_best_of_the_plain_ways() -> None:
    ways = {"ddp": PLAIN, "ddp, fine": PLAIN, "ours": PLAIN}
    claim = Claim("", ways, ("tiny",), against=("ddp", "ddp, fine"), limit=every(1))
    steps_s = [(4.0, 3.0, 2.0), (8.0, 6.0, 3.0), (4.0, 3.0, 1.0)]
    runs = [
        {name: Trained(step_s, 1.0, 1e6, {}) for name, step_s in zip(ways, each, strict=True)}
        for each in steps_s
    ]
    row = summarize(claim, runs, rate_mbit=4.0, compute_s=1.0)
    assert row["over"] == "ddp, fine"
    assert row["factor"]["ours"] == 2.0
    assert (row["n_s"], row["m_s"], row["bound"]) == (3.0, 2.0, 1.5)
    table = as_markdown([{**row, "preset": "tiny", "said": {"ours": 1.9}}])
    assert "| 2.00 (1.33 of the bound), said 1.90 |" in table


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_has_a_row_and_its_ways_can_be_started(name: str) -> None:
    """C, N, M and bytes are of its first way, whose job must therefore have the counters for itself."""
    claim = CLAIMS[name]
    runs = [{way: Trained(2.0, 1.0, 1e6, {}) for way in claim.ways}]
    row = summarize(claim, runs, rate_mbit=8.0, compute_s=1.0)
    assert row["m_s"] == 1.0
    assert f"| {next(iter(claim.ways))} 1.000" in as_markdown([{**row, "preset": "tiny", "said": None}])
    assert set(claim.exact) | set(claim.against) <= claim.ways.keys()
    for way in claim.ways.values():
        words = f"{run.TRAINING} --preset tiny {claim.arguments} {way.arguments}"
        assert (run.RECIPES / way.script).exists()
        args = parse_arguments(shlex.split(words), HOOKS)
        assert args.warmup_steps > 2 * (way.warm_up + claim.steps), (
            "the rate would depend on the number of steps"
        )


def test_a_claim_that_needs_a_checkout_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert peer.HOOKS is HOOKS
    with pytest.raises(SystemExit):
        run.main(["--claim", "kfac", "--out", str(tmp_path)])
    assert "expected KFAC_PYTORCH in the environment" in capsys.readouterr().err
