"""The hooks of the training recipe, each with a function that makes its state."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from crossover_ddp import (
    AutoState,
    CompressedState,
    CrossoverState,
    DecoupledState,
    ElasticState,
    Half,
    Int4,
    Int8,
    KFACState,
    LocalSGDState,
    MuonState,
    PowerSGD,
    SIDCo,
    auto_hook,
    compressed_hook,
    crossover_hook,
    decoupled_hook,
    elastic_hook,
    kfac_hook,
    local_sgd_hook,
    muon_hook,
    reduce_scatter_all_gather_hook,
)

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
MakeState = Callable[[nn.Module, list[Any], argparse.Namespace], tuple[object, Hook]]

CODECS: dict[str, Any] = {
    "int8": Int8(),
    "int4": Int4(),
    "half": Half(),
    "sidco": SIDCo(0.01),
    "powersgd": PowerSGD(),
}

# By name: a function that makes the state, and returns it with the hook.
HOOKS: dict[str, MakeState] = {
    "allreduce": lambda model, optimizers, args: (None, allreduce_hook),
    "fp16": lambda model, optimizers, args: (None, fp16_compress_hook),
    # On gloo the collectives of several buckets mix. Use one bucket, with --bucket-cap-mb.
    "powersgd": lambda model, optimizers, args: (
        PowerSGDState(None, 2, start_powerSGD_iter=2),
        powerSGD_hook,
    ),
    "rsag": lambda model, optimizers, args: (None, reduce_scatter_all_gather_hook),
    "crossover": lambda model, optimizers, args: (CrossoverState(), crossover_hook),
    "compressed": lambda model, optimizers, args: (
        CompressedState(CODECS[args.codec or "int8"]),
        compressed_hook,
    ),
    "auto": lambda model, optimizers, args: (AutoState(optimizers[0]), auto_hook),
    "auto_rounded": lambda model, optimizers, args: (
        AutoState(optimizers[0], losses="rounded"),
        auto_hook,
    ),
    "auto_any": lambda model, optimizers, args: (
        AutoState(optimizers[0], losses="any"),
        auto_hook,
    ),
    "decoupled": lambda model, optimizers, args: (
        DecoupledState(optimizers[0], codec=CODECS.get(args.codec)),
        decoupled_hook,
    ),
    "local_sgd": lambda model, optimizers, args: (
        LocalSGDState(
            args.sync_every,
            args.delay,
            args.fragments,
            args.local_after,
            codec=CODECS.get(args.codec),
            optimizer=optimizers,
        ),
        local_sgd_hook,
    ),
    "elastic": lambda model, optimizers, args: (
        ElasticState(args.sync_every, args.elastic_mode),
        elastic_hook,
    ),
    "kfac": lambda model, optimizers, args: (
        KFACState(
            model,
            optimizers,
            damping=args.damping,
            kl_clip=args.kl_clip or None,
            factor_update_steps=args.factor_update_steps,
            inv_update_steps=args.inv_update_steps,
            factors=args.factors,
        ),
        kfac_hook,
    ),
    "muon": lambda model, optimizers, args: (MuonState(optimizers[0]), muon_hook),
}
