"""Other people's training loops with the lines that docs/loops.md shows, in two ranks on gloo.

The worker is started once for each loop. It runs the loop without and with the hook, and then ends: it must not hang,
and nothing may be left in shared memory.
"""

import functools
import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import spawn_script
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.leaks import Snapshot

WORKER = Path(__file__).with_name("loops_worker.py")
RESUMED = Path(__file__).with_name("loops_resumed.py")
TIMEOUT_S = 150.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",  # as `accelerate launch --cpu` sets it
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

Runs = dict[str, dict[str, Any]]


def run_loop(loop: str, directory: Path) -> tuple[Runs, Runs]:
    """Return what each rank tells of its runs; the ranks' weights must be the same."""
    before = Snapshot.take()
    with spawn_script(
        WORKER, 2, args=[loop, str(directory)], environment=ENVIRONMENT, cwd=directory, forked=True
    ) as ranks:
        ranks.wait(TIMEOUT_S)
    assert before.leaks() == []
    first, second = (torch.load(directory / f"{rank}.pt") for rank in range(2))
    for name in first:
        if not first[name]["error"]:
            assert_equal(first[name], second[name])
    return first, second


def assert_equal(run: dict[str, Any], other: dict[str, Any]) -> None:
    """Both runs went well, and their weights are the same, bit for bit."""
    assert run["error"] == other["error"] == ""
    assert len(run["weights"]) == len(other["weights"]) > 0
    assert all(torch.equal(a, b) for a, b in zip(run["weights"], other["weights"], strict=True))


def differ(run: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(run["weights"], other["weights"], strict=True))


def inside_turns(run: dict[str, Any], *, training: bool) -> list[bool]:
    """Tell of each forward in training, or in evaluation, whether it ran inside a turn."""
    return [holding for trains, holding in run["forwards"] if trains == training]


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install '.[loops]'")


NEEDS = {
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "accelerate"],
    "lightning": ["pytorch_lightning"],
}
Loop = Callable[[str], tuple[Runs, Runs]]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """Return what runs a loop, once for all tests."""

    @functools.cache
    def run(name: str) -> tuple[Runs, Runs]:
        needs(*NEEDS[name])
        return run_loop(name, tmp_path_factory.mktemp(name))

    return run


@pytest.mark.parametrize("name", ["accelerate", "trainer"])
def test_a_loop_takes_turns(name: str, loop: Loop) -> None:
    for runs in loop(name):
        hooked = runs["hooked"]
        assert_equal(hooked, runs["plain"])
        assert hooked["turns"] == 4  # of 8 backward passes: two for each optimizer step
        assert sum(inside_turns(hooked, training=True)) == 4
        assert inside_turns(hooked, training=False) == [False, False]


def test_accelerate_ignores_a_hook_among_its_ddp_arguments_and_trains_decoupled(loop: Loop) -> None:
    """What docs/loops.md warns of: without a state it could not even run."""
    for runs in loop("accelerate"):
        assert_equal(runs["ignored"], runs["plain"])
        assert_equal(runs["decoupled"], runs["plain"])
        assert runs["decoupled"]["deferred"] > 0


def test_trainer_cannot_train_decoupled(loop: Loop) -> None:
    for runs in loop("trainer"):
        assert "gradient_as_bucket_view=False and find_unused_parameters=True" in runs["decoupled"]["error"]


def test_lightning_takes_turns_by_one_line_where_it_registers_hooks(loop: Loop) -> None:
    for runs in loop("lightning"):
        line = runs["line"]
        assert_equal(line, runs["plain"])
        assert line["turns"] == 8
        assert sum(inside_turns(line, training=True)) == 7  # all but the first
        # The first two are before training; then nobody pauses, and siblings wait a lease.
        assert inside_turns(line, training=False) == [False] * 2 + [True] * 8


def test_lightning_ignores_the_line_on_a_cpu(loop: Loop) -> None:
    """What docs/loops.md warns of."""
    for runs in loop("lightning"):
        assert_equal(runs["line on a CPU"], runs["plain"])
        assert runs["line on a CPU"]["turns"] == 0


