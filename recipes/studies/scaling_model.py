"""What second-order steps cost on 64 workers, by design: a model from the constants published with SPD-KFAC.

    python recipes/studies/scaling_model.py                      the tables
    python recipes/studies/scaling_model.py --json               the same for programs
    python recipes/studies/scaling_model.py --markdown           the same for docs/scaling.md
    python recipes/studies/scaling_model.py --picture scaling.png

Nothing here is measured on this machine, and no constant is fitted to a total that is predicted. What is
assumed stands in docs/scaling.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
import torchvision
from rich.console import Console
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

from crossover_ddp._kfac.placement import InverseCost, LayerCost
from studies._tables import show_table

WORKERS: Final = 64
# Published with SPD-KFAC (arXiv 2107.06533, and its code): ResNet-50, batch 32, 64 workers, seconds.
FORWARD_BACKWARD_S: Final = 0.132
GRADIENT_EXCHANGE_S: Final = 0.065
FACTOR_COMPUTE_S: Final = 0.212
FACTOR_EXCHANGE_EXPOSED_S: Final = 0.098
INVERSION_S: Final = 0.105
INVERSE_EXCHANGE_S: Final = 0.064
# Computing and exchanging factors one after the other.
FACTORS_IN_TURN_S: Final = 0.381
# From this size on the inverse is sent, not computed by everybody; the lowest of the published thresholds.
SENT_FROM_DIM: Final = 1024
PUBLISHED_S: Final[Mapping[str, Mapping[str, float]]] = {
    "resnet50": {"D-KFAC": 0.8525, "MPD-KFAC": 0.7635, "SPD-KFAC": 0.6755},
    "resnet152": {"D-KFAC": 1.5807, "MPD-KFAC": 1.3933, "SPD-KFAC": 1.1689},
    "densenet201": {"D-KFAC": 1.4964, "MPD-KFAC": 1.5340, "SPD-KFAC": 1.3615},
}
# Published with DP-KFAC (arXiv 2206.15143), against designs that exchange factors.
DP_LESS_TRAFFIC: Final = (2.79, 3.15)
DP_LESS_COMPUTE: Final = (1.55, 1.65)

OURS: Final = "this design, nothing hidden"
OURS_HIDDEN: Final = "this design, hiding as SPD-KFAC"
INTERVALS: Final = (1, 10, 100)
RATES_GBIT: Final = (1, 10, 25, 100)
_BYTES: Final = 4
_TICKS: Final = (1, 2, 5, 10, 20, 50, 100)
_TICKS_S: Final = (0.2, 0.5, 1, 2, 4, 8)
_COLOURS: Final = ("#999999", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00")


@dataclass(frozen=True)
class CostedLayer:
    """A layer with its costs, and the multiply-adds of its two factors for one image."""

    cost: LayerCost
    factor_work: int


@dataclass(frozen=True)
class Phases:
    """Seconds of a step on which factors and inverses are renewed, as far as nothing hides them.

    ``gradient_s`` and ``direction_s`` (sending preconditioned gradients) are due in every step.
    """

    name: str
    forward_backward_s: float
    gradient_s: float
    direction_s: float
    factors_s: float
    factor_exchange_s: float
    inversion_s: float
    inverse_exchange_s: float

    def step_s(self, interval: float = 1) -> float:
        """Return the mean seconds of a step if factors and inverses are renewed in each ``interval``-th."""
        always_s = self.forward_backward_s + self.gradient_s + self.direction_s
        renewal_s = self.factors_s + self.factor_exchange_s + self.inversion_s + self.inverse_exchange_s
        return always_s + renewal_s / interval


@functools.cache
def layers_of(model: str) -> tuple[CostedLayer, ...]:
    """Return the layers of a torchvision model that have factors, as an image of 224 × 224 meets them."""
    found: list[CostedLayer] = []

    def note(name: str, module: nn.Module, output: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            groups = module.groups
            a_dim = module.in_channels // groups * module.kernel_size[0] * module.kernel_size[1]
            places = output.shape[2] * output.shape[3]
        elif isinstance(module, nn.Linear):
            groups, a_dim, places = 1, module.in_features, 1
        else:
            return
        a_dim += module.bias is not None
        g_dim = output.shape[1] // groups
        gradient = sum(p.numel() for p in module.parameters()) * _BYTES
        triangles = groups * (_triangle(a_dim) + _triangle(g_dim)) * _BYTES
        work = groups * places * (a_dim**2 + g_dim**2)
        found.append(CostedLayer(LayerCost(name, groups, a_dim, g_dim, gradient, triangles), work))

    with torch.device("meta"), torch.no_grad():
        net = torchvision.models.get_model(model).eval()
        for name, module in net.named_modules():
            module.register_forward_hook(lambda m, _, output, name=name: note(name, m, output))
        net(torch.empty(1, 3, 224, 224))
    return tuple(found)


def _triangle(dim: int) -> int:
    return dim * (dim + 1) // 2


class CostedNetwork:
    """What the designs need to know of a torchvision model."""

    def __init__(self, model: str) -> None:
        self.layers = layers_of(model)
        costs = [layer.cost for layer in self.layers]
        self.dims = [dim for cost in costs for dim in (cost.a_dim, cost.g_dim) for _ in range(cost.groups)]
        self.gradient_bytes = sum(cost.gradient_bytes for cost in costs)
        self.factor_bytes = sum(cost.factor_bytes for cost in costs)

    def inverse_bytes(self, from_dim: int = 0) -> int:
        """Bytes of the inverses of all factors of at least that size, as triangles."""
        return sum(_triangle(dim) for dim in self.dims if dim >= from_dim) * _BYTES

    def inversion_s(self, cost: InverseCost) -> tuple[float, float, float]:
        """Seconds of the busiest worker: if all invert everything, share factors, or share layers."""
        by_factor = [cost.seconds(dim) for dim in self.dims]
        by_layer = [layer.cost.inverse_s(cost) for layer in self.layers]
        return sum(by_factor), max(shared_out(by_factor, WORKERS)[1]), max(shared_out(by_layer, WORKERS)[1])


@dataclass(frozen=True)
class Device:
    """What the constants say of the machine: inverting, sending inverses, the wire."""

    inverse: InverseCost
    sent_s_per_byte: float
    gradient_gbit: float
    factor_gbit: float


def shared_out(weights: Sequence[float], world_size: int) -> tuple[list[int], list[float]]:
    """Give each weight to the rank that has least, the largest first; return owners and loads."""
    loads, owners = [0.0] * world_size, [0] * len(weights)
    for number in sorted(range(len(weights)), key=lambda each: (-weights[each], each)):
        owners[number] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owners[number]] += weights[number]
    return owners, loads


def busiest_worker(dims: Sequence[int], world_size: int) -> tuple[int, float]:
    """Return how many factors SPD-KFAC's busiest worker inverts, and their d³: those that are sent, and all small ones.

    Its load-balancing placement: what is inverted sooner than sent is inverted everywhere; the rest is shared out.
    """
    sent = [dim for dim in dims if dim >= SENT_FROM_DIM]
    small = [dim for dim in dims if dim < SENT_FROM_DIM]
    owners, loads = shared_out([float(dim**3) for dim in sent], world_size)
    busiest = max(range(world_size), key=lambda rank: loads[rank])
    return len(small) + owners.count(busiest), loads[busiest] + sum(float(dim**3) for dim in small)


@functools.cache
def device_of_constants(overhead_s: float = 0.0) -> Device:
    """Work out the device from SPD-KFAC's phases with ResNet-50.

    Args:
        overhead_s: of each inversion; not published.
    """
    net = CostedNetwork("resnet50")
    factors, cubes = busiest_worker(net.dims, WORKERS)
    cubic_s = (INVERSION_S - overhead_s * factors) / cubes
    return Device(
        InverseCost(cubic_s, overhead_s),
        INVERSE_EXCHANGE_S / net.inverse_bytes(SENT_FROM_DIM),
        _rate_gbit(net.gradient_bytes, GRADIENT_EXCHANGE_S),
        _rate_gbit(net.factor_bytes, FACTORS_IN_TURN_S - FACTOR_COMPUTE_S),
    )


def _rate_gbit(size_bytes: int, all_reduce_s: float) -> float:
    return 2 * (WORKERS - 1) / WORKERS * size_bytes * 8 / all_reduce_s / 1e9


def designs(overhead_s: float = 0.0, rate_gbit: float | None = None) -> list[Phases]:
    """Predict the phases of ResNet-50 in each design.

    Args:
        overhead_s: of each inversion.
        rate_gbit: what an all-reduce of the gradients gets out of the network; default: as published.
    """
    net, device = CostedNetwork("resnet50"), device_of_constants(overhead_s)
    slower = device.gradient_gbit / rate_gbit if rate_gbit else 1.0
    raw_s = (FACTORS_IN_TURN_S - FACTOR_COMPUTE_S) * slower
    hidden_s = FACTORS_IN_TURN_S - FACTOR_COMPUTE_S - FACTOR_EXCHANGE_EXPOSED_S
    all_s, by_factor_s, by_layer_s = net.inversion_s(device.inverse)
    sent_s = device.sent_s_per_byte * slower
    work = [layer.factor_work for layer in net.layers]
    base = Phases(
        "D-KFAC", FORWARD_BACKWARD_S, GRADIENT_EXCHANGE_S * slower, 0.0, FACTOR_COMPUTE_S, raw_s, all_s, 0.0
    )
    owners = replace(base, inversion_s=by_layer_s)
    ours = replace(owners, name=OURS, factor_exchange_s=raw_s / 2)
    return [
        base,
        replace(
            base,
            name="MPD-KFAC",
            inversion_s=by_factor_s,
            inverse_exchange_s=net.inverse_bytes() * sent_s,
        ),
        replace(
            base,
            name="SPD-KFAC",
            factor_exchange_s=max(0.0, raw_s - hidden_s),
            inversion_s=INVERSION_S,
            inverse_exchange_s=INVERSE_EXCHANGE_S * slower,
        ),
        replace(
            owners,
            name="DP-KFAC",
            direction_s=net.gradient_bytes * sent_s,
            factors_s=FACTOR_COMPUTE_S * max(work) / sum(work),
            factor_exchange_s=0.0,
        ),
        ours,
        replace(ours, name=OURS_HIDDEN, factor_exchange_s=max(0.0, raw_s / 2 - hidden_s)),
    ]


def published_differences(overhead_s: float = 0.0) -> list[dict[str, Any]]:
    """Predict D-KFAC's seconds less MPD-KFAC's, which depend on the sizes of factors alone, for each network."""
    device = device_of_constants(overhead_s)
    rows = []
    for model, published in PUBLISHED_S.items():
        net = CostedNetwork(model)
        all_s, by_factor_s, _ = net.inversion_s(device.inverse)
        rows.append(
            {
                "network": model,
                "factors": len(net.dims),
                "model_s": all_s - by_factor_s - net.inverse_bytes() * device.sent_s_per_byte,
                "published_s": published["D-KFAC"] - published["MPD-KFAC"],
            }
        )
    return rows


def traffic_bytes() -> dict[str, float]:
    """Return what each worker sends in a step that renews everything, by design, for ResNet-50."""
    net, share = CostedNetwork("resnet50"), (WORKERS - 1) / WORKERS
    gradient, factors = share * net.gradient_bytes, share * net.factor_bytes
    return {
        "D-KFAC": 2 * gradient + 2 * factors,
        "MPD-KFAC": 2 * gradient + 3 * factors,
        "SPD-KFAC": 2 * gradient + 2 * factors + share * net.inverse_bytes(SENT_FROM_DIM),
        "DP-KFAC": 3 * gradient,
        OURS: 2 * gradient + factors,
        OURS_HIDDEN: 2 * gradient + factors,
    }


def less_than_spd(found: Sequence[Phases]) -> list[dict[str, Any]]:
    """Compare DP-KFAC's savings, which were published as ranges, with the model's."""
    traffic = traffic_bytes()
    compute_s = {each.name: each.forward_backward_s + each.factors_s + each.inversion_s for each in found}
    return [
        {"of": of, "model": spent["SPD-KFAC"] / spent["DP-KFAC"], "published": published}
        for of, spent, published in (
            ("compute", compute_s, DP_LESS_COMPUTE),
            ("traffic", traffic, DP_LESS_TRAFFIC),
        )
    ]


def report(overhead_s: float = 0.0) -> dict[str, Any]:
    """Collect all that the tables show."""
    net, traffic, found = CostedNetwork("resnet50"), traffic_bytes(), designs(overhead_s)
    return {
        "workers": WORKERS,
        "layers": len(net.layers),
        "gradient_bytes": net.gradient_bytes,
        "factor_bytes": net.factor_bytes,
        "device": asdict(device_of_constants(overhead_s)),
        "designs": [
            {
                **asdict(phases),
                "step_s": {str(interval): phases.step_s(interval) for interval in INTERVALS},
                "published_s": PUBLISHED_S["resnet50"].get(phases.name),
                "traffic_bytes": traffic[phases.name],
            }
            for phases in found
        ],
        "rates": {
            str(rate): {phases.name: phases.step_s() for phases in designs(overhead_s, rate)}
            for rate in RATES_GBIT
        },
        "differences": published_differences(overhead_s),
        "less_than_spd": less_than_spd(found),
    }


Row = dict[str, str]


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Turn a report into titles and rows of cells by their headings."""
    every = {str(n): f"every {n}" if n > 1 else "every step" for n in INTERVALS}
    yield (
        "Seconds per step, ResNet-50, 64 workers",
        [
            {
                "design": each["name"],
                **{every[interval]: f"{seconds:.3f}" for interval, seconds in each["step_s"].items()},
                **_against(each["step_s"]["1"], each["published_s"]),
                "MB sent": f"{each['traffic_bytes'] / 1e6:.0f}",
            }
            for each in found["designs"]
        ],
    )
    phases = [field.name for field in fields(Phases)][1:]
    names = {phase: phase.removesuffix("_s").replace("_", " ") for phase in phases}
    yield (
        "Phases of a step that renews everything, seconds",
        [
            {"design": each["name"], **{names[phase]: f"{each[phase]:.3f}" for phase in phases}}
            for each in found["designs"]
        ],
    )
    yield (
        "Seconds per step by the rate of an all-reduce, renewing in every step",
        [
            {
                "design": name,
                **{f"{rate} Gb/s": f"{steps[name]:.3f}" for rate, steps in found["rates"].items()},
            }
            for name in (each["name"] for each in found["designs"])
        ],
    )
    yield (
        "D-KFAC less MPD-KFAC, seconds per step",
        [
            {
                "network": each["network"],
                "factors": str(each["factors"]),
                "model": f"{each['model_s']:+.3f}",
                "published": f"{each['published_s']:+.3f}",
            }
            for each in found["differences"]
        ],
    )
    yield (
        "DP-KFAC: how many times less than SPD-KFAC (published: than designs that exchange factors)",
        [
            {
                "of": each["of"],
                "model": f"{each['model']:.2f}",
                "published": " to ".join(f"{bound:.2f}" for bound in each["published"]),
            }
            for each in found["less_than_spd"]
        ],
    )


