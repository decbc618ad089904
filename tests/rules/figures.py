"""Measured figures that pages repeat, each computed from the tables of docs/measurements.md.

A measured figure stands once, in its table. A `Passage` is a text of a page that repeats figures,
with ``{}`` in the place of each. `disagreements` finds the pages with other figures. So after a new
measurement only its table is changed, and the test names the pages to change.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from crossover_ddp._owners.assignment import assign
from crossover_ddp.cli.advise import METHODS
from tests.harness.documents import section

README, MEASUREMENTS, CHOOSING = "README.md", "docs/measurements.md", "docs/choosing.md"
# The commands that repeat measurements, as the summary of measurements.md names them.
AUTO, NODES, MUON, KFAC = "--claim auto", "--claim nodes", "--claim muon", "--claim kfac"
SIBLINGS, DECOUPLED, CODECS = "--claim siblings", "--claim decoupled", "--claim codecs"
SLOW = '--claim "slow links"'
AVERAGING, GPU, ARITHMETIC = "--claim averaging", "tests/gpu/run_all.sh mps", "arithmetic"
IN_GIT = "a script in [git]"
NO_COMMAND = "no command"
NUMBER = r"(?<![\d.])\d+(?:\.\d+)?"
FIGURE = rf"{NUMBER}(?:(?:, | to ){NUMBER})*"


class Passage(NamedTuple):
    """A text with figures.

    Args:
        page: the page's path.
        text: the text, with ``{}`` for each figure.
        figures: the figures, in their order.
        command: what repeats the measurement.
    """

    page: str
    text: str
    figures: Sequence[str]
    command: str

    def pattern(self) -> re.Pattern[str]:
        """Match the text with any figures, which are the groups, and any white space."""
        words = re.escape(" ".join(self.text.split())).replace(r"\ ", r"\s+")
        return re.compile(words.replace(r"\{\}", f"({FIGURE})"))


class Measured:
    """The tables of measurements.md."""

    def __init__(self, document: str) -> None:
        self._document = document

    def rows(self, heading: str, key: str = "") -> Iterator[dict[str, str]]:
        """Yield the rows of all tables under a heading that have the column ``key``, if given."""
        columns: list[str] = []
        for line in section(self._document, heading).splitlines():
            cells = [each.strip() for each in line.strip("|").split("|")]
            if not line.startswith("|"):
                columns = []
            elif not columns:
                columns = cells
            elif set(cells) != {"---"}:
                row = dict(zip(columns, cells, strict=True))
                if not key or key in row:
                    yield row

    def cell(self, heading: str, row: str, column: str) -> list[float]:
        """Return the numbers of one cell. Its row begins with ``row``."""
        found = [
            each[column]
            for each in self.rows(heading, column)
            if " | ".join(each.values()).startswith(row)
        ]
        if len(found) != 1:
            raise ValueError(
                f"expected one row {row!r} with a column {column!r} under {heading!r}, "
                f"got {len(found)}"
            )
        return numbers(found[0])

    def said(self, heading: str, text: str) -> tuple[str, ...]:
        """Return the figures of a sentence under a heading."""
        pattern = Passage(MEASUREMENTS, text, (), "").pattern()
        (found,) = pattern.finditer(section(self._document, heading))
        return found.groups()


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell, without remarks in brackets."""
    while (shorter := re.sub(r"\([^()]*\)", "", cell)) != cell:
        cell = shorter
    return [float(each) for each in re.findall(NUMBER, cell)]


