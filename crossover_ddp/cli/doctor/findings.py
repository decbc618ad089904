"""What `crossover-ddp doctor` says about a machine: pure, facts in, findings out.

Each function takes facts (see `machine_facts`) and returns findings; each finding that is not fine says in one line
what mends it.
"""

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from crossover_ddp._system.environment import CHECK, DEVICE, DISABLE, FOR_USERS, GROUP, TIMELINE, is_set
from crossover_ddp._turns.slots import FILE_BYTES, GROUP_NAME
from crossover_ddp._turns.view import Look

TORCH_AT_LEAST = (2, 11)
PYTHON_AT_LEAST = (3, 10)
_MEBI = 1 << 20
_SCARCE_BYTES = 16 * _MEBI
_SLOW_MBIT_S = 100


class Severity(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """It works, but the user should know."""
    PROBLEM = "problem"
    """Something will not work, or not as intended."""


class Finding(NamedTuple):
    """One thing found."""

    topic: str
    state: Severity
    what: str
    mend: str = ""
    """The one line that changes it."""


@dataclass(frozen=True)
class Software:
    """Versions of Python and torch."""

    python: tuple[int, int, int]
    torch: str
    nccl: tuple[int, ...] | None
    gloo: bool
    cuda_build: str | None


class Gpu(NamedTuple):
    """One GPU as the driver lists it."""

    uuid: str
    name: str
    memory_mib: int | None
    free_mib: int | None
    compute_mode: str


@dataclass(frozen=True)
class Gpus:
    """The GPUs that the driver and torch see."""

    listed: tuple[Gpu, ...]
    torch_count: int
    visible: str | None
    """``CUDA_VISIBLE_DEVICES``."""


@dataclass(frozen=True)
class Mps:
    """NVIDIA's multi-process service."""

    pipe_directory: str
    control_pipe: bool
    control_runs: bool


@dataclass(frozen=True)
class Directory:
    """The directory of this user's segments."""

    path: str
    is_directory: bool
    owner: int
    mode: int


@dataclass(frozen=True)
class SharedMemory:
    """Where segments live."""

    base: str
    present: bool
    writable: bool
    free_bytes: int
    user: int
    directory: Directory | None


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool
    mbit_s: int | None


@dataclass(frozen=True)
class NetworkFacts:
    """The interfaces from which gloo chooses."""

    chosen: str | None
    """``GLOO_SOCKET_IFNAME``."""
    host_name: str
    host_addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]


# --- software -----------------------------------------------------------------------------------------------------


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple([*map(int, found[0].split("."))]) if found else ()


def software(seen: Software) -> list[Finding]:
    """Judge Python and torch."""
    python = ".".join(map(str, seen.python))
    old_python = seen.python[:2] < PYTHON_AT_LEAST
    old_torch = version_of(seen.torch) < TORCH_AT_LEAST
    found = [
        Finding("python", Severity.PROBLEM, python, "use Python 3.10 or newer")
        if old_python
        else Finding("python", Severity.OK, python),
        Finding("torch", Severity.PROBLEM, seen.torch, "pip install 'torch>=2.11'")
        if old_torch
        else Finding("torch", Severity.OK, f"{seen.torch}, {_build(seen)}"),
    ]
    if not seen.gloo:
        found.append(
            Finding(
                "torch",
                Severity.PROBLEM,
                "built without gloo",
                "install a build of torch with gloo (pip's has it)",
            )
        )
    if seen.cuda_build is not None:
        found.append(_nccl(seen.nccl))
    return found


def _build(seen: Software) -> str:
    return "built without CUDA" if seen.cuda_build is None else f"built for CUDA {seen.cuda_build}"


def _nccl(version: tuple[int, ...] | None) -> Finding:
    if version is None:
        return Finding("nccl", Severity.NOTE, "not in this build of torch", "use the gloo backend")
    return Finding("nccl", Severity.OK, ".".join(map(str, version)))


# --- devices ------------------------------------------------------------------------------------------------------


def gpus(seen: Gpus, mps: Mps) -> list[Finding]:
    """Judge the GPUs, and whether two jobs may use one at a time."""
    if not seen.listed:
        if seen.torch_count:
            what = f"torch sees {seen.torch_count}, but nvidia-smi lists none: their UUIDs are not shown here"
            return [Finding("gpu", Severity.NOTE, what, "put nvidia-smi on PATH")]
        what = (
            "none: jobs take turns on the CPU, or on what CROSSOVER_DEVICE names; gloo works, NCCL does not"
        )
        return [Finding("gpu", Severity.NOTE, what, "nothing to do unless this machine should have one")]
    found = [_gpu(each, mps) for each in seen.listed]
    if not seen.torch_count:
        hidden = seen.visible is not None
        what = f"torch sees none of them{f' (CUDA_VISIBLE_DEVICES={seen.visible!r})' if hidden else ''}"
        mend = "unset CUDA_VISIBLE_DEVICES" if hidden else "install a torch built for this driver's CUDA"
        found.append(Finding("gpu", Severity.PROBLEM, what, mend))
    return found


