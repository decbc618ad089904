"""Two levels: the sums and bytes of their exchanges, and which ranks share a node."""

import functools
import os
import random
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from crossover_ddp._engine.device import Native
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.journeys import Gate
from crossover_ddp._engine.levels import TwoLevels, levels_of
from crossover_ddp._engine.links import Link
from crossover_ddp._engine.networks import Networks
from crossover_ddp._system.torch_private import group_timeout_s
from tests.harness import in_ranks
from tests.harness.inside import force_native
from tests.harness.oracles import error_of, heard, tree_sum

CPU = torch.device("cpu")
SIZES = (0, 1, 3, 1000, 65_537, 1_000_000)
TABLES = {
    "0,0,1,1": [(0, 1), (2, 3)],
    "a, b, a, b": [(0, 2), (1, 3)],
    "0,1,1,0": [(0, 3), (1, 2)],
    "0,0,0,1,1,1": [(0, 1, 2), (3, 4, 5)],
    "0,0,1,1,2,2,3,3": [(0, 1), (2, 3), (4, 5), (6, 7)],
}


def levels(table: str) -> Any:
    return mock.patch.dict(os.environ, {"CROSSOVER_LEVELS": table})


def mean(everyone: Sequence[torch.Tensor], nodes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the mean in the documented order: within nodes, then between them."""
    addends = [each / len(everyone) for each in everyone]
    return tree_sum([tree_sum([addends[rank] for rank in node]) for node in nodes])


class Peers:
    """A process group's messages, whose bytes are counted by the rank that they go to."""

    def __init__(self, net: Any) -> None:
        self.sent: dict[int, int] = {}
        self._group = net.group()
        net.group = lambda: self

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> dist.Work:
        self.sent[rank] = self.sent.get(rank, 0) + sum(each.nbytes for each in tensors)
        return self._group.send(tensors, rank, tag)  # type: ignore[no-any-return]

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return self._group.recv(tensors, rank, tag)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("table", "world_size"), [(table, sum(map(len, nodes))) for table, nodes in TABLES.items()]
)
@in_ranks()
def test_sums_have_the_documented_order_whatever_ranks_do_when(
    rank: int, world_size: int, table: str
) -> None:
    """Tensors of all sizes, many under way; each rank gathers in its own order where it waits."""
    choose, order = random.Random(0), random.Random(rank)

    async def halves(flat: torch.Tensor, layout: Any, gate: Gate, link: Link) -> None:
        own = await link.reduce_scatter(flat, layout)
        assert own.data_ptr() == flat.split(list(layout))[rank].data_ptr()
        await link.compute()
        await gate
        await link.all_gather(flat, layout)

    async def at_once(flat: torch.Tensor, layout: Any, gate: Gate, link: Link) -> None:
        await link.all_reduce(flat, layout, gate.open)

    with levels(table):
        exchange = Exchange.of(None)
        trips, gates, checks = [], [], []
        for number in range(24):
            numel = choose.choice(SIZES)
            everyone = [
                torch.randn(numel, generator=torch.Generator().manual_seed(1000 * number + each))
                for each in range(world_size)
            ]
            cuts = sorted(choose.choices(range(numel + 1), k=world_size - 1))
            layout = [stop - start for start, stop in zip([0, *cuts], [*cuts, numel], strict=True)]
            flat, gate = everyone[rank].clone(), Gate()
            way = choose.choice((halves, at_once))
            trips.append(exchange.begin(functools.partial(way, flat, layout, gate), flat, "it"))
            checks.append((flat, mean(everyone, TABLES[table])))
            if world_size in (4, 8) and TABLES[table][0] == (0, 1):  # as without levels
                flat_order = tree_sum([each / world_size for each in everyone])
                assert torch.equal(checks[-1][1], flat_order)
            gates += [gate] if way is halves else []
            if order.random() < 0.1:
                time.sleep(0.01)  # ranks are not in step
        order.shuffle(gates)
        for gate in gates:
            gate.open()
        for trip in trips:
            trip.wait()
    net = exchange.networks[CPU]
    assert isinstance(net, TwoLevels)
    # The three networks share a channel, of which a group has sixteen.
    assert len({each._channel for each in net._networks}) == 1  # type: ignore[union-attr]
    assert all(torch.equal(flat, wanted) for flat, wanted in checks)


@pytest.mark.parametrize("native", [False, True])
@in_ranks(4)
def test_a_node_sends_half_of_the_tensor_in_either_half_over_its_card(
    rank: int, native: bool
) -> None:
    flat = torch.arange(100_000, dtype=torch.float32) * (rank + 1)
    wanted = torch.arange(100_000, dtype=torch.float32) * 2.5

    def exchange_once() -> None:
        exchange = Exchange.of(None)
        net: Any = exchange.networks[flat.device]
        counted = [] if native else [Peers(each) for each in net._networks]
        layout = exchange.equal_layout(flat)

        async def both(link: Link) -> None:
            await link.all_reduce(flat, layout)

        exchange.begin(both, flat, "it").wait()
        torch.testing.assert_close(flat, wanted)
        if native:
            assert {group_timeout_s(each._group()) for each in net._networks} == {
                group_timeout_s(dist.group.WORLD)
            }
        else:
            sent = {peer: nbytes for each in counted for peer, nbytes in each.sent.items()}
            assert sent == {rank ^ 1: 2 * flat.nbytes // 2, rank ^ 2: 2 * flat.nbytes // 4}

    with levels("0,0,1,1"):
        if native:
            with force_native():
                exchange_once()
        else:
            exchange_once()


@in_ranks(4)
def test_nodes_are_found_and_wrong_settings_are_refused_on_all_ranks(
    rank: int,
) -> None:
    group = dist.group.WORLD
    assert group is not None

    def found(value: str) -> Any:
        with levels(value):
            return levels_of(group)

    # All ranks run in one namespace of one machine: nothing is between nodes.
    assert found("auto") is None
    assert found("flat") is found("0,0,0,0") is found("0,1,2,3") is None
    with mock.patch("crossover_ddp._engine.levels.machine", lambda: f"host {rank // 2}"):
        by_host = found("auto")
    assert by_host is not None
    assert [*by_host.inside] == [rank - rank % 2, rank - rank % 2 + 1]
    assert [*by_host.between] == [rank % 2, rank % 2 + 2]
    with heard() as messages:
        assert found("0,0,0,1") is None
    assert ["[3, 1]" in message for message in messages] == [True] * (rank == 0)
    for wrong in ("two", "0,0,1", "0,0,1,1,1", "0,,1,1"):
        message = error_of(lambda wrong=wrong: found(wrong))
        assert "0,0,1,1, for 4 ranks" in message
        assert wrong in message
    message = error_of(lambda: found("auto" if rank else "flat"))
    assert "['auto', 'flat']" in message


@in_ranks(5)
def test_a_group_of_some_ranks_has_levels_unless_a_backend_would_need_the_others(
    rank: int,
) -> None:
    """NCCL splits a new group from that of all ranks, of which the fifth does not take part."""
    group = dist.new_group(range(4))
    if rank == 4:
        return
    with levels("0,0,1,1,1"):
        assert isinstance(Networks(group)[CPU], TwoLevels)
        with force_native():
            assert isinstance(Networks(group)[CPU], Native)


@in_ranks(2)
def test_a_job_of_two_ranks_asks_no_other_rank(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch("crossover_ddp._engine.levels.gather_objects") as gather:
        assert levels_of(group) is None
    assert not gather.called
