"""Faults of the exchange."""

from typing import Final

from tests.seeded.fault import Fault

_CONFORMANCE = "tests/conformance/test_conformance.py"
_SEARCH = ("tests/unit/exchange/test_model_search.py", "-k", "tuple_in_the_making")

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
        ("tests/journeys/test_ends.py", "-k", "process_ends"),
    ),
    Fault(
        "a bucket is divided by two, however many ranks have added to it",
        "crossover_ddp/_exchange/ring_way.py",
        "must not overflow.\n        transfer.tensor.div_(engine.world_size)",
        "must not overflow.\n        transfer.tensor.div_(2)",
        (_CONFORMANCE, "-k", "split and 4"),
    ),
    Fault(
        "rank 0's buffers count inside of Join, too, where it has run out of inputs",
        "crossover_ddp/_exchange/module_buffers.py",
        "own_way = model._join_config.enable or hasattr(",
        "own_way = hasattr(",
        (_CONFORMANCE, "-k", "split-joined_ranks_with_buffers-2"),
    ),
    Fault(
        "buffers that somebody has changed since backward are overwritten",
        "crossover_ddp/_exchange/module_buffers.py",
        "if self._sends or self._versions != self._count_changes():",
        "if self._sends:",
        ("tests/multiprocess/test_module_buffers.py", "-k", "stay_changed and decoupled"),
    ),
    Fault(
        "all buffers are taken from the beginning of what has arrived",
        "crossover_ddp/_exchange/module_buffers.py",
        "self.flat[stop - tensor.nbytes : stop].view(tensor.dtype)",
        "self.flat[: tensor.nbytes].view(tensor.dtype)",
        (_CONFORMANCE, "-k", "kfac_of_nothing-batch_norm_buffers-3"),
    ),
    Fault(
        "a collection may run finalizers while models are searched",
        "crossover_ddp/_exchange/ddp_checks.py",
        "    gc.disable()  # or",
        "    # or",
        _SEARCH,
    ),
    Fault(
        "what others are making is looked at one by one",
        "crossover_ddp/_exchange/ddp_checks.py",
        "return list(_of_types(frozenset(classes), *itertools.tee(everybody)))",
        "return [each for each in gc.get_referrers(*classes) if type(each) in classes]",
        _SEARCH,
    ),
)
