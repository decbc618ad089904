"""What `crossover-ddp doctor` makes of settings that matter on GPUs: NCCL's, CUDA's and torch's. Pure, as `findings`.

Since which version NCCL knows what is taken from its user guide (environment variables; zero-CTA optimization) of 2.30.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .findings import Finding, Mps, Severity

Version = tuple[int, ...]

_OFF: Final = ("", "0")
_CTA_POLICIES: Final = {"0": "DEFAULT", "1": "EFFICIENCY", "2": "ZERO"}
_NAMED_POLICIES_SINCE: Final = (2, 29)
_POLICIES_SINCE: Final = (2, 27)
_CTAS_SINCE: Final = (2, 17)
_MULTI_RANK_SINCE: Final = (2, 30)
_ZERO_CTA_SINCE: Final = (2, 28)
_ZERO_CTA_NETWORK_SINCE: Final = (2, 30, 6)
_MAX_QUEUES: Final = 32
_VISIBLE: Final = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-(GPU-)?[0-9a-fA-F-]+(/\d+/\d+)?")


class Ordering(NamedTuple):
    """What the driver says of a GPU that turns could be ordered by."""

    name: str
    events: bool
    semaphores: bool


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "") not in _OFF


def _text(version: Version) -> str:
    return ".".join(map(str, version))


# --- NCCL ---------------------------------------------------------------------------------------------------------


def nccl(variables: Mapping[str, str], version: Version | None, gpu_count: int) -> list[Finding]:
    """Judge NCCL's options that decide how much of a GPU is left to a sibling, or whether NCCL works at all.

    Args:
        variables: the environment.
        version: NCCL's, None if this torch has none.
        gpu_count: how many GPUs there are; without one nothing is said.
    """
    if version is None or not gpu_count:
        return []
    return [
        *_zero_cta(version),
        *_policy(variables.get("NCCL_CTA_POLICY"), version),
        *_ctas(variables, version),
        *_several_ranks(variables, version),
        *_transports(variables, gpu_count),
    ]


def _zero_cta(version: Version) -> list[Finding]:
    if version < _ZERO_CTA_SINCE:
        what = f"{_text(version)} has no zero-CTA all-gather: every exchange takes SMs from a sibling"
        return [Finding("nccl", Severity.NOTE, what, "pip install -U torch  # for NCCL 2.28 or newer")]
    reach = "NVLink and the network" if version >= _ZERO_CTA_NETWORK_SINCE else "NVLink alone"
    what = f"{_text(version)} can gather without SMs over {reach}; needs symmetric windows, which our hooks do not make"
    return [Finding("nccl", Severity.OK, what)]


def _policy(value: str | None, version: Version) -> list[Finding]:
    efficiency = "EFFICIENCY" if version >= _NAMED_POLICIES_SINCE else "1"
    mend = f"export NCCL_CTA_POLICY={efficiency}"
    if version < _POLICIES_SINCE:
        if not value:
            return []
        what = f"NCCL_CTA_POLICY={value} means nothing to NCCL {_text(version)}, only from 2.27 on"
        return [Finding("nccl", Severity.NOTE, what, "export NCCL_MAX_CTAS=<SMs to spend>")]
    if not value:
        what = "NCCL_CTA_POLICY not set: NCCL takes SMs for speed, and a sibling's compute goes without them"
        return [Finding("nccl", Severity.NOTE, what, mend)]
    wanted = value.split("|")
    known = set(_CTA_POLICIES.values()) if version >= _NAMED_POLICIES_SINCE else set()
    if value not in _CTA_POLICIES and not known.issuperset(each.strip() for each in wanted):
        named = value.upper() in _CTA_POLICIES.values()
        why = "names are known from NCCL 2.29 on" if named and not known else "no policy of NCCL"
        return [Finding("nccl", Severity.PROBLEM, f"NCCL_CTA_POLICY={value}: {why}", mend)]
    policies = {_CTA_POLICIES.get(each.strip(), each.strip()) for each in wanted}
    if policies == {"DEFAULT"}:
        what = f"NCCL_CTA_POLICY={value}: NCCL takes SMs for speed, and a sibling's compute goes without them"
        return [Finding("nccl", Severity.NOTE, what, mend)]
    if policies == {"ZERO"}:
        what = f"NCCL_CTA_POLICY={value}: works on symmetric windows only, which our hooks do not make"
        return [Finding("nccl", Severity.NOTE, what, mend)]
    return [Finding("nccl", Severity.OK, f"NCCL_CTA_POLICY={value}: leaves SMs to a sibling")]


def _ctas(variables: Mapping[str, str], version: Version) -> list[Finding]:
    found = []
    limits: dict[str, int] = {}
    for end in ("MIN", "MAX"):
        old, new = f"NCCL_{end}_NCHANNELS", f"NCCL_{end}_CTAS"
        if version >= _CTAS_SINCE and variables.get(old):
            what = f"{old}={variables[old]} is out of date since NCCL 2.17"
            found.append(Finding("nccl", Severity.NOTE, what, f"unset {old}; export {new}={variables[old]}"))
        value = variables.get(new)
        if not value:
            continue
        if version < _CTAS_SINCE:
            what = f"{new}={value} means nothing to NCCL {_text(version)}, only from 2.17 on"
            found.append(Finding("nccl", Severity.NOTE, what, f"export {old}={value}"))
        elif not (value.isdecimal() and int(value) > 0):
            what = f"{new}={value!r} is no number of CTAs"
            found.append(Finding("nccl", Severity.PROBLEM, what, f"export {new}=4"))
        else:
            limits[end] = int(value)
    if limits.get("MIN", 0) > limits.get("MAX", limits.get("MIN", 0)):
        what = f"NCCL_MIN_CTAS={limits['MIN']} is more than NCCL_MAX_CTAS={limits['MAX']}"
        found.append(Finding("nccl", Severity.PROBLEM, what, "unset NCCL_MIN_CTAS"))
    elif "MAX" in limits:
        what = f"NCCL_MAX_CTAS={limits['MAX']}: each communicator takes at most that many SMs"
        found.append(Finding("nccl", Severity.OK, what))
    return found


def _several_ranks(variables: Mapping[str, str], version: Version) -> list[Finding]:
    name = "NCCL_MULTI_RANK_GPU_ENABLE"
    if not _is_on(variables, name):
        return []
    if version < _MULTI_RANK_SINCE:
        what = f"{name}=1 means nothing to NCCL {_text(version)}, only from 2.30 on: two ranks of a job need two GPUs"
        return [
            Finding("nccl", Severity.PROBLEM, what, f"unset {name}; use gloo for several ranks on one GPU")
        ]
    found = []
    if variables.get("NCCL_NVLS_ENABLE") == "1":
        what = f"{name}=1 and NCCL_NVLS_ENABLE=1: a communicator with two ranks on one GPU will not start"
        found.append(Finding("nccl", Severity.PROBLEM, what, "export NCCL_NVLS_ENABLE=0"))
    if not variables.get("NCCL_MAX_CTAS"):
        what = (
            f"{name}=1 without NCCL_MAX_CTAS: ranks that find no room on the GPU hang (experimental in NCCL)"
        )
        found.append(Finding("nccl", Severity.NOTE, what, "export NCCL_MAX_CTAS=4"))
    return found or [
        Finding("nccl", Severity.OK, f"{name}=1: several ranks on one GPU (experimental in NCCL)")
    ]


def _transports(variables: Mapping[str, str], gpu_count: int) -> list[Finding]:
    found = []
    slow = {
        "NCCL_P2P_DISABLE": "GPUs of this machine exchange through host memory, not over NVLink or PCIe",
        "NCCL_SHM_DISABLE": "GPUs of this machine that see no direct way exchange over the network",
    }
    for name, what in slow.items():
        if gpu_count > 1 and _is_on(variables, name):
            found.append(Finding("nccl", Severity.NOTE, f"{name} set: {what}", f"unset {name}"))
    if variables.get("NCCL_CUMEM_ENABLE") == "0":
        what = "NCCL_CUMEM_ENABLE=0: no cuMem memory, hence none of what is built on it (NVLS, symmetric windows)"
        found.append(Finding("nccl", Severity.NOTE, what, "unset NCCL_CUMEM_ENABLE"))
    return found


# --- CUDA and torch -----------------------------------------------------------------------------------------------


def cuda(variables: Mapping[str, str], gpu_count: int) -> list[Finding]:
    """Judge settings of CUDA and of torch's NCCL back end that take hosts' run-ahead, or streams, away."""
    if not gpu_count:
        return []
    found = []
    if _is_on(variables, "CUDA_LAUNCH_BLOCKING"):
        what = (
            "CUDA_LAUNCH_BLOCKING set: the host waits for every kernel, turns overlap nothing (for debugging)"
        )
        found.append(Finding("cuda", Severity.PROBLEM, what, "unset CUDA_LAUNCH_BLOCKING"))
    found += _queues(variables.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    if _is_on(variables, "TORCH_NCCL_BLOCKING_WAIT"):
        what = "TORCH_NCCL_BLOCKING_WAIT set: on NCCL the host waits for every bucket within backward"
        found.append(Finding("cuda", Severity.PROBLEM, what, "unset TORCH_NCCL_BLOCKING_WAIT"))
    if variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        what = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a job whose peer has died hangs, and keeps its memory and its slot"
        found.append(Finding("cuda", Severity.NOTE, what, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING"))
    return found or [Finding("cuda", Severity.OK, "no setting of CUDA or torch is in the way of overlap")]


def _queues(value: str | None) -> list[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not value:
        return []
    if not (value.isdecimal() and 1 <= int(value) <= _MAX_QUEUES):
        what = f"{name}={value!r}: expected 1 to {_MAX_QUEUES}"
        return [Finding("cuda", Severity.PROBLEM, what, f"unset {name}")]
    if int(value) < 3:  # compute, copies down, copies up (or NCCL)
        what = f"{name}={value}: streams share a queue, so a wait for a sibling or a copy also holds up what is behind"
        return [Finding("cuda", Severity.NOTE, what, f"unset {name}  # 8 queues")]
    return []


def visible_devices(value: str | None, mps: Mps, gpu_count: int) -> list[Finding]:
    """Judge the form of ``CUDA_VISIBLE_DEVICES``; whatever the form, turns know a GPU by its UUID."""
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
        what = f"{name}={value}: CUDA stops reading at {bad!r}, so that jobs see {seen}"
        return [Finding("gpu", Severity.PROBLEM, what, f"export {name}=<numbers or UUIDs, with commas>")]
    if len(set(entries)) < len(entries):
        what = f"{name}={value} names a GPU twice"
        return [Finding("gpu", Severity.PROBLEM, what, f"export {name}={','.join(dict.fromkeys(entries))}")]
    if mps.control_runs and any(entry.isdecimal() for entry in entries):
        what = f"{name}={value}: an MPS daemon numbers the GPUs it was started with anew, so numbers may name others"
        return [Finding("gpu", Severity.NOTE, what, f"export {name}=GPU-<uuid>  # from nvidia-smi -L")]
    return [Finding("gpu", Severity.OK, f"{name}={value}; siblings may number GPUs differently")]


def features(needed: Mapping[str, bool], gpu_count: int) -> list[Finding]:
    """Say whether torch has what turns on GPUs are made of."""
    if not gpu_count:
        return []
    missing = sorted(name for name, present in needed.items() if not present)
    if missing:
        what = f"on GPUs we need {', '.join(missing)}: missing"
        return [Finding("torch", Severity.PROBLEM, what, "pip install -U 'torch>=2.11'  # a CUDA build")]
    return [Finding("torch", Severity.OK, "has what turns on GPUs are made of")]


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
    what = f"the driver says that {gpu.name} has no {way}: turns are ordered on the host"
    return Finding("gpu", Severity.NOTE, what, "unset CROSSOVER_DEVICE_ORDER")
