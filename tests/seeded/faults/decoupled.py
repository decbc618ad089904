"""Faults of decoupled."""

from typing import Final

from tests.seeded.fault import Fault

_DEFECTS = "tests/defects/test_decoupled.py"
_TRIAL = "tests/multiprocess/test_decoupled_trial.py"
_CODEC = "tests/multiprocess/test_compression.py"
_WALKS = ("tests/conformance/test_conformance.py", "-k", "gloo-decoupled- and 2")

DECOUPLED: Final[tuple[Fault, ...]] = (
    Fault(
        "an update does not wait for the mean of its bucket",
        "crossover_ddp/_decoupled/pending.py",
        "        share.arriving.wait()\n",
        "",
        _WALKS,
    ),
    Fault(
        "gradients of a deferred step stay, and the next backward adds to them",
        "crossover_ddp/_owners/optimizer.py",
        "                parameter.grad = former\n",
        "                parameter.grad = _\n",
        _WALKS,
    ),
    Fault(
        "the trial takes the times of one kind of step for the other's",
        "crossover_ddp/_decoupled/clock.py",
        "min(self._step_s[::2]), min(self._step_s[1::2])",
        "min(self._step_s[1::2]), min(self._step_s[::2])",
        (_TRIAL, "-k", "split_hook"),
    ),
    Fault(
        "a step that is not deferred travels exact in spite of a codec",
        "crossover_ddp/_decoupled/state.py",
        "around=None if self._compression is None else self._compression.around(",
        "around=None if self._compression is None or not hands_back else self._compression.around(",
        (_CODEC, "-k", "makes_no_difference"),
    ),
    Fault(
        "a coded bucket is called whole before it is decoded",
        "crossover_ddp/_compression/coded_link.py",
        "        self._coded.unload()\n",
        "        pass\n",
        (_CODEC, "-k", "codec_alone"),
    ),
    Fault(
        "messages of a step in the shadow of Join are written over those of the step before",
        "crossover_ddp/_decoupled/pending.py",
        "                share.bucket.drop()\n",
        "                pass\n",
        (_CODEC, "-k", "run_out_of_inputs"),
    ),
    Fault(
        "four times as much is received ahead, into memory that peaks count",
        "crossover_ddp/_engine/gloo.py",
        "_AHEAD_BYTES: Final = 8 << 20",
        "_AHEAD_BYTES: Final = 32 << 20",
        ("tests/multiprocess/test_decoupled_memory.py",),
    ),
    Fault(
        "a group without a gradient is not counted",
        "crossover_ddp/_owners/optimizer.py",
        "        self._count(groups, plan.attributes)\n",
        "",
        (_DEFECTS, "-k", "without_gradients_is_counted"),
    ),
    Fault(
        "a thread that saves during step() takes the step away",
        "crossover_ddp/_decoupled/state.py",
        "        with self._pending.lock:  # a thread that saves may be making gradients whole\n",
        "        if True:\n",
        (_DEFECTS, "-k", "loses_no_step"),
    ),
    Fault(
        "a part of a step runs on the optimizer itself, whose groups a scheduler then meets",
        "crossover_ddp/_owners/optimizer.py",
        "        if step is None:\n            return",
        "        if True:\n            return",
        (_DEFECTS, "-k", "reaches_all_groups"),
    ),
    Fault(
        "a forward without gradients forgets that the turn is held",
        "crossover_ddp/_decoupled/state.py",
        "            self._take_turn(self._wait_for_first)\n",
        "            self._take_turn(self._wait_for_first)\n        self._has_turn = False\n",
        (_DEFECTS, "-k", "no_further_turn"),
    ),
    Fault(
        "gradients read after a forward that failed are not waited for",
        "crossover_ddp/_decoupled/pending.py",
        "        if self._is_whole and not self._withheld:\n",
        "        if self._is_whole and not self._withheld and not self.in_forward:\n",
        (_DEFECTS, "-k", "forward_that_failed"),
    ),
    Fault(
        "the greatest gradient of all ranks is a number although one is none",
        "crossover_ddp/_decoupled/clipping.py",
        "torch.where(exchanged[1] > 0, math.nan, exchanged[0])",
        "exchanged[0]",
        (_DEFECTS, "-k", "nan_if_any_is"),
    ),
    Fault(
        "the trial of an optimizer runs its parts in the order of a step",
        "crossover_ddp/_owners/optimizer.py",
        "in reversed([*zip(tiny, gradients, strict=True)]):",
        "in [*zip(tiny, gradients, strict=True)]:",
        (_DEFECTS, "-k", "draws_for_each"),
    ),
    Fault(
        "other ranks do not hear of an owner that failed",
        "crossover_ddp/_decoupled/owned.py",
        "                    exchange.fail(share.made, error)  # other ranks wait for it\n",
        "",
        ("tests/defects/test_owners.py", "-k", "hear_of_an_owner"),
    ),
    Fault(
        "an optimizer is tried on frozen parameters, which may be integers",
        "crossover_ddp/_owners/optimizer.py",
        "for parameter in parameters if parameter.requires_grad]",
        "for parameter in parameters]",
        ("tests/defects/test_owners.py", "-k", "integer"),
    ),
    Fault(
        "the norm has the type of the first bucket",
        "crossover_ddp/_decoupled/clipping.py",
        "functools.reduce(torch.promote_types, dtypes)",
        "[*dtypes][0]",
        (_DEFECTS, "-k", "widest_type"),
    ),
    Fault(
        "whole gradients are clipped by a norm in their own type",
        "crossover_ddp/_decoupled/clipping.py",
        "        shares, gradients = [], [",
        "        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)\n"
        "        shares, gradients = [], [",
        (_DEFECTS, "-k", "clipping_does_not_hang"),
    ),
    Fault(
        "buckets of a compiled model may be smaller than torch takes",
        "crossover_ddp/_decoupled/state.py",
        "_SMALLEST_COMPILED_BUCKET_BYTES if compiled else",
        "_SMALLEST_BUCKET_BYTES if compiled else",
        (_DEFECTS, "-k", "model_be_compiled"),
    ),
    Fault(
        "an update runs inside of a transform by torch.func",
        "crossover_ddp/_decoupled/pending.py",
        "        if peek_interpreter_stack() is not None:\n",
        "        if False:\n",
        (_DEFECTS, "-k", "torch_func"),
    ),
    Fault(
        "a handler of a signal in the middle of an update makes the update again",
        "crossover_ddp/_decoupled/pending.py",
        "        with as_in_step(share.buffer.device.type):\n            share.apply()\n",
        "        share.pending = True\n"
        "        with as_in_step(share.buffer.device.type):\n            share.apply()\n"
        "        share.pending = False\n",
        (_DEFECTS, "-k", "signal_handler"),
    ),
    Fault(
        "without bucket views gradients that are still held are not the mean",
        "crossover_ddp/_decoupled/pending.py",
        "        if kept:  # mostly",
        "        if False:  # mostly",
        ("tests/multiprocess/test_decoupled.py", "-k", "without_bucket_views"),
    ),
    Fault(
        "checkpoints far apart are taken for reads in every step",
        "crossover_ddp/_decoupled/pending.py",
        " and step - self._steps[0] < _STEPS_CLOSE_TOGETHER:",
        ":",
        (_DEFECTS, "-k", "now_and_then"),
    ),
)
