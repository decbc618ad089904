"""What `crossover-ddp doctor` makes of settings for GPUs: pure, each environment made by hand."""

import pytest

from crossover_ddp.cli.doctor import findings
from crossover_ddp.cli.doctor.findings import Severity

OK, NOTE, PROBLEM = Severity


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({}, OK, "prevents overlap"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, OK, ""),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, PROBLEM, "unset CUDA_LAUNCH_BLOCKING"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, PROBLEM, "waits for every bucket"),
    ],
)
def test_settings_of_cuda(variables: dict[str, str], state: Severity, words: str) -> None:
    (found,) = findings.cuda(variables, 1)
    assert found.state is state
    assert words in f"{found.what} | {found.mend}"


def test_nothing_is_said_of_gpus_where_there_is_none() -> None:
    assert findings.cuda({"CUDA_LAUNCH_BLOCKING": "1"}, 0) == []
