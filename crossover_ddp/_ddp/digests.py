"""Compares the parameters of all ranks, in some steps. Our design.

[Note: digests] In a model's steps 1, 2, 4, 8, … and in every thousandth step, each rank sums the
bits of its parameters. The ranks' sums travel behind the last bucket of the next step. They take
only a few bytes: one number for trained parameters and one for frozen ones. A rank that does not
know its model, or that is not to compare, sends 0, and then nothing is compared. So all ranks send
equally often, whatever each of them knows.

[Note: moments] Parameters may differ on purpose while gradients travel. SAM perturbs them by each
rank's own gradient. Adversarial weight perturbation and weight noise perturb them too. All of these
restore the parameters before ``step()``, or in it. So ranks sum at several moments, see `Moment`,
and only a difference at all of them is an error. If no optimizer has stepped (a GradScaler skips, a
script updates by hand), the next steps are compared as well. From then on the beginning of forward
is a moment too.

With owners the end of ``step()`` is not a moment: the step sends the owners' values to all ranks,
whatever values these had before.

Frozen parameters that differ only cause a warning. DDP does not train them, and adapters that are
merged and taken out again leave a rounding error.
"""

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._system import environment, torch_private
from crossover_ddp.errors import ReplicasDifferError

from .checks import is_joined, model_of, named_parameters_of, unknown_to_ddp, weakly
from .compiled import OwnHook, uncompiled
from .shards import own_part

logger = logging.getLogger(__name__)

COMPARED_EVERY: Final = 1000
_NAMED: Final = 3  # the number of parameters that an error names
_STEPS_WITHOUT_OPTIMIZER: Final = 3  # steps to compare until a difference counts without step()
_KINDS: Final = 2  # one digest for trained parameters, one for frozen ones
# A function that sends an object to all ranks, and returns the objects of all ranks.
GatherObjects = Callable[[Any], list[Any]]


class Moment(enum.IntEnum):
    """The points in time at which parameters are summed.

    They lie between the last bucket of the compared step and the last bucket of the next step. They
    are in order of preference: an error names the parameters that differ at the first of them.
    """

    STEP_BEGINS = 0  # an optimizer's step() begins, the first time
    STEP_ENDS = 1  # an optimizer's step() ends, the last time
    FORWARD_BEGINS = 2  # the first forward begins; only where no optimizer has stepped before
    IN_BACKWARD = 3  # the hook has the last bucket


def is_compared(step: int) -> bool:
    """Return whether parameters are compared in ``step``, see [Note: digests]."""
    return step & (step - 1) == 0 or step % COMPARED_EVERY == 0


class Sums(NamedTuple):
    """The sums of all parameters' bits at one moment, with the parameters' names."""

    names: Sequence[str]
    is_trained: Sequence[bool]
    values: Tensor

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], device: torch.device) -> "Sums":
        """Sum the bits of ``parameters``, whose keys are names. The sums are on ``device``."""
        values = [fingerprint(each).to(device) for each in parameters.values()]
        trained = [each.requires_grad for each in parameters.values()]
        return cls([*parameters], trained, torch.stack(values))

    def digests(self) -> Tensor:
        """Return one number for trained parameters and one for frozen ones. Neither is 0."""
        device = self.values.device
        # The factors are odd and all different, so that the digest changes if values change places.
        factors = torch.arange(1, 2 * len(self.values), 2, device=device)
        trained = torch.tensor(self.is_trained, device=device)
        both = torch.stack([(self.values * factors * mask).sum() for mask in (trained, ~trained)])
        return both + (both == 0)


