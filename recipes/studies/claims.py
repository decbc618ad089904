"""The claims of docs/measurements.md, each as runs of train.py, which run.py makes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab import bound

Limit = Callable[[float, float, float], float]
"""Returns the best possible factor over a job alone, from its C, T1 and M in seconds a step."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        arguments: arguments of train.py.
        jobs: how many siblings run at once.
        warm_up: steps before the measured ones. In these DDP forms its buckets, and states make
            their plans.
        batches: mini-batches in a step.
        script: a script that runs instead of train.py, with the same arguments.
        variables: environment variables.
    """

    arguments: str
    jobs: int = 1
    warm_up: int = 4
    batches: int = 1
    script: str = "train.py"
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A claim, and the runs that show it.

    Args:
        text: the claim, as a sentence.
        ways: all ways of training, by name. C, N and M are those of the first.
        presets: models, from ``_models.PRESETS``.
        ratios: the M/C to measure at. 0 stands for an unshaped link.
        rates_mbit: rates of the link, instead of ratios.
        against: the others are compared to the fastest of these ways. Default: the first way.
        limit: the best possible factor.
        exact: ways that must have the losses of the first one, job by job, up to ``tolerance``.
        tolerance: relative difference of losses that is allowed.
        compared: how many steps' losses are compared. None: those of all steps that both train.
        arguments: arguments of train.py, for all ways.
        advise: also measure the prediction of `crossover-ddp advise` for the first way.
        steps: steps to measure.
        repeats: runs of each way.
        ranks_per_node: ranks of a job on each node.
        needs: environment variables that must be set.
    """

    text: str
    ways: Mapping[str, Way]
    presets: Sequence[str]
    ratios: Sequence[float] = ()
    rates_mbit: Sequence[float] = ()
    against: Sequence[str] = ()
    limit: Limit | None = None
    exact: Sequence[str] = ()
    tolerance: float = 0.0
    compared: int | None = None
    arguments: str = "--optimizer sgd --lr 0.02"
    advise: bool = False
    steps: int = 12
    repeats: int = 5
    ranks_per_node: int = 1
    needs: Sequence[str] = ()


def siblings(compute_s: float, step_s: float, wire_s: float) -> float:
    """Return the bound S of two equal jobs."""
    return bound([(compute_s, step_s, wire_s)] * 2)


def every(steps: int) -> Limit:
    """Return the bound of a job that communicates once in ``steps`` steps, and hides all of it."""
    return lambda compute_s, step_s, wire_s: step_s / max(compute_s, wire_s / steps)


PLAIN = Way("--hook none")
# The trial of deferring takes at most 60 steps. Buckets of a sixteenth of these models suit it.
DECOUPLED = Way("--hook decoupled --bucket-cap-mb 0.15", warm_up=90)
# Torch's PowerSGD starts collectives in callbacks. On gloo those of several buckets mix.
POWERSGD = Way("--hook powersgd --bucket-cap-mb 1000")

TURNS_ALWAYS = {"CROSSOVER_TRIAL": "0"}

