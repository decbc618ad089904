"""Figures of made-up step logs and spans: shares of devices, hand-overs, studies, the picture."""

import json
import shlex
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import lab
from _hooks import HOOKS
from _options import parse_arguments
from lab import command
from lab.analysis import MeteredStep, bound, job_figures, rate_for
from lab.picture import draw, middle_window
from lab.spans import TimelineSpan, handovers_s, occupancy
from studies import peer, run
from studies.claims import CLAIMS, Claim, Way, every
from studies.run import Trained, as_markdown, batch_s, same_losses, summarize


def span(job: str, kind: str, begin_s: float, end_s: float, *, rank: int = 0) -> TimelineSpan:
    return TimelineSpan(job, rank, f"device{rank}", kind, begin_s, end_s)


def siblings(turns: int = 10) -> list[TimelineSpan]:
    """Two jobs that alternate: 1 s of computation, 0.5 s of exchange, 0.5 s of waiting."""
    parts = {"compute": (0.0, 0.999), "exchange": (0.999, 1.5), "wait": (1.5, 2.0)}
    spans = [
        span("ab"[turn % 2], kind, turn + begin_s, turn + end_s, rank=rank)
        for turn in range(2 * turns)
        for rank in range(2)
        for kind, (begin_s, end_s) in parts.items()
    ]
    return sorted(spans, key=lambda each: each.begin_s)


def steps(lengths_s: Sequence[float], begin_s: float = 0.0, **figures: Any) -> list[MeteredStep]:
    ends_s = accumulate(lengths_s, initial=begin_s)
    return [MeteredStep(number, *times, **figures) for number, times in enumerate(pairwise(ends_s))]


@pytest.mark.parametrize(
    ("busy_s", "step_s", "wire_s", "expected"),
    [
        (1.0, 1.5, 0.6, 1.5),  # 1 + N/C while the device is the limit
        (1.0, 2.0, 0.9, 2.0),  # N = C: at most twice as fast
        (0.5, 2.0, 0.9, 2.0),  # C < N: each job's own step is the limit
        (1.0, 2.0, 2.0, 1.0),  # a full link leaves nothing to gain
        (1.0, 1.5, 1.25, 1.2),  # 2M > 2C
    ],
)
def test_bound_of_two_equal_jobs(
    busy_s: float, step_s: float, wire_s: float, expected: float
) -> None:
    assert bound([(busy_s, step_s, wire_s)] * 2) == pytest.approx(expected)


def test_rate_for_gives_the_wanted_ratio_of_wire_to_compute() -> None:
    assert rate_for(0.5, compute_s=0.2, wire_bytes=1e6) == pytest.approx(80)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: bound([]), r"expected \(C, T1, M\) with T1 > 0"),
        (lambda: bound([(1.0, 0.0, 1.0)]), r"expected \(C, T1, M\) with T1 > 0"),
        (lambda: bound([(1.0, float("nan"), 1.0)]), r"expected \(C, T1, M\) with T1 > 0"),
        (
            lambda: rate_for(0.5, 0.0, 1e6),
            r"expected a ratio, computation and traffic > 0, got ratio=0\.5",
        ),
        (lambda: lab.load_run(Path("nowhere")), "expected a run of the lab with lab.json"),
        (lambda: draw([], Path("x.svg")), "expected spans, got none"),
    ],
)
def test_wrong_figures_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        made()


def test_figures_of_a_job_alone() -> None:
    log = steps([9.0, 5.0, 3.0] + [1.5] * 10, core_busy_s=1.0, wire_bytes=12_500_000)
    slower = steps([9.0, 5.0, 3.0] + [1.5] * 10, core_busy_s=1.25, wire_bytes=12_500_000)
    exchanges = [span("a", "exchange", 17 + 1.5 * i + 1, 17 + 1.5 * i + 1.5) for i in range(10)]
    exchanges.append(span("a", "exchange", 1.0, 9.0))  # in the warm-up: left out
    figures = job_figures("a", {0: log, 1: slower}, exchanges, rate_mbit=200, alone=True)
    assert (figures.steps, figures.ranks) == (13, 2)
    assert figures.step_s == pytest.approx(1.5)
    assert figures.busy_s == pytest.approx(1.25)  # the device with the most to do
    assert figures.exposed_s == pytest.approx(0.5)
    assert figures.wire_s == pytest.approx(0.5)
    assert figures.makespan_s == pytest.approx(32)
    assert {
        "C_s",
        "N_s",
        "M_s",
        "wire_bytes_per_step",
        "turns",
        "handover",
    } <= figures.as_json().keys()


