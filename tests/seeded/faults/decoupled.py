"""Faults of decoupled."""

from typing import Final

from tests.seeded.fault import Fault

_TRIAL = "tests/multiprocess/test_decoupled_trial.py"
_CODEC = "tests/multiprocess/test_decoupled_codec.py"
_WALKS = ("tests/multiprocess/test_decoupled.py", "-k", "many_steps")

DECOUPLED: Final[tuple[Fault, ...]] = (
    Fault(
        "an update does not wait for the mean of its bucket",
        "crossover_ddp/_decoupled/shares.py",
        "            each.wait()\n        self.deferred.wait()\n",
        "            each.wait()\n",
        _WALKS,
    ),
    Fault(
        "gradients of a deferred step stay, and the next backward adds to them",
        "crossover_ddp/_decoupled/partial_optimizer.py",
        "                parameter.grad = former\n",
        "                parameter.grad = _\n",
        _WALKS,
    ),
    Fault(
        "the trial takes the times of one kind of step for the other's",
        "crossover_ddp/_decoupled/trial.py",
        "min(self._step_s[::2]), min(self._step_s[1::2])",
        "min(self._step_s[1::2]), min(self._step_s[::2])",
        (_TRIAL, "-k", "split_hook"),
    ),
    Fault(
        "a step that is not deferred travels exact in spite of a codec",
        "crossover_ddp/_decoupled/training.py",
        "exchange.world_size <= 2 and messages is None",
        "exchange.world_size <= 2",
        (_CODEC, "-k", "makes_no_difference"),
    ),
    Fault(
        "a coded bucket is called whole before it is decoded",
        "crossover_ddp/_exchange/direct_way.py",
        "        messages.unload()\n        engine.complete(transfer)\n",
        "        engine.complete(transfer)\n        messages.unload()\n",
        (_CODEC, "-k", "codec_alone"),
    ),
    Fault(
        "messages of a step in the shadow of Join are written over those of the step before",
        "crossover_ddp/_decoupled/coded.py",
        "            for share in shares:\n                share.deferred.wait()\n",
        "            return\n",
        (_CODEC, "-k", "run_out_of_inputs"),
    ),
    Fault(
        "twice as many chunks are received ahead, into memory that peaks count",
        "crossover_ddp/_exchange/collectives.py",
        "_WINDOW: Final = 3",
        "_WINDOW: Final = 6",
        ("tests/multiprocess/test_decoupled_memory.py",),
    ),
)
