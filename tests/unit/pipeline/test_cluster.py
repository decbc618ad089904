"""The rounds in which pairs of devices are measured."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover_ddp.errors import UnsupportedConfigurationError
from crossover_ddp.pipeline import Cluster
from crossover_ddp.pipeline.cluster import measuring_rounds


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_rounds_have_each_pair_once_and_share_no_device_and_no_card(nodes: Sequence[str]) -> None:
    rounds = measuring_rounds(nodes)
    pairs = list(itertools.combinations(range(len(nodes)), 2))
    assert sorted(itertools.chain(*rounds)) == pairs
    for each in rounds:
        devices = Counter(itertools.chain(*each))
        between = [pair for pair in each if nodes[pair[0]] != nodes[pair[1]]]
        cards = Counter(nodes[device] for device in itertools.chain(*between))
        assert {*devices.values(), *cards.values()} == {1}


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [
        ("a", 0),
        ("aa", 1),
        ("aaa", 3),
        ("aaaaaaaa", 7),
        ("abcdefgh", 7),
        # Two nodes of four: three rounds inside, and sixteen pairs one after the other.
        ("aaaabbbb", 3 + 16),
        # Four nodes of two: one round inside, and three rounds of nodes with four pairs each.
        ("abcdabcd", 1 + 3 * 4),
    ],
)
def test_there_are_as_few_rounds_as_possible(nodes: str, rounds: int) -> None:
    assert len(measuring_rounds(nodes)) == rounds


def test_a_cluster_is_measured_by_a_process_group() -> None:
    with pytest.raises(UnsupportedConfigurationError, match="expected a process group, got none"):
        Cluster.measure()
