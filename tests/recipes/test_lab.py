"""The emulated cluster: nodes, links, jobs; what fails is said, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import lab
from lab import Cluster, Job, JobFailedError, LabError, RunTimeoutError, command, network, nodes
from lab.network import NAMESPACE_DIRECTORY, LabId
from lab.nodes import RUN_FILE
from tests.faults.lanes import UNSHARE, why_no_container
from tests.harness._preloaded import ForkedScript
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.waiting import eventually, gone

from . import RECIPES

_REASON = lab.why_not_shaped()
needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(_REASON is not None, reason=f"no emulated network: {_REASON}"),
]
shaped = pytest.param(True, marks=needs_root, id="shaped")
unshaped = pytest.param(False, id="unshaped")
pytestmark = [pytest.mark.quiet, pytest.mark.timeout(150)]

SHOW_ENVIRONMENT = """
import json, os
prefixes = ("CROSSOVER_", "MASTER_", "GLOO_", "OMP_", "RANK", "WORLD_", "LOCAL_")
names = [n for n in os.environ if n.startswith(prefixes)]
print(json.dumps({**{n: os.environ[n] for n in names}, "cores": sorted(os.sched_getaffinity(0)),
                  "net": os.stat("/proc/self/ns/net").st_ino, "session": os.getsid(0) == os.getpid()}))
