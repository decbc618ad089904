"""The models of the recipes: those of timm and torchvision by name, a small GPT, and presets.

The presets are for measuring communication: 2 to 6 MB of float32 gradients, a few tenths of a
second of computation per step on one CPU core, and four to eight buckets.
"""

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from _data import GPT


class Block(nn.Module):
    """A transformer layer: attention, then a feed-forward network, both with residuals."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.norm_feed_forward = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.projection(self.attend(self.norm_attention(hidden)))
        feed: torch.Tensor = self.feed_forward(self.norm_feed_forward(hidden))
        return hidden + feed

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, dim = hidden.shape
        parts = self.query_key_value(hidden).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, dim)


class TinyGPT(nn.Module):
    """A GPT whose token embedding is also its output head.

    The gradient of the shared table is complete only when backward has reached the first layer. So
    the table, more than half of the model, is in DDP's last bucket, and no computation is left to
    hide its exchange. Language models with large vocabularies have this kind of traffic.
    """

    def __init__(
        self, *, vocabulary: int, context: int, dim: int = 128, depth: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(context, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        for table in (self.token.weight, self.position):
            nn.init.normal_(table, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens) + self.position[: tokens.shape[1]]
        hidden = self.norm(self.blocks(hidden))
        return functional.linear(hidden, self.token.weight)


def _find(name: str) -> tuple[str, str]:
    """Return the library and the name of a model, given as ``library:name`` or as a name only."""
    import timm
    import torchvision

    known = {"timm": timm.list_models(), "torchvision": torchvision.models.list_models()}
    library, colon, model = name.rpartition(":")
    if colon:
        if library not in known:
            raise ValueError(
                f"expected a model library timm or torchvision, got {library!r}; write timm:NAME"
            )
        known = {library: known[library]}
    for candidate, models in known.items():
        if model in models:
            return candidate, model
    close = difflib.get_close_matches(
        model, {each for models in known.values() for each in models}, n=5
    )
    raise ValueError(
        f"expected the name of a model of {' or '.join(known)}, or {GPT!r}, got model={name!r}; "
        + (f"did you mean {', '.join(close)}?" if close else "see timm.list_models()")
    )


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, for one class per image or one word per position."""
    return functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True)
class Preset:
    """A model with sizes that give it a known amount of computation and traffic."""

    model: str
    batch_size: int
    bucket_cap_mb: float
    optimizer: str
    lr: float
    model_options: Mapping[str, Any] = field(default_factory=dict)
    image_size: int = 64
    channels: int = 1
    context: int = 128
    vocabulary: int = 2048


def _vit(dim: int, depth: int, heads: int) -> Mapping[str, Any]:
    return {"patch_size": 8, "embed_dim": dim, "depth": depth, "num_heads": heads}


PRESETS: Mapping[str, Preset] = {
    # Seven buckets of about the same size, and BatchNorm buffers, which DDP broadcasts in forward.
    "convnet": Preset(
        "timm:resnet18", 40, 0.3, "sgd", 0.2, {"channels": (32, 48, 64, 96)}, image_size=128
    ),
    # Four buckets of about the same size, since all layers are alike.
    "vit": Preset("timm:vit_tiny_patch16_224", 80, 0.5, "adamw", 1e-3, _vit(96, 5, 3)),
    # Many small layers and no buffers, which suits decoupled training.
    "deep_vit": Preset("timm:vit_tiny_patch16_224", 80, 0.3, "adamw", 1e-3, _vit(64, 12, 2)),
    # Nine tenths of the bytes are in the last two stages, whose gradients are ready first.
    "convnext": Preset(
        "timm:convnext_atto",
        128,
        0.4,
        "adamw",
        1e-3,
        {"dims": (24, 48, 96, 128), "depths": (2, 2, 6, 2)},
    ),
    # For tests: a step takes some ten milliseconds.
    "tiny": Preset(
        "timm:vit_tiny_patch16_224", 8, 0.05, "adamw", 1e-3, _vit(32, 4, 2), image_size=32
    ),
    # Unchanged models of timm, on small images.
    "vit_tiny": Preset("timm:vit_tiny_patch16_224", 16, 5.0, "adamw", 1e-3, channels=3),
    "convnext_atto": Preset("timm:convnext_atto", 8, 4.0, "adamw", 1e-3, channels=3),
    "regnety_002": Preset("timm:regnety_002", 16, 3.0, "sgd", 0.05, channels=3),
    # The last bucket holds the tied embedding, more than half of all bytes.
    "gpt": Preset(
        "gpt", 40, 0.12, "adamw", 1e-3, {"dim": 96, "depth": 2, "heads": 3}, vocabulary=3072
    ),
}


# train.py's arguments have the preset's names.
Sizes = Preset | argparse.Namespace


def make(sizes: Sizes, classes: int) -> nn.Module:
    """Build an untrained model by name: ``timm:resnet18``, ``torchvision:resnet18``, ``gpt``.

    A name without a library is looked up in timm, then in torchvision. ``model_options`` are passed
    to the library's constructor. A GPT has ``classes`` words, and windows of ``context`` words.
    """
    options = dict(sizes.model_options)
    if sizes.model == GPT:
        return TinyGPT(vocabulary=classes, context=sizes.context, **options)
    library, name = _find(sizes.model)
    made: nn.Module
    if library == "timm":
        import timm

        configuration = timm.get_pretrained_cfg(name)
        if configuration is not None and configuration.fixed_input_size:
            # Transformers have a position for each patch, so their constructors take the size.
            # Those of other models refuse it.
            options.setdefault("img_size", sizes.image_size)
        made = timm.create_model(name, num_classes=classes, in_chans=sizes.channels, **options)
        return made
    if sizes.channels != 3:
        raise ValueError(
            f"expected channels=3 for torchvision's models, got channels={sizes.channels}; "
            "leave --channels out, or take the model from timm"
        )
    import torchvision

    made = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    return made
