"""Threads that wait for a peer neither keep a process alive nor crash it when it ends."""

import time
from pathlib import Path

import pytest

from tests.harness import spawn_script

WORKER = Path(__file__).with_name("exit_worker.py")


@pytest.mark.parametrize("how", ["exit", "fall off the end", "destroy"])
def test_a_process_ends_while_its_exchange_waits(how: str) -> None:
    # It is rank 0 that ends as an interpreter does; its peer only has to be there.
    with spawn_script(WORKER, 2, args=[how], forked=[1]) as ranks:
        ranks.wait_for_output(0, "leaving", 60)
        begin_s = time.monotonic()
        outputs = ranks.wait(30)
    assert time.monotonic() - begin_s < 15
    for word in ("Traceback", "terminate", "Fatal"):
        assert word not in outputs[0]
