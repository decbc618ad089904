"""Do all ranks have the same parameters? Our design.

[Note: digests] In a model's steps 1, 2, 4, 8, … and in every thousandth each rank sums the bits of its parameters, as
they are when the last bucket is handed out, and the ranks' sums travel behind that bucket, eight bytes each. No step
waits for them: the end of a later backward pass looks at them. Only if they differ do ranks tell each other the sum of
each parameter. Who does not know the parameters, or is not to compare them, sends 0, and then nobody compares: so all
ranks send as often, whatever each of them was told.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from crossover_ddp._ddp.checks import is_joined, model_of, named_parameters_of
from crossover_ddp._system import environment
from crossover_ddp.errors import ReplicasDifferError

from .buckets import after_backward, told_by_all
from .journeys import Trip
from .links import Link

_EVERY: Final = 1000
_NAMED: Final = 3
Begin = Callable[..., Trip]


class _Sent(NamedTuple):
    """The digests of one step: ``sums`` of this rank's parameters; ``table`` by rank, when ``trip`` has ended."""

    step: int
    names: list[str]
    sums: Tensor
    table: Tensor
    trip: Trip


class _Model:
    """A model's steps, and the digests that nobody has looked at.

    ``due``: the next step in which there is something to do. ``ddp``: finds it; None before it was looked for.
    """

    steps, due = 0, 1
    sent: _Sent | None = None
    ddp: Callable[[], DistributedDataParallel | None] | None = None


class Digests:
    """The digests of the models of one process group, see [Note: digests].

    Args:
        rank: of this process.
        size: of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.models: Any = WeakTensorKeyDictionary()  # by the parameters of a last bucket

    def step(
        self,
        bucket: dist.GradBucket,
        group: dist.ProcessGroup,
        state: object,
        begin: Begin,
        *,
        wanted: bool | None,
    ) -> None:
        """Look at digests, and send some, in a step that is due, whose last bucket this is.

        A difference is raised by ``backward()``, on all ranks.

        Args:
            bucket: handed out in its hook.
            group: whose ranks compare.
            state: that the hook was registered with; see `model_of`.
            begin: see `Exchange.begin`.
            wanted: whether parameters must be the same on all ranks; None: as the environment says.

        **Collective**: all ranks hand out the same buckets.
        """
        model = self._model(bucket.parameters())
        model.steps += 1
        if model.sent is not None:
            look = functools.partial(self._look, model.sent, group)
            model.sent = None
            if not after_backward(look):
                look()
        if model.steps & (model.steps - 1) == 0 or model.steps % _EVERY == 0:
            if model.ddp is None:
                found = model_of(bucket, state=state)
                model.ddp = _nobody if found is None else weakref.ref(found)
            if wanted is None:
                wanted = environment.is_set(environment.COMPARE_REPLICAS, default="1")
            parameters = _compared(model.ddp()) if wanted else {}
            model.sent = self._send(model.steps, parameters, bucket.buffer().device, begin)
            model.due = model.steps + 1
        else:
            model.due = min(1 << model.steps.bit_length(), (model.steps // _EVERY + 1) * _EVERY)

    def _model(self, parameters: Sequence[Tensor]) -> _Model:
        """Return the model of a last bucket's parameters, of which DDP may have put some into it just now."""
        if (found := self.models.get(parameters[0])) is None:
            known = (self.models[each] for each in parameters if each in self.models)
            found = next(known, None) or _Model()
            for each in parameters:
                self.models[each] = found
        return found  # type: ignore[no-any-return]

    def _send(self, step: int, parameters: dict[str, Tensor], device: torch.device, begin: Begin) -> _Sent:
        table = torch.zeros(self._size, dtype=torch.int64, device=device)
        sums = table[:0]
        if parameters:
            sums = torch.stack([fingerprint(each).to(device) for each in parameters.values()])
            # Odd factors, so that what moves from one parameter to another shows.
            digest = (sums * torch.arange(1, 2 * len(sums), 2, device=device)).sum()
            table[self._rank] = digest + (digest == 0)

        async def way(link: Link) -> None:
            await link.all_gather(table, [1] * self._size)

        trip = begin(way, device, f"the digests of step {step}", deferred=True)
        return _Sent(step, [*parameters], sums, table, trip)

    def _look(self, sent: _Sent, group: dist.ProcessGroup) -> None:
        """Raise on all ranks if the digests differ."""
        sent.trip.wait()
        digests = sent.table.tolist()
        if 0 in digests or len({*digests}) == 1:
            return
        everyone = told_by_all(group, dict(zip(sent.names, sent.sums.tolist(), strict=True)))
        names = dict.fromkeys(name for each in everyone for name in each)
        differing = [name for name in names if len({each.get(name) for each in everyone}) > 1]
        ranks: dict[object, list[int]] = {}
        for rank, each in enumerate(everyone):
            ranks.setdefault(each.get(differing[0]), []).append(rank)
        more = len(differing) - _NAMED
        raise ReplicasDifferError(
            f"expected the same parameters on all ranks, got {', '.join(differing[:_NAMED])}"
            f"{f' and {more} more' if more > 0 else ''} that differ in step {sent.step}, {differing[0]} between ranks "
            f"{' and '.join(map(str, ranks.values()))}; change and load parameters on all ranks alike, or, if they are "
            "to differ, pass compare_replicas=False (CROSSOVER_COMPARE_REPLICAS=0 for a hook without a state)"
        )


def _nobody() -> None:
    """For a model that `gc.freeze` has hidden: it is looked for once."""


def _compared(model: DistributedDataParallel | None) -> dict[str, Tensor]:
    """Return what must be the same on all ranks now, by name; empty if that is not known."""
    if model is None or is_joined(model):
        return {}
    ignored = getattr(model, "parameters_to_ignore", ())
    found = {name: each for name, each in named_parameters_of(model.module) if each is not None}
    if any(hasattr(each, "_in_backward_optimizers") for each in found.values()):  # may be about to change
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
