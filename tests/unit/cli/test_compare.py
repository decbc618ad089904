"""`crossover-ddp compare`: its arithmetic, its timer, and real jobs of two ranks."""

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp import cli
from crossover_ddp.cli import compare, step_meter
from crossover_ddp.cli.compare import Comparison

# --- arithmetic -----------------------------------------------------------------------------------

NO_DIFFERENCE = "no difference beyond the scatter"
OPPOSITE = {"faster": "slower", "slower": "faster", NO_DIFFERENCE: NO_DIFFERENCE}
PAIRS = st.lists(st.tuples(st.floats(1e-4, 1e3), st.floats(1e-4, 1e3)), min_size=2, max_size=9)


def of(pairs: list[tuple[float, float]]) -> Comparison:
    return Comparison([old_s for old_s, _ in pairs], [new_s for _, new_s in pairs])


@pytest.mark.parametrize(
    ("ratios", "ratio", "verdict"),
    [
        ([1.10, 1.12, 1.15], 1.12, "faster"),
        ([0.90, 0.87, 0.89], 0.89, "slower"),
        ([1.02, 1.30, 1.10], 1.10, NO_DIFFERENCE),  # further from each other than from 1
        ([0.99, 1.02, 1.01], 1.01, NO_DIFFERENCE),
        ([1.21, 1.44], 1.32, "faster"),  # 1.1 ** 2 and 1.1 ** 4 / 1.1: just as far
        ([1.0, 1.0, 1.0], 1.0, NO_DIFFERENCE),
    ],
)
def test_a_verdict_needs_ratios_further_from_one_than_from_each_other(
    ratios: list[float], ratio: float, verdict: str
) -> None:
    found = of([(each, 1.0) for each in ratios])
    assert found.ratio == pytest.approx(ratio)
    assert found.verdict == verdict


@given(PAIRS)
def test_swapped_commands_have_the_inverse_ratio_and_the_opposite_verdict(
    pairs: list[tuple[float, float]],
) -> None:
    found, swapped = of(pairs), of([(new_s, old_s) for old_s, new_s in pairs])
    assert math.log(swapped.ratio) == pytest.approx(-math.log(found.ratio), abs=1e-9)
    assert min(found.ratios) * (1 - 1e-9) <= found.ratio <= max(found.ratios) * (1 + 1e-9)
    logs = [abs(math.log(each)) for each in found.ratios]
    at_bound = min(logs) == pytest.approx(max(logs) - min(logs), rel=1e-9, abs=1e-12)
    assert at_bound or swapped.verdict == OPPOSITE[found.verdict]


@given(PAIRS)
def test_neither_equal_times_nor_ratios_on_both_sides_of_one_are_a_difference(
    pairs: list[tuple[float, float]],
) -> None:
    assert of([(old_s, old_s) for old_s, _ in pairs]).verdict == NO_DIFFERENCE
    both = [*pairs, *[(new_s, old_s) for old_s, new_s in pairs]]
    assert of(both).verdict == NO_DIFFERENCE


@given(PAIRS, st.floats(1e-2, 1e2))
def test_the_verdict_does_not_depend_on_how_fast_the_machine_is(
    pairs: list[tuple[float, float]], factor: float
) -> None:
    """Also if it becomes slower from round to round."""
    slowed = [
        (old_s * factor**round_, new_s * factor**round_)
        for round_, (old_s, new_s) in enumerate(pairs)
    ]
    assert of(slowed).ratios == pytest.approx(of(pairs).ratios)


def test_equal_commands_seldom_differ() -> None:
    """docs/command.md has this figure, for three rounds with normal noise."""
    noise = random.Random(1)
    count = 4000
    found = [
        of([(math.exp(noise.gauss(0, 0.02)), math.exp(noise.gauss(0, 0.02))) for _ in range(3)])
        for _ in range(count)
    ]
    share = sum(each.verdict != NO_DIFFERENCE for each in found) / count
    assert share == pytest.approx(0.04, abs=0.015)


def test_the_report_has_medians_and_scatter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Comparison([0.0382, 0.0379, 0.0388], [0.0331, 0.0329, 0.0334])
    monkeypatch.setattr(compare, "_measured", lambda *_: found)
    assert cli.main(["compare", "--", "train 'a b'", "--", "train", "c"]) == 0
    assert capsys.readouterr().out == (
        "     a step   rounds              command\n"
        "old  38.2 ms  37.9 ms to 38.8 ms  train 'a b'\n"
        "new  33.1 ms  32.9 ms to 33.4 ms  train c\n"
        "old/new 1.154 (1.152 to 1.162)\n"
        "→ new is faster\n"
    )


# --- the timer ------------------------------------------------------------------------------------


class Timed:
    """A timer with a clock that tests set, and the lines that it has written."""

    def __init__(self, skip: int, steps: int) -> None:
        self.now_s = 0.0
        self.lines: list[dict[str, Any]] = []
        with mock.patch.object(step_meter.atexit, "register"):
            self.timer = step_meter._Timer(skip, steps)

    def advance(self, *calls: tuple[str, Any]) -> None:
        """Let a second pass before each call."""
        with (
            mock.patch.object(step_meter, "_idle_s", lambda: self.now_s),
            mock.patch.object(self.timer, "_write", self.lines.append),
        ):
            for name, each in calls:
                self.now_s += 1.0
                getattr(self.timer, name)(*([each] if each is not None else []))


