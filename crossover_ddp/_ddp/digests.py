"""Do all ranks have the same parameters? Our design.

[Note: digests] In a model's steps 1, 2, 4, 8, … and in every thousandth each rank sums the bits of its parameters. The
ranks' sums travel behind the last bucket of the step after it, some bytes each: one number for parameters that are
trained, one for frozen ones. A rank that does not know the parameters, or is not to compare them, sends 0, and then
nothing is compared: so all ranks send as often, whatever each of them knows.

[Note: moments] Parameters may differ on purpose while gradients travel: SAM perturbs them by a gradient of each rank's
own, adversarial weight perturbation and noise do the same, and all put them back before ``step()``, or in it. So ranks
sum at several moments: when the last bucket is handed out, and when an optimizer's ``step()`` begins and ends. Only a
difference at all of them is an error. Where no optimizer has stepped (a GradScaler skips, a script updates by hand) the
next steps may tell more; from then on the beginning of forward is a moment as well.

With owners the end of ``step()`` is none: it brings the owners' values to all ranks, whatever these had.

Frozen parameters that differ are a warning: DDP does not train them, and adapters that are merged and taken out again
leave a rounding error.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._system import environment
from crossover_ddp.errors import ReplicasDifferError

from .checks import is_joined, model_of, named_parameters_of, unknown_to_ddp
from .compiled import OwnHook, uncompiled

logger = logging.getLogger(__name__)

COMPARED_EVERY: Final = 1000
_NAMED: Final = 3
_STEPS_WITHOUT_OPTIMIZER: Final = 3
_KINDS: Final = 2  # of digests: of parameters that are trained, of frozen ones
Tell = Callable[[Any], list[Any]]
"""Sends an object to all ranks; returns by rank what the ranks have sent."""


def is_compared(step: int) -> bool:
    """Tell whether parameters are compared in a step, see [Note: digests]."""
    return step & (step - 1) == 0 or step % COMPARED_EVERY == 0


class Sums(NamedTuple):
    """The sum of each parameter's bits at one moment, by name."""

    names: Sequence[str]
    is_trained: Sequence[bool]
    values: Tensor

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], device: torch.device) -> "Sums":
        values = [fingerprint(each).to(device) for each in parameters.values()]
        trained = [each.requires_grad for each in parameters.values()]
        return cls([*parameters], trained, torch.stack(values))

    def digests(self) -> Tensor:
        """Return one number for parameters that are trained, and one for frozen ones; neither is 0."""
        device = self.values.device
        # Odd factors, so that a value that moves from one parameter to another shows.
        factors = torch.arange(1, 2 * len(self.values), 2, device=device)
        trained = torch.tensor(self.is_trained, device=device)
        both = torch.stack([(self.values * factors * mask).sum() for mask in (trained, ~trained)])
        return both + (both == 0)


