"""``crossover-ddp doctor``: finds what keeps jobs from taking turns here, and suggests remedies."""

import argparse
import contextlib
import importlib.metadata
import os
import re
import resource
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from crossover_ddp._system import environment
from crossover_ddp._system.cuda_driver import WORK_QUEUES
from crossover_ddp._system.machine import c_compiler
from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import GROUP_NAME, Mode, look, printable

from .cards import ask_nvidia_smi
from .output import FINE, FOUND, declare

_EXAMPLES = "exit codes: 0 no problem; 1 at least one; 2 wrong usage"
_LEAST_TORCH = (2, 11)
_LEAST_FREE_MIB = 16
_LEAST_OPEN_FILES = 4096
_START_MPS = "nvidia-cuda-mps-control -d"

Finding = tuple[str, str, str]
"""The state: ``note`` (jobs work, but not as well) or ``problem``; the finding; the remedy."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the sub-command."""
    about = (
        "Check versions, shared memory, network, limits, GPUs and variables; show what to fix, "
        "and how."
    )
    declare(commands, "doctor", run, "is this machine ready?", about, _EXAMPLES)


def run(arguments: argparse.Namespace, *, base: str = SHARED_MEMORY) -> int:
    """Print the findings, and return the exit code."""
    found = [
        *_versions(),
        *_compiler(),
        *_shared_memory(base),
        *_network(),
        *_files(),
        *_gpus(),
        *_variables(),
    ]
    for state, finding, remedy in found:
        sys.stdout.write(f"{state:8}{printable(finding)}\n        → {printable(remedy)}\n")
    if not found:
        sys.stdout.write("nothing to fix\n")
    return FOUND if any(state == "problem" for state, _, _ in found) else FINE


def _versions() -> Iterator[Finding]:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "is not installed"
    if not sys.platform.startswith("linux"):
        yield "problem", f"{sys.platform}: jobs train without turns", "use Linux"
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        yield "problem", f"torch {torch}", f"pip install 'torch>={least}'"


def _compiler() -> Iterator[Finding]:
    command = c_compiler()
    if shutil.which(command[0]) is None:
        finding = f"no C compiler {command[0]}: on a CPU codecs take three times as long"
        yield "note", finding, "apt-get install gcc, or export CC=another one"


def _shared_memory(base: str) -> Iterator[Finding]:
    if not os.path.isdir(base):
        yield "problem", f"no {base}: jobs train without turns", f"mount -t tmpfs tmpfs {base}"
        return
    filesystem = os.statvfs(base)
    if not os.access(base, os.W_OK | os.X_OK):
        remedy = "mount -o remount,rw" if filesystem.f_flag & os.ST_RDONLY else "chmod 1777"
        yield "problem", f"{base} is not writable", f"{remedy} {base}"
    if filesystem.f_bavail * filesystem.f_frsize >> 20 < _LEAST_FREE_MIB:
        finding = f"{base} has less than {_LEAST_FREE_MIB} MiB free"
        yield "problem", finding, "free some; docker: --shm-size=1g"
    seen = look(base)
    for path in seen.abandoned:
        group = os.path.basename(path).removesuffix("@.turns")
        finding = f"dead jobs have left files of group {group}"
        yield "note", finding, f"rm {path.removesuffix('.turns')}.*"
    for slot in (process.slot for process in seen.processes if process.alive):
        if slot.mode == Mode.SIDE_BY_SIDE and slot.pairs and slot.side_s:
            slower = 100 * (slot.turns_s / slot.side_s - 1)
            finding = (
                f"job {slot.job:x} computes side by side: its turns were {slower:.0f} % slower"
            )
            remedy = "if it waits for data: more loader workers; see also crossover-ddp advise"
            yield "note", finding[:100], remedy
    for path, problem in seen.problems:
        removal = f"rm -r {shlex.quote(path)}  # while no job runs"
        yield (
            "problem",
            f"{path}: {problem}",
            "see there" if path == seen.directory else removal,
        )


