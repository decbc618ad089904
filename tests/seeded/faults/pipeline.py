"""Faults of pipelines."""

from typing import Final

from tests.seeded.fault import Fault

_RUN = "tests/multiprocess/test_pipeline_run.py"

PIPELINE: Final[tuple[Fault, ...]] = (
    Fault(
        "replicas ask each other about buffers within their first backward, before they send gradients on",
        "crossover_ddp/pipeline/run.py",
        "                Exchange.of(group).leaves_buffers_to_ddp = True\n",
        "",
        (_RUN, "-k", "keeps_back"),
    ),
    Fault(
        "replicas make their buckets anew within the second step's first forward",
        "crossover_ddp/pipeline/run.py",
        "if isinstance(model, DistributedDataParallel) and model.reducer._rebuild_buckets():",
        "if False:",
        (_RUN, "-k", "keeps_back"),
    ),
    Fault(
        "replicas of a stage have the mean of their parts of the gradients, not the sum",
        "crossover_ddp/pipeline/run.py",
        "    bucket.buffer().mul_(state.replicas)\n",
        "",
        (_RUN, "-k", "whole_model and three"),
    ),
    Fault(
        "replicas count the gradients that were there as often as there are replicas",
        "crossover_ddp/pipeline/run.py",
        "            parameter.grad.div_(replicas)\n",
        "            pass\n",
        (_RUN, "-k", "step_before"),
    ),
    Fault(
        "each micro-batch counts as much as a batch",
        "crossover_ddp/pipeline/run.py",
        "(output, self._targets[micro]) / self._plan.microbatches",
        "(output, self._targets[micro])",
        (_RUN, "-k", "whole_model and four"),
    ),
    Fault(
        "targets are those of the micro-batch that came last",
        "crossover_ddp/pipeline/run.py",
        "self._targets[micro]",
        "self._targets[-1 - micro]",
        (_RUN, "-k", "torch_runs and 2-True"),
    ),
)
