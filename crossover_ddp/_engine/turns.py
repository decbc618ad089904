"""The job's turn on its devices: siblings compute while this job's last bucket travels."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from crossover_ddp.errors import UnsupportedConfigurationError


class Turn(Protocol):
    """What a mutex offers to the engine. No method raises."""

    @property
    def ranks(self) -> Sequence[int] | None:
        """The ranks of the default group that take the turn together, empty for this process alone; None: any."""

    @property
    def shared(self) -> bool:
        """Whether a sibling is present; the same answer on all ranks during one step."""

    def release(self) -> None:
        """Give the turn away: the step's compute is launched. Called on the hook's thread; never blocks."""

    def request(self) -> None:
        """Join the queue early: the last bucket is half-way. Called on a thread of the engine."""

    def acquire(self, *, ahead: bool = False) -> None:
        """Take the turn again: the step's buckets are complete. Called on a thread that may block.

        ``ahead``: the device may still be busy with them, nobody shares it.
        """


def check_turn(turn: Turn | None, process_group: dist.ProcessGroup | None) -> None:
    """Raise unless the ranks of the group take the turn together, and no others: these would wait for ours."""
    if turn is None or turn.ranks is None or process_group is None:
        return
    own, theirs = sorted(dist.get_process_group_ranks(process_group)), sorted(turn.ranks)
    if own != theirs and (theirs or len(own) > 1):
        raise UnsupportedConfigurationError(
            f"expected a mutex of the ranks {own}, which train this model, got one of "
            f"{theirs or 'this process alone'}: a turn belongs to all its ranks; leave mutex= out, or make it with "
            "GPUMutex(process_group=…) of the model's group"
        )