def _network() -> Iterator[Finding]:
    # The list is empty where /sys shows the interfaces of another network namespace.
    paths = Path("/sys/class/net").glob("*/operstate")
    down = {path.parent.name for path in paths if path.read_text() == "down\n"}
    up = [name for _, name in socket.if_nameindex() if name not in down]
    others = sorted({*up} - {"lo"})
    remedy = f"export GLOO_SOCKET_IFNAME={others[0] if others else 'lo'}"
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        for name in {*chosen.split(",")} - {*up}:
            yield "problem", f"GLOO_SOCKET_IFNAME={name} is not there, or down", remedy
        return
    host = socket.gethostname()
    addresses = _own_addresses(host)
    if not addresses:
        finding = f"host name {host} resolves to no address of this machine, which gloo takes"
        yield "problem", finding, remedy
    elif others and all(address.startswith("127.") or address == "::1" for address in addresses):
        finding = f"host name {host} resolves to {addresses[0]}: other machines cannot reach that"
        yield "note", finding, remedy


def _own_addresses(host: str) -> list[str]:
    """Return the addresses to which ``host`` resolves and which belong to this machine."""
    found = []
    with contextlib.suppress(OSError):  # the name does not resolve
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address[0], 0))
                found.append(str(address[0]))
    return found


def _files() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_OPEN_FILES:
        finding = f"{soft} open files: few for ranks, connections, data loaders"
        yield "note", finding, f"ulimit -n {_LEAST_OPEN_FILES}"


def _gpus() -> Iterator[Finding]:
    try:
        answer = ask_nvidia_smi("--query-gpu=uuid,compute_mode", "--format=csv,noheader")
    except OSError as error:
        finding = f"nvidia-smi does not answer: {error}"
        yield "problem", finding, "see dmesg; reload the driver, or reboot"
        return
    if answer is None:
        return
    listed = [line for line in answer.splitlines() if line.startswith(("GPU-", "MIG-"))]
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    mps = os.path.exists(f"{pipes}/control")
    for uuid, _, mode in (line.partition(", ") for line in listed):
        if mode == "Prohibited" or (mode == "Exclusive_Process" and not mps):
            finding = f"{uuid} has compute mode {mode}: no second job"
            yield "problem", finding, f"nvidia-smi -c DEFAULT, or {_START_MPS}"
    if listed and not mps:
        finding = f"no MPS in {pipes}: NCCL's exchange does not overlap a sibling's computation"
        yield "note", finding, _START_MPS
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"):
        if listed and environment.is_set(name):
            yield "problem", f"{name} is set: nothing overlaps", f"unset {name}"
    if listed and mps and WORK_QUEUES not in os.environ:
        finding = "MPS, two work queues a process: compute waits for NCCL"
        yield "note", finding, f"export {WORK_QUEUES}=8"


def _variables() -> Iterator[Finding]:
    group = os.environ.get(environment.GROUP)
    if group is not None and not GROUP_NAME.fullmatch(group):
        yield "problem", f"CROSSOVER_GROUP={group!r}", "1-64 letters, digits, '.', '_', '-'"
    directory = os.environ.get(environment.TIMELINE, "")
    if os.path.exists(directory) and not os.access(directory, os.W_OK | os.X_OK):
        yield "problem", f"CROSSOVER_TIMELINE={directory} is not writable", "name another directory"
    if environment.is_set(environment.DISABLE):
        finding = "CROSSOVER_DISABLE is set: hooks are plain all-reduce"
        yield "note", finding, "unset CROSSOVER_DISABLE"
    known = {*environment.FOR_USERS, environment.RUN_JOB}
    for name in sorted(os.environ):
        if name.startswith("CROSSOVER_") and name not in known:
            yield "note", f"{name} means nothing to jobs", f"unset {name}"
