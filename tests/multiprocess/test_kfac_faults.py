"""K-FAC when something goes wrong between ranks: everybody hears of it, in clear words and bounded time."""

import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover_ddp import ExchangeError, UnsupportedConfigurationError
from crossover_ddp.kfac_hooks import KFACState
from tests.harness import in_ranks
from tests.harness.groups import impatient_group
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp

PATIENCE_S = 10.0
LIMIT_S = 60.0  # of a busy machine


@pytest.mark.parametrize(
    ("world_size", "moment", "decoupled"),
    [(2, "between steps", False), (4, "in the owner's step", False), (2, "in the owner's step", True)],
)
@in_ranks(deaths={1: signal.SIGKILL}, timeout_s=90)
def test_the_loss_of_a_peer_is_an_error_in_bounded_time(
    rank: int, world_size: int, moment: str, decoupled: bool
) -> None:
    # Who is no neighbour of the dead one on the ring hears of it when a neighbour leaves, or by the timeout.
    group = impatient_group(PATIENCE_S)
    training = Training(
        rank, ddp={"process_group": group}, process_group=group, inv_update_steps=1, decoupled=decoupled
    ).run(2)
    dist.barrier()
    if rank == 1 and moment == "between steps":
        signal.raise_signal(signal.SIGKILL)
    if rank == 1 and moment == "in the owner's step":
        torch.linalg.cholesky_ex = lambda *_, **__: signal.raise_signal(signal.SIGKILL)
    begin_s = time.monotonic()
    with pytest.raises(ExchangeError, match=f"^rank {rank} of {world_size}: the "):
        training.run(3)
    assert time.monotonic() - begin_s < PATIENCE_S + LIMIT_S
    # A thread may still wait for a rank that is no neighbour of the dead one: no longer than the group's timeout.
    dist.destroy_process_group(group)


# What rank 1 alone has: other layers, or another argument.
OTHERS: dict[str, Any] = {
    "layer '0'": (WIDTH, 9, OUTPUTS),
    "layers": (WIDTH, 8, 8, OUTPUTS),
    "kl_clip": 0.01,
    "solver": "eigen",
    "inv_update_steps": 2,
}


@pytest.mark.defect("strangers-3")
@in_ranks(3)
def test_other_layers_and_arguments_are_refused_by_name_on_all_ranks(rank: int) -> None:
    """Replicas would drift apart."""
    for what, other in OTHERS.items():
        is_other = rank == 1
        network = mlp(*(other if is_other and what.startswith("layer") else (WIDTH, 8, OUTPUTS)))
        options = {what: other} if is_other and not what.startswith("layer") else {}
        with pytest.raises(UnsupportedConfigurationError) as caught:
            KFACState(network, torch.optim.SGD(network.parameters(), lr=0.1), **options)
        told = str(caught.value)
        assert told.startswith(f"expected the same {what} on all ranks, got {what} by rank {{0: ")
        assert what.startswith("layer") or f"1: {other!r}" in told
