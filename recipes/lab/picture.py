"""Draw when jobs computed and communicated. Needs matplotlib, which is imported at the first picture.

Each device has a lane for computation and one for the network, coloured by job. Where several jobs
do the same at once they divide the lane's height. Waiting for a turn is hatched, idle time is blank.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .spans import NETWORK_KINDS, TimelineSpan, extent_s, occupancy, slices

# Distinguishable with any colour vision (after Okabe and Ito).
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
STEPS_SHOWN: Final = 8
_LANE_HEIGHT: Final = 0.8
_DEVICE_HEIGHT: Final = 2.45
_LEGEND_COLUMNS: Final = 8
_BACKGROUND: Final = "#f1f1f1"
_HATCH: Final = "//////"

Window = tuple[float | None, float | None]


@dataclass(frozen=True)
class Bar:
    """A rectangle of a lane: from 0 to 1 in height."""

    job: str
    waiting: bool
    begin_s: float
    end_s: float
    bottom: float
    height: float


def lane_bars(spans: Iterable[TimelineSpan], jobs: Sequence[str], *, network: bool) -> list[Bar]:
    """Cut a device's spans into rectangles that do not overlap.

    Args:
        spans: those of one device.
        jobs: in the order from bottom to top.
        network: True for the network's lane (communication and waiting), else computation.
    """
    kinds = NETWORK_KINDS | {"wait"} if network else {"compute"}
    wanted = (
        (span.begin_s, span.end_s, (jobs.index(span.job), span.kind == "wait"))
        for span in spans
        if span.kind in kinds
    )
    return list(_merged(bar for each in slices(wanted) for bar in _stack(each, jobs)))


def _stack(piece: tuple[float, float, tuple[tuple[int, bool], ...]], jobs: Sequence[str]) -> Iterator[Bar]:
    begin_s, end_s, active = piece
    # A job that communicates is not shown waiting as well.
    shown = dict(sorted(active, reverse=True))
    for place, (job, waits) in enumerate(sorted(shown.items())):
        yield Bar(jobs[job], waits, begin_s, end_s, place / len(shown), 1 / len(shown))


def _merged(bars: Iterable[Bar]) -> Iterator[Bar]:
    last: dict[tuple[str, bool, float, float], Bar] = {}
    for bar in bars:
        key = (bar.job, bar.waiting, bar.bottom, bar.height)
        before = last.get(key)
        if before is not None and before.end_s == bar.begin_s:
            bar = replace(bar, begin_s=before.begin_s)
        elif before is not None:
            yield before
        last[key] = bar
    yield from last.values()


def middle_window(spans: Sequence[TimelineSpan], steps: int = STEPS_SHOWN) -> tuple[float, float]:
    """Return begin and end of some steps from the middle of the run, in monotonic seconds."""
    computes = [s for s in spans if s.kind == "compute" and s.job == spans[0].job and s.rank == spans[0].rank]
    if len(computes) <= steps:
        return extent_s(spans)
    first = (len(computes) - steps) // 2
    return computes[first].begin_s, computes[first + steps].begin_s


def window_of(spans: Sequence[TimelineSpan], chosen_s: Window) -> tuple[float, float]:
    """Return begin and end of the window to draw, on the spans' clock.

    Args:
        spans: of all jobs and devices.
        chosen_s: begin and end, in seconds since the first span; None: that of all spans, or if both are None
            that of some steps from the middle.
    """
    if not spans:
        raise ValueError("expected spans, got none; did the jobs run with a hook that records a timeline?")
    origin_s, _ = default = extent_s(spans)
    if chosen_s == (None, None):
        default = middle_window(sorted(spans, key=lambda span: span.begin_s))
    begin_s, end_s = (
        by_itself if chosen is None else origin_s + chosen
        for chosen, by_itself in zip(chosen_s, default, strict=True)
    )
    if not end_s > begin_s:
        found = f"{begin_s - origin_s:.3f} to {end_s - origin_s:.3f} s"
        raise ValueError(f"expected a window that ends after it begins, got {found} since the first span")
    return begin_s, end_s


def draw(
    spans: Sequence[TimelineSpan],
    path: Path,
    *,
    title: str = "",
    window_s: Window = (None, None),
    jobs: Sequence[str] = (),
    hosts: Mapping[str, str] | None = None,
) -> Path:
    """Draw a window of the spans into a file.

    Args:
        spans: of all jobs and devices, on one clock.
        path: the file to write; its suffix selects the format, PNG or SVG.
        title: first line of the title.
        window_s: begin and end, as in `window_of`.
        jobs: the order of colours; default the order in which they begin.
        hosts: the host of each device, to be written below its name.

    On failure: ``ValueError`` if there are no spans, or none could be in the window; ``ImportError`` without
    matplotlib.
    """
    begin_s, end_s = window_of(spans, window_s)
    ordered = list(jobs) or list(dict.fromkeys(span.job for span in spans))
    picture = _Picture(ordered, (begin_s, end_s), extent_s(spans)[0])
    figure = picture.figure(spans, title, hosts or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


class _Picture:
    """Makes one figure of a window; a job's place in ``jobs`` selects its colour."""

    def __init__(self, jobs: Sequence[str], window_s: tuple[float, float], origin_s: float) -> None:
        self._jobs = jobs
        self._window_s = window_s
        self._origin_s = origin_s

    def figure(self, spans: Sequence[TimelineSpan], title: str, hosts: Mapping[str, str]) -> Any:
        # Not pyplot: no global state, no display.
        from matplotlib.figure import Figure

        devices = sorted({span.device for span in spans})
        figure = Figure(figsize=(12, 1.6 + 1.25 * len(devices)), layout="constrained")
        axes = figure.subplots()
        begin_s, end_s = self._window_s
        here: dict[str, list[TimelineSpan]] = defaultdict(list)
        for span in spans:
            if span.end_s > begin_s and span.begin_s < end_s:
                here[span.device].append(span)
        for place, device in enumerate(reversed(devices)):
            bottom = _DEVICE_HEIGHT * place
            self._draw_lane(axes, lane_bars(here[device], self._jobs, network=True), bottom)
            self._draw_lane(axes, lane_bars(here[device], self._jobs, network=False), bottom + 1)
            self._note_device(axes, here[device], device, hosts.get(device, ""), bottom)
        self._label(axes, len(devices))
        axes.set_title(title, loc="left", fontsize=11)
        visible = {span.job for device in devices for span in here[device]}
        self._legend(figure, visible)
        return figure

    def _colour(self, job: int) -> str:
        return COLOURS[job % len(COLOURS)]

    def _draw_lane(self, axes: Any, bars: Sequence[Bar], bottom: float) -> None:
        from matplotlib.collections import PolyCollection

        axes.axhspan(bottom, bottom + _LANE_HEIGHT, color=_BACKGROUND, linewidth=0, zorder=0)
        boxes: dict[tuple[int, bool], list[list[tuple[float, float]]]] = defaultdict(list)
        for bar in bars:
            left, right = (at_s - self._origin_s for at_s in (bar.begin_s, bar.end_s))
            low = bottom + bar.bottom * _LANE_HEIGHT
            high = low + bar.height * _LANE_HEIGHT
            corners = [(left, low), (right, low), (right, high), (left, high)]
            boxes[self._jobs.index(bar.job), bar.waiting].append(corners)
        for (job, waiting), corners_of_all in boxes.items():
            style: dict[str, Any] = {"facecolor": self._colour(job), "linewidth": 0}
            if waiting:
                style = {
                    "facecolor": "white",
                    "edgecolor": self._colour(job),
                    "hatch": _HATCH,
                    "linewidth": 0,
                }
            axes.add_collection(PolyCollection(corners_of_all, zorder=2, **style), autolim=False)

    def _note_device(
        self, axes: Any, here: Sequence[TimelineSpan], device: str, host: str, bottom: float
    ) -> None:
        """Write the device's name above its lanes, and its shares beside them."""
        name = device if not host or host in device else f"{device} on {host}"
        across = axes.get_yaxis_transform()
        axes.text(0, bottom + 1.86, name, transform=across, va="bottom", fontsize=9, fontweight="bold")
        shares = occupancy(here, device, window_s=self._window_s)
        text = f"busy {1 - shares['idle']:.0%}\nidle {shares['idle']:.0%}"
        if shares["several"] >= 0.005:
            text += f"\nseveral at\nonce {shares['several']:.0%}"
        axes.text(
            1.005, bottom + 1.8, text, transform=across, va="top", fontsize=9, linespacing=1.3, clip_on=False
        )

    def _label(self, axes: Any, devices: int) -> None:
        bottoms = [_DEVICE_HEIGHT * place + lane for place in range(devices) for lane in (0, 1)]
        ticks = [bottom + _LANE_HEIGHT / 2 for bottom in bottoms]
        axes.set_yticks(ticks, ["network", "compute"] * devices, fontsize=9)
        axes.set_ylim(-0.15, _DEVICE_HEIGHT * devices - 0.15)
        axes.set_xlim(*(at_s - self._origin_s for at_s in self._window_s))
        axes.set_xlabel("seconds since the first recorded span")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=1)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)

    def _legend(self, figure: Any, visible: Iterable[str]) -> None:
        from matplotlib.patches import Patch

        shown = [place for place, job in enumerate(self._jobs) if job in set(visible)]
        handles = [Patch(facecolor=self._colour(place), label=f"job {self._jobs[place]}") for place in shown]
        grey = "#666666"
        waits: dict[str, Any] = {"facecolor": "white", "edgecolor": grey, "hatch": _HATCH, "linewidth": 0}
        handles.append(Patch(**waits, label="waits for its turn"))
        handles.append(Patch(facecolor=_BACKGROUND, label="idle"))
        figure.legend(
            handles=handles,
            loc="outside upper right",
            ncols=min(len(handles), _LEGEND_COLUMNS),
            frameon=False,
            fontsize=9,
        )
