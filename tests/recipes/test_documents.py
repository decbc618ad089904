"""Every command in the README and in docs/ runs: here in a short form, or in the test that is named for it.

A command is an indented line that begins with one of `PROGRAMS`. One without an entry in `COMMANDS` fails here, and so
does an entry whose command is gone.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from crossover_ddp import cli
from tests.recipes.test_train import train_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("make", "python", "torchrun", "crossover-ddp", "accelerate", "tests/gpu/run_all.sh", "pip")


class Short(NamedTuple):
    """Run the command itself, with further arguments that make it short; the last of two wins."""

    more: str = ""
    codes: tuple[int, ...] = (0,)


class Elsewhere(NamedTuple):
    """The same program with the same options, shorter, is run by this test."""

    test: str


class Needs(NamedTuple):
    """Cannot run here."""

    what: str


TINY = "--steps 2 --image-size 32 --batch-size 4 --model-option 'channels=(8,8,16,16)'"
STATUS, RUN, TIMELINE = (
    "tests/unit/cli/test_cli_status.py",
    "tests/unit/cli/test_cli_run.py",
    "tests/unit/cli/test_cli_timeline.py",
)
SIBLINGS = "tests/recipes/test_siblings_command.py::test_two_torchrun_jobs_take_turns_in_one_group"
RECORDED = "tests/multiprocess/test_timeline_run.py::test_the_command_merges_the_run"
STUDY = "tests/recipes/test_second_order.py"
BENCH = "tests/benchmarks/test_hooks_bench.py"

# By the beginning of the command; the longest one counts.
COMMANDS: dict[str, Short | Elsewhere | Needs] = {
    "python recipes/studies/codecs.py": Elsewhere(
        "tests/recipes/test_codecs_costs.py::test_costs_and_achieved"
    ),
    "torchrun --standalone --nproc-per-node 2 recipes/studies/codecs.py": Elsewhere(
        "tests/recipes/test_codecs_costs.py::test_a_training_is_repeated_to_the_last_bit"
    ),
    "python recipes/studies/codecs_lab.py": Elsewhere(
        "tests/recipes/test_codecs_study.py::test_the_studies_run"
    ),
    "python recipes/studies/muon.py": Elsewhere("tests/recipes/test_muon_study.py::test_the_study_runs"),
    "python recipes/studies/muon_comparison.py": Needs("checkouts of KellerJordan's Muon and of dion"),
    "python -m pytest tests/multiprocess/test_owners.py": Elsewhere(
        "tests/multiprocess/test_owners.py::test_two_ranks_get_the_bits_of_the_replicated_optimizers"
    ),
    "make demo": Elsewhere("tests/recipes/test_demo.py::test_demo_on_an_emulated_network"),
    "make test": Needs("to be what runs this test"),
    "crossover-ddp plan": Elsewhere("tests/unit/cli/test_cli_plan.py::test_text_json_csv_picture_and_plan"),
    "torchrun --standalone --nproc-per-node 2 recipes/minimal_pipeline.py": Elsewhere(
        "tests/recipes/test_minimal.py::test_a_pipeline_learns"
    ),
    "crossover-ddp advise -- torchrun": Elsewhere(
        "tests/recipes/test_advice.py::test_a_job_under_torchrun_is_measured_and_ended"
    ),
    "crossover-ddp advise --seconds": Elsewhere(
        "tests/recipes/test_advice.py::test_a_job_under_torchrun_is_measured_and_ended"
    ),
    "crossover-ddp advise runs/x": Elsewhere(
        "tests/unit/cli/test_cli_advise.py::test_a_recorded_directory_is_advised_on"
    ),
    "crossover-ddp advise --json": Elsewhere(
        "tests/unit/cli/test_cli_advise.py::test_a_recorded_directory_is_advised_on"
    ),
    "crossover-ddp doctor": Short(codes=(0, 1)),
    "crossover-ddp run --": Elsewhere(SIBLINGS),
    "crossover-ddp run --commands": Elsewhere(f"{RUN}::test_commands_come_from_files"),
    "crossover-ddp run --try-first": Elsewhere(f"{RUN}::test_the_first_job_shows_how_many_fit"),
    "crossover-ddp status": Short(codes=(0, 1)),
    "crossover-ddp status --watch": Elsewhere(f"{STATUS}::test_watching_shows_one_picture_after_another"),
    "crossover-ddp timeline": Elsewhere(f"{TIMELINE}::test_table_trace_and_picture"),
    "crossover-ddp timeline runs --json": Elsewhere(f"{TIMELINE}::test_json_says_the_same_and_more"),
    "CROSSOVER_TIMELINE=": Elsewhere(RECORDED),
    "tests/gpu/run_all.sh": Needs("a GPU"),
    "python -m pytest tests/gpu": Needs("a GPU"),
    "PYTHONPATH=. python recipes/studies/siblings_gpu.py": Needs("a GPU"),
    "python recipes/studies/optimizer_study.py": Elsewhere(
        f"{STUDY}::test_every_optimizer_gets_the_same_number_of_configurations"
    ),
    "torchrun --nproc-per-node 2 recipes/studies/optimizer_study.py": Elsewhere(
        f"{STUDY}::test_the_study_of_the_classifier_counts_in_quarters_of_epochs"
    ),
    "torchrun --nproc-per-node 2 recipes/studies/second_order.py": Elsewhere(
        f"{STUDY}::test_second_order_draws_all_curves_at_full_length"
    ),
    "python recipes/lab run --nodes 2 --rate 60mbit": Elsewhere(
        f"{STUDY}::test_the_best_of_a_study_can_be_run_again"
    ),
    "python recipes/lab run": Elsewhere(
        "tests/recipes/test_lab_analysis.py::test_command_line_from_job_to_result"
    ),
    "python recipes/lab link": Elsewhere(
        "tests/recipes/test_lab.py::test_goodput_is_the_rate_and_small_messages_wait_little"
    ),
    "python recipes/lab clean": Elsewhere(
        "tests/recipes/test_lab.py::test_what_a_killed_lab_leaves_is_cleaned"
    ),
    "CROSSOVER_BENCH=full python -m pytest tests/benchmarks/test_grants_bench.py": Elsewhere(
        "tests/benchmarks/test_grants_bench.py::test_a_grant_reaches_the_other_ranks_in_time"
    ),
    "CROSSOVER_BENCH=full python -m pytest tests/benchmarks/test_collectives_bench.py": Elsewhere(
        "tests/benchmarks/test_collectives_bench.py::test_the_pair_takes_no_longer_than_an_all_reduce"
    ),
    "CROSSOVER_BENCH=full python -m pytest tests/benchmarks/test_hooks_bench.py -k split": Elsewhere(
        f"{BENCH}::test_split_hook_against_plain_ddp"
    ),
    "CROSSOVER_BENCH=full python -m pytest tests/benchmarks/test_hooks_bench.py -k lone": Elsewhere(
        f"{BENCH}::test_lone_job_with_crossover_hook_against_split_hook"
    ),
    "python recipes/studies/advice.py": Needs(
        "eight minutes with links of its own; tests/recipes/test_advice.py is its short form"
    ),
    "python recipes/studies/siblings.py": Elsewhere(
        f"{BENCH}::test_two_siblings_against_one_after_the_other"
    ),
    "python recipes/studies/decoupled.py": Elsewhere(
        "tests/benchmarks/test_decoupled_bench.py::test_decoupled_against_the_others"
    ),
    "python recipes/studies/kfac_comparison.py": Needs("a checkout of kfac-pytorch"),
    "python recipes/studies/pipeline_plans.py": Needs(
        "an hour; tests/unit/pipeline/test_pipeline_planning.py has the short forms"
    ),
    "python recipes/studies/pipeline_lab.py": Needs("an idle machine with an emulated network for minutes"),
    "python recipes/studies/averaging.py": Needs("an idle machine with an emulated network for minutes"),
    "python recipes/studies/averaging_loss.py": Needs("an hour"),
    "python recipes/studies/averaging_target.py": Needs(
        "an idle machine with an emulated network for minutes"
    ),
    "python -m tests.faults.campaign": Elsewhere(
        "tests/faults/test_campaign.py::test_a_steady_job_survives_guests_that_come_go_die_and_stop"
    ),
    "python -m tests.faults.averaging_campaign": Elsewhere(
        "tests/faults/test_averaging_campaign.py::test_random_faults_leave_no_hang_and_no_wrong_bit"
    ),
    "python -m tests.faults.mutex_campaign": Elsewhere(
        "tests/faults/test_mutex_campaign.py::test_random_faults_break_no_promise"
    ),
    "torchrun --nproc-per-node 2 recipes/train.py --model timm:resnet18 --hook crossover": Short(TINY),
    "torchrun --nproc-per-node 2 recipes/train.py --data-dir": Elsewhere(
        "tests/recipes/test_train.py::test_image_folder_trains_and_does_not_depend_on_workers"
    ),
    "torchrun --nproc-per-node 2 recipes/train.py --preset gpt": Short("--steps 2 --model-option depth=1"),
    "torchrun --nproc-per-node 2 recipes/train.py --hook kfac": Short("--model timm:resnet10t " + TINY),
    "python recipes/studies/scaling_model.py": Elsewhere(
        "tests/recipes/test_scaling_model.py::test_the_script_prints_what_the_docs_say"
    ),
}


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a document, continued lines joined, comments left out."""
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        joined = re.sub(r"\s*\\\n\s*", " ", block)
        for line in joined.splitlines():
            command = re.sub(r"\s{2,}#.*$", "", line.strip())
            words = command.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words and words[0] in PROGRAMS and not re.search(r"\s{3,}", command):
                yield command


