"""A cluster of one to four nodes on one machine, and jobs and processes that run on it.

    with Cluster(nodes=2, rate_mbit=200) as cluster:
        jobs = [Job("a", "python train.py"), Job("b", "python train.py")]
        cluster.run(jobs, timeout_s=600, out="runs/x")

Node i is a network namespace with a shaped link, and core i, which is "device i". The ranks of all
jobs on the node share the core. A job has one rank on each node, or several, which share the core
and the link as local ranks do.

The mark of [Note: no process is left behind] in `crossover_ddp._system.children` is the variable ``CROSSOVER_LAB``.
The lab searches for marked processes when it closes. So does the next lab when it starts, and
``python recipes/lab clean``.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from crossover_ddp._system.children import Child, end, end_marked, marked

from .jobs import Job, LabRun, RunResult
from .network import (
    INTERFACE,
    LabError,
    LabId,
    Network,
    delete_namespace,
    lab_namespaces,
    why_not_shaped,
)
from .signals import endings_raise, undisturbed

LAB_VARIABLE: Final = "CROSSOVER_LAB"
_serials = count()
_FIRST_PORT: Final = 29500
RUN_FILE: Final = "lab.json"


class Cluster:
    """Emulate ``nodes`` machines behind links of ``rate_mbit``.

    Args:
        nodes: 1 to 4, default 2. A single node has no link, so it is never shaped.
        rate_mbit: rate of each node's egress in 10**6 bit/s, headers included. Default 200.
        mtu: largest packet on the links, in bytes. Default 9000.
        ranks_per_node: ranks of each job on a node, 1 to 8, default 1. Rank r is on node
            r // ranks_per_node.
        pin: "core", the default, pins every process of node i to the i-th core that this process
            may use (modulo their number). "none" does not pin.
        shaped: False runs without namespaces, over loopback. Default True.

    On failure: ``LabError`` with the missing command or right. Namespaces and processes are removed
    at the end of the ``with`` block, also after Ctrl-C, SIGTERM and exceptions. If the lab is
    killed, the next one, or ``python recipes/lab clean``, removes them.
    Use it from the main thread: ranks die with the *thread* that started them.
    """

    def __init__(
        self,
        nodes: int = 2,
        rate_mbit: float = 200.0,
        mtu: int = 9000,
        *,
        ranks_per_node: int = 1,
        pin: Literal["core", "none"] = "core",
        shaped: bool = True,
    ) -> None:
        _check(nodes, rate_mbit, mtu, pin, ranks_per_node)
        shaped = shaped and nodes > 1
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.mtu = mtu
        self.rate_mbit = rate_mbit if shaped else None
        self.cores = _cores(nodes, pin)
        self.network: Network | None = None
        self._shaped = shaped
        self._processes: list[Child] = []
        self._ports = count(_FIRST_PORT)
        self._exits = ExitStack()
        self.lab = LabId.of_this_process(next(_serials))

    def __enter__(self) -> "Cluster":
        with ExitStack() as undo:
            undo.enter_context(endings_raise())
            clean()
            undo.callback(self._clear)
            if self._shaped:
                reason = why_not_shaped()
                if reason:
                    raise LabError(
                        f"no network can be emulated here: {reason}; shaped=False does without"
                    )
                assert self.rate_mbit is not None
                self.network = Network(
                    self.lab,
                    nodes=self.nodes,
                    rate_mbit=self.rate_mbit,
                    mtu=self.mtu,
                    cores=self.cores,
                )
            self._exits = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def set_rate(self, rate_mbit: float) -> None:
        """Change the rate of all links. Jobs may be running."""
        if self.network is None:
            raise LabError(
                "an unshaped cluster has no links, so it has no rate; use shaped=True as root"
            )
        self.network.set_rate(rate_mbit)
        self.rate_mbit = rate_mbit

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Node and local rank of each rank of a job, in the order of ranks."""
        return [(node, local) for node in range(self.nodes) for local in range(self.ranks_per_node)]

    def sent_bytes(self) -> list[int]:
        """Return the wire bytes that left each node so far. Zeros in an unshaped cluster."""
        return [self.network.sent_bytes(node) if self.network else 0 for node in range(self.nodes)]

    def port(self) -> int:
        """Return a rendezvous port that no other job of this cluster has."""
        if self.network:
            return next(self._ports)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def device(self, node: int) -> str:
        """Return the name of the device that the ranks of all jobs on a node share."""
        return f"lab-node{node}-device{node}"

    def environment(
        self,
        node: int,
        *,
        local_rank: int = 0,
        port: int | None = None,
        directory: Path | None = None,
    ) -> dict[str, str]:
        """Return the variables that make a process a rank of a job on a node.

        Args:
            node: number of the node.
            local_rank: the rank among the job's ranks on the node. Default 0.
            port: the job's rendezvous port (``Cluster.port``). Default None: not set.
            directory: directory for the job's step logs and timeline. Default None: no logs.
        """
        variables = {
            "RANK": str(node * self.ranks_per_node + local_rank),
            "WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": self.network.address(0) if self.network else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": INTERFACE if self.network else "lo",
            "OMP_NUM_THREADS": "1",
            "CROSSOVER_DEVICE": self.device(node),
            "CROSSOVER_GROUP": str(self.lab),
        }
        if port is not None:
            variables["MASTER_PORT"] = str(port)
        if directory is not None:
            variables["CROSSOVER_LAB_DIR"] = str(directory)
            variables["CROSSOVER_TIMELINE"] = str(directory / "timeline")
        return variables

    def popen(
        self,
        node: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Child:
        """Start one process on a node, pinned to its core, and return it.

        It leads a session: ``process.signal_session(SIGSTOP)`` stops it with all its children. The
        cluster ends it when it closes.

        Args:
            node: number of the node.
            command: the words. ``python`` is the interpreter that runs the lab.
            env: variables in addition to the caller's and to ``Cluster.environment(node)``.
            options: further options of ``subprocess.Popen`` (stdout, cwd, text, …).
        """
        if not 0 <= node < self.nodes:
            raise ValueError(f"expected a node from 0 to {self.nodes - 1}, got node={node}")
        variables = {**os.environ, **self.environment(node), **(env or {})}
        variables[LAB_VARIABLE] = str(self.lab)
        variables["PATH"] = f"{Path(sys.executable).parent}:{variables.get('PATH', os.defpath)}"
        words = [sys.executable if command[0] == "python" else command[0], *command[1:]]
        if shutil.which(words[0], path=variables["PATH"]) is None:
            raise LabError(
                f"expected a program to run on node {node}, got {words[0]!r}, which cannot be found"
            )
        process = Child(
            [*(self.network.enter(node) if self.network else []), *words],
            variables,
            death_signal=signal.SIGKILL,
            core=self.cores[node],
            **options,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        jobs: Sequence[Job],
        timeout_s: float,
        *,
        out: str | os.PathLike[str],
        watch: Callable[[], None] | None = None,
    ) -> RunResult:
        """Run jobs side by side, ``ranks_per_node`` of each on every node, until all have ended.

        Args:
            jobs: the jobs. Their names must differ.
            timeout_s: longest time for all of them.
            out: directory for ``<job>/rank<r>.log``, the ranks' own logs and timelines.
            watch: called about once a second while they run. Default None: the lab sleeps.

        On failure: ``JobFailedError`` with the last lines of the failing ranks, or
        ``RunTimeoutError``. The other ranks have been ended.
        """
        if not jobs or len({job.name for job in jobs}) != len(jobs):
            raise ValueError(
                f"expected jobs with different names, got {[job.name for job in jobs]}"
            )
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
            sent_bytes=[
                now - then for now, then in zip(self.sent_bytes(), sent_before, strict=True)
            ],
            dropped=self.dropped() - dropped_before,
        )
        description = {
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "rate_mbit": self.rate_mbit,
            "mtu": self.mtu,
            "cores": self.cores,
            "devices": [self.device(node) for node in range(self.nodes)],
            "jobs": {job.name: {"command": job.words} for job in jobs},
            **asdict(result),
        }
        temporary = directory / f"{RUN_FILE}.new"
        temporary.write_text(json.dumps(description, indent=2, default=str) + "\n")
        os.replace(temporary, directory / RUN_FILE)
        return result

    def end(self, *started: Child) -> None:
        """End processes of ``popen`` and their sessions. Ctrl-C is held back meanwhile."""
        with undisturbed():
            end(started)
            for process in started:
                with suppress(ValueError):
                    self._processes.remove(process)

    def dropped(self) -> int:
        """Return how many packets the links dropped so far. More than 0 spoils timings."""
        return self.network.dropped() if self.network else 0

    def _clear(self) -> None:
        with undisturbed():
            end(self._processes)
            self._processes.clear()
            end_marked(LAB_VARIABLE, str(self.lab))
            if self.network:
                self.network.close()
                self.network = None