class Digests:
    """Compares one model's parameters between ranks, see [Note: digests]."""

    def __init__(self) -> None:
        # The number of steps that the model has taken so far.
        self.steps = 0
        # The comparison whose sums are still to be sent.
        self.comparison: Comparison | None = None
        # None until the model was searched for, which happens once. Then a function, which returns
        # None if the model has gone or gc.freeze() has hidden it.
        self._ddp: Callable[[], DistributedDataParallel | None] | None = None
        self._has_warned = False

    def exchanged(
        self,
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        state: object,
        begin: Callable[..., Any],
        at_each_step: Callable[..., Any],
    ) -> Callable[[GatherObjects], None] | None:
        """Send the previous step's sums if it was compared, and begin to sum if this step is.

        Call it in the hook of a step's last bucket, if there is a ``comparison`` or if
        `is_compared` is true for the step.

        Args:
            bucket: the last bucket of a step.
            group: the process group whose ranks are compared.
            state: the hook's state. Its ``compare_replicas`` decides whether parameters are
                compared. If that is missing or None, ``CROSSOVER_COMPARE_REPLICAS`` decides.
            begin: the method `Exchange.begin`.
            at_each_step: the function `at_each_step` in ``_engine/observe.py``.

        Returns:
            None if nothing was sent. Otherwise a function that examines the digests of all ranks.
            If trained parameters differ, it raises on all ranks. All ranks of ``group`` must call
            it.
        """
        look = None
        if self.comparison is not None:
            look = self._send(self.comparison, bucket, group, begin)
        self.comparison = None
        if is_compared(self.steps):
            model = self._compared_model(bucket, state)
            self.comparison = Comparison(self.steps, model, bucket.buffer().device, at_each_step)
        return look

    def _send(
        self,
        comparison: "Comparison",
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        begin: Callable[..., Any],
    ) -> Callable[[GatherObjects], None]:
        sums_at = dict(comparison.sums_at)
        table = torch.zeros(
            group.size(), len(Moment), _KINDS, dtype=torch.int64, device=bucket.buffer().device
        )
        for moment, sums in sums_at.items():
            table[group.rank(), moment] = sums.digests()
        flat = table.flatten()
        layout = [len(Moment) * _KINDS] * group.size()
        name = f"the digests of step {comparison.step}"
        trip = begin(lambda link: link.all_gather(flat, layout), flat, name, deferred=True)

        def look(gather_objects: GatherObjects) -> None:  # must not keep the group alive
            trip.wait()
            found = _Found(flat.view(table.shape).tolist())
            if not comparison.is_settled_by(found):
                if self.comparison is not None:
                    self.comparison.end()
                self.comparison = comparison
                comparison.sum_again()
                return
            comparison.end()
            if found.differs:
                self._report(comparison.step, sums_at.get(found.first), gather_objects)

        return look

    def _compared_model(
        self, bucket: dist.GradBucket, state: object
    ) -> DistributedDataParallel | None:
        """Return the model, or None if it was not found or must not be compared."""
        wanted = getattr(state, "compare_replicas", None)
        if wanted is None:
            wanted = environment.is_set(environment.COMPARE_REPLICAS, default="1")
        if self._ddp is None:
            self._ddp = weakly(model_of(bucket, state=state))
        return self._ddp() if wanted else None

    def _report(self, step: int, sums: Sums | None, gather_objects: GatherObjects) -> None:
        """Raise on all ranks, or warn if only frozen parameters differ. **Collective**.

        ``sums`` has this rank's sums at the first moment at which all ranks have summed.
        """
        model = None if self._ddp is None else self._ddp()
        unknown = unknown_to_ddp(model) if model is not None else ()
        assert sums is not None
        values = dict(zip(sums.names, sums.values.tolist(), strict=True))
        trained = dict(zip(sums.names, sums.is_trained, strict=True))
        differing = _differing(gather_objects((values, trained, unknown)))
        if any(each.is_trained for each in differing):
            _raise(step, [each for each in differing if each.is_trained])
        if differing and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "frozen parameters differ between ranks since step %d at the latest: %s. DDP does "
                "not send them, and training continues with each rank's own; if adapters were "
                "merged into them and taken out again, restore them from a copy",
                step,
                _listed([each.name for each in differing]),
            )


class Comparison:
    """The sums of a step's parameters at several moments, see [Note: moments].

    Create it in the hook of the step's last bucket.

    Args:
        step: the number of the step that is compared.
        model: the model whose parameters are summed; None if this rank sums nothing.
        device: the device that holds the sums.
        at_each_step: the function `at_each_step` in ``_engine/observe.py``.
    """

    def __init__(
        self,
        step: int,
        model: DistributedDataParallel | None,
        device: torch.device,
        at_each_step: Callable[..., Any],
    ) -> None:
        self.step = step
        self._model: Callable[[], DistributedDataParallel | None] = weakly(model)
        self._device = device
        # A moment is missing where this rank has not summed.
        self.sums_at: dict[Moment, Sums] = {}
        # How often the ranks have compared their sums. They do so once a step, until the comparison
        # is settled.
        self._times_compared = 0
        # Functions that remove the hooks of this comparison.
        self._leave: list[Callable[[], object]] = []
        if model is not None:
            self._sum(Moment.IN_BACKWARD)
            parameters = [each for _, each in named_parameters_of(model.module) if each is not None]
            self._leave.append(
                at_each_step(parameters, begins=self._on_step_begin, ends=self._on_step_end)
            )

    def sum_again(self) -> None:
        """Keep summing up to the last bucket of the next step, and also when forward begins."""
        self.sums_at.clear()
        model = self._model()
        if model is not None and self._times_compared == 1:
            before = OwnHook(uncompiled(self._on_forward))
            self._leave.append(model.register_forward_pre_hook(before, prepend=True).remove)

    def is_settled_by(self, found: "_Found") -> bool:
        """Return whether this comparison is conclusive. Call it once per exchange of sums."""
        self._times_compared += 1
        has_lasted = self._times_compared == _STEPS_WITHOUT_OPTIMIZER
        return not found.differs or found.has_step or has_lasted

    def end(self) -> None:
        """Stop summing."""
        for leave in self._leave:
            leave()

    def _on_step_begin(self) -> None:
        if Moment.STEP_BEGINS not in self.sums_at:
            self._sum(Moment.STEP_BEGINS)

    def _on_step_end(self) -> None:
        self._sum(Moment.STEP_ENDS)

    def _on_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and Moment.FORWARD_BEGINS not in self.sums_at:
            self._sum(Moment.FORWARD_BEGINS)

    def _sum(self, moment: Moment) -> None:
        """Sum the parameters as they are now, if they can be compared now."""
        self.sums_at.pop(moment, None)
        parameters = _compared(self._model())
        if parameters:
            self.sums_at[moment] = Sums.of(parameters, self._device)


