"""Codecs without processes: decoded values, residuals, errors and the size of messages."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp.codecs import Codec, Half, Int4, Int8, PerPair, SIDCo, Threshold

FLOAT32 = torch.finfo(torch.float32)
CODECS: list[Codec] = [
    Int8(),
    Int8(7),
    Int4(),
    Int4(7),
    Half(),
    Half(torch.float16),
    SIDCo(0.1),
    Threshold(0.1),
]
SEEDS = st.integers(0, 1 << 30)


def message_of(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)


def round_trip(codec: Codec, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode ``values``; return the decoded values and the residual."""
    message, residual = message_of(codec, values), torch.full_like(values, torch.nan)
    codec.encode(values.clone(), message, residual)
    decoded = torch.zeros_like(values)
    codec.add_decoded(message, decoded)
    return decoded, residual


def normal(numel: int, seed: int, codec: Codec) -> torch.Tensor:
    """Return values of five magnitudes, their number rounded up to a multiple for the codec."""
    numel = -(-numel // codec.multiple) * codec.multiple
    scales = 10.0 ** (torch.arange(numel).div(numel / 5).floor() - 3)
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scales


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 2000), SEEDS)
def test_decoded_values_and_residual_add_up_to_the_values_and_decoding_adds(
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
    st.sampled_from(
        [Int8(1), Int8(7), Int8(), Int4(1), Int4(7), Int4(), Half(), Half(torch.float16)]
    ),
    st.integers(1, 2000),
    SEEDS,
)
def test_decode_writes_the_values_that_add_decoded_adds_to_zeros(
    codec: Int4 | Int8 | Half, numel: int, seed: int
) -> None:
    values = normal(numel, seed, codec)
    values[: len(values) // 2] *= -1e-30
    added, _ = round_trip(codec, values)
    message, written = message_of(codec, values), torch.full_like(values, torch.nan)
    codec.encode(values, message, torch.empty_like(values))
    codec.decode(message, written)
    assert torch.equal(written, added)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 2000), SEEDS)
def test_int8_errs_by_at_most_half_the_scale_of_the_block(
    block: int, numel: int, seed: int
) -> None:
    values = normal(numel, seed, Int8(block))
    blocks = [each.split(block) for each in (values, *round_trip(Int8(block), values))]
    for own, decoded, error in zip(*blocks, strict=True):
        largest = float(own.abs().max())
        # The scale has 16 significant bits.
        assert float(error.abs().max()) <= largest / 254 * (1 + 2**-14)
        # It is rounded up: the code 127 stands for the largest magnitude, or for more.
        assert float(decoded.abs().max()) >= largest * (1 - 2**-22)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 150), st.integers(1, 2000), SEEDS)
def test_int4_errs_by_at_most_half_the_scale_and_keeps_zeros(
    block: int, numel: int, seed: int
) -> None:
    codec = Int4(block)
    values = normal(numel, seed, codec)
    values[torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.3] = 0
    decoded, error = round_trip(codec, values)
    assert not decoded[values == 0].any()
    assert not error[values == 0].any()
    blocks = [each.split(block) for each in (values, decoded, error)]
    for own, sent, rest in zip(*blocks, strict=True):
        largest = float(own.abs().max())
        # The scale has 8 significant bits.
        most = largest / 14 * (1 + 2**-7)
        assert float(rest.abs().max()) <= most
        assert float((own - sent).abs().max()) <= most
        # The largest magnitude has the code 7, so no code is wasted.
        assert float(sent.abs().max()) >= largest * (1 - 2**-23)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 150), st.integers(1, 2000), SEEDS)
def test_int4_sends_decoded_values_again_without_an_error(
    block: int, numel: int, seed: int
) -> None:
    codec = Int4(block)
    decoded, _ = round_trip(codec, normal(numel, seed, codec))
    again, error = round_trip(codec, decoded)
    assert torch.equal(again, decoded)
    assert not error.any()


def test_int4_sends_every_pair_of_codes_in_a_byte() -> None:
    """The two codes of a byte are half a message apart. The 7 in each block makes its scale 1."""
    codes = torch.arange(-7.0, 8.0)
    pairs = torch.cartesian_prod(codes, codes)
    blocks = [torch.stack([each, torch.full_like(each, 7)], 1) for each in pairs.unbind(1)]
    values = torch.cat(blocks).flatten()
    decoded, error = round_trip(Int4(2), values)
    assert torch.equal(decoded, values)
    assert not error.any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 150), st.integers(1, 100))
def test_int4_takes_half_a_byte_an_element_and_two_bytes_a_block(block: int, pairs: int) -> None:
    codec, blocks = Int4(block), 2 * pairs
    assert codec.multiple == 2 * block
    assert codec.nbytes(blocks * block) == 2 * blocks + pairs * block
    assert Int4().nbytes(1280) / (4 * 1280) <= 0.135


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38, FLOAT32.max])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_values_of_any_magnitude_decode_to_finite_ones(codec: Codec, magnitude: float) -> None:
    """The largest float32 as well: a scale or a format that rounds it up would make it infinite."""
    values = torch.linspace(-1, 1, 511 // codec.multiple * codec.multiple) * magnitude
    decoded, residual = round_trip(codec, values)
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decoded + residual, values)
    largest_code = {Int8(): 127, Int4(): 7}.get(codec)
    if largest_code and magnitude >= 1e-30:
        # A scale of Int4 has 8 significant bits.
        assert float(residual.abs().max()) <= magnitude / (2 * largest_code) * (1 + 2**-7)