def test_beside_a_sibling_computation_comes_from_spans_and_wire_bytes_are_unknown() -> None:
    log = steps([2.0] * 10, core_busy_s=1.99, wire_bytes=100)
    figures = job_figures("a", {0: log, 1: log}, siblings(), rate_mbit=200, alone=False)
    assert figures.busy_s == pytest.approx(0.999)
    assert figures.exposed_s == pytest.approx(0.501)
    assert (figures.wire_bytes, figures.wire_s) == (None, None)
    assert figures.turns == 10
    assert figures.spans["wait"].count == 20
    assert figures.handover.median_s == pytest.approx(0.001)


def test_a_run_reports_the_use_of_links_and_devices_and_is_drawn(tmp_path: Path) -> None:
    record = {"nodes": 2, "rate_mbit": 200.0, "mtu": 9000, "devices": ["device0"], "dropped": 0}
    record |= {
        "jobs": {"a": {}, "b": {}},
        "begin_s": 0.0,
        "end_s": 20.0,
        "sent_bytes": [250_000_000, 0],
    }
    run = lab.Run(tmp_path, {job: {0: steps([2.0] * 5)} for job in "ab"}, siblings(), record)
    result = json.loads(json.dumps(run.as_json()))
    assert result["jobs"]["a"]["turns"] == 10
    assert result["jobs"]["a"]["steps"] == 5
    assert result["links"][0]["utilisation"] == pytest.approx(0.5)
    assert result["devices"]["device0"]["one"] == pytest.approx(0.999, abs=2e-3)
    assert lab.draw_run(run).read_bytes().startswith(b"\x89PNG")


# Writes a log as train.py, killed within a record.
STEPS = """
import json, os
path = os.path.join(os.environ["CROSSOVER_LAB_DIR"], "rank" + os.environ["RANK"] + ".jsonl")
counted = dict(event="step", core_busy_s=0.5, wire_bytes=0)
with open(path, "w") as log:
    for i in range(9):
        log.write(json.dumps(dict(counted, step=i, begin_s=i, end_s=i + 1)) + chr(10))
    log.write("{")
"""


