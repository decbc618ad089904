"""Draws when jobs computed and communicated. Needs matplotlib, which the first picture imports.

Each device has a lane for computation and one for the network, with a strip and a colour for each
job. Waiting for a turn is hatched, idle time is blank.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from .spans import NETWORK_KINDS, TimelineSpan, extent_s, occupancy

# Distinguishable with any colour vision (after Okabe and Ito).
COLOURS: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#F0E442",
    "#000000",
)
STEPS_SHOWN: Final = 8
LANES: Final = {"network": NETWORK_KINDS | {"wait"}, "compute": frozenset({"compute"})}
_LANE_HEIGHT: Final = 0.8
_DEVICE_HEIGHT: Final = 2.45
_BACKGROUND: Final = "#f1f1f1"
_WAITING: Final[dict[str, Any]] = {"facecolor": "white", "hatch": "//////", "linewidth": 0}


def middle_window(spans: Sequence[TimelineSpan], steps: int = STEPS_SHOWN) -> tuple[float, float]:
    """Return the begin and the end of some steps in the middle of the run, in monotonic seconds.

    Args:
        spans: in the order in which they begin.
        steps: how many steps.
    """
    computes = [
        s
        for s in spans
        if s.kind == "compute" and s.job == spans[0].job and s.rank == spans[0].rank
    ]
    if len(computes) <= steps:
        return extent_s(spans)
    first = (len(computes) - steps) // 2
    return computes[first].begin_s, computes[first + steps].begin_s


def draw(
    spans: Sequence[TimelineSpan], path: Path, *, title: str = "", jobs: Sequence[str] = ()
) -> Path:
    """Draw some steps from the middle of a run into a file.

    Args:
        spans: of all jobs and devices, on one clock.
        path: the file to write. Its suffix selects the format, PNG or SVG.
        title: title of the picture. Default none.
        jobs: the jobs in the order of colours. Default: the order in which they begin.

    On failure: ``ValueError`` if there are no spans, ``ImportError`` without matplotlib.
    """
    # Not pyplot, which has global state and may need a display.
    from matplotlib.figure import Figure

    if not spans:
        raise ValueError(
            "expected spans, got none; did the jobs run with a hook that records a timeline?"
        )
    ordered = sorted(spans, key=lambda span: span.begin_s)
    jobs = list(jobs) or list(dict.fromkeys(span.job for span in ordered))
    window_s = middle_window(ordered)
    devices = sorted({span.device for span in spans})
    figure = Figure(figsize=(12, 1.6 + 1.25 * len(devices)), layout="constrained")
    axes = figure.subplots()
    for place, device in enumerate(reversed(devices)):
        here = [span for span in ordered if span.device == device and span.end_s > window_s[0]]
        _draw_device(axes, here, jobs, window_s, _DEVICE_HEIGHT * place)
    _label(axes, len(devices), window_s, ordered[0].begin_s)
    axes.set_title(title, loc="left", fontsize=11)
    _legend(figure, jobs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_device(
    axes: Any,
    here: Iterable[TimelineSpan],
    jobs: Sequence[str],
    window_s: tuple[float, float],
    bottom: float,
) -> None:
    here = [span for span in here if span.begin_s < window_s[1]]
    strip = _LANE_HEIGHT / len(jobs)
    for lane, kinds in enumerate(LANES.values()):
        axes.axhspan(
            bottom + lane, bottom + lane + _LANE_HEIGHT, color=_BACKGROUND, linewidth=0, zorder=0
        )
        for place, job in enumerate(jobs):
            colour = COLOURS[place % len(COLOURS)]
            low = bottom + lane + place * strip
            own = [span for span in here if span.job == job and span.kind in kinds]
            # Waits are drawn first, so that communication covers them.
            waits = [(span.begin_s, span.length_s) for span in own if span.kind == "wait"]
            axes.broken_barh(waits, (low, strip), zorder=2, **{**_WAITING, "edgecolor": colour})
            busy = [(span.begin_s, span.length_s) for span in own if span.kind != "wait"]
            axes.broken_barh(busy, (low, strip), zorder=2, facecolor=colour, linewidth=0)
    across = axes.get_yaxis_transform()
    device = next((span.device for span in here), "")
    shares = occupancy(here, device, window_s=window_s)
    text = (
        f"busy {1 - shares['idle']:.0%}\nidle {shares['idle']:.0%}\n"
        f"several at\nonce {shares['several']:.0%}"
    )
    axes.text(
        0, bottom + 1.86, device, transform=across, va="bottom", fontsize=9, fontweight="bold"
    )
    axes.text(1.005, bottom + 1.8, text, transform=across, va="top", fontsize=9, clip_on=False)


def _label(axes: Any, devices: int, window_s: tuple[float, float], origin_s: float) -> None:
    bottoms = [
        _DEVICE_HEIGHT * place + lane for place in range(devices) for lane in range(len(LANES))
    ]
    axes.set_yticks(
        [bottom + _LANE_HEIGHT / 2 for bottom in bottoms], [*LANES] * devices, fontsize=9
    )
    axes.set_ylim(-0.15, _DEVICE_HEIGHT * devices - 0.15)
    axes.set_xlim(*window_s)
    axes.xaxis.set_major_formatter(lambda at_s, _: f"{at_s - origin_s:.1f}")
    axes.set_xlabel("seconds since the first recorded span")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=1)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Any, jobs: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        *(
            Patch(facecolor=COLOURS[place % len(COLOURS)], label=f"job {job}")
            for place, job in enumerate(jobs)
        ),
        Patch(**_WAITING, edgecolor="#666666", label="waits for its turn"),
        Patch(facecolor=_BACKGROUND, label="idle"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=8, frameon=False, fontsize=9)