def documented() -> dict[str, list[str]]:
    """Return the commands, and the documents that show them."""
    found: dict[str, list[str]] = {}
    for document in DOCUMENTS:
        for command in commands(document.read_text()):
            found.setdefault(command, []).append(document.name)
    return found


def entry(command: str) -> str | None:
    """Return the key of a command in `COMMANDS`."""
    return max((key for key in COMMANDS if command.startswith(key)), key=len, default=None)


FOUND = documented()
SHORT = [command for command in FOUND if isinstance(COMMANDS.get(entry(command) or ""), Short)]


def test_commands_are_found() -> None:
    text = "text\n\n    make it\n    python a.py \\\n        --b 1   # why\n    X=1 torchrun c.py\n    | a | table |\n"
    assert list(commands(text)) == ["make it", "python a.py --b 1", "X=1 torchrun c.py"]
    assert len(FOUND) > 30


@pytest.mark.parametrize("command", FOUND)
def test_every_command_is_run_somewhere(command: str) -> None:
    how = COMMANDS.get(entry(command) or "")
    assert how is not None, f"{FOUND[command]} show it: say in COMMANDS how it is run"
    if isinstance(how, Elsewhere):
        path, _, name = how.test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE), how.test


def test_no_entry_outlives_its_command() -> None:
    assert set(COMMANDS) == {entry(command) for command in FOUND}


@pytest.mark.parametrize("command", SHORT)
def test_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = COMMANDS[entry(command) or ""]
    assert isinstance(how, Short)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(f"{command} {how.more}")
    if words[0] == "crossover-ddp":
        assert cli.main(words[1:]) in how.codes
        return
    # What torchrun itself would do: tests/recipes/test_train.py::test_script_runs_as_torchrun_would_start_it.
    assert words[:4] == ["torchrun", "--nproc-per-node", "2", "recipes/train.py"]
    for log in train_ranks(words[4:], tmp_path / "log"):
        assert log[-1]["event"] == "end"