def _gpu(gpu: Gpu, mps: Mps) -> Finding:
    memory = "" if gpu.memory_mib is None else f", {gpu.free_mib} of {gpu.memory_mib} MiB free"
    what = f"{gpu.uuid} {gpu.name}{memory}"
    if gpu.compute_mode == "Prohibited":
        return Finding(
            "gpu", Severity.PROBLEM, f"{what}; compute mode Prohibited", "ask for compute mode Default"
        )
    if gpu.compute_mode == "Exclusive_Process" and not mps.control_runs:
        what += "; compute mode Exclusive_Process: a second job cannot use it"
        return Finding("gpu", Severity.PROBLEM, what, "start MPS: nvidia-cuda-mps-control -d")
    return Finding("gpu", Severity.OK, what)


def multi_process_service(seen: Mps, gpu_count: int) -> list[Finding]:
    """Say whether kernels of two jobs can run at the same time."""
    if not gpu_count:
        return []
    if seen.control_runs and seen.control_pipe:
        return [Finding("mps", Severity.OK, f"on, pipes in {seen.pipe_directory}")]
    if seen.control_runs:
        what = (
            f"a daemon runs, but its pipes are not in {seen.pipe_directory}: jobs started here do not use it"
        )
        return [Finding("mps", Severity.PROBLEM, what, "export CUDA_MPS_PIPE_DIRECTORY=<the daemon's>")]
    if seen.control_pipe:
        what = f"off, but {seen.pipe_directory} was left behind"
        return [Finding("mps", Severity.NOTE, what, "start it: nvidia-cuda-mps-control -d")]
    what = "off: kernels of two jobs are time-sliced; gloo's exchange overlaps nevertheless, NCCL's needs MPS"
    return [Finding("mps", Severity.NOTE, what, "with NCCL: nvidia-cuda-mps-control -d")]


def cuda(variables: Mapping[str, str], gpu_count: int) -> list[Finding]:
    """Judge settings that keep the host from running ahead, so that nothing overlaps."""
    if not gpu_count:
        return []
    found = []
    if is_set("CUDA_LAUNCH_BLOCKING", variables):
        what = "CUDA_LAUNCH_BLOCKING set: the host waits for every kernel, nothing overlaps (a setting for debugging)"
        found.append(Finding("cuda", Severity.PROBLEM, what, "unset CUDA_LAUNCH_BLOCKING"))
    if is_set("TORCH_NCCL_BLOCKING_WAIT", variables):
        what = "TORCH_NCCL_BLOCKING_WAIT set: on NCCL the host waits for every bucket within backward"
        found.append(Finding("cuda", Severity.PROBLEM, what, "unset TORCH_NCCL_BLOCKING_WAIT"))
    return found or [Finding("cuda", Severity.OK, "no setting of CUDA or torch prevents overlap")]


# --- shared memory ------------------------------------------------------------------------------------------------


def shared_memory(seen: SharedMemory) -> list[Finding]:
    """Judge whether segments can be made and are private."""
    topic = "shared memory"
    if not seen.present:
        return [
            Finding(
                topic,
                Severity.PROBLEM,
                f"no {seen.base}: jobs train without turns",
                f"mount -t tmpfs tmpfs {seen.base}",
            )
        ]
    if not seen.writable:
        return [Finding(topic, Severity.PROBLEM, f"{seen.base} is not writable", f"chmod 1777 {seen.base}")]
    free = f"{seen.base}, {seen.free_bytes // _MEBI} MiB free"
    if seen.free_bytes < 2 * FILE_BYTES:
        found = [
            Finding(
                topic, Severity.PROBLEM, f"{free}: no room for a segment", f"remove what fills {seen.base}"
            )
        ]
    elif seen.free_bytes < _SCARCE_BYTES:
        found = [
            Finding(
                topic,
                Severity.NOTE,
                f"{free}: enough for turns, little for DataLoader workers",
                "docker: --shm-size=1g",
            )
        ]
    else:
        found = [Finding(topic, Severity.OK, free)]
    return found + ([] if seen.directory is None else [_directory(seen.directory, seen.user)])


