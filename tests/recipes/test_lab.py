"""The emulated cluster: nodes, links and jobs, error messages, and nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import lab
from lab import Cluster, Job, JobFailedError, LabError, RunTimeoutError, command, network, nodes
from lab.network import NAMESPACE_DIRECTORY, LabId
from lab.nodes import RUN_FILE
from lab.signals import ENDINGS, undisturbed
from tests.harness.waiting import eventually, gone

from . import RECIPES

_REASON = lab.why_not_shaped()
NEEDS_ROOT = (
    pytest.mark.root,
    pytest.mark.skipif(bool(_REASON), reason=f"no emulated network: {_REASON}"),
)
pytestmark = [pytest.mark.quiet, pytest.mark.timeout(150)]


def needs_root(test: Any) -> Any:
    return NEEDS_ROOT[0](NEEDS_ROOT[1](test))


SHOW_ENVIRONMENT = """
import json, os
prefixes = ("CROSSOVER_", "MASTER_", "GLOO_", "OMP_", "RANK", "WORLD_", "LOCAL_")
names = [n for n in os.environ if n.startswith(prefixes)]
cores, namespace = sorted(os.sched_getaffinity(0)), os.stat("/proc/self/ns/net").st_ino
own = {"cores": cores, "net": namespace, "session": os.getsid(0) == os.getpid()}
print(json.dumps({**{n: os.environ[n] for n in names}, **own}))
"""
# Every rank sends zeros to the next one.
RING = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
found = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
began = time.monotonic()
sending = dist.isend(torch.zeros_like(found), (rank + 1) % world)
dist.recv(found, (rank - 1) % world)
taken_s = time.monotonic() - began
sending.wait()
dist.barrier()
dist.destroy_process_group()
print(int((found == 0).sum()), taken_s)
"""
# Writes a file when it is ready. It has a child in another session, and both ignore SIGTERM.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
path = pathlib.Path(sys.argv[1], os.environ["RANK"])
path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".new").rename(path)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _no_namespaces_left() -> Iterator[None]:
    yield
    mine = [name for owner, name in network.lab_namespaces() if owner.pid == os.getpid()]
    assert mine == []


def python(script: str, *arguments: object) -> list[str]:
    return ["python", "-c", script, *map(str, arguments)]


@pytest.mark.parametrize(
    ("on_links", "per_node", "pin"),
    [pytest.param(True, 2, "core", marks=NEEDS_ROOT), (False, 1, "core"), (False, 2, "none")],
)
def test_ranks_have_the_variables_and_cores_of_their_node(
    on_links: bool, per_node: int, pin: Any, tmp_path: Path
) -> None:
    jobs = [
        Job("a", python(SHOW_ENVIRONMENT)),
        Job("b", python(SHOW_ENVIRONMENT), {"OMP_NUM_THREADS": "2"}),
    ]
    with Cluster(shaped=on_links, ranks_per_node=per_node, pin=pin) as cluster:
        cluster.run(jobs, 60, out=tmp_path)
    seen = {
        (job, rank): json.loads((tmp_path / job / f"rank{rank}.log").read_text())
        for job in ("a", "b")
        for rank in range(2 * per_node)
    }
    for (job, rank), variables in seen.items():
        node, local = divmod(rank, per_node)
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), str(2 * per_node))
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == (
            str(local),
            str(per_node),
        )
        assert variables["GLOO_SOCKET_IFNAME"] == ("eth0" if on_links else "lo")
        assert variables["CROSSOVER_DEVICE"] == f"lab-node{node}-device{node}"
        assert variables["CROSSOVER_LAB_DIR"] == str(tmp_path / job)
        assert variables["CROSSOVER_TIMELINE"] == str(tmp_path / job / "timeline")
        assert variables["session"]
        usable = sorted(os.sched_getaffinity(0))
        assert variables["cores"] == (usable if pin == "none" else [usable[node % len(usable)]])
    assert len({v["CROSSOVER_GROUP"] for v in seen.values()}) == 1
    assert seen["a", 0]["MASTER_PORT"] == seen["a", 1]["MASTER_PORT"] != seen["b", 0]["MASTER_PORT"]
    assert (seen["a", 0]["OMP_NUM_THREADS"], seen["b", 0]["OMP_NUM_THREADS"]) == ("1", "2")
    assert len({v["net"] for v in seen.values()}) == (2 if on_links else 1)
    record = json.loads((tmp_path / RUN_FILE).read_text())
    assert (record["nodes"], record["ranks_per_node"]) == (2, per_node)


