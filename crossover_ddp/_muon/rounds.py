"""Muon's backward passes: what each of DDP's buckets sends, and what waits for the step."""

import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from crossover_ddp._ddp.checks import flat_gradients, model_of
from crossover_ddp._exchange.contents import contents_of
from crossover_ddp._exchange.muon_direction import DirectionSettings
from crossover_ddp._exchange.transfer import Payload
from crossover_ddp.errors import UnsupportedConfigurationError

from .memory import Memory
from .momentum import OwnedMomentum
from .payload import BucketMatrix, MuonPayload, MuonPlan, MuonRound


class MuonRounds:
    """Makes the payload of each bucket; holds what a backward pass has brought until the step.

    Args:
        matrices: the parameters with an owner.
        owners: rank of each.
        rank, world_size: of this process.
        momentum: of the matrices that this rank owns.
        settings: returns those of each matrix at this moment.
        loss_scale: returns what the loss is multiplied by.
        keeps_turn: see `MuonPlan`.
        state: that the hook is registered with.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        owners: Sequence[int],
        rank: int,
        world_size: int,
        momentum: OwnedMomentum,
        *,
        settings: Callable[[], list[DirectionSettings]],
        loss_scale: Callable[[], float],
        keeps_turn: bool,
        state: object,
    ) -> None:
        self._matrices = matrices
        self._owners = owners
        self._rank = rank
        self._world_size = world_size
        self._momentum = momentum
        self._settings = settings
        self._loss_scale = loss_scale
        self._keeps_turn = keeps_turn
        self._state = weakref.ref(state)
        self._index_of = {id(matrix): index for index, matrix in enumerate(matrices)}
        self._is_checked = False
        self._round: MuonRound | None = None
        self._memory = Memory()
        self._calls = 0
        self.waiting: MuonRound | None = None
        self.latest: MuonRound | None = None

    # --- a step ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The step's last bucket was handed out, or refused."""
        ended, self._round = self._round, None
        if ended is not None:
            self.waiting = self.latest = ended

    def take(self) -> MuonRound | None:
        """Return what waits for a step, which waits no longer."""
        waiting, self.waiting = self.waiting, None
        return waiting

    def _begin(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> MuonRound:
        self._check_waiting()
        if not self._is_checked:
            self._check_model(bucket)
            self._is_checked = True
        self._calls = self.calls_so_far
        self._memory.begin()
        plan = MuonPlan(
            self._rank,
            self._world_size,
            self._owners,
            self._matrices,
            self._settings(),
            power_of_two(self._loss_scale()),
            self._keeps_turn,
        )
        self.latest = None
        return MuonRound(plan)

    @property
    def calls_so_far(self) -> int:
        """Number of directions that this rank has computed."""
        return self._calls + (0 if self.latest is None else self.latest.calls)

    def _check_waiting(self) -> None:
        waiting = self.waiting
        if waiting is None or not waiting.directions:
            return
        if all(math.isfinite(float(norm)) for norm in waiting.squared_norms.values()):
            raise UnsupportedConfigurationError(
                "expected muon.step() between two exchanges, got a second backward() without it; accumulate gradients "
                "in model.no_sync(), or drop them by muon.zero_grad() if the step is to be skipped"
            )
        self.waiting = None  # not finite, and skipped therefore

    # --- a bucket --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def payload(self, bucket: dist.GradBucket, group: dist.ProcessGroup) -> Payload:
        """Return what travels in the bucket's place."""
        buffer = flat_gradients(bucket)
        if self._round is None or bucket.index() == 0:
            self._round = None
            self._round = self._begin(bucket, group)
        matrices, passing = [], []
        for parameter, _, span in contents_of(bucket, buffer):
            index = self._index_of.get(id(parameter))
            if index is None:
                passing.append(span)
            else:
                matrices.append(BucketMatrix(index, span))
        lender = self._memory.lender(buffer, bucket.index())
        made = MuonPayload(self._round, self._momentum, buffer, matrices, tuple(passing), lender)
        return made.payload()

    @property
    def nbytes(self) -> int:
        """Memory of the buffers that travel, directions among them."""
        return self._memory.nbytes

    # --- checks at the first bucket ----------------------------------------------------------------------------

    def _check_model(self, bucket: dist.GradBucket) -> None:
        model = model_of(bucket, state=self._state())
        if model is None:
            return
        known = {id(parameter) for parameter in model.module.parameters()}
        foreign = [each for each in self._matrices if each.requires_grad and id(each) not in known]
        if foreign:
            raise UnsupportedConfigurationError(
                f"expected the matrices of one DDP model in Muon, got {len(foreign)} that the model with this hook "
                f"does not have, one of shape {tuple(foreign[0].shape)}; make a Muon and a MuonState for each model"
            )


def power_of_two(scale: float) -> float:
    """Return ``scale`` if no rounding can come from it; raise ``ValueError`` otherwise."""
    if not (0 < scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(
            f"expected a loss_scale that is a power of two, got loss_scale={scale}; another one rounds gradients, and "
            "so turns directions: GradScaler's init_scale, growth_factor and backoff_factor must be powers of two"
        )
    return float(scale)
