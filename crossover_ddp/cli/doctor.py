"""``crossover-ddp doctor``: what of this machine and environment keeps jobs from taking turns, and what mends it."""

import argparse
import contextlib
import importlib.metadata
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from crossover_ddp._system import environment
from crossover_ddp._system.cuda_driver import WORK_QUEUES
from crossover_ddp._system.shared_memory import SHARED_MEMORY
from crossover_ddp._turns.view import GROUP_NAME, Mode, look, printable

from .output import FINE, FOUND, declare

_EXAMPLES = "exit codes: 0 no problem; 1 at least one; 2 wrong usage"
_LEAST_TORCH = (2, 11)
_ROOM_MIB, _FILES, _ANSWER_S = 16, 4096, 30.0
_MPS = "nvidia-cuda-mps-control -d"

Finding = tuple[str, str, str]
"""``note`` (it works, but not as well) or ``problem``; what was found; what mends it."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    about = (
        "Say what of versions, shared memory, network, limits, GPUs and variables to fix, and how."
    )
    declare(commands, "doctor", run, "is this machine ready?", about, _EXAMPLES)


def run(arguments: argparse.Namespace, *, base: str = SHARED_MEMORY) -> int:
    """Show the findings; return the exit code."""
    found = [*_versions(), *_shared_memory(base), *_network(), *_files(), *_gpus(), *_variables()]
    for state, what, mend in found:
        sys.stdout.write(f"{state:8}{printable(what)}\n        → {printable(mend)}\n")
    sys.stdout.write("" if found else "nothing to fix\n")
    return FOUND if any(state == "problem" for state, _, _ in found) else FINE


def _versions() -> Iterator[Finding]:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "is not installed"
    if not sys.platform.startswith("linux"):
        yield "problem", f"{sys.platform}: jobs train without turns", "use Linux"
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < _LEAST_TORCH:
        yield (
            "problem",
            f"torch {torch}",
            f"pip install 'torch>={'.'.join(map(str, _LEAST_TORCH))}'",
        )


def _shared_memory(base: str) -> Iterator[Finding]:
    if not os.path.isdir(base):
        yield "problem", f"no {base}: jobs train without turns", f"mount -t tmpfs tmpfs {base}"
        return
    room, seen = os.statvfs(base), look(base)
    if not os.access(base, os.W_OK | os.X_OK):
        mend = "mount -o remount,rw" if room.f_flag & os.ST_RDONLY else "chmod 1777"
        yield "problem", f"{base} is not writable", f"{mend} {base}"
    if room.f_bavail * room.f_frsize >> 20 < _ROOM_MIB:
        yield (
            "problem",
            f"{base} has less than {_ROOM_MIB} MiB free",
            "free some; docker: --shm-size=1g",
        )
    for path in seen.abandoned:
        what = (
            f"dead jobs have left files of group {os.path.basename(path).removesuffix('@.turns')}"
        )
        yield "note", what, f"rm {path.removesuffix('.turns')}.*"
    for slot in (place.slot for place in seen.places if place.alive):
        if slot.mode == Mode.SIDE_BY_SIDE and slot.pairs and slot.side_s:
            slower = 100 * (slot.turns_s / slot.side_s - 1)
            what = f"job {slot.job:x} computes side by side: its turns were {slower:.0f} % slower"
            mend = "if it waits for data: more loader workers; crossover-ddp advise says more"
            yield "note", what[:100], mend
    for path, what in seen.problems:
        mend = (
            "see there"
            if path == seen.directory
            else f"rm -r {shlex.quote(path)}  # while no job runs"
        )
        yield "problem", f"{path}: {what}", mend


def _network() -> Iterator[Finding]:
    paths = Path("/sys/class/net").glob("*/operstate")  # none where /sys is another namespace's
    down = {path.parent.name for path in paths if path.read_text() == "down\n"}
    up = [name for _, name in socket.if_nameindex() if name not in down]
    others = sorted({*up} - {"lo"})
    mend = f"export GLOO_SOCKET_IFNAME={others[0] if others else 'lo'}"
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        for name in {*chosen.split(",")} - {*up}:
            yield "problem", f"GLOO_SOCKET_IFNAME={name} is not there, or down", mend
        return
    host = socket.gethostname()
    addresses = _own_addresses(host)
    if not addresses:
        yield (
            "problem",
            f"host name {host} resolves to no address of this machine, which gloo takes",
            mend,
        )
    elif others and all(address.startswith("127.") or address == "::1" for address in addresses):
        yield (
            "note",
            f"host name {host} resolves to {addresses[0]}: other machines cannot reach that",
            mend,
        )


def _own_addresses(host: str) -> list[str]:
    """Return those addresses of a host that are this machine's."""
    found = []
    with contextlib.suppress(OSError):  # nobody knows the name
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address[0], 0))
                found.append(str(address[0]))
    return found


def _files() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        yield (
            "note",
            f"{soft} open files: few for ranks, connections, data loaders",
            f"ulimit -n {_FILES}",
        )


def _gpus() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        return
    query = ["nvidia-smi", "--query-gpu=uuid,compute_mode", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S)
        listed = [line for line in answer.stdout.splitlines() if line.startswith(("GPU-", "MIG-"))]
        if answer.returncode and "No devices" not in answer.stdout:
            raise OSError((answer.stdout or answer.stderr).partition("\n")[0])
    except (OSError, subprocess.TimeoutExpired) as error:
        yield (
            "problem",
            f"nvidia-smi does not answer: {error}",
            "see dmesg; load the driver anew, or reboot",
        )
        return
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    mps = os.path.exists(f"{pipes}/control")
    for uuid, _, mode in (line.partition(", ") for line in listed):
        if mode == "Prohibited" or (mode == "Exclusive_Process" and not mps):
            what = f"{uuid} has compute mode {mode}: no second job"
            yield "problem", what, f"nvidia-smi -c DEFAULT, or {_MPS}"
    if listed and not mps:
        yield (
            "note",
            f"no MPS in {pipes}: NCCL's exchange does not overlap a sibling's computation",
            _MPS,
        )
    for name in ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT"):
        if listed and environment.is_set(name):
            yield "problem", f"{name} is set: nothing overlaps", f"unset {name}"
    if listed and mps and WORK_QUEUES not in os.environ:
        yield (
            "note",
            "MPS, two work queues a process: compute waits for NCCL",
            f"export {WORK_QUEUES}=8",
        )


def _variables() -> Iterator[Finding]:
    group, directory = os.environ.get(environment.GROUP), os.environ.get(environment.TIMELINE, "")
    if group is not None and not GROUP_NAME.fullmatch(group):
        yield "problem", f"CROSSOVER_GROUP={group!r}", "1-64 letters, digits, '.', '_', '-'"
    if os.path.exists(directory) and not os.access(directory, os.W_OK | os.X_OK):
        yield "problem", f"CROSSOVER_TIMELINE={directory} is not writable", "name another directory"
    if environment.is_set(environment.DISABLE):
        yield (
            "note",
            "CROSSOVER_DISABLE is set: hooks are plain all-reduce",
            "unset CROSSOVER_DISABLE",
        )
    for name in sorted(os.environ):
        if name.startswith("CROSSOVER_") and name not in {
            *environment.FOR_USERS,
            environment.RUN_JOB,
        }:
            yield "note", f"{name} means nothing to jobs", f"unset {name}"
