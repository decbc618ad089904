"""Hooks on a CUDA device: late copies, kernels and collectives, and a device of each rank's own.

All tests run on the fake device.
"""

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

from crossover_ddp._engine.buckets import BehindLastBucket
from crossover_ddp._engine.device import Device, Staged
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Journey
from crossover_ddp.codecs import Half, Int4, Int8, Lossless, PerPair, PowerSGD, SIDCo
from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.muon_hooks import MuonState, muon_hook
from crossover_ddp.owner_hooks import OwnerState, owner_hook
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
LATENESSES = 100 if IN_CAMPAIGN else 3  # the number of seeds
PAUSE_S = 0.003  # the longest pause of a thread that resumes a journey
NAMED = ("split", "crossover", "int8", "averaged", "decoupled", "owned", "kfac", "muon")
PAIRS = PerPair(((Int8(), Half()), (SIDCo(0.3), Int8())))
CELLS: dict[str, Way] = {
    # Without elastic averaging, of which no two runs are alike.
    **{way: made for way, made in WAYS.items() if way != "elastic"},
    "compressed int8 and int4": way_of("compressed", codec=(Int8(), Int4())),
    "compressed low rank": way_of("compressed", codec=PowerSGD()),
    "crossover pairs": way_of("crossover", codec=(PAIRS, Int4())),
    "decoupled int8": way_of("decoupled", codec=Int8()),
    "decoupled pairs": way_of("decoupled", codec=(PAIRS, Int8())),
    "decoupled sidco": way_of("decoupled", codec=SIDCo(0.3)),
    "kfac int8 and int4": way_of("kfac", codec=(Int8(), Int4())),
    "owned int8 and int4": lambda model, opts, mutex: (
        OwnerState(opts, codec=(Int8(), Int4()), mutex=mutex),
        owner_hook,
    ),
    "muon int8 and int4": lambda model, opts, mutex: (
        MuonState(opts[0], codec=(Int8(), Int4()), mutex=mutex),  # type: ignore[arg-type]
        muon_hook,
    ),
}
# The short form: each way on one backend, and the split, whose two halves all ways have, on both.
SHORT = {
    "cpu": ("decoupled pairs", "kfac int8 and int4"),
    "gloo": ("split", "compressed int8 and int4", "decoupled", "kfac"),
    "nccl": (
        "split",
        "compressed low rank",
        "crossover pairs",
        "averaged",
        "owned",
        "owned int8 and int4",
        "muon",
        "muon int8 and int4",
        "decoupled sidco",
        "kfac int8 and int4",
    ),
}


def trained(rank: int, device: str, way: str) -> torch.Tensor:
    made: Way = (lambda *_: (None, allreduce_hook)) if way == "plain" else CELLS[way]
    optimizers = functools.partial(optimizers_of, way.partition(" ")[0])
    training = Training(
        made, rank, device=device, mutex=RecordingTurn(), optimizers=optimizers
    ).run(6)
    training.close()
    return training.values.cpu()


def paused(seed: int) -> Any:
    """Pause threads at random before they resume a journey."""
    numbers = random.Random(seed)
    go_on = Journey.go_on

    def pause_and_go_on(trip: Journey) -> None:
        time.sleep(max(0.0, numbers.uniform(-2, 1)) * PAUSE_S)
        go_on(trip)

    return mock.patch.object(Journey, "go_on", pause_and_go_on)


def lateness(backend: str, rank: int, world_size: int, seed: int) -> Any:
    """Delay threads on the CPU, and copies, kernels and collectives on the device."""
    if backend == "cpu":
        return paused(world_size * seed + rank)
    return late(**LATE[backend], seed=seed)


def differing(rank: int, world_size: int, backend: str, way: str) -> list[int]:
    """Return the seeds of latenesses with which training has other results than without any."""
    device = "cpu" if backend == "cpu" else "cuda"
    has_plain_bits = way in ("split", "crossover", "wrapped", "decoupled")
    expected = trained(rank, device, "plain" if has_plain_bits else way)
    found = []
    for seed in range(1, 1 + LATENESSES):
        with lateness(backend, rank, world_size, seed):
            values = trained(rank, device, way)
        if not torch.equal(values, expected):
            found.append(seed)
    return found


@pytest.mark.parametrize(
    ("backend", "way"),
    [(backend, way) for backend in SHORT for way in (CELLS if IN_CAMPAIGN else SHORT[backend])],
)
def test_lateness_changes_no_bit(backend: str, way: str) -> None:
    """A tensor that is read, overwritten or freed before its copy or kernel changes the results."""
    network = "nccl" if backend == "nccl" else "gloo"
    assert run_ranks(differing, 2, args=(backend, way), backend=network, timeout_s=600) == [[], []]


@in_ranks(2, backend="gloo")
def test_gradients_are_copied_to_the_host_and_back_once(rank: int) -> None:
    training = Training("split", rank, device="cuda").run(5)
    copied = dict.fromkeys(("down", "up"), 0)

    def counted(direction: str) -> Any:
        copy = getattr(Staged, direction)

        def count(net: Staged, pairs: Any) -> Any:
            copied[direction] += sum(target.numel() for target, _ in pairs)
            return copy(net, pairs)

        return mock.patch.object(Staged, direction, count)

    with counted("down"), counted("up"):
        training.run(1)  # the sixth step; ranks compare digests after the fourth
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
    dropping = threading.Thread(target=trips.clear)  # a new thread's current device is number 0
    dropping.start()
    dropping.join()
    found["dropped"] = [each in contexts() for each in range(world_size)]
    return found