def clean() -> list[str]:
    """Remove the processes and namespaces of labs that were killed, and return a list of them.

    Running labs, this one included, are left alone.
    """
    done = []
    stale = {lab for lab, _ in marked_labs() if not lab.alive()}
    for lab in sorted(stale, key=str):
        done += [f"process {pid} of {lab}" for pid in end_marked(LAB_VARIABLE, str(lab))]
    for lab, namespace in list(lab_namespaces()):
        if not lab.alive():
            # Another lab that is starting may delete it at the same time.
            with suppress(LabError):
                delete_namespace(namespace)
                done.append(f"namespace {namespace}")
    return done


def marked_labs() -> Iterator[tuple[LabId, int]]:
    """Yield the lab and the id of every other process of this user that has a lab's mark."""
    for pid, mark in marked(LAB_VARIABLE):
        lab = LabId.parse(mark)
        if lab is not None:
            yield lab, pid


def _cores(nodes: int, pin: str) -> list[int | None]:
    usable = sorted(os.sched_getaffinity(0))
    return [usable[node % len(usable)] if pin == "core" else None for node in range(nodes)]


def _check(nodes: int, rate_mbit: float, mtu: int, pin: str, ranks_per_node: int) -> None:
    if not 1 <= nodes <= 4:
        raise ValueError(f"expected 1 to 4 nodes, got nodes={nodes}")
    if not 1 <= ranks_per_node <= 8:
        raise ValueError(
            f"expected 1 to 8 ranks on a node, got ranks_per_node={ranks_per_node}; "
            "they share one core"
        )
    if rate_mbit <= 0:
        raise ValueError(f"expected a rate > 0, got rate_mbit={rate_mbit}; give it in Mbit/s")
    if not 576 <= mtu <= 65535:
        raise ValueError(f"expected an MTU from 576 to 65535 bytes, got mtu={mtu}")
    if pin not in ("core", "none"):
        raise ValueError(f"expected pin 'core' or 'none', got pin={pin!r}")