def test_command_line_from_job_to_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [word for name in "ab" for word in ("--job", f"{name}: python -c '{STEPS}'")]
    arguments = ["run", "--unshaped", "--out", str(tmp_path), *jobs]
    assert command.main([*arguments, "--json", "--sequential"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert [list(run["jobs"]) for run in result["runs"]] == [["a"], ["b"]]
    assert result["runs"][0]["jobs"]["a"]["C_s"] == 0.5
    assert result["one_after_the_other"] == {"makespan_s": 18.0, "bound": 2.0}
    assert command.main(arguments) == 0
    assert "a" in capsys.readouterr().out
    assert command.main(["run", "--unshaped", "--job", "python train.py"]) == 1
    assert "expected a job as 'name: command'" in capsys.readouterr().err


def test_rates_are_parsed() -> None:
    for text, mbit in (("200mbit", 200), ("1gbit", 1000), ("2.5", 2.5), ("500 Kbit", 0.5)):
        assert command.parse_rate(text) == mbit
    for text in ("", "fast", "200 mbyte", "-5mbit"):
        with pytest.raises(SystemExit):
            command.parse_arguments(["link", "--rate", text])


def test_a_handover_counts_only_when_the_job_had_to_wait_for_the_sibling() -> None:
    given_back = span("b", "compute", 0.0, 2.0)
    elsewhere = span("b", "compute", 0.0, 2.4, rank=1)
    waited = span("a", "wait", 1.0, 2.1)
    assert handovers_s([given_back, elsewhere, waited], "a") == [pytest.approx(0.1)]
    late = span("a", "wait", 2.05, 2.1)  # the device was free already
    assert handovers_s([given_back, late], "a") == []
    assert handovers_s([given_back, waited], "b") == []


def test_shares_are_of_the_time_in_which_all_jobs_were_active() -> None:
    active = [span("b", "exchange", 2, 3), span("a", "compute", 0, 4), span("b", "compute", 3, 6)]
    spans = [*active, span("a", "exchange", 4, 10), span("b", "exchange", 6, 9)]
    assert occupancy(spans, "device0") == pytest.approx(
        {"idle": 3 / 7, "one": 3 / 7, "several": 1 / 7}
    )
    assert occupancy(spans, "device0", window_s=(3, 5)) == {"idle": 0.0, "one": 0.5, "several": 0.5}
    assert occupancy(spans, "device9") == {"idle": 1.0, "one": 0.0, "several": 0.0}


def test_a_long_run_without_siblings_is_quick() -> None:
    """Quadratic work would take minutes, and the time limit of a test is one."""
    alone = [each for each in siblings(10_000) if each.job == "a"]
    assert handovers_s([span("b", "compute", 0.0, 0.5), *alone], "a") == []


def test_the_picture_has_names_and_shares_of_the_middle(tmp_path: Path) -> None:
    path = draw(siblings(10), tmp_path / "deep" / "x.svg", title="title")
    # Matplotlib draws glyphs, and writes the texts in comments.
    written = "".join(path.read_text().split("<!--")[1:])
    names = ("device0", "device1", "job a", "job b", "title", "waits for its turn")
    assert all(f" {each}" in written for each in (*names, "busy 100%", "idle 0%"))
    ElementTree.parse(path)
    assert middle_window(siblings(100), steps=8) == (92.0, 108.0)
    assert middle_window(siblings(3), steps=8) == (0.0, 7.0)


PLAIN = Way("--hook none", warm_up=0)


def test_a_lone_job_takes_the_mean_of_its_steps() -> None:
    accumulated = Way("--accumulate 4", warm_up=1, batches=4)
    assert batch_s([steps([2.0] * 4, 3.0)], accumulated) == pytest.approx(0.5)


def test_siblings_are_timed_while_both_train() -> None:
    """One begins later and ends later. In between they make three steps in two seconds."""
    first, second = steps([1.0] * 10), steps([2.0] * 10, 2.5)
    assert batch_s([first, second], PLAIN) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="expected jobs that train at the same time"):
        batch_s([steps([1.0] * 2), steps([1.0] * 2, 5.0)], PLAIN)


def test_losses_are_compared_as_long_as_both_train() -> None:
    expected, near = {"a": [[2.0, 1.5], [2.0]]}, {"a": [[2.0, 1.501], [2.0]]}
    assert same_losses(expected, {"a": [[2.0, 1.5, 1.2], [2.0]]}, 0.0)
    assert same_losses(expected, near, 1e-2)
    assert not same_losses(expected, near, 0.0)
    assert same_losses(expected, {"a": [[2.0, 9.0], [2.0]]}, steps=1)
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
    """C, N, M and bytes are those of its first way, which must therefore have one job."""
    claim = CLAIMS[name]
    runs = [{way: Trained(2.0, 1.0, 1e6, {}) for way in claim.ways}]
    row = summarize(claim, runs, rate_mbit=8.0, compute_s=1.0)
    assert row["m_s"] == 1.0
    assert f"| {next(iter(claim.ways))} 1.000" in as_markdown(
        [{**row, "preset": "tiny", "said": None}]
    )
    assert set(claim.exact) | set(claim.against) <= claim.ways.keys()
    for way in claim.ways.values():
        words = f"{run.TRAINING} --preset tiny {claim.arguments} {way.arguments}"
        assert (run.RECIPES / way.script).exists()
        args = parse_arguments(shlex.split(words), HOOKS)
        assert args.warmup_steps > 2 * (way.warm_up + claim.steps), (
            "the rate would depend on the number of steps"
        )


def test_a_claim_that_needs_a_checkout_is_refused_without_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert peer.HOOKS is HOOKS
    with pytest.raises(SystemExit):
        run.main(["--claim", "kfac", "--out", str(tmp_path)])
    assert "expected KFAC_PYTORCH in the environment" in capsys.readouterr().err
