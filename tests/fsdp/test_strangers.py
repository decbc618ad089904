"""A complete FSDP2 script trains with the hook as it does with hybrid sharding.

The script is written as in torch's tutorials: a language model with tied weights, made on the meta
device, in mixed precision, with prefetching, accumulation, clipping and a schedule. The diff is
that of docs/fsdp.md.
"""

import re
from pathlib import Path

import pytest

from tests.harness import documents, spawn_script

TIMEOUT_S = 120.0

SCRIPT = """
import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCABULARY, WIDTH, HEADS, LENGTH, DEPTH = 97, 32, 4, 24, 4
ACCUMULATE, STEPS, WARM_UP = 2, 12, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 2), nn.Linear(3 * WIDTH + 2, WIDTH)

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.before_attention(hidden)).view(batch, length, 3, HEADS, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.down(F.silu(self.up(self.before_mlp(hidden))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words, targets):
        hidden = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def initialise(model):
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        whole = torch.ones(parameter.shape)
        if parameter.ndim > 1:
            nn.init.normal_(whole, std=0.1 / math.sqrt(2 * DEPTH) if "down" in name else 0.1)
        shards = whole.chunk(mesh["inside"].size())
        with torch.no_grad():
            parameter.to_local().copy_(shards[mesh["inside"].get_local_rank()])


def batches(rank):
    draw = torch.Generator().manual_seed(rank)
    while True:
        begin = torch.randint(VOCABULARY, (4, 1), generator=draw)
        text = (begin + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        yield text[:, :-1], text[:, 1:]


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
with torch.device("meta"):
    model = Model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
for before, after in zip(model.layers, model.layers[1:]):
    before.set_modules_to_forward_prefetch([after])
    after.set_modules_to_backward_prefetch([before])
model.to_empty(device="cpu")
initialise(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / WARM_UP))
data = batches(dist.get_rank())
for step in range(STEPS):
    total = torch.zeros(())
    for micro in range(ACCUMULATE):
        model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
        loss = model(*next(data)) / ACCUMULATE
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total.item()!r} norm {norm.item()!r}")
checksum = sum(each.full_tensor().double().square().sum().item() for each in model.parameters())
print(f"end {checksum!r}")
dist.destroy_process_group()
"""

DIFF = """
 for layer in model.layers:
-    fully_shard(layer, mesh=mesh, mp_policy=policy)
-fully_shard(model, mesh=mesh, mp_policy=policy)
+    fully_shard(layer, mesh=mesh["inside"], mp_policy=policy)
+fully_shard(model, mesh=mesh["inside"], mp_policy=policy)
...
 initialise(model)
+from crossover_ddp import CompressedState, Int8, compressed_hook, reduce_scatter_all_gather_hook
+from crossover_ddp.fsdp import register_comm_hook
+between = mesh["between"].get_group()
+register_comm_hook(model, between, reduce_scatter_all_gather_hook)
""".removeprefix("\n")
SPLIT = "register_comm_hook(model, between, reduce_scatter_all_gather_hook)"
INT8 = "register_comm_hook(model, CompressedState(Int8(), process_group=between), compressed_hook)"


def run(path: Path, script: str) -> list[str]:
    """Run a script in two nodes of two ranks. Return the output of each rank."""
    path.write_text(script)
    with spawn_script(path, 4, forked=True) as ranks:
        return ranks.wait(TIMEOUT_S)


def first_and_last_loss(output: str) -> tuple[float, float]:
    losses = re.findall(r"loss ([\d.]+)", output)
    return float(losses[0]), float(losses[-1])


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    outputs = run(tmp_path_factory.mktemp("native") / "train.py", SCRIPT)
    assert all(len(re.findall(r"^step \d+ loss \d", each, re.M)) == 12 for each in outputs)
    first, last = first_and_last_loss(outputs[0])
    assert last < first - 0.3
    return outputs


def test_a_script_has_the_losses_norms_and_parameters_of_hybrid_sharding(
    native: list[str], tmp_path: Path
) -> None:
    assert run(tmp_path / "train.py", documents.patched(SCRIPT, DIFF)) == native


def test_a_script_learns_with_gradients_in_eight_bits(native: list[str], tmp_path: Path) -> None:
    script = documents.patched(SCRIPT, DIFF.replace(SPLIT, INT8))
    outputs = run(tmp_path / "train.py", script)
    assert {each.splitlines()[-1] for each in outputs} == {outputs[0].splitlines()[-1]}
    assert outputs != native
    (_, expected), (_, last) = first_and_last_loss(native[0]), first_and_last_loss(outputs[0])
    assert last == pytest.approx(expected, abs=0.05)