def _directory(seen: Directory, user: int) -> Finding:
    topic, path = "shared memory", seen.path
    if not seen.is_directory:
        return Finding(topic, Severity.PROBLEM, f"{path} is not a directory", f"rm {path}")
    if seen.owner != user:
        what = f"{path} belongs to user {seen.owner}, this is user {user}"
        return Finding(topic, Severity.PROBLEM, what, f"let its owner or an administrator rm -r {path}")
    if seen.mode & 0o077:
        return Finding(
            topic, Severity.PROBLEM, f"{path} has mode {seen.mode:04o}, not 0700", f"chmod 0700 {path}"
        )
    return Finding(topic, Severity.OK, f"{path} is private")


def segments(seen: Look, swept: Sequence[str] = ()) -> list[Finding]:
    """Say which segments are in use, which dead jobs have left, and which files are no segments."""
    found = [Finding("segments", Severity.NOTE, f"removed {path}") for path in swept]
    for segment in seen.segments:
        jobs = len({place.job for place in segment.places})
        if segment.held:
            what = f"group {segment.group} on {segment.device}: {jobs} job{'s' * (jobs != 1)}"
            found.append(Finding("segments", Severity.OK, what))
        else:
            what = f"group {segment.group} on {segment.device}: left by dead jobs"
            found.append(Finding("segments", Severity.NOTE, what, "crossover-ddp doctor --sweep"))
    found += [
        Finding(
            "segments",
            Severity.PROBLEM,
            f"{problem.path}: {problem.what}",
            _removal(problem.path, problem.what),
        )
        for problem in seen.problems
        if problem.path != seen.directory  # `shared_memory` judges the directory
    ]
    return found or [Finding("segments", Severity.OK, "no jobs take turns now")]


def _removal(path: str, what: str) -> str:
    mode = re.search(r"chmod 0\d+ it", what)
    return mode[0].replace(" it", f" {path}") if mode else f"rm -r {path}  # while no job runs"


# --- environment --------------------------------------------------------------------------------------------------


def environment(variables: Mapping[str, str], *, timeline_writable: bool = True) -> list[Finding]:
    """Say what each ``CROSSOVER_*`` variable means now; arguments in a script win over all but one of them."""
    topic = "environment"
    found = [_group(variables.get(GROUP)), _device(variables.get(DEVICE))]
    if is_set(DISABLE, variables):
        what = "CROSSOVER_DISABLE set: hooks behave as plain all-reduce, nobody takes turns"
        found.append(Finding(topic, Severity.NOTE, what, "unset CROSSOVER_DISABLE"))
    else:
        found.append(Finding(topic, Severity.OK, "CROSSOVER_DISABLE not set: jobs take turns"))
    if is_set(CHECK, variables):
        what = "CROSSOVER_CHECK set: decoupled training checks every step, and overlaps nothing"
        found.append(Finding(topic, Severity.NOTE, what, "unset CROSSOVER_CHECK"))
    timeline = variables.get(TIMELINE)
    if timeline and not timeline_writable:
        what = f"CROSSOVER_TIMELINE={timeline}: the directory is not writable, so nothing is recorded"
        found.append(Finding(topic, Severity.PROBLEM, what, f"mkdir -p {timeline}"))
    elif timeline:
        found.append(
            Finding(topic, Severity.NOTE, f"CROSSOVER_TIMELINE={timeline}: spans are recorded there")
        )
    found += [
        Finding(topic, Severity.NOTE, f"{name} means nothing to jobs", f"unset {name}")
        for name in sorted(variables)
        if name.startswith("CROSSOVER_") and name not in FOR_USERS
    ]
    return found


def _group(group: str | None) -> Finding:
    if group is None:
        return Finding("environment", Severity.OK, "CROSSOVER_GROUP not set: siblings meet in group default")
    if GROUP_NAME.fullmatch(group):
        return Finding(
            "environment", Severity.OK, f"CROSSOVER_GROUP={group}: siblings must name the same group"
        )
    what = f"CROSSOVER_GROUP={group!r} is no group name: jobs refuse to start"
    return Finding(
        "environment", Severity.PROBLEM, what, "export CROSSOVER_GROUP=<1-64 letters, digits, '.', '_', '-'>"
    )


def _device(device: str | None) -> Finding:
    if not device:
        return Finding(
            "environment", Severity.OK, "CROSSOVER_DEVICE not set: GPUs by UUID, the CPU by the machine"
        )
    what = f"CROSSOVER_DEVICE={device}: the shared device where a job uses no GPU; GPUs keep their UUIDs"
    return Finding("environment", Severity.NOTE, what)


