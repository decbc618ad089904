"""The hooks that must agree with plain DDP, in every setting that changes a hook's path."""

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer

import crossover_ddp as ddp
from tests.conformance.cases import SCALE
from tests.conformance.reference import kfac_in_float64
from tests.harness import inside
from tests.multiprocess.identity_codec import Identity

# Returns the state and the hook, given a model, its optimizers and perhaps the keyword ``mutex``.
Make = Callable[..., tuple[Any, Any]]
# The mutex that states are made with.
MUTEX: ContextVar[Any] = ContextVar("MUTEX", default=None)
EPSILONS: Final = 128.0


def sgd(model: nn.Module, lr: float) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=lr, momentum=0.9)]


def adamw(model: nn.Module, lr: float) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=lr / 10)]


def muon_and_sgd(model: nn.Module, lr: float) -> list[Optimizer]:
    """Return Muon for matrices and SGD for the others.

    Muon must have a parameter. For a model without matrices it gets one that is not trained.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    muon = Muon(matrices or [untrained(model)], lr=lr / 5)
    return [muon, SGD(others, lr=lr)] if others else [muon]


def untrained(model: nn.Module) -> nn.Parameter:
    return nn.Parameter(
        torch.ones(2, 2, device=next(model.parameters()).device), requires_grad=False
    )


@dataclass(frozen=True)
class Row:
    """A hook in one setting, and how close to plain DDP it is."""

    # Makes the state and the hook. None is plain DDP.
    make: Make | None
    # DDP's options in all cases.
    options: Mapping[str, Any] = field(default_factory=dict)
    # Makes the optimizers, for the reference as well.
    optimizers: Callable[[nn.Module, float], list[Optimizer]] = sgd
    # The row that is the reference. None is plain DDP.
    like: str | None = None
    # The order in which owners add: over a tree of ranks, or, for a codec's messages after the
    # first step, in the order of ranks. With three and more ranks the reference adds in the same
    # order, so that results are identical. None: there they are equal within ``tolerance``. With
    # fewer ranks there is only one order.
    order: Literal["tree", "tree, then ranks"] | None = "tree"
    # Relative to a tensor's largest magnitude, in epsilons of its dtype (of float32 for float64).
    tolerance: float = EPSILONS
    # Whether results are only close to the reference's with any number of ranks.
    lossy: bool = False
    # Whether the path is another row's except for details. The short form runs few cases of it.
    is_like_others: bool = False
    # Whether the state takes a mutex.
    takes_turns: bool = True
    # Whether the state wants to know the loss scale: a line to add beside a GradScaler.
    takes_scale: bool = False
    # Whether updates may travel while the next forward runs.
    defers: bool = False
    # Whether all ranks end with the same parameters.
    ranks_agree: bool = True
    # Whether gradients may be read before the step: always, after ``flush()``, or never.
    reads: Literal["always", "flushed", "never"] = "always"
    # The cases that the hook refuses, each with a part of its error.
    refuses: Mapping[str, str] = field(default_factory=dict)
    # The cases in which results differ, each with the reason, for the documentation.
    differs: Mapping[str, str] = field(default_factory=dict)
    # The cases in which a line is to be added or nothing is gained, for the documentation.
    notes: Mapping[str, str] = field(default_factory=dict)
    # The cases that do not run here, each with the reason, for the documentation.
    untested: Mapping[str, str] = field(default_factory=dict)

    def attach(self, model: DistributedDataParallel, optimizers: list[Optimizer]) -> Any:
        """Register the hook, with the mutex in `MUTEX`, and return its state.

        The model keeps the state, from which the test takes it to close it.
        """
        if self.make is None:
            return None
        settings: dict[str, Any] = {}
        if self.takes_turns and MUTEX.get():
            settings["mutex"] = MUTEX.get()
        if self.takes_scale and SCALE.get():
            settings["loss_scale"] = SCALE.get()
        state, hook = self.make(model, optimizers, **settings)
        model.register_comm_hook(state, hook)
        vars(model)["state"] = state
        return state


def kfac_of_nothing(model: Any, optimizers: list[Optimizer], **turn: Any) -> tuple[Any, Any]:
    """Let all layers bypass K-FAC, so that only its exchange runs. Users may not do this."""
    with inside.kfac_of_no_layer():
        return ddp.KFACState(model, optimizers[0], skip=["*"], **turn), ddp.kfac_hook


def muon_of_nothing(model: Any, optimizers: list[Optimizer], **turn: Any) -> tuple[Any, Any]:
    """Give Muon a matrix that is not trained, so that all of the model bypasses it."""
    return ddp.MuonState(Muon([untrained(model)]), **turn), ddp.muon_hook


def alone(state: Callable[..., Any], hook: Any, **settings: Any) -> Make:
    return lambda model, optimizers, **turn: (state(**settings, **turn), hook)


def decoupled(**settings: Any) -> Make:
    return lambda model, optimizers, **turn: (
        ddp.DecoupledState(optimizers[0], defer="always", **settings, **turn),
        ddp.decoupled_hook,
    )


def owners_with(codec: Callable[[], Any]) -> Make:
    return lambda model, optimizers, **turn: (
        ddp.OwnerState(optimizers, codec=codec(), **turn),
        ddp.owner_hook,
    )


def of_torch(state: Any, hook: Any) -> Make:
    return lambda model, optimizers, **turn: (state, hook)


def powersgd(model: Any, optimizers: list[Optimizer], **turn: Any) -> tuple[Any, Any]:
    return PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    ), powerSGD_hook


VIEWS = {"gradient_as_bucket_view": True}
INT8 = ddp.Int8(), ddp.Int8(128)
INT4 = ddp.Int4(), ddp.Int4(32)
# The rank that does not find its model raises. The others' error is that rank's end.
NO_SEARCH = {"model_not_found_on_one_rank": "gc.freeze"}
NO_VIEWS = dict.fromkeys(("unused_parameters", "complex_parameters"), "gradient_as_bucket_view")
IN_DOUBLE = {"several_dtypes": "float64"}
# Without `state.follow` an average reads all parameters at once.
NOT_FOLLOWED = {"average_each_step": "no gain without `state.follow(ema)`"}
# A compiled region waits for all that it reads. Guard: tests/unit/decoupled/test_pieces.py.
IN_PIECES = dict.fromkeys(
    ("compiled_network", "compiled_model"),
    "forward hides more with [`compiled`](decoupled.md#torchcompile), or with compiled blocks",
)
NEEDS_VIEWS = {"unused_parameters": "with `gradient_as_bucket_view=True`"}
KNOWS_SCALE = {"gradient_scaler": "with `loss_scale=scaler.get_scale`"}
AS_MANY_STEPS = {"joined_ranks_with_buffers": "as many steps"}

KFAC: Final[dict[str, Any]] = {
    "damping": 0.03,
    "factor_decay": 0.9,
    "kl_clip": 1e-5,
    "inv_update_steps": 1,
}

PLAIN = Row(None)
HOOKS: dict[str, Row] = {
    "split": Row(
        lambda model, optimizers: (None, ddp.reduce_scatter_all_gather_hook), takes_turns=False
    ),
    "split_on_own_group": Row(
        lambda model, optimizers: (model.process_group, ddp.reduce_scatter_all_gather_hook),
        is_like_others=True,
        takes_turns=False,
    ),
    "crossover": Row(alone(ddp.CrossoverState, ddp.crossover_hook)),
    "wrapped_all_reduce": Row(
        alone(ddp.CrossoverState, ddp.crossover_wrapper(allreduce_hook)), order=None
    ),
    "wrapped_fp16": Row(
        alone(ddp.CrossoverState, ddp.crossover_wrapper(fp16_compress_hook)),
        like="fp16_compress_hook",
        order=None,
        is_like_others=True,
    ),
    "averaged_every_step": Row(
        alone(ddp.LocalSGDState, ddp.local_sgd_hook, sync_every=1),
        refuses={**AS_MANY_STEPS, **NO_SEARCH},
    ),
    "decoupled": Row(
        decoupled(),
        options=VIEWS,
        reads="never",
        refuses=NO_SEARCH,
        defers=True,
        notes={**NOT_FOLLOWED, **IN_PIECES, **NEEDS_VIEWS},
    ),
    "decoupled_and_copied": Row(decoupled(), reads="never", refuses={**NO_VIEWS, **NO_SEARCH}),
    "decoupled_and_flushed": Row(
        decoupled(), options=VIEWS, reads="flushed", is_like_others=True, refuses=NO_SEARCH
    ),
    "auto": Row(
        lambda model, optimizers, **turn: (ddp.AutoState(optimizers[0], **turn), ddp.auto_hook),
        options=VIEWS,
        reads="never",
        is_like_others=True,
        refuses=NO_SEARCH,
        notes={"average_each_step": "with `state.follow(ema)`", **IN_PIECES, **NEEDS_VIEWS},
    ),
    "compressed_by_nothing": Row(
        alone(ddp.CompressedState, ddp.compressed_hook, codec=None), is_like_others=True
    ),
    "identity_codec": Row(
        alone(ddp.CompressedState, ddp.compressed_hook, codec=Identity()),
        order="tree, then ranks",
        refuses=IN_DOUBLE,
    ),
    "decoupled_identity_codec": Row(
        decoupled(codec=Identity()),
        options=VIEWS,
        reads="never",
        is_like_others=True,
        order="tree, then ranks",
        refuses={**IN_DOUBLE, **NO_SEARCH},
    ),
    "int8": Row(
        # With two codecs two ranks send in two hops, as when they defer. "identity_codec" has one hop.
        alone(ddp.CompressedState, ddp.compressed_hook, codec=INT8),
        lossy=True,
        tolerance=2.0**20,
        takes_scale=True,
        refuses=IN_DOUBLE,
        notes=KNOWS_SCALE,
    ),
    "decoupled_int8": Row(
        decoupled(codec=INT8),
        options=VIEWS,
        reads="never",
        like="int8",
        is_like_others=True,
        takes_scale=True,
        refuses={**IN_DOUBLE, **NO_SEARCH},
    ),
    "kfac_of_nothing": Row(kfac_of_nothing, is_like_others=True),
    "kfac": Row(
        lambda model, optimizers, **turn: (
            ddp.KFACState(model, optimizers[0], **KFAC, **turn),
            ddp.kfac_hook,
        ),
        like="kfac_in_float64",
        lossy=True,
        tolerance=2.0**12,
        takes_scale=True,
        notes=KNOWS_SCALE,
        refuses={
            "several_dtypes": "float16",
            **dict.fromkeys(
                ("complex_parameters", "fewer_elements_than_ranks"), "a layer that K-FAC treats"
            ),
        },
        differs={
            "mixed_precision_by_autocast": "layers round to bfloat16, the reference does not",
            "refused_bucket": "factors of a refused bucket do not count",
        },
    ),
    "muon_of_nothing": Row(muon_of_nothing, is_like_others=True),
    "muon": Row(
        lambda model, optimizers, **turn: (
            ddp.MuonState(optimizers[0], **turn),  # type: ignore[arg-type]
            ddp.muon_hook,
        ),
        optimizers=muon_and_sgd,
        tolerance=2.0**15,  # directions are in bfloat16: about one of its epsilons
        reads="never",
        takes_scale=True,
        notes=KNOWS_SCALE,
        refuses={**AS_MANY_STEPS, "complex_parameters": "complex"},
        differs={"clipping": "clipping sees the parameters that are no matrices"},
    ),
    "owners": Row(
        lambda model, optimizers, **turn: (ddp.OwnerState(optimizers, **turn), ddp.owner_hook),
        options=VIEWS,
        optimizers=adamw,
        reads="never",
        refuses={**AS_MANY_STEPS, **NO_SEARCH, "complex_parameters": "complex"},
        defers=True,
        notes={**NOT_FOLLOWED, **IN_PIECES, **NEEDS_VIEWS},
    ),
}
OWNERS: dict[str, Any] = {
    "options": VIEWS,
    "optimizers": adamw,
    "reads": "never",
    "is_like_others": True,
    "refuses": {**AS_MANY_STEPS, **NO_SEARCH, "complex_parameters": "complex"},
    "notes": {**NOT_FOLLOWED, **IN_PIECES, **NEEDS_VIEWS},
}
# In no table of hooks: torch's own, replicas that differ between two averages, and other codecs.
OF_MATRIX: Final[dict[str, Row]] = {
    "local_sgd": Row(
        alone(ddp.LocalSGDState, ddp.local_sgd_hook, sync_every=2),
        lossy=True,
        tolerance=math.inf,
        ranks_agree=False,
        refuses={"unused_parameters": "find_unused_parameters"},
        # It looks for torch's own class. Guard: tests/unit/averaging/test_averaging_state.py.
        untested={"synchronised_batch_norm": "refused"},
    ),
    "fp16": Row(of_torch(None, fp16_compress_hook), lossy=True, tolerance=2.0**15),
    "bf16": Row(of_torch(None, bf16_compress_hook), lossy=True, tolerance=2.0**18),
    "int4": Row(
        alone(ddp.CompressedState, ddp.compressed_hook, codec=INT4),
        lossy=True,
        # A code errs by 1/14 of the largest magnitude. The error has two codes and two residuals in
        # it, and the parameters of earlier steps already differ.
        tolerance=3.5 * 2.0**20,
        is_like_others=True,
        takes_scale=True,
        refuses=IN_DOUBLE,
        notes=KNOWS_SCALE,
    ),
    "low_rank": Row(
        alone(ddp.CompressedState, ddp.compressed_hook, codec=ddp.PowerSGD()),
        lossy=True,
        tolerance=math.inf,
        takes_scale=True,
        notes=KNOWS_SCALE,
    ),
    "owners_lossless": Row(owners_with(ddp.Lossless), **OWNERS),
    # Changes of parameters are rounded when they are taken and added.
    "owners_identity_codec": Row(
        owners_with(Identity),
        **{**OWNERS, "refuses": {**OWNERS["refuses"], "several_dtypes": "float16"}},
        lossy=True,
        tolerance=2.0**14,
    ),
    # With several buckets, or DDP's own all-reduce of a map of used parameters, ranks start
    # all-reduces in different orders, and gloo ends the process.
    "powersgd": Row(
        powersgd,
        options={"bucket_cap_mb": 25},
        lossy=True,
        tolerance=math.inf,
        untested={"unused_parameters": "may end the process over gloo, as with several buckets"},
    ),
}
ROWS: Final = {**HOOKS, **OF_MATRIX}
# The columns of the matrix in the documentation.
MATRIX: Final = {
    "`auto_hook`": "auto",
    "`decoupled_hook`": "decoupled",
    "`crossover_hook`": "crossover",
    "`compressed_hook`": "int8",
    "`kfac_hook`": "kfac",
    "`muon_hook`": "muon",
    "`owner_hook`": "owners",
    "`local_sgd_hook`": "local_sgd",
    "torch's fp16": "fp16",
    "torch's bf16": "bf16",
    "torch's PowerSGD": "powersgd",
}
# Its rows. Each is a situation of `cases.CASES`.
SITUATIONS: Final = {
    "`GradScaler`": "gradient_scaler",
    "`clip_grad_norm_`": "clipping",
    "EMA, each step": "average_each_step",
    "EMA, each k steps": "average_every_other_step",
    "accumulation, `no_sync()`": "accumulation",
    "… `require_backward_grad_sync`": "accumulation_by_flag",
    "`DDP(compile(net))`": "compiled_network",
    "`compile(DDP(net))`": "compiled_model",
    "compiled blocks": "compiled_blocks",
    "SyncBatchNorm": "synchronised_batch_norm",
    "bfloat16 parameters": "bfloat16_parameters",
    "unused parameters": "unused_parameters",
    "activation checkpointing": "reentrant_checkpointing",
}
# References that are not hooks of this package.
ORACLES: Final[dict[str, Row]] = {
    "fp16_compress_hook": Row(of_torch(None, fp16_compress_hook), order=None, takes_turns=False),
    "kfac_in_float64": Row(
        lambda model, optimizers, **scale: kfac_in_float64(model, optimizers[0], **KFAC, **scale),
        takes_turns=False,
        takes_scale=True,
    ),
}
