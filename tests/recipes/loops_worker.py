"""One rank of a foreign training loop: run the diffs of docs/loops.md without and with their lines.

    loops_worker.py LOOP

LOOP is the name of a function below, which says what its runs must have in common.
"""

import functools
import os
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from crossover_ddp import DecoupledState, decoupled_hook
from tests.harness import documents
from tests.recipes.loops_common import Run, diffs, evaluate, network, samples, sgd, shown, square


def takes_turns(hooked: Run, plain: Run) -> None:
    hooked.assert_like(plain)
    assert hooked.turns == 4  # of 8 backward passes: two for each optimizer step
    assert sum(hooked.inside_turns(training=True)) == 4
    assert hooked.inside_turns(training=False) == [False, False]


def accelerate() -> None:
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = accelerate.Accelerator

    def train(source: str, **ddp: Any) -> Run:
        model = network()
        loader = DataLoader(samples(), batch_size=4)
        names = {"model": model, "loader": loader, "loss_function": square, "evaluate": evaluate}
        kwargs = [DistributedDataParallelKwargs(**ddp)]
        made = functools.partial(accelerator, kwargs_handlers=kwargs) if ddp else accelerator
        with Run(model) as run, patch.object(accelerate, "Accelerator", made):
            shown(source, {"optimizer": sgd(model), "hook": run.hook, **names})
        return run

    (diff,) = diffs("Accelerate")
    source = documents.before(diff)
    plain = train(source)
    takes_turns(train(documents.after(diff)), plain)
    # The document warns of it: without a state it could not even run.
    train(source, comm_hook=decoupled_hook).assert_like(plain)
    hooking = source.replace("for epoch", "hook(model, optimizer.optimizer)\nfor epoch")
    decoupled = train(hooking, gradient_as_bucket_view=True)
    decoupled.assert_like(plain)
    assert decoupled.deferred > 0


def trainer() -> None:
    import transformers

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

    def train(source: str) -> Run:
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config)
        names = {
            "model": model,
            "arguments": arguments,
            "train_set": data,
            "eval_set": data,
            "Decoupled": Decoupled,
        }
        with Run(model) as run:
            shown(source, names)
        return run

    (diff,) = diffs("Hugging Face Trainer")
    takes_turns(train(documents.after(diff)), train(documents.before(diff)))
    refused = train(documents.before(diff).replace("Trainer(", "Decoupled("))
    assert "gradient_as_bucket_view=False and find_unused_parameters=True" in refused.error


def lightning() -> None:
    from tests.recipes import loops_lightning

    loops_lightning.lightning()


class _Compiled(nn.Module):
    """A module of somebody's own: the compiler leaves torch's own containers alone where nobody else calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.network(inputs)


def compiled(backend: str = "aot_eager") -> None:
    """With the quickest back end that splits the graph as the default one does."""
    from torch._dynamo.utils import counters

    dist.init_process_group("gloo")

    def train(model: nn.Module) -> None:
        optimizer = sgd(model)
        for (inputs,) in DataLoader(samples(), batch_size=8):
            square(model(inputs + dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()

    names = {"torch": torch, "DistributedDataParallel": DistributedDataParallel, "train": train}
    with patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        for diff in diffs("torch.compile"):  # inside of DDP, and outside
            runs, graphs = [], []
            for source in (documents.before(diff), documents.after(diff)):
                model = _Compiled()
                torch._dynamo.reset()
                counters.clear()
                with Run(model) as run:
                    shown(source, {**names, "model": model})
                runs.append(run)
                graphs.append(counters["stats"]["unique_graphs"])
            runs[1].assert_like(runs[0])
            assert runs[1].turns == 4
            assert graphs[1] == graphs[0] > 0


def inductor() -> None:
    """With the default back end, which takes its time."""
    compiled("inductor")


def timm_task() -> None:
    """The line behind timm's own ``prepare_distributed``, in a loop of timm's parts."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.task import ClassificationTask

    dist.init_process_group("gloo")

    def validate(model: nn.Module) -> None:
        with torch.inference_mode():
            model.eval()(torch.ones(1, 3, 32, 32))
        model.train()

    def train(lines: list[str]) -> Run:
        torch.manual_seed(3)
        model = timm.create_model("resnet10t", num_classes=2)
        task = ClassificationTask(model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False)
        names = {"task": task.prepare_distributed(broadcast_buffers=True), "validate": validate}
        optimizer = create_optimizer_v2(model, opt="momentum", lr=0.01)
        scheduler, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=2)
        with Run(model) as run:
            shown("\n".join(text.strip() for text in lines), names)
            for epoch in range(2):
                for step in range(2):
                    torch.manual_seed(10 * epoch + step + 100 * dist.get_rank())
                    task(torch.randn(2, 3, 32, 32), torch.randint(2, (2,)))["loss"].backward()
                    optimizer.step()
                    optimizer.zero_grad()
                names["validate"](task.get_trainable_module())
                scheduler.step(epoch + 1)
        return run

    plain, hooked, pausing = map(train, ([], *(documents.added(diff) for diff in diffs("timm")[:2])))
    for run in (hooked, pausing):
        run.assert_like(plain)
        assert run.turns == 4
    assert sum(hooked.inside_turns(training=True)) == 3
    assert all(hooked.inside_turns(training=False))
    assert sum(pausing.inside_turns(training=True)) == 2
    assert pausing.inside_turns(training=False) and not any(pausing.inside_turns(training=False))


LOOPS = (accelerate, trainer, lightning, compiled, inductor, timm_task)

if __name__ == "__main__":
    torch.set_num_threads(1)
    {each.__name__: each for each in LOOPS}[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()
