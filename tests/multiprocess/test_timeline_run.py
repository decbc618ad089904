"""Two sibling jobs of two ranks each record themselves into one directory, and are merged from there."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crossover_ddp import cli
from crossover_ddp._timeline.files import FoundTimelines, read
from crossover_ddp._timeline.merge import Merged, job_names, merge
from crossover_ddp._timeline.spans import occupancy
from tests.multiprocess import timeline_worker
from tests.multiprocess.test_crossover import STEPS, siblings
from tests.unit.trace_format import check_format

AHEAD_S = 54_321.0
DRIFT = 30e-6
ROOT = Path(__file__).resolve().parents[2]
OTHER_CLOCK = ["unshare", "--time", "--monotonic", str(int(AHEAD_S)), "--kill-child"]


def why_no_other_clock() -> str | None:
    """Say why no process can be given a monotonic clock of its own here; None if it can."""
    if shutil.which("unshare") is None:
        return "the program unshare (util-linux) is missing"
    tried = subprocess.run([*OTHER_CLOCK, "true"], capture_output=True, text=True, timeout=30, check=False)
    return (
        None
        if tried.returncode == 0
        else f"{tried.stderr.strip()}; root and Linux 5.6 with time namespaces would do"
    )


_NO_OTHER_CLOCK = why_no_other_clock()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the run that all tests here look at."""
    directory = tmp_path_factory.mktemp("recorded") / "timeline"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CROSSOVER_TIMELINE", str(directory))
        outcomes = siblings("crossover", monkeypatch)
    assert all(rank["stats"]["leases_expired"] == 0 for job in outcomes for rank in job)
    return directory


def reading(directory: Path) -> FoundTimelines:
    found = read([directory])
    assert (found.problems, found.unfinished, found.empty, found.ignored) == ([], 0, 0, 0)
    return found


def begins_of(found: Merged, directory: Path) -> dict[tuple[Any, ...], float]:
    """Return when each span began, by its job's identity: which job is called the first may be close."""
    names = job_names(reading(directory).recordings, found.alignment)
    jobs = {name: key for key, name in names.items()}
    return {
        (jobs[s.job], s.rank, s.kind, s.detail["step"], s.detail.get("bucket")): s.begin_s
        for s in found.spans
    }


def test_jobs_devices_and_steps_are_told_apart(recorded: Path) -> None:
    found = merge(reading(recorded).recordings)
    label = recorded.parent.name
    assert found.jobs == [f"{label}.1", f"{label}.2"]
    counts = Counter((span.job, span.rank, span.device, span.kind) for span in found.spans)
    for job in found.jobs:
        for rank in (0, 1):
            own = {kind: counts[job, rank, f"device{rank}", kind] for kind in ("compute", "exchange", "wait")}
            # Nobody knows when the first step's computation began.
            assert own == {"compute": STEPS - 1, "exchange": STEPS, "wait": STEPS}
            steps = [
                span.detail["step"]
                for span in found.spans
                if (span.job, span.rank, span.kind) == (job, rank, "exchange")
            ]
            assert steps == list(range(STEPS))


def test_no_two_jobs_computed_at_once(recorded: Path) -> None:
    found = merge(reading(recorded).recordings)
    # From begin to end: how long both jobs were active depends on how busy the machine is.
    whole = min(span.begin_s for span in found.spans), max(span.end_s for span in found.spans)
    for device in ("device0", "device1"):
        shares = occupancy(found.spans, device, window_s=whole)
        assert shares["several"] == 0
        assert shares["one"] > 0


def test_every_exchange_has_one_number_on_both_ranks_and_keeps_causality(recorded: Path) -> None:
    alignment = merge(reading(recorded).recordings).alignment
    assert alignment.out_of_order == 0
    seen: dict[Any, set[int]] = {}
    for recording in reading(recorded).recordings:
        assert recording.header.world_size == 2
        for span in recording.spans:
            if span.kind in ("exchange", "reduce_scatter"):
                key = (recording.header.job, span.kind, span.detail["sequence"])
                seen.setdefault(key, set()).add(recording.header.rank)
    assert len(seen) > 2 * 2 * STEPS
    assert all(ranks == {0, 1} for ranks in seen.values())


