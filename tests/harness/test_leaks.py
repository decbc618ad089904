"""A test that leaves something behind fails by it, whatever it asserts."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import leaks
from tests.harness.children import Child, end


def thread() -> Callable[[], object]:
    ever = threading.Event()
    threading.Thread(target=ever.wait, name="leaked-thread", daemon=True).start()
    return ever.set


def child() -> Callable[[], object]:
    process = Child(["sleep", "30"], os.environ)
    return lambda: end([process], grace_s=0.0)


def variable() -> Callable[[], object]:
    os.environ["LEAKED"] = "yes"
    return lambda: None


def segment() -> Callable[[], object]:
    directory = Path(f"/dev/shm/crossover_ddp-leaked-{os.getpid()}")
    directory.mkdir()
    (directory / f"{os.environ['CROSSOVER_GROUP']}-0.turns").touch()
    return lambda: shutil.rmtree(directory)


def group() -> Callable[[], object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return lambda: None


@pytest.mark.parametrize(
    ("leak", "told"),
    [
        (thread, "thread 'leaked-thread'"),
        (child, r"child process \d+ \(sleep 30\)"),
        (variable, "environment variable LEAKED: None became 'yes'"),
        (segment, "file /dev/shm/crossover_ddp-leaked-"),
        (group, "default process group"),
    ],
)
def test_each_leak_fails_its_test_and_no_other(
    leak: Callable[[], Callable[[], object]], told: str, monkeypatch: Any, request: pytest.FixtureRequest
) -> None:
    assert "_nothing_left_behind" in request.fixturenames, "all tests are looked at"
    monkeypatch.setattr(leaks, "GRACE_S", 0.1)  # what leaks here does not end by itself
    with pytest.raises(pytest.fail.Exception, match=f"the test left behind: {told}"), leaks.nothing_left_behind():
        mend = leak()
    assert "LEAKED" not in os.environ
    assert not dist.is_initialized()
    mend()
