"""Do all ranks have the same parameters? Our design.

[Note: digests] In a model's steps 1, 2, 4, 8, … and in every thousandth each rank sums the bits of its parameters, as
they are when the last bucket is handed out, and the ranks' sums travel behind that bucket, eight bytes each. No step
waits for them: the end of a later backward pass looks at them. Only if they differ do ranks tell each other the sum of
each parameter. Who does not know the parameters, or is not to compare them, sends 0, and then nobody compares: so all
ranks send as often, whatever each of them was told.
"""

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp._system import environment
from crossover_ddp.errors import ReplicasDifferError

from .checks import is_joined, model_of, named_parameters_of

COMPARED_EVERY: Final = 1000
_NAMED: Final = 3
Tell = Callable[[Any], list[Any]]
"""Tells all ranks something; returns by rank what they tell."""


class Digests:
    """Of one model, after so many ``steps``, see [Note: digests]."""

    steps = 0
    # One that `gc.freeze` hides is looked for once.
    _ddp: Callable[[], DistributedDataParallel | None] | None = None
    look: Callable[[Tell], None] | None = None  # at digests that nobody has looked at

    def send(self, bucket: dist.GradBucket, group: dist.ProcessGroup, state: object, begin: Callable[..., Any]) -> None:
        """Send some, in the hook of a last bucket; ``look`` then raises a difference, on all ranks of ``group``.

        ``state``: says whether parameters are compared, or the environment does. ``begin``: see `Exchange.begin`.
        """
        if (wanted := getattr(state, "compare_replicas", None)) is None:
            wanted = environment.is_set(environment.COMPARE_REPLICAS, default="1")
        if self._ddp is None:
            found = model_of(bucket, state=state)
            self._ddp = (lambda: None) if found is None else weakref.ref(found)
        parameters = _compared(self._ddp()) if wanted else {}
        step, device, names, layout = self.steps, bucket.buffer().device, [*parameters], [1] * group.size()
        table = torch.zeros(group.size(), dtype=torch.int64, device=device)
        sums = table[:0]
        if parameters:
            sums = torch.stack([fingerprint(each).to(device) for each in parameters.values()])
            # Odd factors, so that what moves from one parameter to another shows.
            digest = (sums * torch.arange(1, 2 * len(sums), 2, device=device)).sum()
            table[group.rank()] = digest + (digest == 0)
        name = f"the digests of step {step}"
        trip = begin(lambda link: link.all_gather(table, layout), table, name, deferred=True)

        def look(tell: Tell) -> None:  # keeps no parameter and no group
            trip.wait()
            digests = table.tolist()
            if 0 not in digests and len({*digests}) > 1:
                _compare_each(step, tell(dict(zip(names, sums.tolist(), strict=True))))

        self.look = look


def _compare_each(step: int, everyone: list[dict[str, int]]) -> None:
    """Raise on all ranks, with the names of the parameters whose sums of bits differ."""
    names = dict.fromkeys(name for each in everyone for name in each)
    differing = [name for name in names if len({each.get(name) for each in everyone}) > 1]
    ranks: dict[object, list[int]] = {}
    for rank, each in enumerate(everyone):
        ranks.setdefault(each.get(differing[0]), []).append(rank)
    more = len(differing) - _NAMED
    raise ReplicasDifferError(
        f"expected the same parameters on all ranks, got {', '.join(differing[:_NAMED])}"
        f"{f' and {more} more' if more > 0 else ''} that differ in step {step}, {differing[0]} between ranks "
        f"{' and '.join(map(str, ranks.values()))}; change and load parameters on all ranks alike, or, if they are "
        "meant to differ, pass compare_replicas=False (CROSSOVER_COMPARE_REPLICAS=0 for a hook without a state)"
    )


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
