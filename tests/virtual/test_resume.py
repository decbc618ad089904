"""A job that is killed and resumed on other numbers of ranks ends with one hash."""

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.harness.campaign import SEED, only_in_campaign

from .jobs import Job, Running, hash_of_job


@dataclass(frozen=True)
class Piece:
    """The part of a job that runs on one number of ranks."""

    ranks: int
    # The step in which all ranks are killed, or end. None: the end of the job.
    end: int | None = None
    # The micro-batch of rank 0 behind whose backward the kill comes. None: no kill.
    kill: int | None = None


def run_piece(rank: int, world_size: int, job: Job, piece: Piece, every: int, path: str) -> str:
    """Resume from the latest checkpoint, save every few steps, and return the hash at the end."""
    torch.set_num_threads(1)
    running = Running(job)
    if Path(path).exists():
        running.restore(torch.load(path, weights_only=False))
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    seen = 0

    def within(running: Running) -> None:
        nonlocal seen
        is_end = running.ranks.is_step_end
        if running.ranks.step - is_end == piece.end and piece.kill is not None and not rank:
            if seen == piece.kill:
                kill(pids)
            seen += 1

    last = job.steps if piece.end is None else piece.end + (piece.kill is not None)
    while running.ranks.step < last:
        step = running.ranks.step
        running.run(min(last, step - step % every + every), within)
        if not running.ranks.step % every:
            saved = running.checkpoint()
            if not rank:
                torch.save(saved, f"{path}.new")
                os.replace(f"{path}.new", path)
            dist.barrier()
    found = running.hash()
    running.close()
    return found


def kill(pids: list[int]) -> None:
    """Kill all ranks. They are stopped before, so that none reports a peer's death."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            if pid != os.getpid():
                os.kill(pid, sign)
    os.kill(os.getpid(), signal.SIGKILL)


def hash_of_pieces(job: Job, pieces: list[Piece], every: int, path: Path) -> set[str]:
    """Run the pieces one after the other, and return the hashes of the last one's ranks."""
    found: list[str] = []
    for piece in pieces:
        deaths = {} if piece.kill is None else dict.fromkeys(range(piece.ranks), signal.SIGKILL)
        args = (job, piece, every, str(path))
        found = run_ranks(run_piece, piece.ranks, args=args, deaths=deaths)
    return {*found}


HOOKS = {
    "split": Job(),
    "decoupled": Job(hook="decoupled"),
    "owners": Job(hook="owners"),
    "muon": Job("gpt", "muon", hook="muon"),
}


@pytest.mark.parametrize("job", HOOKS.values(), ids=HOOKS)
def test_a_job_in_pieces_has_the_hash_of_the_uninterrupted_job(job: Job, tmp_path: Path) -> None:
    """The step behind each checkpoint is lost, and computed again."""
    pieces = [Piece(4, end=3), Piece(2, end=5), Piece(1, end=5), Piece(4)]
    found = hash_of_pieces(job, pieces, 2, tmp_path / "saved")
    assert found == {*run_ranks(hash_of_job, 4, args=(job,))}


@pytest.mark.parametrize("hook", ["split", "decoupled"])
def test_a_job_that_is_killed_within_steps_has_the_same_hash(hook: str, tmp_path: Path) -> None:
    """Kills come after a micro-batch without an exchange, and after one with it."""
    job = Job(hook=hook)
    pieces = [Piece(4, end=3, kill=0), Piece(2, end=3, kill=3), Piece(1, end=5, kill=6), Piece(4)]
    found = hash_of_pieces(job, pieces, 2, tmp_path / "saved")
    assert found == {*run_ranks(hash_of_job, 1, args=(job,))}


def chain_of(job: Job, sizes: list[int], draw: random.Random) -> list[Piece]:
    """Return ten kills, each followed by another number of ranks, and the last piece."""
    pieces: list[Piece] = []
    end = 0
    for _ in range(10):
        ranks = draw.choice([size for size in sizes if not pieces or size != pieces[-1].ranks])
        end = min(job.steps - 1, end + draw.randrange(5))
        pieces.append(Piece(ranks, end, kill=draw.randrange(job.count // ranks)))
    ranks = draw.choice([size for size in sizes if size != pieces[-1].ranks])
    return [*pieces, Piece(ranks)]


@only_in_campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("job", "sizes"),
    [
        (Job(steps=30), [1, 2, 3, 4, 8]),
        (Job("gpt", hook="decoupled", steps=30, clips="torch"), [1, 2, 3, 4, 8]),
        (Job(hook="owners", steps=30), [1, 2, 4, 8]),
        (Job("gpt", "muon", hook="muon", steps=30), [1, 2, 4, 8]),
    ],
    ids=["split", "decoupled", "owners", "muon"],
)
def test_a_chain_of_ten_kills_has_one_hash(job: Job, sizes: list[int], tmp_path: Path) -> None:
    chain = chain_of(job, sizes, random.Random(SEED))
    print(*chain, sep="\n")  # pytest shows it if the test fails
    found = hash_of_pieces(job, chain, 3, tmp_path / "saved")
    assert found == {*run_ranks(hash_of_job, 1, args=(job,))}
