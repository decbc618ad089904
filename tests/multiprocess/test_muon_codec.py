"""`MuonState` with a codec: bits of a computation by hand, bytes, losses, checkpoints, overflows."""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon

from crossover_ddp.codecs import Codec, Half, Int4, Int8
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.conformance.reference import gathered
from tests.harness import in_ranks, run_ranks
from tests.harness.oracles import tree_sum
from tests.harness.training import Training, Way, same
from tests.multiprocess.test_owners import (
    NEWTON_SCHULZ,
    TINY_MB,
    Mixture,
    loss_of,
    muon_in_groups,
)

CODECS: Final = (Int8(64), Int4(16))
COARSE: Final = (Int4(32), Int4(32))  # with larger residuals
# The first two steps travel exactly.
EXACT_STEPS, STEPS = 2, 8


def coded(codec: Any = CODECS, **settings: Any) -> Way:
    return lambda _, opts, mutex: (
        MuonState(opts[0], codec=codec, mutex=mutex, **settings),  # type: ignore[arg-type]
        muon_hook,
    )


def training_of(way: Way | None, rank: int, seed: int = 3, **options: Any) -> Training:
    return Training(
        way,
        rank,
        module=Mixture(seed, torch.float32),
        optimizers=lambda model: muon_in_groups(model.module),
        loss=loss_of,
        **{"bucket_cap_mb": TINY_MB, **options},
    )


def values_of(training: Training) -> Tensor:
    return torch.cat([each.detach().flatten() for each in training.model.parameters()])


class ByHand:
    """Codes gradients and directions for torch's own Muon, on every rank for all ranks.

    Args:
        codecs: the codecs to owners and back.
        owners: the rank that owns each of Muon's matrices, in the order of its groups.
    """

    def __init__(self, codecs: tuple[Codec, Codec], owners: list[int]) -> None:
        self._to_owners, self._back = codecs
        self._owners = owners
        self._owner_of: dict[Tensor, int] = {}
        self._residuals: dict[tuple[Tensor, int], Tensor] = {}
        self._steps = 0

    def way(self, _: Any, optimizers: Any, __: Any) -> tuple[Any, Any]:
        matrices = [p for group in optimizers[0].param_groups for p in group["params"]]
        self._owner_of = dict(zip(matrices, self._owners, strict=True))
        return self, _by_hand

    def answer(self, bucket: Any) -> torch.futures.Future[Tensor]:
        flat, start = bucket.buffer(), 0
        of_ranks = gathered(flat)
        for parameter in bucket.parameters():
            span = slice(start, start + parameter.numel())
            flat[span] = self._mean(parameter, [each[span] for each in of_ranks])
            start = span.stop
        self._steps += bucket.is_last()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future

    def _mean(self, parameter: Tensor, gradients: list[Tensor]) -> Tensor:
        if self._steps < EXACT_STEPS:
            return tree_sum([each / len(gradients) for each in gradients])
        owner = self._owner_of.get(parameter)
        sent = [
            each if owner in (None, rank) else self._to_owner(parameter, rank, each)
            for rank, each in enumerate(gradients)
        ]
        return functools.reduce(torch.add, sent) / len(sent)

    def _to_owner(self, parameter: Tensor, rank: int, gradient: Tensor) -> Tensor:
        residual = self._residuals.get((parameter, rank), torch.zeros_like(gradient))
        decoded, rest = round_trip(self._to_owners, gradient + residual)
        self._residuals[parameter, rank] = rest
        return decoded

    def newton_schulz(self, original: Callable[..., Tensor], *given: Any, **options: Any) -> Tensor:
        direction = original(*given, **options).float()
        if self._steps <= EXACT_STEPS:
            return direction
        rows, columns = direction.shape
        # In the order of the memory, which torch turns for tall matrices.
        turned = direction.T if rows > columns else direction
        decoded = round_trip(self._back, turned.flatten())[0].view(turned.shape)
        return decoded.T if rows > columns else decoded


