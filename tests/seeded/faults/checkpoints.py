"""Faults of checkpoints."""

from typing import Final

from tests.seeded.fault import Fault

_COLUMNS = "tests/conformance/test_columns.py"
_RANKS = "tests/multiprocess/test_checkpoint.py"

CHECKPOINTS: Final[tuple[Fault, ...]] = (
    Fault(
        "a rank that saves alone waits without a word",
        "crossover_ddp/_engine/checkpoint.py",
        "    told.start()\n    try:\n        yield\n    finally:\n        told.cancel()\n        told.join()\n",
        "    yield\n",
        (_RANKS, "-k", "one_rank_alone"),
    ),
    Fault(
        "each rank goes on with its own residuals, and the dictionary has rank 0's",
        "crossover_ddp/_compression/compression.py",
        "            means[name] = torch.stack(kept).sum(0) / group.size()\n",
        "            means[name] = own.get(name, kept[0])\n",
        (_RANKS, "-k", "codec"),
    ),
    Fault(
        "the optimizers of replicas are saved as rank 0 has them",
        "crossover_ddp/averaging_hooks.py",
        "                replica.average(beside)\n",
        "",
        (_COLUMNS, "-k", "resumed_job and local_sgd"),
    ),
    Fault(
        "a checkpoint brings nothing of owners together",
        "crossover_ddp/_decoupled/state.py",
        "        self.flush()\n        self.consolidate(to)\n        if self._compression",
        "        self.flush()\n        if self._compression",
        (_RANKS, "-k", "owners"),
    ),
    Fault(
        "optimizers that the state does not know are left out in silence",
        "crossover_ddp/_engine/checkpoint.py",
        "    if unknown:\n        names = names_of(unknown, model)\n",
        "    if False:\n        names = names_of(unknown, model)\n",
        ("tests/unit/engine/test_checkpoint.py", "-k", "does_not_know"),
    ),
)
