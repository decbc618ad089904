"""Finds the GPUs of this machine by asking nvidia-smi, and divides them among jobs."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable with the cards that CUDA shows to a process."""
_ANSWER_S: Final = 30.0
_NO_CARD: Final = ("", "-1", "NoDevFiles")  # Slurm sets the last one
_GPU: Final = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_MIG: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)")


def ask_nvidia_smi(*options: str) -> str | None:
    """Return the answer of nvidia-smi, or None if this machine does not have the program.

    Raises ``OSError`` if nvidia-smi fails or does not answer in time. A machine without GPUs is not
    a failure.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        answer = subprocess.run(
            ["nvidia-smi", *options], capture_output=True, text=True, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(error) from error
    if answer.returncode and "No devices" not in answer.stdout:
        raise OSError((answer.stdout or answer.stderr).partition("\n")[0])
    return answer.stdout


def cards(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the cards that a job may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Without that variable all cards are returned, by their UUIDs, since CUDA and nvidia-smi number
    cards in different orders. MIG instances are returned in place of the GPU that has them.

    Raises ``ValueError`` if there is none, or one is named twice, and ``OSError`` if nvidia-smi
    fails.
    """
    visible = variables.get(VISIBLE)
    if visible is None:
        found, why = _listed(), "nvidia-smi lists none"
    else:
        named = [each.strip() for each in visible.split(",")]
        # CUDA ignores all names from the first on that is none.
        end = next((at for at, each in enumerate(named) if each in _NO_CARD), len(named))
        found, why = named[:end], f"{VISIBLE} is {visible!r}"
    if not found:
        raise ValueError(
            f"expected GPUs, since each job gets cards of its own, got none: {why}; name cards in "
            f"{VISIBLE}, or share the device: --at-once"
        )
    if len({*found}) < len(found):
        raise ValueError(f"expected each card once, got {VISIBLE}={visible}; name it once")
    return found


def _listed() -> list[str]:
    answer = ask_nvidia_smi("-L")
    if answer is None:
        raise ValueError(
            "expected nvidia-smi on PATH, which lists the GPUs, got none; install the driver, or "
            f"name the cards: export {VISIBLE}=0,1"
        )
    found = list[str]()
    whole_gpu = False
    for line in answer.splitlines():
        if gpu := _GPU.match(line):
            found.append(gpu[1])
            whole_gpu = True
        elif instance := _MIG.match(line):
            if whole_gpu:
                found.pop()
            found.append(instance[1])
            whole_gpu = False
    return found


def shares(found: Sequence[str], each: int) -> list[str]:
    """Divide cards into shares of ``each``, as values of ``CUDA_VISIBLE_DEVICES``.

    Cards that are left over are in no share. Raises ``ValueError`` if there are too few for one.
    """
    if each > len(found):
        raise ValueError(
            f"expected at most {len(found)} GPUs for each job, since the cards here are "
            f"{','.join(found)}, got {each}; lower --gpus-each"
        )
    ends = range(each, len(found) + 1, each)
    return [",".join(found[end - each : end]) for end in ends]