"""
# A ring of plain sockets: every rank sends `argv[1]` bytes to the next one.
RING = """
import os, socket, sys, threading, time
rank, world, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
shaped = os.environ["MASTER_ADDR"] != "127.0.0.1"
where = lambda r: (f"10.77.0.{r + 1}" if shaped else "127.0.0.1", int(os.environ["MASTER_PORT"]) + 100 * r)
server = socket.create_server(where(rank))
def send():
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            peer = socket.create_connection(where((rank + 1) % world), timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.sendall(bytes(size)); peer.shutdown(socket.SHUT_WR); peer.recv(1)
sender = threading.Thread(target=send); sender.start()
connection, _ = server.accept()
began, received = time.monotonic(), 0
while data := connection.recv(1 << 20):
    received += len(data)
connection.close(); sender.join()
print(received, time.monotonic() - began)
"""
# Says that it is ready, with a child that has left its session and does not mind SIGTERM.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
path = pathlib.Path(sys.argv[1], os.environ["RANK"])
path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}"); path.with_suffix(".new").rename(path)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _no_namespaces_left() -> Iterator[None]:
    yield
    mine = [name for owner, name in network.lab_namespaces() if owner.pid == os.getpid()]
    assert mine == []


def python(script: str, *arguments: object) -> list[str]:
    return ["python", "-c", script, *map(str, arguments)]


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("on_links", [shaped, unshaped])
def test_ranks_find_their_place(on_links: bool, per_node: int, tmp_path: Path) -> None:
    jobs = [Job("a", python(SHOW_ENVIRONMENT)), Job("b", python(SHOW_ENVIRONMENT), {"OMP_NUM_THREADS": "2"})]
    with Cluster(shaped=on_links, ranks_per_node=per_node) as cluster:
        result = cluster.run(jobs, 60, out=tmp_path)
        seen = {
            (job, rank): json.loads((tmp_path / job / f"rank{rank}.log").read_text())
            for job in ("a", "b")
            for rank in range(2 * per_node)
        }
    for (job, rank), variables in seen.items():
        node, local = divmod(rank, per_node)
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), str(2 * per_node))
        assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == (str(local), str(per_node))
        assert variables["GLOO_SOCKET_IFNAME"] == ("eth0" if on_links else "lo")
        assert variables["CROSSOVER_DEVICE"] == f"lab-node{node}-device{node}"
        assert variables["CROSSOVER_LAB_DIR"] == str(tmp_path / job)
        assert variables["CROSSOVER_TIMELINE"] == str(tmp_path / job / "timeline")
        assert variables["session"]
        assert variables["cores"] == [cluster.cores[node]]
    assert len({v["CROSSOVER_GROUP"] for v in seen.values()}) == 1
    assert seen["a", 0]["MASTER_PORT"] == seen["a", 1]["MASTER_PORT"] != seen["b", 0]["MASTER_PORT"]
    assert (seen["a", 0]["OMP_NUM_THREADS"], seen["b", 0]["OMP_NUM_THREADS"]) == ("1", "2")
    assert len({v["net"] for v in seen.values()}) == (2 if on_links else 1)
    assert set(result.job_end_s) == {"a", "b"}
    told = json.loads((tmp_path / RUN_FILE).read_text())
    assert (told["nodes"], told["ranks_per_node"]) == (2, per_node)


@pytest.mark.parametrize("nodes", [pytest.param(n, marks=needs_root) for n in (2, 4)])
def test_every_node_reaches_the_next_and_wire_bytes_are_counted(nodes: int, tmp_path: Path) -> None:
    size_bytes = 1_000_000
    with Cluster(nodes, rate_mbit=500) as cluster:
        result = cluster.run([Job("ring", python(RING, size_bytes))], 60, out=tmp_path)
    for rank, sent_bytes in enumerate(result.sent_bytes):
        assert (tmp_path / "ring" / f"rank{rank}.log").read_text().split()[0] == str(size_bytes)
        assert size_bytes < sent_bytes < 1.05 * size_bytes
    assert result.dropped == 0


@pytest.mark.usefixtures("forked_lab")
@pytest.mark.parametrize("rate_mbit", [pytest.param(200, marks=needs_root)])
def test_goodput_is_the_rate(rate_mbit: float) -> None:
    with Cluster(rate_mbit=rate_mbit) as cluster:
        figures = lab.measure(cluster)
    # The machine may be busy with other things: low is no failure of the link, high is.
    assert 0.85 < figures["goodput_per_rate"] < 1.02
    assert figures["latency_ms"] < 50
    assert figures["dropped_packets"] == 0


def test_a_link_is_measured_in_a_time_that_grows_with_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cluster: Cluster, jobs: Sequence[Job], timeout_s: float, *, out: str) -> None:
        raise LabError(timeout_s)

    monkeypatch.setattr(Cluster, "run", run)
    with pytest.raises(LabError) as caught:
        lab.measure(Cluster(), duration_s=60.0)
    assert caught.value.args[0] > 8 * 60.0


@pytest.mark.parametrize("faster_mbit", [pytest.param(800, marks=needs_root)])
def test_the_rate_can_change_while_traffic_flows(faster_mbit: float, tmp_path: Path) -> None:
    size_bytes = 60_000_000  # 96 s at 5 Mbit/s
    began_s = time.monotonic()
    with Cluster(rate_mbit=5) as cluster:

        def speed_up() -> None:
            if time.monotonic() > began_s + 1.5:
                cluster.set_rate(faster_mbit)

        cluster.run([Job("ring", python(RING, size_bytes))], 60, out=tmp_path, watch=speed_up)
        assert cluster.rate_mbit == faster_mbit
    taken_s = float((tmp_path / "ring" / "rank0.log").read_text().split()[1])
    assert 0.2 < taken_s < 60


FAILING = {
    r"job bad, rank 1: killed by SIGKILL(.|\n)*my own last words": """
import os, time
if os.environ["RANK"] == "1":
    print("my own last words", flush=True); os.kill(os.getpid(), 9)
time.sleep(300)
""",
    # also when its peer ends first
    "the reason": """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.4); sys.exit("the reason")
