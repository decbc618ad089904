"""A cluster of two to four nodes on one machine, and jobs that run on it.

Example::

    with Cluster(nodes=2, rate_mbit=200) as cluster:
        cluster.run([Job("a", "python train.py"), Job("b", "python train.py")], timeout_s=600, out="runs/x")
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from .jobs import Job, LabRun, RunResult
from .nodes import Nodes

RUN_FILE: Final = "lab.json"


class Cluster(Nodes):
    """Nodes that run jobs; arguments and failures are those of ``Nodes``."""

    def run(
        self,
        jobs: Sequence[Job],
        timeout_s: float,
        *,
        out: str | os.PathLike[str],
        watch: Callable[[], None] | None = None,
    ) -> RunResult:
        """Run the jobs side by side, ``ranks_per_node`` of each on every node, until all are done.

        Args:
            jobs: what to run; their names must differ.
            timeout_s: longest time for all of it.
            out: directory for ``<job>/rank<r>.log``, the ranks' own logs and timelines.
            watch: called about once a second while they run; None lets the lab sleep.

        On failure: ``JobFailedError`` with the failing ranks' last lines, or
        ``RunTimeoutError``; the other ranks have been ended.
        """
        if not jobs or len({job.name for job in jobs}) != len(jobs):
            raise ValueError(f"expected jobs with different names, got {[job.name for job in jobs]}")
        directory = Path(out).resolve()
        sent_before, dropped_before = self.sent_bytes(), self.dropped()
        attempt = LabRun(self, jobs, directory)
        try:
            attempt.until_done(timeout_s, watch)
        finally:
            end_s = time.monotonic()
            self.end(*[rank.process for rank in attempt.ranks])
        result = RunResult(
            directory=directory,
            begin_s=attempt.begin_s,
            end_s=end_s,
            job_end_s=attempt.job_end_s,
            sent_bytes=[now - then for now, then in zip(self.sent_bytes(), sent_before, strict=True)],
            dropped=self.dropped() - dropped_before,
        )
        self._write_run(jobs, result)
        return result

    def _write_run(self, jobs: Sequence[Job], result: RunResult) -> None:
        description = {
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "rate_mbit": self.rate_mbit,
            "mtu": self.mtu,
            "cores": self.cores,
            "devices": [self.device(node) for node in range(self.nodes)],
            "jobs": {job.name: {"command": job.words, "delay_s": job.delay_s} for job in jobs},
            "begin_s": result.begin_s,
            "end_s": result.end_s,
            "job_end_s": dict(result.job_end_s),
            "sent_bytes": list(result.sent_bytes),
            "dropped": result.dropped,
        }
        temporary = result.directory / f"{RUN_FILE}.new"
        temporary.write_text(json.dumps(description, indent=2) + "\n")
        os.replace(temporary, result.directory / RUN_FILE)
