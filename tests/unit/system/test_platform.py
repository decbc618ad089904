"""Platforms on which the package cannot work."""

import subprocess
import sys

import pytest

from tests.harness.scripts import ROOT

TIMEOUT_S = 60.0


@pytest.mark.defect("strangers-35")
def test_a_platform_without_fcntl_is_named_by_the_first_import() -> None:
    """The wheel installs on any platform."""
    text = "import sys; sys.modules['fcntl'] = None; from crossover_ddp import GPUMutex"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True)
    message = "ImportError: expected Linux, got sys.platform=linux;"
    assert done.stderr.splitlines()[-1].startswith(message)