sys.exit("connection closed by peer")
""",
}


@pytest.mark.parametrize("words", FAILING)
def test_a_failing_rank_speaks_and_the_others_are_ended(words: str, tmp_path: Path) -> None:
    jobs = [Job("bad", python(FAILING[words])), Job("good", ["sleep", "300"])]
    with Cluster(shaped=False) as cluster:
        began_s = time.monotonic()
        with pytest.raises(JobFailedError, match=words) as caught:
            cluster.run(jobs, 60, out=tmp_path)
        assert time.monotonic() - began_s < 30, "its end was noticed no sooner than that of all"
        assert "job good" not in str(caught.value)
        assert all(owner != cluster.lab for owner, _ in nodes.marked_labs())


@pytest.mark.parametrize("on_links", [shaped, unshaped])
def test_a_program_that_is_none_is_named(on_links: bool, tmp_path: Path) -> None:
    with Cluster(shaped=on_links) as cluster, pytest.raises(LabError, match="got 'no-such-program'"):
        cluster.run([Job("bad", ["no-such-program"])], 30, out=tmp_path)


def test_a_run_that_takes_too_long_is_ended_with_all_its_children(tmp_path: Path) -> None:
    with Cluster(1, shaped=False) as cluster:
        with pytest.raises(RunTimeoutError, match=r"within 1 s.*\n.*job slow, rank 0: still running"):
            cluster.run([Job("slow", python(STUBBORN, tmp_path))], 1, out=tmp_path / "out")
        rank, child = map(int, (tmp_path / "0").read_text().split())
        assert gone(rank)
        assert not gone(child)  # it left the session: only the mark finds it, at the end
    assert eventually(lambda: gone(child))


def test_jobs_need_no_core_of_their_own(tmp_path: Path) -> None:
    script = "import os; print(len(os.sched_getaffinity(0)))"
    with Cluster(1, shaped=False, pin="none") as cluster:
        cluster.run([Job("a", python(script))], 30, out=tmp_path)
    assert int((tmp_path / "a" / "rank0.log").read_text()) == len(os.sched_getaffinity(0))


def hear_interrupts() -> None:
    """A test run in the background of a shell ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start_lab(tmp_path: Path, *, on_links: bool, forked: bool = False) -> "subprocess.Popen[str]":
    """Start the command line with two stubborn ranks, and return when both are ready.

    Forked, it imports nothing, for tests in which it does not live to end by itself.
    """
    command = f"a: python -c '{STUBBORN}' {tmp_path}"
    words = ["run", "--out", str(tmp_path / "out"), "--job", command, *([] if on_links else ["--unshaped"])]
    process: subprocess.Popen[str]
    if forked:
        process = forked_lab_command(words)
    else:
        process = subprocess.Popen(
            preexec_fn=hear_interrupts,
            args=[sys.executable, str(RECIPES / "lab"), *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
    assert eventually(lambda: all((tmp_path / rank).exists() for rank in "01"))
    return process


def forked_lab_command(words: Sequence[str]) -> ForkedScript:
    script = str(RECIPES / "lab" / "__main__.py")
    return ForkedScript([sys.executable, script, *words], os.environ, stdout=subprocess.PIPE, text=True)


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]


def namespaces_of(pid: int) -> list[str]:
    return [name for owner, name in network.lab_namespaces() if owner.pid == pid]


# In the campaign each signal with and without links; else each once, one of them with links where there can be some.
ENDINGS = [
    pytest.param(number, status, on_links, marks=needs_root if on_links else [])
    for number, status, usual in ((signal.SIGINT, 130, _REASON is None), (signal.SIGTERM, 143, False))
    for on_links in ((True, False) if IN_CAMPAIGN else (usual,))
]


@pytest.mark.parametrize(("number", "status", "on_links"), ENDINGS)
def test_interrupted_labs_clean_up(number: int, status: int, on_links: bool, tmp_path: Path) -> None:
    process = start_lab(tmp_path, on_links=on_links)
    assert bool(namespaces_of(process.pid)) == on_links
    process.send_signal(number)
    for _ in range(10):  # impatient users press it again and again
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (status, 130), errors
    assert "Traceback" not in errors
    assert all(gone(pid) for pid in pids(tmp_path))
    assert namespaces_of(process.pid) == []


@pytest.mark.parametrize(
    ("how", "on_links"),
    [pytest.param("command", True, marks=needs_root), ("command", False), ("next lab", False)],
)
def test_what_a_killed_lab_leaves_is_cleaned(how: str, on_links: bool, tmp_path: Path) -> None:
    process = start_lab(tmp_path, on_links=on_links, forked=True)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    ranks, children = pids(tmp_path)[0::2], pids(tmp_path)[1::2]
    assert eventually(lambda: all(gone(rank) for rank in ranks))  # they die with the lab
    assert not any(gone(child) for child in children)
    assert bool(namespaces_of(process.pid)) == on_links
    if how == "command":
        cleaning = forked_lab_command(["clean"])
        assert cleaning.stdout is not None
        said = cleaning.stdout.read()
        assert cleaning.wait(timeout=60) == 0, said
        assert said.count("removed process") >= 2
        assert ("removed namespace" in said) == on_links
    else:
        with Cluster(shaped=False):
            pass
    assert all(gone(child) for child in children)
    assert namespaces_of(process.pid) == []


@pytest.mark.parametrize("nodes", [pytest.param(2, marks=needs_root)])
def test_cleaning_spares_running_labs_and_what_is_not_a_labs(nodes: int) -> None:
    foreign = f"crossover-labour-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", foreign], check=True, timeout=60)
    try:
        with Cluster(nodes) as cluster:
            process = cluster.popen(0, ["sleep", "300"])
            lab.clean()
            assert process.poll() is None
            assert len(namespaces_of(os.getpid())) == nodes
        assert (NAMESPACE_DIRECTORY / foreign).exists()
    finally:
        subprocess.run(["ip", "netns", "del", foreign], check=True, timeout=60)