def _by_hand(state: ByHand, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state.answer(bucket)


def round_trip(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decoded values and the residual of a message, padded as the package does."""
    numel = -(-len(values) // 64) * 64  # the codecs' common multiple
    wide = torch.zeros(numel)
    wide[: len(values)] = values
    message, rest = torch.zeros(codec.nbytes(numel), dtype=torch.uint8), torch.zeros(numel)
    codec.encode(wide, message, rest)
    codec.add_decoded(message, decoded := torch.zeros(numel))
    return decoded[: len(values)], rest[: len(values)]


@pytest.mark.torch_version
@pytest.mark.parametrize("codecs", [CODECS, (Half(), Int8(64))], ids=repr)
@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_parameters_are_those_of_a_computation_by_hand(
    rank: int, world_size: int, codecs: tuple[Codec, Codec]
) -> list[float]:
    """To the last bit. The harness checks that all ranks have the same."""
    ours = training_of(coded(codecs), rank)
    by_hand = ByHand(codecs, [*ours.state.owners])
    theirs = training_of(by_hand.way, rank)
    exact = training_of(coded(None), rank).run(STEPS)
    original = torch.optim._muon._zeropower_via_newtonschulz
    coding = functools.partial(by_hand.newton_schulz, original)
    for step in range(STEPS):
        ours.step()
        with mock.patch(NEWTON_SCHULZ, coding):
            theirs.step()
        assert same(ours, theirs), step
    assert not same(ours, exact)
    return values_of(ours).tolist()


def network(width: int, *, is_whole: bool = True) -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(width, width, bias=False) for _ in range(6)]
    if not is_whole:
        return nn.Sequential(*hidden)
    layers = [nn.Linear(32, width), nn.Tanh()]
    for each in hidden[:3]:
        layers += [each, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def hidden_and_others(model: nn.Module) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model.parameters() if p.ndim == 2 and p.shape[0] == p.shape[1]]
    ids = {*map(id, hidden)}
    others = [p for p in model.parameters() if id(p) not in ids]
    adamw = [torch.optim.AdamW(others, lr=3e-3)] if others else []
    return [Muon(hidden, lr=0.02), *adamw]


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_matrices_take_a_fifth_of_float32s_bytes(rank: int, world_size: int) -> None:
    """All ranks together, over an all-reduce of the gradients; without a codec 0.75."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(torch.randn(4, 256)).square().mean()  # type: ignore[no-any-return]

    rates = []
    for codec in (None, (Int8(), Int4())):
        module = network(256, is_whole=False)
        way = coded(codec, compare_replicas=False)
        training = Training(way, rank, module=module, optimizers=hidden_and_others, loss=loss)
        training.run(EXACT_STEPS + 1)
        before = training.state.stats()["bytes_sent"]
        training.run(2)
        sent = torch.tensor((training.state.stats()["bytes_sent"] - before) / 2)
        dist.all_reduce(sent)
        exact_bytes = 2 * (world_size - 1) * 4 * 6 * 256**2
        rates.append(float(sent) / exact_bytes)
    assert rates[0] == pytest.approx(0.75, abs=0.01)
    assert 0.19 < rates[1] <= 0.20
    assert training.state.stats()["rate"] <= 0.20


@pytest.mark.parametrize("codec", [(Int8(), Int4()), (Half(), Int8())], ids=repr)
@in_ranks(2)
def test_losses_of_a_short_training_are_near_those_without_a_codec(rank: int, codec: Any) -> None:
    """A network learns the largest of ten linear functions in 60 steps."""
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(16, 32, generator=generator)
        return nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))

    losses = []
    for each in (None, codec):
        module = network(128)
        training = Training(
            coded(each), rank, module=module, optimizers=hidden_and_others, loss=loss
        )
        training.run(60)
        with torch.no_grad():
            losses.append(sum(float(loss(module, 7, step)) for step in range(40)) / 40)
    exact, ours = losses
    assert exact < 1.2 < 2.2 < torch.tensor(10.0).log()
    assert ours == pytest.approx(exact, rel=0.02)
    assert ours != exact


@in_ranks(2)
def test_a_resumed_job_has_the_bits_of_an_unbroken_one(rank: int) -> None:
    unbroken = training_of(coded(), rank).run(5)
    saved = copy.deepcopy(unbroken.state.checkpoint(unbroken.optimizers))
    residuals = saved["hook"]["residuals"]
    assert len(residuals) == 5, "of Muon's matrices only"
    assert all(bool(each.any()) for each in residuals.values())
    resumed, without = (training_of(coded(), rank, seed=9) for _ in range(2))
    for each, hook in ((resumed, saved["hook"]), (without, {})):
        # Optimizers adopt the tensors that they load.
        each.state.restore(copy.deepcopy({**saved, "hook": hook}), each.optimizers)
        each.steps = 5
    for _ in range(5):
        for each in (unbroken, resumed, without):
            each.step()
        assert same(unbroken, resumed)
    assert not same(unbroken, without), "the residuals are part of the result"
    unbroken.state.drain()
    unbroken.run(1)
    assert not any(each.any() for each in unbroken.state.state_dict()["residuals"].values())


def checkpoint_of(rank: int, world_size: int) -> dict[str, Any]:
    training = training_of(coded(COARSE), rank).run(5)
    return copy.deepcopy(training.state.checkpoint(training.optimizers))


