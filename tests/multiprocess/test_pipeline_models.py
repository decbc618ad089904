"""Five models, planned with ``crossover-ddp plan``, run a step on torch's own runtime.

Losses and gradients are those of the model itself, which computes each micro-batch by itself.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from chains import gpt2, nanogpt, vit
from crossover_ddp import cli
from crossover_ddp.pipeline import Plan
from crossover_ddp.pipeline.chain import named_chain
from tests.harness import run_ranks
from tests.harness.campaign import only_in_campaign

TOLERANCE = 1e-5
MICRO, M = 2, 4
TOKENS, WORDS = 6, 11
TIMEOUT_S = 200.0
GPT_SIZES: dict[str, Any] = {
    "n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": WORDS, "n_positions": TOKENS,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VIT_SIZES = {
    "image_size": 16, "patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": 8,
    "mlp_dim": 16, "num_classes": 5,
}  # fmt: skip


# --- the models -----------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        output: torch.Tensor = x + self.mlp(self.ln_2(x))
        return output


class GPT(nn.Module):
    """A model with the structure and the names of nanoGPT's, without dropout."""

    def __init__(self, depth: int = 3, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        tokens, self.lm_head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        tokens.weight = self.lm_head.weight
        self.transformer = nn.ModuleDict(
            {
                "wte": tokens,
                "wpe": nn.Embedding(TOKENS, width),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([GPTBlock(width, heads) for _ in range(depth)]),
                "ln_f": nn.LayerNorm(width),
            }
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        body: Any = self.transformer
        hidden = body.drop(body.wte(ids) + body.wpe(torch.arange(ids.shape[1])))
        for block in body.h:
            hidden = block(hidden)
        logits: torch.Tensor = self.lm_head(body.ln_f(hidden))
        return logits


class Logits(nn.Module):
    """A model of transformers that returns only the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids).logits
        return logits


def nanogpt_layers() -> list[nn.Module]:
    return nanogpt(GPT())


def gpt2_layers() -> list[nn.Module]:
    return gpt2(**GPT_SIZES)


def gpt2_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT_SIZES)))


def vit_layers() -> list[nn.Module]:
    layers = vit(**VIT_SIZES)
    start_head(layers[-1])
    return layers


def vit_model() -> nn.Module:
    from torchvision.models import VisionTransformer

    model: Any = VisionTransformer(**VIT_SIZES)
    start_head(model.heads)
    return model  # type: ignore[no-any-return]


def start_head(head: nn.Module) -> None:
    """Replace the zeros of torchvision's head, which make the gradients of all other layers zero."""
    for parameter in head.parameters():
        nn.init.normal_(parameter)


def vit_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters in the order of the chain, which begins with those of `Patches`."""
    first = [model.class_token, model.encoder.pos_embedding, *model.conv_proj.parameters()]
    known = {*first}
    return [*first, *(each for each in model.parameters() if each not in known)]


def in_order(model: nn.Module) -> list[nn.Parameter]:
    return [*model.parameters()]


class Images:
    """Images and their classes."""

    def __init__(self, size: int, classes: int) -> None:
        self.shape, self.classes = (3, size, size), classes

    @property
    def options(self) -> list[str]:
        return ["--input", ",".join(map(str, (MICRO, *self.shape)))]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(MICRO * M, *self.shape, generator=generator)
        return x, torch.randint(self.classes, (len(x),), generator=generator)


class Tokens:
    """Sequences of tokens, and the same sequences one token later."""

    options = ("--tokens", f"{MICRO},{TOKENS}")

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(WORDS, (MICRO * M, TOKENS + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Case(NamedTuple):
    """A model by its name for the command, the model itself, and its data."""

    name: str
    model: Callable[[], nn.Module]
    data: Images | Tokens
    parameters: Callable[[Any], list[nn.Parameter]] = in_order


def of_torchvision(name: str) -> Case:
    def model() -> nn.Module:
        from torchvision.models import get_model

        made: nn.Module = get_model(name)
        return made

    return Case(f"torchvision:{name}", model, Images(64, 1000))


CASES = {
    "nanogpt": Case(f"{__name__}:nanogpt_layers", GPT, Tokens()),
    "gpt2": Case(f"{__name__}:gpt2_layers", gpt2_model, Tokens()),
    "vgg16": of_torchvision("vgg16"),
    "resnet50": of_torchvision("resnet50"),
    "vit": Case(f"{__name__}:vit_layers", vit_model, Images(16, 5), vit_parameters),
}


def without_dropout(layers: nn.Module) -> nn.Module:
    for each in layers.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return layers


# --- the step -------------------------------------------------------------------------------------


def expected_step(case: Case) -> dict[str, list[torch.Tensor]]:
    """Return the losses of the micro-batches, and the parameters and gradients of the mean loss."""
    torch.manual_seed(0)
    model = without_dropout(case.model())
    losses = []
    for x, y in zip(*[each.split(MICRO) for each in case.data.batch()], strict=True):
        loss = loss_of(model(x), y)
        (loss / M).backward()
        losses.append(loss.detach())
    parameters = case.parameters(model)
    gradients = [each.grad for each in parameters if each.grad is not None]
    assert len(gradients) == len(parameters)
    assert all(gradient.any() for gradient in gradients), "zeros would compare nothing"
    return {
        "losses": losses, "parameters": [each.detach() for each in parameters],
        "gradients": gradients,
    }  # fmt: skip


def chain_of(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    x, _ = case.data.batch()
    named, _ = named_chain(case.name, x[:MICRO].shape, tokens=isinstance(case.data, Tokens))
    return [without_dropout(layer) for _, layer in named]


def named_parameters(layers: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all names of the chain's parameters, also the second one of a tied parameter."""
    return nn.Sequential(*layers).named_parameters(remove_duplicate=False)


def run_step(rank: int, world_size: int, name: str, directory: str) -> tuple[int, ...]:
    """Run a step of the saved plan and compare it. Return the numbers of this rank's stages."""
    case = CASES[name]
    expected = torch.load(Path(directory, "expected.pt"), mmap=True)
    layers = chain_of(case)
    parameters = [*nn.Sequential(*layers).parameters()]
    places = {parameter: place for place, parameter in enumerate(parameters)}
    place_of = {each: places[parameter] for each, parameter in named_parameters(layers)}

    stages = Plan.load(Path(directory, "plan.json")).build_stages(layers, "cpu")
    if stages:
        share = stages[0].share
        losses = step(case, stages)
        if stages[-1].is_last:
            own = slice(share.replica * len(losses), (share.replica + 1) * len(losses))
            assert len(losses) == M // share.replicas
            compare(losses, expected["losses"][own])
    for stage in stages:
        module = stage.submod
        if isinstance(module, DistributedDataParallel):
            module = module.module
        for own_name, parameter in module.named_parameters(remove_duplicate=False):
            place = place_of[own_name]
            compare(parameter.detach(), expected["parameters"][place], own_name)
            compare(parameter.grad, expected["gradients"][place], own_name)
    dist.barrier()
    return tuple([stage.stage_index for stage in stages])


def step(case: Case, stages: list[Any]) -> list[torch.Tensor]:
    """Run a step on this replica's part of the batch. Return the losses of its micro-batches."""
    share = stages[0].share
    schedule = share.plan.schedule(stages, loss_of)
    x, y = (each.chunk(share.replicas)[share.replica] for each in case.data.batch())
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if stages[0].is_first else []), target=y, losses=losses)
    return [each.detach() for each in losses]