def threads(wanted: str | None, cores: int, cpu_quota: float | None = None) -> list[Finding]:
    """Judge how many threads each rank's compute may use.

    Args:
        wanted: ``OMP_NUM_THREADS``.
        cores: that this process may run on.
        cpu_quota: cores' worth of time that a container allows, if it says so.
    """
    has = f"{cores} core{'s' * (cores != 1)}"
    if cpu_quota is not None and cpu_quota < cores:
        has += f" ({cpu_quota:g} by the container's quota)"
    if not wanted:
        what = f"OMP_NUM_THREADS not set, {has}: torchrun sets 1 per rank, plain python uses every core"
        mend = f"export OMP_NUM_THREADS={max(1, cores // 2)}  # cores divided by the ranks here"
        return [Finding("threads", Severity.NOTE, what, mend)]
    count = int(wanted) if wanted.isdecimal() else 0
    if count < 1:
        what = f"OMP_NUM_THREADS={wanted!r} is no number of threads"
        return [Finding("threads", Severity.PROBLEM, what, "export OMP_NUM_THREADS=1")]
    if count > cores:
        what = f"OMP_NUM_THREADS={count}, {has}: the threads of one rank already compete for the cores"
        return [Finding("threads", Severity.PROBLEM, what, f"export OMP_NUM_THREADS={max(1, cores // 2)}")]
    return [Finding("threads", Severity.OK, f"OMP_NUM_THREADS={count} per rank, {has}")]


def platform(system: str, kernel: str) -> list[Finding]:
    """Judge the operating system."""
    if system != "Linux":
        return [Finding("platform", Severity.PROBLEM, f"{system}: jobs train without turns", "use Linux")]
    if "microsoft" in kernel.lower():
        what = "WSL: CUDA IPC events do not work, the host orders the turns, which costs some of the gain"
        return [Finding("platform", Severity.NOTE, what, "use Linux itself for the whole gain")]
    return [Finding("platform", Severity.OK, f"Linux {kernel.strip()}")]


# --- network ------------------------------------------------------------------------------------------------------


def network(seen: NetworkFacts) -> list[Finding]:
    """Say which interface gloo takes, and which speed it reports."""
    if seen.chosen:
        return _chosen(seen)
    by_address = {address: each for each in seen.interfaces for address in each.addresses}
    found = [by_address[address] for address in seen.host_addresses if address in by_address]
    candidates = [each.name for each in seen.interfaces if each.up and not each.loopback and each.addresses]
    mend = f"export GLOO_SOCKET_IFNAME={candidates[0] if candidates else 'lo'}"
    if not found:
        where = ", ".join(seen.host_addresses) or "nothing"
        what = f"host name {seen.host_name} resolves to {where}, no interface here has that: gloo may fail or take any"
        return [Finding("network", Severity.PROBLEM, what, mend)]
    interface = found[0]
    what = f"gloo takes {_describe(interface)}: host name {seen.host_name} resolves to it"
    if interface.loopback and candidates:
        return [Finding("network", Severity.NOTE, f"{what}; other machines cannot reach it", mend)]
    return [Finding("network", _speed_state(interface), what, _speed_mend(interface))]


def _chosen(seen: NetworkFacts) -> list[Finding]:
    interfaces = {each.name: each for each in seen.interfaces}
    found = []
    for name in (seen.chosen or "").split(","):
        interface = interfaces.get(name)
        others = ", ".join(sorted(interfaces)) or "none"
        if interface is None:
            what = f"GLOO_SOCKET_IFNAME={name}: no such interface here (there are: {others})"
            found.append(
                Finding("network", Severity.PROBLEM, what, "export GLOO_SOCKET_IFNAME=<one of them>")
            )
        elif not interface.up or not interface.addresses:
            what = f"GLOO_SOCKET_IFNAME={name}: it is down or has no address"
            found.append(Finding("network", Severity.PROBLEM, what, f"ip link set {name} up"))
        else:
            what = f"gloo takes {_describe(interface)}: GLOO_SOCKET_IFNAME says so"
            found.append(Finding("network", _speed_state(interface), what, _speed_mend(interface)))
    return found


def _describe(interface: Interface) -> str:
    if interface.loopback:
        return f"{interface.name} (this machine only)"
    speed = "speed not known" if interface.mbit_s is None else f"{interface.mbit_s} Mbit/s"
    return f"{interface.name} ({', '.join(interface.addresses[:2])}; {speed})"


def _speed_state(interface: Interface) -> Severity:
    slow = interface.mbit_s is not None and interface.mbit_s <= _SLOW_MBIT_S
    return Severity.NOTE if slow else Severity.OK


def _speed_mend(interface: Interface) -> str:
    return "use a faster link if there is one" if _speed_state(interface) is Severity.NOTE else ""
