"""One timeline from the recordings of many processes: jobs get names, clocks are brought together. Pure."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final

from .clocks import Alignment, Correction, align, seen_exchanges
from .spans import TimelineSpan

_WALL_ERROR_TOLD_S: Final = 0.1
"""A smaller error of a wall clock, or one within the uncertainty of the alignment, is not reported."""


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
    world_size: int | None = None


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
    """All jobs' spans in the time of the alignment's reference clock.

    Args:
        spans: by their begin.
        jobs: the jobs' names in the order of their recordings.
        hosts: the host of each device.
        alignment: how the clocks were brought together.
        clock_hosts: the host of each clock.
        wall_s: what to add to the spans' times to get seconds since 1970, by the reference's wall clock.
    """

    spans: Sequence[TimelineSpan]
    jobs: Sequence[str]
    hosts: Mapping[str, str]
    alignment: Alignment
    clock_hosts: Mapping[str, str]
    wall_s: float


def merge(recordings: Sequence[Recording]) -> Merged:
    """Bring the recordings of all ranks and jobs into one time.

    A job that changed its process group, or was restarted, counts as another one. Devices of one name on several
    hosts get the host's name as a suffix.
    """
    filled = [each for each in recordings if each.spans]
    alignment = _align(filled)
    names = job_names(filled, alignment)
    devices = _device_names(filled)
    spans = [
        _placed(span, names[_job_key(each)], devices[_device_key(each)], each, alignment)
        for each in filled
        for span in each.spans
    ]
    clock_hosts = {each.header.clock: each.header.host for each in filled}
    return Merged(
        spans=sorted(spans, key=lambda span: span.begin_s),
        jobs=list(names.values()),
        hosts={devices[_device_key(each)]: each.header.host for each in filled},
        alignment=alignment,
        clock_hosts=clock_hosts,
        wall_s=_walls_s(filled).get(alignment.reference, 0.0),
    )


def _placed(span: RawSpan, job: str, device: str, recording: Recording, alignment: Alignment) -> TimelineSpan:
    correct = alignment.corrections[recording.header.clock]
    begin_s, end_s = correct(span.begin_s), correct(span.end_s)
    return TimelineSpan(job, recording.header.rank, device, span.kind, begin_s, end_s, span.detail)


# --- names ---------------------------------------------------------------------------------------------------------


def _job_key(recording: Recording) -> Hashable:
    """Return what identifies a job: the text that its ranks agreed on, or its directory if they did not."""
    return recording.header.job or ("directory", recording.label)


def job_names(recordings: Iterable[Recording], alignment: Alignment) -> dict[Hashable, str]:
    """Name every job after its directory, with a number if that holds several, or by its key if it has several.

    The names come in the order of the directories, and in each directory in the order in which the jobs began, in the
    common time: a host's wall clock may be wrong by more than the time between two jobs.
    """
    labels: dict[Hashable, set[str]] = defaultdict(set)
    places: dict[str, int] = {}
    order: dict[Hashable, tuple[int, float, str]] = {}
    for each in recordings:
        key = _job_key(each)
        labels[key].add(each.label)
        begin_s = alignment.corrections[each.header.clock](each.header.monotonic_s)
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


def _align(recordings: Sequence[Recording]) -> Alignment:
    extents_s: dict[str, tuple[float, float]] = {}
    for each in recordings:
        first_s, last_s = extents_s.get(each.header.clock, (math.inf, -math.inf))
        begin_s = min(span.begin_s for span in each.spans)
        end_s = max(span.end_s for span in each.spans)
        extents_s[each.header.clock] = min(first_s, begin_s), max(last_s, end_s)
    return align(_walls_s(recordings), seen_exchanges(_seen(recordings)), extents_s)


def _walls_s(recordings: Iterable[Recording]) -> dict[str, float]:
    """Return each clock's wall time minus its own reading; the median, since it may have been set while jobs ran."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in recordings:
        found[each.header.clock].append(each.header.wall_s - each.header.monotonic_s)
    return {clock: median_low(each) for clock, each in found.items()}


def _seen(recordings: Iterable[Recording]) -> Iterator[tuple[Hashable, str, float, float]]:
    """List when ranks saw exchanges begin and end; see [Note: spans that meet] in `crossover_ddp._timeline.record`.

    A process that makes its group anew counts its exchanges from zero again, and so do all ranks.
    """
    times: Counter[Hashable] = Counter()
    for each in sorted(recordings, key=lambda each: each.header.monotonic_s):
        header = each.header
        if header.job is None:
            continue
        for span in each.spans:
            sequence = span.detail.get("sequence")
            if sequence is None:
                continue
            exchange = (header.job, str(span.detail.get("group")), span.kind, str(sequence))
            process = (header.clock, header.host, header.pid, exchange)
            times[process] += 1
            proves = span.kind != "reduce_scatter" or span.detail.get("owned_bytes", 0)
            yield (*exchange, times[process]), header.clock, span.begin_s, span.end_s if proves else math.inf


# --- words ---------------------------------------------------------------------------------------------------------


def describe(merged: Merged) -> list[str]:
    """Return how well the clocks agree, one sentence a line."""
    alignment = merged.alignment
    lines = []
    if len(alignment.corrections) == 1:
        lines.append("one clock, nothing to align")
    elif alignment.uncertainty_s is not None:
        lines.append(
            f"{len(alignment.corrections)} hosts aligned to within {milliseconds(alignment.uncertainty_s)} by "
            f"{alignment.exchanges} exchanges"
        )
    lines += [
        line
        for clock, each in alignment.corrections.items()
        if clock != alignment.reference
        for line in _about(each, merged.clock_hosts)
    ]
    if alignment.out_of_order:
        lines.append(
            f"{alignment.out_of_order} exchanges ended before they began on the same clock: these files do not "
            "belong to one run"
        )
    return lines


def _about(correction: Correction, hosts: Mapping[str, str]) -> Iterator[str]:
    host, anchor = hosts[correction.clock], hosts[correction.anchor]
    error_s = correction.wall_error_s
    if error_s is None:
        yield (
            f"{host}: no exchange in common with other hosts; placed by its wall clock, whose error is not known"
        )
    elif correction.contradiction_s > 0:
        yield (
            f"{host}: the exchanges contradict a steady clock by {milliseconds(correction.contradiction_s)}; its clock "
            f"was set or slewed, or the files are of different runs"
        )
    elif correction.uncertainty_s is None:
        yield (
            f"{host}: its {correction.exchanges} exchanges bound its clock from one side only; otherwise placed by "
            "its wall clock"
        )
    if error_s is not None and abs(error_s) > max(_WALL_ERROR_TOLD_S, correction.uncertainty_s or 0.0):
        direction = "ahead of" if error_s > 0 else "behind"
        yield f"{host}: its wall clock was {abs(error_s):.3g} s {direction} that of {anchor}; corrected"


def milliseconds(length_s: float) -> str:
    """Write a duration in milliseconds, to two or three digits."""
    return f"{length_s * 1e3:.2g} ms" if length_s < 0.01 else f"{length_s * 1e3:,.0f} ms"
