"""One rank of a foreign training loop: the diffs of docs/loops.md.

    loops_worker.py LOOP PHASE DIRECTORY

LOOP is the name of a function below, which runs the loop without and with the document's lines, and
compares the runs. Or it is the name of a function in `loops_resumed`, which has the phases "killed"
and "resumed". Or it is the name of both.
"""

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import auto_hook
from crossover_ddp.errors import UnsupportedConfigurationError
from tests.harness import documents
from tests.recipes import loops_one_job, loops_resumed
from tests.recipes.loops_common import (
    Run,
    batches,
    deferring,
    diffs,
    evaluate,
    network,
    sgd,
    shown,
    square,
    train,
    watched,
)


def takes_turns(hooked: Run, plain: Run) -> None:
    hooked.assert_like(plain)
    assert hooked.turns == 4  # of 8 backward passes: two for each optimizer step
    assert sum(hooked.inside_turns(training=True)) == 4
    assert hooked.inside_turns(training=False) == [False, False]


def accelerate() -> None:
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = accelerate.Accelerator

    def train(source: str, run: Run | None = None, **ddp: Any) -> Run:
        model, run = network(), run or Run()
        names = {"model": model, "loader": batches(), "loss_function": square, "evaluate": evaluate}
        kwargs = [DistributedDataParallelKwargs(**ddp)]
        made = functools.partial(accelerator, kwargs_handlers=kwargs) if ddp else accelerator
        with watched(model, run), patch.object(accelerate, "Accelerator", made):
            shown(source, {"optimizer": sgd(model), **names})
        return run

    (diff,) = diffs("Accelerate")
    source, hooked = documents.before(diff), documents.after(diff)
    plain, run = train(source), Run()
    with deferring(run):
        train(hooked, run).assert_like(plain)
    assert run.deferred > 0
    takes_turns(train(as_sibling(hooked)), plain)
    # The document warns of this: the hook is not run. Without a state it would fail.
    train(source, comm_hook=auto_hook).assert_like(plain)


def as_sibling(source: str) -> str:
    """Return a loop with turns in the place of `AutoState`, and a pause for evaluation."""
    source = re.sub(r"AutoState\(.*?\)", "CrossoverState()", source)
    source = source.replace("AutoState", "CrossoverState").replace("auto_hook", "crossover_hook")
    return re.sub(r"^( *)evaluate", r"\1with state.paused(): evaluate", source, flags=re.M)


def trainer() -> None:
    import transformers

    words = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": each, "labels": each} for each in words]
    options = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    options |= {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
    }
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, attention_dropout=0.1, **sizes)

    def train(source: str, run: Run | None = None, **more: Any) -> Run:
        arguments = transformers.TrainingArguments(
            os.getcwd(), learning_rate=0.01, **{**options, **more}
        )
        torch.manual_seed(3)
        model, run = transformers.LlamaForCausalLM(config), run or Run()
        with watched(model, run):
            shown(
                source,
                {"model": model, "arguments": arguments, "train_set": data, "eval_set": data},
            )
        return run

    auto, turns = diffs("Hugging Face Trainer")
    plain = train(documents.before(turns))
    takes_turns(train(documents.after(turns)), plain)
    # Clipping's norm has another order of additions.
    for more, tolerance in (({}, {"rtol": 1e-5, "atol": 1e-7}), ({"max_grad_norm": 0.0}, {})):
        run = Run()
        with deferring(run):
            train(documents.after(auto), run, **more)
        expected = train(documents.before(auto), **more) if more else plain
        run.assert_like(expected, **tolerance)
        assert run.deferred > 0
    resuming = 'trainer.train(resume_from_checkpoint="checkpoint-2")'
    with deferring():
        used = documents.after(auto).replace("trainer.train()", resuming)
        train(used, **more).assert_like(expected)
    used = documents.after(auto).replace("arguments.ddp", "unused")
    with pytest.raises(UnsupportedConfigurationError, match="gradient_as_bucket_view"):
        train(used)
    for old, new in (
        ("AutoState(self.optimizer.optimizer)", "CompressedState(Int8())"),
        ("AutoState, auto_hook", "CompressedState, Int8, compressed_hook"),
        ("auto", "compressed"),
    ):
        used = used.replace(old, new)
    compressed = train(used)
    assert not torch.equal(compressed.weights[0], plain.weights[0])
    compressed.assert_like(plain, rtol=0.0, atol=0.05)


