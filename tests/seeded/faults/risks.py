"""Faults of what was guarded by tests of the engine's inside alone; found by public names, in ``tests/journeys``."""

from typing import Final

from tests.seeded.fault import Fault

_JOURNEYS_OF = "crossover_ddp/_engine/exchange.py"
_BUCKETS = "crossover_ddp/_engine/buckets.py"
_WORKER = "crossover_ddp/_system/worker.py"
_TURN = "tests/journeys/test_turn_and_futures.py"
_FAILURES = "tests/journeys/test_failures.py"
_DEVICES = "tests/journeys/test_devices.py"
_BITS = "tests/journeys/test_bits_and_buffers.py"
_REFUSED = (_FAILURES, "-k", "refused_bucket_is and 1-")

RISKS: Final[tuple[Fault, ...]] = (
    Fault(
        "risk 6: whoever needs a native gather waits for it although it was never issued",
        _BUCKETS,
        "            if self.link.in_program_order:\n",
        "            if False:\n",
        (_FAILURES, "-k", "never_issued"),
    ),
    Fault(
        "risk 7: a fork gives work to a thread that it does not have",
        _WORKER,
        "if self._stopped or os.getpid() != self._pid:",
        "if self._stopped:",
        ("tests/unit/engine/test_journeys.py", "-k", "in_a_fork"),
    ),
    Fault(
        "risk 9: an idle thread keeps its last bucket, and with it the model",
        _WORKER,
        "        del job\n",
        "",
        ("tests/unit/engine/test_journeys.py", "-k", "idle_station"),
    ),
    Fault(
        "risk 10: a gather waits for reduce-scatters of later steps, too",
        "crossover_ddp/_engine/buckets.py",
        "await (gathers.passed_first() if self.last else gathers)",
        "await gathers",
        (_FAILURES, "-k", "ahead"),
    ),
    Fault(
        "risk 11: a rank leaves although another one still needs its parts",
        _JOURNEYS_OF,
        "_NEEDED_BY_OTHERS_S if needed else _END_S",
        "_END_S",
        (_FAILURES, "-k", "may_leave"),
    ),
    Fault(
        "risk 12: the last bucket's refusal does not end its backward pass",
        _JOURNEYS_OF,
        "                backward.gathers.open()\n",
        "",
        (_FAILURES, "-k", "refused_bucket_is and decoupled-last"),
    ),
    Fault(
        "risk 13: what arrives counts as a change of the user's gradients",
        _BUCKETS,
        "self.flat, self.layout = self.result.data, layout",
        "self.flat, self.layout = self.result, layout",
        (_BITS, "-k", "our_hand"),
    ),
    Fault(
        "risk 21: beside a sibling the turn is taken when gradients are launched",
        "crossover_ddp/_decoupled/state.py",
        "on_host=self._turn.shared",
        "on_host=False",
        (_DEVICES, "-k", "beside_a_sibling"),
    ),
    Fault(
        "risk 23: with a codec all steps travel exact",
        "crossover_ddp/_compression/compression.py",
        "max(0, self._exact_left - 1)",
        "self._exact_left",
        (_BITS, "-k", "bytes_on"),
    ),
    Fault(
        "risk 26: a mistake of our own leaves the hook",
        "crossover_ddp/_engine/buckets.py",
        "    except Exception as error:\n        if refused",
        "    except ArithmeticError as error:\n        if refused",
        _REFUSED,
    ),
    Fault(
        "risk 27: where no backward runs an error is kept for the next one",
        "crossover_ddp/_engine/buckets.py",
        "            return self._watching > 0\n",
        "            return True\n",
        (_FAILURES, "-k", "future_carries"),
    ),
    Fault(
        "risk 28: each rank decides by itself whether buffers travel with gradients",
        "crossover_ddp/_engine/exchange.py",
        "[[nbytes]] * self.size and nbytes > 0",
        "[[nbytes]] * self.size or nbytes > 0",
        ("tests/conformance/test_conformance.py", "-k", "gloo-split-model_not_found_on_one_rank-2"),
    ),
    Fault(
        "risk 29: waiting for a peer counts as compute",
        "crossover_ddp/_decoupled/clock.py",
        "sum([done - asked for asked, _, done in self.updates if asked < until_s])",
        "0.0",
        (_BITS, "-k", "no_compute"),
    ),
    Fault(
        "risk 30: averages go to where parameters were once",
        "crossover_ddp/_averaging/replica.py",
        "if kept is None or kept[0] != addresses:",
        "if kept is None:",
        (_BITS, "-k", "replaced"),
    ),
)
