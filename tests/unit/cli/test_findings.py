"""What `crossover-ddp doctor` makes of facts: pure, each machine made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from crossover_ddp._turns.view import Liveness, Look, Place, Segment, SegmentProblem
from crossover_ddp.cli.doctor import findings
from crossover_ddp.cli.doctor.findings import (
    Directory,
    Finding,
    Gpu,
    Gpus,
    Interface,
    Mps,
    NetworkFacts,
    Severity,
    SharedMemory,
    Software,
)

OK, NOTE, PROBLEM = Severity

SOFTWARE = Software((3, 11, 7), "2.15.0+cu132", (2, 30, 7), True, "13.2")
GPU = Gpu("GPU-1", "H", 80_000, 70_000, "Default")
NO_MPS = Mps("/tmp/nvidia-mps", False, False)
MPS = Mps("/tmp/nvidia-mps", True, True)
DIRECTORY = Directory("/dev/shm/crossover_ddp-7", True, 7, 0o700)
SHARED_MEMORY = SharedMemory("/dev/shm", True, True, 1 << 30, 7, DIRECTORY)
LO = Interface("lo", ("127.0.0.1", "::1"), True, True, None)
ETH = Interface("eth0", ("10.0.0.2",), True, False, 10_000)
NETWORK = NetworkFacts(None, "host", ("10.0.0.2",), (ETH, LO))


def states(found: list[Finding]) -> list[Severity]:
    return [each.state for each in found]


def said(found: list[Finding]) -> str:
    return "\n".join(f"{each.what} | {each.mend}" for each in found if each.state is not OK)


# --- software --------------------------------------------------------------------------------------------------------


def test_a_good_installation_has_nothing_to_mend() -> None:
    assert set(states(findings.software(SOFTWARE))) == {OK}


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({"python": (3, 9, 1)}, PROBLEM, "3.10 or newer"),
        ({"torch": "2.10.1"}, PROBLEM, "pip install 'torch>=2.11'"),
        ({"torch": "unknown"}, PROBLEM, "pip install 'torch>=2.11'"),
        ({"gloo": False}, PROBLEM, "built without gloo"),
        ({"nccl": None}, NOTE, "use the gloo backend"),
    ],
)
def test_what_an_installation_lacks_is_found(changed: dict[str, Any], state: Severity, words: str) -> None:
    found = findings.software(replace(SOFTWARE, **changed))
    assert [each for each in states(found) if each is not OK] == [state]
    assert words in said(found)


def test_nccl_is_not_missed_in_a_build_without_cuda() -> None:
    assert set(states(findings.software(replace(SOFTWARE, cuda_build=None, nccl=None)))) == {OK}


@pytest.mark.parametrize(
    ("text", "expected"), [("2.15.0+cu132", (2, 15, 0)), ("2.11.0a0+git", (2, 11, 0)), ("3", (3,)), ("x", ())]
)
def test_versions_are_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert findings.version_of(text) == expected


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "mps", "state", "words"),
    [
        (Gpus((), 0, None), NO_MPS, NOTE, "take turns on the CPU"),
        (Gpus((), 2, None), NO_MPS, NOTE, "put nvidia-smi on PATH"),
        (Gpus((GPU,), 1, None), NO_MPS, OK, ""),
        (Gpus((GPU._replace(compute_mode="Exclusive_Process"),), 1, None), NO_MPS, PROBLEM, "start MPS"),
        (Gpus((GPU._replace(compute_mode="Exclusive_Process"),), 1, None), MPS, OK, ""),
        (Gpus((GPU._replace(compute_mode="Prohibited"),), 1, None), MPS, PROBLEM, "compute mode Default"),
        (Gpus((GPU,), 0, ""), NO_MPS, PROBLEM, "unset CUDA_VISIBLE_DEVICES"),
        (Gpus((GPU,), 0, None), NO_MPS, PROBLEM, "install a torch built for"),
    ],
)
def test_gpus(seen: Gpus, mps: Mps, state: Severity, words: str) -> None:
    found = findings.gpus(seen, mps)
    assert found[-1].state is state
    assert words in said(found)


def test_gpus_are_told_by_uuid_with_their_memory() -> None:
    (found,) = findings.gpus(Gpus((GPU,), 1, None), NO_MPS)
    assert found.what == "GPU-1 H, 70000 of 80000 MiB free"
    (found,) = findings.gpus(Gpus((GPU._replace(memory_mib=None),), 1, None), NO_MPS)
    assert found.what == "GPU-1 H"


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (MPS, OK, ""),
        (NO_MPS, NOTE, "nvidia-cuda-mps-control -d"),
        (replace(MPS, control_runs=False), NOTE, "left behind"),
        (replace(MPS, control_pipe=False), PROBLEM, "CUDA_MPS_PIPE_DIRECTORY"),
    ],
)
def test_mps(seen: Mps, state: Severity, words: str) -> None:
    found = findings.multi_process_service(seen, 1)
    assert states(found) == [state]
    assert words in said(found)
    assert findings.multi_process_service(seen, 0) == [], "without a GPU it does not matter"


# --- shared memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({}, OK, ""),
        ({"directory": None}, OK, ""),
        ({"present": False}, PROBLEM, "no /dev/shm"),
        ({"writable": False}, PROBLEM, "not writable"),
        ({"free_bytes": 1000}, PROBLEM, "no room for a segment"),
        ({"free_bytes": 8 << 20}, NOTE, "--shm-size"),
        ({"directory": replace(DIRECTORY, is_directory=False)}, PROBLEM, "rm /dev/shm/crossover_ddp-7"),
        ({"directory": replace(DIRECTORY, owner=8)}, PROBLEM, "belongs to user 8"),
        ({"directory": replace(DIRECTORY, mode=0o755)}, PROBLEM, "chmod 0700 /dev/shm/crossover_ddp-7"),
    ],
)
def test_shared_memory(changed: dict[str, Any], state: Severity, words: str) -> None:
    found = findings.shared_memory(replace(SHARED_MEMORY, **changed))
    assert [each for each in states(found) if each is not OK] == [state] * (state is not OK)
    assert words in said(found)


PLACE = Place(0, 1, 1, 0, 0, 0, 0, 5.0, 0, 1, 1, Liveness.ALIVE)
SEGMENT = Segment("g", "dev0", "/x/g.turns", (PLACE,), None, True)


def test_segments_in_use_left_behind_and_broken_are_told_apart() -> None:
    problems = (
        SegmentProblem("/x/a.turns", "cut short"),
        SegmentProblem(
            "/x/b.turns", "to be private, got mode 0644; chmod 0600 it or remove it while no job runs"
        ),
        SegmentProblem("/x", "the directory itself"),
    )
    seen = Look(0, "/x", (SEGMENT, SEGMENT._replace(group="old", held=False)), problems)
    found = findings.segments(seen, ["/x/swept.turns"])
    assert states(found) == [NOTE, OK, NOTE, PROBLEM, PROBLEM]
    assert [each.mend for each in found] == [
        "",
        "",
        "crossover-ddp doctor --sweep",
        "rm -r /x/a.turns  # while no job runs",
        "chmod 0600 /x/b.turns",
    ]


def test_no_segments_are_fine() -> None:
    assert states(findings.segments(Look(0, "/x", (), ()))) == [OK]


# --- environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({}, OK, ""),
        ({"HOME": "/x", "CROSSOVER_GROUP": "sweep", "CROSSOVER_DISABLE": "0"}, OK, ""),
        ({"CROSSOVER_GROUP": "a/b"}, PROBLEM, "no group name"),
        ({"CROSSOVER_GROUP": ""}, PROBLEM, "no group name"),
        ({"CROSSOVER_DEVICE": "node0"}, NOTE, "GPUs keep their UUIDs"),
        ({"CROSSOVER_DISABLE": "1"}, NOTE, "unset CROSSOVER_DISABLE"),
        ({"CROSSOVER_CHECK": "1"}, NOTE, "unset CROSSOVER_CHECK"),
        ({"CROSSOVER_TIMELINE": "/t"}, NOTE, "spans are recorded there"),
        ({"CROSSOVER_GRUOP": "x"}, NOTE, "unset CROSSOVER_GRUOP"),
    ],
)
def test_environment(variables: dict[str, str], state: Severity, words: str) -> None:
    found = findings.environment(variables)
    assert [each for each in states(found) if each is not OK] == [state] * (state is not OK)
    assert words in said(found)


def test_a_timeline_that_cannot_be_written_is_a_problem() -> None:
    found = findings.environment({"CROSSOVER_TIMELINE": "/t"}, timeline_writable=False)
    assert PROBLEM in states(found)
    assert "mkdir -p /t" in said(found)


@pytest.mark.parametrize(
    ("wanted", "cores", "quota", "state", "words"),
    [
        ("1", 2, None, OK, ""),
        ("2", 2, 1.5, OK, ""),
        (None, 8, None, NOTE, "OMP_NUM_THREADS=4"),
        ("", 1, None, NOTE, "OMP_NUM_THREADS=1"),
        ("9", 8, None, PROBLEM, "OMP_NUM_THREADS=4"),
        ("0", 8, None, PROBLEM, "no number of threads"),
        ("-1", 8, None, PROBLEM, "no number of threads"),
        ("two", 8, None, PROBLEM, "no number of threads"),
    ],
)
def test_threads(wanted: str | None, cores: int, quota: float | None, state: Severity, words: str) -> None:
    found = findings.threads(wanted, cores, quota)
    assert states(found) == [state]
    assert words in said(found)


def test_a_quota_below_the_cores_is_told() -> None:
    assert "1.5 by the container's quota" in findings.threads("1", 4, 1.5)[0].what
    assert "quota" not in findings.threads("1", 4, 8.0)[0].what


@pytest.mark.parametrize(
    ("system", "kernel", "state"),
    [
        ("Linux", "6.1.0", OK),
        ("Linux", "5.15.90.1-microsoft-standard-WSL2", NOTE),
        ("Linux", "4.4.0-19041-Microsoft", NOTE),
        ("Darwin", "23", PROBLEM),
    ],
)
def test_platform(system: str, kernel: str, state: Severity) -> None:
    assert states(findings.platform(system, kernel)) == [state]


# --- network ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({}, OK, ""),
        ({"host_addresses": ("127.0.0.1",)}, NOTE, "export GLOO_SOCKET_IFNAME=eth0"),
        ({"host_addresses": ("127.0.1.1",)}, PROBLEM, "export GLOO_SOCKET_IFNAME=eth0"),
        ({"host_addresses": ()}, PROBLEM, "resolves to nothing"),
        ({"host_addresses": ("127.0.0.1",), "interfaces": (LO,)}, OK, ""),
        ({"host_addresses": (), "interfaces": ()}, PROBLEM, "export GLOO_SOCKET_IFNAME=lo"),
        ({"interfaces": (replace(ETH, mbit_s=100), LO)}, NOTE, "faster link"),
        ({"chosen": "eth0"}, OK, ""),
        ({"chosen": "eth1"}, PROBLEM, "no such interface here (there are: eth0, lo)"),
        ({"chosen": "eth0", "interfaces": (replace(ETH, up=False),)}, PROBLEM, "ip link set eth0 up"),
        ({"chosen": "eth0", "interfaces": (replace(ETH, addresses=()),)}, PROBLEM, "has no address"),
    ],
)
def test_network(changed: dict[str, Any], state: Severity, words: str) -> None:
    found = findings.network(replace(NETWORK, **changed))
    assert states(found) == [state]
    assert words in said(found)


def test_several_chosen_interfaces_are_judged_each() -> None:
    assert states(findings.network(replace(NETWORK, chosen="eth0,eth1"))) == [OK, PROBLEM]


def test_the_link_speed_is_told_or_said_not_to_be_known() -> None:
    assert "10000 Mbit/s" in findings.network(NETWORK)[0].what
    unknown = replace(NETWORK, interfaces=(replace(ETH, mbit_s=None),))
    assert "speed not known" in findings.network(unknown)[0].what


# --- all of them -----------------------------------------------------------------------------------------------------


def test_every_problem_says_what_mends_it() -> None:
    found = [
        *findings.software(replace(SOFTWARE, python=(3, 9, 0), torch="1", gloo=False)),
        *findings.gpus(Gpus((GPU._replace(compute_mode="Prohibited"),), 0, None), NO_MPS),
        *findings.shared_memory(replace(SHARED_MEMORY, present=False)),
        *findings.environment({"CROSSOVER_GROUP": "/"}),
        *findings.network(replace(NETWORK, chosen="x")),
        *findings.threads("x", 1),
        *findings.platform("Plan 9", ""),
    ]
    problems = [each for each in found if each.state is PROBLEM]
    assert len(problems) >= 9
    assert all(each.mend and "\n" not in each.mend + each.what for each in problems)
