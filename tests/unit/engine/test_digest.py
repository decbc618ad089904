"""Fingerprints of tensors: of their bits, whatever these are, in whatever order and wherever they lie."""

import pytest
import torch

from crossover_ddp._engine.digest import fingerprint

KINDS = (
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4, 5)])
def test_what_has_the_same_bits_has_the_same_fingerprint(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape).to(kind)
    shifted = torch.cat([torch.ones(1).to(kind), values.flatten()])[1:].view(shape)
    strided = torch.stack([values, values], dim=-1)[..., 0]
    for other in (values.clone(), shifted, strided):
        assert torch.equal(fingerprint(values), fingerprint(other))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_bit_shows(kind: torch.dtype) -> None:
    values = torch.ones(11).to(kind)
    for place in range(11):
        other = values.clone()
        other[place] = 0
        assert not torch.equal(fingerprint(values), fingerprint(other))


def test_values_that_are_no_numbers_are_equal_to_themselves_and_signs_of_zero_differ() -> None:
    assert torch.equal(fingerprint(torch.full((3,), torch.nan)), fingerprint(torch.full((3,), torch.nan)))
    assert not torch.equal(fingerprint(torch.zeros(3)), fingerprint(-torch.zeros(3)))
