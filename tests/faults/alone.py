"""The losses that a job of the nursery has without a sibling and without a hook."""

import json
from pathlib import Path
from typing import Any

from tests.faults.nursery import train
from tests.harness import run_ranks
from tests.harness.groups import free_port


def train_alone(rank: int, world_size: int, order: dict[str, Any], log: str) -> None:
    train({**order, "log": f"{log}{rank}"})


def losses_alone(directory: Path, *, seed: int, steps: int, ranks: int, group: str) -> list[list[float]]:
    """Train for so many steps and return the losses of each rank."""
    log = str(directory / f"alone-seed{seed}-rank")
    order = {"seed": seed, "hook": "none", "steps": steps, "group": group, "stop": log + ".stop"}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CROSSOVER_GROUP": group}
    environment = [{**shared, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    run_ranks(train_alone, ranks, args=(order, log), backend=None, environment=environment)
    records = [
        [json.loads(line) for line in Path(f"{log}{rank}").read_text().splitlines()] for rank in range(ranks)
    ]
    return [[record[3] for record in of_rank if isinstance(record, list)] for of_rank in records]
