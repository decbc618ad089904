"""Logs the time, processor time and traffic of each training step, one JSON object per line.

Records wait in memory and are written some hundreds at a time, so that measuring a step does not
disturb it. A loss may be a tensor: its value is read when the record is written, so that on a GPU
the host does not wait for the step. ``begin_s`` and ``end_s`` are then times of the host.
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
# user, nice, system, irq, softirq, steal: all but idle and iowait
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


class Reading(NamedTuple):
    """The counters at one moment. A counter that is not available is None."""

    at_s: float
    cpu_s: float
    core_busy_s: float | None
    wire_bytes: int | None

    @classmethod
    def now(cls, core: int | None) -> "Reading":
        """Read the clock, this process's processor time, the core's load and the bytes sent."""
        return cls(time.monotonic(), time.process_time(), core_busy_s(core), wire_bytes())

    def since(self, before: "Reading") -> dict[str, float | None]:
        """Return the differences to an earlier reading."""
        return {
            name: None if then is None or now is None else round(now - then, 6)
            for name, now, then in zip(self._fields[1:], self[1:], before[1:], strict=True)
        }


class StepMeter:
    """Write the log of one rank: a start record, one record per step, evaluations, an end record.

    Args:
        path: the file to write. With None every method does nothing.
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
        """Record the configuration. It is written at once, so that a killed run has it as well."""
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
        began = self._began
        ended = Reading.now(self._core)
        if isinstance(loss, torch.Tensor):
            loss = loss.detach()
        times = {"begin_s": began.at_s, "end_s": ended.at_s}
        self._add(
            {"event": "step", "step": step, "loss": loss, "lr": lr, **times, **ended.since(began)}
        )

    def event(self, name: str, **fields: Any) -> None:
        """Record another event: ``event("eval", epoch=3, accuracy=0.97, loss=0.1)``."""
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
    """Return the file that a rank logs to. None means that it does not log.

    A path with ``{rank}``, as ``log{rank}.jsonl``, gives each rank a file. Otherwise only rank 0
    logs. Without a path the file is in the directory that the emulated cluster gives the job, if
    there is one.
    """
    if wanted is None:
        directory = os.environ.get("CROSSOVER_LAB_DIR")
        return Path(directory) / f"rank{rank}.jsonl" if directory else None
    if "{rank}" in wanted:
        return Path(wanted.format(rank=rank))
    return Path(wanted) if rank == 0 else None


def configuration(model: nn.Module, arguments: object) -> dict[str, Any]:
    """Return the configuration of a job, for its start record."""
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
    """Hash the parameters, to compare two runs bit by bit."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def pinned_core() -> int | None:
    """Return the only core that this process may run on. None if there are several."""
    cores = os.sched_getaffinity(0)
    return min(cores) if len(cores) == 1 else None


def core_busy_s(core: int | None, stat: Path = Path("/proc/stat")) -> float | None:
    """Return the seconds that a core was busy since the machine started, for all processes.

    The kernel counts in ticks.
    """
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
    """Return the bytes sent so far through all interfaces but loopback.

    They are counted by network namespace, so jobs that share one are counted together.
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
