"""A rank that fails in any way fails its test, with its own traceback. So does a leak."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import Job, RankError, in_ranks, leaks, run_jobs, run_ranks
from tests.harness.children import Child, end
from tests.harness.waiting import eventually, gone


class _Unpicklable(Exception):
    def __init__(self, needed: str, *, also: str) -> None:
        super().__init__(needed)
        self.lock = threading.Lock()


def _raise_unpicklable() -> None:
    raise _Unpicklable("words of the unpicklable", also="needed")


# For each kind of failure: the call of rank 1, the error's description, and a line of its output.
FAILURES: dict[str, tuple[Callable[[], object], str, str]] = {
    "dies": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", ""),
    "exits": (lambda: os._exit(7), "exited with status 7 and without a result", ""),
    "crashes": (
        lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "was killed by SIGSEGV",
        "in _fail_on_rank_one",
    ),
    "raises": (_raise_unpicklable, "failed", "_Unpicklable: words of the unpicklable"),
    "returns": (threading.Lock, "failed", "cannot pickle '_thread.lock'"),
    "leaks": (
        lambda: os.environ.update(LEAKED="yes"),
        "failed",
        "variable LEAKED: None became 'yes'",
    ),
}


def _fail_on_rank_one(rank: int, world_size: int, kind: str) -> object:
    return FAILURES[kind][0]() if rank == 1 else "alive"


def _sum_of_ranks(rank: int, world_size: int, offset: float) -> torch.Tensor:
    tensor = torch.tensor([rank + offset])
    dist.all_reduce(tensor)
    return tensor


def _assert_on_rank_one(rank: int, world_size: int) -> None:
    print(f"words of rank {rank}")
    assert rank != 1, "the assertion of rank one"
    dist.barrier()


def _hang_in_a_collective(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def _leak_a_child_on_rank_one(rank: int, world_size: int, where: str) -> None:
    if rank == 1:
        leaks.GRACE_S = 0.1  # this process is ended with the test
        Path(where).write_text(str(subprocess.Popen(["sleep", "600"]).pid))


def _found(rank: int, world_size: int) -> tuple[int, list[str | None], list[Any]]:
    variables = [os.environ.get(name) for name in ("OF_THE_TEST", "OF_THE_RANK")]
    return (
        os.getpid(),
        variables,
        [torch.rand(()).item(), torch.get_num_threads(), dist.is_initialized()],
    )


def test_jobs_have_groups_of_their_own_and_return_results_by_rank() -> None:
    jobs = [Job(_sum_of_ranks, 3, (0.5,), name="a"), Job(_sum_of_ranks, 2, (10.0,), name="b")]
    assert run_jobs(jobs) == [[torch.tensor([4.5])] * 3, [torch.tensor([21.0])] * 2]


@in_ranks(2)
def _different(rank: int) -> int:
    return rank


def test_ranks_that_return_different_results_are_an_error() -> None:
    with pytest.raises(RankError, match=r"different results: \[0, 1\]"):
        _different()


def test_assertion_arrives_with_traceback_and_output() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_ranks(_assert_on_rank_one, 2)
    message = str(caught.value)
    for words in ("the assertion of rank one", "in _assert_on_rank_one", "words of rank 1"):
        assert words in message
    assert "world_size = 2" in message, "the local variables, as pytest would show them"
    assert message.index("rank 1 of 2") < message.index("rank 0 of 2"), "the cause comes first"


@pytest.mark.parametrize("kind", FAILURES)
def test_the_failure_of_a_rank_is_described_with_its_output(kind: str) -> None:
    _, description, output = FAILURES[kind]
    with pytest.raises(RankError, match=f"rank 1 of 2 {description}") as caught:
        run_ranks(_fail_on_rank_one, 2, args=(kind,))
    assert output in str(caught.value)


def test_hang_in_a_collective_shows_all_stacks() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_hang_in_a_collective, 2, timeout_s=1.0)
    for words in ("rank 0 of 2 hung", "in barrier", "rank 1 of 2 hung"):
        assert words in str(caught.value)


def test_a_leaked_child_is_an_error_and_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    message = r"rank 1 of 2 failed(.|\n)*left behind: child process \d+ \(sleep 600\)"
    with pytest.raises(RankError, match=message):
        run_ranks(_leak_a_child_on_rank_one, 2, args=(str(pid_file),))
    assert eventually(lambda: gone(int(pid_file.read_text()))), "it is killed, not waited for"


def test_a_death_that_is_expected_is_no_failure_and_its_absence_is_one() -> None:
    # Without a process group, since rank 0 could still be connecting to rank 1 when that dies.
    deaths = {1: signal.SIGKILL}
    results = run_ranks(_fail_on_rank_one, 2, args=("dies",), deaths=deaths, backend=None)
    assert results == ["alive", None]
    with pytest.raises(RankError, match="rank 1 of 2 was expected to die by SIGKILL and returned"):
        run_ranks(_sum_of_ranks, 2, args=(0.0,), deaths=deaths)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a function at the top level of a module"):
        run_ranks(lambda rank, world_size: None, 2)


def test_every_run_starts_from_the_same_state_and_leaves_no_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "test")
    own = [{"OF_THE_RANK": "zero"}, {"OF_THE_RANK": "one"}]
    first = run_ranks(_found, 2, environment=own, backend=None)
    monkeypatch.delenv("OF_THE_TEST")
    second = run_ranks(_found, 2, backend=None)
    assert [variables for _, variables, _ in first] == [["test", "zero"], ["test", "one"]]
    assert [variables for _, variables, _ in second] == [[None, None], [None, None]]
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second], (
        "clean processes are used again"
    )
    assert [state for *_, state in first + second] == [[first[0][2][0], 1, False]] * 4


def thread() -> Callable[[], object]:
    end_of_thread = threading.Event()
    threading.Thread(target=end_of_thread.wait, name="leaked-thread", daemon=True).start()
    return end_of_thread.set


def child() -> Callable[[], object]:
    process = Child(["sleep", "30"], os.environ)
    return lambda: end([process], grace_s=0.0)


def variable() -> Callable[[], object]:
    os.environ["LEAKED"] = "yes"
    return lambda: None


def segment() -> Callable[[], object]:
    directory = Path(f"/dev/shm/crossover_ddp-leaked-{os.getpid()}")
    directory.mkdir()
    (directory / f"{os.environ['CROSSOVER_GROUP']}-0.turns").touch()
    return lambda: shutil.rmtree(directory)


def group() -> Callable[[], object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return lambda: None


@pytest.mark.parametrize(
    ("leak", "description"),
    [
        (thread, "thread 'leaked-thread'"),
        (child, r"child process \d+ \(sleep 30\)"),
        (variable, "environment variable LEAKED: None became 'yes'"),
        (segment, "file /dev/shm/crossover_ddp-leaked-"),
        (group, "default process group"),
    ],
)
def test_each_leak_fails_its_test_and_no_other(
    leak: Callable[[], Callable[[], object]],
    description: str,
    monkeypatch: Any,
    request: pytest.FixtureRequest,
) -> None:
    assert "_nothing_left_behind" in request.fixturenames, "the fixture checks every test"
    monkeypatch.setattr(leaks, "GRACE_S", 0.1)  # nothing that leaks here ends by itself
    with (
        pytest.raises(pytest.fail.Exception, match=f"the test left behind: {description}"),
        leaks.nothing_left_behind(),
    ):
        clean_up = leak()
    assert "LEAKED" not in os.environ
    assert not dist.is_initialized()
    clean_up()
