"""Models as chains of layers, for pipelines: GPT-2, nanoGPT and a vision transformer.

    PYTHONPATH=. crossover-ddp plan recipes.chains:vit --input 2,3,224,224 --cluster cluster.json

VGG and ResNet are chains by themselves: ``crossover-ddp plan torchvision:vgg16``. A plan cuts a
chain between any two layers, so the layers are small. Each takes the tensor that the one before
returns.
"""

from typing import Any

import torch
from torch import nn


class Embeddings(nn.Module):
    """The first layer of a GPT: token ids become vectors that know their positions."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding, dropout: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        vectors: torch.Tensor = self.dropout(self.tokens(ids) + self.positions(places))
        return vectors


class Block(nn.Module):
    """A block that returns one tensor, even if the model's own block returns a tuple."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: Any = self.block(hidden)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found


class Patches(nn.Module):
    """The first layer of a vision transformer: images become patches after a class token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.projection, self.dropout = model.conv_proj, model.encoder.dropout
        self.token, self.positions = model.class_token, model.encoder.pos_embedding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.projection(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(images), -1, -1)
        vectors: torch.Tensor = self.dropout(torch.cat([token, patches], 1) + self.positions)
        return vectors


class FirstToken(nn.Module):
    """Takes the class token of each image."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, 0]


def gpt2(**sizes: Any) -> list[nn.Module]:
    """Return GPT-2 of transformers. The head's weight is that of the token embedding.

    ``sizes`` are arguments of ``GPT2Config``, such as ``n_layer=24, n_embd=1024, n_head=16``. The
    default is the smallest GPT-2, with 124 million parameters.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    # Only this attention is causal without a mask.
    settings: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
    settings |= {"bos_token_id": None, "eos_token_id": None}  # they need not be in the vocabulary
    return nanogpt(GPT2LMHeadModel(GPT2Config(**{**settings, **sizes})))


def nanogpt(model: Any) -> list[nn.Module]:
    """Return a GPT of nanoGPT (github.com/karpathy/nanoGPT), or of the same structure.

    from model import GPT, GPTConfig
    layers = nanogpt(GPT(GPTConfig()))
    """
    body = model.transformer
    blocks = [Block(each) for each in body.h]
    return [Embeddings(body.wte, body.wpe, body.drop), *blocks, body.ln_f, model.lm_head]


def vit(**sizes: Any) -> list[nn.Module]:
    """Return a vision transformer of torchvision, by default ``vit_b_16``.

    ``sizes`` are arguments of ``torchvision.models.VisionTransformer``.
    """
    from torchvision.models import VisionTransformer

    settings = {"image_size": 224, "patch_size": 16, "num_layers": 12, "num_heads": 12}
    settings |= {"hidden_dim": 768, "mlp_dim": 3072}
    model = VisionTransformer(**{**settings, **sizes})
    return [Patches(model), *model.encoder.layers, model.encoder.ln, FirstToken(), model.heads]