class Model:
    def __init__(self, synchronizes: bool = True) -> None:
        self.require_backward_grad_sync = synchronizes


def test_a_step_is_a_forward_whose_backward_exchanges_gradients() -> None:
    """Neither micro-batches within ``no_sync`` nor optimizers count then."""
    timed, model, optimizer = Timed(2, 3), Model(), Model()
    for _ in range(9):
        for synchronizes in (False, False, True):
            model.require_backward_grad_sync = synchronizes
            timed.advance(("begin_forward", model))
        timed.advance(("end_step", optimizer))
    assert timed.lines == [{"begun": 2}, {"step_s": 4.0}]


def test_without_ddp_a_step_is_one_of_an_optimizer() -> None:
    timed, first, second = Timed(2, 3), Model(), Model()
    for _ in range(9):
        timed.advance(("end_step", first), ("end_step", second))
    assert timed.lines == [{"begun": 2}, {"begun": 2}, {"step_s": 2.0}]


@pytest.mark.parametrize("name", ["begin_forward", "end_step"])
def test_a_script_that_ends_early_leaves_the_number_of_its_steps(name: str) -> None:
    timed, each = Timed(2, 9), Model()
    timed.advance(*[(name, each)] * 4, ("_write_count", None))
    assert timed.lines == [{"begun": 2}, {"steps": 4}]


# --- real jobs ------------------------------------------------------------------------------------

# Two ranks by a fork, since a launcher would import torch in two more processes.
TRAIN = """
import os, sys, tempfile, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

name, ranks, steps, sleep_s, hook = sys.argv[1], *map(int, sys.argv[2:4]), float(sys.argv[4]), sys.argv[5]
store = tempfile.NamedTemporaryFile().name
rank = 0 if ranks == 2 and os.fork() else ranks - 1
torch.set_num_threads(1)
net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = net
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = DistributedDataParallel(net)
if hook == "decoupled":
    from crossover_ddp import DecoupledState, decoupled_hook
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
for step in range(steps):
    model(torch.ones(2, 8)).sum().backward()
    time.sleep(sleep_s)
    optimizer.step()
    optimizer.zero_grad()
    if step == 3 and rank == 0:
        deferred = state.stats()["steps_deferred"] if hook == "decoupled" else 0
        with open("order", "a") as file:
            file.write(f"{name} {deferred} {os.environ.get('CROSSOVER_DISABLE')}\\n")
"""
ENDLESS = 10**6


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.delenv("CROSSOVER_DISABLE", raising=False)
    (tmp_path / "train.py").write_text(TRAIN)

    def command(
        name: str, ranks: int = 2, steps: int = ENDLESS, sleep_s: float = 0.0, hook: str = "none"
    ) -> list[str]:
        words = [name, str(ranks), str(steps), str(sleep_s), hook]
        return ["--", sys.executable, "train.py", *words]

    return command


SHORT = ["compare", "--json", "--rounds", "2", "--skip", "5", "--steps", "4"]


@pytest.mark.timeout(240)
def test_commands_run_alternately_with_their_hooks_and_are_ended(
    train: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The old command has one process without DDP, which is timed by its optimizer."""
    old = train("old", ranks=1, sleep_s=0.3)
    code = cli.main([*SHORT, *old, *train("new", hook="decoupled")])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert [len(found[name]) for name in ("old_s", "new_s", "ratios")] == [2, 2, 2]
    assert min(found["old_s"]) >= 0.3  # it sleeps
    comparison = Comparison(found["old_s"], found["new_s"])
    assert found["ratios"] == comparison.ratios
    assert (found["ratio"], found["verdict"]) == (comparison.ratio, comparison.verdict)
    # Steps of the new command stay deferred, which step hooks would prevent.
    order = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    assert [name for name, *_ in order] == ["old", "new", "old", "new"]
    assert [int(deferred) > 0 for _, deferred, _ in order] == [False, True, False, True]
    assert {disabled for *_, disabled in order} == {"None"}
    lines = [line.partition(":")[0] for line in err.splitlines()]
    assert lines[1:] == ["1 of 4, old", "2 of 4, new", "3 of 4, old", "4 of 4, new"]
    assert err.count("left\n") == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_command_that_ends_early_is_an_error(
    ranks: int, train: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SHORT, *train("old", ranks=ranks, steps=6), *train("new")]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "expected more than 5 + 4 steps of the old command, got 6; let it train longer" in err
    assert "of 4," not in err, "the other command is not started"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("true", r"got 0; steps are seen of DistributedDataParallel and of torch\.optim's"),
        (
            "sh -c 'echo no such data set; exit 3'",
            r"the old command failed\nthe command ended with 3 after \d+ s; its last lines:\n"
            r"    no such data set\n",
        ),
        ("/nowhere", r"the old command failed\nthe command ended with 127"),
    ],
)
def test_a_command_that_fails_is_an_error_with_the_end_of_its_log(
    command: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SHORT, "--", command, "--", "true"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected two commands, -- 'OLD' -- 'NEW', got 0"),
        (["--", "true"], "got 1"),
        (["--", "true", "--", ""], "got 1"),
        (["--", "true", "--", "true", "--", "true"], "got 3"),
        (["--", "true", "--", "a | b"], "without shell syntax"),
        (["--", "torchrun --nnodes 2 t.py", "--", "true"], "expected a job on one node"),
    ],
)
def test_wrong_usage_starts_nothing(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *words]) == 2
    assert message in capfd.readouterr().err
