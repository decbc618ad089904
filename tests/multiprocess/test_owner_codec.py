"""`OwnerState` with a codec: bits of a computation by hand, conservation, bytes, checkpoints."""

import copy
import functools
import logging
import os
from typing import Any, Final
from unittest import mock

import pytest
import timm.optim
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from crossover_ddp.codecs import Codec, Half, Int4, Int8
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.owner_hooks import OwnerState, owner_hook
from tests.conformance.reference import gathered
from tests.harness import in_ranks, run_ranks
from tests.harness.oracles import tree_sum
from tests.harness.training import Training, Way, same
from tests.multiprocess.compressed_training import Branches, Weights, gradient
from tests.multiprocess.identity_codec import Identity
from tests.multiprocess.test_muon_codec import round_trip
from tests.multiprocess.test_owners import MAKE, TINY_MB, Mixture, loss_of

CODECS: Final = (Int8(64), Int4(16))
COARSE: Final = (Int4(32), Int4(32))  # with larger residuals
# The first two steps travel exactly.
EXACT_STEPS, STEPS = 2, 8


class Attention(nn.Module):
    """Fused queries, keys and values, and a stack of experts, both of which timm's Muon splits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.qkv = nn.Linear(8, 24)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) * 0.3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.mT, dim=-1) @ v
        return x + torch.einsum("...i,eij->...j", torch.tanh(x), self.experts)


def loss_of_attention(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]


def timms_muon(module: Attention) -> list[torch.optim.Optimizer]:
    return [timm.optim.Muon(module.parameters(), lr=0.02, weight_decay=0.01)]


def coded(codec: Any = CODECS, **settings: Any) -> Way:
    return lambda _, opts, mutex: (
        OwnerState(opts, codec=codec, mutex=mutex, **settings),
        owner_hook,
    )


def training_of(
    way: Way | None, rank: int, kind: str = "adamw", seed: int = 3, **options: Any
) -> Training:
    module: nn.Module = Mixture(seed, torch.float32)
    make: Any = MAKE.get(kind, timms_muon)
    loss = loss_of
    if make is timms_muon:
        module = Attention(seed)
        loss = loss_of_attention
    return Training(
        way,
        rank,
        module=module,
        optimizers=lambda model: make(model.module),
        loss=loss,
        **{"bucket_cap_mb": TINY_MB, **options},
    )


def values_of(training: Training) -> Tensor:
    return torch.cat([each.detach().flatten() for each in training.model.parameters()])


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class ByHand:
    """Codes gradients and changes of parameters, on every rank for all ranks.

    Args:
        codecs: the codecs to owners and back.
        owners: the rank that owns each parameter, in the order of the optimizers' groups.
    """

    def __init__(self, codecs: tuple[Codec, Codec], owners: list[int]) -> None:
        self._to_owners, self._back = codecs
        self._owners = owners
        self._owner_of: dict[Tensor, int] = {}
        self._residuals: dict[tuple[Tensor, int], Tensor] = {}
        self._rest: dict[Tensor, Tensor] = {}
        self._steps = 0

    def way(self, _: Any, optimizers: Any, __: Any) -> tuple[Any, Any]:
        groups = [group for each in optimizers for group in each.param_groups]
        parameters = [p for group in groups for p in group["params"]]
        self._owner_of = dict(zip(parameters, self._owners, strict=True))
        for each in optimizers:
            each.step = functools.partial(self._step, each, each.step)
        return self, _by_hand

    def answer(self, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer, start = bucket.buffer(), 0
        of_ranks = gathered(buffer)
        for parameter in bucket.parameters():
            span = slice(start, start + parameter.numel())
            buffer[span] = self._mean(parameter, [each[span] for each in of_ranks])
            start = span.stop
        self._steps += bucket.is_last()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _mean(self, parameter: Tensor, gradients: list[Tensor]) -> Tensor:
        if self._steps < EXACT_STEPS:
            return tree_sum([each / len(gradients) for each in gradients])
        sent = []
        for rank, each in enumerate(gradients):
            if parameter.dim() > 1 and rank != self._owner_of[parameter]:
                rest = self._residuals.get((parameter, rank), torch.zeros_like(each))
                each, self._residuals[parameter, rank] = round_trip(self._to_owners, each + rest)
            sent.append(each)
        return functools.reduce(torch.add, sent) / len(sent)

    @torch.no_grad()
    def _step(self, optimizer: torch.optim.Optimizer, original: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        former = [p.clone() for p in parameters]
        original()
        for parameter, old in zip(parameters, former, strict=True):
            change = flat(parameter) - flat(old)
            if self._steps > EXACT_STEPS and parameter.dim() > 1:
                rest = self._rest.get(parameter, torch.zeros_like(change))
                change, self._rest[parameter] = round_trip(self._back, change + rest)
            flat(parameter).copy_(flat(old) + change)


def _by_hand(state: ByHand, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return state.answer(bucket)


def clipped(training: Training) -> float:
    training.backward()
    norm = float(clip_grad_norm_(training.model.parameters(), 0.05))
    training.update()
    return norm


@pytest.mark.torch_version
@pytest.mark.parametrize("kind", ["adamw", "muon in groups", "timm's muon"])
@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_parameters_are_those_of_a_computation_by_hand(
    rank: int, world_size: int, kind: str
) -> list[float]:
    """To the last bit. The harness checks that all ranks have the same."""
    ours = training_of(coded(), rank, kind)
    by_hand = ByHand(CODECS, [*ours.state.owners])
    theirs = training_of(by_hand.way, rank, kind)
    exact = training_of(coded(None), rank, kind).run(STEPS)
    for step in range(STEPS):
        for each in (ours, theirs):
            each.step()
        is_deferred = ours.is_pending
        assert same(ours, theirs), step
    assert is_deferred, "the gather is deferred into the next forward"
    assert not same(ours, exact)
    for each in (ours, theirs):
        each.model.require_backward_grad_sync = True
        with each.model.no_sync():
            each.loss(99).backward()
        each.step()
    assert same(ours, theirs), "accumulated gradients"
    norms = [clipped(each) for each in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5), "the norm of the decoded mean"
    torch.testing.assert_close(values_of(ours), values_of(theirs))
    return [norms[0], *values_of(ours).tolist()]


# --- conservation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["checkpoint", "drain"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_no_part_of_a_change_is_lost(
    rank: int, world_size: int, scaled: bool, ending: str
) -> list[float]:
    """Gradients travel exactly, so the sum of the changes is known. The loss scale may change."""
    scale = 1.0
    training = Training(
        coded((Identity(), Int4()), loss_scale=lambda: scale),
        rank,
        module=Weights(),
        loss=lambda model, *place: model(gradient(*place)) * scale,
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    )
    expected = torch.zeros(40, 40)
    weight = training.model.module.weight

    def step() -> None:
        training.backward()
        weight.grad.div_(scale)
        training.update()

    for number in range(12):
        if scaled and number % 4 == 3:
            scale *= 8.0 if number < 8 else 1 / 64
        for each in range(world_size):
            expected -= 0.1 * gradient(each, training.steps) / world_size
        step()
    wrong = float((training.model.module.weight.detach() - expected).abs().max())
    assert wrong > 1e-3, "the owner keeps the rest"
    if ending == "checkpoint":
        training.state.checkpoint()
    else:
        training.state.drain()
        for each in range(world_size):
            expected -= 0.1 * gradient(each, training.steps) / world_size
        step()
    torch.testing.assert_close(training.model.module.weight.detach(), expected, rtol=0, atol=1e-5)
    return weight.detach().flatten().tolist()  # type: ignore[no-any-return]


class Halves(Branches):
    """Does not use the second matrix if its weight is None."""

    def forward(self, gradient: Tensor, weight: float | None) -> Tensor:
        return self.used(gradient) if weight is None else super().forward(gradient, weight)


@pytest.mark.parametrize("unused", [True, False])
@in_ranks(2)
def test_the_rest_of_a_change_waits_or_arrives_while_its_parameter_has_no_gradient(
    rank: int, unused: bool
) -> list[float]:
    """With ``find_unused_parameters`` it waits. If a script sets ``p.grad`` to None, it arrives."""
    uses = [1, 1, 1, 1, 0, 0, 1, 1]

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        is_absent = unused and not uses[step]
        return model(gradient(rank, step), None if is_absent else 1.0)  # type: ignore[no-any-return]

    training = Training(
        coded((Identity(), Int4())),
        rank,
        module=Halves(),
        loss=loss,
        optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
        find_unused_parameters=unused,
    )
    expected = torch.zeros(40, 40)
    weight = training.model.module.elsewhere.weight
    has_changed = []
    for step, use in enumerate(uses):
        before = weight.detach().clone()
        training.backward()
        if not use and not unused:
            weight.grad = None
        training.update()
        training.state.flush()
        has_changed.append(not torch.equal(before, weight))
        expected -= use * 0.1 * (gradient(0, step) + gradient(1, step)) / 2
    assert has_changed == [use or not unused for use in uses]
    assert not torch.allclose(weight, expected, rtol=0, atol=1e-3)
    training.state.checkpoint()
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-5)
    return weight.detach().flatten().tolist()  # type: ignore[no-any-return]


# --- bytes and losses -----------------------------------------------------------------------------


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)])


@pytest.mark.parametrize("world_size", [2, 3])
@in_ranks()
def test_matrices_take_a_fifth_of_float32s_bytes(rank: int, world_size: int) -> None:
    """All ranks together, over an all-reduce of the gradients."""
    codec = (Int8(), Int4())
    training = Training(
        coded(codec, compare_replicas=False),
        rank,
        module=network(256),
        optimizers=MAKE["adamw"],  # type: ignore[arg-type]
        loss=lambda model, *_: model(torch.randn(4, 256)).square().mean(),
    )
    training.run(EXACT_STEPS + 1)
    training.state.flush()
    before = training.state.stats()
    training.run(2).state.flush()
    after = training.state.stats()
    sent = torch.tensor([(after[key] - before[key]) / 2 for key in ("bytes_sent", "sent_bytes")])
    dist.all_reduce(sent)
    exact_bytes = 2 * (world_size - 1) * 4 * 6 * 256**2
    on_wire, counted = (sent / exact_bytes).tolist()
    assert 0.19 < counted <= on_wire <= 0.20
    assert after["rate"] <= 0.20
    assert (after["codec"]["name"], after["residual_bytes"]) == (repr(codec), 4 * 6 * 256**2)


@pytest.mark.parametrize("codec", [Int8(), (Int8(), Int4()), (Half(), Int8())], ids=repr)
@in_ranks(2)
def test_losses_of_a_short_training_are_near_those_without_a_codec(rank: int, codec: Any) -> None:
    """AdamW learns the largest of ten linear functions in 60 steps."""
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        return nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))

    losses = []
    for each in (None, codec):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 10))
        training = Training(
            coded(each),
            rank,
            module=module,
            optimizers=lambda model: [torch.optim.AdamW(model.parameters(), lr=3e-3)],
            loss=loss,
        )
        training.run(60)
        with torch.no_grad():
            losses.append(sum(float(loss(module, 7, step)) for step in range(40)) / 40)
    exact, ours = losses
    assert exact < 1.4 < 2.2 < torch.tensor(10.0).log()
    assert ours == pytest.approx(exact, rel=0.03)
    assert ours != exact


# --- checkpoints ----------------------------------------------------------------------------------


@in_ranks(2)
def test_a_resumed_job_has_the_bits_of_an_unbroken_one(rank: int) -> None:
    unbroken = training_of(coded(), rank).run(5)
    saved = copy.deepcopy(unbroken.state.checkpoint())
    residuals = saved["hook"]["residuals"]
    assert all(bool(each.any()) for each in residuals.values())
    resumed, without = (training_of(coded(), rank, seed=9) for _ in range(2))
    for each, hook in ((resumed, saved["hook"]), (without, {})):
        # Optimizers adopt the tensors that they load.
        each.state.restore(copy.deepcopy({**saved, "hook": hook}))
        each.steps = 5
    for _ in range(5):
        for each in (unbroken, resumed, without):
            each.step()
        assert same(unbroken, resumed)
    assert not same(unbroken, without), "the residuals are part of the result"


def checkpoint_of(rank: int, world_size: int) -> dict[str, Any]:
    training = training_of(coded(COARSE), rank).run(5)
    return copy.deepcopy(training.state.checkpoint())


def norms_after(rank: int, world_size: int, saved: dict[str, Any]) -> tuple[float, float, float]:
    """Resume, and return the norm of a step's gradients, and by hand with and without residuals."""
    ours, plain = training_of(coded(COARSE), rank, seed=9), training_of(None, rank, seed=9)
    ours.state.restore(copy.deepcopy(saved))
    plain.model.module.load_state_dict(saved["model"])
    for each in (ours, plain):
        each.backward(5)
    norm = float(ours.state.clip_grad_norm_(torch.inf))
    residuals = saved["hook"]["residuals"]
    with_rest, bare = [], []
    for name, parameter in plain.model.module.named_parameters():
        rest = next((v for key, v in residuals.items() if key.endswith(name)), None)
        bare.append(parameter.grad)
        gradient = parameter.grad
        if rest is not None:
            gradient = gradient + rest.as_strided(parameter.shape, parameter.stride())
        with_rest.append(gradient)
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
        assert norm == pytest.approx(with_residuals, rel=2e-6)
        assert norm != pytest.approx(bare, rel=8e-6)


