"""`crossover-ddp status` on jobs that really take turns, and how the command behaves as a command."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp import cli
from crossover_ddp._turns.view import look
from crossover_ddp.cli import status as cli_status
from crossover_ddp.cli.output import FINE, FOUND, INTERRUPTED, USAGE
from crossover_ddp.cli.turn_report import DeviceReport, Report, report
from tests.harness.groups import files_of
from tests.unit.turns.joined_segments import Process, join_at
from tests.unit.turns.mutexes import DEVICE, SOON_S, Make, acquire_in, segment_of

ROOT = Path(__file__).resolve().parents[3]
SHORT_S = 0.3


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_status, "_INTERVAL_S", SHORT_S)


def status_of(group: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["status", "--json", "--group", group]) == FINE
    (found,) = json.loads(capsys.readouterr().out)["groups"]
    (device,) = found["devices"]
    return device  # type: ignore[no-any-return]


def states(device: dict[str, Any]) -> dict[str, str]:
    return {job["job"]: job["state"] for job in device["jobs"]}


def _until_drawn(group: str, turns: int) -> None:
    log, deadline_s = segment_of(group).with_suffix(".log"), time.monotonic() + SOON_S
    while log.stat().st_size < turns:
        assert time.monotonic() < deadline_s, f"{turns} turns were not drawn"
        time.sleep(0.01)


def one_device(shown: Report) -> DeviceReport:
    (group,) = shown.groups
    (device,) = group.devices
    return device


# --- jobs ----------------------------------------------------------------------------------------------------------


def test_the_holder_computes_and_the_next_one_queues(
    make: Make, group: str, threads: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    holder, waiting, resting = make(), make(), make()
    holder.acquire()
    future = acquire_in(threads, waiting)
    _until_drawn(group, 2)
    device = status_of(group, capsys)
    assert device["device"] == DEVICE
    assert states(device) == {
        f"{holder.job:x}": "computes",
        f"{waiting.job:x}": "queues",
        f"{resting.job:x}": "between turns",
    }
    assert device["idle_share"] == 0.0
    assert {pid for job in device["jobs"] for pid in job["pids"]} == {os.getpid()}
    holder.release()
    future.result(60.0)
    assert states(status_of(group, capsys))[f"{waiting.job:x}"] == "computes"
    waiting.release()
    device = status_of(group, capsys)
    assert set(states(device).values()) == {"between turns"}
    assert device["idle_share"] == 1.0
    assert 0.0 <= device["handover_age_s"] < 60.0


def test_rates_and_shares_are_those_of_the_turns_taken(make: Make, group: str) -> None:
    often, rarely = make(), make()
    before = look(group=group)
    for mutex in [often, often, often, rarely] * 10:
        with mutex:
            pass
    shown = report([before, look(group=group)])
    device = one_device(shown)
    assert device.turns_per_s == pytest.approx(40 / shown.interval_s)
    assert {job.job: job.share for job in device.jobs} == {f"{often.job:x}": 0.75, f"{rarely.job:x}": 0.25}
    assert {job.job: job.turn for job in device.jobs} == {f"{often.job:x}": 39, f"{rarely.job:x}": 40}


def test_status_leaves_the_jobs_as_they_were(
    make: Make, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make(), make()
    first.acquire()
    before = {
        path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_ino)
        for path in files_of(group)
    }
    locks = Path("/proc/locks").read_text().count(f":{segment_of(group).stat().st_ino} ")
    assert locks == 2
    status_of(group, capsys)
    after = {
        path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_ino)
        for path in files_of(group)
    }
    assert after == before
    assert Path("/proc/locks").read_text().count(f":{segment_of(group).stat().st_ino} ") == locks
    assert first.stats()["siblings"] == second.stats()["siblings"] == 1


def test_a_killed_holder_is_gone_and_holds_nothing(tmp_path: Path) -> None:
    living = join_at(tmp_path, job=1)
    with Process(tmp_path, job=2) as holder:
        turn = holder.call("draw_turn")
        holder.call("publish_started", turn)
        reports = cli_status.observe("jobs", SHORT_S, base=str(tmp_path))
        assert {job.job: job.state for job in one_device(next(reports)).jobs} == {
            "1": "between turns",
            "2": "computes",
        }
        holder.kill()
    next(reports)  # began before it died
    device = one_device(next(reports))
    assert {job.job: job.state for job in device.jobs} == {"1": "between turns", "2": "gone"}
    living.leave()
    assert list(tmp_path.iterdir()) == []


# --- tables --------------------------------------------------------------------------------------------------------


def test_tables_show_what_json_tells(make: Make, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    holder = make()
    make()
    holder.acquire()
    assert cli.main(["status", "--group", group]) == FINE
    shown = capsys.readouterr().out
    assert f"{holder.job:x}"[:8] in shown
    assert "computes" in shown
    assert "last hand-over" in shown


def test_no_jobs_are_said_to_be_none(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--group", group]) == FOUND
    assert "no jobs take turns here" in capsys.readouterr().out


def test_files_that_are_no_segments_change_the_exit_code(tmp_path: Path) -> None:
    segment = join_at(tmp_path)
    reports = cli_status.observe(None, 0.1, base=str(tmp_path))
    assert cli_status.exit_code(next(reports)) == FINE
    os.truncate(segment.path, 5)
    next(reports)
    assert cli_status.exit_code(next(reports)) == FOUND
    segment.forget()


@pytest.mark.parametrize("live", [True, False])
def test_watching_shows_one_picture_after_another(
    live: bool, make: Make, group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if live:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    make()
    observed = cli_status.observe

    def twice(*arguments: Any) -> Any:
        yield from itertools.islice(observed(*arguments), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_status, "observe", twice)
    assert cli.main(["status", "--watch", "0.1", "--group", group]) == FINE
    assert capsys.readouterr().out.count("last hand-over") >= 2


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_entry_point_leads_to_the_command() -> None:
    declared = re.search(
        r'^crossover-ddp = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert declared is not None
    assert declared.groups() == (cli.__name__, cli.main.__name__)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["status", "--watch", "0"],
        ["status", "--watch", "nan"],
        ["status", "--watch", "soon"],
        ["status", "--group", "a/b"],
    ],
)
def test_wrong_usage_says_what_was_expected(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == USAGE
    assert "usage: crossover-ddp" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["status"]])
def test_help_shows_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == FINE
    help_text = capsys.readouterr().out
    assert "examples:" in help_text
    assert "exit codes:" in help_text


def test_without_rich_a_line_says_how_to_get_it(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["status", "--group", group]) == USAGE
    assert "pip install 'crossover_ddp[cli]'" in capsys.readouterr().err
    assert cli.main(["status", "--json", "--group", group]) == FOUND
    assert json.loads(capsys.readouterr().out)["groups"] == []


def test_ctrl_c_ends_watching_with_exit_code_0(make: Make, group: str) -> None:
    make()
    command = [
        sys.executable,
        "-m",
        "crossover_ddp.cli",
        "status",
        "--json",
        "--watch",
        "0.1",
        "--group",
        group,
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        lines = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60.0)
    assert [line["groups"][0]["group"] for line in lines] == [group, group]
    assert (watching.returncode, errors) == (FINE, "")


def test_ctrl_c_before_the_end_of_a_single_look_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_status, "observe", interrupt)
    assert cli.main(["status", "--json"]) == INTERRUPTED


def test_a_reader_that_has_seen_enough_is_no_error(group: str) -> None:
    command = f"{sys.executable} -m crossover_ddp.cli status --json --watch 0.1 --group {group} | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60.0)
    assert json.loads(done.stdout)["groups"] == []
    assert done.stderr == ""