def test_no_thread_makes_a_context_on_another_ranks_device() -> None:
    close_pools()  # its processes may have contexts on other devices
    _, found = run_ranks(contexts_of_each, 2, backend="nccl")
    assert found == {way: [False, True] for way in (*NAMED, "dropped")}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_lossless_is_refused_on_a_device(backend: str) -> None:
    run_ranks(refuses_lossless, 2, backend=backend)


def refuses_lossless(rank: int, world_size: int) -> None:
    way: Way = lambda _, opts, mutex: (OwnerState(opts, codec=Lossless()), owner_hook)  # noqa: E731
    training = Training(way, rank, device="cuda")
    with pytest.raises(UnsupportedConfigurationError, match=r"CPU tensors over gloo.*on cuda"):
        training.backward()


@pytest.mark.parametrize("way", ["owned", "muon"])
@in_ranks(2, backend="nccl")
def test_consolidated_state_is_on_each_ranks_own_device(rank: int, way: str) -> None:
    training = Training(way, rank, device="cuda").run(3)
    training.state.consolidate()
    kept = [state for each in training.optimizers for state in each.state_dict()["state"].values()]
    tensors = [tensor for state in kept for tensor in state.values() if tensor is not None]
    assert {str(each.device) for each in tensors if each.dim()} == {f"cuda:{rank}"}
    training.run(1).close()


LATE_S = 0.1


def overwritten(rank: int, world_size: int, way: str) -> int:
    """Train a model, drop it while it exchanges, and make tensors that may get its memory.

    Return how many of their numbers the exchange has overwritten.
    """
    found = 0
    delete = Journey.__del__

    def delete_late(trip: Journey) -> None:
        time.sleep(LATE_S / 2)  # until it is deleted, it keeps its memory
        delete(trip)

    # Copies are less late, since some of them come one after the other.
    knobs = {"nccl_us": int(LATE_S * 1e6), "copy_us": int(LATE_S / 4 * 1e6)}
    for _ in range(2):
        training = Training(CELLS[way], rank, device="cuda").run(7)
        made = []
        torch.cuda.synchronize()
        with late(**knobs), mock.patch.object(Journey, "__del__", delete_late):
            # After this step ranks exchange digests, and with some ways gradients. No later step
            # waits for them.
            training.run(1)
            del training
            gc.collect()
            for _ in range(10 if dist.get_backend() == "gloo" else 1):
                for numel in (16, 64, 1000):
                    made += [torch.ones(numel, device="cuda") for _ in range(10)]
                time.sleep(LATE_S / 5)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        found += sum(int((each != 1).sum()) for each in made)
    return found


@pytest.mark.parametrize(
    ("backend", "way"), [("nccl", "decoupled int8"), ("gloo", "wrapped"), ("gloo", "owned")]
)
def test_an_exchange_without_a_waiting_step_overwrites_no_other_memory(
    backend: str, way: str
) -> None:
    assert run_ranks(overwritten, 2, args=(way,), backend=backend) == [0, 0]


@in_ranks(2, backend="nccl")
def test_factors_in_flight_do_not_delay_backward(rank: int) -> None:
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
    """Train with K-FAC and a codec. The last step is exact, which adds the residuals.

    After its buckets tensors of the residuals' sizes are made. They must not get their memory.
    """
    training = Training(CELLS["kfac int8 and int4"], rank, device="cuda").run(5)
    made = []

    def make_others(*_: Any) -> None:
        for numel in sizes:
            made.extend([torch.full((numel,), 1e6, device="cuda") for _ in range(20)])

    coded = training.state._compression._buckets.values()
    sizes = {tile.numel for each in coded for tiles in each._tiles for tile in tiles}
    torch.cuda.synchronize()
    training.state.drain()
    with late(nccl_us=us), mock.patch.object(BehindLastBucket, "compare", make_others):
        training.run(1)
        torch.cuda.synchronize()
    training.close()
    return training.values.cpu()


def test_residuals_of_a_drained_step_keep_their_memory_until_the_device_has_read_them() -> None:
    expected = run_ranks(drained, 2, args=(0,), backend="nccl")
    found = run_ranks(drained, 2, args=(20_000,), backend="nccl")
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("way", ["split", "decoupled"])
@in_ranks(2, backend="gloo")
def test_a_device_that_fails_during_an_exchange_is_an_error(rank: int, way: str) -> None:
    """From then on all calls to the device fail. The peer loses the connection."""
    training = Training(way, rank, device="cuda").run(5)  # ranks compare digests after the fourth
    if rank == 1:
        with pytest.raises(RuntimeError, match="exchange of bucket"):
            training.run(3)
        return
    # Decoupled training answers backward before the device fails.
    fails_in_backward = way != "decoupled"
    broken = mock.Mock(side_effect=RuntimeError("device-side assert"))
    set_result = torch.futures.Future.set_result

    def set_on_device(future: Any, result: Any) -> None:
        if fails_in_backward and isinstance(result, torch.Tensor):
            broken()
        set_result(future, result)

    methods = {"reached": broken}
    if fails_in_backward:
        methods["mark"] = broken
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
    """On NCCL a Future completes long before its kernels. The device would idle during the turn."""
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
    """Copies, and computations of the hook's callbacks, run outside of the turn."""
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
