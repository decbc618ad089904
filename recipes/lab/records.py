"""Reads a run of the lab from its directory: step logs, timelines and the lab's own record."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .analysis import JobFigures, MeteredStep, job_figures, makespan_s
from .nodes import RUN_FILE
from .picture import draw
from .spans import TimelineSpan, occupancy, read_spans


@dataclass(frozen=True)
class Run:
    """A run as the lab and its ranks have recorded it."""

    directory: Path
    steps: Mapping[str, Mapping[int, Sequence[MeteredStep]]]
    spans: Sequence[TimelineSpan]
    lab: Mapping[str, Any]

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self.lab["jobs"])

    def figures(self) -> dict[str, JobFigures]:
        """Return the figures of every job."""
        return {
            job: job_figures(
                job,
                self.steps[job],
                self.spans,
                rate_mbit=self.lab["rate_mbit"],
                alone=len(self.jobs) == 1,
            )
            for job in self.jobs
        }

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the run as a JSON document."""
        duration_s = self.lab["end_s"] - self.lab["begin_s"]
        capacity_bytes = (self.lab["rate_mbit"] or 0) * 1e6 / 8 * duration_s
        links = [
            {
                "node": node,
                "sent_bytes": sent,
                "utilisation": sent / capacity_bytes if capacity_bytes else None,
            }
            for node, sent in enumerate(self.lab["sent_bytes"])
        ]
        return {
            **{name: self.lab[name] for name in ("nodes", "rate_mbit", "mtu")},
            "wall_s": duration_s,
            "makespan_s": makespan_s(log for job in self.steps.values() for log in job.values()),
            "jobs": {job: figures.as_json() for job, figures in self.figures().items()},
            "links": links,
            "dropped_packets": self.lab["dropped"],
            "devices": {device: occupancy(self.spans, device) for device in self.lab["devices"]},
        }


def load_run(directory: Path) -> Run:
    """Read a run of the lab from its directory."""
    file = directory / RUN_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"expected a run of the lab with {file.name}, got {directory} without one"
        )
    lab = json.loads(file.read_text())
    jobs = list(lab["jobs"])
    spans = [span for job in jobs for span in load_spans(directory / job / "timeline", job)]
    return Run(
        directory=directory,
        steps={job: load_steps(directory / job) for job in jobs},
        spans=sorted(spans, key=lambda span: span.begin_s),
        lab=lab,
    )


def draw_run(run: Run, path: Path | None = None, *, title: str | None = None) -> Path:
    """Draw a run into ``path``. Default: ``timeline.png`` in the run's directory."""
    rate = f", {run.lab['rate_mbit']:g} Mbit/s" if run.lab["rate_mbit"] else ""
    title = f"{run.directory.name}: {run.lab['nodes']} nodes{rate}" if title is None else title
    return draw(run.spans, path or run.directory / "timeline.png", title=title, jobs=run.jobs)


def load_spans(directory: Path, job: str) -> list[TimelineSpan]:
    """Read the timeline files of one job. A line that a kill has cut off is skipped.

    All nodes are on one machine, so the spans already have the clock of the step logs.
    """
    found = [
        span for path in sorted(directory.glob("rank*.json")) for span in read_spans(path, job)
    ]
    return sorted(found, key=lambda span: span.begin_s)


def load_steps(directory: Path) -> dict[int, list[MeteredStep]]:
    """Read the steps of one job, by rank."""
    return {
        rank: [_step(record) for record in log if record.get("event") == "step"]
        for rank, log in load_logs(directory).items()
    }


def load_logs(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the logs of one job, by rank."""
    found = {path.stem.removeprefix("rank"): path for path in directory.glob("rank*.jsonl")}
    return {
        rank: _records(found[str(rank)])
        for rank in sorted(int(rank) for rank in found if rank.isdigit())
    }


def _step(record: Mapping[str, Any]) -> MeteredStep:
    names = ("step", "begin_s", "end_s", "core_busy_s", "wire_bytes", "loss")
    return MeteredStep(**{name: record.get(name) for name in names})  # type: ignore[arg-type]


def _records(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