@needs_root
@pytest.mark.usefixtures("forked_lab")
def test_links_obey_a_changed_rate_and_count_bytes(
    tmp_path: Path,
) -> None:
    size_bytes = 20_000_000  # 32 s at 5 Mbit/s

    def speed_up() -> None:
        if cluster.sent_bytes()[0] > 100_000:
            cluster.set_rate(800)

    with Cluster(4, rate_mbit=5) as cluster:
        result = cluster.run(
            [Job("ring", python(RING, size_bytes))], 60, out=tmp_path, watch=speed_up
        )
        assert cluster.rate_mbit == 800
    for rank, sent_bytes in enumerate(result.sent_bytes):
        received, taken_s = (tmp_path / "ring" / f"rank{rank}.log").read_text().split()[-2:]
        assert int(received) == size_bytes < sent_bytes < 1.05 * size_bytes
        assert 0.15 < float(taken_s) < 30
    assert result.dropped == 0


@needs_root
@pytest.mark.usefixtures("forked_lab")
def test_goodput_is_the_rate() -> None:
    with Cluster(rate_mbit=200) as cluster:
        figures = lab.measure(cluster, duration_s=0.4)
    # On a busy machine the goodput may be low. Only a high one is a failure of the link.
    assert 0.85 < figures["goodput_per_rate"] < 1.02
    assert figures["latency_ms"] < 50
    assert figures["dropped_packets"] == 0


def test_the_timeout_of_a_link_measurement_grows_with_the_message() -> None:
    with mock.patch.object(Cluster, "run", side_effect=LabError) as run, pytest.raises(LabError):
        lab.measure(Cluster(), duration_s=60.0)
    assert run.call_args.args[1] > 8 * 60.0


FAILING = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit("connection closed by peer")
time.sleep(0.4)
print("my own last words", flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_error_of_a_failing_rank_is_shown_even_if_its_peer_ends_first(
    tmp_path: Path,
) -> None:
    jobs = [Job("bad", python(FAILING)), Job("good", ["sleep", "300"])]
    with Cluster(shaped=False) as cluster:
        began_s = time.monotonic()
        with pytest.raises(JobFailedError) as caught:
            cluster.run(jobs, 60, out=tmp_path)
        assert time.monotonic() - began_s < 30, "its end was noticed no sooner than that of all"
        assert re.search(
            r"job bad, rank 1: killed by SIGKILL(.|\n)*my own last words", str(caught.value)
        )
        assert "job good" not in str(caught.value)
        assert all(owner != cluster.lab for owner, _ in nodes.marked_labs())


def test_a_run_that_takes_too_long_is_ended_with_all_its_children(tmp_path: Path) -> None:
    with Cluster(1, shaped=False) as cluster:
        with pytest.raises(
            RunTimeoutError, match=r"within 1 s.*\n.*job slow, rank 0: still running"
        ):
            cluster.run([Job("slow", python(STUBBORN, tmp_path))], 1, out=tmp_path / "out")
        rank, child = map(int, (tmp_path / "0").read_text().split())
        assert gone(rank)
        assert not gone(child)  # it has left the session, and is found by its mark at the end
    assert eventually(lambda: gone(child))


def start_lab(tmp_path: Path, *, on_links: bool) -> "subprocess.Popen[str]":
    """Start the command line with two stubborn ranks, and return when both are ready."""
    command = f"a: python -c '{STUBBORN}' {tmp_path}"
    words = ["run", "--out", str(tmp_path / "out"), "--job", command]
    if not on_links:
        words.append("--unshaped")
    process = subprocess.Popen(
        [sys.executable, str(RECIPES / "lab"), *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert eventually(lambda: all((tmp_path / rank).exists() for rank in "01"))
    return process


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]


def namespaces_of(pid: int) -> list[str]:
    return [name for owner, name in network.lab_namespaces() if owner.pid == pid]


def test_interrupted_labs_clean_up(tmp_path: Path) -> None:
    process = start_lab(tmp_path, on_links=_REASON is None)
    assert bool(namespaces_of(process.pid)) == (_REASON is None)
    process.send_signal(signal.SIGTERM)
    for _ in range(10):  # an impatient user presses Ctrl-C repeatedly
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT), errors
    assert "Traceback" not in errors
    assert all(gone(pid) for pid in pids(tmp_path))
    assert namespaces_of(process.pid) == []


@pytest.mark.parametrize("how", ["command", "next lab"])
def test_the_remains_of_a_killed_lab_are_removed(how: str, tmp_path: Path, capsys: Any) -> None:
    on_links = _REASON is None and how == "command"
    process = start_lab(tmp_path, on_links=on_links)
    process.kill()
    process.communicate(timeout=60)
    ranks, children = pids(tmp_path)[0::2], pids(tmp_path)[1::2]
    assert eventually(lambda: all(gone(rank) for rank in ranks)), "they die with the lab"
    assert not any(gone(child) for child in children)
    assert bool(namespaces_of(process.pid)) == on_links
    if how == "command":
        assert command.main(["clean"]) == 0
        shown = capsys.readouterr().out
        assert shown.count("removed process") >= 2
        assert ("removed namespace" in shown) == on_links
    else:
        with Cluster(shaped=False):
            pass
    assert all(gone(child) for child in children)
    assert namespaces_of(process.pid) == []


@needs_root
def test_cleaning_spares_running_labs_and_foreign_namespaces() -> None:
    foreign = f"crossover-labour-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", foreign], check=True, timeout=60)
    try:
        with Cluster(2) as cluster:
            process = cluster.popen(0, ["sleep", "300"])
            lab.clean()
            assert process.poll() is None
            assert len(namespaces_of(os.getpid())) == 2
        assert (NAMESPACE_DIRECTORY / foreign).exists()
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True, timeout=60)


