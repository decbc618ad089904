"""Faults of the exchange."""

from typing import Final

from tests.seeded.fault import Fault

_CONFORMANCE = "tests/multiprocess/conformance/test_conformance.py"

EXCHANGE: Final[tuple[Fault, ...]] = (
    Fault(
        "a chunk that arrives takes the place of what it is to be added to",
        "crossover_ddp/_exchange/collectives.py",
        "self._buffer.piece(span).add_(scratch[: span.numel])",
        "self._buffer.piece(span).copy_(scratch[: span.numel])",
        (_CONFORMANCE, "-k", "split and 2"),
    ),
    Fault(
        "with three ranks and more the ring's parts are summed in another order than they travel",
        "crossover_ddp/_exchange/collectives.py",
        "steps = [(ring.rank - 2 - step) % ring.size for step in range(ring.size - 1)]",
        "steps = [(ring.rank - 2 + step) % ring.size for step in range(ring.size - 1)]",
        ("tests/multiprocess/test_collectives.py", "-k", "halves_and_engine_are_exact"),
    ),
    Fault(
        "a thread of the exchange that waits for a peer keeps its process alive",
        "crossover_ddp/_system/worker.py",
        "name=self._name, daemon=True",
        "name=self._name, daemon=False",
        ("tests/multiprocess/test_exchange_exit.py",),
    ),
)
