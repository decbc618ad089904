"""Recipes for several jobs: an Optuna study, two steps of a Slurm allocation, a pod.

The jobs of each are one group. Stand-ins replace torchrun and Slurm. The stand-in of Slurm ignores
all options but `--output`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from crossover_ddp import cli
from tests.faults.lanes import UNSHARE, why_no_container
from tests.harness.children import Child, end
from tests.harness.waiting import eventually
from tests.recipes import RECIPES

ROOT = RECIPES.parent
SLURM, POD = (RECIPES / f"siblings_{name}" for name in ("slurm.sh", "pod.yaml"))
WHY_NOT = why_no_container("users")
STAND_INS = {
    # Writes its arguments to a file. The loss is the learning rate.
    "torchrun": f"""#!{sys.executable}
import os, pathlib, sys, time
lr = sys.argv[sys.argv.index("--lr") + 1]
note = pathlib.Path(os.environ["NOTES"], f"{{lr}} on {{os.environ.get('NODE', '0')}}")
own = [os.environ["CROSSOVER_GROUP"], os.environ.get("PET_MASTER_PORT", "")]
note.write_text(" ".join([*own, *sys.argv[1:]]))
for epoch in range(3):
    print(f"epoch {{epoch}}: loss {{lr}}", flush=True)
    time.sleep(999 if lr in os.environ.get("WAITING", "").split() else 0)
sys.exit(3 if lr == os.environ.get("FAILING") else 0)
""",
    "scontrol": """#!/bin/bash
[[ $* == "show hostnames machine[0-999]" ]] && printf 'machine%s\n' {0..999}
""",
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --output=* ]] && log=${1#*=}; shift; done
for ((n = 0; n < SLURM_NNODES; n++)); do NODE=$n "$@" & done >"$log" 2>&1
for job in $(jobs -p); do wait "$job" || status=$?; done
exit "${status:-0}"
""",
}


class Place:
    """A directory to run in, with the stand-ins first on PATH."""

    def __init__(self, directory: Path, *stand_ins: str) -> None:
        self.directory = directory
        for name in ("bin", "notes"):
            (directory / name).mkdir(parents=True)
        for name in stand_ins:
            (directory / "bin" / name).write_text(STAND_INS[name])
            (directory / "bin" / name).chmod(0o755)
        path = [str(directory / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
        own = {
            "PATH": os.pathsep.join(path),
            "NOTES": str(directory / "notes"),
            "OMP_NUM_THREADS": "1",
        }
        self.environment = {**kept, **own, "PYTHONPATH": str(ROOT)}

    def run(self, *words: str, code: int = 0, **more: str) -> None:
        """Run a command, and assert its exit code."""
        done = subprocess.run(
            words, env={**self.environment, **more}, cwd=self.directory, timeout=240, check=False
        )
        assert done.returncode == code

    def notes(self) -> list[str]:
        """Return the group, the port and the arguments of each torchrun."""
        return [each.read_text() for each in sorted((self.directory / "notes").iterdir())]


def study(place: Place, *words: str, **more: str) -> list[tuple[str, str, float | None]]:
    """Run the recipe in this process, since importing Optuna takes a while.

    Return the state, the learning rate and the value of each trial.
    """
    optuna = pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna")
    import siblings_optuna

    given = ["siblings_optuna.py", "--seed", "1", *words]
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ, {**place.environment, **more}, clear=True),
        mock.patch.object(sys, "argv", given),
    ):
        patch.chdir(place.directory)  # the default storage is in the working directory
        siblings_optuna.main()
    found = optuna.load_study(
        study_name="siblings", storage=f"sqlite:///{place.directory}/siblings.db"
    )
    return [(trial.state.name, str(trial.params["lr"]), trial.value) for trial in found.trials]


