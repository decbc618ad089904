"""What the states of both averaging hooks have in common."""

# No ``from __future__ import annotations`` here: DDP compares the annotation objects of a hook.

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp._ddp.checks import check_not_capturing, resolve_group
from crossover_ddp._engine.hook import Pausable, check_state, guarded
from crossover_ddp._tuning.link_probe import measure_link
from crossover_ddp._tuning.model import AveragingPlan, plan_averaging
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.gpu_mutex import GPUMutex, turns_disabled

from .replica import Replica, Rule

logger = logging.getLogger(__name__)


class AveragingState(Pausable):
    """A model whose parameters are averaged between steps; `LocalSGDState` and `ElasticState` say how."""

    def __init__(self, rule: Rule, process_group: dist.ProcessGroup | None, mutex: GPUMutex | None) -> None:
        self.process_group = process_group
        self.mutex = mutex
        self._replica = Replica(rule, mutex)

    def average(self) -> None:
        """Replace every rank's parameters and floating-point buffers by their mean over the ranks.

        What is in flight is applied first. Call it between two steps: at the end of training, or before a checkpoint
        of which training shall go on to the last bit. Integer buffers stay each rank's own.

        On failure: ``ExchangeError`` when a peer dies or the group's timeout passes;
        ``UnsupportedConfigurationError`` if the mean is not finite, or before the first ``backward()``.

        **Collective**: all ranks, after as many steps.
        """
        self._replica.average()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model hold the mean during the block, for evaluation or a checkpoint, and its own values after it.

        Training goes on as if the block had not been there. It takes a copy of the parameters. Failures are those of
        `average`. **Collective**: all ranks enter it, after as many steps.

        Example::

            with state.averaged():
                torch.save(model.module.state_dict(), path)
        """
        with self._replica.averaged():
            yield

    def plan(self) -> AveragingPlan:
        """Choose ``sync_every``, ``delay`` and ``fragments`` for this model on this link.

        From the steps so far and a few probes of the link, five megabytes in all. What longer intervals cost in
        convergence is not in it: it takes the shortest for which no step waits.

        Returns:
            Rank 0's plan, the same on all ranks.

        On failure: ``UnsupportedConfigurationError`` on a GPU, where the host's clock does not tell when kernels run,
        and before two steps were made.

        **Collective**: all ranks, between two steps, with nothing else on the wire.
        """
        replica, group = self._replica, resolve_group(self.process_group)
        if any(block.device.type != "cpu" for block in replica.blocks):
            raise UnsupportedConfigurationError(
                "expected a model on the CPU, got one on a device whose kernels the host's clock does not see; "
                "measure C and M with `crossover-ddp advise`"
            )
        if replica.means is None or group.size() == 1:
            raise UnsupportedConfigurationError(
                "expected a model that has trained on several ranks, got none; train some steps first"
            )
        link = measure_link(group)
        known = replica.means.exchange.gather_numbers(
            [link.alpha_s, link.beta_s, replica.compute_s or 0.0], torch.device("cpu")
        )
        slowest_s = max(numbers[2] for numbers in known)
        if min(numbers[2] for numbers in known) == 0.0:
            raise UnsupportedConfigurationError(
                "expected recorded steps on all ranks, got none on some rank; train some steps first"
            )
        size_bytes = sum(block.nbytes for block in replica.blocks)
        return plan_averaging(slowest_s, size_bytes, type(link)(known[0][0], known[0][1]))

    def stats(self) -> dict[str, Any]:
        """Return counters of this rank: steps, exchanges, their bytes, and seconds spent waiting. Not collective."""
        return self._replica.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, and what is kept beside the model, by the parameters' names, on the host.

        The same on all ranks, so that any rank can save it, and any number of ranks resume from it. Exchanges in
        flight are not in it: save inside of `averaged`, or after `average`, where the parameters contain them.

        **Collective**: all ranks, between two steps.
        """
        return self._replica.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called; on all ranks, before the first ``backward()``. Not collective.

        A rank that has not loaded what the others have is refused at the next ``backward()``, on all ranks. Raises
        ``ValueError`` for the state of another model or of other arguments.
        """
        self._replica.load_state_dict(state)

    def close(self) -> None:
        """Let the model go; later backward passes average gradients as the split hook does. Call `average` before.

        Not collective, but all ranks must, after as many steps.
        """
        self._replica.close()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Stay behind when the model is copied or pickled, as its hook does: it acts for one model only."""
        logger.warning("a copied model trains without its averaging state; register a new one")
        return _LeftBehind, ()


class _LeftBehind:
    """What a copied model has in the place of the state."""


def answer_bucket(
    state: AveragingState, bucket: dist.GradBucket, kind: type[AveragingState]
) -> torch.futures.Future[torch.Tensor]:
    """Answer for both hooks, whose state is of ``kind``."""

    def answer() -> torch.futures.Future[torch.Tensor]:
        check_state(state, kind, "register the hook of that state, or make another one")
        group = resolve_group(cast(dist.ProcessGroup, state.process_group))
        if turns_disabled():
            state._replica.agreement.make(group, dict)
            return allreduce_hook(group, bucket)
        check_not_capturing(bucket)
        return state._replica.take(state, group, bucket)

    return guarded(bucket, answer)
