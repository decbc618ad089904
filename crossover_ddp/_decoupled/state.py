"""Decoupled training: gradients are gathered, and parameters updated, while the next forward runs.

After DeAR (arXiv 2302.12445): reduce-scatter during backward, all-gather during the next forward. Our design: the
order of the gathers, updates by the user's own optimizer, and guards against reading a parameter before its update.
"""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from crossover_ddp._compression.compression import Compression, around, state_of
from crossover_ddp._compression.planning import CANDIDATES, AnyCodec, CodecPlan
from crossover_ddp._compression.planning import plan_from as plan_codec_from
from crossover_ddp._ddp.checks import check_not_capturing, resolve_group
from crossover_ddp._ddp.compiled import compiled_modules, uncompiled
from crossover_ddp._engine.buckets import Agreement, Pausable, check_state, guarded
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._owners.optimizer import check_not_intercepted, check_separable
from crossover_ddp._tuning.model import BucketPlan, decoupled_step_s
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex, turns_disabled

from .deferrable import Deferrable, check_deferrable
from .owned_training import OwnedTraining
from .planning import plan_from, workload_of
from .training import DecoupledTraining

logger = logging.getLogger(__name__)

_BUCKETS: Final = 16
_SMALLEST_BUCKET_BYTES: Final = 256 * 1024
_SMALLEST_COMPILED_BUCKET_BYTES: Final = (
    2**20
)  # DDP's default for the first one, which dynamo takes for granted
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
        optimizer: any torch optimizer that treats each parameter by itself, with all parameters of the model; with
            ``owners="layers"`` also several, which have them together.
        process_group: the ranks of the job; must be the group of the DDP model. Default: the default group.
        mutex: take turns with sibling jobs: the turn is given away when backward's compute is done, and taken before
            the next forward's. Default: no turns.
        defer: "auto": try in some of the first thirty steps whether deferring is worth it, and keep what is faster for
            this model on this link; see `deferring`. "always": do not try. The results are the same either way.
        codec: compresses both halves, with error feedback; one for both, or a pair: to owners, to all. Such as
            ``crossover_ddp.codecs.Int8()``; see `CompressedState`. Parameters are then not those of plain DDP, but the
            same on all ranks to the last bit. Default: none.
        loss_scale: for ``codec``: what the loss is multiplied by before ``backward()``, such as ``scaler.get_scale``.
        owners: None: every rank updates every parameter. "layers": each parameter has an owner, which alone runs the
            optimizer on it and keeps its state; updated parameters travel instead of gradients. The bytes are the same,
            work and state are divided by the number of ranks, ``defer`` has no effect. For SOAP, Shampoo, Muon and
            other optimizers that work on whole matrices, and for AdamW with less memory; see docs/owners.md. Of a
            ``torch.optim.Muon`` directions travel, in bfloat16, and are applied when they arrive: 0.75 of the bytes.
        kfac: a new ``KFACState(model, optimizer)`` of the same process group and mutex: layers are preconditioned on
            their owners when backward has reduced them, and directions are gathered in the next forward. The training
            is that of ``kfac_hook``, to the last bit; ``defer`` has no effect. Its own methods, such as its state dict,
            stay in use. See docs/kfac.md. Default: none.
        compare_replicas: compare the ranks' parameters after 1, 2, 4, … steps and every thousand, by eight bytes; a
            difference raises ``ReplicasDifferError`` from ``backward()``.

    With owners, gradients are NaN after ``backward()``, since only the owner has the mean: clip by `clip_grad_norm_`;
    `flush` does not fill them. Call `consolidate` on all ranks before ``optimizer.state_dict()``.

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
        optimizer: Optimizer | Sequence[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        mutex: GPUMutex | None = None,
        defer: Literal["auto", "always"] = "auto",
        codec: AnyCodec = None,
        loss_scale: float | Callable[[], float] = 1.0,
        owners: Literal["layers"] | None = None,
        kfac: Deferrable | None = None,
        compare_replicas: bool = True,
    ) -> None:
        if defer not in ("auto", "always"):
            raise ValueError(f"expected defer='auto' or 'always', got defer={defer!r}; see DecoupledState")
        optimizers = _checked(optimizer, owners)
        self.process_group = process_group
        self.compare_replicas = compare_replicas
        self.optimizer = optimizer
        self.mutex = mutex
        if codec is not None and owners is not None:
            raise UnsupportedConfigurationError(
                f"expected codec=None with owners={owners!r}, got codec={codec!r}: updated parameters travel, whose "
                "rounding no residual would mend; use one of both"
            )
        if kfac is not None:
            check_deferrable(kfac, process_group=process_group, mutex=mutex, codec=codec, owners=owners)
        self.codec = codec
        self.agreement = Agreement()
        self._kfac = kfac
        self._settings = {"codec": codec, "defer": defer, "owners": owners, "kfac": kfac is not None}
        self._compression = None if codec is None else Compression(codec, loss_scale, self)
        self._is_disabled = turns_disabled()
        self._training: DecoupledTraining
        if owners is not None and not self._is_disabled:
            self._training = OwnedTraining(optimizers, mutex, resolve_group(process_group))
        else:
            if self._is_disabled:
                kfac = None
            if kfac is not None:
                kfac.defer(self, self.flush)
            self._training = DecoupledTraining(
                optimizers,
                mutex,
                around=lambda bucket, group: around(self._compression, bucket, group),
                kfac=kfac,
                always=kfac is not None or defer == "always",
            )

        self.take = uncompiled(self._take)  # backward may have been called by compiled code

    def _take(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        with Exchange.of(group).comparing(bucket, self, self.compare_replicas):
            return self._training.take(self, group, bucket)

    def _said(self) -> dict[str, object]:
        """Return what all ranks must have in common."""
        owned = self._training.said() if isinstance(self._training, OwnedTraining) else {}
        return {**self._settings, **owned, **({} if self._kfac is None else self._kfac.said())}

    # --- for users -------------------------------------------------------------------------------------------

    @staticmethod
    def ddp_options(model: nn.Module, *, compiled: bool | None = None) -> dict[str, Any]:
        """Return arguments of ``DistributedDataParallel`` that suit decoupled training of ``model``.

        Gradients are views of the buckets, and a bucket holds a sixteenth of them, but at least 256 KiB and at most
        25 MiB: what is deferred must come in pieces, of which each costs processor time. `plan_buckets` finds a better
        size from measured steps.

        Args:
            model: the module that is going to be wrapped.
            compiled: whether something of it is compiled while it is wrapped: torch then wants buckets of 1 MiB at
                least. None: look whether something of it is compiled by now; say True for ``torch.compile(ddp)``.

        Example::

            model = DistributedDataParallel(model, **DecoupledState.ddp_options(model))
        """
        gradients_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        if compiled is None:
            compiled = any(True for _ in compiled_modules(model))
        smallest_bytes = _SMALLEST_COMPILED_BUCKET_BYTES if compiled else _SMALLEST_BUCKET_BYTES
        cap_bytes = min(max(gradients_bytes / _BUCKETS, smallest_bytes), _LARGEST_BUCKET_BYTES)
        return {"gradient_as_bucket_view": True, "bucket_cap_mb": cap_bytes / 2**20}

    @property
    def owners(self) -> tuple[int, ...] | None:
        """Rank of each parameter in the order of the optimizers' groups; None without ``owners="layers"``."""
        return self._training.owned.owners if isinstance(self._training, OwnedTraining) else None

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

        Each rank looks at its own parts only; three numbers per rank are exchanged. The gradients are scaled when
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
        run, and, on all ranks, as long as some rank has recorded no step whose updates all came in forward. With owners
        too: gathers begin later there than the plan's model knows.

        **Collective**: all ranks of the job, between two steps.
        """
        self._check_plannable(
            "plan for", "choose bucket_cap_mb by hand: a sixteenth of the model is a good start"
        )
        self.flush()
        model = self._training.model()
        device = torch.device("cpu") if model is None else next(model.module.parameters()).device
        return plan_from(self._training.updates.times, resolve_group(self.process_group), device)

    def drain(self) -> None:
        """Let the next step travel exact, residuals included; see `CompressedState.drain`. **Collective**."""
        if self._compression is not None:
            self._compression.drain()

    def stats(self) -> dict[str, Any]:
        """Tell what is deferred: "deferred", buckets whose updates are still to come; "steps_deferred". Not collective.

        "steps_deferred" counts the steps whose updates did not come within ``optimizer.step()``, since the state was
        made. With a codec also "codec", what `CompressedState.stats` returns.
        """
        updates = self._training.updates
        coded = {} if self._compression is None else {"codec": self._compression.stats()}
        return {"deferred": updates.pending, "steps_deferred": updates.steps, **coded}

    def plan_codec(self, candidates: Sequence[AnyCodec] = CANDIDATES) -> CodecPlan:
        """Choose a codec; see `CompressedState.plan_codec`. Not with ``kfac`` or ``owners``. **Collective**."""
        self._check_plannable("plan a codec for", "use kfac_hook with codec=, or owners=None")
        self.flush()
        group = resolve_group(self.process_group)
        workload = workload_of(self._training.updates.times)
        return plan_codec_from(
            workload, group, present=self.codec, candidates=candidates, predict=decoupled_step_s
        )

    def _check_plannable(self, purpose: str, remedy: str) -> None:
        if isinstance(self._training, OwnedTraining) or self._training.kfac is not None:
            raise UnsupportedConfigurationError(
                f"expected a state without owners or kfac to {purpose}, got one with them, which do more between the "
                f"halves than the plan's model knows; {remedy}"
            )

    def consolidate(self, to: int | None = None) -> None:
        """Bring what owners keep into the optimizers' state, where it stays until the next step.

        Without ``owners="layers"`` it is there already.

        Args:
            to: the rank of the group that gets all of it; None: all ranks do.

        On failure: ``ValueError`` if there is no such rank; what torch's collectives raise when a peer has died.

        **Collective**: all ranks, between two steps.

        Example::

            state.consolidate(to=0)
            if rank == 0:
                torch.save(optimizer.state_dict(), path)
        """
        if isinstance(self._training, OwnedTraining):
            self._training.consolidate(resolve_group(self.process_group), to)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that this rank keeps with ``owners="layers"``: "state", "buffers". Not collective."""
        return self._training.memory_usage() if isinstance(self._training, OwnedTraining) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the order in which forward needs the parameters, which the next job finds out by itself.

        Updates under way are applied first, so that model and optimizer may be saved right after. With a codec also
        this rank's residuals, under "codec": different on each rank; after `drain` and a step there are none.
        """
        self.flush()
        coded = {} if self._compression is None else {"codec": state_of(self._compression)}
        return {"forward_order": self._training.forward_order(), **coded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned: the residuals of a codec."""
        unknown = set(state) - {"forward_order", "codec"}
        if unknown or not isinstance(state.get("forward_order"), list):
            raise ValueError(
                f"expected a state dict with the list 'forward_order', got keys {sorted(state)}; "
                "pass what state_dict() returned"
            )
        if self._compression is not None and "codec" in state:
            self._compression.load(state["codec"]["residuals"], state["codec"]["loss_scale"])

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


def _checked(optimizer: Optimizer | Sequence[Optimizer], owners: str | None) -> tuple[Optimizer, ...]:
    """Return the optimizers; refuse those that do not treat parameters one by one, or have a state already."""
    if owners not in (None, "layers"):
        raise ValueError(f"expected owners=None or 'layers', got owners={owners!r}; see DecoupledState")
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not optimizers:
        raise ValueError("expected at least one optimizer, got optimizer=(); pass those of the model")
    for each in optimizers:
        check_separable(each)
        check_not_intercepted(each)
    if owners is None and len(optimizers) > 1:
        raise UnsupportedConfigurationError(
            f"expected one optimizer with owners=None, got {len(optimizers)}; pass owners='layers', or one optimizer "
            "with several parameter groups"
        )
    return optimizers


class _Nothing:
    """What a copied model has in the place of the state."""


def decoupled_hook(state: DecoupledState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start to average the bucket, and let backward go on; see `DecoupledState`.

    The bucket is reduce-scattered during backward. Gathers begin by themselves when the last bucket is reduced, its own
    first; the next forward only waits for them, and updates. ``p.grad`` holds the mean from then on, or after
    `DecoupledState.flush`. A step that is not deferred goes the split hook's way.

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

    def answer() -> torch.futures.Future[torch.Tensor]:
        check_state(
            state, DecoupledState, "pass DecoupledState(optimizer), or register the hook of that state"
        )
        group = resolve_group(cast(dist.ProcessGroup, state.process_group))
        state.agreement.make(group, state._said)
        if state._is_disabled:
            return allreduce_hook(group, bucket)
        check_not_capturing(bucket)
        return state.take(group, bucket)

    def refused() -> None:
        if isinstance(state, DecoupledState):
            state._training.break_round()

    return guarded(bucket, answer, refused=refused)