def norms_after(rank: int, world_size: int, saved: dict[str, Any]) -> tuple[float, float, float]:
    """Resume, and return the norm of a step's matrices, and by hand with and without residuals."""
    ours, plain = training_of(coded(COARSE), rank, seed=9), training_of(None, rank, seed=9)
    ours.state.restore(copy.deepcopy(saved), ours.optimizers)
    plain.model.module.load_state_dict(saved["model"])
    for each in (ours, plain):
        each.backward(5)
    norm = float(ours.state.grad_norm())
    residuals = saved["hook"]["residuals"]
    with_rest, bare = [], []
    for name, parameter in plain.model.module.named_parameters():
        rest = next((v for key, v in residuals.items() if key.endswith(name)), None)
        if rest is not None:
            bare.append(parameter.grad)
            with_rest.append(parameter.grad + rest.as_strided(parameter.shape, parameter.stride()))
    ours.update()
    ours.run(4)
    assert len({tuple(each.tolist()) for each in gathered(values_of(ours))}) == 1
    norms = [float(torch.cat([each.flatten() for each in of]).norm()) for of in (with_rest, bare)]
    return norm, norms[0], norms[1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_of_two_ranks_resumes_with_another_number_of_ranks(world_size: int) -> None:
    """The next step brings the residuals."""
    saved = run_ranks(checkpoint_of, 2)[0]
    for norm, with_residuals, bare in run_ranks(norms_after, world_size, args=(saved,)):
        assert norm == pytest.approx(with_residuals, rel=1e-5)
        assert norm != pytest.approx(bare, rel=1e-4)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@in_ranks(3)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, bad: float) -> list[float]:
    """With a GradScaler. Residuals stay finite, and the next steps are taken."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    training = training_of(coded(loss_scale=scaler.get_scale), rank)
    scales = []
    for step in range(9):
        before = training.model.module.tall.weight.detach().clone()
        loss, tall = training.loss(step), training.model.module.tall.weight
        if (step, rank) == (5, 1):
            loss = loss + tall.sum() * bad
        scaler.scale(loss).backward()
        assert bool(tall.grad.isfinite().all()) == (step != 5)
        for each in training.optimizers:
            scaler.step(each)
        scaler.update()
        training.drop()
        assert torch.equal(before, tall) == (step == 5)
        residuals = training.state.state_dict()["residuals"].values()
        assert all(bool(each.isfinite().all()) for each in residuals)
        scales.append(scaler.get_scale())
    assert bool(values_of(training).isfinite().all())
    assert len(set(scales)) > 2, "the scale has grown and shrunk"
    return [*scales, *values_of(training).tolist()]


@in_ranks(2)
def test_a_matrix_that_is_not_used_keeps_its_residual(rank: int) -> list[float]:
    training = training_of(coded(), rank, find_unused_parameters=True).run(5)
    before = training.state.state_dict()["residuals"]
    weights = values_of(training)
    training.model.module.is_short = True  # uses none of Muon's matrices
    training.run(1)
    after = training.state.state_dict()["residuals"]
    assert len(before) == 5
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not torch.equal(values_of(training), weights)
    training.model.module.is_short = False
    training.run(2)
    later = training.state.state_dict()["residuals"]
    # A rank keeps none of its own matrices.
    kept = [name for name, each in before.items() if each.any()]
    assert 0 < len(kept) < 5
    assert not any(torch.equal(later[name], before[name]) for name in kept)
    return values_of(training).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("table", ["0,0,1,1", "0,1,0,1"])
@in_ranks(4)
def test_with_two_levels_the_codec_is_used_between_nodes(rank: int, table: str) -> list[float]:
    """The harness checks that all ranks have the same parameters."""
    with mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": table}):
        trainings = [training_of(coded(codec), rank) for codec in (None, CODECS)]
        exact, ours = [each.run(STEPS) for each in trainings]
        rate = ours.state.stats()["rate"]
    assert values_of(ours).tolist() != values_of(exact).tolist()
    torch.testing.assert_close(values_of(ours), values_of(exact), rtol=0, atol=0.03)
    # The other parameters travel exactly, and weigh more here than in larger models.
    assert rate < 0.6
    return values_of(ours).tolist()  # type: ignore[no-any-return]


@in_ranks(2)
def test_gradients_that_a_codec_cannot_sum_are_refused(rank: int) -> None:
    training = Training(
        coded(),
        rank,
        module=Mixture(3, torch.bfloat16),
        optimizers=lambda model: muon_in_groups(model.module),
        loss=loss_of,
    )
    with pytest.raises(UnsupportedConfigurationError, match=r"gradients of torch\.float32.*codec"):
        training.backward()


@in_ranks(2)
def test_a_matrix_that_is_taken_out_of_muon_is_refused(rank: int) -> None:
    training = training_of(coded(), rank).run(3)
    training.optimizer.param_groups[1]["params"].pop()
    with pytest.raises(UnsupportedConfigurationError, match=r"expected the 5 matrices.*got 4"):
        training.backward()


@in_ranks(2)
def test_ranks_with_different_codecs_are_refused(rank: int) -> None:
    training = training_of(coded((Int8(64), Int4(16 + rank))), rank)
    with pytest.raises(UnsupportedConfigurationError, match="codec"):
        training.backward()


def test_an_object_that_is_no_codec_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a codec such as Int8"):
        MuonState(Muon([nn.Parameter(torch.ones(2, 2))]), codec="int8")  # type: ignore[arg-type]