def _against(predicted_s: float, published_s: float | None) -> Row:
    if published_s is None:
        return {"published": "–", "error": "–"}
    return {"published": f"{published_s:.4f}", "error": f"{predicted_s / published_s - 1:+.1%}"}


def markdown(found: Mapping[str, Any]) -> str:
    """Write the tables as docs/scaling.md has them."""
    parts = []
    for title, rows in tables(found):
        lines = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(row.values() for row in rows)]
        parts.append("\n".join([f"**{title}**", "", *("| " + " | ".join(line) + " |" for line in lines)]))
    return "\n\n".join(parts)


def draw(path: Path, overhead_s: float = 0.0) -> None:
    """Draw seconds per step over the network's rate, and over the interval of renewals, both from 1 to 100."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    by_rate, by_interval = figure.subplots(1, 2)
    rates = [10 ** (exponent / 20) for exponent in range(41)]
    at_rates = [designs(overhead_s, rate) for rate in rates]
    for number, phases in enumerate(designs(overhead_s)):
        style = {"color": _COLOURS[number], "linewidth": 1.8}
        by_rate.plot(rates, [each[number].step_s() for each in at_rates], label=phases.name, **style)
        by_interval.plot(rates, [phases.step_s(interval) for interval in rates], **style)
    by_rate.set_yscale("log")
    by_rate.set_yticks(_TICKS_S, map(str, _TICKS_S))
    for axes, label in (
        (by_rate, "rate of an all-reduce, Gb/s"),
        (by_interval, "steps from one renewal to the next"),
    ):
        axes.set_xscale("log")
        axes.set_xticks(_TICKS, map(str, _TICKS))
        axes.set_xlabel(label)
        axes.minorticks_off()
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    by_rate.set_ylabel("seconds per step (model)")
    by_rate.set_title("renewing in every step", loc="left", fontsize=10)
    by_interval.set_title("at the published network's rate", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables of docs/scaling.md")
    parser.add_argument("--overhead-ms", type=float, default=0.0, help="of each inversion (default: 0)")
    parser.add_argument("--picture", type=Path, help="draw a PNG, too")
    args = parser.parse_args()
    overhead_s = args.overhead_ms / 1000
    try:
        found = report(overhead_s)
    except ValueError as error:
        parser.error(f"--overhead-ms {args.overhead_ms}: {error}")
    if args.picture:
        draw(args.picture, overhead_s)
    if args.json:
        print(json.dumps(found, indent=1))
    elif args.markdown:
        print(markdown(found))
    else:
        for title, rows in tables(found):
            show_table(Console(), title, rows)


if __name__ == "__main__":
    main()
