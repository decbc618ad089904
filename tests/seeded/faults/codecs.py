"""Faults of codecs."""

from typing import Final

from tests.seeded.fault import Fault

_CODECS = "tests/multiprocess/test_compression.py"
_BUCKET = "tests/unit/compression/test_coded_bucket.py"
_KFAC = "tests/multiprocess/test_kfac_codec.py"

CODECS: Final[tuple[Fault, ...]] = (
    Fault(
        "what an owner's message does not hold is lost",
        "crossover_ddp/_compression/coded_link.py",
        "values.add_(self._kept[self.rank])",
        "values",
        (_BUCKET, "-k", "what_is_applied and 2"),
    ),
    Fault(
        "owners add the last rank first",
        "crossover_ddp/_compression/coded_link.py",
        "for rank in range(len(self.parts)):",
        "for rank in reversed(range(len(self.parts))):",
        ("tests/conformance/test_conformance.py", "-k", "gloo-identity_codec and 3"),
    ),
    Fault(
        "the residual of a parameter that is not used now is lost",
        "crossover_ddp/_compression/coded_link.py",
        "torch.where(is_unused, old, piece, out=piece)",
        "piece.masked_fill_(is_unused, 0)",
        (_BUCKET, "-k", "all_gradients_are_zero"),
    ),
    Fault(
        "an owner keeps its mean where others decode its message",
        "crossover_ddp/_compression/coded_link.py",
        "        self._unload(self.rank)\n",
        "",
        ("tests/multiprocess/test_kfac_codec.py", "-k", "same_on_all_ranks and 2"),
    ),
    Fault(
        "what travels exact beside a codec is summed, not averaged",
        "crossover_ddp/_compression/coded_link.py",
        "exact.div_(self._divisor)",
        "exact",
        ("tests/multiprocess/test_kfac.py", "-k", "independent and identity"),
    ),
    Fault(
        "what stood between segments is encoded with the next",
        "crossover_ddp/_compression/coded_link.py",
        "            out[start:stop].zero_()\n",
        "            pass\n",
        ("tests/unit/compression/test_coded_bucket.py", "-k", "infinities"),
    ),
    Fault(
        "owners send the mean, not what they have made of it",
        "crossover_ddp/_compression/coded_link.py",
        "        self._collect_own(self._returned[self.rank].exact)\n",
        "",
        (_KFAC, "-k", "int8_directions and 2"),
    ),
    Fault(
        "what owners with work have kept is lost in a drained step",
        "crossover_ddp/_compression/coded_link.py",
        "        self._coded.add_own(flat, self._part)\n",
        "",
        ("tests/unit/compression/test_coded_link.py", "-k", "owners_make"),
    ),
    Fault(
        "a drained step takes no residuals with it",
        "crossover_ddp/_compression/compression.py",
        "if known is None or is_exact:",
        "if known is None:",
        (_CODECS, "-k", "drained and crossover"),
    ),
    Fault(
        "an owner's residual counts once, not as often as there are ranks",
        "crossover_ddp/_compression/coded_link.py",
        "0 if self.has_work else len(self.parts)",
        "1",
        ("tests/unit/compression/test_coded_bucket.py", "-k", "what_is_applied"),
    ),
    Fault(
        "each rank keeps a plan of its own for the codec",
        "crossover_ddp/_tuning/link_probe.py",
        "return known, told_by_all(group, measure_link(group))[0]",
        "return known, measure_link(group)",
        ("tests/multiprocess/test_plan_codec.py", "-k", "decoupled_plan-2"),
    ),
    Fault(
        "pairs far apart are spared, near ones are not",
        "crossover_ddp/_compression/choice.py",
        "near if one == other else far",
        "far if one == other else near",
        (_CODECS, "-k", "near_ranks_lose_nothing"),
    ),
    Fault(
        "a second model of the same state is not noticed",
        "crossover_ddp/_ddp/checks.py",
        "        return model is not None and self._model() not in (None, model)",
        "        return False",
        ("tests/defects/test_codecs.py", "-k", "one_model_or"),
    ),
    Fault(
        "probes of the link count as steps",
        "crossover_ddp/_tuning/link_probe.py",
        "    engine.begin(both_halves,",
        "    engine.records.add([(tensor.nbytes, begin_s)], begin_s - 1e-3)\n    engine.begin(both_halves,",
        ("tests/defects/test_codecs.py", "-k", "plan_looks"),
    ),
    Fault(
        "a gradient of zeros keeps its residual in a drained step",
        "crossover_ddp/_compression/compression.py",
        "                self._leaves_unused = model.find_unused_parameters\n",
        "",
        ("tests/defects/test_codecs.py", "-k", "drained"),
    ),
    Fault(
        "loaded residuals of unknown names wait for ever",
        "crossover_ddp/_compression/compression.py",
        "if unknown := [",
        "if not known and [",
        ("tests/defects/test_codecs.py", "-k", "loaded and another"),
    ),
    Fault(
        "loaded residuals have to come from the same wrapping",
        "crossover_ddp/_compression/compression.py",
        '    return ".".join(part for part in name.split(".") if part not in _WRAPPINGS)',
        "    return name",
        ("tests/defects/test_codecs.py", "-k", "loaded and module"),
    ),
    Fault(
        "a copied state scales residuals by 1",
        "crossover_ddp/codecs.py",
        '"loss_scale": self._loss_scale}',
        '"loss_scale": 1.0}',
        ("tests/defects/test_codecs.py", "-k", "copy_keeps and CompressedState"),
    ),
    Fault(
        "a hidden model is looked for again and again",
        "crossover_ddp/_ddp/checks.py",
        '        for parameter in parameters:\n            self.names[parameter] = ""\n',
        "",
        ("tests/defects/test_codecs.py", "-k", "hidden"),
    ),
)