# A lab with one process, told on its stdin to say whether that lives.
CONTAINED = """
import sys
from lab import Cluster
with Cluster(shaped=False) as cluster:
    process = cluster.popen(0, ["sleep", "300"])
    print("ready", flush=True)
    sys.stdin.readline()
    print(process.poll())
"""
WHY_NO_CONTAINER = why_no_container("users")


@pytest.mark.skipif(bool(WHY_NO_CONTAINER), reason=WHY_NO_CONTAINER or "there is one")
def test_cleaning_spares_a_container_s_lab_whose_process_it_cannot_see() -> None:
    command = ["unshare", *UNSHARE["users"], "--kill-child", sys.executable, "-c", CONTAINED]
    environment, pipe = {**os.environ, "PYTHONPATH": str(RECIPES)}, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as container:
        try:
            assert container.stdout is not None
            assert container.stdout.readline() == "ready\n"
            labs = {owner for owner, _ in nodes.marked_labs()}
            assert any(owner.pid_namespace != LabId.of_this_process(0).pid_namespace for owner in labs)
            lab.clean()
            assert container.communicate("go on\n", timeout=60) == ("None\n", None)
        finally:
            container.kill()


def test_only_living_labs_namespaces_are_known_by_name() -> None:
    own = LabId.of_this_process(7)
    assert own.alive()
    assert LabId.parse(str(own)) == LabId.parse(f"{own}-node3") == LabId.parse(f"{own}-switch") == own
    later = replace(own, start_ticks=own.start_ticks + 1)
    assert not later.alive()  # its number has been given again
    assert replace(later, pid_namespace=1).alive()  # as far as can be seen from here
    assert LabId.parse("crossover-lab-1-2-3-4-node0x") is None
    with pytest.raises(ValueError, match="expected a lab's namespace, got name='default'"):
        network.delete_namespace("default")


def test_without_root_it_is_said_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_has_network_admin", lambda: False)
    with (
        pytest.raises(LabError, match=r"(?s)no network can be emulated here: .*need root.*shaped=False"),
        Cluster(),
    ):
        pass
    assert command.main(["link"]) == 1


def test_a_single_node_is_not_shaped(tmp_path: Path) -> None:
    words = ["run", "--nodes", "1", "--out", str(tmp_path), "--json", "--job", "a: true"]
    assert command.main(words) == 0
    told = json.loads((tmp_path / RUN_FILE).read_text())
    assert (told["nodes"], told["rate_mbit"], told["sent_bytes"]) == (1, None, [0])


def test_an_unshaped_cluster_has_no_rate() -> None:
    with Cluster(shaped=False) as cluster:
        assert cluster.rate_mbit is None
        assert cluster.sent_bytes() == [0, 0]
        with pytest.raises(LabError, match="has no links and so cannot have a rate"):
            cluster.set_rate(100)
        with pytest.raises(ValueError, match="expected a shaped cluster"):
            lab.measure(cluster)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Cluster(5), "expected 1 to 4 nodes, got nodes=5"),
        (lambda: Cluster(rate_mbit=0), "expected a rate > 0, got rate_mbit=0"),
        (lambda: Cluster(mtu=100), "expected an MTU .* got mtu=100"),
        (lambda: Cluster(pin="all"), "expected pin 'core' or 'none', got pin='all'"),
        (lambda: Cluster(ranks_per_node=9), "expected 1 to 8 ranks on a node, got ranks_per_node=9"),
        (lambda: Job("..", "true"), "expected a name that can name a directory"),
        (lambda: Job("a/b", "true"), "expected a name that can name a directory"),
        (lambda: Job("a", " "), "expected a command for job a"),
    ],
)
def test_wrong_arguments_are_refused(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def test_jobs_need_different_names(tmp_path: Path) -> None:
    with Cluster(shaped=False) as cluster, pytest.raises(ValueError, match="jobs with different names"):
        cluster.run([Job("a", "true"), Job("a", "true")], 10, out=tmp_path)
