"""Fingerprints of tensors: of their bits, whatever these are, in whatever order and wherever they lie."""

import pytest
import torch

from crossover_ddp._ddp.digests import fingerprint

KINDS = "bool int8 float8_e4m3fn float16 float32 float64 complex32"


@pytest.mark.parametrize("kind", KINDS.split())
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4, 5)])
def test_a_fingerprint_is_that_of_the_bits(kind: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape).to(getattr(torch, kind))
    shifted = (
        torch.cat([values.flatten()[:1], values.flatten()])[1:].view(shape) if shape else values
    )
    strided = torch.stack([values, values], dim=-1)[..., 0]
    for other in (values.clone(), shifted, strided):
        assert torch.equal(fingerprint(values), fingerprint(other))
    for place in range(values.numel()):
        other = values.clone()
        other.view(-1)[place] = ~other.view(-1)[place] if kind == "bool" else 99
        assert not torch.equal(fingerprint(values), fingerprint(other))
    assert not torch.equal(fingerprint(torch.zeros(3)), fingerprint(-torch.zeros(3)))
