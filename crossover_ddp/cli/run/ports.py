"""Where each sibling job's ranks meet: a port of its own for every job. Pure: opens no port, reads no variable.

[Note: ports]
A port that the user has named stays. Otherwise a job on one node lets torchrun choose a free port (``--standalone``),
which no other program can take meanwhile. A job on several nodes gets torchrun's usual port plus its place among the
commands, so all nodes that run the same commands find the same ports. A command that starts no torchrun gets
``MASTER_PORT``. Our design.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .commands import Command, CommandError

STATIC_PORT = 29500  # torchrun's default
C10D_PORT = 29400
_LAST_PORT = 65535
_HERE = {"", "localhost", "127.0.0.1", "::1", "[::1]"}


class Launch(NamedTuple):
    """The rendezvous that a torchrun command names, with torchrun's defaults."""

    at: int
    """The place of torchrun's own arguments among the command's words."""
    nodes: int
    """The most that may take part."""
    standalone: bool = False
    backend: str = "static"
    endpoint: str = ""
    id: str = "none"
    master_address: str = "127.0.0.1"
    master_port: int | None = None


class Rendezvous(NamedTuple):
    """How the ranks of one job meet."""

    words: tuple[str, ...]
    """The command with what was added."""
    environment: Mapping[str, str]
    """What was added to its variables."""
    where: str
    """For people."""


class _Endpoint(NamedTuple):
    """A place that only one job at a time can use."""

    host: str
    port: str
    id: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" with id {self.id!r}" if self.id else "")


def rendezvous(
    commands: Sequence[Command],
    launches: Sequence[Launch | None],
    inherited: Mapping[str, str],
    free_port: Callable[[], int],
    *,
    at_once: int,
) -> list[Rendezvous]:
    """Return a place to meet for every job.

    Args:
        commands: all jobs.
        launches: for each the rendezvous that it names; None if the command starts no torchrun.
        inherited: the variables that all jobs get.
        free_port: returns another free port of this machine at each call.
        at_once: how many may run at the same time; with 1 they may share a port.

    Raises `CommandError` if two jobs name the same place.
    """
    named = [_named(command, launch) for command, launch in zip(commands, launches, strict=True)]
    if at_once > 1:
        _refuse_common(commands, named)
    ports = _Ports({endpoint.port for endpoint in named if endpoint}, len(commands), free_port)
    return [
        _of_torchrun(command, launch, endpoint, index, ports)
        if launch is not None
        else _of_another(command, endpoint, index, inherited, ports)
        for index, (command, launch, endpoint) in enumerate(zip(commands, launches, named, strict=True))
    ]


class _Ports:
    """Ports that no job has named."""

    def __init__(self, named: set[str], count: int, free_port: Callable[[], int]) -> None:
        self._taken = set(named)
        self._count = count
        self._free_port = free_port

    def free(self) -> int:
        while str(port := self._free_port()) in self._taken:
            pass
        self._taken.add(str(port))
        return port

    def counted(self, first: int, index: int) -> int:
        """Return the same port on every node: that of the ``index``-th job, counted from ``first``."""
        port = first + index
        while str(port) in self._taken:
            port += self._count
        if port > _LAST_PORT:
            raise CommandError(f"expected ports up to {_LAST_PORT}, got {port}; choose a lower MASTER_PORT")
        self._taken.add(str(port))
        return port


def _named(command: Command, launch: Launch | None) -> _Endpoint | None:
    """Return the place that the user has named for this job alone; None if there is none, or torchrun chooses."""
    if launch is None:
        port = command.environment.get("MASTER_PORT")
        host = command.environment.get("MASTER_ADDR", "")
        return _Endpoint(_host(host), port) if port else None
    if launch.standalone:
        return None
    if launch.backend not in ("static", "c10d"):
        return _Endpoint(launch.endpoint, launch.backend, launch.id)
    if launch.endpoint:
        host, colon, port = launch.endpoint.rpartition(":")
        if not colon or not port.isdecimal():
            host, port = launch.endpoint, str(C10D_PORT if launch.backend == "c10d" else STATIC_PORT)
        return _Endpoint(_host(host), port) if port != "0" else None
    if launch.backend == "static" and launch.master_port is not None:
        return (
            _Endpoint(_host(launch.master_address), str(launch.master_port)) if launch.master_port else None
        )
    return None


def _host(host: str) -> str:
    return "localhost" if host in _HERE else host


def _refuse_common(commands: Sequence[Command], named: Sequence[_Endpoint | None]) -> None:
    first: dict[_Endpoint, str] = {}
    for command, endpoint in zip(commands, named, strict=True):
        if endpoint is None:
            continue
        if endpoint in first:
            raise CommandError(
                f"expected a rendezvous of its own for each job, got {endpoint} for both {first[endpoint]} and "
                f"{command.name}; give one of them another port, or leave it out on one node"
            )
        first[endpoint] = command.name


def _of_torchrun(
    command: Command, launch: Launch, endpoint: _Endpoint | None, index: int, ports: _Ports
) -> Rendezvous:
    added: tuple[str, ...] = ()
    where = str(endpoint) if endpoint else "a free port, chosen by torchrun"
    silent = not launch.standalone and not launch.endpoint and launch.master_port is None
    if silent and launch.backend == "c10d":
        if launch.nodes > 1:
            raise CommandError(
                f"{command.name}: expected --rdzv-endpoint HOST:PORT for {launch.nodes} nodes, got none"
            )
        added = ("--rdzv-endpoint=localhost:0",)
    elif silent and launch.backend == "static":
        if launch.nodes > 1:
            port = ports.counted(STATIC_PORT, index)
            added, where = (f"--master-port={port}",), f"{launch.master_address}:{port}"
        else:
            added = ("--standalone",)
    words = (*command.words[: launch.at], *added, *command.words[launch.at :])
    return Rendezvous(words, {}, where)


def _of_another(
    command: Command, endpoint: _Endpoint | None, index: int, inherited: Mapping[str, str], ports: _Ports
) -> Rendezvous:
    if endpoint is not None:
        return Rendezvous(command.words, {}, f"MASTER_PORT={endpoint.port}")
    first = inherited.get("MASTER_PORT", "")
    # The first job keeps an inherited one; the others are counted from it, so that all nodes agree.
    port = ports.counted(int(first), index) if first.isdecimal() and int(first) else ports.free()
    return Rendezvous(command.words, {"MASTER_PORT": str(port)}, f"MASTER_PORT={port}")