class Digests:
    """Of one model, after so many ``steps``, see [Note: digests]."""

    def __init__(self) -> None:
        self.steps = 0
        self.comparison: Comparison | None = None  # of a step whose sums are still to be sent
        # Of a model that `gc.freeze` hides None; it is searched for once.
        self._ddp: Callable[[], DistributedDataParallel | None] | None = None
        self._has_warned = False

    def exchanged(
        self,
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        state: object,
        begin: Callable[..., Any],
        at_each_step: Callable[..., Any],
    ) -> Callable[[Tell], None] | None:
        """Send the sums of the step before, if that was compared, and sum in this one, if it is.

        Call it in the hook of the last bucket, where there is a ``comparison`` or `is_compared`.

        ``state``: says whether parameters are compared, or the environment does. ``begin``: see `Exchange.begin`.
        ``at_each_step``: see that in ``_engine/buckets.py``.

        Returns:
            A function that looks at the digests that were sent, and raises a difference on all ranks, or None. It must
            be called on all ranks of ``group``.
        """
        look = (
            None if self.comparison is None else self._send(self.comparison, bucket, group, begin)
        )
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
    ) -> Callable[[Tell], None]:
        moments = comparison.moments
        numel, device = len(moments) * _KINDS, bucket.buffer().device
        table = torch.zeros(group.size(), len(moments), _KINDS, dtype=torch.int64, device=device)
        for place, sums in enumerate(moments):
            if sums is not None:
                table[group.rank(), place] = sums.digests()
        flat, layout = table.flatten(), [numel] * group.size()
        name = f"the digests of step {comparison.step}"
        trip = begin(lambda link: link.all_gather(flat, layout), flat, name, deferred=True)

        def look(tell: Tell) -> None:  # keeps no group
            trip.wait()
            found = _Found(flat.view(table.shape).tolist())
            if not comparison.is_settled_by(found):
                if self.comparison is not None:
                    self.comparison.end()
                self.comparison = comparison
                comparison.go_on()
                return
            comparison.end()
            if found.differs:
                self._report(comparison.step, moments[found.at], tell)

        return look

    def _compared_model(
        self, bucket: dist.GradBucket, state: object
    ) -> DistributedDataParallel | None:
        """Return the model; None if it is not known, or not to be compared."""
        if (wanted := getattr(state, "compare_replicas", None)) is None:
            wanted = environment.is_set(environment.COMPARE_REPLICAS, default="1")
        if self._ddp is None:
            found = model_of(bucket, state=state)
            self._ddp = (lambda: None) if found is None else weakref.ref(found)
        return self._ddp() if wanted else None

    def _report(self, step: int, sums: Sums | None, tell: Tell) -> None:
        """Raise a difference on all ranks, or warn if it is of frozen parameters alone. **Collective**."""
        model = None if self._ddp is None else self._ddp()
        unknown = unknown_to_ddp(model) if model is not None else ()
        if sums is None:
            raise AssertionError("a moment at which all ranks have summed")
        values = dict(zip(sums.names, sums.values.tolist(), strict=True))
        trained = dict(zip(sums.names, sums.is_trained, strict=True))
        differing = _differing(tell((values, trained, unknown)))
        if any(each.is_trained for each in differing):
            _raise(step, [each for each in differing if each.is_trained])
        if differing and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "frozen parameters differ between ranks since step %d at the latest: %s. DDP does not send them, and "
                "training goes on with each rank's own; if adapters were merged into them and taken out again, restore "
                "them from a copy",
                step,
                _listed([each.name for each in differing]),
            )


class Comparison:
    """Sums of one step's parameters at the moments at which ranks may agree, see [Note: moments].

    Made in the hook of the step's last bucket; the other moments are those up to the last bucket of the next step.

    Args:
        step: that is compared.
        model: whose parameters are summed; None: this rank sums nothing.
        device: of the sums.
        at_each_step: see that in ``_engine/buckets.py``.
    """

    def __init__(
        self,
        step: int,
        model: DistributedDataParallel | None,
        device: torch.device,
        at_each_step: Callable[..., Any],
    ) -> None:
        self.step = step
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._device = device
        self._step_begins: Sums | None = None  # the first one
        self._step_ends: Sums | None = None  # the latest one
        self._forward_begins: Sums | None = None  # the first one; only if a step is not enough
        self._in_backward: Sums | None = None
        self._exchanges = 0  # behind which the sums were sent
        self._leave: list[Callable[[], object]] = []
        if model is not None:
            self._model = weakref.ref(model)
            self._in_backward = self._now()
            parameters = [each for _, each in named_parameters_of(model.module) if each is not None]
            self._leave.append(
                at_each_step(parameters, begins=self._on_step_begin, ends=self._on_step_end)
            )

    @property
    def moments(self) -> tuple[Sums | None, ...]:
        """The sums by moment."""
        return self._step_begins, self._step_ends, self._forward_begins, self._in_backward

    def go_on(self) -> None:
        """Sum once more, up to the last bucket of the next step, and also where forward begins."""
        self._step_begins = self._step_ends = self._forward_begins = self._in_backward = None
        model = self._model()
        if model is not None and self._exchanges == 1:
            before = OwnHook(uncompiled(self._on_forward))
            self._leave.append(model.register_forward_pre_hook(before, prepend=True).remove)

    def is_settled_by(self, found: "_Found") -> bool:
        """Tell whether ranks know enough, once in each step."""
        self._exchanges += 1
        return not found.differs or found.has_step or self._exchanges == _STEPS_WITHOUT_OPTIMIZER

    def end(self) -> None:
        """Sum no more."""
        for leave in self._leave:
            leave()

    def _on_step_begin(self) -> None:
        self._step_begins = self._step_begins or self._now()

    def _on_step_end(self) -> None:
        self._step_ends = self._now()

    def _on_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._forward_begins = self._forward_begins or self._now()

    def _now(self) -> Sums | None:
        parameters = _compared(self._model())
        return Sums.of(parameters, self._device) if parameters else None


