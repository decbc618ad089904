"""Shows the effect of turns, with two sibling training jobs on an emulated two-node cluster.

    python recipes/demo.py                          table, picture and JSON in runs/demo/
    python recipes/demo.py --steps 60 --ratio 0.6   shorter, and on a faster network
    python recipes/demo.py --unshaped               without root, and without an emulated network

Two jobs train the same convolutional net on scanned digits, with different learning rates: each
alone, side by side without turns, and side by side with ``crossover_hook``. A short calibration
determines the rate of the link, so that the gradients of a step are on the wire for ``--ratio``
times as long as the device computes. It also determines the number of steps, unless that is given,
so that the demo takes at most four minutes. Other arguments are passed to recipes/train.py.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo_figures import (
    AFTER,
    CROSSOVER,
    LEAST_STEPS,
    MOST_STEPS,
    UNMANAGED,
    Outcome,
    outcome_of,
    steps_within,
    summarize,
    verdict,
)
from lab import (
    STEADY_MEMORY,
    Cluster,
    Job,
    LabError,
    Run,
    draw_run,
    load_logs,
    load_run,
    rate_for,
    why_not_shaped,
)
from lab.analysis import JobFigures
from lab.command import progress

LEARNING_RATES: Final = {"a": 0.5, "b": 0.2}
# Small images in large batches: much computation per byte of gradients. With DDP's default size of
# buckets there are two of them, and the larger one is full only at the end of the computation.
TRAINING: Final = (
    *("--preset", "convnet", "--image-size", "64", "--batch-size", "120"),
    *("--bucket-cap-mb", "25"),
)
TRAIN: Final = Path(__file__).with_name("train.py")
NODES: Final = 2
CALIBRATION: Final = "calibrate the link"
CALIBRATION_MBIT: Final = 1000.0
CALIBRATION_STEPS: Final = 12
TIMEOUT_S: Final = 300.0
BUDGET_S: Final = 240.0
"""The time for all of the demo."""
RESERVE_S: Final = 20.0
"""The part of it for starting and for drawing the picture."""
LOAD_TOLERATED: Final = 0.5
PICTURE_TITLE: Final = (
    "Two siblings take turns: while the gradients of one travel, the other computes"
)


def main(argv: Sequence[str] | None = None) -> int:
    began_s = time.monotonic()
    args = parse_arguments(argv)
    args.load_before = os.getloadavg()[0]
    console = Console(highlight=False)
    reason = "--unshaped was given" if args.unshaped else why_not_shaped()
    introduce(console, args, reason)
    try:
        with Cluster(nodes=NODES, rate_mbit=CALIBRATION_MBIT, shaped=reason is None) as cluster:
            runs = Runs(cluster, args, console, deadline_s=began_s + BUDGET_S - RESERVE_S)
            alone, together = runs.all()
            rate_mbit = cluster.rate_mbit
        figures = report(alone, together, args, rate_mbit)
    except (LabError, ValueError) as error:
        console.print("[red]demo failed:[/]")
        console.print(str(error), markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; everything has been cleaned up")
        return 130
    show(figures, console)
    console.print(f"all of this took:  {time.monotonic() - began_s:.0f} s", soft_wrap=True)
    return 0 if figures["identical"] else 1


@dataclass
class Runs:
    """The runs of the demo, with one training job or two.

    Without ``--steps`` the number of steps is chosen so that the runs end before ``deadline_s``.
    """

    cluster: Cluster
    args: argparse.Namespace
    console: Console
    deadline_s: float

    def all(self) -> tuple[dict[str, Run], dict[str, Run]]:
        """Return the run of each job alone, and the runs of both jobs, by variant."""
        if self.cluster.rate_mbit is not None or self.args.steps is None:
            self.calibrate()
        alone = {
            job: self.train(f"job {job} alone", f"alone-{job}", [job], "none")
            for job in LEARNING_RATES
        }
        together = {
            UNMANAGED: self.train("side by side, unmanaged", "unmanaged", LEARNING_RATES, "none"),
            CROSSOVER: self.train(
                "side by side, crossover", "crossover", LEARNING_RATES, "crossover"
            ),
        }
        return alone, together

    def calibrate(self) -> None:
        """Measure a few steps on a fast link. Set the rate for ``--ratio`` and choose the steps."""
        began_s = time.monotonic()
        run = self.train(CALIBRATION, "calibration", ["a"], "none", steps=CALIBRATION_STEPS)
        length_s = time.monotonic() - began_s
        figures = run.figures()["a"]
        if self.cluster.rate_mbit is not None:
            self.set_rate(figures)
        if self.args.steps is None:
            self.choose_steps(figures, length_s)

    def set_rate(self, figures: JobFigures) -> None:
        if figures.busy_s is None or figures.wire_bytes is None:
            raise ValueError(
                "expected each core's load and the bytes sent, got neither; is /proc mounted?"
            )
        rate_mbit = rate_for(self.args.ratio, figures.busy_s, figures.wire_bytes)
        self.cluster.set_rate(rate_mbit)
        self.say(
            f"A step computes for {figures.busy_s:.2f} s and sends "
            f"{figures.wire_bytes / 1e6:.1f} MB per node: "
            f"at {rate_mbit:.0f} Mbit/s that takes {self.args.ratio:g} times as long."
        )

    def choose_steps(self, figures: JobFigures, length_s: float) -> None:
        """Choose as many steps as fit into the remaining time, from the calibration's times."""
        if figures.step_s is None or figures.makespan_s is None:
            raise ValueError("expected steps in the calibration, got none")
        self.args.steps = steps_within(
            self.deadline_s - time.monotonic(),
            overhead_s=max(0.0, length_s - figures.makespan_s),
            step_s=max(figures.step_s, figures.busy_s or 0.0),
            ratio=self.args.ratio if self.cluster.rate_mbit is not None else 0.0,
        )
        fit = "fit into"
        if self.args.steps <= LEAST_STEPS:
            fit = "are the fewest, even if they do not fit into"
        self.say(f"{self.args.steps} steps of each job {fit} {BUDGET_S / 60:g} minutes.")

    def train(
        self,
        title: str,
        directory: str,
        names: Iterable[str],
        hook: str,
        *,
        steps: int | None = None,
    ) -> Run:
        """Run train.py for these jobs, side by side, with one hook."""
        steps = steps or self.args.steps
        out: Path = self.args.out / directory
        jobs = [
            Job(name, command(name, hook, steps, self.args.training), STEADY_MEMORY)
            for name in names
        ]
        began_s = time.monotonic()
        with progress(jobs, out, title) as watch:
            self.cluster.run(jobs, TIMEOUT_S, out=out, watch=watch)
        self.say(f"{title}: done after {time.monotonic() - began_s:.0f} s, start-up included")
        return load_run(out)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def command(name: str, hook: str, steps: int, training: Sequence[str]) -> list[str]:
    """Return the command of a rank. It evaluates only at the end, to keep timings undisturbed."""
    fixed = ["--hook", hook, "--steps", str(steps), "--lr", str(LEARNING_RATES[name])]
    quiet = ["--eval-every", str(steps + 1), "--log-every", "5", "--device", "cpu"]
    return ["python", str(TRAIN), *TRAINING, *fixed, *quiet, *training]


