"""What a device adds: late copies, late kernels, late collectives, and a device for each rank. On the fake one."""

import functools
import gc
import random
import threading
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from crossover_ddp._engine.device import Device, Staged
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Trip
from crossover_ddp.codecs import Half, Int8, PerPair, SIDCo
from tests.fake_cuda import contexts, late
from tests.harness import close_pools, in_ranks, run_ranks
from tests.harness.campaign import IN_CAMPAIGN
from tests.harness.training import WAYS, Training, Way, optimizers_of
from tests.harness.turn import RecordingTurn
from tests.multiprocess.compressed_training import way_of

pytestmark = pytest.mark.fake_cuda

LATE: Mapping[str, Mapping[str, int]] = {
    "gloo": {"copy_us": 300, "copy_jitter_us": 2000, "kernel_jitter_us": 300},
    "nccl": {"nccl_us": 500, "nccl_jitter_us": 3000, "kernel_jitter_us": 300},
}
LATENESSES = 100 if IN_CAMPAIGN else 3
PAUSE_S = 0.003  # at most, of a thread that goes on with a bucket
NAMED = ("split", "crossover", "int8", "averaged", "decoupled", "owned", "kfac", "muon")
PAIRS = PerPair(((Int8(), Half()), (SIDCo(0.3), Int8())))
CELLS: dict[str, Way] = {
    **{way: made for way, made in WAYS.items() if way != "elastic"},  # which goes its own pace
    "compressed int8 and half": way_of("compressed", codec=(Int8(), Half())),
    "crossover pairs": way_of("crossover", codec=(PAIRS, Int8())),
    "decoupled int8": way_of("decoupled", codec=Int8()),
    "decoupled pairs": way_of("decoupled", codec=(PAIRS, Int8())),
    "decoupled sidco": way_of("decoupled", codec=SIDCo(0.3)),
    "kfac int8": way_of("kfac", codec=Int8()),
}
# Each way on one backend, and on both the split, whose two halves all the others have.
SHORT = {
    "cpu": ("decoupled pairs", "kfac int8"),
    "gloo": ("split", "compressed int8 and half", "decoupled", "kfac"),
    "nccl": (
        "split",
        "crossover pairs",
        "averaged",
        "owned",
        "muon",
        "decoupled sidco",
        "kfac int8",
    ),
}


def trained(rank: int, device: str, way: str) -> torch.Tensor:
    made: Way = (lambda *_: (None, allreduce_hook)) if way == "plain" else CELLS[way]
    optimizers = functools.partial(optimizers_of, way)
    training = Training(
        made, rank, device=device, mutex=RecordingTurn(), optimizers=optimizers
    ).run(6)
    training.close()
    return training.values.cpu()


def paused(seed: int) -> Any:
    """Let threads that go on with a bucket pause before some of the pieces."""
    numbers, go_on = random.Random(seed), Trip.go_on

    def late_on(trip: Trip) -> None:
        time.sleep(max(0.0, numbers.uniform(-2, 1)) * PAUSE_S)
        go_on(trip)

    return mock.patch.object(Trip, "go_on", late_on)


def differing(rank: int, world_size: int, backend: str, way: str) -> list[int]:
    device = "cpu" if backend == "cpu" else "cuda"
    exact = way in ("split", "crossover", "wrapped", "decoupled")
    expected, found = trained(rank, device, "plain" if exact else way), []
    for seed in range(1, 1 + LATENESSES):
        with (
            paused(world_size * seed + rank)
            if backend == "cpu"
            else late(**LATE[backend], seed=seed)
        ):
            same = torch.equal(trained(rank, device, way), expected)
        if not same:
            found.append(seed)
    return found


@pytest.mark.parametrize(
    ("backend", "way"),
    [(backend, way) for backend in SHORT for way in (CELLS if IN_CAMPAIGN else SHORT[backend])],
)
def test_what_is_late_changes_nothing(backend: str, way: str) -> None:
    """What is read, overwritten or freed before its copy or kernel shows as other numbers here."""
    network = "nccl" if backend == "nccl" else "gloo"
    assert run_ranks(differing, 2, args=(backend, way), backend=network, timeout_s=600) == [[], []]


