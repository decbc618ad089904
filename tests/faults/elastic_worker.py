"""One rank of a job that torchrun starts, and starts again after a death: the nursery's training."""

import json
import os
import sys

import torch

from tests.faults.nursery import train


def main() -> None:
    torch.set_num_threads(1)
    order = json.loads(sys.argv[1])
    order["log"] += f"-rank{os.environ['RANK']}-life{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    os.environ["CROSSOVER_DEVICE"] = f"dev{os.environ['RANK']}"
    train(order)


if __name__ == "__main__":
    main()
