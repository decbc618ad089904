"""Decoupled training: gradients are gathered, and parameters updated, while the next forward runs.

After DeAR (arXiv 2302.12445): reduce-scatter during backward, all-gather during the next forward. Our design: the
order of the gathers, updates by the user's own optimizer, and guards against reading a parameter before its update.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import logging
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from crossover_ddp._exchange.ddp_checks import check_not_capturing, resolve_group
from crossover_ddp._exchange.hook import Pausable, guarded
from crossover_ddp._planning import BucketPlan
from crossover_ddp.gpu_mutex import GPUMutex, turns_disabled

from .interception import check_not_intercepted
from .partial_optimizer import check_separable
from .planning import plan_from
from .training import DecoupledTraining

logger = logging.getLogger(__name__)

_BUCKETS: Final = 16
_SMALLEST_BUCKET_BYTES: Final = 256 * 1024
_LARGEST_BUCKET_BYTES: Final = 25 * 2**20  # DDP's default


class DecoupledState(Pausable):
    """State of `decoupled_hook`: lets gradients arrive, and ``optimizer.step()`` take effect, in the next forward.

    The training loop stays as it is. ``optimizer.step()`` returns at once; each parameter is updated by the
    optimizer's own code, with the hyper-parameters of that moment, just before it is read for the
    first time: by a module's forward, ``state_dict()``, ``parameters()`` or ``module.weight``. Losses and
    parameters are those of plain DDP, to the last bit with one or two ranks, and up to the order of
    additions with more.

    What cannot be seen is a tensor taken earlier (``p = model.weight``) and read directly after ``step()``, and its
    ``p.grad`` between ``backward()`` and the next forward, which holds the mean only in parts. Call `flush` before.
    What is changed through them is refused, see docs/decoupled.md; ``CROSSOVER_CHECK=1`` looks harder, in every step.

    Args:
        optimizer: any torch optimizer that treats each parameter by itself, with all parameters of the model.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: take turns with sibling jobs: the turn is given away when backward's compute is done, and taken before
            the next forward's. Default: no turns.
        defer: "auto": try in some of the first thirty steps whether deferring is worth it, and keep what is faster for
            this model on this link; see `deferring`. "always": do not try. The results are the same either way.

    On failure: combinations that cannot work raise ``UnsupportedConfigurationError``, here or from the first
    ``backward()`` or ``step()``. When a peer dies, code that waits for its gradients gets ``ExchangeError``, in bounded
    time.

    **Collective**: every rank registers the hook. ``CROSSOVER_DISABLE=1`` makes it a plain all-reduce.

    Example::

        model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        defer: Literal["auto", "always"] = "auto",
    ) -> None:
        if defer not in ("auto", "always"):
            raise ValueError(f"expected defer='auto' or 'always', got defer={defer!r}; see DecoupledState")
        check_separable(optimizer)
        check_not_intercepted(optimizer)
        self.process_group = process_group
        self.optimizer = optimizer
        self.mutex = mutex
        self._training = DecoupledTraining(optimizer, mutex, always=defer == "always")
        self._stale = self._training.updates.stale

    # --- for users -------------------------------------------------------------------------------------------

    @staticmethod
    def ddp_options(model: nn.Module) -> dict[str, Any]:
        """Return arguments of ``DistributedDataParallel`` that suit decoupled training of ``model``.

        Gradients are views of the buckets, and a bucket holds a sixteenth of them, but at least 256 KiB and at most
        25 MiB: what is deferred must come in pieces, of which each costs processor time. `plan_buckets` finds a better
        size from measured steps.

        Args:
            model: the module that is going to be wrapped.

        Example::

            model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        """
        gradients_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        cap_bytes = min(max(gradients_bytes / _BUCKETS, _SMALLEST_BUCKET_BYTES), _LARGEST_BUCKET_BYTES)
        return {"gradient_as_bucket_view": True, "bucket_cap_mb": cap_bytes / 2**20}

    @property
    def deferring(self) -> bool | None:
        """Whether steps are deferred, the same on all ranks; None while that is being tried."""
        trial = self._training.trial
        return True if trial is None else trial.defers if trial.is_over else None

    def flush(self) -> None:
        """Finish what is under way: parameters and gradients are those of plain DDP afterwards. Not collective.

        Between ``backward()`` and ``step()`` it makes ``p.grad`` whole, for code that reads or changes
        gradients; after ``step()`` it applies the update.
        """
        self._training.flush()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_``; call it before ``step()``.

        Each rank looks at its own parts only; two numbers per rank are exchanged. The gradients are scaled when
        they are applied. If some rank has called `flush` since ``backward()``, all do, and each clips by itself.

        Args:
            max_norm: greatest norm that is left.
            norm_type: p of the p-norm; may be infinity.
            error_if_nonfinite: raise ``RuntimeError`` if the norm is infinite or not a number.

        Returns:
            The norm before clipping, the same on all ranks.

        **Collective**: all ranks of the job.
        """
        return self._training.clip(
            resolve_group(self.process_group), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def plan_buckets(self) -> BucketPlan:
        """Choose the size of DDP's buckets for this model on this link, from the steps so far and a few probes.

        Train some ten steps with small buckets first (``bucket_cap_mb`` of a fiftieth of the model: no plan can cut
        finer), then make a new ``DistributedDataParallel(model, **plan.ddp_options(), ...)`` of the same model.

        Returns:
            Rank 0's choice, the same on all ranks: the size of buckets, and the predicted seconds per step.

        On failure: raises ``UnsupportedConfigurationError`` on a GPU, where the host's clock does not tell when kernels
        run, and, on all ranks, as long as some rank has recorded no step whose updates all came in forward.

        **Collective**: all ranks of the job, between two steps.
        """
        self.flush()
        model = self._training.model()
        device = torch.device("cpu") if model is None else next(model.module.parameters()).device
        return plan_from(self._training.updates.times, resolve_group(self.process_group), device)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed job may take over: the order in which forward needs the parameters.

        Updates under way are applied first, so that model and optimizer may be saved right after.
        """
        self.flush()
        return {"forward_order": self._training.forward_order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; optional, since the first forward shows the same."""
        unknown = set(state) - {"forward_order"}
        if unknown or not isinstance(state.get("forward_order"), list):
            raise ValueError(
                f"expected a state dict with the list 'forward_order', got keys {sorted(state)}; "
                "pass what state_dict() returned"
            )
        self._training.take_order(list(state["forward_order"]))

    def close(self) -> None:
        """Finish what is under way and let the optimizer and the model go; later steps are those of the split hook.

        Not collective.
        """
        self._training.close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Stay behind when the model is copied or pickled, as its hook does: it acts for one optimizer only."""
        logger.warning(
            "a copied model trains without its DecoupledState; register a new one with its optimizer"
        )
        return _Nothing, ()


class _Nothing:
    """What a copied model has in the place of the state."""


def decoupled_hook(state: DecoupledState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start to average the bucket, and let backward go on; see `DecoupledState`.

    The bucket is reduce-scattered during backward and gathered when the wire is free, at the latest in the next
    forward. ``p.grad`` holds the mean from then on, or after `DecoupledState.flush`.

    Args:
        state: made once per model and optimizer.
        bucket: DDP's bucket.

    Returns:
        A future that is complete already.

    On failure: nothing leaves the hook; see `DecoupledState`.

    **Collective**: DDP calls it on all ranks in the same order. Source: after DeAR (arXiv 2302.12445); see the module.

    Example::

        model.register_comm_hook(DecoupledState(optimizer), decoupled_hook)
    """
    group = cast(dist.ProcessGroup, state.process_group)
    if turns_disabled():
        return allreduce_hook(group, bucket)

    def answer() -> torch.futures.Future[torch.Tensor]:
        check_not_capturing(bucket)
        return state._training.take(state, resolve_group(group), bucket)

    return guarded(bucket, answer, refused=state._training.break_round)
