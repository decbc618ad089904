"""Directions that wait in ``.grad`` for the optimizer's step, and must not be preconditioned again.

[Note: directions that wait] After an exchange the gradient of a layer's weight is its direction. A backward pass that
adds to it, in ``no_sync()`` or not, would have the owner precondition the sum, and so the direction a second time.
Therefore a hook looks at each gradient just before a pass adds to it: it must be None or zero by then. Its version
would not tell, since ``p.grad.data.zero_()`` leaves it alone, and clipping changes it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor

from crossover_ddp.errors import UnsupportedConfigurationError

from .capture import WeakHook
from .layers import Layer

_REMEDY: Final = (
    "call optimizer.zero_grad() between two exchanges, and to accumulate gradients do all backward passes of a step "
    "but the last one in model.no_sync(), or add up their losses"
)


class WaitingDirections:
    """Knows which weights' gradients hold directions, see [Note: directions that wait].

    Args:
        layers: of the model.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        # By layer: whether a pass has added to its direction; None: none has. A tensor: the host does not wait for it.
        self._waits: dict[int, Tensor | None] = {}
        self._found: dict[int, Tensor] = {}  # not added to yet: ``torch.autograd.grad`` adds to nothing
        for index, layer in enumerate(layers):
            layer.weight.register_hook(WeakHook(self, "_before_adding", index))
            layer.weight.register_post_accumulate_grad_hook(WeakHook(self, "_added", index))

    def wait(self, layers: Iterable[int]) -> None:
        """Note that the gradients of ``layers`` have been exchanged."""
        self._waits.update((index, None) for index in layers)

    def check(self, layers: Iterable[int]) -> None:
        """Refuse gradients of ``layers`` that have a direction in them."""
        for index in layers:
            added = self._waits.get(index)
            if added is not None and bool(added):
                weight = next(iter(self._layers[index].parameters()))
                raise UnsupportedConfigurationError(
                    f"expected gradients that were cleared since the last exchange, got a second backward() added to "
                    f"the K-FAC direction of {weight}, which would be preconditioned twice; {_REMEDY}"
                )

    def _before_adding(self, index: int, _: Tensor) -> None:
        if index not in self._waits:
            return
        gradient, before = self._layers[index].weight.grad, self._waits[index]
        if gradient is None:
            del self._waits[index]
            return
        left = gradient.detach().any()
        self._found[index] = left if before is None else before & left  # once cleared, what is there is new

    def _added(self, index: int, _: Tensor) -> None:
        if index in self._waits:
            self._waits[index] = self._found.pop(index)