@pytest.mark.parametrize(("codec", "most"), [(Int8(), 1 / 250), (Int4(256), 1 / 13.8)], ids=repr)
def test_a_block_whose_scale_would_be_too_small_stays_in_the_residual(
    codec: Int4 | Int8, most: float
) -> None:
    largest_code = 127 if isinstance(codec, Int8) else 7
    magnitudes = [largest_code * scale for scale in (0.9e-36, 1.1e-36)]
    values = torch.cat([torch.linspace(-1, 1, 256) * each for each in magnitudes])
    decoded, residual = round_trip(codec, values)
    kept, sent = decoded.split(256)
    assert not kept.any()
    assert torch.equal(residual[:256], values[:256])
    assert float((sent - values[256:]).abs().max()) <= magnitudes[1] * most


@pytest.mark.parametrize("codec", [Half(), Half(torch.float16)], ids=repr)
def test_half_clamps_values_beyond_its_range(codec: Half) -> None:
    largest = torch.finfo(codec.dtype).max
    beyond = min(1e6, FLOAT32.max) if codec.dtype == torch.float16 else FLOAT32.max
    decoded, residual = round_trip(codec, torch.tensor([beyond, -beyond, 3.0]))
    assert decoded.tolist() == [largest, -largest, 3.0]
    assert residual.tolist() == [beyond - largest, largest - beyond, 0.0]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 255, 999])
def test_inf_and_nan_decode_to_nan_and_leave_the_residual_alone(
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
def test_zeros_are_encoded_as_zeros(codec: Codec) -> None:
    values = torch.zeros(1792)
    message = message_of(codec, values)
    codec.encode(values, message, torch.empty_like(values))
    assert not message.any()
    decoded, residual = round_trip(codec, values)
    assert not decoded.any()
    assert not residual.any()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("first", [1.0, math.nan])
def test_a_message_holds_no_values_of_the_message_before(codec: Codec, first: float) -> None:
    values = torch.zeros(1792)
    values[0] = 2.0
    message = message_of(codec, values)
    codec.encode(torch.full_like(values, first), message, torch.empty_like(values))
    codec.encode(values.clone(), message, torch.empty_like(values))
    fresh = message_of(codec, values)
    codec.encode(values.clone(), fresh, torch.empty_like(values))
    assert torch.equal(message, fresh)


def test_sidco_sends_the_largest_elements_and_keeps_those_that_do_not_fit() -> None:
    """A message of a tenth of 1000 elements has room for 126, less than there are equal ones."""
    codec, values = SIDCo(0.1), normal(1000, 0, SIDCo(0.1))
    decoded, _ = round_trip(codec, values)
    assert int(decoded.count_nonzero()) == 100
    assert float(decoded[decoded != 0].abs().min()) > float(values[decoded == 0].abs().max())
    decoded, residual = round_trip(codec, torch.full((1000,), 0.5))
    assert int(decoded.count_nonzero()) == int(residual.eq(0).sum()) == 126
    assert codec.nbytes(1000) == 4 + 8 * 126
    assert codec.nbytes(1) == 12


def test_sidco_has_room_for_no_more_than_all_elements() -> None:
    codec, values = SIDCo(0.95), torch.full((1000,), 0.5)
    assert codec.nbytes(1000) == 4 + 8 * 1000
    decoded, residual = round_trip(codec, values)
    assert torch.equal(decoded, values)
    assert not residual.any()


@pytest.mark.parametrize(
    ("numel", "rate", "stride"),
    [
        (1 << 20, 0.1, 16),  # a sixteenth
        (1 << 17, 0.1, 8),  # 16384 elements, for few elements
        (1 << 19, 0.001, 4),  # enough for 128 elements above the threshold, for a low rate
    ],
)
def test_sidco_takes_its_threshold_from_every_nth_element(
    numel: int, rate: float, stride: int
) -> None:
    """The larger values stand at odd multiples of the stride, more often than the rate.

    A longer stride would miss all of them, and a shorter one would meet too few. The threshold
    would then be the smaller values, and the message would be full.
    """
    large = int(1.5 * rate * numel / stride)
    values = torch.ones(numel)
    values[stride : 2 * stride * large : 2 * stride] = 2.0
    decoded, _ = round_trip(SIDCo(rate), values)
    assert int(decoded.count_nonzero()) == large


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
def test_sidco_sends_about_the_rate(name: str, rate: float) -> None:
    """The mean of twenty messages with error feedback."""
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
        (lambda: Int4(0), "got block=0; 64 is the default"),
        (lambda: Int8(1.5), "expected block >= 1, got block=1.5"),  # type: ignore[arg-type]
        (lambda: Half(torch.float32), "expected dtype of"),
        (lambda: Threshold(0), "expected 0 < rate < 1, got rate=0"),
        (lambda: SIDCo(1.0), "expected 0 < rate < 1, got rate=1.0"),
        (lambda: PerPair(()), r"got \[\]"),
        (lambda: PerPair(((None, None), (None,))), r"got \[2, 1\]"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
