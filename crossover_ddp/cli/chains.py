"""Find a model by its name and list it as a chain of layers. Imports torch, and so is imported when it is needed."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

_LIBRARIES: Final = ("timm", "torchvision")
_TOLERANCE: Final = 1e-4

NamedLayer = tuple[str, nn.Module]


def load_chain(name: str, shape: Sequence[int]) -> tuple[list[NamedLayer], torch.Tensor]:
    """Return the layers of a model, each with the name of its module, and a micro-batch of the given shape.

    Args:
        name: ``timm:NAME``, ``torchvision:NAME``, or ``module:function`` that returns a list of modules, an
            ``nn.Sequential``, or a model whose children are called one after the other.
        shape: of one micro-batch.

    On failure: ``ValueError`` for a name that leads nowhere, and for a model that is no chain.
    """
    torch.manual_seed(0)
    model = _build(name)
    sample = torch.randn(*shape)
    if not isinstance(model, nn.Module):
        return [(str(place), layer) for place, layer in enumerate(model)], sample
    layers = list(_links(model, ""))
    return (
        (layers, sample)
        if isinstance(model, nn.Sequential)
        else (_checked(name, model, layers, sample), sample)
    )


def _build(name: str) -> Any:
    place, _, function = name.partition(":")
    try:
        if place == "timm":
            return importlib.import_module("timm").create_model(function)
        if place == "torchvision":
            return importlib.import_module("torchvision").models.get_model(function)
        return getattr(importlib.import_module(place), function)()
    except (ImportError, AttributeError, ValueError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"expected a profile (a .json file), timm:NAME, torchvision:NAME or module:function, got {name!r} "
            f"({type(error).__name__}: {error}); check the name, and that its directory is in PYTHONPATH"
        ) from error


def _links(module: nn.Module, prefix: str) -> Iterator[NamedLayer]:
    """List the children in the order of their registration; those of an ``nn.Sequential`` one by one."""
    for name, child in module.named_children():
        if type(child) is nn.Sequential:
            yield from _links(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _checked(name: str, model: nn.Module, layers: list[NamedLayer], sample: torch.Tensor) -> list[NamedLayer]:
    """Return the layers if one after the other gives the model's output, perhaps with a flattening between them."""
    model.eval()
    reason = "its children, called one after the other, give another output"
    with torch.no_grad():
        expected = _output(name, model, sample)
        for chain in (layers, *_flattened(layers)):
            try:
                output = sample
                for _, layer in chain:
                    output = layer(output)
            except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if (
                isinstance(output, torch.Tensor)
                and output.shape == expected.shape
                and torch.allclose(output, expected, _TOLERANCE, _TOLERANCE)
            ):
                model.train()
                return chain
    raise ValueError(
        f"expected a model that is a chain, got {name!r} ({reason[:200]}); write a function that returns its blocks as "
        "a list, with skip connections inside the blocks, and give it as module:function"
    )


def _output(name: str, model: nn.Module, sample: torch.Tensor) -> torch.Tensor:
    try:
        output = model(sample)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        raise ValueError(
            f"expected the shape of an input that {name!r} takes, got {','.join(map(str, sample.shape))} ({error}); "
            "give it with --input N,C,H,W, and keep the images as large as the model needs"
        ) from error
    if not isinstance(output, torch.Tensor):
        raise ValueError(
            f"expected a model that returns one tensor, got {type(output).__name__} of {name!r}; write a function that "
            "returns its blocks as a list, and give it as module:function"
        )
    return output


def _flattened(layers: list[NamedLayer]) -> Iterator[list[NamedLayer]]:
    """Put a flattening before the first layer of the head, which many models do in their forward."""
    for place, (_, layer) in enumerate(layers):
        if isinstance(layer, nn.Linear):
            yield [*layers[:place], ("flatten", nn.Flatten()), *layers[place:]]
            return
