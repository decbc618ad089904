"""Finds and reads the traces that ranks recorded."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .record import FORMAT_VERSION, RECORDING

Event = dict[str, Any]


def recordings(directories: Sequence[Path]) -> list[Path]:
    """Return the paths of all recordings in the directories and their subdirectories.

    Raises `NotADirectoryError` if one of ``directories`` is not a directory.
    """
    for directory in directories:
        if not directory.is_dir():
            raise NotADirectoryError(
                f"expected a directory with recordings, got {directory}, which is not a directory"
            )
    return sorted({path.resolve() for each in directories for path in each.rglob("rank*-*.json")})


def events(path: Path) -> Iterator[Event]:
    """Yield the events in one rank's recording. The first event identifies the rank.

    A line is skipped if a kill has cut it off. Raises ``ValueError`` if the file is not a recording
    in this version of the format.
    """
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    whole = [line[:-2] for line in lines if line.endswith(",\n")]
    try:
        found: list[Event] = [json.loads(line) for line in whole]
        version = found[0]["args"]["version"] if found and found[0]["name"] == RECORDING else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a recording, got {error}") from error
    if whole and version != FORMAT_VERSION:
        raise ValueError(f"{path}: expected a recording of version {FORMAT_VERSION}, got {version}")
    yield from found
