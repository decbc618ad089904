"""A model, found by its name, as a chain of layers."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

NamedLayer = tuple[str, nn.Module]


def named_model(name: str, otherwise: str) -> Any:
    """Return what ``timm:NAME``, ``torchvision:NAME`` or ``module:function`` makes; errors offer ``otherwise``, too."""
    place, _, function = name.partition(":")
    try:
        module = importlib.import_module(place)
        make = {"timm": "create_model", "torchvision": "get_model"}.get(place)
        home = module.models if place == "torchvision" else module
        made = getattr(home, make)(function) if make else getattr(module, function)()
        return made if isinstance(made, nn.Module) else [*nn.Sequential(*made)]
    except (ImportError, AttributeError, ValueError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"expected {otherwise}, timm:NAME, torchvision:NAME or module:function, got {name!r} ({error})"
        ) from error


def gradient_sizes(name: str) -> list[int]:
    """Return the bytes of each gradient of a model, found by its name."""
    with torch.device("meta"):  # sizes without numbers
        made = named_model(name, "a size such as 102MB")
    models = [made] if isinstance(made, nn.Module) else [*made]
    trained = [each for each in nn.ModuleList(models).parameters() if each.requires_grad]
    if not trained:
        raise ValueError(f"expected a model with parameters that are trained, got {name!r}")
    return [each.numel() * each.element_size() for each in trained]


def named_chain(name: str, shape: Sequence[int]) -> tuple[list[NamedLayer], torch.Tensor]:
    """Return a model's layers by name, and a micro-batch; `ValueError` if one after the other is not the model."""
    model = named_model(name, "a profile (a .json file)")
    sample = torch.randn(*shape)
    if not isinstance(model, nn.Module):
        return [(str(place), layer) for place, layer in enumerate(model)], sample
    layers = list(_children(model, ""))
    head = next(
        (at for at, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)), len(layers)
    )
    # As many models do in their forward.
    flattened = [*layers[:head], ("flatten", nn.Flatten()), *layers[head:]]
    for chain in (layers, flattened):
        if _is_chain(model, chain, sample):
            return chain, sample
    raise ValueError(
        f"expected a model that is a chain and takes {tuple(shape)}, got {name!r}; change --input, or write a function "
        "that returns its blocks as a list, with skip connections inside them, and give it as module:function"
    )


def _children(module: nn.Module, prefix: str) -> Iterator[NamedLayer]:
    for name, child in module._modules.items():  # one that is used twice, twice
        if child is None:
            continue
        inner = type(child) is nn.Sequential
        yield from _children(child, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", child)]


def _is_chain(model: nn.Module, chain: Sequence[NamedLayer], sample: torch.Tensor) -> bool:
    training = model.training
    model.eval()
    output = sample
    try:
        with torch.no_grad():
            expected = model(sample)
            for _, layer in chain:
                output = layer(output)
        return bool(output.shape == expected.shape and torch.allclose(output, expected, 1e-4, 1e-4))
    except (
        RuntimeError,
        TypeError,
        NotImplementedError,
        AttributeError,
        ValueError,
        AssertionError,
    ):
        return False
    finally:
        model.train(training)