def report(
    alone: Mapping[str, Run],
    together: Mapping[str, Run],
    args: argparse.Namespace,
    rate_mbit: float | None,
) -> dict[str, Any]:
    """Compute the figures, and write them and the picture."""
    runs = (*alone.values(), *together.values())
    figures = summarize(
        {job: outcomes(run)[job] for job, run in alone.items()},
        {variant: outcomes(run) for variant, run in together.items()},
        {job: cost(run, job) for job, run in alone.items()},
    )
    crossover = together[CROSSOVER]
    picture = draw_run(crossover, args.out / "timeline.png", title=PICTURE_TITLE)
    figures |= {
        "meaning": verdict(figures, shaped=rate_mbit is not None),
        "rate_mbit": rate_mbit,
        "dropped_packets": sum(run.lab["dropped"] for run in runs),
        "crossover_run": crossover.as_json(),
        "load_before": args.load_before,
        "steps": args.steps,
        "learning_rates": LEARNING_RATES,
        "environment": STEADY_MEMORY,
        "command": command("a", "crossover", args.steps, args.training),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "picture": str(picture),
        "json": str(args.out / "demo.json"),
    }
    Path(figures["json"]).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def outcomes(run: Run) -> dict[str, Outcome]:
    return {job: outcome_of([*load_logs(run.directory / job).values()]) for job in run.jobs}


def cost(run: Run, job: str) -> dict[str, float]:
    figures = run.figures()[job]
    if figures.step_s is None or figures.busy_s is None:
        raise ValueError(
            f"expected the time and the load of job {job}'s steps, got neither; is /proc mounted?"
        )
    # The kernel counts a core's load in ticks and for all processes, so it may exceed the step.
    compute_s = min(figures.busy_s, figures.step_s)
    return {
        "step_s": figures.step_s,
        "compute_s": compute_s,
        "exposed_s": figures.step_s - compute_s,
        "wire_s": figures.wire_s or 0.0,
    }