@in_ranks(2)
def test_a_state_dict_without_the_rest_of_changes_is_warned_of(rank: int) -> None:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    messages: list[str] = []
    logging.getLogger("crossover_ddp.owner_hooks").addHandler(Kept())
    training = training_of(coded(), rank).run(4)
    training.state.state_dict()
    assert [each for each in messages if "which owners keep" in each]
    messages.clear()
    training.state.drain()
    training.run(1)
    saved = training.state.state_dict()
    training.run(3).state.checkpoint()
    assert not messages, "an exact step and a checkpoint leave nothing"
    assert not any(each.any() for each in saved["residuals"].values())
    training_of(coded(None), rank).state.load_state_dict(saved)
    training.state.load_state_dict({})
    with pytest.raises(ValueError, match="'residuals' and 'loss_scale', got keys"):
        training.state.load_state_dict({"codec": {}})


# --- overflows, skipped steps and levels ----------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@in_ranks(3)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, bad: float) -> list[float]:
    """With a GradScaler. Residuals stay finite, and the next steps are taken."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    training = training_of(coded(loss_scale=scaler.get_scale), rank)
    scales = []
    for step in range(9):
        before = values_of(training)
        loss, tall = training.loss(step), training.model.module.tall.weight
        if (step, rank) == (5, 1):
            loss = loss + tall.sum() * bad
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.drop()
        assert torch.equal(before, values_of(training)) == (step == 5)
        residuals = training.state.state_dict()["residuals"].values()
        assert all(bool(each.isfinite().all()) for each in residuals)
        scales.append(scaler.get_scale())
    training.state.checkpoint()
    assert bool(values_of(training).isfinite().all())
    assert len(set(scales)) > 2, "the scale has grown and shrunk"
    return [*scales, *values_of(training).tolist()]


@in_ranks(2)
def test_nan_without_a_scaler_reaches_the_parameters_of_all_ranks(rank: int) -> None:
    training = training_of(coded(), rank).run(4)
    loss = training.loss() + training.model.module.tall.weight.sum() * (torch.nan if rank else 1.0)
    loss.backward()
    training.update()
    weights = training.model.module.state_dict()
    assert bool(weights["tall.weight"].isnan().all())
    assert bool(weights["embedding.weight"].isfinite().all())


@in_ranks(2)
def test_steps_go_on_after_skipped_ones(rank: int) -> list[float]:
    training = training_of(coded(), rank, "muon in groups").run(4)
    before = values_of(training)
    training.backward()
    training.drop()
    assert torch.equal(before, values_of(training))
    training.run(2)
    assert not torch.equal(before, values_of(training))
    return values_of(training).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("table", ["0,0,1,1", "0,1,0,1"])
@in_ranks(4)
def test_with_two_levels_the_codec_is_used_between_nodes(rank: int, table: str) -> list[float]:
    """The harness checks that all ranks have the same parameters."""
    with mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": table}):
        trainings = [training_of(coded(codec), rank) for codec in (None, CODECS)]
        exact, ours = [each.run(STEPS) for each in trainings]
        rate = ours.state.stats()["rate"]
        coarse = values_of(ours)
        ours.state.checkpoint()
    assert not torch.equal(coarse, values_of(ours)), "owners on all nodes kept something"
    assert not torch.equal(values_of(ours), values_of(exact))
    torch.testing.assert_close(values_of(ours), values_of(exact), rtol=0, atol=0.03)
    assert rate < 0.6
    return values_of(ours).tolist()  # type: ignore[no-any-return]


# --- refusals -------------------------------------------------------------------------------------


@in_ranks(2)
def test_parameters_that_a_codec_cannot_sum_are_refused(rank: int) -> None:
    training = Training(
        coded(),
        rank,
        module=Mixture(3, torch.bfloat16),
        optimizers=lambda model: MAKE["adamw"](model.module),
        loss=loss_of,
    )
    with pytest.raises(UnsupportedConfigurationError, match=r"gradients of torch\.float32.*codec"):
        training.backward()


@in_ranks(2)
def test_ranks_with_different_codecs_are_refused(rank: int) -> None:
    training = training_of(coded((Int8(64), Int4(16 + rank))), rank)
    with pytest.raises(UnsupportedConfigurationError, match="codec"):
        training.backward()


@pytest.mark.usefixtures("process_group")
def test_an_object_that_is_no_codec_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a codec such as Int8"):
        OwnerState(
            torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))]),
            codec="int8",  # type: ignore[arg-type]
        )
