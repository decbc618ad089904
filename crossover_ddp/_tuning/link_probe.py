"""Measures the cost of an exchange on a link, with a few exchanges of temporary buffers."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist

from crossover_ddp._ddp.groups import gather_objects
from crossover_ddp._ddp.layout import equal_lengths
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import outside_of_autograd
from crossover_ddp._engine.levels import TwoLevelLink
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.observe import StepRecord
from crossover_ddp._tuning.model import LinkModel, Workload, workload_of_records
from crossover_ddp.errors import UnsupportedConfigurationError

_SIZES_BYTES: Final = (16 * 1024, 64 * 1024, 256 * 1024, 512 * 1024)
_REPEATS: Final = 3
_SMALL_PROBE_BYTES: Final = 1 << 10


def measure_link(process_group: dist.ProcessGroup) -> LinkModel:
    """Measure the cost of one half of an exchange, and return it as a model of the link.

    The measurement takes sixteen exchanges, in which each rank sends 3.5 megabytes if there are two
    ranks, and up to twice as many with more. With two levels it takes sixteen more within nodes.
    The ranks' results differ slightly.

    **Collective**: all ranks of the group call it, with nothing else on the wire.
    """
    engine = Exchange.of(process_group)
    whole = _measured(engine)
    if engine.networks.ranks_inside == 1:
        return whole
    inside = _measured(engine, within_node=True)
    return replace(whole, inside_s=min(whole.beta_s, inside.beta_s))


def _measured(engine: Exchange, *, within_node: bool = False) -> LinkModel:
    """Measure a link between all ranks, or only the part within this node. **Collective**."""
    samples = []
    for size_bytes in _SIZES_BYTES:
        with outside_of_autograd():
            tensor = torch.zeros(size_bytes // 4, dtype=torch.float32)
        took_s = [_timed(engine, tensor, within_node) for _ in range(1 + _REPEATS)][1:]
        samples.append((float(size_bytes), statistics.median(took_s) / 2))
    return LinkModel.fitted(samples)


def recorded_by_all(
    group: dist.ProcessGroup, steps: Sequence[StepRecord]
) -> tuple[list[Workload], LinkModel]:
    """Return the workload that each rank has recorded, and rank 0's measurement of the link.

    The results are the same on all ranks, so all ranks make the same plan.

    Raises ``UnsupportedConfigurationError`` on all ranks if there is only one rank, if the model is
    on a GPU, or if a rank has not recorded a step yet.

    **Collective**, like `measure_link`.
    """
    if group.size() == 1 or any(each.type != "cpu" for each in Exchange.of(group).networks):
        raise UnsupportedConfigurationError(
            "expected at least two ranks with a model on the CPU to plan for, got "
            f"{group.size()}, or a device whose kernels the host's clock does not see; "
            "measure C and M with `crossover-ddp advise`"
        )
    gathered = gather_objects(group, workload_of_records(steps))
    workloads = [each for each in gathered if each is not None]
    if len(workloads) < len(gathered):
        raise UnsupportedConfigurationError(
            "expected recorded steps on all ranks, got "
            f"{[each is not None for each in gathered]}; train some ten steps before, "
            "with settled buckets"
        )
    return workloads, gather_objects(group, measure_link(group))[0]


def _timed(engine: Exchange, tensor: torch.Tensor, within_node: bool) -> float:
    link = engine.networks[tensor.device].link()
    part = link.inside if within_node and isinstance(link, TwoLevelLink) else link
    begin_s = time.perf_counter()
    layout = equal_lengths(tensor.numel(), part.size)

    async def both_halves(link: Link) -> None:
        await part.reduce_scatter(tensor, layout)
        await part.all_gather(tensor, layout)

    # Exchanges that `begin` starts are not part of a recorded step.
    engine.begin(both_halves, tensor, "a probe", link=link).wait()
    return time.perf_counter() - begin_s


def measure_pair(
    peer: int,
    process_group: dist.ProcessGroup,
    size_bytes: int,
    repeats: int,
    device: torch.device,
) -> tuple[LinkModel, LinkModel] | None:
    """Time round trips with one peer, and return the costs of both directions on the lower rank.

    The first is the cost of a message to the peer, and the second that of a message from it. The
    higher rank returns None.

    **Collective**: both ranks call it, each with the other one as ``peer``.

    Args:
        peer: the other rank in the group.
        process_group: the group.
        size_bytes: the size of the larger of the two messages, which is at least 2 KiB.
        repeats: how many round trips count for each pair of sizes. One more is made first.
        device: the device of the messages, from which the group's backend can send.
    """
    small, large = _SMALL_PROBE_BYTES, max(size_bytes, 2 * _SMALL_PROBE_BYTES)
    trips_s = []
    for sizes in ((small, small), (large, small), (small, large)):
        messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        times_s = [_round_trip_s(peer, process_group, messages) for _ in range(repeats + 1)]
        trips_s.append(min(times_s[1:]))  # the first round trip connects the pair
    if process_group.rank() > peer:
        return None
    one_way_s = trips_s[0] / 2
    there, back = (
        LinkModel.fitted([(small, one_way_s), (large, trip_s - one_way_s)])
        for trip_s in trips_s[1:]
    )
    return there, back


def _round_trip_s(
    peer: int, process_group: dist.ProcessGroup, messages: Sequence[torch.Tensor]
) -> float:
    """Return the time from the first message, from the lower rank, to the end of the second."""
    leads = process_group.rank() < peer
    begin_s = time.perf_counter()
    for message, sends in zip(messages, (leads, not leads), strict=True):
        if sends:
            dist.send(message, group=process_group, group_dst=peer)
        else:
            dist.recv(message, group=process_group, group_src=peer)
    if messages[0].device.type != "cpu":
        torch.accelerator.synchronize(messages[0].device)
    return time.perf_counter() - begin_s
