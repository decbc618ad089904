"""Finds a model by name and splits it into a chain of layers."""

import functools
import importlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NamedLayer = tuple[str, nn.Module]


class LayerChain(nn.Sequential):
    """An ``nn.Sequential`` whose layers may return any output that `one_tensor` accepts.

    Args:
        layers: the layers, or one ordered dictionary of layers by their names.
        recomputed: the places of the layers that keep only their input for backward. Their forward
            runs again in backward, with the same random numbers. Default: none.
    """

    def __init__(
        self, *layers: nn.Module | OrderedDict[str, nn.Module], recomputed: Collection[int] = ()
    ) -> None:
        super().__init__(*layers)  # type: ignore[arg-type]  # torch accepts either
        self._recomputed = frozenset(recomputed)

    def forward(self, input: Any) -> torch.Tensor:
        """Return the output of the last layer."""
        value: torch.Tensor = input
        for place, layer in enumerate(self):
            if place in self._recomputed and torch.is_grad_enabled():
                # A layer may change its input in place, which would be lost for the second forward.
                on_copy = functools.partial(_on_copy, layer)
                output = checkpoint(on_copy, value, use_reentrant=False)
            else:
                output = layer(value)
            value = one_tensor(output, str(place))
        return value


def _on_copy(layer: nn.Module, value: torch.Tensor) -> Any:
    return layer(value.clone())


def one_tensor(output: Any, name: str) -> torch.Tensor:
    """Return the one tensor that a layer passes to the next layer.

    It is the output, or the first element of a tuple or list whose other elements are None or
    empty. Blocks of language models return such tuples when they have no cache to return.

    Args:
        output: the return value of the layer.
        name: the name of the layer, for the error message.

    On failure: ``TypeError`` for any other output.
    """
    first: Any = output
    rest: Sequence[Any] = ()
    if isinstance(output, tuple | list) and output:
        first, *rest = output
    is_one = isinstance(first, torch.Tensor) and all(map(_is_empty, rest))
    if not is_one:
        raise TypeError(
            f"expected a layer that returns one tensor, got {type(output).__name__} of layer "
            f"{name!r}; skip connections must stay inside one layer"
        )
    found: torch.Tensor = first
    return found


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, tuple | list | dict) and not value)


def named_model(name: str, alternative: str) -> Any:
    """Create the model that ``timm:NAME``, ``torchvision:NAME`` or ``module:function`` names.

    Return a module, or a list of layers if the function returns several. ``alternative`` describes
    the other kind of argument that the caller accepts. The error message mentions it.
    """
    home, _, function = name.partition(":")
    try:
        module = importlib.import_module(home)
        if home == "timm":
            made = module.create_model(function)
        elif home == "torchvision":
            made = module.models.get_model(function)
        else:
            made = getattr(module, function)()
        return made if isinstance(made, nn.Module) else [*nn.Sequential(*made)]
    except (ImportError, AttributeError, ValueError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"expected {alternative}, timm:NAME, torchvision:NAME or module:function, "
            f"got {name!r} ({error})"
        ) from error


def gradient_sizes(name: str) -> list[int]:
    """Return the size in bytes of each gradient of the named model; see `named_model`."""
    with torch.device("meta"):  # creates shapes, but allocates no memory
        made = named_model(name, "a size such as 102MB")
    models = [made] if isinstance(made, nn.Module) else [*made]
    trained = [each for each in nn.ModuleList(models).parameters() if each.requires_grad]
    if not trained:
        raise ValueError(f"expected a model with parameters that are trained, got {name!r}")
    return [each.numel() * each.element_size() for each in trained]


def named_chain(
    name: str, shape: Sequence[int], *, tokens: bool = False
) -> tuple[list[NamedLayer], torch.Tensor]:
    """Return the layers of the named model as a chain, and a random micro-batch of this shape.

    With ``tokens``, the micro-batch holds whole numbers below the vocabulary of the model's first
    ``nn.Embedding``.

    Raises `ValueError` if running the layers one after the other does not give the model's output,
    or if a model for tokens has no ``nn.Embedding``.
    """
    model = named_model(name, "a profile (a .json file)")
    if not isinstance(model, nn.Module):
        layers = [(str(place), layer) for place, layer in enumerate(model)]
        return layers, _sample(name, layers, shape, tokens)
    layers = list(_children(model, ""))
    sample = _sample(name, layers, shape, tokens)
    if type(model) is nn.Sequential:
        return layers, sample
    is_linear = [isinstance(layer, nn.Linear) for _, layer in layers]
    head = is_linear.index(True) if any(is_linear) else len(layers)
    # Many models flatten in forward(), just before the first linear layer.
    flattened = [*layers[:head], ("flatten", nn.Flatten()), *layers[head:]]
    for chain in (layers, flattened):
        if _is_chain(model, chain, sample):
            return chain, sample
    raise ValueError(
        f"expected a model that is a chain and takes {tuple(shape)}, got {name!r}; change --input, "
        "or write a function that returns its blocks as a list, with skip connections inside them, "
        "and give it as module:function"
    )


def _sample(
    name: str, layers: Sequence[NamedLayer], shape: Sequence[int], tokens: bool
) -> torch.Tensor:
    if not tokens:
        return torch.randn(*shape)
    for _, layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.Embedding):
                return torch.randint(module.num_embeddings, tuple(shape))
    raise ValueError(
        f"expected a model with an nn.Embedding, got none in {name!r}; give the shape of a "
        "micro-batch with --input"
    )


def _children(module: nn.Module, prefix: str) -> Iterator[NamedLayer]:
    """Yield the named children, replacing any nested ``nn.Sequential`` with its own children."""
    # named_children() would leave out the second use of a layer that is used twice.
    for name, child in module._modules.items():
        if type(child) is nn.Sequential:
            yield from _children(child, f"{prefix}{name}.")
        elif child is not None:
            yield f"{prefix}{name}", child


def _is_chain(model: nn.Module, chain: Sequence[NamedLayer], sample: torch.Tensor) -> bool:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model(sample)
            output = LayerChain(*[layer for _, layer in chain])(sample)
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
