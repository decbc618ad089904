"""train.py with kfac-pytorch's preconditioner as a hook, and with ours, configured to match it.

    export KFAC_PYTORCH=../kfac-pytorch
    torchrun --nproc-per-node 2 recipes/studies/peer.py --hook kfac-pytorch --preset vit

``KFAC_PYTORCH`` is a checkout of https://github.com/gpauloski/kfac-pytorch, which is not in any
package registry.
"""

import argparse
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes' directory

import train
from _hooks import HOOKS, Hook
from crossover_ddp import DecoupledKFACState, KFACState, decoupled_hook, kfac_hook


def preconditioner() -> Any:
    """Import the package from its checkout. It reads its own version, but is not installed."""
    sys.path.insert(0, os.environ["KFAC_PYTORCH"])
    version = importlib.metadata.version
    known = {"kfac-pytorch": "checkout"}
    with mock.patch.object(
        importlib.metadata, "version", lambda name: known.get(name) or version(name)
    ):
        return importlib.import_module("kfac.preconditioner").KFACPreconditioner


def theirs(model: Any, optimizers: list[Any], args: argparse.Namespace) -> tuple[None, Hook]:
    """Make kfac-pytorch's preconditioner, with its fastest settings as measured.

    If solvers are updated in every step each layer has one owner, otherwise all ranks own it.
    """
    (optimizer,) = optimizers
    found = preconditioner()(
        model,
        lr=lambda _: optimizer.param_groups[0]["lr"],
        damping=args.damping,
        kl_clip=args.kl_clip,
        factor_update_steps=args.factor_update_steps,
        inv_update_steps=args.inv_update_steps,
        compute_method="inverse",
        grad_worker_fraction=1.0 if args.inv_update_steps > 1 else 1.0 / dist.get_world_size(),
        symmetry_aware=True,
    )
    optimizer.register_step_pre_hook(lambda *_: found.step())
    return None, allreduce_hook


def alike(model: Any, optimizers: list[Any], args: argparse.Namespace) -> KFACState:
    """Make a state with the same steps as kfac-pytorch.

    kfac-pytorch adds the damping to each factor, we add its square root.
    """
    return KFACState(
        model,
        optimizers,
        damping=args.damping**2,
        kl_clip=args.kl_clip,
        factor_update_steps=args.factor_update_steps,
        inv_update_steps=args.inv_update_steps,
        weight_sharing="kfac-pytorch",
        pi=False,
    )


HOOKS["kfac-pytorch"] = theirs
HOOKS["kfac-alike"] = lambda model, optimizers, args: (alike(model, optimizers, args), kfac_hook)
HOOKS["kfac-decoupled"] = lambda model, optimizers, args: (
    DecoupledKFACState(optimizers[0], alike(model, optimizers, args)),
    decoupled_hook,
)

if __name__ == "__main__":
    train.main()
