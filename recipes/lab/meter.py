"""What each training step took: time, processor, wire; one JSON object per line, which the lab reads.

Records wait in memory and are written some hundreds at a time, so that measuring a step does not
disturb it. A loss may be given as a tensor: it is read when the record is written, so that on a GPU
the host need not wait for the step (``begin_s`` and ``end_s`` are then the host's times, too).
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

RECORDS_PER_WRITE = 256
_BUSY_COLUMNS = (
    0,
    1,
    2,
    5,
    6,
    7,
)  # user, nice, system, irq, softirq, steal: all but idle and iowait


class Reading(NamedTuple):
    """The counters at one moment; what cannot be counted here is None."""

    at_s: float
    cpu_s: float
    core_busy_s: float | None
    wire_bytes: int | None

    @classmethod
    def now(cls, core: int | None) -> "Reading":
        """Read the clock, this process's processor time, the core's load and the bytes sent."""
        return cls(time.monotonic(), time.process_time(), core_busy_s(core), wire_bytes())

    def since(self, before: "Reading") -> dict[str, float | None]:
        """What has been spent since an earlier reading."""
        return {
            name: None if then is None or now is None else round(now - then, 6)
            for name, now, then in zip(self._fields[1:], self[1:], before[1:], strict=True)
        }


class StepMeter:
    """Write the log of one rank: a start record, one record per step, evaluations, an end record.

    Args:
        path: the file to write; None makes every method do nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._core = pinned_core()
        self._waiting: list[dict[str, Any]] = []
        self._began: Reading | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def start(self, **configuration: Any) -> None:
        """Record what runs here; written at once, so that even a run that dies has left it."""
        self.event("start", core=self._core, **configuration)
        self.flush()

    def begin_step(self) -> None:
        """Read the counters before a step."""
        if self._path is not None:
            self._began = Reading.now(self._core)

    def end_step(self, step: int, loss: float | torch.Tensor, lr: float) -> None:
        """Read the counters after a step and record the difference."""
        if self._path is None or self._began is None:
            return
        began, ended = self._began, Reading.now(self._core)
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        times = {"begin_s": began.at_s, "end_s": ended.at_s}
        self._add(
            {"event": "step", "step": step, "loss": loss, "lr": lr, **times, **ended.since(began)}
        )

    def event(self, name: str, **fields: Any) -> None:
        """Record anything else: ``event("eval", epoch=3, accuracy=0.97, loss=0.1)``."""
        self._add({"event": name, "at_s": time.monotonic(), **fields})

    def flush(self) -> None:
        """Append the waiting records to the file."""
        if self._path is None or not self._waiting:
            return
        lines = [json.dumps(record, default=_as_json) + "\n" for record in self._waiting]
        self._waiting.clear()
        with self._path.open("a") as file:
            file.writelines(lines)

    def _add(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        self._waiting.append(record)
        if len(self._waiting) >= RECORDS_PER_WRITE:
            self.flush()


def log_path(wanted: str | None, rank: int) -> Path | None:
    """Where a rank logs: one file each if the path has a place for it (``log{rank}.jsonl``), else rank 0 alone.

    If nobody says, it is the directory that the emulated cluster gives its job, and nowhere without one.
    """
    if wanted is None:
        directory = os.environ.get("CROSSOVER_LAB_DIR")
        return Path(directory) / f"rank{rank}.jsonl" if directory else None
    if "{rank}" in wanted:
        return Path(wanted.format(rank=rank))
    return Path(wanted) if rank == 0 else None


def configuration(model: nn.Module, arguments: object) -> dict[str, Any]:
    """What a start record says of a job."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": str(parameters[0].device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters_numel": sum(each.numel() for each in parameters),
        "gradient_bytes": sum(each.numel() * each.element_size() for each in parameters),
        "arguments": vars(arguments),
    }


def fingerprint(model: nn.Module) -> str:
    """Hash the parameters: two runs did the same if and only if theirs are equal."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pinned_core() -> int | None:
    """The one core that this process may run on; None if there are several."""
    cores = os.sched_getaffinity(0)
    return min(cores) if len(cores) == 1 else None


def core_busy_s(core: int | None, stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that a core has worked since the machine started, for whomever (in steps of a tick)."""
    if core is None or not stat.exists():
        return None
    name = f"cpu{core} "
    with stat.open() as file:
        for line in file:
            if line.startswith(name):
                ticks = [int(column) for column in line.split()[1:]]
                return sum(ticks[column] for column in _BUSY_COLUMNS) / os.sysconf("SC_CLK_TCK")
    return None


def wire_bytes(table: Path = Path("/proc/self/net/dev")) -> int | None:
    """Bytes sent so far through all interfaces but loopback, in this process's network namespace.

    Jobs that share the namespace are counted together.
    """
    if not table.exists():
        return None
    sent = 0
    for line in table.read_text().splitlines()[2:]:  # two lines of headings
        name, _, columns = line.partition(":")
        if name.strip() != "lo":
            sent += int(columns.split()[8])
    return sent


def _as_json(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else str(value)