CLAIMS: Mapping[str, Claim] = {
    "siblings": Claim(
        "two siblings that take turns are faster than one after the other, "
        "and than side by side without turns",
        {
            "one after the other": PLAIN,
            "side by side": Way("--hook none", jobs=2),
            "turns": Way("--hook crossover", jobs=2, variables=TURNS_ALWAYS),
        },
        presets=("convnet", "vit", "gpt"),
        ratios=(0.5, 0.75, 1.0, 1.5),
        limit=siblings,
        exact=("side by side", "turns"),
    ),
    "trial": Claim(
        "two siblings that have tried whether turns pay are never slower than side by side",
        {
            "one after the other": PLAIN,
            "side by side": Way("--hook none", jobs=2),
            "turns": Way("--hook crossover", jobs=2, variables=TURNS_ALWAYS),
            # After 16 steps the trial takes at most 8 blocks of each kind, of 5 steps.
            "tried": Way("--hook crossover", jobs=2, warm_up=110),
        },
        presets=("convnet", "vit", "gpt"),
        ratios=(0.25, 0.5, 1.0, 1.5, 2.0),
        against=("side by side",),
        exact=("turns", "tried"),
        steps=24,
        repeats=3,
    ),
    "auto": Claim(
        "the line that tries itself is as fast as the best of plain DDP in two sizes of buckets, and "
        "with rounding as torch's fp16 hook",
        {
            "ddp": PLAIN,
            "ddp, 4 MB": Way("--hook none --bucket-cap-mb 4"),
            "fp16 (torch)": Way("--hook fp16"),
            "PowerSGD (torch)": POWERSGD,
            # A race of three arms takes at most 75 steps, and one of seven 135, unless comparisons
            # with the first arm contradict each other.
            "auto": Way("--hook auto", warm_up=95),
            "auto, rounded": Way("--hook auto_rounded", warm_up=160),
        },
        presets=("vit_tiny", "convnext_atto", "regnety_002"),
        rates_mbit=(100.0, 250.0, 500.0, 1000.0, 2000.0),
        against=("ddp", "ddp, 4 MB"),
        exact=("auto",),
        repeats=3,
    ),
    "nodes": Claim(
        "with two nodes of two ranks all hooks send half as many bytes over a node's card as without "
        "levels, and are faster than plain DDP",
        {
            "ddp": PLAIN,
            "split, flat": Way("--hook rsag", variables={"CROSSOVER_LEVELS": "flat"}),
            "split": Way("--hook rsag"),
            "crossover": Way("--hook crossover"),
            "Int8": Way("--hook compressed"),
            "decoupled": DECOUPLED,
        },
        presets=("vit_tiny",),
        rates_mbit=(200.0, 400.0),
        exact=("split", "crossover", "decoupled"),
        tolerance=1e-3,
        compared=10,
        repeats=3,
        ranks_per_node=2,
    ),
    "decoupled": Claim(
        "decoupled training is faster than plain DDP with its best buckets, with the same losses",
        {
            "ddp": PLAIN,
            "ddp, 2 MB": Way("--hook none --bucket-cap-mb 2"),
            "ddp, 0.15 MB": Way("--hook none --bucket-cap-mb 0.15"),
            "decoupled": DECOUPLED,
        },
        presets=("convnet", "deep_vit", "convnext"),
        ratios=(0.0, 0.5, 1.0, 1.5),
        against=("ddp", "ddp, 2 MB", "ddp, 0.15 MB"),
        limit=every(1),
        exact=("decoupled",),
    ),
    "muon": Claim(
        "Muon on its owners is faster than plain DDP with torch's Muon, with the same losses",
        {"ddp": PLAIN, "owners": Way("--hook muon")},
        presets=("vit", "gpt"),
        ratios=(0.0, 1.0),
        exact=("owners",),
        arguments="--optimizer muon",
    ),
    "codecs": Claim(
        "fewer bytes make steps on a slow link faster; torch's own hooks beside ours",
        {
            "ddp": PLAIN,
            "fp16 (torch)": Way("--hook fp16"),
            "PowerSGD (torch)": POWERSGD,
            "Int8": Way("--hook compressed"),
            "SIDCo(0.01)": Way("--hook compressed --codec sidco"),
        },
        presets=("vit", "convnet"),
        rates_mbit=(20.0, 200.0),
    ),
    "averaging": Claim(
        "replicas averaged every four steps, late by three, are faster than plain DDP, "
        "decoupled training and accumulation",
        {
            "ddp": PLAIN,
            "accumulation of 4": Way("--hook none --accumulate 4", batches=4),
            "decoupled": DECOUPLED,
            "averaged": Way("--hook local_sgd --sync-every 4 --delay 3 --fragments 4", warm_up=8),
        },
        presets=("convnet",),
        ratios=(1.0, 3.0),
        limit=every(4),
        arguments="--optimizer sgd --lr 0.02 --batch-size 4",
        steps=16,
    ),
    "slow links": Claim(
        "on links much slower than the computation, few bits of gradients beside few bits of "
        "averaged replicas",
        {
            "ddp": PLAIN,
            "fp16 (torch)": Way("--hook fp16"),
            "PowerSGD (torch)": POWERSGD,
            "accumulation of 4": Way("--hook none --accumulate 4", batches=4),
            "Int8": Way("--hook compressed"),
            "Int4": Way("--hook compressed --codec int4"),
            "Int4, decoupled": replace(DECOUPLED, arguments=DECOUPLED.arguments + " --codec int4"),
            "PowerSGD": Way("--hook compressed --codec powersgd"),
            "averaged, 4": Way("--hook local_sgd --sync-every 4 --delay 3 --fragments 4"),
            "averaged, Int4, 1": Way("--hook local_sgd --sync-every 1 --delay 1 --codec int4"),
            "averaged, Int4, 2": Way(
                "--hook local_sgd --sync-every 2 --delay 1 --fragments 2 --codec int4"
            ),
        },
        presets=("gpt",),
        ratios=(1.5, 3.0, 8.0, 16.0),
        against=("fp16 (torch)", "PowerSGD (torch)", "accumulation of 4"),
        arguments="--batch-size 8",
        steps=16,
        repeats=3,
    ),
    "kfac": Claim(
        "K-FAC takes less time than kfac-pytorch, at the same losses; "
        "needs KFAC_PYTORCH=its checkout",
        {
            "kfac-pytorch": Way("--hook kfac-pytorch", script="studies/peer.py"),
            "sgd": PLAIN,
            "kfac": Way("--hook kfac-alike", script="studies/peer.py"),
            "kfac, decoupled": Way(
                "--hook kfac-decoupled --bucket-cap-mb 0.15", warm_up=90, script="studies/peer.py"
            ),
        },
        presets=("convnet", "vit"),
        rates_mbit=(100.0,),
        exact=("kfac", "kfac, decoupled"),
        # Losses that differ by 1e-7 differ by 1e-2 sixty steps later. That is the same with
        # `kfac_hook` and with its decoupled form.
        tolerance=1e-3,
        compared=40,
        arguments="--optimizer sgd --lr 0.01 --batch-size 16 --image-size 64 --bucket-cap-mb 25 "
        "--factor-update-steps 10 --inv-update-steps 100",
        steps=100,
        needs=("KFAC_PYTORCH",),
    ),
    "split": Claim(
        "the split hook costs nothing against plain DDP",
        {"ddp": PLAIN, "split": Way("--hook rsag")},
        presets=("vit",),
        rates_mbit=(150.0,),
        exact=("split",),
        repeats=10,
    ),
    "lone": Claim(
        "a lone job loses nothing by turns",
        {"split": Way("--hook rsag"), "turns": Way("--hook crossover")},
        presets=("vit",),
        rates_mbit=(150.0,),
        exact=("turns",),
        repeats=10,
    ),
    "advice": Claim(
        "`crossover-ddp advise` predicts the factors of siblings and of decoupled training "
        "within 10 %",
        {"ddp": PLAIN, "turns": Way("--hook crossover", jobs=2), "decoupled": DECOUPLED},
        presets=("convnet", "vit"),
        ratios=(0.5, 0.75, 1.0, 1.5),
        advise=True,
        repeats=3,
    ),
}


def fastest(step_s: Mapping[str, float], names: Sequence[str]) -> str:
    """Return the fastest of these ways."""
    return min(names, key=lambda name: step_s.get(name, math.inf))
