"""Codecs without processes: what they send, what they leave, how exact they are."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp.codecs import Codec, Half, Int8, PerPair, SIDCo, Threshold

CODECS: list[Codec] = [Int8(), Int8(7), Half(), Half(torch.float16), SIDCo(0.1), Threshold(0.1)]
SEEDS = st.integers(0, 1 << 30)


def message_of(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)


def round_trip(codec: Codec, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a message of ``values`` decodes to, and the residual."""
    message, residual = message_of(codec, values), torch.full_like(values, torch.nan)
    codec.encode(values.clone(), message, residual)
    decoded = torch.zeros_like(values)
    codec.add_decoded(message, decoded)
    return decoded, residual


def normal(numel: int, seed: int, codec: Codec) -> torch.Tensor:
    """Return values of five sizes, so many that the codec takes them."""
    numel = -(-numel // codec.multiple) * codec.multiple
    scales = 10.0 ** (torch.arange(numel).div(numel / 5).floor() - 3)
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scales


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 2000), SEEDS)
def test_decoded_and_residual_are_the_values_and_decoding_adds(
    codec: Codec, numel: int, seed: int
) -> None:
    values = normal(numel, seed, codec)
    message, residual = message_of(codec, values), torch.full_like(values, torch.nan)
    codec.encode(values.clone(), message, residual)
    once, twice = torch.zeros_like(values), torch.ones_like(values)
    codec.add_decoded(message, once)
    codec.add_decoded(message, twice)
    assert torch.equal(once + residual, values)
    torch.testing.assert_close(twice, once + 1)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([Int8(1), Int8(7), Int8(), Half(), Half(torch.float16)]),
    st.integers(1, 2000),
    SEEDS,
)
def test_what_is_written_is_what_is_added_to_zeros(
    codec: Int8 | Half, numel: int, seed: int
) -> None:
    values = normal(numel, seed, codec)
    values[: len(values) // 2] *= -1e-30
    added, _ = round_trip(codec, values)
    message, written = message_of(codec, values), torch.full_like(values, torch.nan)
    codec.encode(values, message, torch.empty_like(values))
    codec.decode(message, written)
    assert torch.equal(written.view(torch.int32), added.view(torch.int32))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 2000), SEEDS)
def test_int8_errs_by_half_a_code_of_its_own_block(block: int, numel: int, seed: int) -> None:
    values = normal(numel, seed, Int8(block))
    _, residual = round_trip(Int8(block), values)
    for own, wrong in zip(values.split(block), residual.split(block), strict=True):
        # The scale has 16 significant bits, rounded up.
        assert float(wrong.abs().max()) <= float(own.abs().max()) / 254 * (1 + 2**-14)


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_int8_holds_numbers_of_any_size(magnitude: float) -> None:
    values = torch.linspace(-1, 1, 512) * magnitude
    decoded, residual = round_trip(Int8(), values)
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decoded + residual, values)
    if magnitude >= 1e-30:
        assert float(residual.abs().max()) <= magnitude / 250


def test_half_cuts_what_is_too_large() -> None:
    decoded, residual = round_trip(Half(torch.float16), torch.tensor([1e6, -1e6, 3.0]))
    assert decoded.tolist() == [65504.0, -65504.0, 3.0]
    assert residual.tolist() == [1e6 - 65504, 65504 - 1e6, 0.0]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 255, 999])
def test_inf_and_nan_become_a_message_of_nan_and_leave_no_trace(
    codec: Codec, bad: float, place: int
) -> None:
    values = normal(1000, 0, codec)
    message, residual = message_of(codec, values), torch.full_like(values, 7.0)
    codec.encode(values.clone(), message, torch.empty_like(values))
    values[place] = bad
    codec.encode(values, message, residual)
    assert bool(residual.eq(7.0).all())
    codec.add_decoded(message, out := torch.zeros_like(values))
    assert bool(out.isnan().all())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_are_zeros(codec: Codec) -> None:
    decoded, residual = round_trip(codec, torch.zeros(1792))
    assert not decoded.any()
    assert not residual.any()


def test_the_largest_are_sent_and_what_does_not_fit_stays() -> None:
    """Of a tenth of 1000 elements there is room for 126; equal ones do not all fit."""
    codec, values = SIDCo(0.1), normal(1000, 0, SIDCo(0.1))
    decoded, _ = round_trip(codec, values)
    assert int(decoded.count_nonzero()) == 100
    assert float(decoded[decoded != 0].abs().min()) > float(values[decoded == 0].abs().max())
    decoded, residual = round_trip(codec, torch.full((1000,), 0.5))
    assert int(decoded.count_nonzero()) == int(residual.eq(0).sum()) == 126
    assert codec.nbytes(1000) == 4 + 8 * 126
    assert codec.nbytes(1) == 12


DISTRIBUTIONS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda n: torch.randn(n),
    "laplace": lambda n: torch.distributions.Laplace(0.0, 1.0).sample((n,)),
    "t3": lambda n: torch.distributions.StudentT(3.0).sample((n,)),
    "layers of two sizes": lambda n: torch.randn(n) * torch.where(torch.rand(n) < 0.9, 1e-3, 1.0),
    "layers of three sizes": lambda n: (
        torch.randn(n) * 10.0 ** torch.arange(n).mul(3).div(n).floor()
    ),
    "mostly zeros": lambda n: torch.randn(n) * (torch.rand(n) < 0.1),
}


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_about_the_rate_is_sent(name: str, rate: float) -> None:
    """Means of twenty messages with error feedback."""
    torch.manual_seed(0)
    numel, codec = 1 << 17, SIDCo(rate)
    residual, sent = torch.zeros(numel), []
    for _ in range(20):
        decoded, residual = round_trip(codec, DISTRIBUTIONS[name](numel).mul_(0.3).add_(residual))
        sent.append(int(decoded.count_nonzero()) / (rate * numel))
    assert 0.9 <= sum(sent) / len(sent) <= 1.1
    assert max(sent) <= 1.26


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(0), "expected block >= 1, got block=0"),
        (lambda: Half(torch.float32), "expected dtype of"),
        (lambda: Threshold(0), "expected 0 < rate < 1, got rate=0"),
        (lambda: SIDCo(1.0), "expected 0 < rate < 1, got rate=1.0"),
        (lambda: PerPair(()), r"got \[\]"),
        (lambda: PerPair(((None, None), (None,))), r"got \[2, 1\]"),
    ],
)
def test_wrong_arguments_say_what_to_pass(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
