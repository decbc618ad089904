"""Faults of codecs."""

from typing import Final

from tests.seeded.fault import Fault

_CODECS = "tests/multiprocess/test_compression.py"
_KFAC = "tests/multiprocess/test_kfac_codec.py"

CODECS: Final[tuple[Fault, ...]] = (
    Fault(
        "what an owner's message does not hold is lost",
        "crossover_ddp/_compression/bucket.py",
        "            values.add_(self._pull.residual)\n",
        "",
        (
            _CODECS,
            "-k",
            "what_is_applied and 2",
        ),
    ),
    Fault(
        "owners add the last rank first",
        "crossover_ddp/_compression/bucket.py",
        "for rank in range(len(self.parts)):",
        "for rank in reversed(range(len(self.parts))):",
        (
            _CODECS,
            "-k",
            "identity_codec and 4",
        ),
    ),
    Fault(
        "the residual of a parameter that is not used now is lost",
        "crossover_ddp/_compression/bucket.py",
        "kept.copy_(before)",
        "kept.zero_()",
        (
            _CODECS,
            "-k",
            "keeps_its_residual",
        ),
    ),
    Fault(
        "an owner keeps its gradients where others decode its message",
        "crossover_ddp/_compression/bucket.py",
        "if owner != self.rank or not self._is_own_unloaded:",
        "if owner != self.rank:",
        (
            _CODECS,
            "-k",
            "parameters_are_the_same and 2",
        ),
    ),
    Fault(
        "a threshold is never refreshed",
        "crossover_ddp/_compression/threshold.py",
        "if memory is None or memory.age >= self.refresh_steps:",
        "if memory is None:",
        (
            _CODECS,
            "-k",
            "header_tells",
        ),
    ),
    Fault(
        "an owner with its rank above 1 leaves its own gradient out, on a backend of its own",
        "crossover_ddp/_compression/device_bucket.py",
        "                if not is_begun:\n                    values.add_(self._addend)\n",
        "",
        (
            "tests/multiprocess/test_compression_native.py",
            "-k",
            "nothing_is_lost and 3",
        ),
    ),
    Fault(
        "on a backend of its own what an owner's message does not hold is lost",
        "crossover_ddp/_compression/device_bucket.py",
        "values.div_(world_size).add_(self._pull_stream.residual)",
        "values.div_(world_size)",
        (
            "tests/multiprocess/test_compression_native.py",
            "-k",
            "those_of_gloo and compressed-2",
        ),
    ),
    Fault(
        "what travels exact beside a codec is summed, not averaged",
        "crossover_ddp/_compression/bucket.py",
        "        exact.div_(world_size)\n",
        "",
        (
            _KFAC,
            "-k",
            "identity_codec and 2",
        ),
    ),
    Fault(
        "owners send the mean, not what they have made of it",
        "crossover_ddp/_compression/bucket.py",
        "            collect(self._buffers.gather, gathered.coded, values)\n",
        "",
        (
            _KFAC,
            "-k",
            "int8_directions and 2",
        ),
    ),
    Fault(
        "an owner's residual counts once, not as often as there are ranks",
        "crossover_ddp/_compression/residuals.py",
        "place.add_(pull, alpha=len(self.parts))",
        "place.add_(pull)",
        (
            "tests/multiprocess/test_compression_pairs.py",
            "-k",
            "what_is_applied",
        ),
    ),
    Fault(
        "each rank keeps a plan of its own for the codec",
        "crossover_ddp/_compression/planning.py",
        "    dist.broadcast_object_list(choice, group=group, group_src=0)\n",
        "",
        (
            "tests/multiprocess/test_plan_codec.py",
            "-k",
            "decoupled_plan-2",
        ),
    ),
    Fault(
        "pairs far apart are spared, near ones are not",
        "crossover_ddp/_compression/choice.py",
        "near if one == other else far",
        "far if one == other else near",
        (
            "tests/multiprocess/test_compression_pairs.py",
            "-k",
            "near_ranks_lose_nothing",
        ),
    ),
)
