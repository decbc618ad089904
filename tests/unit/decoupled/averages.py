"""Moving averages of several libraries, with one interface for tests."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

Parameters = Iterable[nn.Parameter] | None


class ExponentialMovingAverage:
    """Has the interface of torch_ema's class of this name, and its decay that warms up."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        parameters = [*parameters]
        self.decay = decay
        self.num_updates = 0
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.collected_params: list[Tensor] | None = None
        self._params_refs = [weakref.ref(p) for p in parameters]

    def _given(self, parameters: Parameters) -> list[Any]:
        return [each() for each in self._params_refs] if parameters is None else [*parameters]

    def update(self, parameters: Parameters = None) -> None:
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        given = self._given(parameters)
        if len(given) != len(self.shadow_params):
            raise ValueError("another number of parameters")
        with torch.no_grad():
            for shadow, parameter in zip(self.shadow_params, given, strict=True):
                shadow.sub_((shadow - parameter).mul_(1.0 - decay))

    def copy_to(self, parameters: Parameters = None) -> None:
        for shadow, parameter in zip(self.shadow_params, self._given(parameters), strict=True):
            parameter.data.copy_(shadow.data)

    def store(self, parameters: Parameters = None) -> None:
        self.collected_params = [p.clone() for p in self._given(parameters)]

    def restore(self, parameters: Parameters = None) -> None:
        assert self.collected_params is not None
        for kept, parameter in zip(self.collected_params, self._given(parameters), strict=True):
            parameter.data.copy_(kept.data)

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        self.store()
        self.copy_to()
        try:
            yield
        finally:
            self.restore()

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "shadow_params": self.shadow_params}


def nth_power(averaged: Any, current: Any, count: Any) -> None:
    """Average by an own function, whose weight depends on the number of updates."""
    torch._foreach_lerp_(averaged, current, float(0.5 ** (count + 1)))


@dataclass(frozen=True)
class Kind:
    """A kind of average: how it is made of a model and updated with it after a step."""

    make: Callable[[nn.Module], Any]
    update: Callable[[Any, nn.Module, int], object] = lambda average, model, step: average.update(
        model
    )


def averaged(**options: Any) -> Kind:
    return Kind(
        lambda model: AveragedModel(model, **options),
        lambda average, model, step: average.update_parameters(model),
    )


def v3(**options: Any) -> Kind:
    return Kind(
        lambda model: ModelEmaV3(model, **options),
        lambda average, model, step: average.update(model, step=step),
    )


def torch_ema(update: Callable[[Any, nn.Module], object]) -> Kind:
    return Kind(
        lambda model: ExponentialMovingAverage(model.parameters(), 0.9),
        lambda average, model, step: update(average, model),
    )


KINDS: Final = {
    "v3": Kind(lambda model: ModelEmaV3(model, decay=0.9)),
    "v3 warm-up": v3(decay=0.99, use_warmup=True, update_after_step=2),
    "v3 without foreach": v3(decay=0.9, foreach=False),
    "v3 without buffers": v3(decay=0.9, exclude_buffers=True),
    "v3 double": v3(decay=0.9, dtype=torch.float64),
    "v2": Kind(lambda model: ModelEmaV2(model, decay=0.9)),
    "v1": Kind(lambda model: ModelEma(model, decay=0.9)),
    "swa": averaged(),
    "ema": averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "ema one by one": averaged(avg_fn=get_ema_avg_fn(0.9)),
    "ema with buffers": averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "own function": averaged(multi_avg_fn=nth_power),
    "torch_ema": torch_ema(lambda average, model: average.update()),
    "torch_ema of parameters": torch_ema(lambda average, model: average.update(model.parameters())),
    "torch_ema by name": torch_ema(
        lambda average, model: average.update(parameters=model.parameters())
    ),
}


def values_of(average: Any) -> list[Tensor]:
    """Return copies of an average's tensors and counters."""
    if isinstance(average, nn.Module):
        return [value.clone() for value in average.state_dict().values()]
    if isinstance(average, ModelEma):
        return [value.clone() for value in average.ema.state_dict().values()]
    state = average.state_dict()
    return [torch.tensor(state["num_updates"]), *[each.clone() for each in state["shadow_params"]]]


def same_averages(one: Any, other: Any) -> bool:
    return all(map(torch.equal, *map(values_of, (one, other))))
