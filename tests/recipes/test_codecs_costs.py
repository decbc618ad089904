"""The study of what codecs cost and how they converge: what it prints, and that its trainings are reproducible."""

import pytest
import torch

from studies import codecs
from tests.harness import run_ranks


def test_costs_and_achieved(capsys: pytest.CaptureFixture[str]) -> None:
    codecs.print_costs(1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(float(line.split()[-1]) > 0 for line in lines[1:])
    torch.manual_seed(0)
    gradients = [torch.distributions.Laplace(0.0, 1.0).sample((1 << 16,)) for _ in range(30)]
    sent, spent = codecs.achieved(codecs.SIDCo(0.01), gradients)
    assert 0.008 < sent < 0.0125
    assert spent > 0


def test_a_forgetful_codec_keeps_nothing() -> None:
    codec, values = codecs.Forgetful(codecs.SIDCo(0.1)), torch.randn(1000)
    residual, message = torch.ones(1000), torch.zeros(codec.room([1000]) + 16, dtype=torch.uint8)
    assert codec.encode(values.clone(), [1000], message, residual).finite
    assert not residual.any()
    out = torch.zeros(1000)
    codec.add_decoded(message, [1000], out)
    assert 0 < int(out.count_nonzero()) < 300


def trained(rank: int, world_size: int) -> list[tuple[float, float, float]]:
    return [codecs.train(codecs.mlp, "SGD", codecs.CODECS["Int8()"], 0, 20) for _ in range(2)]


def test_a_training_is_repeated_to_the_last_bit() -> None:
    for first, second in run_ranks(trained, 2):
        assert first == second
        assert 0.25 < first[2] < 0.35


def gpt_trained(rank: int, world_size: int) -> list[tuple[float, float]]:
    task = codecs.SmallGPT()
    return [codecs.train_gpt(task, "AdamW", codecs.CODECS["Int8()"], 0, steps) for steps in (4, 4, 30)]


def test_the_gpt_learns_and_its_training_is_repeated() -> None:
    for first, second, longer in run_ranks(gpt_trained, 2):
        assert first == second
        assert longer[0] < first[0] - 0.5
        assert 0.25 < first[1] < 0.27