def lightning() -> None:
    from tests.recipes import loops_lightning

    loops_lightning.lightning()


class _Compiled(nn.Module):
    """A user's module. The compiler skips torch's own containers if they are called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.network(inputs)


def compiled() -> None:
    """Compile with a fast back end that splits the graph like the default one."""
    from torch._dynamo.utils import counters

    dist.init_process_group("gloo")

    names = {"torch": torch, "DistributedDataParallel": DistributedDataParallel}
    with patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        for diff in diffs("torch.compile"):  # inside of DDP, and outside
            runs, graphs = [], []
            for source in (documents.before(diff), documents.after(diff)):
                model = _Compiled()
                optimizer = sgd(model)
                names |= {"train": functools.partial(train, optimizer=optimizer, loader=batches(8))}
                torch._dynamo.reset()
                counters.clear()
                with watched(model) as run, deferring(run):
                    shown(source, {**names, "model": model, "optimizer": optimizer})
                runs.append(run)
                graphs.append(counters["stats"]["unique_graphs"])
            runs[1].assert_like(runs[0])
            assert runs[1].deferred > 0
            assert graphs[1] == graphs[0] > 0


def timm() -> None:
    """Run the lines after timm's ``prepare_distributed``, in a loop of timm's functions."""
    dist.init_process_group("gloo")
    job = loops_resumed.Job("", Path.cwd())
    auto, turns, _ = diffs("timm")
    train = functools.partial(loops_resumed.run_timm, job, opt="adamw")
    plain = train("")
    run = Run()
    with deferring(run):
        train(auto).assert_like(plain)
    assert run.deferred > 0
    unpaused = turns.replace("state.paused()(validate)", "validate")
    for diff, inside in ((unpaused, 11), (turns, 9)):
        run = train(diff)
        run.assert_like(plain)
        assert (run.turns, sum(run.inside_turns(training=True))) == (12, inside)
        assert run.inside_turns(training=False) == [diff is unpaused] * 3


def torchvision() -> None:
    dist.init_process_group("gloo")
    train = functools.partial(loops_one_job.torchvision, loops_resumed.Job("", Path.cwd()))
    (diff,) = diffs("torchvision's references")
    plain = train("")
    with deferring():
        for each in (diff, diff.replace("state.follow(model_ema)", "pass")):
            run = train(each)
            run.assert_like(plain)
            assert run.deferred > 0
    clipped = train("", clip=0.01)
    assert not torch.equal(clipped.weights[0], plain.weights[0])
    train(diff, clip=0.01).assert_like(clipped, rtol=1e-5, atol=1e-7)


def nanogpt() -> None:
    dist.init_process_group("gloo")
    train = functools.partial(loops_one_job.nanogpt, loops_resumed.Job("", Path.cwd()))
    one_job, hook, added = diffs("nanoGPT")
    auto, muon = (
        documents.patched(loops_one_job.NANOGPT, diff).replace("inductor", "aot_eager")
        for diff in (one_job, added)
    )
    own = loops_one_job.with_adamw(loops_one_job.without_hook(muon))
    compiling = "if compile:\n    model = torch.compile(model) # requires PyTorch 2.0\n"
    assert compiling in muon
    outside = muon.replace(compiling, "").replace("raw_model", compiling + "raw_model", 1)
    with patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        for compiles in (False, True):
            plain = train(loops_one_job.NANOGPT, compile=compiles)
            with deferring():
                run = train(auto, compile=compiles)
            run.assert_like(plain)
            assert run.deferred > 0
        clipped = train(loops_one_job.without_hook(muon), clip=0.1, compile=True)
        for source in (muon, outside, documents.patched(own, hook)):
            train(source, clip=0.1, compile=True).assert_like(clipped)
    clipped = train(loops_one_job.NANOGPT, clip=0.1)
    train(auto, clip=0.1).assert_like(clipped, rtol=1e-5, atol=1e-7)


LOOPS = {
    each.__name__: each
    for each in (accelerate, trainer, lightning, compiled, timm, torchvision, nanogpt)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, phase, directory = sys.argv[1:]
    if name in LOOPS and phase != "resumed":
        LOOPS[name]()
    if name in loops_resumed.LOOPS:
        loops_resumed.run(name, phase, Path(directory))
    if dist.is_initialized():
        dist.destroy_process_group()
