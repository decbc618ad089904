"""What `crossover-ddp doctor` says of settings that matter on GPUs: NCCL's, CUDA's and torch's. Pure, as `findings`."""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .findings import Finding, Mps, Severity

_OFF: Final = ("", "0")
_EFFICIENCY: Final = ("1", "EFFICIENCY")  # as a number or, from NCCL 2.29 on, as a name
_MAX_QUEUES: Final = 32
_VISIBLE: Final = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-(GPU-)?[0-9a-fA-F-]+(/\d+/\d+)?")


class Ordering(NamedTuple):
    """What a GPU offers to order turns by, as the driver says."""

    name: str
    events: bool
    semaphores: bool


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "") not in _OFF


# --- NCCL ---------------------------------------------------------------------------------------------------------


def nccl(variables: Mapping[str, str], gpu_count: int) -> list[Finding]:
    """Judge how much of a GPU NCCL leaves to a sibling, and how the machine's GPUs exchange.

    Args:
        variables: the environment.
        gpu_count: how many GPUs there are; without one nothing is said.
    """
    if not gpu_count:
        return []
    return [_multiprocessors(variables), *_transports(variables, gpu_count)]


def _multiprocessors(variables: Mapping[str, str]) -> Finding:
    limit, policy = variables.get("NCCL_MAX_CTAS", ""), variables.get("NCCL_CTA_POLICY", "")
    if limit.isdecimal() and int(limit) > 0:
        what = f"NCCL_MAX_CTAS={limit}: each communicator takes at most {limit} multiprocessors (SMs)"
        return Finding("nccl", Severity.OK, what)
    if policy in _EFFICIENCY:
        return Finding("nccl", Severity.OK, f"NCCL_CTA_POLICY={policy}: NCCL leaves SMs to a sibling")
    setting = f"NCCL_CTA_POLICY={policy}" if policy else "NCCL_CTA_POLICY not set"
    what = f"{setting}: NCCL takes many multiprocessors (SMs), and a sibling computes without them meanwhile"
    return Finding("nccl", Severity.NOTE, what, "export NCCL_CTA_POLICY=1  # or NCCL_MAX_CTAS=<SMs to spend>")


def _transports(variables: Mapping[str, str], gpu_count: int) -> list[Finding]:
    slow = {
        "NCCL_P2P_DISABLE": "GPUs of this machine exchange through host memory, not over NVLink or PCIe",
        "NCCL_SHM_DISABLE": "GPUs of this machine without a direct link exchange over the network",
    }
    return [
        Finding("nccl", Severity.NOTE, f"{name} set: {what}", f"unset {name}")
        for name, what in slow.items()
        if gpu_count > 1 and _is_on(variables, name)
    ]


# --- CUDA and torch -----------------------------------------------------------------------------------------------