def test_only_living_labs_namespaces_are_known_by_name() -> None:
    own = LabId.of_this_process(7)
    assert own.alive()
    assert (
        LabId.parse(str(own)) == LabId.parse(f"{own}-node3") == LabId.parse(f"{own}-switch") == own
    )
    later = replace(own, start_ticks=own.start_ticks + 1)
    assert not later.alive()  # a later process with the same id
    assert replace(later, pid_namespace=1).alive()  # not visible from here
    assert LabId.parse("crossover-lab-1-2-3-4-node0x") is None
    with pytest.raises(ValueError, match="expected a lab's namespace, got name='default'"):
        network.delete_namespace("default")


def test_without_root_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_has_network_admin", lambda: False)
    with (
        pytest.raises(
            LabError, match=r"(?s)no network can be emulated here: .*need root.*shaped=False"
        ),
        Cluster(),
    ):
        pass
    assert command.main(["link"]) == 1


def test_the_command_takes_ranks_per_node_and_a_single_node_is_not_shaped(tmp_path: Path) -> None:
    job = "a: bash -c 'echo $RANK'"
    words = ["run", "--nodes", "1", "--ranks-per-node", "3", "--out", str(tmp_path)]
    assert command.main([*words, "--json", "--job", job]) == 0
    logs = [path.read_text() for path in sorted((tmp_path / "a").glob("*.log"))]
    assert logs == ["0\n", "1\n", "2\n"]
    record = json.loads((tmp_path / RUN_FILE).read_text())
    assert (record["nodes"], record["rate_mbit"], record["sent_bytes"]) == (1, None, [0])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Cluster(5), "expected 1 to 4 nodes, got nodes=5"),
        (lambda: Cluster(rate_mbit=0), "expected a rate > 0, got rate_mbit=0"),
        (lambda: Cluster(mtu=100), "expected an MTU .* got mtu=100"),
        (lambda: Cluster(pin="all"), "expected pin 'core' or 'none', got pin='all'"),
        (
            lambda: Cluster(ranks_per_node=9),
            "expected 1 to 8 ranks on a node, got ranks_per_node=9",
        ),
        (lambda: Job("..", "true"), "expected a name that can name a directory"),
        (lambda: Job("a/b", "true"), "expected a name that can name a directory"),
        (lambda: Job("a", " "), "expected a command for job a"),
    ],
)
def test_wrong_arguments_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_an_unshaped_cluster_has_no_rate_and_refuses_jobs_that_it_cannot_run(
    tmp_path: Path,
) -> None:
    with Cluster(shaped=False) as cluster:
        assert cluster.rate_mbit is None
        assert cluster.sent_bytes() == [0, 0]
        with pytest.raises(LabError, match="has no links, so it has no rate"):
            cluster.set_rate(100)
        with pytest.raises(ValueError, match="expected a shaped cluster"):
            lab.measure(cluster)
        with pytest.raises(ValueError, match="jobs with different names"):
            cluster.run([Job("a", "true"), Job("a", "true")], 10, out=tmp_path)
        with pytest.raises(LabError, match="got 'no-such-program'"):
            cluster.run([Job("bad", ["no-such-program"])], 30, out=tmp_path)


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """Install handlers of the three signals that record them and raise, as Ctrl-C does."""
    numbers: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        raise InterruptedError(number)

    before = {number: signal.signal(number, handler) for number in ENDINGS}
    yield numbers
    for number, each in before.items():
        signal.signal(number, each)


def test_each_held_back_signal_is_delivered_after_the_outer_block(noted: list[int]) -> None:
    before = [signal.getsignal(number) for number in ENDINGS]
    ended = threading.Event()
    # If the main thread masks a signal the kernel delivers it to this thread.
    other = threading.Thread(target=ended.wait)
    other.start()
    with pytest.raises(InterruptedError), undisturbed():
        with undisturbed():
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        assert noted == []
    ended.set()
    other.join()
    assert sorted(noted) == sorted(ENDINGS)
    assert [signal.getsignal(number) for number in ENDINGS] == before


def test_what_is_ignored_stays_so_and_an_error_of_the_block_is_not_lost(noted: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(InterruptedError) as raised, undisturbed():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        _ = 1 / 0
    assert noted == [signal.SIGINT]
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
