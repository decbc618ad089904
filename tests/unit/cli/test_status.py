"""`crossover-ddp status` on jobs that take turns."""

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from crossover_ddp import cli
from crossover_ddp._turns.rules import Mode
from crossover_ddp._turns.view import look
from crossover_ddp.cli import status as cli_status
from crossover_ddp.cli.status import HEAD, rows
from tests.harness.waiting import eventually
from tests.unit.turns.mutexes import DEVICE, Join, Make, acquire_in, join_at, segment_of


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_status, "_INTERVAL_S", 0.1)


def test_the_holder_computes_and_the_next_one_queues(
    make: Make, group: str, threads: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*keys: str) -> set[tuple[str, ...]]:
        assert cli.main(["status", "--json"]) in (0, 1)
        rows = json.loads(capsys.readouterr().out)
        return {tuple(row[key] for key in keys) for row in rows if row["group"] == group}

    holder, waiting, resting = make(), make(), make()
    names = [f"{mutex.job:x}"[:8] for mutex in (holder, waiting, resting)]
    holder.acquire()
    future = acquire_in(threads, waiting)
    log = segment_of(group).with_suffix(".log")
    assert eventually(lambda: log.stat().st_size == 2)
    states = zip(names, ("computes", "queues", "between turns"), strict=True)
    assert shown("job", "state") == {*states}
    assert shown("device", "PIDs", "ranks") == {(DEVICE, str(os.getpid()), "0 of 1")}
    holder.release()
    future.result(60.0)
    assert (names[1], "computes") in shown("job", "state")


def test_rates_are_those_of_the_turns_taken(join: Join, tmp_path: Path) -> None:
    segment = join()
    before = look(str(tmp_path))
    segment.publish(turns=30)
    after = look(str(tmp_path))._replace(at_ns=before.at_ns + 4 * 10**9)
    (row,) = (dict(zip(HEAD, row, strict=True)) for row in rows(before, after))
    assert row["turns/s"] == "7.5"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on the jobs in the test's directory. Return its exit code and output."""

    def running(*, prometheus: bool = False) -> tuple[int, str]:
        words = argparse.Namespace(json=False, prometheus=prometheus)
        return cli_status.run(words, base=str(tmp_path)), capsys.readouterr().out

    return running


def test_the_result_of_a_trial_is_shown(join: Join, run: Run) -> None:
    segment = join()
    for changes, shown in (
        ({"mode": Mode.TRYING_TURNS}, "between turns, trial"),
        ({"mode": Mode.SIDE_BY_SIDE}, "side by side "),
        ({"turns_s": 0.0107, "side_s": 0.01, "pairs": 2}, "side by side: turns were 7 % slower"),
        ({"side_s": 0.0}, "side by side "),
    ):
        segment.publish(**changes)
        assert shown in run()[1]


def test_the_mode_of_a_job_is_shown_on_all_its_devices(join: Join, run: Run) -> None:
    lead = join(job=3)
    join(job=3, device="dev1")
    lead.publish(mode=Mode.SIDE_BY_SIDE)
    assert run()[1].count("side by side ") == 2
    figures = scraped(run(prometheus=True)[1])
    assert [figures["crossover_side_by_side", each, "3"] for each in (DEVICE, "dev1")] == [1.0, 1.0]


def scraped(text: str) -> dict[tuple[str, str, str], float]:
    """Parse a page with Prometheus' own parser. Return the figures by name, device and job."""
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {(s.name, s.labels["device"], s.labels["job"]): s.value for s in samples}


def test_prometheus_parses_the_figures_of_living_and_dead_jobs(join: Join, run: Run) -> None:
    device = 'card "0" \\ of node'
    waiting = join(device=device)
    holder = join(job=2)
    holder.publish(started=holder.draw_turn())
    waiting.publish(queued=waiting.draw_turn(), turns=7, mode=Mode.SIDE_BY_SIDE)
    code, text = run(prometheus=True)
    found = scraped(text)
    assert code == 0
    assert (found["crossover_computes", DEVICE, "2"], found["crossover_queues", DEVICE, "2"]) == (
        1,
        0,
    )
    holder.forget()
    assert run()[1].splitlines()[-1].split()[1:4] == [DEVICE, "2", "gone"]
    ended = scraped(run(prometheus=True)[1])
    assert ended["crossover_computes", DEVICE, "2"] == ended["crossover_alive", DEVICE, "2"] == 0
    own = {
        name.removeprefix("crossover_"): ended[name, device, "1"]
        for name, _, job in ended
        if job == "1"
    }
    figures = {
        "turns_total": 7,
        "computes": 0,
        "queues": 1,
        "side_by_side": 1,
        "alive": 1,
        "processes": 1,
    }
    lease_s = found["crossover_lease_seconds", device, "1"]
    assert own == {**figures, "lease_seconds": pytest.approx(lease_s)}


def test_the_exit_code_reports_missing_jobs_and_malformed_files(tmp_path: Path, run: Run) -> None:
    code, output = run()
    assert (code, "no jobs take turns here" in output, [*tmp_path.iterdir()]) == (1, True, [])
    segment = join_at(tmp_path)
    assert run()[0] == 0
    os.truncate(segment.path, 5)
    assert run()[0] == 1
    segment.forget()