def cuda(variables: Mapping[str, str], gpu_count: int) -> list[Finding]:
    """Judge settings of CUDA and of torch's NCCL back end that keep the host from running ahead, or join streams."""
    if not gpu_count:
        return []
    found = []
    if _is_on(variables, "CUDA_LAUNCH_BLOCKING"):
        what = "CUDA_LAUNCH_BLOCKING set: the host waits for every kernel, nothing overlaps (a setting for debugging)"
        found.append(Finding("cuda", Severity.PROBLEM, what, "unset CUDA_LAUNCH_BLOCKING"))
    found += _queues(variables.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    if _is_on(variables, "TORCH_NCCL_BLOCKING_WAIT"):
        what = "TORCH_NCCL_BLOCKING_WAIT set: on NCCL the host waits for every bucket within backward"
        found.append(Finding("cuda", Severity.PROBLEM, what, "unset TORCH_NCCL_BLOCKING_WAIT"))
    if variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        what = (
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: if a rank dies, its peers hang, with their memory and slots"
        )
        found.append(Finding("cuda", Severity.NOTE, what, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING"))
    return found or [Finding("cuda", Severity.OK, "no setting of CUDA or torch prevents overlap")]


def _queues(value: str | None) -> list[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not value:
        return []
    if not (value.isdecimal() and 1 <= int(value) <= _MAX_QUEUES):
        what = f"{name}={value!r}: expected 1 to {_MAX_QUEUES}"
        return [Finding("cuda", Severity.PROBLEM, what, f"unset {name}")]
    if int(value) < 3:  # compute, copies down, copies up (or NCCL)
        what = f"{name}={value}: streams share a queue, so a wait or a copy also delays the work behind it"
        return [Finding("cuda", Severity.NOTE, what, f"unset {name}  # 8 queues")]
    return []


def visible_devices(value: str | None, mps: Mps, gpu_count: int) -> list[Finding]:
    """Judge the form of ``CUDA_VISIBLE_DEVICES``; with every form, turns know a GPU by its UUID."""
    name = "CUDA_VISIBLE_DEVICES"
    if value is None or not gpu_count:
        return []
    entries = [entry.strip() for entry in value.split(",")]
    bad = next((entry for entry in entries if not _VISIBLE.fullmatch(entry)), None)
    if not value.strip() or entries[0] == "-1":
        return [Finding("gpu", Severity.NOTE, f"{name}={value!r} hides every GPU", f"unset {name}")]
    if bad is not None:
        after = entries.index(bad)
        seen = f"{after or 'no'} GPU{'s' * (after != 1)}"
        what = f"{name}={value}: CUDA stops reading at {bad!r}, so jobs see {seen}"
        return [Finding("gpu", Severity.PROBLEM, what, f"export {name}=<numbers or UUIDs, with commas>")]
    if len(set(entries)) < len(entries):
        what = f"{name}={value} names a GPU twice"
        return [Finding("gpu", Severity.PROBLEM, what, f"export {name}={','.join(dict.fromkeys(entries))}")]
    if mps.control_runs and any(entry.isdecimal() for entry in entries):
        what = f"{name}={value}: an MPS daemon renumbers its GPUs, so these numbers may name others"
        return [Finding("gpu", Severity.NOTE, what, f"export {name}=GPU-<uuid>  # from nvidia-smi -L")]
    return [Finding("gpu", Severity.OK, f"{name}={value}; siblings may number GPUs differently")]


def features(needed: Mapping[str, bool], gpu_count: int) -> list[Finding]:
    """Say whether torch has the functions that turns on GPUs call."""
    if not gpu_count:
        return []
    missing = sorted(name for name, present in needed.items() if not present)
    if missing:
        what = f"turns on GPUs need {', '.join(missing)}, which this torch lacks"
        return [Finding("torch", Severity.PROBLEM, what, "pip install -U 'torch>=2.11'  # a CUDA build")]
    return [Finding("torch", Severity.OK, "has the functions that turns on GPUs call")]


def ordering(seen: Sequence[Ordering], wanted: str | None, ways: Sequence[str]) -> list[Finding]:
    """Say how turns will be ordered on each GPU.

    Args:
        seen: the GPUs.
        wanted: ``CROSSOVER_DEVICE_ORDER``.
        ways: what it may be, the default first.
    """
    way = wanted or ways[0]
    if way not in ways:
        what = f"CROSSOVER_DEVICE_ORDER={wanted!r} is none of {', '.join(ways)}: jobs refuse to start"
        return [Finding("environment", Severity.PROBLEM, what, "unset CROSSOVER_DEVICE_ORDER")]
    return [_ordered(each, way) for each in seen]


def _ordered(gpu: Ordering, way: str) -> Finding:
    works = {"events": gpu.events, "semaphores": gpu.semaphores, "host": True}
    if works[way]:
        risk = "; a sibling that dies may leave this job's stream waiting for ever" if way == "events" else ""
        return Finding("gpu", Severity.OK, f"turns on {gpu.name} are ordered by {way}{risk}")
    what = f"the driver says that {gpu.name} has no {way}: the host orders the turns instead"
    return Finding("gpu", Severity.NOTE, what, "unset CROSSOVER_DEVICE_ORDER")
