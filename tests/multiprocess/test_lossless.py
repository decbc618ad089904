"""`OwnerState` with `Lossless`: the bits of a state without it, and fewer bytes."""

import copy
import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossover_ddp import MuonState
from crossover_ddp._compression import lossless
from crossover_ddp.codecs import CompressedState, Int8, Lossless
from crossover_ddp.owner_hooks import OwnerState
from tests.harness import in_ranks
from tests.harness.oracles import error_of
from tests.harness.training import Training, same
from tests.multiprocess.identity_codec import Identity
from tests.multiprocess.test_owner_codec import coded, training_of, values_of
from tests.multiprocess.test_owners import MAKE, TINY_MB, Mixture, loss_of

STEPS = 20


def in_type(codec: Any, rank: int, dtype: torch.dtype, kind: str = "adamw") -> Training:
    return Training(
        coded(codec),
        rank,
        module=Mixture(3, dtype),
        optimizers=lambda model: MAKE[kind](model.module),
        loss=loss_of,
        bucket_cap_mb=TINY_MB,
    )


def bits(training: Training) -> list[int]:
    weights = [each.flatten() for each in training.weights()]
    return torch.cat(weights).view(torch.uint8).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_parameters_are_those_of_a_state_without_it(
    rank: int, world_size: int, dtype: torch.dtype
) -> list[int]:
    """Bit for bit. Some are -0.0, denormal or NaN."""
    trainings = [in_type(codec, rank, dtype) for codec in (Lossless(), None)]
    for training in trainings:
        with torch.no_grad():  # the norm's bias is used, and these elements stay as they are
            training.model.module.embedding.weight[0, :3] = torch.tensor([-0.0, 1e-40, 6e-8])
    for step in range(STEPS):
        if step == STEPS - 2:
            for training in trainings:
                loss = training.loss()
                # One matrix becomes NaN.
                (loss + training.model.module.square.weight.sum() * torch.nan).backward()
                training.update()
        else:
            for training in trainings:
                training.step()
        is_deferred = trainings[0].is_pending
        ours, theirs = map(bits, trainings)
        assert ours == theirs, step
    assert is_deferred, "the gather is deferred into the next forward"
    weights = trainings[0].model.module.state_dict()
    assert bool(weights["square.weight"].isnan().all())
    return ours


@in_ranks(2)
def test_muon_and_skipped_and_unused_steps_have_the_same_bits(rank: int) -> list[int]:
    options: dict[str, Any] = {"kind": "muon in groups", "find_unused_parameters": True}
    trainings = [training_of(coded(codec), rank, **options) for codec in (Lossless(), None)]
    for step in range(9):
        for training in trainings:
            training.model.module.is_short = step % 3 == 1
            if step == 6:
                training.backward()
                training.drop()
            else:
                training.step()
    assert same(*trainings)
    return bits(trainings[0])


@pytest.mark.parametrize("table", ["0,0,1,1", "0,1,0,1"])
@in_ranks(4)
def test_two_levels_have_the_same_bits(rank: int, table: str) -> list[int]:
    with mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": table}):
        trainings = [training_of(coded(codec), rank) for codec in (Lossless(), None)]
        for training in trainings:
            training.run(5)
    assert same(*trainings)
    return bits(trainings[0])


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_a_codec_for_gradients_alone_leaves_the_way_back_exact(
    rank: int, world_size: int
) -> list[float]:
    """A pair with a codec that rounds nothing has the bits of owners that add in rank order."""
    trainings = [training_of(coded((Identity(), back)), rank) for back in (Lossless(), Identity())]
    for training in trainings:
        training.run(6)
    # Changes of parameters are rounded when they are taken and added.
    torch.testing.assert_close(*map(values_of, trainings), rtol=0, atol=1e-6)
    ours = training_of(coded((Int8(64), Lossless())), rank).run(6)
    exact = training_of(coded(None), rank).run(6)
    assert not same(ours, exact)
    torch.testing.assert_close(values_of(ours), values_of(exact), rtol=0, atol=0.02)
    saved = copy.deepcopy(ours.state.checkpoint())
    resumed = training_of(coded((Int8(64), Lossless())), rank, seed=9)
    resumed.state.restore(saved)
    resumed.steps = 6
    for each in (ours, resumed):
        each.run(4)
    assert same(ours, resumed), "residuals of gradients are resumed"
    assert ours.state.stats()["sent_bytes"] < exact.state.stats()["bytes_sent"]
    return values_of(ours).tolist()  # type: ignore[no-any-return]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10)
    )


def learning(codec: Any, rank: int) -> Training:
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        return nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))

    return Training(
        coded(codec, compare_replicas=False),
        rank,
        module=network(),
        optimizers=lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-4)],
        loss=loss,
        bucket_cap_mb=25,
    )


@in_ranks(2)
def test_the_way_back_takes_two_thirds_of_the_bytes_after_some_steps(rank: int) -> None:
    """On a small model with a small learning rate."""
    sent = []
    rates = []
    for codec in (None, Lossless(), (Int8(), Lossless())):
        training = learning(codec, rank).run(20)
        training.state.flush()
        before = training.state.stats()["bytes_sent"]
        training.run(10).state.flush()
        ranks_sent = torch.tensor(training.state.stats()["bytes_sent"] - before)
        dist.all_reduce(ranks_sent)
        sent.append(float(ranks_sent))
        rates.append(training.state.stats()["rate"])
    exact, returned, both = sent
    half = exact / 2
    assert 0.5 < (returned - half) / half <= 0.65
    assert both / exact < 0.45
    assert rates[0] == 1.0 > rates[1] > rates[2]
    assert rates[1] == pytest.approx(returned / exact, abs=0.03)


@in_ranks(2)
def test_a_corrupt_message_ends_the_job_with_an_error_that_names_the_bucket(rank: int) -> None:
    training = training_of(coded(Lossless()), rank).run(3)
    original = lossless.add_decoded

    def cut(message: Tensor, values: Tensor) -> None:
        original(message[: len(message) // 2] if rank else message, values)

    with mock.patch.object(lossless, "add_decoded", cut):
        found = error_of(lambda: training.run(2).weights())
    assert found, "the other rank fails as well"
    expected = r"the parameters of bucket \d+, updated in step\(\) failed: .*corrupt or truncated"
    assert rank == 0 or re.search(expected, found)


@pytest.mark.usefixtures("process_group")
def test_other_states_refuse_it() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4))]
    muon, sgd = torch.optim.Muon(parameters), torch.optim.SGD(parameters, lr=0.1)
    second: Any = (Int8(), Lossless())
    first: Any = (Lossless(), Int8())
    for refuse in (
        lambda: CompressedState(second),
        lambda: MuonState(muon, codec=second),
        lambda: OwnerState(sgd, codec=first),
    ):
        with pytest.raises(TypeError, match="pass it to OwnerState alone or second"):
            refuse()
