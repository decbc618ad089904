"""One timeline from the recordings of many processes: jobs get names, clocks are brought together. Pure.

Processes of one machine share a clock. Clocks of several machines are brought together by their wall clocks, which NTP
keeps within milliseconds; shares, turns and hand-overs are worked out on one device each, so on one clock.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from .spans import TimelineSpan


@dataclass(frozen=True)
class RecordingHeader:
    """The rank that wrote a recording, and its clock."""

    rank: int
    device: str
    host: str
    pid: int
    clock: str
    monotonic_s: float
    wall_s: float
    job: str | None = None


@dataclass(frozen=True)
class RawSpan:
    """A span as its process saw it."""

    kind: str
    begin_s: float
    end_s: float
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What one process has recorded.

    Args:
        label: the name of a job whose recordings are all in this recording's directory.
        header: the rank that wrote it.
        spans: in any order.
    """

    label: str
    header: RecordingHeader
    spans: Sequence[RawSpan]


@dataclass(frozen=True)
class Merged:
    """All jobs' spans in the time of the first recording's clock.

    Args:
        spans: by their begin.
        jobs: the jobs' names in the order of their recordings.
        hosts: the host of each device.
        shifts_s: for each clock what was added to its readings.
        wall_s: what to add to the spans' times to get seconds since 1970, by the first clock's wall clock.
    """

    spans: Sequence[TimelineSpan]
    jobs: Sequence[str]
    hosts: Mapping[str, str]
    shifts_s: Mapping[str, float]
    wall_s: float


def merge(recordings: Sequence[Recording]) -> Merged:
    """Bring the recordings of all ranks and jobs into one time.

    A job that changed its process group, or was restarted, counts as another one. Devices of one name on several
    hosts get the host's name as a suffix.
    """
    filled = [each for each in recordings if each.spans]
    walls_s = _walls_s(filled)
    wall_s = next(iter(walls_s.values()), 0.0)
    shifts_s = {clock: each - wall_s for clock, each in walls_s.items()}
    names = _job_names(filled, shifts_s)
    devices = _device_names(filled)
    spans = [
        TimelineSpan(
            names[_job_key(each)],
            each.header.rank,
            devices[_device_key(each)],
            span.kind,
            span.begin_s + shifts_s[each.header.clock],
            span.end_s + shifts_s[each.header.clock],
            span.detail,
        )
        for each in filled
        for span in each.spans
    ]
    return Merged(
        spans=sorted(spans, key=lambda span: span.begin_s),
        jobs=list(names.values()),
        hosts={devices[_device_key(each)]: each.header.host for each in filled},
        shifts_s=shifts_s,
        wall_s=wall_s,
    )


# --- names ---------------------------------------------------------------------------------------------------------


def _job_key(recording: Recording) -> Hashable:
    """Return what identifies a job: the text that its ranks agreed on, or its directory if they did not."""
    return recording.header.job or ("directory", recording.label)


def _job_names(recordings: Iterable[Recording], shifts_s: Mapping[str, float]) -> dict[Hashable, str]:
    """Name every job after its directory, with a number if that holds several, or by its key if it has several.

    The names come in the order of the directories, and in each directory in the order in which the jobs began.
    """
    labels: dict[Hashable, set[str]] = defaultdict(set)
    places: dict[str, int] = {}
    order: dict[Hashable, tuple[int, float, str]] = {}
    for each in recordings:
        key = _job_key(each)
        labels[key].add(each.label)
        begin_s = each.header.monotonic_s + shifts_s[each.header.clock]
        begin = (places.setdefault(each.label, len(places)), begin_s, str(key))
        order[key] = min(order.get(key, begin), begin)
    together = Counter(next(iter(own)) for own in labels.values() if len(own) == 1)
    names: dict[Hashable, str] = {}
    numbers: Counter[str] = Counter()
    for key in sorted(order, key=lambda key: order[key]):
        label = next(iter(labels[key]))
        if len(labels[key]) > 1:
            names[key] = str(key)
        elif together[label] == 1:
            names[key] = label
        else:
            numbers[label] += 1
            names[key] = f"{label}.{numbers[label]}"
    return names


def _device_key(recording: Recording) -> tuple[str, str]:
    return recording.header.device, recording.header.host


def _device_names(recordings: Iterable[Recording]) -> dict[tuple[str, str], str]:
    keys = {_device_key(each) for each in recordings}
    hosts = Counter(device for device, _ in keys)
    return {(device, host): device if hosts[device] == 1 else f"{device}@{host}" for device, host in keys}


# --- clocks --------------------------------------------------------------------------------------------------------


def _walls_s(recordings: Iterable[Recording]) -> dict[str, float]:
    """Return each clock's wall time minus its own reading; the median, since it may have been set while jobs ran."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in recordings:
        found[each.header.clock].append(each.header.wall_s - each.header.monotonic_s)
    return {clock: median_low(each) for clock, each in found.items()}


def describe(merged: Merged) -> str:
    """Say whose time the spans are in; empty if there are none."""
    if len(merged.shifts_s) < 2:
        return "one clock, nothing to align" if merged.shifts_s else ""
    return (
        f"{len(merged.shifts_s)} hosts, placed by their wall clocks: times of different hosts compare as well as "
        "these agree"
    )


def milliseconds(length_s: float) -> str:
    """Write a duration in milliseconds, to two or three digits."""
    return f"{length_s * 1e3:.2g} ms" if length_s < 0.01 else f"{length_s * 1e3:,.0f} ms"
