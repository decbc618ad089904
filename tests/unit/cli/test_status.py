"""`crossover-ddp status` on jobs that really take turns, and that nothing notices it."""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from crossover_ddp import cli
from crossover_ddp._turns.rules import Mode
from crossover_ddp._turns.view import Look, look
from crossover_ddp.cli import status as cli_status
from crossover_ddp.cli.status import HEAD, rows
from tests.harness.waiting import eventually
from tests.unit.turns.joined_segments import Process, join_at
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
    return seen._replace(segments=tuple(each for each in seen.segments if each.group == group))


def run(base: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli_status.run(argparse.Namespace(json=False), base=str(base))
    return code, capsys.readouterr().out


def test_a_killed_holder_is_gone_and_holds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    living = join_at(tmp_path, job=1)
    with Process(tmp_path, job=2) as holder:
        holder.call("publish", started=holder.call("draw_turn"))
        assert "computes" in run(tmp_path, capsys)[1]
        holder.kill()
    code, table = run(tmp_path, capsys)
    assert code == 0
    assert [line.split()[:4] for line in table.splitlines()[1:]] == [
        ["jobs", DEVICE, "1", "between"],
        ["jobs", DEVICE, "2", "gone"],
    ]
    living.leave()


def test_what_a_trial_has_found_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = join_at(tmp_path, job=1)
    segment.publish(mode=Mode.TRYING_TURNS)
    assert "between turns, trial" in run(tmp_path, capsys)[1]
    segment.publish(mode=Mode.SIDE_BY_SIDE)
    assert "side by side " in run(tmp_path, capsys)[1]
    segment.publish(turns_s=0.0107, side_s=0.01, pairs=2)
    assert "side by side: turns were 7 % slower" in run(tmp_path, capsys)[1]
    segment.leave()


def test_no_jobs_and_files_that_are_none_change_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = run(tmp_path, capsys)
    assert (code, "no jobs take turns here" in told, [*tmp_path.iterdir()]) == (1, True, [])
    segment = join_at(tmp_path)
    assert run(tmp_path, capsys)[0] == 0
    os.truncate(segment.path, 5)
    assert run(tmp_path, capsys)[0] == 1
    segment.forget()
