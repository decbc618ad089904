"""Codecs without processes: what they send, what they leave, how exact they are."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover_ddp._compression.int8 import _tiling
from crossover_ddp._compression.sidco import pareto_threshold
from crossover_ddp.codecs import Codec, Encoded, Half, Int8, SIDCo, Threshold

CODECS: list[Codec] = [
    Int8(),
    Int8(7),
    Half(),
    Half(torch.float16),
    Threshold(0.1),
    SIDCo(0.1),
]
LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=6)
SEEDS = st.integers(0, 1 << 30)


def message_of(codec: Codec, lengths: Sequence[int], wanted: int | None = None) -> torch.Tensor:
    return torch.zeros(-(-codec.room(lengths, wanted) // 16) * 16, dtype=torch.uint8)


def round_trip(
    codec: Codec, values: torch.Tensor, lengths: Sequence[int], memory: Any = None
) -> tuple[torch.Tensor, torch.Tensor, Encoded]:
    """Return what a message of ``values`` decodes to, the residual, and what the encoder says."""
    message, residual = message_of(codec, lengths), torch.full_like(values, torch.nan)
    encoded = codec.encode(values, lengths, message, residual, memory)
    decoded = torch.zeros_like(values)
    codec.add_decoded(message, lengths, decoded)
    return decoded, residual, encoded


def normal(lengths: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        torch.randn(length, dtype=torch.float64, generator=generator) * 10.0 ** (number % 5 - 3)
        for number, length in enumerate(lengths)
    ]
    return torch.cat(pieces).to(dtype)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CODECS), LENGTHS, SEEDS)
def test_decoded_and_residual_are_the_values(codec: Codec, lengths: list[int], seed: int) -> None:
    values = normal(lengths, seed, torch.float64)
    decoded, residual, encoded = round_trip(codec, values, lengths)
    assert encoded.finite
    torch.testing.assert_close(decoded + residual, values, rtol=1e-15, atol=1e-15)
    assert torch.equal(decoded.float().double(), decoded)  # what all ranks have in float32


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CODECS), LENGTHS, SEEDS)
def test_values_are_read_only_and_decoding_adds(codec: Codec, lengths: list[int], seed: int) -> None:
    values = normal(lengths, seed)
    before, message = values.clone(), message_of(codec, lengths)
    codec.encode(values, lengths, message, torch.empty_like(values))
    assert torch.equal(values, before)
    once, twice = torch.zeros_like(values), torch.ones_like(values)
    codec.add_decoded(message, lengths, once)
    codec.add_decoded(message, lengths, twice)
    torch.testing.assert_close(twice, once + 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), LENGTHS, SEEDS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_int8_writes_to_pieces_what_it_adds_to_zeros(
    block: int, lengths: list[int], seed: int, dtype: torch.dtype
) -> None:
    codec, values = Int8(block), normal(lengths, seed)
    message, added = message_of(codec, lengths), torch.zeros_like(values)
    codec.encode(values, lengths, message, torch.empty_like(values))
    codec.add_decoded(message, lengths, added)
    pieces = [torch.full((length,), torch.nan, dtype=dtype) for length in lengths]
    codec.write_decoded(message, lengths, pieces)
    assert torch.equal(torch.cat(pieces), added.to(dtype))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), LENGTHS, SEEDS)
def test_int8_errs_by_half_a_code_of_its_own_block(block: int, lengths: list[int], seed: int) -> None:
    values = normal(lengths, seed)
    _, residual, _ = round_trip(Int8(block), values, lengths)
    for piece, error in zip(values.split(lengths), residual.split(lengths), strict=True):
        for own, wrong in zip(piece.split(block), error.split(block), strict=True):
            # The scale has 16 significant bits, rounded up.
            assert float(wrong.abs().max()) <= float(own.abs().max()) / 254 * (1 + 2**-14)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), LENGTHS)
def test_tiles_hold_all_elements_once_and_no_block_of_two_tensors(block: int, lengths: list[int]) -> None:
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    tiles, parts = _tiling(tuple(lengths), block)
    assert [place for tile in tiles for place in range(tile.start, tile.stop)] == list(range(sum(lengths)))
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    for tile, of_tile in zip(tiles, parts, strict=True):
        places = [begins[part.tensor] + place for part in of_tile for place in range(part.start, part.stop)]
        assert places == list(range(tile.start, tile.stop))
    blocks = 0
    for tile in tiles:
        size = (tile.stop - tile.start) // (tile.last - tile.first)
        assert size <= block
        assert (tile.stop - tile.start) % (tile.last - tile.first) == 0
        assert tile.first == blocks
        blocks = tile.last
        for start in range(tile.start, tile.stop, size):
            assert len({owner[place] for place in range(start, start + size)}) == 1
    assert Int8(block).room(lengths) == 4 * blocks + sum(lengths)


def test_int8_errs_by_about_one_percent() -> None:
    values = torch.distributions.Laplace(0.0, 1.0).sample((1 << 16,))
    _, residual, _ = round_trip(Int8(), values, [1 << 16])
    assert 0.005 < float(residual.norm() / values.norm()) < 0.017


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_int8_holds_numbers_of_any_size(magnitude: float) -> None:
    values = torch.linspace(-1, 1, 300) * magnitude
    decoded, residual, encoded = round_trip(Int8(), values, [300])
    assert encoded.finite
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decoded + residual, values)
    if magnitude >= 1e-30:
        assert float(residual.abs().max()) <= magnitude / 250


def test_half_cuts_what_is_too_large() -> None:
    values = torch.tensor([1e6, -1e6, 3.0])
    decoded, residual, encoded = round_trip(Half(torch.float16), values, [3])
    assert encoded.finite
    assert decoded.tolist() == [65504.0, -65504.0, 3.0]
    assert residual.tolist() == [1e6 - 65504, 65504 - 1e6, 0.0]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 255, 999])
def test_inf_and_nan_are_said_and_leave_no_trace(codec: Codec, bad: float, place: int) -> None:
    values = normal([600, 400], 0)
    _, _, first = round_trip(codec, values, [600, 400])
    values[place] = bad
    message, residual = message_of(codec, [600, 400]), torch.full_like(values, 7.0)
    encoded = codec.encode(values, [600, 400], message, residual, first.memory)
    assert not encoded.finite
    assert bool(residual.eq(7.0).all())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_are_zeros(codec: Codec) -> None:
    decoded, residual, encoded = round_trip(codec, torch.zeros(1000), [1000])
    assert encoded.finite
    assert not decoded.any()
    assert not residual.any()


def test_threshold_is_exact_and_kept_until_it_is_refreshed() -> None:
    codec, values = Threshold(0.1, refresh_steps=2), normal([1000], 0)
    decoded, _, first = round_trip(codec, values, [1000])
    assert int(decoded.count_nonzero()) == first.wanted == 100
    assert float(decoded[decoded != 0].abs().min()) > float(values[decoded == 0].abs().max())
    _, _, second = round_trip(codec, values / 2, [1000], first.memory)
    assert second.wanted < 50
    _, _, third = round_trip(codec, values / 2, [1000], second.memory)
    assert third.wanted == 100


@pytest.mark.parametrize("codec", [Threshold(0.01), SIDCo(0.01)], ids=repr)
def test_what_does_not_fit_is_the_smallest_and_stays(codec: Codec) -> None:
    values = normal([10000], 1)
    _, _, encoded = round_trip(codec, values, [10000])
    message, residual = torch.zeros(4 + 8 * 5, dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, [10000], message, residual, encoded.memory)
    decoded = torch.zeros_like(values)
    codec.add_decoded(message, [10000], decoded)
    assert torch.equal(decoded + residual, values)
    assert sorted(decoded.abs().topk(5).values) == sorted(values.abs().topk(5).values)
    assert int(decoded.count_nonzero()) == 5


@pytest.mark.parametrize("codec", [Threshold(0.01), SIDCo(0.01)], ids=repr)
def test_room_follows_what_was_wanted_up_to_a_bound(codec: Codec) -> None:
    few, right, many = (codec.room([100000], wanted) for wanted in (1, 1000, 50000))
    assert few < right < many == codec.room([100000])
    assert 4 + 8 * 500 <= few <= 4 + 8 * 501
    assert 8 * 1000 <= right <= 4 + 8 * 1101
    assert codec.room([1]) == 12


DISTRIBUTIONS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda n: torch.randn(n),
    "laplace": lambda n: torch.distributions.Laplace(0.0, 1.0).sample((n,)),
    "t3": lambda n: torch.distributions.StudentT(3.0).sample((n,)),
    "layers of two sizes": lambda n: torch.randn(n) * torch.where(torch.rand(n) < 0.9, 1e-3, 1.0),
    "layers of three sizes": lambda n: torch.randn(n) * 10.0 ** torch.arange(n).mul(3).div(n).floor(),
    "mostly zeros": lambda n: torch.randn(n) * (torch.rand(n) < 0.1),
}


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sidco_sends_about_its_rate(name: str, rate: float) -> None:
    """Means of twenty messages with error feedback."""
    torch.manual_seed(0)
    numel, codec, memory = 1 << 17, SIDCo(rate), None
    residual, sent, room = torch.zeros(numel), [], None
    for _ in range(20):
        values = DISTRIBUTIONS[name](numel).mul_(0.3).add_(residual)
        message = message_of(codec, [numel], room)
        encoded = codec.encode(values, [numel], message, residual, memory)
        memory, room = encoded.memory, encoded.wanted
        sent.append(int(message[:4].view(torch.int32)) / (rate * numel))
    assert 0.8 <= sum(sent) / len(sent) <= 1.25
    assert max(sent) <= 1.26


def test_one_stage_of_an_exponential_is_found() -> None:
    sample = torch.distributions.Exponential(2.0).sample((1 << 16,)).double()
    for rate in (0.2, 0.02):
        assert pareto_threshold(sample, rate, 1) == pytest.approx(-math.log(rate) / 2, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(0), "expected block >= 1, got block=0"),
        (lambda: Half(torch.float32), "expected dtype of"),
        (lambda: Threshold(0), "expected 0 < rate < 1, got rate=0"),
        (lambda: SIDCo(1.0), "expected 0 < rate < 1, got rate=1.0"),
        (lambda: Threshold(0.1, 0), "expected refresh_steps >= 1, got refresh_steps=0"),
    ],
)
def test_wrong_arguments_say_what_to_pass(make: Callable[[], Codec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
