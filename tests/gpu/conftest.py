"""Where there is no GPU these tests run on the fake device, but for those that need a real one: they say why."""

from pathlib import Path

import pytest
import torch

from tests import fake_cuda
from tests.harness.campaign import IN_CAMPAIGN

HERE = Path(__file__).parent
REAL = "run tests/gpu/run_all.sh on a machine with an NVIDIA GPU"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs elsewhere, and skip what the machine cannot run; see the marker ``gpu``."""
    is_real = torch.cuda.is_available() and not fake_cuda.is_here()
    for item in items:
        marks = [*item.iter_markers("gpu")]
        if HERE not in item.path.parents or not marks:
            continue  # pure helpers of these tests, tested everywhere
        needs = {name: value for mark in marks for name, value in mark.kwargs.items()}
        if is_real:
            found, count = torch.cuda.device_count(), needs.get("count", 1)
            if found < count:
                reason = f"needs {count} GPUs, found {found}; run it on a machine with more"
                item.add_marker(pytest.mark.skip(reason=reason))
        elif "elsewhere" in needs and not IN_CAMPAIGN:
            reason = f"the fake device runs this in {needs['elsewhere']}, and here in the campaign; {REAL}"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "real" in needs:
            reason = f"the fake device has {needs['real']}; {REAL}"
            item.add_marker(pytest.mark.skip(reason=reason))
        else:
            item.add_marker("fake_cuda")
