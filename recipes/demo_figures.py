"""Computes the figures of the demo: makespans, speed-ups, the bound, differences. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from lab import bound

AFTER: Final = "one after the other"
UNMANAGED: Final = "unmanaged"
CROSSOVER: Final = "crossover"
NOISE: Final = 0.03
"""Two equal runs differ by about this much."""
LEAST_GAINS: Final = (1.3, 1.5)
"""Reliable speed-ups over one after the other, unmanaged and with crossover."""
MOST_STEPS: Final = 100
LEAST_STEPS: Final = 12
"""Fewer are not meaningful: in the first three DDP forms its buckets."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The times and the results of one job of one run, by rank."""

    begin_s: float
    end_s: float
    losses: Sequence[Sequence[float]]
    parameters_sha256: Sequence[str]
    accuracy: float

    @property
    def length_s(self) -> float:
        """The time from the begin of the first step to the end of the last one."""
        return self.end_s - self.begin_s


def outcome_of(logs: Sequence[Sequence[Record]]) -> Outcome:
    """Return a job's outcome, from the logs of its ranks. Start-up and evaluation do not count."""
    steps = [[record for record in log if record["event"] == "step"] for log in logs]
    ends = [record for log in logs for record in log if record["event"] == "end"]
    accuracies = [record["accuracy"] for log in logs for record in log if record["event"] == "eval"]
    if not steps or not all(steps) or len(ends) != len(logs) or not accuracies:
        raise ValueError(
            "expected steps, an evaluation and an end in the log of every rank, "
            f"got {len(logs)} logs with {[len(log) for log in steps]} steps, "
            f"{len(accuracies)} evaluations and {len(ends)} ends"
        )
    return Outcome(
        begin_s=min(log[0]["begin_s"] for log in steps),
        end_s=max(log[-1]["end_s"] for log in steps),
        losses=[[record["loss"] for record in log] for log in steps],
        parameters_sha256=[record["parameters_sha256"] for record in ends],
        accuracy=accuracies[-1],
    )


def steps_within(budget_s: float, *, overhead_s: float, step_s: float, ratio: float) -> int:
    """Choose the steps of each job so that the demo's four runs end in time, within the limits.

    Args:
        budget_s: the time for the four runs.
        overhead_s: the time of a run of one job besides its steps. For two jobs it is twice as
            long, since they share the cores.
        step_s: a step alone on a fast link.
        ratio: M/C of the link, on which a step takes 1 + ratio times as long.
    """
    one_after_the_other_s = 2 * (1 + ratio) * step_s
    gains = (1.0, 1.0, 1.0) if ratio == 0 else (1.0, *LEAST_GAINS)
    of_a_step_s = sum(one_after_the_other_s / gain for gain in gains)
    left_s = budget_s - (2 * 1 + 2 * 2) * overhead_s
    return max(LEAST_STEPS, min(MOST_STEPS, int(left_s / of_a_step_s)))


def makespan_s(outcomes: Mapping[str, Outcome]) -> float:
    """Return the time from the first begin to the last end, over all jobs."""
    return max(each.end_s for each in outcomes.values()) - min(
        each.begin_s for each in outcomes.values()
    )


def differences(expected: Mapping[str, Outcome], got: Mapping[str, Outcome]) -> list[str]:
    """Return where the results of jobs differ from the expected ones, in any bit."""
    found = []
    for job, outcome in expected.items():
        for rank, (before, after) in enumerate(zip(outcome.losses, got[job].losses, strict=True)):
            step = _first_difference(before, after)
            if step is not None:
                found.append(f"job {job}, rank {rank}: other losses from step {step} on")
        if outcome.parameters_sha256 != got[job].parameters_sha256:
            found.append(f"job {job}: other parameters at the end")
    return found


def _first_difference(before: Sequence[float], after: Sequence[float]) -> int | None:
    # Compared as texts, so that NaN equals NaN.
    pairs = zip_longest((x.hex() for x in before), (x.hex() for x in after))
    return next((step for step, (x, y) in enumerate(pairs) if x != y), None)


def summarize(
    alone: Mapping[str, Outcome],
    together: Mapping[str, Mapping[str, Outcome]],
    costs: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Compute the demo's figures.

    Args:
        alone: the run of each job alone.
        together: the runs of all jobs side by side, by variant.
        costs: the step of each job alone: its time T1, C, N and M.
    """
    after_s = sum(outcome.length_s for outcome in alone.values())
    variants = {AFTER: _variant(alone, alone, after_s, after_s)}
    for name, outcomes in together.items():
        variants[name] = _variant(alone, outcomes, makespan_s(outcomes), after_s)
    best = bound([(cost["compute_s"], cost["step_s"], cost["wire_s"]) for cost in costs.values()])
    return {
        "variants": variants,
        "bound": best,
        "over_unmanaged": variants[UNMANAGED]["makespan_s"] / variants[CROSSOVER]["makespan_s"],
        "identical": not any(variant["differences"] for variant in variants.values()),
        "costs": costs,
    }


def _variant(
    alone: Mapping[str, Outcome], outcomes: Mapping[str, Outcome], took_s: float, after_s: float
) -> dict[str, Any]:
    return {
        "makespan_s": took_s,
        "speed_up": after_s / took_s,
        "accuracy": {job: outcome.accuracy for job, outcome in outcomes.items()},
        "differences": differences(alone, outcomes),
    }


def verdict(figures: Mapping[str, Any], *, shaped: bool) -> str:
    """Return the meaning of the figures, in one sentence."""
    crossover = figures["variants"][CROSSOVER]
    after_s = figures["variants"][AFTER]["makespan_s"]
    times = f"{crossover['makespan_s']:.1f} s instead of {after_s:.1f} s one after the other"
    if not figures["identical"]:
        return "Something is wrong: sharing the devices changed the results of the jobs."
    same = "and each job computed bit for bit the same as alone"
    if not shaped:
        return f"No network was emulated, so there was no wire time to fill: {times}; {same}."
    gain = crossover["speed_up"]
    best = figures["bound"]
    if gain <= 1 + NOISE:
        return f"Taking turns did not pay here: {times}, where {best:.2f}× was possible; {same}."
    share = f"{gain / best:.0%} of the possible speed-up"
    if gain > (1 + NOISE) * best:
        share = f"above the bound of {best:.2f}×: something has slowed the runs alone"
    return (
        f"Taking turns, both jobs were done in {times}: {gain:.2f}× as fast ({share}), and "
        f"{figures['over_unmanaged']:.2f}× as fast as side by side unmanaged; {same}."
    )
