"""A function that is compiled as a whole calls ``backward()``: hooks run outside of its graphs, and change no bit."""

import math

import pytest
import torch

from tests.harness import in_ranks
from tests.harness.training import WAYS, Training


@pytest.mark.torch_version
@pytest.mark.parametrize("way", [None, *WAYS])
@in_ranks(2)
def test_backward_in_a_compiled_function_has_the_bits_of_one_outside(
    rank: int, way: str | None
) -> None:
    found = []
    for compiled in (False, True):
        training = Training(way, rank, bucket_cap_mb=1)  # the least that dynamo takes
        backward = (
            torch.compile(training.backward, backend="eager") if compiled else training.backward
        )
        losses = []
        for _ in range(6):
            losses.append(backward())
            training.update()
        training.close()
        found.append(losses)
    torch._dynamo.reset()
    if way == "elastic":  # whose pulls come when they come
        assert all(map(math.isfinite, found[1]))
    else:
        assert found[0] == found[1]
