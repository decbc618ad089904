"""Read the files that jobs have left in their timeline directories, even damaged ones."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from .merge import RawSpan, Recording, RecordingHeader
from .record import FORMAT_VERSION

FILE_NAME: Final = re.compile(r"rank\d+-\d+(-\d+)?\.jsonl")
_DIRECTORY: Final = "timeline"
"""A directory of this name is named after the one above it."""
_SPAN: Final = ("kind", "begin_s", "end_s")
_SHOWN_CHARACTERS: Final = 40


class FileProblem(NamedTuple):
    """What is wrong with a file, and from which line on."""

    path: str
    line: int
    what: str


@dataclass
class FoundTimelines:
    """What `read` found in some directories.

    Args:
        recordings: of the files that could be read.
        problems: of those that could not, as a whole or in some lines.
        unfinished: last lines cut off by a rank's end.
        empty: files without a single line, of ranks that ended before they could write it.
        ignored: spans whose times are no numbers, or that end before they begin.
    """

    recordings: list[Recording] = field(default_factory=list)
    problems: list[FileProblem] = field(default_factory=list)
    unfinished: int = 0
    empty: int = 0
    ignored: int = 0


class _NotOursError(Exception):
    """The file is no timeline; the text says why."""


def read(directories: Sequence[Path]) -> FoundTimelines:
    """Read all timelines in and below some directories; a file found twice is read once.

    On failure: ``NotADirectoryError`` or ``FileNotFoundError`` names a directory that is none. Files that are no
    timelines, or of a newer version, are left out and become problems.
    """
    paths: dict[Path, None] = {}
    for directory in directories:
        if not directory.is_dir():
            missing = NotADirectoryError if directory.exists() else FileNotFoundError
            raise missing(f"expected a directory with timelines, got {directory}, which is none")
        found = (path for path in directory.rglob("rank*.jsonl") if FILE_NAME.fullmatch(path.name))
        paths |= dict.fromkeys(path.resolve() for path in sorted(found))
    labels = _labels({path.parent for path in paths})
    reading = FoundTimelines()
    for path in paths:
        read_file(path, labels[path.parent], reading)
    return reading


def read_file(path: Path, label: str, reading: FoundTimelines) -> None:
    """Add the contents of ``path`` to ``reading``."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        reading.problems.append(FileProblem(str(path), 0, f"cannot be read: {error.strerror}"))
        return
    first, *rest = text.split("\n")
    if not text:
        reading.empty += 1
        return
    try:
        header = _header(first)
    except _NotOursError as error:
        reading.problems.append(FileProblem(str(path), 1, str(error)))
        return
    # Text behind the last end of a line is a line that its rank could not finish.
    if rest and rest.pop():
        reading.unfinished += 1
    spans, problem = _spans(rest, reading)
    if problem:
        line, what = problem
        reading.problems.append(FileProblem(str(path), line, what))
    reading.recordings.append(Recording(label, header, spans))


def _header(line: str) -> RecordingHeader:
    record = _record(line)
    if record is None or "rank" not in record or "device" not in record:
        raise _NotOursError(
            f"expected the header of a timeline, got {_shown(line)}; is this file another program's? Move it away"
        )
    version = record.get("version")
    if version != FORMAT_VERSION:
        raise _NotOursError(
            f"expected a timeline of version {FORMAT_VERSION}, got version {version!r}; read it with the crossover_ddp "
            "that wrote it"
        )
    host = str(record.get("host", "unknown"))
    times_s = [_number(record.get(name, 0.0)) for name in ("monotonic_s", "wall_s")]
    if None in times_s or not isinstance(record["rank"], int):
        raise _NotOursError(f"expected numbers for rank, monotonic_s and wall_s, got {_shown(line)}")
    job = record.get("job")
    return RecordingHeader(
        rank=record["rank"],
        device=str(record["device"]),
        host=host,
        pid=int(_number(record.get("pid")) or 0),
        clock=str(record.get("clock")),
        monotonic_s=times_s[0] or 0.0,
        wall_s=times_s[1] or 0.0,
        job=str(job) if job else None,
    )


def _spans(lines: Iterable[str], reading: FoundTimelines) -> tuple[list[RawSpan], tuple[int, str] | None]:
    """Return the spans, and the number of the first line that is no span, with what is wrong with it."""
    spans, problem, strange = [], None, 0
    for number, line in enumerate(lines, start=2):
        record = _record(line)
        if record is None or not isinstance(record.get("kind"), str):
            strange += 1
            problem = problem or (number, f"expected a span, got {_shown(line)}")
            continue
        begin_s, end_s = _number(record.get("begin_s")), _number(record.get("end_s"))
        if begin_s is None or end_s is None or end_s < begin_s:
            reading.ignored += 1
            continue
        detail = {name: value for name, value in record.items() if name not in _SPAN}
        spans.append(RawSpan(record["kind"], begin_s, end_s, detail))
    if problem and strange > 1:
        problem = (problem[0], f"{problem[1]}, and {strange - 1} more such lines")
    return spans, problem


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=str)  # NaN and Infinity are no JSON
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(line: str) -> str:
    return repr(line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "…")


def _labels(directories: Iterable[Path]) -> Mapping[Path, str]:
    """Name directories by as few of their last parts as distinguish them."""
    parts = {
        path: path.parts[:-1] if path.name == _DIRECTORY and len(path.parts) > 2 else path.parts
        for path in directories
    }
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(own[-count:]) for path, own in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: str(path) for path in parts}
