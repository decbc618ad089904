"""What `crossover-ddp doctor` makes of settings for GPUs: pure, each environment made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp._system.environment import DEVICE_ORDERS
from crossover_ddp.cli.doctor import gpu_findings
from crossover_ddp.cli.doctor.findings import Finding, Mps, Severity
from crossover_ddp.cli.doctor.gpu_findings import Ordering

OK, NOTE, PROBLEM = Severity
NO_MPS, MPS = Mps("/tmp/nvidia-mps", False, False), Mps("/tmp/nvidia-mps", True, True)
QUIET = {"NCCL_CTA_POLICY": "EFFICIENCY"}


def worth_saying(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.state is not OK]


@pytest.mark.parametrize(
    ("variables", "severity", "words"),
    [
        (QUIET, OK, "leaves SMs"),
        ({"NCCL_CTA_POLICY": "1"}, OK, "leaves SMs"),
        ({}, NOTE, "export NCCL_CTA_POLICY=1"),
        ({"NCCL_CTA_POLICY": ""}, NOTE, "NCCL_CTA_POLICY not set"),
        ({"NCCL_CTA_POLICY": "0"}, NOTE, "export NCCL_CTA_POLICY=1"),
        ({"NCCL_CTA_POLICY": "ZERO"}, NOTE, "NCCL_CTA_POLICY=ZERO"),
        ({"NCCL_MAX_CTAS": "4"}, OK, "at most 4 multiprocessors"),
        ({"NCCL_MAX_CTAS": "0"}, NOTE, "NCCL_MAX_CTAS=<SMs to spend>"),
        ({"NCCL_MAX_CTAS": "few"}, NOTE, "NCCL_MAX_CTAS=<SMs to spend>"),
        ({**QUIET, "NCCL_P2P_DISABLE": "1"}, NOTE, "unset NCCL_P2P_DISABLE"),
        ({**QUIET, "NCCL_SHM_DISABLE": "1"}, NOTE, "unset NCCL_SHM_DISABLE"),
        ({**QUIET, "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": ""}, OK, ""),
    ],
)
def test_options_of_nccl(variables: dict[str, str], severity: Severity, words: str) -> None:
    found = gpu_findings.nccl(variables, 2)
    assert [each.state for each in worth_saying(found)] == [severity] * (severity is not OK)
    assert words in "\n".join(f"{each.what} | {each.mend}" for each in found)


def test_one_gpu_has_no_peer_of_its_own_machine() -> None:
    variables = {**QUIET, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    assert worth_saying(gpu_findings.nccl(variables, 1)) == []


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({}, OK, "prevents overlap"),
        ({"CUDA_LAUNCH_BLOCKING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, OK, ""),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, PROBLEM, "unset CUDA_LAUNCH_BLOCKING"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, NOTE, "share a queue"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, OK, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "33"}, PROBLEM, "expected 1 to 32"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "many"}, PROBLEM, "expected 1 to 32"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, PROBLEM, "waits for every bucket"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, NOTE, "peers hang"),
    ],
)
def test_settings_of_cuda(variables: dict[str, str], state: Severity, words: str) -> None:
    (found,) = gpu_findings.cuda(variables, 1)
    assert found.state is state
    assert words in f"{found.what} | {found.mend}"


@pytest.mark.parametrize(
    ("value", "mps", "state", "words"),
    [
        ("0", NO_MPS, OK, ""),
        ("1, 0", NO_MPS, OK, "number GPUs differently"),
        ("GPU-3e8f", MPS, OK, ""),
        ("MIG-3e8f-11,GPU-4", NO_MPS, OK, ""),
        ("MIG-GPU-3e8f/1/0", NO_MPS, OK, ""),
        ("", NO_MPS, NOTE, "hides every GPU"),
        ("-1", NO_MPS, NOTE, "unset CUDA_VISIBLE_DEVICES"),
        ("0,-1,1", NO_MPS, PROBLEM, "see 1 GPU"),
        ("0 1", NO_MPS, PROBLEM, "see no GPUs"),
        ("0,,1", NO_MPS, PROBLEM, "see 1 GPU"),
        ("3e8f", NO_MPS, PROBLEM, "'3e8f'"),
        ("0,1,0", NO_MPS, PROBLEM, "export CUDA_VISIBLE_DEVICES=0,1"),
        ("0", MPS, NOTE, "GPU-<uuid>"),
    ],
)
def test_forms_of_visible_devices(value: str, mps: Mps, state: Severity, words: str) -> None:
    (found,) = gpu_findings.visible_devices(value, mps, 2)
    assert found.state is state
    assert words in f"{found.what} | {found.mend}"


def test_torch_without_what_turns_need_is_a_problem() -> None:
    names = {"torch.cuda.Event.ipc_handle": True, "torch.cuda.is_current_stream_capturing": False}
    (found,) = gpu_findings.features(names, 1)
    assert found.state is PROBLEM
    assert "is_current_stream_capturing" in found.what
    assert "ipc_handle" not in found.what
    (found,) = gpu_findings.features(dict.fromkeys(names, True), 1)
    assert found.state is OK


@pytest.mark.parametrize(
    ("gpu", "wanted", "state", "words"),
    [
        (Ordering("GPU-1", True, True), None, OK, "by host"),
        (Ordering("GPU-1", True, True), "events", OK, "waiting for ever"),
        (Ordering("GPU-1", True, True), "semaphores", OK, "by semaphores"),
        (Ordering("GPU-1", False, False), "host", OK, "by host"),
        (Ordering("GPU-1", False, False), None, OK, "by host"),
        (Ordering("GPU-1", False, True), "events", NOTE, "unset CROSSOVER_DEVICE_ORDER"),
        (Ordering("GPU-1", True, False), "semaphores", NOTE, "the host orders the turns"),
        (Ordering("GPU-1", True, True), "event", PROBLEM, "unset CROSSOVER_DEVICE_ORDER"),
    ],
)
def test_how_turns_are_ordered(gpu: Ordering, wanted: str | None, state: Severity, words: str) -> None:
    (found,) = gpu_findings.ordering([gpu], wanted, DEVICE_ORDERS)
    assert found.state is state
    assert words in f"{found.what} | {found.mend}"


def test_nothing_is_said_of_gpus_where_there_is_none() -> None:
    variables = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_MAX_CTAS": "x"}
    assert gpu_findings.nccl(variables, 0) == []
    assert gpu_findings.cuda(variables, 0) == []
    assert gpu_findings.visible_devices("x", NO_MPS, 0) == []
    assert gpu_findings.visible_devices(None, NO_MPS, 1) == []
    assert gpu_findings.features({"a": False}, 0) == []
    assert gpu_findings.ordering([], None, DEVICE_ORDERS) == []


NAMES = (
    "NCCL_CTA_POLICY",
    "NCCL_MAX_CTAS",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_NCCL_BLOCKING_WAIT",
)
# Of few letters: for all of Unicode hypothesis first makes a table, for seconds, which fails its own health check.
VALUES = st.one_of(
    st.text(alphabet="0129-+.|xZERO \tä", max_size=6),
    st.sampled_from(["", "0", "1", "2", "8", "ZERO", "EFFICIENCY|ZERO"]),
)


@given(
    variables=st.dictionaries(st.sampled_from(NAMES), VALUES),
    visible=st.text(alphabet="0123-,GPUMIabc /", max_size=12),
)
def test_whatever_is_set_each_finding_has_its_mend(variables: dict[str, str], visible: str) -> None:
    found = [
        *gpu_findings.nccl(variables, 2),
        *gpu_findings.cuda(variables, 2),
        *gpu_findings.visible_devices(visible, NO_MPS, 2),
    ]
    assert all(each.mend for each in worth_saying(found))
