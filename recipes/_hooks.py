"""The hooks that the training recipe offers, each with the state that it works on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState, elastic_hook, local_sgd_hook
from crossover_ddp.codecs import CompressedState, Int8, compressed_hook
from crossover_ddp.comm_hooks import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
MakeState = Callable[[nn.Module, Any, argparse.Namespace], tuple[object, Hook]]

# Every hook with the state that it works on.
HOOKS: dict[str, MakeState] = {
    "allreduce": lambda model, optimizer, args: (None, allreduce_hook),
    "rsag": lambda model, optimizer, args: (None, reduce_scatter_all_gather_hook),
    "crossover": lambda model, optimizer, args: (CrossoverState(), crossover_hook),
    "compressed": lambda model, optimizer, args: (CompressedState(codec=Int8()), compressed_hook),
    "decoupled": lambda model, optimizer, args: (DecoupledState(optimizer), decoupled_hook),
    "local_sgd": lambda model, optimizer, args: (
        LocalSGDState(args.sync_every, args.delay, args.fragments, args.local_after),
        local_sgd_hook,
    ),
    "elastic": lambda model, optimizer, args: (
        ElasticState(args.sync_every, args.elastic_mode),
        elastic_hook,
    ),
    "kfac": lambda model, optimizer, args: (
        KFACState(
            model,
            optimizer,
            damping=args.damping,
            kl_clip=args.kl_clip or None,
            factor_update_steps=args.factor_update_steps,
            inv_update_steps=args.inv_update_steps,
            factors=args.factors,
        ),
        kfac_hook,
    ),
    "muon": lambda model, optimizer, args: (MuonState(optimizer.muon), muon_hook),
}
KEEPING = (ElasticState, KFACState, LocalSGDState)
AVERAGING = ("local_sgd", "elastic")
