"""Skip what the machine cannot run, and say what would run it."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def why_not_here() -> str | None:
    """Say why no test of this directory can run, or None."""
    if torch.cuda.is_available():
        return None
    built = "torch sees no CUDA device" if torch.version.cuda else "this torch was built without CUDA"
    return f"{built}; run tests/gpu/run_all.sh on a machine with an NVIDIA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not_here()
    for item in items:
        if HERE not in item.path.parents:
            continue
        needed = item.get_closest_marker("gpu")
        if needed is None:
            continue  # pure helpers of these tests, tested everywhere
        count = needed.kwargs.get("count", 1)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif torch.cuda.device_count() < count:
            found = torch.cuda.device_count()
            item.add_marker(
                pytest.mark.skip(reason=f"needs {count} GPUs, found {found}; run it on a machine with more")
            )