class _Found:
    """What ranks have sent: by rank, moment and kind a digest, or 0."""

    def __init__(self, table: list[list[list[int]]]) -> None:
        by_moment = [*zip(*table, strict=True)]
        known = [all(0 not in digests for digests in each) for each in by_moment]
        compared = [each for each, is_known in zip(by_moment, known, strict=True) if is_known]
        self.has_step = known[0] or known[1]
        """Whether all ranks have summed around a step of an optimizer."""
        self.differs = bool(compared) and any(
            all(len({digests[kind] for digests in each}) > 1 for each in compared)
            for kind in range(_KINDS)
        )
        """Whether parameters of one kind differ at all moments that all ranks know."""
        self.at = known.index(True) if compared else -1
        """The first moment that all ranks know."""


class _Difference(NamedTuple):
    name: str
    is_trained: bool
    is_unknown_to_ddp: bool
    ranks: list[list[int]]  # those that have the same


def _differing(
    everyone: list[tuple[dict[str, int], dict[str, bool], Sequence[str]]],
) -> list[_Difference]:
    """Return the parameters whose sums of bits differ."""
    found = []
    for name in dict.fromkeys(name for sums, _, _ in everyone for name in sums):
        ranks: dict[object, list[int]] = {}
        for rank, (sums, _, _) in enumerate(everyone):
            ranks.setdefault(sums.get(name), []).append(rank)
        if len(ranks) > 1:
            is_trained = any(trained.get(name, True) for _, trained, _ in everyone)
            is_unknown = any(name in unknown for _, _, unknown in everyone)
            found.append(_Difference(name, is_trained, is_unknown, [*ranks.values()]))
    return found


def _raise(step: int, differing: Sequence[_Difference]) -> None:
    """Raise on all ranks, with the names of the parameters that differ."""
    first = differing[0]
    text = (
        f"expected the same parameters on all ranks, got {_listed([each.name for each in differing])} that differ in "
        f"step {step}, {first.name} between ranks {' and '.join(map(str, first.ranks))}; "
    )
    unknown = [each.name for each in differing if each.is_unknown_to_ddp]
    if unknown:
        raise ReplicasDifferError(
            f"{text}DDP does not average the gradients of {_listed(unknown)}, whose requires_grad was set after the "
            "model was wrapped: wrap the model in DistributedDataParallel again, from a checkpoint in which ranks agree"
        )
    raise ReplicasDifferError(
        f"{text}change and load parameters on all ranks alike, or, if they are meant to differ, pass "
        "compare_replicas=False (CROSSOVER_COMPARE_REPLICAS=0 for a hook without a state)"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _compared(model: DistributedDataParallel | None) -> dict[str, Tensor]:
    """Return what must be the same on all ranks now, by name; empty if that is not known."""
    if model is None or is_joined(model):
        return {}
    ignored = getattr(model, "parameters_to_ignore", ())
    found = {name: each for name, each in named_parameters_of(model.module) if each is not None}
    if any(
        hasattr(each, "_in_backward_optimizers") for each in found.values()
    ):  # may be about to change
        return {}
    return {name: each for name, each in found.items() if name not in ignored}


def fingerprint(tensor: Tensor) -> Tensor:
    """Sum the bits of ``tensor``: the same in any order of additions, and for values that are no numbers."""
    values = tensor.detach()
    if hasattr(values, "to_local"):  # a DTensor's part that is here
        values = values.to_local()
    values = torch.view_as_real(values) if values.is_complex() else values
    flat = values.reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    whole = len(flat) // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)
