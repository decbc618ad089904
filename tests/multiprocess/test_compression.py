"""Codecs between real ranks: the same parameters on all of them, by every state that takes a codec."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from crossover_ddp import UnsupportedConfigurationError
from crossover_ddp.codecs import Half, Int8, PerPair, SIDCo
from tests.harness import run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.inside import force_native
from tests.multiprocess.compressed_training import CODECS, Coded

STEPS = 200 if IN_CAMPAIGN else 7  # of which five are deferred, one of them with two micro-batches
TRIAL_STEPS = 34  # after which it is decided whether to defer


def digests(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return what each codec makes of the parameters, by each state; on two nodes also one for each pair of ranks."""
    walks = {name: (codec, ("compressed", "decoupled")) for name, codec in CODECS.items()}
    if world_size == 4:
        pairs = PerPair.by_node([0, 0, 1, 1], far=SIDCo(0.1), near=Half())
        walks = {"per pair": ((pairs, Int8(64)), ("compressed", "crossover", "decoupled", "kfac"))}
    found = {
        name: [Coded(kind, rank, codec).run(STEPS).digest() for kind in kinds]
        for name, (codec, kinds) in walks.items()
    }
    if world_size == 2:  # some steps are deferred, some are not
        ways: list[Any] = [("compressed", {}), ("decoupled", {"defer": "auto"})]
        made = [Coded(kind, rank, CODECS["pair"], **settings) for kind, settings in ways]
        found["auto"] = [each.run(TRIAL_STEPS).digest() for each in made]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameters_are_those_of_the_codec_alone_on_all_ranks_by_every_state(world_size: int) -> None:
    first, *others = run_ranks(digests, world_size)
    assert others == [first] * (world_size - 1)
    for alone, *by_others in first.values():
        if world_size == 4:
            assert by_others.pop() != alone, "K-FAC"
        assert set(by_others) == {alone}
    assert len({alone for alone, *_ in first.values()}) == len(first)


def clipped(rank: int, world_size: int) -> tuple[list[float], list[float], str]:
    """Clip by the state and, from the same parameters on, by torch; return both norms of each step."""
    ours, alone = Coded("decoupled", rank, Int8()), Coded("compressed", rank, Int8())
    norms, expected = [], []
    for _ in range(6):
        for each in (ours, alone):
            each.backward()
        norms.append(float(ours.state.clip_grad_norm_(0.1)))
        expected.append(float(nn.utils.clip_grad_norm_(alone.model.parameters(), 0.1)))
        for each in (ours, alone):
            each.update()
    return norms, expected, ours.digest()


def test_clipping_sees_decoded_values() -> None:
    results = run_ranks(clipped, 3)
    for norms, expected, _ in results:
        assert norms == pytest.approx(expected, rel=1e-4)
        assert min(norms) > 0.1
    assert len({last for *_, last in results}) == 1


def drained(rank: int, world_size: int, kind: str) -> tuple[float, float, float, str]:
    """Return the greatest residual before and after an exact step, and the rate of bytes."""
    training, greatest = Coded(kind, rank, CODECS["pair"]).run(4), []
    rate = training.stats_of_codec()["rate"]
    for _ in range(2):
        residuals = training.residuals().values()
        greatest.append(max((float(each.abs().max()) for each in residuals), default=0.0))
        training.state.drain()
        training.run(1)
    return *greatest, rate, training.run(1).digest()


@pytest.mark.parametrize("kind", ["crossover", "decoupled"])
def test_a_drained_step_leaves_nothing_behind(kind: str) -> None:
    results = run_ranks(drained, 3, args=(kind,))
    for before, after, rate, _ in results:
        assert before > 0
        assert after == 0
        assert 0.1 < rate < 0.4
    assert len({last for *_, last in results}) == 1


def resumed(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    """Resume after four steps, with residuals and without; return what comes of it, and how far from going on it is."""
    whole = Coded("decoupled", rank, Int8()).run(4)
    saved = whole.save()
    assert any(residual.any() for residual in whole.residuals().values())
    whole.run(4)
    again = Coded("decoupled", rank, Int8()).load(saved).run(4)
    without = {name: part for name, part in saved.items() if name != "state"}
    forgetful = Coded("decoupled", rank, Int8()).load(without).run(4)
    apart = [float((each.values() - whole.values()).abs().max()) for each in (again, forgetful)]
    return [again.digest(), forgetful.digest()], apart


def test_residuals_go_on_after_a_stop() -> None:
    (first, apart), (second, also_apart) = run_ranks(resumed, 2)
    assert first == second
    assert max(apart[0], also_apart[0]) < min(apart[1], also_apart[1])


@dataclass(frozen=True)
class Late(SIDCo):
    """All ranks but the first take their time for each message."""

    def add_decoded(self, message: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(0.01 * (dist.get_rank() > 0))
        super().add_decoded(message, out)


def joined(rank: int, world_size: int) -> dict[str, str]:
    """Let rank 0 run out of inputs some steps early, twice."""
    steps, early, found = 6, 3, {}  # the third step is the first that is deferred
    for name, codec in {**CODECS, "late": Late(0.05)}.items():
        training = Coded("decoupled", rank, codec)
        for epoch in range(2):
            with Join([training.model]):
                for number in range(steps + early * (rank > 0)):
                    training.drop()
                    training.loss(10 * epoch + number).backward()
                    training.optimizer.step()
        found[name] = training.digest()
    return found


def test_ranks_may_run_out_of_inputs() -> None:
    first, *others = run_ranks(joined, 3)
    assert others == [first, first]
    assert first["late"] == first["sidco"]


def scales(rank: int, world_size: int) -> float:
    """Return by how much gradients of a loss whose scale changes differ from those of a constant one."""
    results = []
    for factors in ([1.0] * 4, [1.0, 1.0, 4.0, 0.5]):
        scale = [1.0]
        training = Coded("compressed", rank, SIDCo(0.05), loss_scale=lambda scale=scale: scale[0])
        for step, scale[0] in enumerate(factors):
            training.model.zero_grad()
            (training.loss(step) * scale[0]).backward()
        results.append(torch.cat([p.grad.flatten() for p in training.held]) / scale[0])
    assert float(results[0].abs().max()) > 1e-3
    return float((results[0] - results[1]).abs().max())


def test_residuals_follow_the_scale_of_the_loss() -> None:
    assert max(run_ranks(scales, 2)) < 1e-6


@force_native()
def kfac_with_a_codec(rank: int, world_size: int) -> None:
    expected = "expected gradients on the CPU and gloo for a codec with K-FAC"
    with pytest.raises(UnsupportedConfigurationError, match=expected):
        Coded("kfac", rank, Int8()).run(4)


def test_kfac_with_a_codec_is_refused() -> None:
    run_ranks(kfac_with_a_codec, 2)


def of_another_size(rank: int, world_size: int) -> None:
    codec = PerPair.by_node([0, 0, 1], far=Int8()), Int8()
    with pytest.raises(UnsupportedConfigurationError, match="a row for each of 2 ranks, got 3 rows"):
        Coded("compressed", rank, codec).backward()


def test_a_table_for_another_number_of_ranks_is_refused() -> None:
    run_ranks(of_another_size, 2)