class _Found:
    """The result of comparing the digests of all ranks.

    Args:
        table: the digests, indexed by rank, moment and kind of parameters. A digest is 0 where the
            rank has not summed.
    """

    def __init__(self, table: list[list[list[int]]]) -> None:
        by_moment = [*zip(*table, strict=True)]
        # The moments at which all ranks have summed.
        known = [
            moment for moment in Moment if all(0 not in digests for digests in by_moment[moment])
        ]
        # Whether all ranks have summed at the beginning or at the end of an optimizer's step.
        self.has_step = Moment.STEP_BEGINS in known or Moment.STEP_ENDS in known
        # Whether parameters of one kind differ at all known moments.
        self.differs = False
        for kind in range(_KINDS):
            different = [
                len({digests[kind] for digests in by_moment[moment]}) > 1 for moment in known
            ]
            if known and all(different):
                self.differs = True
        # The moment whose sums a report compares by name. It is only used if parameters differ.
        self.first = known[0] if known else Moment.STEP_BEGINS


class _Difference(NamedTuple):
    name: str  # the parameter's name
    is_trained: bool
    is_unknown_to_ddp: bool
    ranks: list[list[int]]  # the ranks in each list have the same bits


def _differing(
    by_rank: list[tuple[dict[str, int], dict[str, bool], Sequence[str]]],
) -> list[_Difference]:
    """Return the parameters whose sums differ between ranks.

    ``by_rank`` has three entries for each rank: the sum of each parameter, whether each parameter
    is trained, and the names of the parameters that DDP does not know. See `Digests._report`.
    """
    found = []
    for name in dict.fromkeys(name for sums, _, _ in by_rank for name in sums):
        ranks: dict[object, list[int]] = {}
        for rank, (sums, _, _) in enumerate(by_rank):
            ranks.setdefault(sums.get(name), []).append(rank)
        if len(ranks) > 1:
            is_trained = any(trained.get(name, True) for _, trained, _ in by_rank)
            is_unknown = any(name in unknown for _, _, unknown in by_rank)
            found.append(_Difference(name, is_trained, is_unknown, [*ranks.values()]))
    return found


def _raise(step: int, differing: Sequence[_Difference]) -> None:
    """Raise `ReplicasDifferError` with the names of the parameters that differ."""
    first = differing[0]
    names = _listed([each.name for each in differing])
    text = (
        f"expected the same parameters on all ranks, got {names} that differ in step {step}, "
        f"{first.name} between ranks {' and '.join(map(str, first.ranks))}; "
    )
    unknown = [each.name for each in differing if each.is_unknown_to_ddp]
    if unknown:
        raise ReplicasDifferError(
            f"{text}DDP does not average the gradients of {_listed(unknown)}, whose requires_grad "
            "was set after the model was wrapped: wrap the model in DistributedDataParallel again, "
            "from a checkpoint in which ranks agree"
        )
    raise ReplicasDifferError(
        f"{text}change and load parameters on all ranks alike, or, if they are meant to differ, "
        "pass compare_replicas=False (CROSSOVER_COMPARE_REPLICAS=0 for a hook without a state)"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _compared(model: DistributedDataParallel | None) -> dict[str, Tensor]:
    """Return the parameters that must be equal on all ranks now, by name.

    The dictionary is empty if no parameters can be compared now.
    """
    if model is None or is_joined(model):
        return {}
    ignored = getattr(model, torch_private.IGNORED_NAMES, ())
    found = {name: each for name, each in named_parameters_of(model.module) if each is not None}
    if any(hasattr(each, torch_private.IN_BACKWARD_OPTIMIZERS) for each in found.values()):
        return {}  # an optimizer inside of backward may be about to change them
    return {name: each for name, each in found.items() if name not in ignored}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of ``tensor`` as integers.

    The sum is the same in any order of addition, and equal for equal NaNs.
    """
    values = own_part(tensor.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    flat = values.reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    whole = len(flat) // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)