def compare(found: Any, expected: Any, name: str = "losses") -> None:
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}"
    )


# --- the tests ------------------------------------------------------------------------------------


def plan_by_command(case: Case, directory: Path, devices: int, stages: int | None) -> Plan:
    """Plan with the command, for devices with links that make a pipeline or replicas pay."""
    cluster, path = directory / "cluster.json", directory / "plan.json"
    links = {"bandwidth_gbit": 1000, "latency_us": 0}
    cluster.write_text(json.dumps({"devices": devices, **links}))
    exact = [] if stages is None else ["--stages", str(stages)]
    code = cli.main(
        [
            "plan", case.name, *case.data.options, "--cluster", str(cluster),
            "--microbatches", str(M), "--runtime", "torch", "--save", str(path), *exact,
        ]
    )  # fmt: skip
    assert code == 0
    return Plan.load(path)


# A model, the number of devices and ranks, and the exact number of stages.
FAST = [("gpt2", 2, 2), ("vit", 4, 4)]
EACH = [
    (name, ranks, stages)
    for name in CASES
    for ranks, stages in ((2, None), (2, 2), (4, None), (4, 2), (4, 4))
]


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [pytest.param(*each, marks=[] if each in FAST else [only_in_campaign]) for each in EACH],
)
def test_a_step_of_the_command_s_plan_is_that_of_the_model(
    name: str, ranks: int, stages: int | None, tmp_path: Path
) -> None:
    case = CASES[name]
    expected = expected_step(case)
    plan = plan_by_command(case, tmp_path, ranks, stages)
    assert "torch" in plan.runtimes
    torch.save(expected, tmp_path / "expected.pt")
    placed = run_ranks(run_step, ranks, args=[name, str(tmp_path)], timeout_s=TIMEOUT_S)
    assert {each for numbers in placed for each in numbers} == {*range(len(plan.stages))}
    if stages is not None:
        assert len(plan.stages) == stages
        assert len({*placed} - {()}) > 1, "the stages are on several ranks"
