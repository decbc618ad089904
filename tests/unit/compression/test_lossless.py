"""Messages of updated parameters: round trips of any bits, sizes, and damaged messages."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossover_ddp import Int8, Lossless, UnsupportedConfigurationError
from crossover_ddp._compression import compiled, lossless
from crossover_ddp._compression.codec import codecs_of
from crossover_ddp._compression.lossless import add_decoded, encoded
from crossover_ddp._engine.buckets import bits_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DENORMAL, NEGATIVE_ZERO = 1, -(2**63)


def floats_of(numbers: list[int], dtype: torch.dtype) -> Tensor:
    """Return values with the upper bits of 64-bit integers."""
    return (
        torch.tensor([n >> 64 - 8 * dtype.itemsize for n in numbers], dtype=torch.int64)
        .to(bits_of(torch.empty(0, dtype=dtype)).dtype)
        .view(dtype)
    )


BITS = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(params=["fused", "plain"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with fused passes, where the machine has a compiler, and with plain ones."""
    if request.param == "plain":
        monkeypatch.setattr(compiled, "load", lambda: None)
    elif compiled.load() is None:
        pytest.skip("needs a C compiler: install gcc or clang, or name one in CC")


FIXED = [HealthCheck.function_scoped_fixture]  # the form is the same for all examples


@settings(max_examples=200, deadline=None, suppress_health_check=FIXED)
@given(pairs=st.lists(st.tuples(BITS, BITS), max_size=40), dtype=st.sampled_from(DTYPES))
@example([(2**63 - 1, -(2**63)), (-(2**63), 2**63 - 1), (NEGATIVE_ZERO, 0)], torch.float32)
@example([], torch.bfloat16)
def test_all_bits_survive(pairs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """NaN, -0.0, infinities, denormals, and differences that wrap around are among them."""
    old, new = (bits_of(floats_of([pair[place] for pair in pairs], dtype)) for place in (0, 1))
    message = encoded(new - old)
    assert message.dtype == torch.uint8
    assert len(message) <= new.nbytes, "otherwise the planes are sent"
    received = old.clone()
    add_decoded(torch.cat([message.new_zeros(1), message])[1:], received)  # at an odd address
    assert torch.equal(received, new)


def changed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(20_000, generator=generator)
    new = old + 1e-3 * torch.randn(20_000, generator=generator) * old.abs()
    return bits_of(old.to(dtype)), bits_of(new.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 0.60), (torch.bfloat16, 0.30), (torch.float16, 0.50)]
)
def test_small_changes_take_fewer_bytes(dtype: torch.dtype, most: float) -> None:
    """About 27 + log2(1e-3 · 0.67) = 16.5 bits of 32."""
    old, new = changed(dtype)
    assert len(encoded(new - old)) < most * new.nbytes


def test_both_forms_write_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = changed()
    message = encoded(new - old)
    monkeypatch.setattr(compiled, "load", lambda: None)
    assert torch.equal(encoded(new - old), message)


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "emptied"])
def test_a_damaged_message_is_an_error(damage: str) -> None:
    old, new = changed()
    message = encoded(new - old)
    half = len(message) // 2
    if damage == "flipped":
        message[half] ^= 16
    damaged = {
        "cut": message[:half],
        "flipped": message,
        "longer": encoded(torch.cat([new - old, new])),
        "emptied": message[:0],
    }[damage]
    with pytest.raises(ValueError, match="updated parameters is corrupt or truncated"):
        add_decoded(damaged, old.clone())


def without_zstd(name: str, *given: Any, **options: Any) -> Any:
    if name in ("compression.zstd", "zstandard"):
        raise ImportError(name)
    return importlib.__import__(name, *given, **options)


def test_without_zstd_the_constructor_names_the_extra() -> None:
    lossless._zstd.cache_clear()
    try:
        with (
            mock.patch.object(importlib, "import_module", without_zstd),
            pytest.raises(UnsupportedConfigurationError, match=r"crossover_ddp\[lossless\]"),
        ):
            Lossless()
    finally:
        lossless._zstd.cache_clear()
    assert Lossless() == Lossless()


def test_states_that_average_gradients_refuse_it() -> None:
    choices: list[Any] = [Lossless(), (Int8(), Lossless()), (Lossless(), Int8())]
    for codec in choices:
        with pytest.raises(TypeError, match="pass it to OwnerState alone or second"):
            codecs_of(codec)
