"""The costs of each layer in a chain: time, output size and memory, measured on the modules."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn

from .documents import Document

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
    ) -> "Profile":
        """Run each layer forward and backward, and measure its costs.

        The buffers, the gradients and the random state are left unchanged.

        Args:
            layers: the chain's layers, or pairs of a name and a layer. Each layer takes the one
                tensor that the previous layer returns.
            sample: one micro-batch of input, on the layers' device.
            repeats: how many times to run and time each layer. The median counts. Default 5. One
                untimed run comes first to warm up.

        On failure: ``ValueError`` or ``TypeError`` with the name of a layer that does not fit in a
        chain.
        """
        named = _named(layers)
        found = []
        inputs = sample
        with torch.random.fork_rng():
            for name, layer in named:
                profile, inputs = _measured(name, layer, inputs, repeats)
                found.append(profile)
        return cls(tuple(found))

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
    name: str, layer: nn.Module, inputs: torch.Tensor, repeats: int
) -> tuple[LayerProfile, torch.Tensor]:
    gradients = [(parameter, parameter.grad) for parameter in layer.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    for parameter, _ in gradients:  # or backward would add to the saved gradients
        parameter.grad = None
    times: list[tuple[float, float]] = []
    stored = 0
    try:
        for trial in range(repeats + 1):
            leaf = inputs.detach()
            if leaf.is_floating_point():
                leaf.requires_grad_()
            sizes: dict[int, int] = {}
            own = {parameter.data_ptr() for parameter, _ in gradients}
            # The layer may change its input in place, like nn.ReLU(inplace=True).
            copy = leaf.clone()
            begin_s = _now_s(leaf)
            # Collect the sizes of saved tensors in the untimed run.
            with _counting(sizes, own) if trial == 0 else torch.enable_grad():
                output = _checked(name, layer, copy)
            middle_s = _now_s(output)
            if output.requires_grad:
                torch.autograd.backward(output, torch.ones_like(output))
            times.append((middle_s - begin_s, _now_s(output) - middle_s))
            stored = stored or sum(sizes.values())
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
    forward_s, backward_s = (median(column) for column in zip(*times[1:] or times, strict=True))
    held = [(each.nbytes, each.requires_grad) for each in (*layer.parameters(), *layer.buffers())]
    layer_profile = LayerProfile(
        name,
        forward_s,
        backward_s,
        output.nbytes,
        sum(size for size, trained in held if trained),
        stored,
        tuple(output.shape),
        str(output.dtype).removeprefix("torch."),
        sum(size for size, trained in held if not trained),
    )
    return layer_profile, output.detach()


def _counting(sizes: dict[int, int], own: set[int]) -> Any:
    """Return a context that records in ``sizes`` the size of each storage that forward saves.

    It leaves out the parameters, whose addresses are in ``own``.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _checked(name: str, layer: Callable[..., Any], inputs: torch.Tensor) -> torch.Tensor:
    try:
        output = layer(inputs)
    except Exception as error:
        raise ValueError(
            "expected a layer that takes the one tensor which the layer before returns, got layer "
            f"{name!r}, which refuses shape={tuple(inputs.shape)} ({error}); skip connections must "
            "stay inside one layer"
        ) from error
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"expected a layer that returns one tensor, got {type(output).__name__} of layer "
            f"{name!r}; skip connections must stay inside one layer"
        )
    return output


def _now_s(tensor: torch.Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return perf_counter()
