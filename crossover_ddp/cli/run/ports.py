"""Where each sibling job's ranks meet: a place of its own for every job.

[Note: ports]
A place that the user has named stays. Otherwise torchrun on one node chooses a free port (``--standalone``), which no
other program can take meanwhile, and a command that starts no torchrun gets ``MASTER_PORT``. Several nodes must agree
on a port, so there the user names it. torchrun's own parser reads its arguments: a mistake is found before anything
starts. Our design.
"""

import argparse
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from .commands import Command, CommandError

_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
_WITH_VALUE = ("-W", "-X", "-c")  # of Python's options
_DEFAULTS: dict[str, Any] = {
    "nnodes": "1:1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "master_addr": "127.0.0.1",
    "master_port": None,
    "standalone": False,
}


class Rendezvous(NamedTuple):
    """How the ranks of one job meet."""

    words: tuple[str, ...]
    """The command with what was added."""
    environment: Mapping[str, str]
    """What was added to its variables."""
    where: str
    """For people; the same for two jobs only if they would disturb each other."""
    named: bool
    """Whether the user has named the place."""


def rendezvous(
    commands: Sequence[Command],
    inherited: Mapping[str, str],
    free_port: Callable[[], int],
    *,
    at_once: int,
) -> list[Rendezvous]:
    """Return a place to meet for every job.

    Args:
        commands: all jobs. torchrun may stand behind other programs (``env``, ``numactl``, …), not in ``bash -c``.
        inherited: the variables that all jobs get; ``PET_*`` are torchrun's.
        free_port: returns another free port of this machine at each call.
        at_once: how many may run at the same time; with 1 they may share a place.

    Raises `CommandError` if two jobs name the same place, or torchrun refuses a command, with torchrun's message.
    """
    taken: set[int] = set()

    def another_port() -> int:
        while (port := free_port()) in taken:
            pass
        taken.add(port)
        return port

    places = [_place(each, index, inherited, another_port) for index, each in enumerate(commands)]
    first: dict[str, str] = {}
    for command, place in zip(commands, places, strict=True):
        other = first.setdefault(place.where, command.name) if place.named else command.name
        if other != command.name and at_once > 1:
            raise CommandError(
                f"expected a rendezvous of its own for each job, got {place.where} for both {other} and "
                f"{command.name}; give one of them another port, or leave it out on one node"
            )
    return places


def _place(
    command: Command, index: int, inherited: Mapping[str, str], free_port: Callable[[], int]
) -> Rendezvous:
    at = _arguments_of_torchrun(command.words)
    if at is not None:
        return _place_of_torchrun(command, at, _parse(command, at, {**inherited, **command.environment}))
    own, first = command.environment.get("MASTER_PORT"), inherited.get("MASTER_PORT", "")
    if own:
        host = command.environment.get("MASTER_ADDR") or "localhost"
        return Rendezvous(command.words, {}, f"{host}:{own}", named=True)
    # Counted from an inherited one, so that all nodes agree.
    counted = first.isdecimal() and int(first) > 0
    port = int(first) + index if counted else free_port()
    return Rendezvous(command.words, {"MASTER_PORT": str(port)}, f"localhost:{port}", named=counted)


def _place_of_torchrun(command: Command, at: int, found: argparse.Namespace) -> Rendezvous:
    added: tuple[str, ...] = ()
    where, endpoint = "", found.rdzv_endpoint
    if not endpoint and found.master_port is not None:
        endpoint = f"{found.master_addr}:{found.master_port}"
    if endpoint and not found.standalone and not endpoint.endswith(":0"):
        where = endpoint.replace("127.0.0.1:", "localhost:")
        # Two jobs of c10d with one endpoint share the store of whichever comes first, and end with it.
        if found.rdzv_id != _DEFAULTS["rdzv_id"] and found.rdzv_backend not in ("c10d", "static"):
            where += f" with id {found.rdzv_id!r}"
    elif not endpoint and not found.standalone:
        if _most_nodes(command, found) > 1:
            raise CommandError(
                f"{command.name}: expected a port for {found.nnodes} nodes, got none; add --master-port PORT (or "
                "--rdzv-endpoint HOST:PORT), another one for each job"
            )
        added = ("--standalone",) if found.rdzv_backend == "static" else ("--rdzv-endpoint=localhost:0",)
    words = (*command.words[:at], *added, *command.words[at:])
    return Rendezvous(words, {}, where or "a free port, chosen by torchrun", named=bool(where))


def _most_nodes(command: Command, found: argparse.Namespace) -> int:
    try:
        return int(str(found.nnodes).rpartition(":")[2])
    except ValueError as error:
        raise CommandError(f"{command.name}: expected --nnodes N or MIN:MAX, got {found.nnodes!r}") from error


def _arguments_of_torchrun(words: tuple[str, ...]) -> int | None:
    """Return where torchrun's own arguments begin; what follows another script is that script's."""
    for index, word in enumerate(words):
        name = PurePath(word).name
        if name == "torchrun":
            return index + 1
        if name.startswith("python"):
            return _arguments_behind_python(words, index + 1)
    return None


def _arguments_behind_python(words: tuple[str, ...], at: int) -> int | None:
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "-m":
            return at + 2 if words[at + 1 : at + 2] and words[at + 1] in _MODULES else None
        at += 2 if words[at] in _WITH_VALUE else 1
    return at + 1 if at < len(words) and PurePath(words[at]).name == "torchrun" else None


def _parse(command: Command, at: int, variables: Mapping[str, str]) -> argparse.Namespace:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    # An argument of torch.distributed.launch, which torchrun does not know.
    parser.add_argument("--use-env", "--use_env", action="store_true")
    named = {name: variables.get(f"PET_{name.upper()}", default) for name, default in _DEFAULTS.items()}
    parser.set_defaults(**named | {"standalone": named["standalone"] not in (False, "", "0")})
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parser.parse_args(command.words[at:])
    except SystemExit as error:
        reason = said.getvalue().strip().rpartition("\n")[2].partition("error: ")[2]
        raise CommandError(
            f"{command.name}: expected a command that torchrun takes, got {' '.join(command.words)!r}: {reason}"
        ) from error