@in_ranks(2, backend="gloo")
def test_gradients_go_down_and_up_once(rank: int) -> None:
    training = Training("split", rank, device="cuda").run(5)
    copied = dict.fromkeys(("down", "up"), 0)

    def counted(way: str) -> Any:
        copy = getattr(Staged, way)

        def count(net: Staged, pairs: Any) -> Any:
            copied[way] += sum(target.numel() for target, _ in pairs)
            return copy(net, pairs)

        return mock.patch.object(Staged, way, count)

    with counted("down"), counted("up"):
        training.run(1)  # the sixth step: a digest travelled behind the fourth
    assert copied == dict.fromkeys(copied, len(training.values))
    training.close()


def contexts_of_each(rank: int, world_size: int) -> dict[str, list[bool]]:
    torch.cuda.set_device(rank)
    found = {}
    for way in NAMED:
        trained(rank, f"cuda:{rank}", way)
        found[way] = [each in contexts() for each in range(world_size)]
    flat = torch.ones(64, device="cuda")
    trips = [
        Exchange.of(None).begin(
            lambda link: link.all_gather(flat, [32, 32]), flat, "what is dropped"
        )
    ]
    dropping = threading.Thread(target=trips.clear)  # whose device is number 0
    dropping.start()
    dropping.join()
    found["dropped"] = [each in contexts() for each in range(world_size)]
    return found


def test_no_thread_makes_a_context_on_another_ranks_device() -> None:
    close_pools()  # whose processes have had other devices
    _, found = run_ranks(contexts_of_each, 2, backend="nccl")
    assert found == {way: [False, True] for way in (*NAMED, "dropped")}


@pytest.mark.parametrize("way", ["owned", "muon"])
@in_ranks(2, backend="nccl")
def test_state_of_owners_comes_to_each_ranks_own_device(rank: int, way: str) -> None:
    training = Training(way, rank, device="cuda").run(3)
    training.state.consolidate()
    kept = [state for each in training.optimizers for state in each.state_dict()["state"].values()]
    tensors = [tensor for state in kept for tensor in state.values() if tensor is not None]
    assert {str(each.device) for each in tensors if each.dim()} == {f"cuda:{rank}"}
    training.run(1).close()


LATE_S = 0.1


def overwritten(rank: int, world_size: int, way: str) -> int:
    """Train a model, drop it, and return how many numbers of what is made then somebody else has written."""
    found, order = 0, Trip.__del__

    def late_order(trip: Trip) -> None:
        time.sleep(LATE_S / 2)  # as long as it holds memory, nobody else has it
        order(trip)

    for _ in range(2):
        training, made = Training(CELLS[way], rank, device="cuda").run(7), []
        torch.cuda.synchronize()
        with (
            late(
                nccl_us=int(LATE_S * 1e6), copy_us=int(LATE_S / 4 * 1e6)
            ),  # of copies some come one by one
            mock.patch.object(Trip, "__del__", late_order),
        ):
            training.run(
                1
            )  # behind it go digests, which no later step looks at, and of some ways gradients
            del training
            gc.collect()
            for _ in range(10 if dist.get_backend() == "gloo" else 1):
                made += [
                    torch.ones(numel, device="cuda") for numel in (16, 64, 1000) for _ in range(10)
                ]
                time.sleep(LATE_S / 5)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        found += sum(int((each != 1).sum()) for each in made)
    return found


@pytest.mark.parametrize(
    ("backend", "way"), [("nccl", "decoupled int8"), ("gloo", "wrapped"), ("gloo", "owned")]
)
def test_what_nobody_waits_for_writes_over_nothing(backend: str, way: str) -> None:
    assert run_ranks(overwritten, 2, args=(way,), backend=backend) == [0, 0]


@in_ranks(2, backend="nccl")
def test_factors_that_nobody_waits_for_do_not_hold_up_backward(rank: int) -> None:
    training = Training("kfac", rank, device="cuda").run(3)
    reached: list[torch.cuda.Event] = []
    first = next(training.model.parameters())
    first.register_hook(lambda _: reached.append(torch.cuda.current_stream().record_event()))
    loss = training.loss()
    torch.cuda.synchronize()
    with late(nccl_us=int(LATE_S * 1e6)):
        begin_s = time.monotonic()
        loss.backward()
        reached[0].synchronize()
        assert time.monotonic() - begin_s < LATE_S
        torch.cuda.synchronize()
        assert time.monotonic() - begin_s > LATE_S
    training.close()


