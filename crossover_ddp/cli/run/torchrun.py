"""Read a torchrun command with torchrun's own parser, so that a mistake is found before anything starts."""

import argparse
import contextlib
import io
from collections.abc import Mapping
from pathlib import PurePath

from .commands import Command, CommandError
from .ports import Launch

_MODULES = {"torch.distributed.run", "torch.distributed.launch"}
_DEFAULTS = {
    "nnodes": "1:1",
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "master_addr": "127.0.0.1",
    "master_port": None,
    "standalone": False,
}


def launch_of(command: Command, inherited: Mapping[str, str]) -> Launch | None:
    """Return the rendezvous that the command gives to torchrun; None if it starts no torchrun.

    Args:
        command: torchrun may stand behind other programs (``env``, ``numactl``, …), not inside ``bash -c``.
        inherited: the variables that all jobs get; ``PET_*`` are torchrun's.

    Raises `CommandError` with torchrun's own message if torchrun refuses the command.
    """
    at = _arguments_of_torchrun(command.words)
    if at is None:
        return None
    variables = {**inherited, **command.environment}
    found = _parse(command, at, variables)
    try:
        nodes = int(str(found.nnodes).rpartition(":")[2])
    except ValueError as error:
        raise CommandError(f"{command.name}: expected --nnodes N or MIN:MAX, got {found.nnodes!r}") from error
    return Launch(
        at=at,
        nodes=nodes,
        standalone=bool(found.standalone),
        backend=found.rdzv_backend,
        endpoint=found.rdzv_endpoint,
        id=found.rdzv_id,
        master_address=found.master_addr,
        master_port=found.master_port,
    )


def _arguments_of_torchrun(words: tuple[str, ...]) -> int | None:
    for index, word in enumerate(words):
        if PurePath(word).name == "torchrun":
            return index + 1
        if word == "-m" and index and words[index + 1 : index + 2] and words[index + 1] in _MODULES:
            return index + 2
    return None


def _parse(command: Command, at: int, variables: Mapping[str, str]) -> argparse.Namespace:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    # An argument of torch.distributed.launch, which torchrun does not know.
    parser.add_argument("--use-env", "--use_env", action="store_true")
    parser.set_defaults(**{name: _default(name, variables) for name in _DEFAULTS})
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return parser.parse_args(command.words[at:])
    except SystemExit as error:
        reason = said.getvalue().strip().rpartition("\n")[2].partition("error: ")[2]
        raise CommandError(
            f"{command.name}: expected a command that torchrun takes, got {' '.join(command.words)!r}: {reason}"
        ) from error


def _default(name: str, variables: Mapping[str, str]) -> object:
    value = variables.get(f"PET_{name.upper()}")
    if value is None:
        return _DEFAULTS[name]
    if name == "standalone":
        return value not in ("", "0")
    return int(value) if name == "master_port" and value.isdecimal() else value
