"""`crossover-ddp status` on jobs that really take turns, and that nothing notices it."""

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
from crossover_ddp._turns.view import Look, look
from crossover_ddp.cli import status as cli_status
from crossover_ddp.cli.status import HEAD, rows
from tests.harness.waiting import eventually
from tests.unit.turns.joined_segments import Join, Process, join_at
from tests.unit.turns.mutexes import DEVICE, Make, acquire_in, segment_of


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_status, "_INTERVAL_S", 0.1)


def shown(group: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    assert cli.main(["status", "--json"]) in (0, 1)
    return [row for row in json.loads(capsys.readouterr().out) if row["group"] == group]


def states(found: list[dict[str, str]]) -> dict[str, str]:
    return {row["job"]: row["state"] for row in found}


def test_the_holder_computes_and_the_next_one_queues(
    make: Make, group: str, threads: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    holder, waiting, resting = make(), make(), make()
    names = [f"{mutex.job:x}"[:8] for mutex in (holder, waiting, resting)]
    holder.acquire()
    future = acquire_in(threads, waiting)
    log = segment_of(group).with_suffix(".log")
    assert eventually(lambda: log.stat().st_size == 2)
    found = shown(group, capsys)
    assert states(found) == dict(zip(names, ("computes", "queues", "between turns"), strict=True))
    assert {(row["device"], row["PIDs"], row["ranks"]) for row in found} == {
        (DEVICE, str(os.getpid()), "0 of 1")
    }
    holder.release()
    future.result(60.0)
    assert states(shown(group, capsys))[names[1]] == "computes"
    waiting.release()
    assert set(states(shown(group, capsys)).values()) == {"between turns"}


def test_rates_are_those_of_the_turns_taken(make: Make, group: str) -> None:
    often, rarely = make(), make()
    before = look_at(group)
    for mutex in [often, often, often, rarely] * 10:
        with mutex:
            pass
    after = look_at(group)
    seconds = (after.at_ns - before.at_ns) / 1e9
    found = {row[2]: dict(zip(HEAD, row, strict=True)) for row in rows(before, after)}
    for mutex, turns, last in ((often, 30, 39), (rarely, 10, 40)):
        row = found[f"{mutex.job:x}"[:8]]
        assert (row["turns/s"], row["turn"]) == (f"{turns / seconds:.1f}", str(last))


def look_at(group: str) -> Look:
    seen = look()
    return seen._replace(places=tuple(each for each in seen.places if each.group == group))


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return the exit code and what is printed of the jobs below the test's directory."""

    def running(*, prometheus: bool = False) -> tuple[int, str]:
        words = argparse.Namespace(json=False, prometheus=prometheus)
        return cli_status.run(words, base=str(tmp_path)), capsys.readouterr().out

    return running


def test_what_a_trial_has_found_is_shown(join: Join, run: Run) -> None:
    segment = join()
    segment.publish(mode=Mode.TRYING_TURNS)
    assert "between turns, trial" in run()[1]
    segment.publish(mode=Mode.SIDE_BY_SIDE)
    assert "side by side " in run()[1]
    segment.publish(turns_s=0.0107, side_s=0.01, pairs=2)
    assert "side by side: turns were 7 % slower" in run()[1]
    segment.publish(side_s=0.0)
    assert "side by side " in run()[1]


def scraped(text: str) -> dict[tuple[str, str, str], float]:
    """Return what Prometheus' own parser makes of a page: by figure, device and job."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, s.labels["device"], s.labels["job"]): s.value for s in samples}


def test_prometheus_reads_who_computes_who_queues_and_who_is_gone(
    tmp_path: Path, join: Join, run: Run
) -> None:
    device = 'card "0" \\ of node'
    waiting = join(device=device)
    with Process(tmp_path, job=2) as holder:
        turn = holder.call("draw_turn")
        holder.call("publish", started=turn)
        waiting.publish(queued=waiting.draw_turn(), turns=7, mode=Mode.SIDE_BY_SIDE)
        code, text = run(prometheus=True)
        found = scraped(text)
        assert code == 0
        assert (found["crossover_computes", DEVICE, "2"], found["crossover_queues", DEVICE, "2"]) == (1, 0)
        holder.kill()
    assert run()[1].splitlines()[-1].split()[1:4] == [DEVICE, "2", "gone"]
    ended = scraped(run(prometheus=True)[1])
    assert ended["crossover_computes", DEVICE, "2"] == ended["crossover_alive", DEVICE, "2"] == 0
    assert {
        name.removeprefix("crossover_"): ended[name, device, "1"] for name, _, job in ended if job == "1"
    } == {
        **{"turns_total": 7, "computes": 0, "queues": 1, "side_by_side": 1, "alive": 1, "processes": 1},
        "lease_seconds": pytest.approx(found["crossover_lease_seconds", device, "1"]),
    }


def test_no_jobs_and_files_that_are_none_change_the_exit_code(tmp_path: Path, run: Run) -> None:
    code, told = run()
    assert (code, "no jobs take turns here" in told, [*tmp_path.iterdir()]) == (1, True, [])
    segment = join_at(tmp_path)
    assert run()[0] == 0
    os.truncate(segment.path, 5)
    assert run()[0] == 1
    segment.forget()