def drained(rank: int, world_size: int, us: int) -> torch.Tensor:
    """Train with K-FAC and a codec, the last step exact; behind its buckets others want memory of that size."""
    training, made = Training(CELLS["kfac int8"], rank, device="cuda").run(5), []

    def others(*_: Any) -> None:
        made.extend(
            [torch.full((numel,), 1e6, device="cuda") for numel in sizes for _ in range(20)]
        )

    coded = training.state._compression._buckets.values()
    sizes = {len(kept) for each in coded for kept in each._residuals}
    torch.cuda.synchronize()
    training.state.drain()
    with late(nccl_us=us), mock.patch.object(Exchange, "compare", others):
        training.run(1)
        torch.cuda.synchronize()
    training.close()
    return training.values.cpu()


def test_residuals_that_a_drained_step_adds_stay_until_the_device_has_read_them() -> None:
    punctual, late_ = (run_ranks(drained, 2, args=(us,), backend="nccl") for us in (0, 20_000))
    assert all(map(torch.equal, punctual, late_))


@pytest.mark.parametrize("way", ["split", "decoupled"])
@in_ranks(2, backend="gloo")
def test_a_device_that_fails_under_way_is_an_error(rank: int, way: str) -> None:
    """Whatever the host asks of it is refused from then on, and the peer loses the connection."""
    training = Training(way, rank, device="cuda").run(
        5
    )  # past the digests of step 4, which travel on their own
    if rank == 1:
        with pytest.raises(RuntimeError, match="exchange of bucket"):
            training.run(3)
        return
    is_handed_back = way == "decoupled"  # when the device was well
    broken = mock.Mock(side_effect=RuntimeError("device-side assert"))
    set_result = torch.futures.Future.set_result

    def set_on_device(future: Any, result: Any) -> None:
        (broken if isinstance(result, torch.Tensor) and not is_handed_back else set_result)(
            future, result
        )

    methods = {"reached": broken, **({} if is_handed_back else {"mark": broken})}
    with (
        mock.patch.multiple(Device, **methods),
        mock.patch.object(torch.futures.Future, "set_result", set_on_device),
        pytest.raises(RuntimeError, match="device-side assert"),
    ):
        training.run(2)
    with pytest.raises(RuntimeError, match="device-side assert"):
        training.run(2)
    dist.destroy_process_group()


@in_ranks(2, backend="nccl")
def test_beside_a_sibling_the_turn_is_taken_when_the_device_has_the_first_gradients(
    rank: int,
) -> None:
    """On NCCL a Future is complete long before its kernels are: the device would idle inside of the turn."""
    taken: list[float] = []
    turn = RecordingTurn(at_acquire=lambda: taken.append(time.monotonic()))
    training = Training("decoupled", rank, device="cuda", mutex=turn).run(6)
    with late(nccl_us=int(LATE_S * 1e6)):
        training.step()
        launched_s = time.monotonic()
        taken.clear()
        training.backward()
        assert taken[0] - launched_s > LATE_S
        for optimizer in training.optimizers:
            optimizer.step()
        training.close()


@in_ranks(2, backend="gloo")
def test_beside_a_sibling_the_turn_is_taken_when_the_device_has_done_a_wrapped_hook(
    rank: int,
) -> None:
    """Copies, and what a hook computes in callbacks, run outside of the turn."""
    busy_s: list[float] = []

    def acquired() -> None:
        begin_s = time.monotonic()
        torch.cuda.synchronize()
        busy_s.append(time.monotonic() - begin_s)

    turn = RecordingTurn(at_acquire=acquired)
    training = Training("wrapped", rank, device="cuda", mutex=turn).run(3)
    with late(copy_us=int(4 * LATE_S * 1e6)):
        training.backward()
        assert busy_s[-1] < 2 * LATE_S
    training.close()