def test_a_rank_on_a_clock_of_its_own_is_brought_back(recorded: Path, tmp_path: Path) -> None:
    """The second node's files are rewritten as if its clock were ahead, ran faster, and its wall clock were wrong."""

    def elsewhere(at_s: float) -> float:
        return AHEAD_S + (1 + DRIFT) * at_s

    for path in recorded.iterdir():
        header, *spans = map(json.loads, path.read_text().splitlines())
        if header["rank"] == 1:
            header |= {"clock": "another", "host": "another", "monotonic_s": elsewhere(header["monotonic_s"])}
            header["wall_s"] += 7
            for span in spans:
                span |= {name: elsewhere(span[name]) for name in ("begin_s", "end_s")}
        (tmp_path / path.name).write_text("".join(json.dumps(line) + "\n" for line in (header, *spans)))
    true = merge(reading(recorded).recordings)
    found = merge(reading(tmp_path).recordings)
    assert found.alignment.out_of_order == found.alignment.contradiction_s == 0
    uncertainty_s = found.alignment.uncertainty_s
    assert uncertainty_s is not None
    assert found.alignment.exchanges > 2 * 2 * STEPS
    begins = [begins_of(each, directory) for each, directory in ((true, recorded), (found, tmp_path))]
    assert begins[0].keys() == begins[1].keys()
    # The common time may be either clock's: only what lies between the ranks can be compared.
    moved = [(key, begins[1][key] - begins[0][key]) for key in begins[0]]
    first_s = [by_s for key, by_s in moved if key[1] == 0]
    second_s = [by_s for key, by_s in moved if key[1] == 1]
    slack_s = uncertainty_s + DRIFT * (max(begins[0].values()) - min(begins[0].values())) + 1e-6
    assert max(abs(a - b) for a in (min(first_s), max(first_s)) for b in second_s) <= slack_s


def test_the_command_merges_the_run(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "run.png"
    arguments = ["timeline", str(recorded), "--json", "--trace", str(trace), "--picture", str(picture)]
    assert cli.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert [device["device"] for device in document["devices"]] == ["device0", "device1"]
    assert all(device["several"] == 0 and device["turns"] > 0 for device in document["devices"])
    check_format(json.loads(trace.read_text()))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.root
@pytest.mark.skipif(_NO_OTHER_CLOCK is not None, reason=f"no second clock: {_NO_OTHER_CLOCK}")
def test_two_clocks_that_really_differ(tmp_path: Path) -> None:
    """The second rank runs in a time namespace, whose clock is ahead by a known time; nothing is rewritten."""
    command = [sys.executable, timeline_worker.__file__]
    environment = {**os.environ, "CROSSOVER_TIMELINE": str(tmp_path / "timeline"), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([*before, *command, str(rank), str(tmp_path / "store")], env=environment)
        for rank, before in enumerate(([], OTHER_CLOCK))
    ]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    recordings = reading(tmp_path).recordings
    ahead = {each.header.clock for each in recordings if each.header.rank == 1}
    assert len({each.header.clock for each in recordings}) == 2
    alignment = merge(recordings).alignment
    assert alignment.contradiction_s == alignment.out_of_order == 0
    assert alignment.uncertainty_s is not None
    (other,) = (each for each in alignment.corrections.values() if each.clock != alignment.reference)
    error_s = abs(other.offset_s) - AHEAD_S
    assert (other.offset_s < 0) == (other.clock in ahead)
    assert abs(error_s) <= alignment.uncertainty_s < 1.0
    assert other.exchanges > timeline_worker.STEPS
