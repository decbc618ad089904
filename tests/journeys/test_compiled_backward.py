"""Compiled code calls ``backward()``. Hooks run outside of its graphs and change no bit."""

import contextlib
import math

import pytest
import torch

from crossover_ddp.errors import CrossoverError, UnsupportedConfigurationError
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.networks import mlp
from tests.harness.training import WAYS, WIDTH, Training

# Compiling takes most of the time. The short form leaves out hooks that behave in a compiled
# function like another one: all of them run in the reducer, as the split does.
SHORT = ("split", "decoupled", "owned", "kfac", "muon", "averaged")


@pytest.mark.torch_version
@pytest.mark.parametrize("way", [None, *WAYS] if IN_CAMPAIGN else SHORT)
@in_ranks(2)
def test_backward_in_a_compiled_function_has_the_bits_of_one_outside(
    rank: int, way: str | None
) -> None:
    found = []
    for compiled in (False, True):
        training = Training(way, rank, bucket_cap_mb=1)  # the smallest that dynamo accepts
        backward = training.backward
        if compiled:
            backward = torch.compile(backward, backend="eager")
        losses = []
        for _ in range(6):
            losses.append(backward())
            training.update()
        training.close()
        found.append(losses)
    torch._dynamo.reset()
    if way == "elastic":  # its ranks pull the centre at any time, so that no two runs are alike
        assert all(map(math.isfinite, found[1]))
    else:
        assert found[0] == found[1]


@pytest.mark.defect("strangers-17")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("way", "is_function"), [("split", True), ("decoupled", False)])
def test_the_python_reducer_is_refused_in_compiled_autograd(way: str, is_function: bool) -> None:
    """The whole step is a compiled function, or only its backward pass is compiled."""
    compiled = pytest.importorskip("torch._dynamo.compiled_autograd")
    refused = pytest.raises(UnsupportedConfigurationError, match="python_reducer")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=is_function):
        training = Training(way, module=mlp(WIDTH, WIDTH, seed=0))
        if is_function:
            with refused:
                torch.compile(training.backward, backend="eager")()
        else:
            with refused, compiled._enable(torch.compile(backend="eager")):
                training.backward()
    with contextlib.suppress(CrossoverError):
        training.close()
    torch._dynamo.reset()
