"""Measure what an exchange costs on this link, by a few exchanges of buffers of our own."""

import statistics
import time
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp._planning import Link

from .exchange import Exchange
from .transfer import Payload, Sharded

_SIZES_BYTES: Final = (16 * 1024, 64 * 1024, 256 * 1024, 512 * 1024)
_REPEATS: Final = 3
_SMALL_PROBE_BYTES: Final = 1 << 10
_PAIR_PROBE_BYTES: Final = 1 << 18
_MAX_PAIR_PROBE_BYTES: Final = 1 << 24
_PAIR_PROBE_S: Final = 0.01


def measure_link(process_group: dist.ProcessGroup) -> Link:
    """Return what one half of an exchange costs: five megabytes travel, in a dozen exchanges.

    **Collective**: all ranks of the group, with nothing else on the wire. The ranks' figures differ a little.
    """
    engine = Exchange.of(process_group)
    samples = []
    for size_bytes in _SIZES_BYTES:
        tensor = torch.zeros(size_bytes // 4)
        took_s = [_timed(engine, tensor) for _ in range(1 + _REPEATS)][1:]
        samples.append((float(size_bytes), statistics.median(took_s) / 2))
    return Link.fitted(samples)


def _timed(engine: Exchange, tensor: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    both_ways = Sharded(tensor, engine.routes.equal_layout(tensor))
    engine.average(
        Payload(both_ways, both_ways, _nothing, _nothing)
    ).wait()  # no step that a plan would look at
    return time.perf_counter() - begin_s


def _nothing(*_: object) -> None:
    """Leave it as it has come."""


def measure_pairs(process_group: dist.ProcessGroup) -> list[list[float]]:
    """Return the seconds per byte between each two ranks, the same on all ranks; the diagonal is 0.

    In each of W − 1 rounds (W with an odd number of ranks, one of which rests) ranks meet in pairs, so ranks that share
    a card mostly share it here as in an exchange. A pair sends messages that take some hundredth of a second each.

    **Collective**: all ranks of the gloo group, with nothing else on the wire.
    """
    rank, size = process_group.rank(), process_group.size()
    found = torch.zeros(size, size, dtype=torch.float64)
    for peer in _peers(rank, size):
        if peer is not None:
            each_s = _seconds_per_byte(peer, rank < peer, process_group)
            if rank < peer:
                found[rank, peer] = found[peer, rank] = each_s
        dist.all_reduce(torch.zeros(1), group=process_group)  # gloo's even in a group with two backends
    dist.all_reduce(found, group=process_group)
    rows: list[list[float]] = found.tolist()
    return rows


def _seconds_per_byte(peer: int, leads: bool, process_group: dist.ProcessGroup) -> float:
    """Time ever larger messages until they take so long that the wire, and not the machine, decides; the fastest."""
    size = _PAIR_PROBE_BYTES
    while True:
        took_s = min(_round_trips_s(peer, leads, process_group, size, _REPEATS))
        told = torch.tensor(
            [took_s], dtype=torch.float64
        )  # the leader's time counts, so that both go on alike
        _pass(told, peer, leads, process_group)
        if float(told) >= _PAIR_PROBE_S or size >= _MAX_PAIR_PROBE_BYTES:
            return max(float(told), 1e-9) / size
        size *= 4


def _peers(rank: int, size: int) -> list[int | None]:
    """Return whom ``rank`` meets in each round, in which each rank meets at most one other; None: nobody."""
    seats = size + size % 2
    peers: list[int | None] = []
    for turn in range(seats - 1):
        # All but the last seat go around a circle; two meet whose numbers add up to the round's, modulo the circle.
        if rank == seats - 1:
            peer = next(one for one in range(seats - 1) if (2 * one - turn) % (seats - 1) == 0)
        else:
            peer = (turn - rank) % (seats - 1)
            peer = seats - 1 if peer == rank else peer
        peers.append(peer if peer < size else None)
    return peers


def measure_pair(
    peer: int, leads: bool, process_group: dist.ProcessGroup | None, size_bytes: int, repeats: int
) -> Link:
    """Time round trips with one peer; return the cost of one way. Both call it; one of them ``leads``."""
    sizes = (_SMALL_PROBE_BYTES, max(size_bytes, 2 * _SMALL_PROBE_BYTES))
    return Link.fitted(
        [(size, min(_round_trips_s(peer, leads, process_group, size, repeats))) for size in sizes]
    )


def _round_trips_s(
    peer: int, leads: bool, process_group: dist.ProcessGroup | None, size: int, repeats: int
) -> list[float]:
    """Return the seconds of one way, half of a round trip each."""
    message, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(repeats + 1):  # the first one connects the pair
        begin_s = time.perf_counter()
        for sends in (leads, not leads):
            _pass(message, peer, sends, process_group)
        times.append((time.perf_counter() - begin_s) / 2)
    return times[1:]


def _pass(message: torch.Tensor, peer: int, sends: bool, process_group: dist.ProcessGroup | None) -> None:
    if sends:
        dist.send(message, group=process_group, group_dst=peer)
    else:
        dist.recv(message, group=process_group, group_src=peer)
