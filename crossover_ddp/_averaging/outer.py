"""The outer optimizer: each owner steps its part of the parameters that all replicas have in common.

After DiLoCo (arXiv 2311.08105, and the code of its followers): the outer gradient is Δ = z - mean(x), where z are the
parameters after the last outer step. [Note: outer steps around the mean] The optimizer does not step z itself but the
distance p = z - mean, and z becomes mean + p. That is the same step for every optimizer that does not look at the
parameters' values, and with rate 1 and without momentum p is exactly 0: then the step is the mean, to the last bit.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from crossover_ddp._ddp.layout import Span

from .checks import all_finite
from .flat import FlatBlock, wide

OuterOptimizer = Callable[[Iterable[torch.Tensor]], Optimizer]

_DECAY: Final = "weight_decay"


def check_outer(make: OuterOptimizer) -> None:
    """Refuse what cannot make an optimizer, or one that looks at the parameters' values."""
    remedy = (
        "pass a function of the parameters such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)"
    )
    if not callable(make) or isinstance(make, Optimizer):
        raise TypeError(
            f"expected outer_optimizer to make an optimizer, got outer_optimizer={make!r}; {remedy}"
        )
    made = make([torch.nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise TypeError(f"expected outer_optimizer to make an optimizer, got {type(made).__name__}; {remedy}")
    decay = made.param_groups[0].get(_DECAY, 0)
    if decay:
        raise ValueError(
            f"expected an outer optimizer without weight decay, got weight_decay={decay}; let the inner one decay"
        )
    probe = torch.nn.Parameter(torch.ones(2))
    probe.grad = torch.ones(2)
    made = make([probe])
    moved = _step_of(made, probe, torch.ones(2))
    if not torch.equal(moved, _step_of(make([probe]), probe, torch.zeros(2))):
        raise ValueError(
            f"expected an outer optimizer whose step depends on gradients alone, got {type(made).__name__}; use SGD "
            "(with momentum, Nesterov or not) or Adam without weight decay"
        )


def described(make: OuterOptimizer) -> str:
    """Return the optimizer's class and arguments as a text."""
    made = make([torch.nn.Parameter(torch.zeros(1))])
    given = {name: value for name, value in made.param_groups[0].items() if name != "params"}
    return f"{type(made).__name__}({given})"


def _step_of(made: Optimizer, probe: torch.nn.Parameter, at: torch.Tensor) -> torch.Tensor:
    probe.data = at.clone()
    made.step()
    return (probe.detach() - at).round(decimals=4)


class OuterPart:
    """What one owner keeps of one fragment: z and the optimizer's state, over the parameters in its part.

    Args:
        block: of the model.
        span: the own part, in the block; buffers in it are averaged and not stepped.
        make: makes the optimizer.
    """

    def __init__(self, block: FlatBlock, span: Span, make: OuterOptimizer) -> None:
        stop = max(span.start, min(span.stop, block.parameters_numel))
        self.span = Span(span.start, stop)
        self.anchor = torch.empty(self.span.numel, dtype=wide(block.dtype), device=block.device)
        """z."""
        block.pack(self.span, self.anchor)
        self._distance = torch.nn.Parameter(torch.empty(0, dtype=self.anchor.dtype, device=block.device))
        self.optimizer = make([self._distance])

    def step(self, mean: torch.Tensor) -> None:
        """Replace the mean of the own part by the next z, see [Note: outer steps around the mean]."""
        own = mean[: self.span.numel]
        if not all_finite([own]):
            return  # every rank will see it, and refuse it
        values = own.to(self.anchor.dtype)
        gradient = self.anchor - values
        self._distance.data, self._distance.grad = gradient.clone(), gradient
        self.optimizer.step()
        torch.add(values, self._distance.data, out=self.anchor)
        own.copy_(self.anchor)
        self._distance.data, self._distance.grad = self.anchor.new_empty(0), None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state for each element, by name."""
        state = self.optimizer.state.get(self._distance, {})
        return {key: value for key, value in state.items() if self._is_elementwise(value)}

    def numbers(self) -> dict[str, float]:
        """Return the rest of its state, such as a count of steps."""
        state = self.optimizer.state.get(self._distance, {})
        return {key: float(value) for key, value in state.items() if _is_number(value)}

    def load(self, anchor: torch.Tensor, tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
        """Take over what `tensors` and `numbers` returned, for the own part."""
        self.anchor.copy_(anchor)
        state = self.optimizer.state[self._distance]
        state.update({key: value.clone() for key, value in tensors.items()})
        state.update({key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()})

    @property
    def nbytes(self) -> int:
        """Bytes kept between two steps."""
        kept = [self.anchor, *self.tensors().values()]
        return sum(tensor.nbytes for tensor in kept)

    def _is_elementwise(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == self.span.numel


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
