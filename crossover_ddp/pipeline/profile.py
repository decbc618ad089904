"""The costs of each layer in a chain: time, output size and memory, measured on the modules."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from crossover_ddp._ddp.groups import gather_objects

from .documents import Document
from .measuring import LayerCosts, LayerMeter, SavedBytes, placed, stored_and_shared

logger = logging.getLogger(__name__)

_COSTS = (
    "forward_s",
    "backward_s",
    "activation_bytes",
    "parameter_bytes",
    "stored_bytes",
    "frozen_bytes",
    "shared_bytes",
)
_COPIES: Final = 4.0  # parameters, gradients, and Adam's two moments


@dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer for one micro-batch, on a device of speed 1.

    Args:
        name: the name of the layer. It must be unique in the chain, and is exported as the name of
            the module.
        forward_s: the time for forward, in seconds.
        backward_s: the time for backward in seconds, to compute the gradients of the input and the
            parameters.
        activation_bytes: the size of the output, which is sent to the next stage. The gradient of
            the output has the same size.
        parameter_bytes: the size of the trained parameters, and thus of their gradients.
        stored_bytes: the size of the tensors that forward saves for backward. Default 0.
        shape: the shape of the output, for the runner. Default: empty, which means unknown.
        dtype: the dtype of the output. Default ``float32``.
        frozen_bytes: the size of the frozen parameters and the buffers. Default 0.
        shared_bytes: the part of ``stored_bytes`` that the layer before saves as well: its output,
            if both layers keep it. It counts once if both layers are in one stage. Default 0.
        weight_s: the part of ``backward_s`` that computes the gradients of the parameters. A split
            backward may compute them later. Default: half of ``backward_s``.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    stored_bytes: float = 0.0
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    frozen_bytes: float = 0.0
    shared_bytes: float = 0.0
    weight_s: float | None = None

    @property
    def state_bytes(self) -> float:
        """The memory that the layer occupies all the time, in bytes."""
        return _COPIES * self.parameter_bytes + self.frozen_bytes

    @property
    def weight_part(self) -> float:
        """The part of backward that computes the gradients of the parameters, from 0 to 1."""
        assert self.weight_s is not None  # set by __post_init__
        return self.weight_s / self.backward_s if self.backward_s else 0.5

    def __post_init__(self) -> None:
        for cost in _COSTS:
            value = getattr(self, cost)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(
                    f"expected {cost} >= 0, got {cost}={value!r} of layer {self.name!r}; "
                    "measure again"
                )
        if self.weight_s is None:
            object.__setattr__(self, "weight_s", self.backward_s / 2)
        elif not (isinstance(self.weight_s, int | float) and 0 <= self.weight_s <= self.backward_s):
            raise ValueError(
                f"expected 0 <= weight_s <= backward_s={self.backward_s!r}, got "
                f"weight_s={self.weight_s!r} of layer {self.name!r}; measure again"
            )


@dataclass(frozen=True)
class Profile(Document):
    """The costs of the layers in a chain, first to last; see `measure`.

    Args:
        layers: the layers.
        times_s: for each device and each of its layers, the times of forward and backward in
            seconds. They replace the layers' times divided by the device's speed. Default: empty.
        tied: the parameters that two layers share, such as the embedding and the head of a language
            model: the index of one layer, that of the other, and the size in bytes. Both layers
            count them in ``parameter_bytes``. Default: empty.
    """

    layers: tuple[LayerProfile, ...]
    times_s: tuple[tuple[tuple[float, float], ...], ...] = ()
    tied: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"expected at least one layer and different names, got {names}; "
                "name each layer once"
            )
        if wrong := [len(row) for row in self.times_s if len(row) != len(names)]:
            raise ValueError(
                f"expected times of {len(names)} layers for each device, got times of {wrong[0]}; "
                "measure again"
            )

        for device, row in enumerate(self.times_s):
            for name, pair in zip(names, row, strict=True):
                is_valid = len(pair) == 2 and all(
                    isinstance(time_s, int | float) and 0 <= time_s < math.inf for time_s in pair
                )
                if not is_valid:
                    raise ValueError(
                        "expected times_s with two times >= 0 for each layer, got "
                        f"{pair!r} of layer {name!r} on device {device}; measure again"
                    )
        for tie in self.tied:
            is_valid = len(tie) == 3 and all(
                isinstance(layer, int) and 0 <= layer < len(names) for layer in tie[:2]
            )
            if not is_valid:
                raise ValueError(
                    f"expected tied with the indices of two of {len(names)} layers and a size, got "
                    f"{tie!r}; measure again"
                )

    def __len__(self) -> int:
        return len(self.layers)

    def tied_bytes(self, one: int, two: int) -> float:
        """Return the memory of the parameters that two layers share."""
        return sum(_COPIES * size for *pair, size in self.tied if pair == [one, two])

    def state_bytes(self, layers: Collection[int]) -> float:
        """Return the memory that these layers occupy all the time. Tied parameters count once."""
        total_bytes = sum(self.layers[layer].state_bytes for layer in layers)
        for one, two, size_bytes in self.tied:
            if one in layers and two in layers:
                total_bytes -= _COPIES * size_bytes
        return total_bytes

    @classmethod
    def measure(
        cls,
        layers: Iterable[nn.Module | tuple[str, nn.Module]],
        sample: torch.Tensor,
        *,
        repeats: int = 5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> "Profile":
        """Run a copy of each layer forward and backward, and measure its costs.

        Only one copy at a time is on the device, so a model that exceeds its memory can be
        measured. The layers, their gradients and buffers, and the random state stay unchanged.
        Each layer is logged at level INFO.

        Args:
            layers: the chain's layers, or pairs of a name and a layer. Each layer takes the one
                tensor that the previous layer returns. A layer may also return a tuple of this
                tensor and elements that are None or empty. Layers on the meta device are measured
                with random parameters.
            sample: one micro-batch of input, for example images or the numbers of tokens. Its
                gradient is measured if it requires one.
            repeats: how many times to run and time each layer. The median counts. Default 5. One
                untimed run comes first to warm up.
            device: the device on which the layers run. Default: the sample's.
            dtype: the dtype of floating-point parameters, buffers and samples. Default: as they
                are.
            autocast: the dtype for ``torch.autocast`` around forward. Default: without it.
            process_group: the ranks that measure, each on its own device. Rank i becomes device i
                of ``times_s``, and the layers have the costs on rank 0. Default: this process
                measures alone. With NCCL, call ``torch.cuda.set_device`` before.

        Returns the same profile on all ranks of the group.

        On failure: ``ValueError`` or ``TypeError`` with the name of a layer that does not fit in a
        chain. With a group, all ranks raise if one of them does, or if their layers differ.

        **Collective** if there is a process group.
        """
        if repeats < 1:
            raise ValueError(f"expected repeats >= 1, got repeats={repeats}; give a whole number")
        named = _named(layers)
        measure = functools.partial(
            _measured, named, sample, repeats=repeats, device=device, dtype=dtype, autocast=autocast
        )
        if process_group is None:
            return cls(measure(), tied=_tied(named, dtype))
        by_rank = _measured_by_all(process_group, measure)
        times_s = [tuple([(each.forward_s, each.backward_s) for each in row]) for row in by_rank]
        return cls(by_rank[0], tuple(times_s), _tied(named, dtype))

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> "Profile":
        """Create a profile from the output of `to_json`."""
        try:
            layers = [
                LayerProfile(**{**each, "shape": tuple(each.get("shape", ()))})
                for each in document["layers"]
            ]
            times_s = tuple([tuple(map(tuple, row)) for row in document["times_s"]])
            tied = tuple(map(tuple, document["tied"]))
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"expected a profile, got another document ({error!r}); save it with Profile.save"
            ) from error
        return cls(tuple(layers), times_s, tied)


def _named(
    layers: Iterable[nn.Module | tuple[str, nn.Module]] | nn.Module,
) -> list[tuple[str, nn.Module]]:
    if isinstance(layers, nn.Sequential):
        # named_children() would leave out the second use of a layer that is used twice.
        return [(name, each) for name, each in layers._modules.items() if each is not None]
    if isinstance(layers, nn.Module):
        raise TypeError(
            f"expected a list of layers or an nn.Sequential, got {type(layers).__name__}; a model "
            "that is not a chain cannot be cut into stages here: list its blocks so that each "
            "takes the output of the one before"
        )
    return [
        each if isinstance(each, tuple) else (str(place), each) for place, each in enumerate(layers)
    ]


def _measured(
    named: Sequence[tuple[str, nn.Module]],
    sample: torch.Tensor,
    *,
    repeats: int,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
) -> tuple[LayerProfile, ...]:
    place = sample.device if device is None else torch.device(device)
    if place.type == "meta" or sample.is_meta:
        raise ValueError(
            f"expected a device that computes, got device={place} and a sample on {sample.device}; "
            "give a sample with values, and a device"
        )
    is_float = sample.is_floating_point()
    value = sample.detach().to(place, dtype if is_float else None)
    value.requires_grad_(sample.requires_grad)
    found: list[LayerProfile] = []
    saved: list[SavedBytes] = []
    with _forked_random_state(place), torch.enable_grad():
        for number, (name, layer) in enumerate(named, 1):
            meter = LayerMeter(name, placed(name, layer, place, dtype), value, autocast)
            costs, value = meter.measure(repeats)
            del meter  # free this copy before the next one is made
            found.append(_layer_profile(name, costs, value))
            saved.append(costs.saved)
            logger.info(
                "layer %d of %d, %s: forward %.3g s, backward %.3g s",
                *(number, len(named), name, costs.forward_s, costs.backward_s),
            )
    kept = stored_and_shared(saved)
    return tuple(
        [
            replace(layer, stored_bytes=stored_bytes, shared_bytes=shared_bytes)
            for layer, (stored_bytes, shared_bytes) in zip(found, kept, strict=True)
        ]
    )


def _layer_profile(name: str, costs: LayerCosts, output: torch.Tensor) -> LayerProfile:
    return LayerProfile(
        name,
        costs.forward_s,
        costs.backward_s,
        output.nbytes,
        costs.parameter_bytes,
        shape=tuple(output.shape),
        dtype=str(output.dtype).removeprefix("torch."),
        frozen_bytes=costs.frozen_bytes,
        weight_s=costs.weight_s,
    )


def _forked_random_state(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.random.fork_rng(devices=[index], device_type=device.type)


def _measured_by_all(
    group: dist.ProcessGroup, measure: Callable[[], tuple[LayerProfile, ...]]
) -> list[tuple[LayerProfile, ...]]:
    """Measure on all ranks, and return the layers of each rank. **Collective**."""
    layers: tuple[LayerProfile, ...] = ()
    failure: Exception | None = None
    try:
        layers = measure()
    except Exception as error:  # the other ranks wait for this one
        failure = error
    by_rank = gather_objects(group, (layers, str(failure or "")))
    if failure is not None:
        raise failure
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(by_rank) if text]:
        raise ValueError(
            f"expected layers that can be measured on all ranks, got {'; '.join(failed)}"
        )
    sizes = [[(each.name, each.shape, each.state_bytes) for each in row] for row, _ in by_rank]
    if wrong := [rank for rank, row in enumerate(sizes) if row != sizes[0]]:
        raise ValueError(
            f"expected the same layers on all ranks, got others on ranks {wrong} than on rank 0; "
            "build the same model, and give the same sample shape and dtype"
        )
    return [row for row, _ in by_rank]


def _tied(
    named: Sequence[tuple[str, nn.Module]], dtype: torch.dtype | None
) -> tuple[tuple[int, int, float], ...]:
    """Return the pairs of layers that share trained parameters, and the size of these.

    If more than two layers share a parameter, each of them forms a pair with the next one.
    """
    latest: dict[nn.Parameter, int] = {}
    shared: dict[tuple[int, int], float] = {}
    for place, (_, layer) in enumerate(named):
        for parameter in layer.parameters():
            if parameter.requires_grad and parameter in latest:
                kind = dtype if dtype and parameter.is_floating_point() else parameter.dtype
                pair = latest[parameter], place
                shared[pair] = shared.get(pair, 0.0) + parameter.numel() * kind.itemsize
            latest[parameter] = place
    return tuple([(*pair, size) for pair, size in sorted(shared.items())])
