"""Facts about this machine, for `findings` to judge. Reads only; makes no CUDA context, which would take memory."""

import contextlib
import csv
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from crossover_ddp._system import environment
from crossover_ddp._system.shared_memory import SHARED_MEMORY, segment_directory

from .findings import Directory, Gpu, Gpus, Interface, Mps, NetworkFacts, SharedMemory, Software

_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=uuid,name,memory.total,memory.free,compute_mode",
    "--format=csv,noheader,nounits",
)
_NVIDIA_SMI_TIMEOUT_S = 20.0
_DEFAULT_MPS_DIRECTORY = "/tmp/nvidia-mps"
_MPS_CONTROL = "nvidia-cuda-mps"  # as much of the name as the kernel keeps


def software() -> Software:
    """Return versions."""
    from torch import distributed

    available = distributed.is_available()
    return Software(
        python=sys.version_info[:3],
        torch=str(torch.__version__),
        nccl=_nccl_version() if available and distributed.is_nccl_available() else None,
        gloo=available and distributed.is_gloo_available(),
        cuda_build=torch.version.cuda,
    )


def _nccl_version() -> tuple[int, ...] | None:
    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return tuple([part for part in version if isinstance(part, int)])


def gpus() -> Gpus:
    """Return the GPUs that the driver lists, and how many torch may use."""
    return Gpus(
        listed=_listed_gpus(),
        torch_count=torch.cuda.device_count(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _listed_gpus() -> tuple[Gpu, ...]:
    if shutil.which(_NVIDIA_SMI[0]) is None:
        return ()
    try:
        answer = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(answer.stdout)


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """Return the GPUs in nvidia-smi's answer; skip lines of another form."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(table.splitlines())]
    return tuple(
        [
            Gpu(uuid, name, _whole(total), _whole(free), mode)
            for uuid, name, total, free, mode in (row for row in rows if len(row) == 5)
        ]
    )


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def mps() -> Mps:
    """Return whether NVIDIA's multi-process service runs."""
    directory = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _DEFAULT_MPS_DIRECTORY
    return Mps(
        directory, os.path.exists(os.path.join(directory, "control")), _MPS_CONTROL in _process_names()
    )


def _process_names() -> Iterable[str]:
    import psutil

    return {(process.info["name"] or "")[: len(_MPS_CONTROL)] for process in psutil.process_iter(["name"])}


def shared_memory(base: str = SHARED_MEMORY) -> SharedMemory:
    """Return where segments live and who may use it."""
    present = os.path.isdir(base)
    free_bytes = 0
    if present:
        found = os.statvfs(base)
        free_bytes = found.f_bavail * found.f_frsize
    return SharedMemory(
        base=base,
        present=present,
        writable=present and os.access(base, os.W_OK | os.X_OK),
        free_bytes=free_bytes,
        user=os.geteuid(),
        directory=_directory(segment_directory(base)),
    )


def _directory(path: str) -> Directory | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return Directory(path, stat.S_ISDIR(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode))


def timeline_writable() -> bool:
    """Return whether spans can be written to ``CROSSOVER_TIMELINE``, which a job makes if it is missing."""
    path = Path(os.environ.get(environment.TIMELINE) or ".").absolute()
    nearest = next(each for each in (path, *path.parents) if os.path.exists(each))
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_quota(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """Return the cores' worth of time that a container allows; None if it does not say."""
    try:
        quota, period = Path(path).read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


# --- network ------------------------------------------------------------------------------------------------------


def network() -> NetworkFacts:
    """Return the interfaces from which gloo chooses."""
    host_name = socket.gethostname()
    return NetworkFacts(
        chosen=os.environ.get("GLOO_SOCKET_IFNAME"),
        host_name=host_name,
        host_addresses=_resolved(host_name),
        interfaces=_interfaces(),
    )


def _resolved(host_name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # an invalid name fails before a resolver is asked
        return ()
    return tuple([*dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found)])


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    addresses = psutil.net_if_addrs()
    return tuple(
        [
            Interface(
                name=name,
                addresses=tuple(
                    [
                        each.address.partition("%")[0]
                        for each in sorted(addresses.get(name, ()), key=lambda each: each.family)
                        if each.family in (socket.AF_INET, socket.AF_INET6)
                    ]
                ),
                up="up" in flags,
                loopback="loopback" in flags,
                mbit_s=found.speed or None,  # 0 where the driver does not know
            )
            for name, found in sorted(psutil.net_if_stats().items())
            for flags in [found.flags.split(",")]
        ]
    )


# --- memory -------------------------------------------------------------------------------------------------------


def gpu_free_bytes() -> dict[str, int]:
    """Return the free memory of each GPU that the driver lists, by UUID."""
    return {gpu.uuid: gpu.free_mib << 20 for gpu in _listed_gpus() if gpu.free_mib is not None}


def memory_bytes(pid: int) -> int:
    """Return the memory of a process, pages shared with n others counted as 1/n; 0 if it has ended."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except (psutil.Error, OSError):
        return 0


def available_memory_bytes(cgroup: str = "/proc/self/cgroup") -> int:
    """Return what new programs can take without swapping, in this cgroup (v2) and outside."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_cgroup_free_bytes(cgroup)])


def _cgroup_free_bytes(path: str, root: str = "/sys/fs/cgroup") -> Iterable[int]:
    """Yield what this cgroup, and each above it, has left below its limit; page cache counts as free."""
    try:
        own = next(line[3:] for line in Path(path).read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = Path(root, own.strip("/"))
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
            limit = int((each / "memory.max").read_text())
            current = int((each / "memory.current").read_text())
            lines = (each / "memory.stat").read_text().splitlines()
            cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
            yield max(0, limit - current + cache)
        if each == Path(root):
            return