@pytest.mark.parametrize(("kind", "turns", "inside"), [("", 8, 6), ("accumulated ", 4, 4)])
def test_lightnings_callback_takes_turns_and_pauses(kind: str, turns: int, inside: int, loop: Loop) -> None:
    for runs in loop("lightning"):
        callback = runs[f"{kind}callback"]
        assert_equal(callback, runs[f"{kind}plain"])
        assert callback["turns"] == turns
        assert sum(inside_turns(callback, training=True)) == inside
        assert not any(inside_turns(callback, training=False))
        assert callback["left"]


def test_lightning_trains_decoupled(loop: Loop) -> None:
    for runs in loop("lightning"):
        for how, plain in (("", "plain"), (" views", "plain"), (" accumulated", "accumulated plain")):
            assert_equal(runs[f"decoupled{how}"], runs[plain])
            assert runs[f"decoupled{how}"]["deferred"] > 0


def test_lightning_clips_a_decoupled_model_by_its_state(loop: Loop) -> None:
    for runs in loop("lightning"):
        clipping, plain = runs["decoupled clipping"], runs["clipped plain"]
        assert not clipping["error"]
        assert clipping["deferred"] > 0
        assert differ(plain, runs["plain"])
        # The norm is summed in another order.
        for got, expected in zip(clipping["weights"], plain["weights"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def test_lightnings_own_clipping_is_that_of_plain_ddp(loop: Loop) -> None:
    for runs in loop("lightning"):
        assert_equal(runs["decoupled clipped"], runs["clipped plain"])
        assert runs["decoupled clipped"]["deferred"] == 0


IF_CAMPAIGN = pytest.mark.skipif(
    not IN_CAMPAIGN, reason="only with CROSSOVER_CAMPAIGN=1: a minute of two cores, and it needs g++"
)


@pytest.mark.parametrize("by", ["compiled", pytest.param("inductor", marks=IF_CAMPAIGN)])
def test_compiled_models_take_turns(by: str, tmp_path: Path) -> None:
    for runs in run_loop(by, tmp_path):
        for where in ("inside", "outside"):
            assert_equal(runs[f"hooked {where}"], runs[f"plain {where}"])
            assert runs[f"hooked {where}"]["turns"] == 4
            assert runs[f"hooked {where}"]["graphs"] == runs[f"plain {where}"]["graphs"] > 0


def test_timms_task_takes_turns(tmp_path: Path) -> None:
    """Two epochs of two steps, each with its evaluation."""
    for runs in run_loop("timm_task", tmp_path):
        hooked, pausing = runs["hooked"], runs["pausing"]
        for run in (hooked, pausing):
            assert_equal(run, runs["plain"])
            assert run["turns"] == 4
        assert sum(inside_turns(hooked, training=True)) == 3
        assert all(inside_turns(hooked, training=False))
        assert sum(inside_turns(pausing, training=True)) == 2
        assert pausing["forwards"]
        assert not any(inside_turns(pausing, training=False))


def run_phase(loop: str, phase: str, directory: Path) -> list[dict[str, list[float]]]:
    """Return the losses of each run, by rank."""
    arguments = [loop, phase, str(directory)]
    killed = dict.fromkeys(range(2), signal.SIGKILL) if phase == "killed" else {}
    with spawn_script(
        RESUMED, 2, args=arguments, environment=ENVIRONMENT, cwd=directory, forked=True
    ) as ranks:
        ranks.wait(TIMEOUT_S, deaths=killed)
    return [torch.load(directory / f"{phase}-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("loop", "package"),
    [
        ("imagenet", "torch"),
        ("timm", "timm"),
        ("lightning", "pytorch_lightning"),
        ("accelerate", "accelerate"),
        ("distributed_checkpoint", "torch"),
    ],
)
def test_a_job_that_was_killed_in_an_epoch_has_the_losses_of_one_that_was_not(
    loop: str, package: str, tmp_path: Path
) -> None:
    needs(package)
    first, resumed = (run_phase(loop, phase, tmp_path) for phase in ("killed", "resumed"))
    for before, after in zip(first, resumed, strict=True):
        whole = before["whole"]
        assert "killed" not in before
        assert len({*whole}) == len(whole) in (8, 12)
        assert after["resumed"] == whole[4:]
        assert before.get("plain", whole) == whole