def test_a_study_prunes_trials_and_can_be_continued(tmp_path: Path) -> None:
    words, place = ("--trials", "9", "--at-once", "1"), Place(tmp_path / "first", "torchrun")
    trials = study(place, *words)
    complete = {lr: value for state, lr, value in trials if state == "COMPLETE"}
    assert [*complete.values()] == [*map(float, complete)]
    pruned = [lr for state, lr, _ in trials if state == "PRUNED"]
    assert pruned
    assert {note.split()[0] for note in place.notes()} == {os.environ["CROSSOVER_GROUP"]}
    assert len(study(place, "--trials", "1")) == 10, "the same command continues the study"
    # The same trials, but jobs that are not ended when they are pruned run forever.
    again = study(Place(tmp_path / "again", "torchrun"), *words, WAITING=" ".join(pruned))
    assert [state for state, *_ in again] == [state for state, *_ in trials]


def test_a_failed_trial_does_not_end_the_study_and_siblings_have_a_group(tmp_path: Path) -> None:
    place = Place(tmp_path, "torchrun")
    del place.environment["CROSSOVER_GROUP"]
    ((_, lr, _),) = study(place, "--trials", "1", "--at-once", "1")
    (tmp_path / "siblings.db").unlink()
    trials = study(place, "--trials", "2", "--at-once", "1", FAILING=lr)
    assert [state for state, *_ in trials] == ["FAIL", "COMPLETE"]
    assert len(study(place, "--trials", "2", "--at-once", "2")) == 4
    groups = [note.split()[0] for note in place.notes()]
    assert max(map(groups.count, groups)) >= 2
    assert all(group.startswith("study-") for group in groups)


def test_steps_of_an_allocation_are_one_group_and_a_failed_one_ends_no_other(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path, *STAND_INS)
    given = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "machine[0-999]"}
    given |= {"SLURM_GPUS_ON_NODE": "4", "FAILING": "0.1"}
    place.run("bash", str(SLURM), "train.py", "--name", "two words", code=3, **given)
    one, its_other_node, other, _ = place.notes()
    assert one == its_other_node
    words = "slurm-77  --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id 77-{0} "
    words += "--rdzv-endpoint machine0:{1} train.py --name two words --lr {2}"
    assert [other, one] == [words.format(1, 29501, 0.1), words.format(2, 29502, 0.05)]
    for number in (1, 2):
        assert "epoch 2: loss" in (tmp_path / f"siblings-77-{number}.log").read_text()


def test_directives_stand_before_the_first_command() -> None:
    lines = SLURM.read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(place < first for place, line in enumerate(lines) if line.startswith("#SBATCH"))


@pytest.fixture
def container() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; timm brings it")
    pod = yaml.safe_load(POD.read_text())
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    assert pod["spec"]["terminationGracePeriodSeconds"] > 30, "run kills after 30 s"
    (found,) = pod["spec"]["containers"]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    paths = {each["mountPath"]: volumes[each["name"]] for each in found["volumeMounts"]}
    assert paths["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "/logs" in paths
    return dict(found)


def entry(container: dict[str, Any], logs: Path) -> list[str]:
    words = [*container["command"], *container["args"]]
    assert cli.parse(words[1:]).logs == Path("/logs")
    words[words.index("/logs")] = str(logs)
    return words


def test_a_pods_jobs_are_one_group(container: dict[str, Any], tmp_path: Path) -> None:
    place = Place(tmp_path, "torchrun")
    place.run(*entry(container, tmp_path / "logs"))
    (group, port, *words), (its_group, its_port, *_) = (note.split(" ") for note in place.notes())
    assert group == its_group, "siblings"
    assert port != its_port
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert words[words.index("--nproc-per-node") + 1] == str(gpus)
    assert (ROOT / words[2]).is_file()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "namespaces can be made")
def test_a_pod_that_is_deleted_ends_its_jobs(container: dict[str, Any], tmp_path: Path) -> None:
    place = Place(tmp_path, "torchrun")
    variables = {**place.environment, "WAITING": "0.1 0.05"}
    enter = ["unshare", "--kill-child", *UNSHARE["users"]]
    process = Child([*enter, *entry(container, tmp_path / "logs")], variables, cwd=tmp_path)
    try:
        assert eventually(lambda: len(list((tmp_path / "notes").iterdir())) == 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # It is process 1 in its namespace, for which signals have no default action.
        (first,) = children.read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        end([process], grace_s=0.0)
