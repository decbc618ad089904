"""The chains of recipes compute as the models that they are made of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chains import gpt2, nanogpt, vit


def test_the_chain_of_gpt2_is_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    layers: list[Any] = gpt2(**sizes)
    assert layers[0].tokens.weight is layers[-1].weight
    # The model's layers are in the order of the chain, with the tied head at the end.
    for ours, theirs in zip(
        nn.Sequential(*layers).parameters(), model.transformer.parameters(), strict=True
    ):
        ours.data = theirs.data
    ids = torch.randint(0, 50257, (2, 8))
    torch.testing.assert_close(nn.Sequential(*layers).eval()(ids), model(ids).logits)


class Doubled(nn.Linear):
    """A block of another library's version, which returns a tuple."""

    def forward(self, input: torch.Tensor) -> Any:
        return 2 * super().forward(input), None


def test_the_chain_of_a_gpt_has_its_parts_in_order() -> None:
    body: Any = nn.ModuleDict(
        {
            "wte": nn.Embedding(5, 4),
            "wpe": nn.Embedding(3, 4),
            "drop": nn.Dropout(0.0),
            "h": nn.ModuleList([nn.Linear(4, 4), Doubled(4, 4)]),
            "ln_f": nn.LayerNorm(4),
        }
    )
    head = nn.Linear(4, 5, bias=False)
    ids = torch.randint(0, 5, (2, 3))
    hidden = body["wte"](ids) + body["wpe"].weight
    hidden, _ = body["h"][1](body["h"][0](hidden))
    layers = nanogpt(SimpleNamespace(transformer=body, lm_head=head))
    assert len(layers) == 5
    torch.testing.assert_close(nn.Sequential(*layers)(ids), head(body["ln_f"](hidden)))


def test_the_chain_of_a_vision_transformer_is_the_model() -> None:
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2}
    widths = {"hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
    model: Any = VisionTransformer(**{**sizes, **widths}).eval()
    layers = vit(**sizes, **widths)
    nn.init.normal_(model.heads.head.weight)  # torchvision's is zero
    layers[0].load_state_dict(
        {
            "token": model.class_token,
            "positions": model.encoder.pos_embedding,
            "projection.weight": model.conv_proj.weight,
            "projection.bias": model.conv_proj.bias,
        }
    )
    theirs = [*model.encoder.layers, model.encoder.ln, nn.Identity(), model.heads]
    for ours, other in zip(layers[1:], theirs, strict=True):
        ours.load_state_dict(other.state_dict())
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(nn.Sequential(*layers).eval()(images), model(images))