def listed(values: Iterable[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"


def faster(plain: Sequence[float], way: Sequence[float]) -> str:
    """Return how many times as fast a way is as plain DDP.

    Rounds are compared one by one, the smallest factor first. If there are fewer rounds of one of
    them, the result is the range over all.
    """
    if len(plain) == len(way):
        return listed(sorted(a / b for a, b in zip(plain, way, strict=True)))
    return span(a / b for a, b in product(plain, way))


def disagreements(pages: Mapping[str, str], all_passages: Iterable[Passage]) -> list[str]:
    """Return the passages that these pages lack, or in which they have other figures."""
    found = []
    for passage in all_passages:
        if passage.page in pages:
            matches = [*passage.pattern().finditer(pages[passage.page])]
            written = {match.groups() for match in matches}
            if written != {(*passage.figures,)}:
                expected = ", ".join(passage.figures)
                found.append(
                    f"{passage.page}: {passage.text!r}: expected {expected}, got {written or 'none'}"
                )
    return found


def passages(measured: Measured) -> list[Passage]:
    """Return all passages, with the figures of these measurements."""
    parts = (_auto, _rounded, _nodes, _owners, _siblings, _deferred, _averaged, _slow, _gpu, _costs)
    return [*_arithmetic(), *(passage for part in parts for passage in part(measured))]


def _arithmetic() -> Iterator[Passage]:
    crossover, deferred, half, int8 = (1.05 / method.reached - 1 for method in METHODS)
    yield Passage(
        CHOOSING,
        "a gain of 5 % needs at least N/C {} with two siblings, {} with torch's fp16, {} with "
        "decoupled training and {} with `Int8()`.",
        listed([crossover, half, deferred, int8]).split(", "),
        ARITHMETIC,
    )
    # ResNet-50's gradients at 10 Gbit/s.
    for machines, compute_s, row in (
        (8, 0.2, "eight, 0.143 s | 0.2 s"),
        (8, 0.1433, "0.143 s (M/C 1)"),
        (4, 0.184, "four, 0.123 s | above 0.18 s"),
        (4, 0.1, "0.1 s"),
        (4, 0.03, "0.03 s"),
    ):
        wire_s = 2 * (machines - 1) / machines * 0.1024 / 1.25
        plain_s = _plain_s(compute_s, wire_s)
        gains = plain_s / _deferred_s(compute_s, wire_s), plain_s / _plain_s(compute_s, wire_s / 2)
        yield Passage(CHOOSING, f"| {row} | {{}} | {{}} |", listed(gains).split(", "), ARITHMETIC)
    accumulated = [
        (k - 1 + _plain_s(1.0, 1.0)) / (k - 1 + _deferred_s(1.0, 1.0)) for k in (1, 2, 4)
    ]
    yield Passage(
        CHOOSING, "deferring gains {} for k = 1, 2, 4.", [listed(accumulated)], ARITHMETIC
    )


def _plain_s(compute_s: float, wire_s: float) -> float:
    """Return a step of a DDP that hides all it can behind backward, two thirds of C."""
    return compute_s / 3 + max(2 * compute_s / 3, wire_s)


def _deferred_s(compute_s: float, wire_s: float) -> float:
    return max(2 * compute_s / 3, wire_s / 2) + max(compute_s / 3, wire_s / 2)


def _raced(measured: Measured, row: str, column: str) -> str:
    """Return the factor of a way over plain DDP in the race of the ways."""
    heading = "The line that tries itself"
    return faster(measured.cell(heading, row, "plain DDP"), measured.cell(heading, row, column))


def _on_links(measured: Measured, column: str) -> list[str]:
    """Return ViT-tiny's factors over plain DDP at 1 Gbit/s, 500 and 250 Mbit/s."""
    rows = [f"{link} in turns" for link in ("1 Gbit/s", "500 Mbit/s", "250 Mbit/s")]
    heading = "The line that tries itself"
    return [listed(measured.cell(heading, row, column)) for row in rows]


def _auto(measured: Measured) -> Iterator[Passage]:
    first, *slower = _on_links(measured, '`losses="same"`')
    buckets = listed(
        measured.cell("The line that tries itself", "1 Gbit/s in turns", "small buckets")
    )
    others = [
        _raced(measured, f"{model}, 1 Gbit/s", "`AutoState(optimizer)`")
        for model in ("ConvNeXt-atto (14 MB)", "RegNetY-002 (11 MB)")
    ]
    yield Passage(
        README,
        "1 Gbit/s, M/C 0.8: {} (small buckets alone: {}); 500 Mbit/s: {}; 250 Mbit/s: {}. "
        "ConvNeXt-atto, RegNetY-002, 1 Gbit/s: {}, {} |",
        [first, buckets, *slower, *others],
        AUTO,
    )
    yield Passage(
        MEASUREMENTS,
        "same losses | its best arm | 1 Gbit/s: {}; 500 Mbit/s: {}; 250 Mbit/s: {} |",
        [first, *slower],
        AUTO,
    )
    yield Passage(
        CHOOSING,
        "Small buckets alone gained {} at M/C 0.4",
        [_raced(measured, "ViT-tiny (22 MB), 2 Gbit/s", "in small buckets")],
        AUTO,
    )


def _rounded(measured: Measured) -> Iterator[Passage]:
    ours = {"fp16": '`losses="rounded"`', "PowerSGD of rank 2": '`losses="any"`'}
    torchs = {
        "fp16": ("`fp16_compress_hook`", "`fp16_compress_hook`"),
        "PowerSGD of rank 2": ("PowerSGD, rank 2", "PowerSGD, rank 2"),
    }
    links = "1 Gbit/s: {}; 500 Mbit/s: {}; 250 Mbit/s: {}."
    for name, column in ours.items():
        factors = _on_links(measured, column)
        yield Passage(README, f"{column} | ViT-tiny, same links: {{}}; {{}}; {{}} |", factors, AUTO)
        hook, torchs_column = torchs[name]
        others = _on_links(measured, torchs_column)
        text = f"torch's {hook} | ViT-tiny, same links: {{}}; {{}}; {{}} |"
        yield Passage(README, text, others, AUTO)
        short = name.removesuffix(" of rank 2")
        text = f"{links} {short}: {{}}; {{}}; {{}} |"
        yield Passage(MEASUREMENTS, text, factors + others, AUTO)

    def slow(column: str) -> list[str]:
        cells = (measured.cell("Codecs", row, column) for row in ("convnet", "ViT"))
        return [listed(cell) for cell in cells]

    int8, sidco, power, fp16 = (
        slow(n) for n in ("`Int8()`", "`SIDCo(0.01)`", "PowerSGD, rank 2 (torch)", "fp16 (torch)")
    )
    for text, each in (
        ("3.1 at M/C 3 and more | convnet: {}, **missed**; ViT: {} |", int8),
        ("as fast as PowerSGD | convnet: {}, ViT: {}, both **missed** |", sidco),
        ("PowerSGD: **{}, {}**; fp16: {}, {} |", power + fp16),
    ):
        yield Passage(MEASUREMENTS, text, each, CODECS)


def _nodes(measured: Measured) -> Iterator[Passage]:
    heading = "Several ranks on a node"

    def at(column: str) -> list[float]:
        """Return the claim's factors at 200 and 400 Mbit/s."""
        return [measured.cell(heading, f"{rate} Mbit/s | 0", column)[0] for rate in ("200", "400")]

    split, int8, deferred = map(at, ("split", "`Int8()`", "decoupled"))
    yield Passage(
        README,
        "200, 400 Mbit/s: `decoupled_hook` {}; `Int8()` {} |",
        [listed(deferred), listed(int8)],
        NODES,
    )
    by_rate = (
        f"{value:.2f}" for at_rate in zip(split, int8, deferred, strict=True) for value in at_rate
    )
    yield Passage(
        MEASUREMENTS,
        "200 Mbit/s: split {}, `Int8()` {}, decoupled {}; 400 Mbit/s: split {}, `Int8()` {} "
        "(**missed**), decoupled {} |",
        [*by_rate],
        NODES,
    )
    least = [
        measured.cell(heading, "over plain DDP | 1 | 0.79", n)[0] for n in ("split", "split, flat")
    ]
    yield Passage(
        "docs/nodes.md",
        "steps are {} times as fast as plain DDP's; without levels they took {} times as long",
        [span([*split, least[0]]), f"{1 / least[1]:.2f}"],
        NODES,
    )


def _owners(measured: Measured) -> Iterator[Passage]:
    def muon(row: str) -> list[float]:
        return measured.cell("Muon on its owners", row, "speed-up")

    unshaped, slow, slower, emulated = map(
        muon, ("ViT, unshaped", "ViT, 49 Mbit/s", "ViT, 30 Mbit/s", "ViT: unshaped")
    )
    figures = listed([slow[0], emulated[1], slower[0]]).split(", ")
    yield Passage(README, "M/C 0.8: {} ({} without bfloat16 in hardware); 1.0: {} |", figures, MUON)
    yield Passage(
        MEASUREMENTS,
        "| unshaped: {}, **missed**; M/C 0.78: {}; 0.96: {}, **missed** |",
        listed([*unshaped, *slow, *slower]).split(", "),
        MUON,
    )
    yield Passage(
        MEASUREMENTS,
        "| unshaped: {}; M/C 0.82: {} |",
        listed(emulated).split(", "),
        MUON,
    )
    ours, plain = measured.said(
        "Muon on its owners", "82 MB of matrices is {} MB, and plain DDP's is {} (**missed**)."
    )
    yield Passage("docs/muon.md", "{} MB more for 82", [f"{int(ours) - int(plain)}"], NO_COMMAND)
    yield Passage(
        "docs/muon.md",
        "{}, {} and {} times as fast at s = 0.93, {}, {} and {} at s = 0.23.",
        [f"{gpt2_small(share, ranks):.2f}" for share in (0.93, 0.23) for ranks in (2, 4, 8)],
        ARITHMETIC,
    )
    both = {
        model: (
            measured.cell("K-FAC", model, "this / it")[0],
            measured.cell("K-FAC", model, "decoupled / it; / SGD")[0],
        )
        for model in ("narrow ResNet-18", "ViT")
    }
    (resnet, resnet_late), (vit, vit_late) = both.values()
    yield Passage(
        README,
        "over kfac-pytorch: ResNet-18 {}, ViT {} |",
        listed([1 / resnet, 1 / vit]).split(", "),
        KFAC,
    )
    yield Passage(
        MEASUREMENTS,
        "| `kfac_hook`: {}, {}; decoupled: {}, {} |",
        listed([resnet, vit, resnet_late, vit_late]).split(", "),
        KFAC,
    )
    yield Passage(
        "docs/kfac.md",
        "a step takes {} times as long as kfac-pytorch's. With `kfac_hook` it takes {} times as long.",
        [f"{vit_late:.2f}", f"{vit:.2f}"],
        KFAC,
    )


def gpt2_small(share: float, world_size: int) -> float:
    """Return the factor with W owners if Newton-Schulz takes a share of plain DDP's step."""
    sides = [(768, 2304), (768, 768), (768, 3072), (768, 3072)] * 12
    costs = [20 * small**2 * large + 10 * small**3 for small, large in sides]
    return 1 / (1 - share + share * assign(costs, world_size).busiest_share)


def _siblings(measured: Measured) -> Iterator[Passage]:
    def near_one(column: str) -> str:
        """Return the range at M/C 0.8 to 1.1."""
        return span(
            factor
            for row in measured.rows("Two siblings")
            for ratio, factor in zip(numbers(row["M/C"]), numbers(row[column]), strict=True)
            if 0.75 < ratio < 1.15
        )

    yield Passage(
        README,
        "over one after the other: {} side by side, {} in turns |",
        [near_one("side by side"), near_one("turns")],
        SIBLINGS,
    )
    beside, turns = (
        measured.cell("Whether turns pay", "both wait 20 ms", n)[0]
        for n in ("side by side (the split)", "turns always")
    )
    yield Passage(
        "docs/turns.md", "make {} times as many steps", [f"{turns / beside:.1f}"], NO_COMMAND
    )


def _by_ratio(measured: Measured, *, turns: bool) -> dict[float, list[float]]:
    """Return the factors of turns, or of decoupled training, by the rows of choosing.md."""
    found: dict[float, list[float]] = {}

    def add(ratios: str, factors: Iterable[float]) -> None:
        for ratio, factor in zip(numbers(ratios), factors, strict=True):
            if ratio > 0.1:  # without a limit nothing is exposed
                nearest = min((0.5, 0.75, 1, 1.5, 2, 3), key=lambda row: abs(row - ratio))
                found.setdefault(nearest, []).append(factor)

    for row in measured.rows("Two siblings" if turns else "Decoupled training"):
        add(row["M/C"], numbers(row["turns" if turns else "over DDP (single runs)"]))
    for row in measured.rows("Advice beside what then happens", "M/C"):
        pairs = row["crossover" if turns else "decoupled"].split(";")
        add(row["M/C"], (numbers(pair)[1] for pair in pairs))
    for row in () if turns else measured.rows("Averaged replicas", "M/C"):
        add(row["M/C"], [float(row["DDP"]) / float(row["decoupled"])])
    return found


def _deferred(measured: Measured) -> Iterator[Passage]:
    deferred, turns = (_by_ratio(measured, turns=turns) for turns in (False, True))
    for ratio, bounds in {
        "0.5": "| 1.00 | 1.00 | 1.00 | 1.00 |",
        "0.75": "| 1.04 | 1.08 | 1.08 | 1.08 |",
        "1": "| 1.14 | 1.33 | 1.33 | 1.33 |",
        "1.5": "| 1.22 | 1.69 | 1.83 | 1.22 |",
        "2": "| 1.17 | 1.75 | 2.33 | 1.17 |",
    }.items():
        figures = [span(found[float(ratio)]) for found in (deferred, turns)]
        yield Passage(CHOOSING, f"| {ratio} {bounds} {{}}; {{}} |", figures, DECOUPLED)
    assert 3 not in turns
    yield Passage(CHOOSING, "| 1.82 | 2.99 | 1.11 | {}; – |", [listed(deferred[3])], AVERAGING)

    names = ("C s", "plain DDP s", "over DDP (single runs)")
    exposed = span(
        factor
        for row in measured.rows("Decoupled training")
        for compute_s, step_s, factor in zip(*(numbers(row[n]) for n in names), strict=True)
        if step_s / compute_s - 1 > 0.15
    )
    # All runs, including those in slow phases, which are in the summary only.
    hidden = span(
        factor
        for row in ("… at M/C 0.5", "… on a link without a limit")
        for factor in measured.cell("In one table", row, "got")
    )
    yield Passage(CHOOSING, "Decoupled training gained {} over DDP's best", [exposed], DECOUPLED)
    yield Passage(CHOOSING, "Below N/C 0.1 the factor was {}, and", [hidden], DECOUPLED)


def _averaged(measured: Measured) -> Iterator[Passage]:
    heading = "Averaged replicas"
    plain, deferred, accumulated, averaged = (
        measured.cell(heading, "3.00", n)[0]
        for n in ("DDP", "decoupled", "accumulation of 4", "averaged")
    )
    loss, least = (
        f"{measured.cell(heading, row, column)[0]:.1f}"
        for row, column in (
            ("from the first step", "late by 3, τ = 4"),
            ("after 64 steps", "streamed, τ = 8"),
        )
    )
    yield Passage(MEASUREMENTS, "within 1 % | +{} % ±", [loss], IN_GIT)
    yield Passage(CHOOSING, "+{} % to +{} % in a short GPT training", [least, loss], IN_GIT)
    yield Passage("docs/averaging.md", "is {} to {} % higher", [least, loss], IN_GIT)
    yield Passage(
        MEASUREMENTS,
        "| over DDP: {}; decoupled: {}; accumulation: {} | `--claim averaging`",
        [f"{plain / averaged:.2f}", f"{deferred / averaged:.1f}", f"{accumulated / averaged:.2f}"],
        AVERAGING,
    )
    yield Passage(
        "docs/averaging.md",
        "takes {} ms. It takes {} ms with plain DDP and {} ms with accumulation.",
        listed([averaged, plain, accumulated], 0).split(", "),
        AVERAGING,
    )


def _slow(measured: Measured) -> Iterator[Passage]:
    heading = "Slow links"

    def over_half(way: str) -> str:
        """Return the factors of a way over torch's fp16 at M/C 3, 8 and 16."""
        half = [measured.cell(heading, f"{ratio} |", "torch's fp16")[0] for ratio in (3, 8, 16)]
        this = [measured.cell(heading, f"{ratio} |", way)[0] for ratio in (3, 8, 16)]
        return listed([a / b for a, b in zip(this, half, strict=True)], 1)

    coded, every, other = map(over_half, ("`Int4()`", "increments, τ = 1", "increments, τ = 2"))
    for page in (README, MEASUREMENTS):
        yield Passage(
            page,
            "M/C 3, 8, 16: `Int4()` gradients {}; increments in every step {}, in every other one {} |",
            [coded, every, other],
            SLOW,
        )
    gaps = [
        f"{measured.cell(heading, row, 'W = 4')[0]:.1f}"
        for row in ("`Int4()` gradients", "increments, τ = 1", "increments, τ = 2, late by 1")
    ]
    yield Passage(
        "docs/averaging.md",
        "{} % with `Int4()` gradients, {} % with increments in every "
        "step and {} % in every other one",
        gaps,
        NO_COMMAND,
    )


def _gpu(measured: Measured) -> Iterator[Passage]:
    columns = ("NCCL, MPS", "NCCL, MPS, 8 queues", "gloo, MPS; 8 queues", "gloo, no MPS")

    def row(label: str) -> list[list[float]]:
        return [measured.cell("On a GPU", label, column) for column in columns]

    side, side8, side_gloo, _ = row("two, both together")
    turns, turns8, turns_gloo, turns_alone = row("turns |")
    int8, int8_8, int8_gloo, _ = row("`Int8()`")
    single, single8, *_ = row("split; crossover; decoupled")
    yield Passage(
        README, "`decoupled_hook`: {}, its trial", [listed([single[-1], single8[-1]])], GPU
    )
    yield Passage(README, "| `Int8()`: {} |", [listed(int8 + int8_8)], GPU)
    yield Passage(
        README,
        "| {} side by side, {} in turns (MPS with [eight queues](docs/gpu.md#mps); {}, {} without)",
        listed(side8 + turns8 + side + turns).split(", "),
        GPU,
    )
    yield Passage(
        MEASUREMENTS,
        "| gloo: {}; NCCL, eight queues: {} |",
        [listed(side_gloo), listed(side8)],
        GPU,
    )
    yield Passage(
        MEASUREMENTS,
        "| gloo: 0.96 to 0.97, **missed**; NCCL: {} |",
        [span(single + single8)],
        GPU,
    )
    yield Passage(
        MEASUREMENTS,
        "| gloo: {}; NCCL: {} |",
        [listed(int8_gloo), listed(int8 + int8_8)],
        GPU,
    )
    yield Passage(
        "docs/codecs.md",
        "over NCCL steps were {} and {} times",
        listed(int8 + int8_8).split(", "),
        GPU,
    )
    for label, gloo, nccl in (
        ("turns under MPS", turns_gloo, turns + turns8),
        ("MPS alone", side_gloo, side + side8),
    ):
        figures = listed(gloo + nccl).split(", ")
        yield Passage("docs/gpu.md", f"| {label} | {{}} | {{}} | {{}} | {{}} |", figures, GPU)
    yield Passage("docs/gpu.md", "| turns alone, without MPS | {} |", [listed(turns_alone)], GPU)
    # The bound of two equal jobs, from C, M and the steps per second of one of them.
    for label, text, each in (
        ("gloo, MPS; 8 queues", "0.90 of the bound, {} over gloo", turns_gloo),
        ("NCCL, MPS, 8 queues", "over gloo, {} over NCCL |", turns8),
    ):
        compute_s, wire_s = (ms / 1000 for ms in measured.cell("On a GPU", "C and M", label))
        step_s = 1 / measured.cell("On a GPU", "one job: plain DDP", label)[0]
        bound = 2 * step_s / max(2 * compute_s, step_s, 2 * wire_s)
        yield Passage(MEASUREMENTS, text, [f"{bound:.2f}"], GPU)
        shares = listed(value / bound for value in each)
        end = " of the bound), **missed**;" if len(each) > 1 else "), **missed** |"
        values = listed(each)
        yield Passage(MEASUREMENTS, f": {{}} ({{}}{end}", [values, shares], GPU)


def _costs(measured: Measured) -> Iterator[Passage]:
    heading = "K-FAC"
    shares = []
    for model in ("narrow ResNet-18", "ViT"):
        ours, sgd = measured.cell(heading, model, "bytes over it: this, SGD")
        shares.append(f"{ours / sgd:.2f}")
    yield Passage(CHOOSING, "| {} (ResNet), {} (ViT), every 10 / 100 |", shares, KFAC)
    sent = [measured.cell("Codecs", row, "bytes of the four")[3] for row in ("ViT", "convnet")]
    yield Passage(CHOOSING, "| {} (rank 2) |", [listed(sent, 3)], CODECS)
    heading, mebibytes = "Codecs on one core a rank", 21
    fused, plain = (
        sum(measured.cell(heading, "`Int8()`", column)[0] for column in columns) / mebibytes
        for columns in (
            ("encode, fused", "decode both messages, fused"),
            ("encode, plain", "decode both messages, plain"),
        )
    )
    costs = [f"{fused:.2f}", f"{plain:.1f}"]
    yield Passage(
        "docs/codecs.md",
        "costs {} ms of a core per MiB of gradient, or {} ms without",
        costs,
        NO_COMMAND,
    )
    yield Passage(CHOOSING, "{} ms of processor for each MiB, {} without", costs, NO_COMMAND)