def introduce(console: Console, args: argparse.Namespace, reason: str | None) -> None:
    steps = f"up to {MOST_STEPS}" if args.steps is None else args.steps
    rates = " and ".join(f"{rate:g} (job {job})" for job, rate in LEARNING_RATES.items())
    console.print(
        f"Two sibling jobs train a small ResNet on scanned digits, {steps} steps each, "
        "with learning rates\n"
        f"{rates}, on {NODES} emulated nodes. Core i is the device of node i, "
        "and both jobs share it.\n",
        soft_wrap=True,
    )
    if reason:
        console.print(
            f"[yellow]No network is emulated:[/] {escape(reason)}.\n"
            "The jobs run on the same cores and talk over loopback. That is so fast that there is "
            "no wire time in\n"
            "which a sibling could compute: expect the same losses and accuracy, but no "
            "speed-up.\n",
            soft_wrap=True,
        )


def show(figures: Mapping[str, Any], console: Console) -> None:
    console.print()
    console.print(make_table(figures))
    console.print(composition(figures), style="dim", soft_wrap=True)
    colour = "green" if figures["identical"] else "bold red"
    console.print(f"[{colour}]{figures['meaning']}[/]\n", soft_wrap=True)
    for warning in warnings(figures):
        console.print(f"[bold red]{warning}[/]", soft_wrap=True)
    console.print(f"who computed when: {figures['picture']}", soft_wrap=True)
    console.print(f"all figures:       {figures['json']}", soft_wrap=True)


def warnings(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons to doubt the figures."""
    for variant, each in figures["variants"].items():
        for difference in each["differences"]:
            yield f"{variant}: {difference} than alone"
    if figures["dropped_packets"]:
        yield f"{figures['dropped_packets']} packets were dropped: the times are spoiled."
    if figures["load_before"] > LOAD_TOLERATED:
        load = f"{figures['load_before']:.1f}"
        yield f"Other processes used the machine before (load {load}): all times are rough."


def make_table(figures: Mapping[str, Any]) -> Table:
    """Return the table of all variants."""
    table = Table(title="From the first step to the last of both jobs")
    table.add_column("variant", no_wrap=True)
    for heading in ("time", "speed-up", "accuracy " + ", ".join(LEARNING_RATES)):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("losses", no_wrap=True)
    for variant, each in figures["variants"].items():
        same = "[bold red]DIFFERENT" if each["differences"] else "identical"
        table.add_row(
            variant,
            f"{each['makespan_s']:.1f} s",
            f"{each['speed_up']:.2f}×",
            ", ".join(f"{accuracy:.1%}" for accuracy in each["accuracy"].values()),
            "" if variant == AFTER else same,
            style="bold" if variant == CROSSOVER else "",
        )
    table.add_section()
    best_s = figures["variants"][AFTER]["makespan_s"] / figures["bound"]
    table.add_row("at best (bound S)", f"{best_s:.1f} s", f"{figures['bound']:.2f}×", style="dim")
    return table


def composition(figures: Mapping[str, Any]) -> str:
    """Return a text with the parts of a step, from which the bound follows."""
    costs = figures["costs"].values()
    mean_s = {
        name: sum(each[name] for each in costs) / len(costs)
        for name in ("step_s", "compute_s", "exposed_s", "wire_s")
    }
    rate = f" at {figures['rate_mbit']:.0f} Mbit/s" if figures["rate_mbit"] else ""
    return (
        f"A step alone takes T1 = {mean_s['step_s']:.3f} s: "
        f"device busy C = {mean_s['compute_s']:.3f} s, idle N = {mean_s['exposed_s']:.3f} s;\n"
        f"its gradients are on the wire for M = {mean_s['wire_s']:.3f} s{rate}. "
        "S = 2·T1 / max(2C, T1, 2M)\n"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--steps",
        type=int,
        help=f"of each job (default: as many as fit into {BUDGET_S / 60:g} minutes, "
        f"at most {MOST_STEPS})",
    )
    parser.add_argument("--ratio", type=float, default=0.9, help="M/C (default 0.9)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="(default runs/demo)")
    parser.add_argument("--unshaped", action="store_true", help="emulate no network: needs no root")
    args, training = parser.parse_known_args(argv)
    if (args.steps is not None and args.steps < 1) or args.ratio <= 0:
        parser.error(
            f"expected steps >= 1 and ratio > 0, got steps={args.steps}, ratio={args.ratio}"
        )
    args.training = training
    return args


if __name__ == "__main__":
    sys.exit(main())
