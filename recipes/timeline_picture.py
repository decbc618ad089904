"""Draw who computed and who communicated when, per device, from the timelines of a run.

    python recipes/timeline_picture.py runs/x                       a few steps from the middle
    python recipes/timeline_picture.py runs/x --from 12.5 --to 16   seconds since the first span
    python recipes/timeline_picture.py runs/x --trace trace.json    also for Perfetto

Each device has a lane for computation and one for the network, coloured by job. Where several jobs
do the same at once they divide the lane's height. Waiting for a turn is hatched, idle time is blank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lab_analysis
import lab_records
from lab_analysis import Span

# Told apart also by those who see few colours (after Okabe and Ito).
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
NETWORK_KINDS: Final = frozenset({"exchange", "reduce_scatter", "all_gather"})
_LANE_HEIGHT: Final = 0.8
_STEPS_SHOWN: Final = 8


@dataclass(frozen=True)
class Bar:
    """A rectangle of a lane: from 0 to 1 in height."""

    job: str
    waiting: bool
    begin_s: float
    end_s: float
    bottom: float
    height: float


def lane_bars(spans: Iterable[Span], jobs: Sequence[str], *, network: bool) -> list[Bar]:
    """Cut a device's spans into rectangles that do not overlap.

    Args:
        spans: those of one device.
        jobs: in the order from bottom to top.
        network: True for the network's lane (communication and waiting), else computation.
    """
    kinds = NETWORK_KINDS | {"wait"} if network else {"compute"}
    changes = []
    for span in spans:
        if span.kind in kinds and span.end_s > span.begin_s:
            key = (jobs.index(span.job), span.kind == "wait")
            changes += [(span.begin_s, 1, key), (span.end_s, -1, key)]
    return list(_merged(_slices(sorted(changes), jobs)))


def _slices(changes: Sequence[tuple[float, int, tuple[int, bool]]], jobs: Sequence[str]) -> Iterator[Bar]:
    active: dict[tuple[int, bool], int] = {}
    last_s = 0.0
    for at_s, change, key in changes:
        if at_s > last_s:
            yield from _stack(active, jobs, last_s, at_s)
        active[key] = active.get(key, 0) + change
        last_s = at_s


def _stack(
    active: dict[tuple[int, bool], int], jobs: Sequence[str], begin_s: float, end_s: float
) -> Iterator[Bar]:
    # A job that communicates is not shown waiting as well.
    shown = {job: waits for (job, waits), depth in sorted(active.items(), reverse=True) if depth > 0}
    for place, (job, waits) in enumerate(sorted(shown.items())):
        yield Bar(jobs[job], waits, begin_s, end_s, place / len(shown), 1 / len(shown))


def _merged(bars: Iterable[Bar]) -> Iterator[Bar]:
    last: dict[tuple[str, bool, float, float], Bar] = {}
    for bar in bars:
        key = (bar.job, bar.waiting, bar.bottom, bar.height)
        before = last.get(key)
        if before is not None and before.end_s == bar.begin_s:
            bar = Bar(bar.job, bar.waiting, before.begin_s, bar.end_s, bar.bottom, bar.height)
        elif before is not None:
            yield before
        last[key] = bar
    yield from last.values()


def middle_window(spans: Sequence[Span], steps: int = _STEPS_SHOWN) -> tuple[float, float]:
    """Begin and end of some steps from the middle of the run, in monotonic seconds."""
    computes = [s for s in spans if s.kind == "compute" and s.job == spans[0].job and s.rank == spans[0].rank]
    if len(computes) <= steps:
        return min(span.begin_s for span in spans), max(span.end_s for span in spans)
    first = (len(computes) - steps) // 2
    return computes[first].begin_s, computes[first + steps].begin_s


def draw(
    spans: Sequence[Span],
    path: Path,
    *,
    title: str = "",
    window_s: tuple[float | None, float | None] = (None, None),
    jobs: Sequence[str] = (),
) -> Path:
    """Draw a window of the spans into a PNG file.

    Args:
        spans: of all jobs and devices.
        path: the file to write.
        title: first line of the title.
        window_s: begin and end, in seconds since the first span; None: some steps from the middle.
        jobs: the order of colours; default: as they come.
    """
    if not spans:
        raise ValueError("expected spans, got none; did the jobs run with a hook that records a timeline?")
    figure = _figure(spans, title, window_s, list(jobs) or list(dict.fromkeys(span.job for span in spans)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _figure(
    spans: Sequence[Span],
    title: str,
    window_s: tuple[float | None, float | None],
    jobs: Sequence[str],
) -> Any:
    # Not pyplot: no global state, no display.
    from matplotlib.figure import Figure

    origin_s = min(span.begin_s for span in spans)
    default = middle_window(sorted(spans, key=lambda span: span.begin_s))
    begin_s, end_s = (
        d if chosen is None else origin_s + chosen for chosen, d in zip(window_s, default, strict=True)
    )
    if not end_s > begin_s:
        raise ValueError(f"expected a window that ends after it begins, got {begin_s:.3f} to {end_s:.3f} s")
    devices = sorted({span.device for span in spans})
    figure = Figure(figsize=(12, 1.7 + 1.15 * len(devices)), layout="constrained")
    axes = figure.subplots()
    visible = [span for span in spans if span.end_s > begin_s and span.begin_s < end_s]
    for place, device in enumerate(reversed(devices)):
        here = [span for span in visible if span.device == device]
        for network in (False, True):
            bottom = 2.25 * place + (0 if network else 1)
            _draw_lane(axes, lane_bars(here, jobs, network=network), jobs, bottom, origin_s)
        _note_share(axes, here, (begin_s, end_s), 2.25 * place + 1 + _LANE_HEIGHT / 2)
    _label(axes, devices, (begin_s - origin_s, end_s - origin_s))
    axes.set_title(title, loc="left", fontsize=11)
    _legend(figure, jobs)
    return figure


def _draw_lane(axes: Any, bars: Sequence[Bar], jobs: Sequence[str], bottom: float, origin_s: float) -> None:
    axes.axhspan(bottom, bottom + _LANE_HEIGHT, color="#f4f4f4", zorder=0)
    for bar in bars:
        colour = COLOURS[jobs.index(bar.job) % len(COLOURS)]
        style: dict[str, Any] = {"facecolor": colour, "linewidth": 0}
        if bar.waiting:
            style = {"facecolor": "white", "edgecolor": colour, "hatch": "/////", "linewidth": 0}
        axes.broken_barh(
            [(bar.begin_s - origin_s, bar.end_s - bar.begin_s)],
            (bottom + bar.bottom * _LANE_HEIGHT, bar.height * _LANE_HEIGHT),
            zorder=2,
            **style,
        )


def _note_share(axes: Any, here: Sequence[Span], window_s: tuple[float, float], height: float) -> None:
    busy = 1 - lab_analysis.occupancy(here, here[0].device, window_s=window_s)["idle"] if here else 0.0
    text = f"busy {busy:.0%}"
    axes.text(1.005, height, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)


def _label(axes: Any, devices: Sequence[str], window_s: tuple[float, float]) -> None:
    ticks, labels = [], []
    for place, device in enumerate(reversed(devices)):
        ticks += [2.25 * place + _LANE_HEIGHT / 2, 2.25 * place + 1 + _LANE_HEIGHT / 2]
        labels += ["network", f"{device}\ncompute"]
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.set_ylim(-0.15, 2.25 * len(devices) - 0.25)
    axes.set_xlim(*window_s)
    axes.set_xlabel("seconds since the first recorded span")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=1)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, jobs: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[i % len(COLOURS)], label=f"job {job}") for i, job in enumerate(jobs)]
    grey = "#666666"
    handles.append(
        Patch(facecolor="white", edgecolor=grey, hatch="/////", linewidth=0, label="waits for its turn")
    )
    handles.append(Patch(facecolor="#f4f4f4", label="idle"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)


def draw_run(
    directory: Path,
    path: Path | None = None,
    *,
    title: str | None = None,
    window_s: tuple[float | None, float | None] = (None, None),
) -> Path:
    """Draw a run of the lab into ``timeline.png`` in its directory, or into ``path``."""
    run = lab_records.load_run(directory)
    rate = f", {run.rate_mbit:g} Mbit/s" if run.rate_mbit else ""
    return draw(
        run.spans,
        path or directory / "timeline.png",
        title=f"{directory.name}: {run.nodes} nodes{rate}" if title is None else title,
        window_s=window_s,
        jobs=run.jobs,
    )


def main() -> None:
    """Draw the run that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="directory of a run of the lab")
    parser.add_argument("--from", dest="begin_s", type=float, help="seconds since the first span")
    parser.add_argument("--to", dest="end_s", type=float, help="seconds since the first span")
    parser.add_argument("--title", help="what is to stand above the picture")
    parser.add_argument("--out", type=Path, help="the PNG to write (default: timeline.png in the run)")
    parser.add_argument("--trace", type=Path, help="write all spans as a Chrome trace, too")
    args = parser.parse_args()
    try:
        if args.trace:
            spans = lab_records.load_run(args.run).spans
            args.trace.write_text(json.dumps(lab_analysis.chrome_trace(spans)))
        print(draw_run(args.run, args.out, title=args.title, window_s=(args.begin_s, args.end_s)))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"timeline_picture: {error}")


if __name__ == "__main__":
    main()
