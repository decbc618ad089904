"""One rank of a foreign training loop: run the diffs of docs/loops.md without and with their lines.

    loops_worker.py LOOP DIRECTORY

LOOP is the name of a function below. Writes DIRECTORY/<rank>.pt: of each run the model's weights at the end, the
turns taken, for each forward of the model whether it trained and whether it ran inside a turn, and the error that
ended it if one did.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from crossover_ddp import DecoupledState, decoupled_hook
from tests.harness import documents
from tests.recipes.loops_common import (
    Deferrals,
    Report,
    Runs,
    diffs,
    evaluate,
    network,
    samples,
    sgd,
    shown,
    square,
)


def accelerate() -> Report:
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs

    runs = Runs()

    def train(name: str, source: str, **others: Any) -> None:
        model = network()
        loader = DataLoader(samples(), batch_size=4)
        names = {"model": model, "loader": loader, "loss_function": square, "evaluate": evaluate, **others}
        with runs.run(name, model):
            shown(source, {"optimizer": sgd(model), **names})

    (diff,) = diffs("Accelerate")
    train("plain", documents.before(diff))
    train("hooked", documents.after(diff))
    ignored = DistributedDataParallelKwargs(comm_hook=decoupled_hook)
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    decoupled = documents.before(diff).replace("for epoch", "hook(model, optimizer.optimizer)\nfor epoch")
    for name, kwargs, source in (
        ("ignored", ignored, documents.before(diff)),
        ("decoupled", views, decoupled),
    ):
        deferrals = Deferrals()
        with patch.object(
            accelerate, "Accelerator", functools.partial(accelerate.Accelerator, kwargs_handlers=[kwargs])
        ):
            train(name, source, hook=deferrals.hook)
        runs.report[name]["deferred"] = deferrals.count
    return runs.report


def trainer() -> Report:
    import transformers

    runs = Runs()
    words = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": each, "labels": each} for each in words]
    arguments = transformers.TrainingArguments(
        output_dir=os.getcwd(),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
    )

    class Decoupled(transformers.Trainer):  # type: ignore[misc]
        hooked = False

        def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.hooked:
                assert isinstance(model, DistributedDataParallel)
                model.register_comm_hook(DecoupledState(self.optimizer.optimizer), decoupled_hook)
                self.hooked = True
            return super().training_step(model, *args, **kwargs)

    def train(name: str, source: str) -> None:
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config)
        names = {
            "model": model,
            "arguments": arguments,
            "train_set": data,
            "eval_set": data,
            "Decoupled": Decoupled,
        }
        with runs.run(name, model):
            shown(source, names)

    (diff,) = diffs("Hugging Face Trainer")
    train("plain", documents.before(diff))
    train("hooked", documents.after(diff))
    train("decoupled", documents.before(diff).replace("Trainer(", "Decoupled("))
    return runs.report


def lightning() -> Report:
    from tests.recipes import loops_lightning

    return loops_lightning.lightning()


class _Compiled(nn.Module):
    """A module of somebody's own: the compiler leaves torch's own containers alone where nobody else calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.network(inputs)


def compiled(backend: str = "aot_eager") -> Report:
    """With the quickest back end that splits the graph as the default one does."""
    from torch._dynamo.utils import counters

    dist.init_process_group("gloo")
    runs = Runs()

    def train(model: nn.Module) -> None:
        optimizer = sgd(model)
        for (inputs,) in DataLoader(samples(), batch_size=8):
            square(model(inputs + dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()

    names = {"torch": torch, "DistributedDataParallel": DistributedDataParallel, "train": train}
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        for where, diff in zip(("inside", "outside"), diffs("torch.compile"), strict=True):
            for how, source in (("plain", documents.before(diff)), ("hooked", documents.after(diff))):
                model = _Compiled()
                torch._dynamo.reset()
                counters.clear()
                with runs.run(f"{how} {where}", model):
                    shown(source, {**names, "model": model})
                runs.report[f"{how} {where}"]["graphs"] = counters["stats"]["unique_graphs"]
    return runs.report


def inductor() -> Report:
    """With the default back end, which takes its time."""
    return compiled("inductor")


def timm_task() -> Report:
    """The line behind timm's own ``prepare_distributed``, in a loop of timm's parts."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.task import ClassificationTask

    dist.init_process_group("gloo")
    runs = Runs()

    def validate(model: nn.Module) -> None:
        with torch.inference_mode():
            model.eval()(torch.ones(1, 3, 32, 32))
        model.train()

    (line, pausing) = (documents.added(diff) for diff in diffs("timm")[:2])
    for name, lines in (("plain", []), ("hooked", line), ("pausing", pausing)):
        torch.manual_seed(3)
        model = timm.create_model("resnet10t", num_classes=2)
        task = ClassificationTask(model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False)
        names = {"task": task.prepare_distributed(broadcast_buffers=True), "validate": validate}
        optimizer = create_optimizer_v2(model, opt="momentum", lr=0.01)
        scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=2)
        with runs.run(name, model):
            shown("\n".join(text.strip() for text in lines), names)
            for epoch in range(2):
                for step in range(2):
                    torch.manual_seed(10 * epoch + step + 100 * dist.get_rank())
                    task(torch.randn(2, 3, 32, 32), torch.randint(2, (2,)))["loss"].backward()
                    optimizer.step()
                    optimizer.zero_grad()
                names["validate"](task.get_trainable_module())
                scheduler.step(epoch + 1)
    return runs.report


LOOPS = (accelerate, trainer, lightning, compiled, inductor, timm_task)

if __name__ == "__main__":
    torch.set_num_threads(1)
    _, loop, directory = sys.argv
    report = {each.__name__: each for each in LOOPS}[loop]()
    torch.save(report, Path(directory) / f"{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
