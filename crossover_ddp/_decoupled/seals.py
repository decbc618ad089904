"""Has anybody changed what waits for its update?

[Note: versions] A tensor counts its in-place changes. What we do to a bucket goes through an alias with a counter of
its own, so a change of the counter that gradients carry is somebody else's, made while they were averaged in parts.

[Note: changes that no counter sees] A change through ``.data`` counts no version. So in a few steps the exchange is
awaited at the end of backward, when this package writes no more, and sums of what is pending are compared whenever
it is used. Code that changes gradients or parameters mostly does so in every step. ``CROSSOVER_CHECK=1`` checks always.
"""

from collections.abc import Iterable
from typing import Final

import torch

from crossover_ddp._engine.digest import fingerprint
from crossover_ddp._system import environment

_CHECKED_STEPS: Final = 3


class Seal:
    """Tensors as they are now.

    Args:
        tensors: that nobody else is to change.
        bits: look at their bits, too.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, bits: bool = False) -> None:
        self._tensors = [*tensors]
        self._versions = [tensor._version for tensor in self._tensors]
        self._bits = [fingerprint(tensor) for tensor in self._tensors] if bits else []

    @property
    def is_broken(self) -> bool:
        """Whether somebody has changed one of them since."""
        if any([t._version != version for t, version in zip(self._tensors, self._versions, strict=True)]):
            return True
        return any(
            [
                not torch.equal(fingerprint(t), bits)
                for t, bits in zip(self._tensors, self._bits, strict=False)
            ]
        )


class Checks:
    """Says whether this step is checked: all until three have been deferred, or all for good."""

    def __init__(self) -> None:
        self._always = environment.is_set(environment.CHECK)
        self._deferred = 0

    @property
    def on(self) -> bool:
        """Whether the step under way is checked."""
        return self._always or self._deferred < _CHECKED_STEPS

    def deferred(self) -> None:
        """Count a deferred step, which is applied now."""
        self._deferred += 1
