"""K-FAC's layers on their owners, factors behind later gradients, in decoupled training, and with a codec."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from crossover_ddp._kfac.curvature import DampedInverse, Eigenbasis
from crossover_ddp._kfac.factor_traffic import FactorTraffic
from crossover_ddp._owners.kept import tensors_in
from crossover_ddp.codecs import Codec, Int8, SIDCo
from tests.harness import in_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.oracles import heard
from tests.harness.turn import RecordingTurn
from tests.multiprocess.compressed_training import digest
from tests.multiprocess.kfac_oracle import Settings
from tests.multiprocess.kfac_training import OUTPUTS, WIDTH, Training, mlp, same
from tests.multiprocess.test_kfac import TINY_MB, Everything, batch

OPTIONS: dict[str, Any] = {"damping": 0.03, "kl_clip": 1e-4}
LATE: dict[str, Any] = {**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8}


WIDTHS = (WIDTH, 7, 9, 11, 13, OUTPUTS)  # no two layers alike
SIZES = [(inputs + 1, outputs) for inputs, outputs in itertools.pairwise(WIDTHS)]


@pytest.mark.parametrize(
    ("solver", "kind", "world_size"), [("inverse", DampedInverse, 4), ("eigen", Eigenbasis, 2)]
)
@in_ranks()
def test_each_rank_makes_and_keeps_what_is_of_its_own_layers_only(
    rank: int, solver: str, kind: Any
) -> list[int]:
    compute, made = kind.compute, list[list[tuple[int, int]]]()

    def counted(a: Tensor, g: Tensor, *arguments: Any, **options: Any) -> Any:
        made[-1].append((a.shape[-1], g.shape[-1]))
        return compute(a, g, *arguments, **options)

    training = Training(rank, mlp(*WIDTHS), solver=solver, inv_update_steps=3)
    owners = [*training.kfac.owners.values()]
    own = [size for size, owner in zip(SIZES, owners, strict=True) if owner == rank]
    assert own, "more layers than ranks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "compute", staticmethod(counted))
        for step in range(7):
            made.append([])
            training.step()
            assert sorted(made[-1]) == (sorted(own) if step % 3 == 0 else [])
    memory = training.kfac.memory_usage()
    factors = 4 * sum(a**2 + g**2 for a, g in own)
    eigenvalues = 4 * sum(a + g + 1 for a, g in own) if solver == "eigen" else 0  # and the damping
    assert (memory["factors"], memory["solvers"]) == (factors, factors + eigenvalues)
    return owners


class Mixed(nn.Module):
    """A layer of float64 before one of float32 that all ranks precondition together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(WIDTH, 300, dtype=torch.float64)
        self.others = mlp(300, 230, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.others(self.first(inputs.double()).tanh().float())  # type: ignore[no-any-return]


@in_ranks(2)
def test_a_spread_layer_is_the_same_on_all_ranks_beside_layers_of_another_dtype(rank: int) -> str:
    training = Training(rank, Mixed(), damping=0.1, compare_replicas=False).run(6)
    assert training.spread() == ["others.0"]
    return digest([training.parameters()])


@in_ranks(2)
def test_a_turn_is_asked_for_once_where_solvers_are_shared(rank: int) -> None:
    turn = RecordingTurn()
    training = Training(rank, mlp(WIDTH, 300, 230, OUTPUTS), ddp={"bucket_cap_mb": 25}, mutex=turn)
    training.run(2)
    assert training.spread()
    assert turn.order == ["release", "request", "acquire"] * 2


@in_ranks(2)
def test_a_wider_layers_state_is_refused_on_all_ranks_and_nothing_is_lost(rank: int) -> None:
    wider, training = (Training(rank, mlp(WIDTH, 8, 8, width)).run(2) for width in (OUTPUTS + 1, OUTPUTS))
    saved, before = wider.kfac.state_dict(), copy.deepcopy(training.kfac.state_dict())
    told = r"expected a factor of shape \(1, 5, 5\) for layer '4', got \(1, 6, 6\)"
    with pytest.raises(ValueError, match=told):
        training.kfac.load_state_dict(saved)
    after = training.kfac.state_dict()
    assert after["steps"] == 2
    assert all(map(torch.equal, tensors_in(after["layers"]), tensors_in(before["layers"])))
    training.run(2)


LATE_STEPS = 18


@in_ranks(3)
def test_late_factors_train_the_same(rank: int) -> None:
    """Count how many factors leave in each step; compare the gradients with those of factors in the buckets."""
    counts: list[int] = []
    leave = FactorTraffic.leave

    def count(traffic: FactorTraffic, after: Any = None, *, all_groups: bool = False) -> None:
        before = sum(map(len, traffic.late))
        leave(traffic, after, all_groups=all_groups)
        counts.append(before - sum(map(len, traffic.late)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "leave", count)
        late = Training(rank, **LATE).trained(LATE_STEPS)
        in_late = counts.copy()
        patch.setattr(FactorTraffic, "can_trail", False)
        assert same(late, Training(rank, **LATE).trained(LATE_STEPS))
        assert not any(counts[len(in_late) :])
    # Asked before each step. Four layers' factors of steps 4 and 12, one layer after each step, before 8 and 16.
    assert in_late == [0] * 5 + [2] * 4 + [0] * 4 + [2] * 4 + [0] * 2


@in_ranks(2)
def test_after_close_no_factors_leave_any_more(rank: int) -> None:
    made = Training(rank, **LATE).run(5)
    assert made.kfac.memory_usage()["buffers"] > 0
    made.kfac.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FactorTraffic, "send", None)
        made.run(4)


STEPS = 12
NOT_SETTLED = 2  # backward passes before DDP's buckets stay as they are


def both(rank: int, *widths: int, **options: Any) -> tuple[Training, Training]:
    """Make the same training twice: deferred, and not."""
    widths = widths or (WIDTH, 8, 8, 8, OUTPUTS)
    deferred, plain = (Training(rank, mlp(*widths), decoupled=each, **options) for each in (True, False))
    return deferred, plain


@pytest.mark.parametrize(
    ("world_size", "widths", "options"),
    [
        (1, (), OPTIONS),
        (2, (), OPTIONS),
        (2, (), LATE | {"kl_clip": None, "solver": "eigen", "factors": "local"}),
        (2, (WIDTH, 300, 230, OUTPUTS), LATE | {"ddp": {"bucket_cap_mb": 0.1}}),
        (4, (), LATE | {"ddp": {"gradient_as_bucket_view": True}}),
    ],
    ids=["alone", "riding", "local", "spread", "late"],
)
@in_ranks()
def test_it_trains_as_kfac_hook_does(rank: int, widths: tuple[int, ...], options: dict[str, Any]) -> None:
    (ours, plain), deferred = both(rank, *widths, **options), 0
    for _ in range(STEPS):
        assert ours.step() == plain.step()
        deferred += bool(ours.state.stats()["deferred"])
    assert torch.equal(ours.parameters(), plain.parameters())
    assert deferred == STEPS - NOT_SETTLED


@in_ranks(2)
def test_what_else_a_loop_does_has_the_same_results(rank: int) -> None:
    """Accumulate, clip, skip a step, look at gradients, close the state."""
    ours, plain = both(rank, **LATE)
    free = Training(rank, **{**LATE, "kl_clip": None}).run(4)

    def both_do(*acts: Callable[[Training], object]) -> None:
        for act in acts:
            for each in (ours, plain):
                act(each)

    def equal() -> bool:
        return torch.equal(ours.parameters(), plain.parameters())

    both_do(lambda each: each.run(4))
    assert ours.state.stats()["deferred"]
    assert float((ours.parameters() - free.parameters()).abs().max()) > 1e-3, "clipped"
    both_do(*[lambda each: each.backward(parts=2), Training.update] * 2)
    assert equal(), "accumulated"
    for _ in range(2):
        both_do(Training.backward)
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        assert ours.state.clip_grad_norm_(0.01) == norm > 0.01
        both_do(Training.update)
    assert equal(), "clipped by norm"
    both_do(Training.backward, Training.step)
    assert equal(), "a step was not taken"
    both_do(Training.backward)
    ours.state.flush()
    assert same([ours.gradients()], [plain.gradients()]), "flushed"
    both_do(Training.update, Training.step)
    ours.state.close()
    both_do(lambda each: each.run(2))
    assert equal(), "closed"


@in_ranks(2)
def test_join_with_uneven_inputs_ends_with_the_same_model(rank: int) -> Tensor:
    """Without `decoupled_hook` in tests/conformance."""
    training = Training(rank, decoupled=True, inv_update_steps=2).run(3)
    with Join([training.model]):
        training.run(2 if rank else 4)
    assert training.kfac.stats().items() >= {"strained": 0, "dropped": 0}.items()
    assert training.kfac.steps == 7
    return training.parameters()


CODED_WORLDS = (2, 3, 4) if IN_CAMPAIGN else (2, 4)
CODECS: dict[str, Codec | tuple[Codec, Codec]] = {"int8": Int8(64), "pair": (SIDCo(0.2), Int8(64))}
CODED_STEPS = 6 if IN_CAMPAIGN else 5  # two of them travel exact


def coded(rank: int, codec: Any) -> Training:
    ddp, settings = {"bucket_cap_mb": TINY_MB}, asdict(Settings(kl_clip=None))
    return Training(rank, Everything(), data=batch, ddp=ddp, codec=codec, **settings)


def directions_of(rank: int, codec: Any) -> list[Tensor]:
    """Return the directions of each step, all at the same parameters."""
    training, directions = coded(rank, codec), []
    for _ in range(CODED_STEPS):
        training.backward()
        directions.append(torch.cat([each.flatten() for each in training.gradients().values()]))
        training.steps += 1
    training.close()
    return directions


@pytest.mark.parametrize("world_size", CODED_WORLDS)
@in_ranks()
def test_directions_are_near_those_without_a_codec_and_the_same_on_all_ranks(rank: int) -> dict[str, str]:
    """With a codec that loses nothing they are in test_kfac.py."""
    exact = directions_of(rank, None)
    found = {}  # how far one direction and the sum of all are apart
    for name, codec in CODECS.items():
        directions = directions_of(rank, codec)
        apart = [a - b for a, b in zip(directions, exact, strict=True)]
        one = max(float(each.norm() / b.norm()) for each, b in zip(apart[2:], exact[2:], strict=True))
        both = torch.stack(exact[2:]).sum(0)
        found[name] = digest(directions), one, float(torch.stack(apart[2:]).sum(0).norm() / both.norm())
    assert found["int8"][2] < found["int8"][1] < 0.06
    assert found["pair"][1] > 0.1
    return {name: bits for name, (bits, *_) in found.items()}


@in_ranks(3)
def test_a_drained_step_leaves_nothing_behind(rank: int) -> str:
    """After coded steps, after `drain` and a step, and after one more."""
    training, lost = coded(rank, (SIDCo(0.2), Int8())), []
    for steps in (CODED_STEPS - 1, 1, 1):
        training.run(steps)
        with heard() as warned:
            training.kfac.state_dict()
        lost.append(any("residuals" in each for each in warned))
        if steps > 1:
            training.kfac.drain()
    training.close()
    assert lost == [True, False, True]
    return digest([training.parameters()])


@in_ranks(2)
def test_it_tells_the_rate(rank: int) -> None:
    seldom = {"factor_update_steps": 100, "inv_update_steps": 100}
    training = Training(
        rank, mlp(WIDTH, 256, 128, OUTPUTS), ddp={"bucket_cap_mb": 25}, codec=Int8(), **seldom
    )
    training.run(6).close()
    assert 0.25 < training.kfac.stats()["codec"]["rate"] < 0.29
